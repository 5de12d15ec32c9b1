# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the lab's group `snapshot` needs besides the usual machine: the debugger that reads core dumps of Linux. Sourced by
# scripts/lab.

# build_extra_snapshot FILE: writes an initramfs with it.
build_extra_snapshot() {
  local tree=$LAB/extra-snapshot
  rm -rf "$tree"
  mkdir -p "$tree/bin"
  add_program "$tree" "$(command -v crash)"
  pack "$tree" "$1"
}
