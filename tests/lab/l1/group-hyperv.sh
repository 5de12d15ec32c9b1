# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# metal
# takes_turns
# limit_s: 1200
# A Debian guest that is shown Hyper-V: a program in it uses the clock, the pages and the timer that KVM has for Windows,
# while the guest moves in both modes and is saved and restored. It has one vCPU: once it has named itself to Hyper-V, KVM
# takes all of its hypercalls for Hyper-V's, and Linux wakes other vCPUs by its own.
. ./lib.sh
GUEST_INITRAMFS=/lab/initramfs-hyperv.gz
CPUS=,kvm_hyperv=on
# Its program's pages stay where they are.
CMDLINE="$CMDLINE sysctl.vm.compact_unevictable_allowed=0"

tap_up lab0
start_guest a 1 --net tap=lab0,mac=52:54:00:00:00:02 || { failed start "the VMM did not start"; exit 1; }
check boots wait_until $WAIT_S says a "GUEST-READY 1 vcpus"
begins() {
  nc -l -p 7002 </lab/hyperv-guest >/dev/null &
  guest a 'cat </dev/tcp/10.9.0.1/7002 >/tmp/hyperv-guest && chmod +x /tmp/hyperv-guest && mkdir /tmp/h && (/tmp/hyperv-guest /tmp/h >/dev/null 2>&1 & :)'
}
check its_program_begins begins
# rounds NAME: of the program, in $rounds; its messages in $messages.
rounds() {
  guest $1 'cat /tmp/h/state' || return 1
  set -- $(tail -n 1 $T/out)
  [ "$1" = ok ] || { cat $T/out; return 1; }
  rounds=$2 messages=$3
}
# more NAME: ten more rounds and two more messages than before.
more() { rounds $1 && [ $rounds -ge $((had_rounds + 10)) ] && [ $messages -ge $((had_messages + 2)) ]; }
# works NAME: everything that the program checks is right, and goes on.
works() {
  wait_until 60 rounds $1 || return 1
  had_rounds=$rounds had_messages=$messages
  wait_until 120 more $1 || return 1
  cat $T/out
}
check registers_pages_and_timer_work works a
interrupts() { guest $1 "awk '/^ *PIN:/ { print \$2 }' /proc/interrupts" && [ "$(cat $T/out)" -gt 5 ]; }
check the_timer_interrupts interrupts a
check moves_in_precopy moved a b precopy
check works_after_precopy works b
check moves_in_postcopy moved b c postcopy
check works_after_postcopy works c
restores() {
  mkdir -p $T/saved
  remote c pause && remote c snapshot file://$T/saved && kill -9 "$(cat $T/c.pid)" || return 1
  wait_until 30 ended "$(cat $T/c.pid)"
  start_vmm d && remote d restore source_url=file://$T/saved && open_console d && remote d resume && state_is d Running
}
check is_saved_and_restored restores
check works_when_restored works d
check interrupts_when_restored interrupts d
check the_guest_is_fine guest d '! dmesg | grep -E "Oops|BUG: [^s]|tsc.*unstable|stall"'
reboots() { remote d reboot && wait_until $WAIT_S says_times d "GUEST-READY" 1; }
check reboots reboots
off() { remote $1 shutdown-vmm && ends $1 60; }
check it_ends off d
