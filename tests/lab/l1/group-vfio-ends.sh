# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# takes_turns
# limit_s: 2100
# A guest that reboots, restarts itself or is deleted, and a VMM that is ended, at moments at which a passed-through disk is not
# there yet: while it is withheld, while it is opened, and while its driver waits. What is asked waits for the call of the
# kernel that maps memory at most, and for none that opens the disk; nothing stays pinned, and the guest finds the disk in the
# end. What can be asked of a VM whose disk is opened forever.
# machine: -drive if=none,id=p0,file=@LAB@/vfio.img,format=raw,snapshot=on -device nvme,drive=p0,serial=passed
. ./lib.sh
. ./passthrough.sh

find_disk
fill_disk
check disk_is_bound give_to_vfio $disk
MEMORY=size=512M,shared=on
maps_slowly() { echo "/bin/busybox env LD_PRELOAD=/bin/slow-open.so SLOW_MAP_S=$1"; }
opens_slowly() { echo "/bin/busybox env LD_PRELOAD=/bin/slow-open.so SLOW_OPEN_S=$1"; }
# starts NAME LAUNCH PIN
starts() {
  LAUNCH=$2
  start_guest $1 1 --device path=$disk,id=disk,pin=$3
}
is_there() {
  wait_until 200 guest $1 "test -b /dev/nvme0n1" && reads_what_is_there $1 && writes_and_reads_back $1
}
# is_withheld NAME: the guest has booted without the disk, which is withheld.
is_withheld() {
  wait_until $WAIT_S says $1 "GUEST-READY" && info $1 '"withheld_ms": *[1-9]' && guest $1 "test ! -e /dev/nvme0n1"
}
# is_late NAME: the guest has booted, and its disk is not open yet.
is_late() { wait_until $WAIT_S says $1 "GUEST-READY" && ! happened $1 passthrough-device-opened && guest $1 "test ! -e /dev/nvme0n1"; }
# waits NAME: the guest's driver waits for memory.
waits() { asked=$(counter $1 bus_master_asked_monotonic_us) && [ "${asked:-0}" -gt 0 ] && ! happened $1 passthrough-pinned; }
# within SECONDS COMMAND...: it is answered in that time. A call of the kernel that maps memory cannot be ended.
within() {
  limit=$1
  asked=$(cut -d. -f1 /proc/uptime)
  shift
  "$@" || return 1
  took=$(($(cut -d. -f1 /proc/uptime) - asked))
  [ $took -lt $limit ] || { echo "$* took $took s"; return 1; }
}
is_free() { wait_until 60 pinned_is $1 0; }
off() { remote $1 power-button && ends $1 60; }
is_gone() { remote $1 info >$T/info 2>&1 && return 1; grep -q "no VM" $T/info || { cat $T/info; return 1; }; }
is_ended() { within 60 remote $1 shutdown-vmm && ends $1 90; }

# Withheld, while memory is mapped.
starts a "$(maps_slowly 30)" announce || failed start "the VMM did not start"
reboots() { is_withheld a && within 45 remote a reboot && wait_until $WAIT_S says_times a "GUEST-READY" 2 && is_there a; }
check rebooted_while_withheld reboots
check power_button_ends_it off a
starts b "$(maps_slowly 30)" announce || failed start_b "the VMM did not start"
restarts() {
  is_withheld b && echo "sync; busybox reboot -f" >"$(cat $T/b.pty)" && wait_until $WAIT_S says_times b "GUEST-READY" 2 && is_there b
}
check restarts_itself_while_withheld restarts
check power_button_ends_that off b
starts c "$(maps_slowly 30)" announce || failed start_c "the VMM did not start"
deleted() { is_withheld c && within 45 remote c delete && is_gone c && is_free c && is_ended c; }
check deleted_while_withheld deleted
starts d "$(maps_slowly 30)" announce || failed start_d "the VMM did not start"
ended_meanwhile() { is_withheld d && is_ended d; }
check ended_while_withheld ended_meanwhile

# Opened late. Neither a reboot nor the end of the VM waits for the device that is being opened; the next guest's is opened when
# that is over.
starts e "$(opens_slowly 40)" auto || failed start_e "the VMM did not start"
late() { is_late e && within 30 remote e reboot && wait_until $WAIT_S says_times e "GUEST-READY" 2 && is_there e; }
check rebooted_while_it_is_opened late
check power_button_ends_that_too off e
starts f "$(opens_slowly 600)" auto || failed start_f "the VMM did not start"
deleted_late() { is_late f && within 30 remote f delete && is_gone f && is_ended f; }
check deleted_while_it_is_opened deleted_late

# Opened forever: the VM lives, and says for what it does without.
starts i "$(opens_slowly 3000)" auto || failed start_i "the VMM did not start"
lives() { is_late i && state_is i Running && info i '"waits_for": *"Opening"' && info i '"id": *"disk"'; }
check lives_while_it_is_opened lives
pauses() { within 30 remote i pause && state_is i Paused && within 30 remote i resume && state_is i Running && guest i true; }
check paused_while_it_is_opened pauses
# refused TEXT COMMAND...: it is, with the text.
refused() {
  text=$1
  shift
  "$@" >$T/refused.log 2>&1 && return 1
  grep -q "$text" $T/refused.log || { cat $T/refused.log; return 1; }
}
opening="'disk': it is still being opened"
stays() {
  refused "$opening" remote i send-migration destination_url=unix:$T/none.mig && remote i pause &&
    refused "$opening" remote i snapshot file://$T/never && remote i resume
}
check neither_moved_nor_saved_while_it_is_opened stays
adds() {
  truncate -s 1M $T/later.img
  within 30 remote i add-disk path=$T/later.img,id=later && wait_until 60 guest i "grep -qx 2048 /sys/block/vd*/size" && info i '"waits_for": *"Opening"'
}
check given_a_disk_while_it_is_opened adds
removes() {
  within 30 remote i remove-device disk && wait_until 30 happened i device-removed && ! info i '"waits_for"' &&
    refused "the host is still opening it" remote i add-device path=$disk,id=disk
}
check relieved_of_it_while_it_is_opened removes
# told_to_end NAME: the VMM ends at once when it is told by a signal.
told_to_end() { kill -TERM $(cat $T/$1.pid) && ends $1 45; }
check ended_while_one_is_opened_for_nothing told_to_end i
starts j "$(opens_slowly 3000)" auto || failed start_j "the VMM did not start"
ended_late() { is_late j && told_to_end j; }
check ended_while_it_is_opened ended_late

# Its driver waits, with which the guest boots no further.
starts g "$(maps_slowly 18)" overlap || failed start_g "the VMM did not start"
deleted_waiting() { wait_until 60 waits g && within 30 remote g delete && is_gone g && is_free g && is_ended g; }
check deleted_while_its_driver_waits deleted_waiting
starts h "$(maps_slowly 18)" overlap || failed start_h "the VMM did not start"
rebooted_waiting() { wait_until 60 waits h && within 30 remote h reboot && wait_until $WAIT_S says h "GUEST-READY" && is_there h; }
check rebooted_while_its_driver_waits rebooted_waiting
check power_button_ends_the_last off h
no_faults() { ! dmesg | grep -E 'handling fault|fault addr|fault reason'; }
check the_iommu_saw_no_fault no_faults
