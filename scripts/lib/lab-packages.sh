# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the lab needs of the machine that it runs on. Sourced by scripts/lab and scripts/test.

# want_lab_packages: installs what is missing; where that cannot be it fails, with the reason in $lacking.
want_lab_packages() {
  local more=()
  # What mmdebstrap needs of an ordinary user.
  [ "$(id -u)" = 0 ] || more=(uidmap)
  # make and libelf1 are for the groups that build a module; mtools, dosfstools and fdisk for a disk with partitions;
  # swtpm for a TPM, crash for core dumps.
  want_packages mmdebstrap debian-archive-keyring e2fsprogs cpio kmod xz-utils gcc libc6-dev util-linux make libelf1 \
    mtools dosfstools fdisk swtpm crash "${more[@]}" &&
    want_qemu && want_apt
}

# need_busybox: puts the machines' shell, which is all in one file, into $LAB. It is not installed: Debian has
# another busybox that it would replace.
need_busybox() {
  local dir=$LAB/busybox
  [ ! -x "$dir/bin/busybox" ] || return 0
  rm -rf "$dir"
  mkdir -p "$dir/bin"
  if [ -x /bin/busybox ] && ! ldd /bin/busybox >/dev/null 2>&1; then
    cp /bin/busybox "$dir/bin/busybox.new"
  else
    apt_update_once
    say "fetching busybox-static"
    (cd "$dir" && apt-get download -q busybox-static >/dev/null && dpkg-deb -x busybox-static_*.deb root) ||
      die "cannot download busybox-static"
    # Debian 13 has it in usr.
    cp "$dir"/root/bin/busybox "$dir/bin/busybox.new" 2>/dev/null || cp "$dir"/root/usr/bin/busybox "$dir/bin/busybox.new"
  fi
  mv "$dir/bin/busybox.new" "$dir/bin/busybox"
}

# The machines' kernel is downloaded by apt, with or without root.
want_apt() {
  command -v apt-get >/dev/null && return 0
  lacking="the lab's kernel is one of Debian's packages, and there is no apt-get here"
  return 1
}
