# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the lab's groups `fs` and `fs-generic` need besides the usual machine: the process that serves a file system, and a guest with the
# driver of one. Sourced by scripts/lab.

# Of crates.io, where Debian has no package of it (Debian 12).
VIRTIOFSD_VERSION=1.14.0

# need_virtiofsd: puts it into $LAB/virtiofsd/bin. Debian's is not installed: it would bring more.
need_virtiofsd() {
  local dir=$LAB/virtiofsd
  [ ! -x "$dir/bin/virtiofsd" ] || return 0
  rm -rf "$dir"
  mkdir -p "$dir/bin"
  apt_update_once
  if [ -n "$(apt-cache show virtiofsd 2>/dev/null)" ]; then
    say "fetching virtiofsd"
    (cd "$dir" && apt-get download -q virtiofsd >/dev/null && dpkg-deb -x virtiofsd_*.deb root) || die "cannot download virtiofsd"
    cp "$dir/root/usr/libexec/virtiofsd" "$dir/bin/virtiofsd"
    return 0
  fi
  want_packages libcap-ng-dev libseccomp-dev || die "$lacking"
  need_rust
  say "building virtiofsd $VIRTIOFSD_VERSION"
  (cd "$ROOT" && cargo install --quiet --locked --version "=$VIRTIOFSD_VERSION" --root "$dir" --target-dir "$dir/target" virtiofsd) ||
    die "cannot build virtiofsd"
  rm -rf "$dir/target"
}

# build_extra_fs FILE, build_extra_fs_generic FILE: write an initramfs with both.
build_extra_fs_generic() { build_extra_fs "$1"; }
build_extra_fs() {
  local tree=$LAB/extra-fs
  need_virtiofsd
  build_l2_initramfs l2-initramfs-fs "$LAB/kernel" virtiofs
  rm -rf "$tree"
  mkdir -p "$tree/bin" "$tree/lab"
  add_program "$tree" "$LAB/virtiofsd/bin/virtiofsd"
  cp "$LAB/l2-initramfs-fs.gz" "$tree/lab/initramfs-fs.gz"
  pack "$tree" "$1"
}
