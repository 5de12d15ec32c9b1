# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the lab's group `iommu` needs besides the usual machine: a guest with the driver of a virtio IOMMU and VFIO, and
# the program that drives a disk in a process of the guest. Sourced by scripts/lab.

# build_extra_iommu FILE: writes an initramfs with them.
build_extra_iommu() {
  local tree=$LAB/extra-iommu
  build_l2_initramfs l2-initramfs-iommu "$LAB/kernel" virtio_iommu vfio_iommu_type1 vfio_pci
  rm -rf "$tree"
  mkdir -p "$tree/lab"
  cp "$LAB/l2-initramfs-iommu.gz" "$tree/lab/initramfs-iommu.gz"
  gcc -O2 -Wall -Wextra -static -s -o "$tree/lab/iommu-user" "$SRC/probes/iommu-user.c"
  pack "$tree" "$1"
}
