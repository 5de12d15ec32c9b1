# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# metal
# takes_turns
# A Debian guest that gets more memory while it runs as memory devices of ACPI: it adds them by itself, uses them, and
# keeps them with their contents over a move and a restore; it has them again after a reboot.
# limit_s: 1500
. ./lib.sh
GUEST_S=300
CMDLINE="$CMDLINE memhp_default_state=online_movable"
MEMORY=size=256M,shared=on,hotplug_size=1G

# total NAME MIB: the guest's own kernel has about that much; it never counts what it booted with in full.
total() {
  guest $1 "awk '/^MemTotal/ { print int(\$2 / 1024) }' /proc/meminfo" || return 1
  echo "the guest has $(cat $T/out) MiB"
  [ "$(cat $T/out)" -gt $(($2 - 60)) ] && [ "$(cat $T/out)" -le $2 ]
}
# number NAME FIELD: of vm.info, in MiB.
number() { remote $1 info | tr ',{}' '\n\n\n' | sed -n "s/^ *\"$2\": *\([0-9]*\).*/\1/p" | head -n 1 | awk '{ print $1 / 1048576 }'; }
# has NAME MIB: the host and the guest know of that much.
has() { [ "$(number $1 memory_actual_size)" = $2 ] && wait_until 60 total $1 $2; }
becomes() { remote $1 resize --memory ${2}M && has $1 $2; }
# refused NAME MIB WHY
refused() { ! remote $1 resize --memory ${2}M 2>$T/refused && grep -q "$3" $T/refused || { cat $T/refused; return 1; }; }
fine() { guest $1 '! dmesg | grep -E "Oops|BUG: [^s]|Bad page|acpi_memhotplug.*(fail|error)"' || { cat $T/out; return 1; }; }

start_guest a 1 || { failed start "the VMM did not start"; exit 1; }
check boots_with_what_it_booted_with wait_until $WAIT_S says a "GUEST-READY 1 vcpus"
check knows_nothing_of_what_may_come total a 256
# Buffers for devices that reach less, of which it has none.
unbuffered() { guest a '! dmesg | grep "software IO TLB: mapped"' || { cat $T/out; return 1; }; }
check sets_nothing_aside_for_it unbuffered
check gets_a_memory_device becomes a 384
check and_another_one becomes a 768
check half_a_block_is_refused refused a 832 "multiple of 134217728"
check more_than_there_is_room_for_is_refused refused a 1408 "room for"
stays() { before=$(remote a info | grep memory_actual_size) && remote a resize --memory 384M && [ "$(remote a info | grep memory_actual_size)" = "$before" ]; }
check less_than_there_is_changes_nothing stays

fills() {
  guest a 'busybox mount -o remount,size=600M /tmp && head -c 314572800 /dev/urandom >/tmp/fill; sha256sum </tmp/fill' || return 1
  grep ' -$' $T/out >$T/fill
}
check uses_what_it_got fills
same() { guest $1 'sha256sum </tmp/fill' && grep ' -$' $T/out | cmp - $T/fill; }

check moves_with_what_it_got moved a b precopy
check has_the_same_memory_there has b 768
check has_the_same_content_there same b
check gets_more_there becomes b 896
check moves_in_postcopy moved b d postcopy
check has_the_same_memory_after_postcopy has d 896
check has_the_same_content_after_postcopy same d

restores() {
  mkdir -p $T/saved
  remote d pause && remote d snapshot file://$T/saved && kill -9 "$(cat $T/d.pid)" || return 1
  wait_until 30 ended "$(cat $T/d.pid)"
  start_vmm c && remote c restore source_url=file://$T/saved && open_console c && remote c resume && state_is c Running
}
check is_saved_and_restored restores
check has_the_same_memory_when_restored has c 896
check has_the_same_content_when_restored same c
check gets_more_when_restored becomes c 1280
check the_guest_is_fine fine c

reboots() {
  remote c reboot && wait_until $WAIT_S says c "GUEST-READY 1 vcpus" && open_console c
}
check reboots reboots
check has_all_of_it_after_a_reboot has c 1280
check the_guest_is_fine_again fine c
off() { remote $1 shutdown-vmm && ends $1 60; }
check it_ends off c
