# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the lab's group balloon-bench needs beside the usual machine: QEMU, to compare with. Sourced by
# scripts/lab.

# build_extra_balloon_bench FILE: writes an initramfs with QEMU and its firmware.
build_extra_balloon_bench() {
  local tree=$LAB/balloon-bench firmware file
  rm -rf "$tree"
  mkdir -p "$tree/bin/qemu"
  add_program "$tree" "$(command -v qemu-system-x86_64)"
  for firmware in qboot.rom kvmvapic.bin linuxboot_dma.bin; do
    for file in /usr/share/qemu/$firmware /usr/share/seabios/$firmware; do
      [ ! -e "$file" ] || { cp -L "$file" "$tree/bin/qemu/" && break; }
    done
  done
  pack "$tree" "$1"
}
