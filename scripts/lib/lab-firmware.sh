# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the lab's group `firmware` needs besides the usual machine: EDK2's build for this kind of VM, and a disk with a
# boot loader and partitions. Sourced by scripts/lab.

FIRMWARE_PACKAGE=cloudhv-efi-x86-64
FIRMWARE_FILE=usr/share/$FIRMWARE_PACKAGE/CLOUDHV.fd
# Sectors of 512 bytes: where partitions begin, and the length of the one that firmware reads.
PARTITION_ALIGN=2048
ESP_SECTORS=131072

# fetch_firmware: the firmware, as $LAB/CLOUDHV.fd. Only Debian's suite sid has it; the signature on its archive is
# checked by mmdebstrap.
fetch_firmware() {
  local dir=$LAB/firmware
  [ ! -s "$LAB/CLOUDHV.fd" ] || return 0
  say "fetching $FIRMWARE_PACKAGE"
  rm -rf "$dir"
  packages_of_sid extract "$FIRMWARE_PACKAGE" "$dir" || die "mmdebstrap cannot fetch $FIRMWARE_PACKAGE"
  cp "$dir/$FIRMWARE_FILE" "$LAB/CLOUDHV.fd.new"
  mv "$LAB/CLOUDHV.fd.new" "$LAB/CLOUDHV.fd"
  rm -rf "$dir"
}

# fetch_grub: Debian's GRUB, all in one file, as $LAB/grub.efi. It reads EFI/debian/grub.cfg of its partition.
fetch_grub() {
  local dir=$LAB/grub
  [ ! -s "$LAB/grub.efi" ] || return 0
  apt_update_once
  say "fetching grub-efi-amd64-signed"
  rm -rf "$dir"
  mkdir -p "$dir"
  (cd "$dir" && apt-get download -q grub-efi-amd64-signed >/dev/null && dpkg-deb -x grub-efi-amd64-signed_*.deb root) ||
    die "cannot download grub-efi-amd64-signed"
  cp "$dir/root/usr/lib/grub/x86_64-efi-signed/grubx64.efi.signed" "$LAB/grub.efi"
  rm -rf "$dir"
}

# make_esp FILE TREE: a FAT file system with what is in TREE.
make_esp() {
  rm -f "$1"
  truncate -s $((ESP_SECTORS * 512)) "$1"
  mkfs.vfat -n ESP "$1" >/dev/null
  mcopy -s -i "$1" "$2"/* ::/
}

# make_disk FILE ESP ROOT: a disk with a GPT, the partition that firmware reads, and one for Linux.
make_disk() {
  local root_sectors root_start=$((PARTITION_ALIGN + ESP_SECTORS))
  root_sectors=$((($(stat -c %s "$3") + 511) / 512))
  rm -f "$1.new"
  # Room for the second copy of the table.
  truncate -s $(((root_start + root_sectors + PARTITION_ALIGN) * 512)) "$1.new"
  printf 'label: gpt\nstart=%s, size=%s, type=uefi\nstart=%s, size=%s, type=linux\n' \
    $PARTITION_ALIGN $ESP_SECTORS $root_start $root_sectors | sfdisk -q "$1.new"
  dd if="$2" of="$1.new" bs=512 seek=$PARTITION_ALIGN conv=notrunc,sparse status=none
  dd if="$3" of="$1.new" bs=1M seek=$((root_start * 512)) oflag=seek_bytes conv=notrunc,sparse status=none
  mv "$1.new" "$1"
}

# build_extra_firmware FILE: a disk with GRUB, the lab's kernel and initramfs and the lab's guest. LAB_FIRMWARE names
# firmware which boots it, too.
build_extra_firmware() {
  local place=$LAB/firmware-disk stamp
  local tree=$place/tree
  fetch_firmware
  fetch_grub
  rm -rf "$tree"
  mkdir -p "$tree/lab"
  cp "$LAB/CLOUDHV.fd" "$tree/lab/"
  if [ -n "${LAB_FIRMWARE:-}" ]; then
    cp "$LAB_FIRMWARE" "$tree/lab/other-firmware"
  else
    echo "SKIPPED lab group-firmware: other firmware than EDK2's: LAB_FIRMWARE names none"
  fi
  build_module cr8-writes-exit
  cp "$LAB/cr8-writes-exit/cr8-writes-exit.ko" "$tree/lab/"
  pack "$tree" "$1"
  stamp=$(cat "$ROOT/scripts/lib/lab-firmware.sh" "$SRC/l2/grub.cfg" "$LAB/l2.stamp" | sha256sum)
  [ "$(cat "$place/stamp" 2>/dev/null)" != "$stamp" ] || return 0
  say "making a disk with a boot loader"
  rm -rf "$place/esp"
  mkdir -p "$place/esp/EFI/BOOT" "$place/esp/EFI/debian"
  cp "$LAB/grub.efi" "$place/esp/EFI/BOOT/BOOTX64.EFI"
  cp "$SRC/l2/grub.cfg" "$place/esp/EFI/debian/grub.cfg"
  cp "$LAB/kernel/vmlinuz" "$place/esp/vmlinuz"
  cp "$LAB/l2-initramfs.gz" "$place/esp/initrd.gz"
  make_esp "$place/esp.img" "$place/esp"
  make_disk "$LAB/firmware.img" "$place/esp.img" "$LAB/root.img"
  rm -rf "$place/esp" "$place/esp.img"
  echo "$stamp" >"$place/stamp"
}
