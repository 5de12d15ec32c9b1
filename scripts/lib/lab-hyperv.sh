# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the lab's group `hyperv` needs besides the usual machine: a guest whose root can access registers, and a program
# that uses Hyper-V's. Sourced by scripts/lab.

# build_extra_hyperv FILE: writes an initramfs with it.
build_extra_hyperv() {
  local tree=$LAB/extra-hyperv
  build_l2_initramfs l2-initramfs-hyperv "$LAB/kernel" msr
  rm -rf "$tree"
  mkdir -p "$tree/lab"
  cp "$LAB/l2-initramfs-hyperv.gz" "$tree/lab/initramfs-hyperv.gz"
  gcc -O2 -Wall -Wextra -static -s -o "$tree/lab/hyperv-guest" "$SRC/probes/hyperv-guest.c"
  pack "$tree" "$1"
}
