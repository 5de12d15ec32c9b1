# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the lab's group `pmem` needs besides the usual machine: a guest with drivers of persistent memory, and a file
# system for it. Sourced by scripts/lab.

# build_extra_pmem FILE: writes an initramfs with it.
build_extra_pmem() {
  local tree=$LAB/extra-pmem
  build_l2_initramfs l2-initramfs-pmem "$LAB/kernel" virtio_pmem nd_pmem
  rm -rf "$tree"
  mkdir -p "$tree/lab"
  cp "$LAB/l2-initramfs-pmem.gz" "$tree/lab/initramfs-pmem.gz"
  truncate -s 64M "$tree/lab/pmem.img"
  mke2fs -q -t ext4 -b 4096 "$tree/lab/pmem.img"
  pack "$tree" "$1"
}
