# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the lab's group `cloud-image` needs besides the usual machine: a Debian disk as clouds have them, a second disk
# that configures it, packages for it, and a client that logs in. Sourced by scripts/lab.

# What the image has besides the essential packages, and the package that its guest installs.
CLOUD_PACKAGES=linux-image-cloud-amd64,systemd-sysv,dbus,udev,cloud-init,cloud-guest-utils,openssh-server,sudo,iproute2,e2fsprogs
CLOUD_INSTALLS=vim
# Its file system, and what the disk has behind it, by which the guest enlarges it.
CLOUD_ROOT_MIB=1400
CLOUD_SPARE_MIB=200
# What is of no use in an emulated machine, where it takes minutes.
CLOUD_MASKED="apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service fstrim.timer"

# make_cloud_root DIR REPOSITORY: Debian in a directory, and the packages that its guest is to install.
make_cloud_root() {
  [ "$(id -u)" = 0 ] || die "the group cloud-image needs root: its disk has files of several users"
  rm -rf "$1" "$2"
  mkdir -p "$2"
  # The initramfs has the drivers of virtual machines alone. What is mounted goes with the command, also one that is killed:
  # the directory is deleted before the next.
  unshare --mount mmdebstrap --quiet --variant=minbase --include="$CLOUD_PACKAGES" --aptopt='APT::Install-Recommends "false";' \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --essential-hook='mkdir -p "$1/etc/initramfs-tools/conf.d" "$1/etc/initramfs-tools/hooks"' \
    --essential-hook='echo MODULES=list >"$1/etc/initramfs-tools/conf.d/lab"' \
    --essential-hook='printf "#!/bin/sh\n. /usr/share/initramfs-tools/hook-functions\nmanual_add_modules virtio_pci virtio_blk ext4\n" >"$1/etc/initramfs-tools/hooks/lab"' \
    --essential-hook='chmod 755 "$1/etc/initramfs-tools/hooks/lab"' \
    --customize-hook='rm -f "$1"/var/cache/apt/archives/*.deb' \
    --customize-hook="APT_CONFIG=\$MMDEBSTRAP_APT_CONFIG apt-get install -q -y --download-only $CLOUD_INSTALLS >/dev/null" \
    --customize-hook="cp \"\$1\"/var/cache/apt/archives/*.deb '$2'" \
    --customize-hook='rm -f "$1"/etc/dpkg/dpkg.cfg.d/99mmdebstrap "$1"/etc/ssh/ssh_host_* "$1"/etc/apt/sources.list' \
    --customize-hook="chroot \"\$1\" systemctl --quiet mask $CLOUD_MASKED" \
    --customize-hook='chroot "$1" systemctl --quiet enable systemd-networkd.service' \
    --customize-hook='echo "LABEL=cloud / ext4 defaults 0 1" >"$1/etc/fstab"' \
    bookworm "$1" || die "mmdebstrap cannot make the image"
  # Each VM gets its own at its first boot.
  : >"$1/etc/machine-id"
  # That of the machine where the image is made: the guest would wait for its name servers.
  rm -f "$1/etc/resolv.conf" "$1/etc/hostname"
  cp "$SRC/cloud/menu.cfg" "$1/boot/grub.cfg"
}

# make_index DIR: what apt reads of a directory with packages, whose files get plain names.
make_index() {
  local file
  for file in "$1"/*.deb; do mv -n "$file" "$1/$(dpkg-deb -f "$file" Package).deb"; done
  for file in "$1"/*.deb; do
    dpkg-deb -f "$file"
    printf 'Filename: ./%s\nSize: %s\nSHA256: %s\n\n' "${file##*/}" "$(stat -c %s "$file")" "$(sha256sum <"$file" | cut -d' ' -f1)"
  done >"$1/Packages"
}

# make_seed FILE KEY: the disk that configures the guest, as the data source NoCloud of cloud-init reads it.
make_seed() {
  local dir=$1.tree
  rm -rf "$dir" "$1"
  mkdir -p "$dir"
  sed "s|@KEY@|$(cat "$2")|" "$SRC/cloud/user-data" >"$dir/user-data"
  cp "$SRC/cloud/network-config" "$dir/"
  printf 'instance-id: lab-1\nlocal-hostname: cloud\n' >"$dir/meta-data"
  truncate -s 1M "$1"
  mkfs.vfat -n CIDATA "$1" >/dev/null
  mcopy -i "$1" "$dir/user-data" "$dir/meta-data" "$dir/network-config" ::
  rm -rf "$dir"
}

# make_cloud_disk PLACE: the image, $LAB/cloud.img, and the packages.
make_cloud_disk() {
  local place=$1 stamp
  stamp=$(cat "$ROOT"/scripts/lib/lab-{cloud,firmware}.sh "$SRC/cloud/"*.cfg "$LAB/grub.efi" | sha256sum)
  [ ! -s "$LAB/cloud.img" ] || [ "$(cat "$place/stamp" 2>/dev/null)" != "$stamp" ] || return 0
  say "making a Debian image with cloud-init"
  make_cloud_root "$place/root" "$place/packages"
  make_index "$place/packages"
  rm -rf "$place/root.img" "$place/esp" && mkdir -p "$place/esp/EFI/BOOT" "$place/esp/EFI/debian"
  mke2fs -q -t ext4 -L cloud -d "$place/root" "$place/root.img" "${CLOUD_ROOT_MIB}M"
  cp "$LAB/grub.efi" "$place/esp/EFI/BOOT/BOOTX64.EFI"
  cp "$SRC/cloud/loader.cfg" "$place/esp/EFI/debian/grub.cfg"
  make_esp "$place/esp.img" "$place/esp"
  make_disk "$LAB/cloud.img" "$place/esp.img" "$place/root.img"
  truncate -s "+${CLOUD_SPARE_MIB}M" "$LAB/cloud.img"
  rm -rf "$place/root" "$place/root.img" "$place/esp" "$place/esp.img"
  echo "$stamp" >"$place/stamp"
}

# build_extra_cloud_image FILE: writes an initramfs with the firmware, the disk that configures the guest, the packages,
# and ssh. LAB_FIRMWARE names another firmware than EDK2's.
build_extra_cloud_image() {
  local place=$LAB/cloud-image
  local tree=$place/tree
  need_packages openssh-client
  fetch_firmware
  fetch_grub
  mkdir -p "$place"
  make_cloud_disk "$place"
  rm -rf "$tree"
  mkdir -p "$tree/bin" "$tree/lab/packages/debian" "$tree/etc"
  cp "${LAB_FIRMWARE:-$LAB/CLOUDHV.fd}" "$tree/lab/firmware"
  rm -f "$place/key" "$place/key.pub"
  ssh-keygen -q -t ed25519 -N '' -C lab -f "$place/key"
  make_seed "$tree/lab/seed.img" "$place/key.pub"
  install -m 600 "$place/key" "$tree/lab/key"
  cp "$place"/packages/* "$tree/lab/packages/debian/"
  # ssh asks who its user is.
  echo 'root:x:0:0:root:/root:/bin/sh' >"$tree/etc/passwd"
  add_program "$tree" /usr/bin/ssh
  build_module cr8-writes-exit
  cp "$LAB/cr8-writes-exit/cr8-writes-exit.ko" "$tree/lab/"
  pack "$tree" "$1"
}
