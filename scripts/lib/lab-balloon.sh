# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the lab's groups that compare with QEMU need besides the usual machine. Sourced by
# scripts/lab.

# add_qemu TREE: QEMU and its firmware.
add_qemu() {
  local tree=$1 firmware file
  mkdir -p "$tree/bin/qemu"
  add_program "$tree" "$(command -v qemu-system-x86_64)"
  for firmware in qboot.rom kvmvapic.bin linuxboot_dma.bin; do
    for file in /usr/share/qemu/$firmware /usr/share/seabios/$firmware; do
      [ ! -e "$file" ] || { cp -L "$file" "$tree/bin/qemu/" && break; }
    done
  done
}
# build_extra_balloon_bench FILE: writes an initramfs with it.
build_extra_balloon_bench() {
  rm -rf "$LAB/balloon-bench"
  add_qemu "$LAB/balloon-bench"
  pack "$LAB/balloon-bench" "$1"
}
