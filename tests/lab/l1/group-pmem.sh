# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# metal
# takes_turns
# A Debian guest with persistent memory, by its own virtio-pmem driver: a file system on it, writes that are in the
# file of the host and writes that are discarded, a reboot, hot-plug, moves and a restore.
# limit_s: 1200
. ./lib.sh
GUEST_INITRAMFS=/lab/initramfs-pmem.gz
MIB=1048576

cp /lab/pmem.img $T/kept.img
cp /lab/pmem.img $T/lost.img
truncate -s 4M $T/hot.img

start_guest a 1 --pmem file=$T/kept.img,id=kept file=$T/lost.img,discard_writes=on,id=lost ||
  { failed start "the VMM did not start"; exit 1; }
check boots wait_until $WAIT_S says a "GUEST-READY 1 vcpus"
has() { guest $1 "test \$(cat /sys/block/$2/size) = $(($3 * 2048))" || { guest $1 "ls -l /sys/block; dmesg | grep -iE 'pmem|nd_|virtio'"; cat $T/out; return 1; }; }
check the_guest_finds_both eval 'has a pmem0 64 && has a pmem1 64'
# mount NAME DEVICE: on /mnt-DEVICE, with direct access if this kernel has it.
mounts() {
  guest $1 "mkdir -p /tmp/$2; busybox mount -t ext4 -o dax /dev/$2 /tmp/$2 || busybox mount -t ext4 /dev/$2 /tmp/$2; grep $2 /proc/mounts" || { cat $T/out; return 1; }
  cat $T/out
}
check file_systems_are_mounted eval 'mounts a pmem0 && mounts a pmem1'
writes() {
  guest $1 "head -c 4194304 /dev/urandom >/tmp/$2/data && sync /tmp/$2/data && sha256sum </tmp/$2/data" || { cat $T/out; return 1; }
  grep ' -$' $T/out >$T/$2.sum
}
same() { guest $1 "echo 3 >/proc/sys/vm/drop_caches; sha256sum </tmp/$2/data" && grep ' -$' $T/out | cmp - $T/$2.sum; }
check writes_are_read_back eval 'writes a pmem0 && writes a pmem1 && same a pmem0 && same a pmem1'
# What was written lies in the file as a whole; the file system's blocks are found by the words of a marker.
marks() { guest $1 "printf 'MARKER-%s\n' of-$2 >/tmp/$2/marker && sync /tmp/$2/marker"; }
in_file() { grep -aq "MARKER-of-$2" $T/$1.img; }
check what_was_flushed_is_in_the_file eval 'marks a pmem0 && in_file kept pmem0'
check what_is_discarded_is_not eval 'marks a pmem1 && ! in_file lost pmem1 && cmp $T/lost.img /lab/pmem.img'

stays_here() { ! remote a send-migration destination_url=unix:$T/none 2>$T/refused && grep -q "'lost' cannot be migrated" $T/refused; }
check discarded_writes_keep_it_here stays_here
second() { ! cloud-hypervisor --kernel /lab/vmlinuz --pmem file=$T/kept.img >$T/second 2>&1 && grep -q "in use" $T/second; }
check a_second_vm_is_refused second

goes() { remote $1 remove-device $2 && wait_until 60 gone $1 $2; }
gone() { ! remote $1 info | grep -q "\"id\": *\"$2\""; }
unplugs() { guest a "busybox umount /tmp/pmem1" && goes a lost && guest a "test ! -e /dev/pmem1"; }
check one_goes unplugs

address() { remote $1 info | tr ',{}' '\n\n\n' | sed -n 's/^ *"gpa": *\([0-9]*\).*/\1/p' | head -n 1; }
address a >$T/address
reboots() {
  guest a "busybox umount /tmp/pmem0; sync" && remote a reboot && wait_until $WAIT_S says_times a "GUEST-READY" 2 &&
    mounts a pmem0 && same a pmem0 && address a | cmp - $T/address
}
check it_is_there_after_a_reboot reboots

comes() {
  remote $1 add-pmem file=$T/hot.img,id=hot >$T/added && wait_until 60 guest $1 "test -b /dev/pmem1" && has $1 pmem1 4 &&
    guest $1 "printf 'MARKER-of-hot' | dd of=/dev/pmem1 bs=512 seek=8 conv=sync,fsync 2>/dev/null" && in_file hot hot
}
check one_is_plugged comes a
fine() { guest $1 '! dmesg | grep -E "Oops|BUG: [^s]|I/O error"' || { cat $T/out; return 1; }; }
check the_guest_is_fine fine a

moves() { moved a b precopy && same b pmem0 && guest b "dd if=/dev/pmem1 bs=512 skip=8 count=1 2>/dev/null | grep -a MARKER-of-hot"; }
check both_are_there_after_a_move moves
after() { address b | cmp - $T/address && writes b pmem0 && same b pmem0 && fine b; }
check it_is_written_there after
check one_that_came_elsewhere_goes goes b hot
again() { sed -i s/MARKER/MURKER/ $T/hot.img; comes b; }
check and_comes_again again
postcopy() { moved b c postcopy && same c pmem0 && in_file hot hot && address c | cmp - $T/address && fine c; }
check both_are_there_after_a_move_in_postcopy postcopy
restores() {
  mkdir -p $T/saved
  remote c pause && remote c snapshot file://$T/saved && remote c shutdown-vmm && ends c 60 || return 1
  start_vmm d && remote d restore source_url=file://$T/saved,resume=true && wait_until 60 state_is d Running && open_console d &&
    same d pmem0 && writes d pmem0 && same d pmem0 && fine d
}
check both_are_there_after_a_restore restores
power_button() { remote d power-button && ends d 60; }
check ends power_button
clean() { e2fsck -fn $T/kept.img >$T/fsck 2>&1 || { e2fsck -fy $T/kept.img; cat $T/fsck; return 1; }; }
check filesystem_clean filesystem_clean
check the_one_in_the_file_is_whole clean
