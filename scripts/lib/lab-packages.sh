# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the lab needs of the machine that it runs on. Sourced by scripts/lab and scripts/test.

# want_lab_packages: installs what is missing; where that cannot be it fails, with the reason in $lacking.
want_lab_packages() {
  want_packages mmdebstrap debian-archive-keyring e2fsprogs cpio busybox-static kmod xz-utils gcc libc6-dev util-linux &&
    want_qemu && want_apt
}

# The machines' kernel is downloaded by apt, with or without root.
want_apt() {
  command -v apt-get >/dev/null && return 0
  lacking="the lab's kernel is one of Debian's packages, and there is no apt-get here"
  return 1
}
