# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the lab's group `packages-install` needs: a Debian with systemd, which is the machine, with our packages to
# install and a guest to run. Sourced by scripts/lab.

INSTALL_PACKAGES=systemd-sysv,dbus,udev
INSTALL_ROOT_MIB=1600
# What is of no use in an emulated machine, where it takes minutes; the results go to the console alone.
INSTALL_MASKED="apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service fstrim.timer serial-getty@ttyS0.service"

# make_install_root FILE: Debian, as an archive. Made once.
make_install_root() {
  [ ! -s "$1" ] || return 0
  [ "$(id -u)" = 0 ] || die "the group packages-install needs root: its disk has files of several users"
  say "making the Debian of the group packages-install"
  mmdebstrap --quiet --variant=minbase --include="$INSTALL_PACKAGES" --aptopt='APT::Install-Recommends "false";' \
    --dpkgopt='path-exclude=/usr/share/locale/*' \
    --customize-hook='rm -f "$1"/var/cache/apt/archives/*.deb "$1"/etc/dpkg/dpkg.cfg.d/99mmdebstrap "$1"/etc/resolv.conf' \
    --customize-hook="chroot \"\$1\" systemctl --quiet mask $INSTALL_MASKED" \
    --customize-hook='echo debian >"$1/etc/hostname"; : >"$1/etc/machine-id"' \
    bookworm "${1%.tar}.new.tar" http://deb.debian.org/debian
  mv "${1%.tar}.new.tar" "$1"
}

# make_packages RELEASE FOLDER: the packages, of the programs that the lab tests.
make_packages() {
  local program
  rm -rf "$1" "$2"
  mkdir -p "$1"
  (cd "$ROOT" && cargo build --release --quiet --locked --package package-texts)
  "$CARGO_TARGET_DIR/release/package-texts" "$1"
  for program in cloud-hypervisor ch-remote prezero-pool; do cp "$CARGO_TARGET_DIR/release/$program" "$1/"; done
  "$ROOT/scripts/lib/sbom" "$ROOT" >"$1/godwit.spdx.json"
  "$ROOT/scripts/lib/sbom" --licences "$ROOT" >"$1/crates-licences.txt"
  "$ROOT/scripts/package" --of "$1" "$2"
}

# build_extra_packages_install FILE: writes an initramfs that goes on with the disk of the group, and that disk.
build_extra_packages_install() {
  local place=$LAB/packages-install
  local tree=$place/tree root=$place/root
  mkdir -p "$place"
  make_install_root "$place/debian.tar"
  make_packages "$place/release" "$place/packages"
  rm -rf "$root" "$place/root.img"
  mkdir "$root"
  tar -C "$root" -xf "$place/debian.tar" --exclude='./dev/*'
  mkdir -p "$root/lab"
  cp "$place"/packages/godwit_*.deb "$place"/packages/prezero-pool_*.deb "$SRC/l1/lib.sh" "$SRC/l1/group-packages-install.sh" "$root/lab/"
  cp "$LAB/kernel/vmlinuz" "$root/lab/vmlinuz"
  cp "$LAB/l2-initramfs.gz" "$root/lab/initramfs.gz"
  cp --sparse=always "$LAB/root.img" "$root/lab/root.img"
  install -m 644 "$SRC/debian/lab.service" "$root/etc/systemd/system/lab.service"
  ln -s ../lab.service "$root/etc/systemd/system/multi-user.target.wants/lab.service"
  mke2fs -q -t ext4 -d "$root" "$place/root.img" "${INSTALL_ROOT_MIB}M"
  rm -rf "$root" "$tree"
  mkdir -p "$tree/lab"
  add_modules "$tree" "$MACHINE_KERNEL" kvm_amd tun nvme ext4
  install -m 755 "$SRC/debian/machine" "$tree/lab/machine-packages-install"
  pack "$tree" "$1"
}
