# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the lab's group `macvtap` needs besides the usual machine: modules, and the program that makes such interfaces,
# which busybox's cannot. Sourced by scripts/lab.

# build_extra_macvtap FILE: writes an initramfs with them.
build_extra_macvtap() {
  local tree=$LAB/extra-macvtap
  need_packages iproute2
  rm -rf "$tree"
  mkdir -p "$tree/bin" "$tree/lab"
  # Not among the modules that every machine loads.
  add_modules "$tree/lab" "$LAB/kernel" macvtap veth bridge
  add_program "$tree" "$(command -v ip)"
  # Where busybox has its own; by another name it would be another program.
  mv "$tree/bin/ip" "$tree/lab/ip"
  pack "$tree" "$1"
}
