# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the group hostile needs besides the usual machine: the test guest that attacks its devices, and the program
# that compares its memory. Sourced by scripts/lab.

build_extra_hostile() {
  local tree=$LAB/hostile
  build_guest
  (cd "$ROOT" && cargo build --release --quiet --locked -p guest-reader)
  rm -rf "$tree"
  mkdir -p "$tree/lab" "$tree/bin"
  cp "$CARGO_TARGET_DIR/guest/release/test-guest" "$tree/lab/"
  add_program "$tree" "$CARGO_TARGET_DIR/release/guest-reader"
  pack "$tree" "$1"
}
