# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# takes_turns
# A Debian guest that gets more memory while it runs and returns it, by its own virtio-mem driver:
# alone, over a move and a reboot, and alongside a passed-through disk whose DMA goes into what was plugged in.
# limit_s: 1500
# machine: -drive if=none,id=p0,file=@LAB@/vfio.img,format=raw,snapshot=on -device nvme,drive=p0,serial=passed
. ./lib.sh
. ./passthrough.sh
# The guest reads and writes hundreds of MiB.
GUEST_S=300
# What the guest adds it keeps free of what cannot be moved away. Bounce buffers of 1 MiB, for 64.
CMDLINE="$CMDLINE memhp_default_state=online_movable swiotlb=512"
MEMORY=size=256M,shared=on,hotplug_method=virtio-mem,hotplug_size=512M
MIB=1048576

find_disk
fill_disk

# total NAME MIB: the guest's own kernel has about that much; it never counts what it booted with in full.
total() {
  guest $1 "awk '/^MemTotal/ { print int(\$2 / 1024) }' /proc/meminfo" || return 1
  echo "the guest has $(cat $T/out) MiB"
  [ "$(cat $T/out)" -gt $(($2 - 60)) ] && [ "$(cat $T/out)" -le $2 ]
}
# number NAME FIELD: of vm.info, in MiB.
number() { remote $1 info | tr ',{}' '\n\n\n' | sed -n "s/^ *\"$2\": *\([0-9]*\).*/\1/p" | head -n 1 | awk '{ print $1 / 1048576 }'; }
# usable NAME MIB: the host knows of that much.
usable() { [ "$(number $1 memory_actual_size)" = $2 ]; }
# blocks NAME: MiB that the host has for memory that was plugged in.
blocks() {
  for fd in /proc/"$(cat $T/$1.pid)"/fd/*; do
    case $(readlink "$fd") in
      *memfd:ram-__mem_*) stat -L -c '%b' "$fd" | awk '{ print int($1 * 512 / 1048576) }' && return ;;
    esac
  done
}
below() { [ "$(blocks $1)" -le $2 ]; }
# becomes NAME MIB: asks for a size and waits until the guest has it.
becomes() {
  remote $1 resize --memory ${2}M || return 1
  wait_until 120 usable $1 $2 || { echo "$(number $1 memory_actual_size) MiB of $2"; return 1; }
  wait_until 60 total $1 $2
}

start_guest a 1 || { failed start "the VMM did not start"; exit 1; }
check boots_with_what_it_booted_with wait_until $WAIT_S says a "GUEST-READY 1 vcpus"
guest a 'busybox mount -o remount,size=600M /tmp'
check knows_nothing_of_what_may_come total a 256
# In ACPI's table of what is near to what: else it has no bounce buffers for devices that do not reach it.
hears_where() { guest a 'dmesg | grep "SRAT: Node 0 PXM 0 .* hotplug" && dmesg | grep "software IO TLB: mapped"' || { guest a 'dmesg | grep -iE "srat|io tlb"'; cat $T/out; return 1; }; }
check hears_where_memory_may_come hears_where
check grows becomes a 576

# More than there was at boot, in one file.
fills() {
  guest $1 'head -c 314572800 /dev/urandom >/tmp/fill; sha256sum </tmp/fill' || return 1
  # A busy machine may have the kernel say something, too.
  grep ' -$' $T/out >$T/fill
  [ "$(blocks $1)" -ge 150 ] || { echo "the host has $(blocks $1) MiB for what was plugged in"; return 1; }
}
check uses_what_it_got fills a
same() { guest $1 'sha256sum </tmp/fill' && grep ' -$' $T/out | cmp - $T/fill; }
refused() { ! remote a resize --memory $1 2>$T/refused && grep -q "$2" $T/refused; }
check more_than_there_is_room_for_is_refused refused 1G "room for 536870912"
check less_than_at_boot_is_refused refused 128M "since the guest booted"
check half_a_block_is_refused refused 577M "blocks of 2097152"

check moves_with_what_it_got moved a b precopy
check has_the_same_memory_there usable b 576
check has_the_same_content_there same b
check grows_there_too becomes b 768
check moves_in_postcopy moved b p postcopy
check has_the_same_memory_after_postcopy usable p 768
check has_the_same_content_after_postcopy same p
restores() {
  mkdir -p $T/saved
  remote p pause && remote p snapshot file://$T/saved && remote p shutdown-vmm && ends p 60 || return 1
  start_vmm q && remote q restore source_url=file://$T/saved,resume=true && wait_until 60 state_is q Running && open_console q
}
check is_saved_and_restored restores
check has_the_same_memory_when_restored usable q 768
check has_the_same_content_when_restored same q
# boots_again NAME TIMES: its driver plugs in again what was asked for.
boots_again() {
  remote $1 reboot && wait_until $WAIT_S says_times $1 "GUEST-READY 1 vcpus" $2 && wait_until 120 usable $1 768 && wait_until 60 total $1 768 &&
    guest $1 'busybox mount -o remount,size=600M /tmp'
}
check gets_it_again_after_a_reboot boots_again q 1
filled_again() { fills q && same q; }
check uses_it_after_a_reboot filled_again

# What is plugged in and free goes; the driver brings what is not elsewhere.
shrinks() {
  guest q 'rm /tmp/fill; echo 3 >/proc/sys/vm/drop_caches' || return 1
  becomes q 256 && wait_until 30 below q 0 || { echo "the host has $(blocks q) MiB for what is gone"; return 1; }
}
check gives_all_of_it_up shrinks
check comes_back_as_zeros becomes q 512
fine() { guest q '! dmesg | grep -E "Oops|BUG: [^s]|Bad page"' || { cat $T/out; return 1; }; }
check the_guest_is_fine fine
off() { remote $1 shutdown-vmm && ends $1 60; }
check it_ends off q

# Alongside a passed-through disk: plugged in means pinned, unplugged means that no device reaches it.
check disk_is_bound give_to_vfio $disk
start_guest c 1 --device path=$disk,id=disk || { failed start_c "the VMM did not start"; exit 1; }
check boots_with_the_disk wait_until $WAIT_S says c "GUEST-READY 1 vcpus"
guest c 'busybox mount -o remount,size=600M /tmp'
pinned_is() { [ "$(number c pinned_bytes)" = $1 ]; }
check pins_what_there_is wait_until 60 pinned_is 256
grows_pinned() { becomes c 768 && pinned_is 768 && [ "$(blocks c)" = 512 ]; }
check what_is_plugged_in_is_pinned grows_pinned
# All of the disk's contents through page cache, most of which lies in what was plugged in.
dma() {
  guest c 'head -c 209715200 /dev/urandom >/tmp/want; dd if=/tmp/want of=/dev/nvme0n1 bs=1M seek=16 conv=fsync 2>/dev/null; echo 3 >/proc/sys/vm/drop_caches; dd if=/dev/nvme0n1 of=/tmp/have bs=1M skip=16 count=200 2>/dev/null; cmp /tmp/want /tmp/have' || { cat $T/out; return 1; }
  guest c 'grep -E "zone +Movable" -A 8 /proc/zoneinfo | grep -E "present|free "; rm /tmp/want /tmp/have; echo 3 >/proc/sys/vm/drop_caches'
  reads_what_is_there c
}
check dma_goes_there_and_comes_from_there dma
shrinks_pinned() { becomes c 384 && pinned_is 384 && wait_until 30 below c 128 || { echo "$(number c pinned_bytes) MiB are pinned, the host has $(blocks c)"; return 1; }; }
check what_is_unplugged_is_unpinned_and_gone shrinks_pinned
check dma_is_right_with_less writes_and_reads_back c
no_faults() { ! dmesg | grep -E 'handling fault|fault addr|fault reason'; }
again() { becomes c 768 && pinned_is 768 && dma; }
check it_comes_back_and_is_pinned_again again
pinned_after_reboot() { boots_again c 2 && pinned_is 768 && [ "$(blocks c)" = 512 ] && dma; }
check it_is_pinned_after_a_reboot pinned_after_reboot
check the_iommu_saw_no_fault no_faults
check that_one_ends_too off c
