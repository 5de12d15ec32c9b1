# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the lab's group `core-scheduling` needs besides the usual machine: a program that reads cookies of threads. Sourced
# by scripts/lab.

# build_extra_core_scheduling FILE: writes an initramfs with it.
build_extra_core_scheduling() {
  local tree=$LAB/extra-core-scheduling
  rm -rf "$tree"
  mkdir -p "$tree/bin"
  gcc -O2 -Wall -Wextra -static -s -o "$tree/bin/core-cookies" "$SRC/probes/core-cookies.c"
  pack "$tree" "$1"
}
