# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# takes_turns
# limit_s: 1800
# EDK2's firmware boots a disk with a boot loader and partitions: GRUB, then Debian's kernel; reboots, moves and is
# restored. Then the same by the firmware that LAB_FIRMWARE names, if it does.
# usual_kernel
# machine: -m 3G
# machine: -drive if=none,id=f0,file=@LAB@/firmware.img,format=raw,snapshot=on -device nvme,drive=f0,serial=boot
. ./lib.sh
# See tests/lab/modules/cr8-writes-exit.
insmod ./cr8-writes-exit.ko || failed module "$(dmesg | tail -n 3)"

wait_until 20 grep -qs '^boot' /sys/class/nvme/*/serial
BOOT_DISK=/dev/$(grep -ls '^boot' /sys/class/nvme/*/serial | cut -d/ -f5)n1

# serial_says TEXT COUNT: what firmware and boot loader have printed; the machine's resets append. Firmware may print
# zeros around each character.
serial_says() { [ "$(tr -cd '\n -~' <$T/com1 | grep -c "$1")" -ge "$2" ]; }
# boots NAME FIRMWARE: a VMM that boots the disk.
boots() {
  rm -f $T/com1
  start_vmm $1 --firmware $2 --cpus boot=2 --memory size=512M,shared=on --disk path=$BOOT_DISK --rng src=/dev/urandom \
    --serial file=$T/com1 --console pty && open_console $1 || return 1
  wait_until $WAIT_S serial_says GRUB-READY 1 || { tr -cd '\n -~' <$T/com1 | tail -n 40; return 1; }
  wait_until $WAIT_S says $1 "GUEST-READY 2 vcpus"
}
check boots_by_way_of_grub boots a /lab/CLOUDHV.fd
# in_charge NAME: the guest has been told of EFI; whose it is, is in $T/vendor.
in_charge() { guest $1 "ls /sys/firmware/efi/systab /sys/firmware/efi/runtime-map >/dev/null && dmesg | grep 'efi: EFI v'" && sed 's/.* by //' $T/out >$T/vendor; }
firmware_is_in_charge() { in_charge a && grep -q 'EDK II' $T/vendor || { cat $T/out; return 1; }; }
check firmware_is_in_charge firmware_is_in_charge
content() { guest $1 'head -c 4194304 /dev/urandom >/root/known; sha256sum </root/known >/root/known.sum; sync; echo 3 >/proc/sys/vm/drop_caches; [ "$(sha256sum </root/known)" = "$(cat /root/known.sum)" ]'; }
kept() { guest $1 'echo 3 >/proc/sys/vm/drop_caches; [ "$(sha256sum </root/known)" = "$(cat /root/known.sum)" ]'; }
check disk_keeps_content content a
# The guest's own reset starts the firmware anew.
restarts() {
  echo "sync; busybox reboot -f" >"$(cat $T/$1.pty)" && wait_until $WAIT_S serial_says GRUB-READY 2 &&
    wait_until $WAIT_S says_times $1 "GUEST-READY 2 vcpus" 2
}
check guest_restarts_by_way_of_grub restarts a
move() { moved $1 $2 $3 && kept $2; }
check moves move a b precopy
check moves_by_postcopy move b c postcopy
# Variables of the firmware are reached by its own code, which the kernel calls.
calls() { guest $1 'mkdir -p /sys/firmware/efi/efivars; busybox mount -t efivarfs none /sys/firmware/efi/efivars 2>/dev/null; ls /sys/firmware/efi/efivars | grep -q ^Boot || ls /sys/firmware/efi | grep -q runtime'; }
check firmware_is_called_where_it_moved calls c
# restores FROM TO: by a snapshot.
restores() {
  rm -rf $T/saved && mkdir $T/saved
  remote $1 pause && remote $1 snapshot file://$T/saved && remote $1 shutdown-vmm && ends $1 60 || return 1
  start_vmm $2 && remote $2 restore source_url=file://$T/saved,resume=true && wait_until 60 state_is $2 Running && open_console $2 && kept $2
}
check is_restored restores c d
check firmware_is_called_where_it_was_restored calls d
reboots() { guest $1 sync && remote $1 reboot && wait_until $WAIT_S says $1 "GUEST-READY 2 vcpus" && kept $1; }
check reboots_there reboots d
power_button() { remote $1 power-button && ends $1 60; }
check ends power_button d

[ -e /lab/other-firmware ] || exit
check other_firmware_boots_by_way_of_grub boots e /lab/other-firmware
other_firmware_is_in_charge() { in_charge e && echo "other firmware: $(cat $T/vendor)"; }
check other_firmware_is_in_charge other_firmware_is_in_charge
check disk_of_other_firmware_keeps_content content e
check guest_of_other_firmware_restarts restarts e
check guest_of_other_firmware_moves move e f precopy
check guest_of_other_firmware_moves_by_postcopy move f g postcopy
check guest_of_other_firmware_is_restored restores g h
check guest_of_other_firmware_reboots reboots h
check guest_of_other_firmware_ends power_button h
