# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# takes_turns
# EDK2's firmware boots a disk with a boot loader and partitions: GRUB, then Debian's kernel; reboots, moves and is
# restored.
# usual_kernel
# machine: -m 3G
# machine: -drive if=none,id=f0,file=@LAB@/firmware.img,format=raw,snapshot=on -device nvme,drive=f0,serial=boot
. ./lib.sh
# See tests/lab/modules/cr8-writes-exit.
insmod ./cr8-writes-exit.ko || failed module "$(dmesg | tail -n 3)"

wait_until 20 grep -qs '^boot' /sys/class/nvme/*/serial
BOOT_DISK=/dev/$(grep -ls '^boot' /sys/class/nvme/*/serial | cut -d/ -f5)n1

# serial_says TEXT COUNT: what firmware and boot loader have printed; the machine's resets append.
serial_says() { [ "$(tr -d '\r' <$T/com1 | grep -ac "$1")" -ge "$2" ]; }
starts() {
  start_vmm a "$@" --cpus boot=2 --memory size=512M,shared=on --disk path=$BOOT_DISK --rng src=/dev/urandom \
    --serial file=$T/com1 --console pty && open_console a
}
boots() {
  starts --firmware /lab/CLOUDHV.fd || return 1
  wait_until $WAIT_S serial_says GRUB-READY 1 || { tail -n 40 $T/com1; return 1; }
  wait_until $WAIT_S says a "GUEST-READY 2 vcpus"
}
check boots_by_way_of_grub boots
check firmware_is_in_charge guest a "ls /sys/firmware/efi/systab /sys/firmware/efi/runtime-map >/dev/null && dmesg | grep 'efi: EFI v'"
content() { guest $1 'head -c 4194304 /dev/urandom >/root/known; sha256sum </root/known >/root/known.sum; sync; echo 3 >/proc/sys/vm/drop_caches; [ "$(sha256sum </root/known)" = "$(cat /root/known.sum)" ]'; }
kept() { guest $1 'echo 3 >/proc/sys/vm/drop_caches; [ "$(sha256sum </root/known)" = "$(cat /root/known.sum)" ]'; }
check disk_keeps_content content a
# The guest's own reset starts the firmware anew.
restarts() {
  echo "sync; busybox reboot -f" >"$(cat $T/a.pty)" && wait_until $WAIT_S serial_says GRUB-READY 2 &&
    wait_until $WAIT_S says_times a "GUEST-READY 2 vcpus" 2
}
check guest_restarts_by_way_of_grub restarts
move() { moved $1 $2 $3 && kept $2; }
check moves move a b precopy
check moves_by_postcopy move b c postcopy
# Variables of the firmware are reached by its own code, which the kernel calls.
calls() { guest $1 'mkdir -p /sys/firmware/efi/efivars; busybox mount -t efivarfs none /sys/firmware/efi/efivars 2>/dev/null; ls /sys/firmware/efi/efivars | grep -q ^Boot || ls /sys/firmware/efi | grep -q runtime'; }
check firmware_is_called_where_it_moved calls c
restores() {
  mkdir -p $T/saved
  remote c pause && remote c snapshot file://$T/saved && remote c shutdown-vmm && ends c 60 || return 1
  start_vmm d && remote d restore source_url=file://$T/saved,resume=true && wait_until 60 state_is d Running && open_console d && kept d
}
check is_restored restores
check firmware_is_called_where_it_was_restored calls d
reboots() { guest d sync && remote d reboot && wait_until $WAIT_S says d "GUEST-READY 2 vcpus" && kept d; }
check reboots_there reboots
power_button() { remote d power-button && ends d 60; }
check ends power_button
