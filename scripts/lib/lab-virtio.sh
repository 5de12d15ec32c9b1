# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the lab's group `bench-virtio` needs besides the usual machine: QEMU, disks in memory, the kernel's vhost, a
# qcow2 image, the program that makes the load, and a guest with vsock. Sourced by scripts/lab.

# build_extra_bench_virtio FILE: writes an initramfs with it.
build_extra_bench_virtio() {
  local tree=$LAB/extra-bench-virtio
  need_packages qemu-utils
  build_l2_initramfs l2-initramfs-vsock "$LAB/kernel" vmw_vsock_virtio_transport
  rm -rf "$tree"
  mkdir -p "$tree/bin" "$tree/lab/more"
  add_qemu "$tree"
  add_program "$tree" "$(PATH=$PATH:/usr/sbin command -v mke2fs)"
  # In its place is busybox's, which knows one file system.
  mv "$tree/bin/mke2fs" "$tree/lab/"
  # Beside those of the machine, which are in its initramfs already.
  add_modules "$tree/lab/more" "$MACHINE_KERNEL" brd vhost_net vhost_vsock ext4
  gcc -O2 -Wall -pthread -static -s -o "$tree/lab/io-load" "$SRC/probes/io-load.c"
  qemu-img create -q -f qcow2 "$tree/lab/data.qcow2" 64M
  cp "$LAB/l2-initramfs-vsock.gz" "$tree/lab/initramfs-vsock.gz"
  pack "$tree" "$1"
}
