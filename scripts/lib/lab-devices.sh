# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the lab's group `devices` needs besides the usual machine: images of three formats and the program that looks
# into them, a client of Unix sockets, and a guest with drivers of vsock and the panic device. Sourced by scripts/lab.

# build_extra_devices FILE: writes an initramfs with it.
build_extra_devices() {
  local tree=$LAB/extra-devices
  need_packages qemu-utils socat
  build_l2_initramfs l2-initramfs-devices "$LAB/kernel" vmw_vsock_virtio_transport pvpanic-pci
  rm -rf "$tree"
  mkdir -p "$tree/bin" "$tree/lab"
  add_program "$tree" /usr/bin/qemu-img
  add_program "$tree" /usr/bin/socat
  qemu-img create -q -f qcow2 "$tree/lab/disk.qcow2" 16M
  qemu-img create -q -f vhdx "$tree/lab/disk.vhdx" 16M
  qemu-img create -q -f vpc -o subformat=fixed,force_size=on "$tree/lab/disk.vhd" 16M
  cp "$LAB/l2-initramfs-devices.gz" "$tree/lab/initramfs-devices.gz"
  pack "$tree" "$1"
}
