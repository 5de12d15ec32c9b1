# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the lab's group `tpm` needs besides the usual machine: the process that implements a TPM. Sourced by scripts/lab.

# build_extra_tpm FILE: writes an initramfs with it.
build_extra_tpm() {
  local tree=$LAB/extra-tpm
  rm -rf "$tree"
  mkdir -p "$tree/bin"
  add_program "$tree" "$(PATH=$PATH:/usr/sbin command -v swtpm)"
  pack "$tree" "$1"
}
