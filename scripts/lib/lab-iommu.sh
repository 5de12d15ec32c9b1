# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the lab's group `iommu` needs besides the usual machine: a guest with the driver of a virtio IOMMU. Sourced by
# scripts/lab.

# build_extra_iommu FILE: writes an initramfs with it.
build_extra_iommu() {
  local tree=$LAB/extra-iommu
  build_l2_initramfs l2-initramfs-iommu "$LAB/kernel" virtio_iommu
  rm -rf "$tree"
  mkdir -p "$tree/lab"
  cp "$LAB/l2-initramfs-iommu.gz" "$tree/lab/initramfs-iommu.gz"
  pack "$tree" "$1"
}
