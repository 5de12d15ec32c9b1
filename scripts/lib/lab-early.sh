# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the group guest needs besides the usual machine: the test guest that stays in 32-bit mode without page
# tables, in the place of firmware. Sourced by scripts/lab.

build_extra_guest() {
  local tree=$LAB/guest
  build_guest
  rm -rf "$tree"
  mkdir -p "$tree/lab"
  cp "$CARGO_TARGET_DIR/guest/release/early-guest" "$tree/lab/"
  pack "$tree" "$1"
}
