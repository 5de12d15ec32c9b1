# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# metal
# takes_turns
# vCPUs that come and go under a Debian guest: added, used, ejected and added again; in between the guest reboots, moves
# in both modes, and is saved and restored.
. ./lib.sh

# cpus_are NAME COUNT: the guest has these vCPUs and each of them runs a program; vm.info says the same.
cpus_are() {
  guest $1 "for c in /sys/devices/system/cpu/cpu[0-9]*/online; do [ \"\$(cat \$c)\" = 1 ] || echo 1 >\$c; done; echo CPUS \$(nproc); for n in \$(seq 0 $(($2 - 1))); do taskset -c \$n sh -c 'i=0; while [ \$i -lt 2000 ]; do i=\$((i+1)); done' || echo stuck; done" || return 1
  grep -q "^CPUS $2\$" $T/out && ! grep -q stuck $T/out || { cat $T/out; return 1; }
  vm_has $1 $2
}
vm_has() { remote $1 info | tr -d ' \n' | grep -q "\"boot_vcpus\":$2,"; }
# Not one message of a clock that jumps, a processor that does not start, or a stall.
quiet() { guest $1 '! dmesg | grep -iE "tsc.*(unstable|warp)|clocksource.*unstable|did not come online|stall|soft lockup|BUG:|Oops|firmware bug"' || { cat $T/out; return 1; }; }
# seen NAME COUNT: the guest has found that many.
seen() { guest $1 "[ \$(ls -d /sys/devices/system/cpu/cpu[0-9]* | wc -l) = $2 ]"; }
resize() { remote $1 resize --cpus $2; }

CPUS=,max=4 start_guest a 1 || failed start "the VMM did not start"
check boots_with_one_of_four wait_until $WAIT_S says a "GUEST-READY 1 vcpus"
check has_one cpus_are a 1
adds() { resize a 3 && wait_until 30 seen a 3 && cpus_are a 3; }
check two_more_come adds
check nothing_is_logged quiet a
refuses() {
  ! resize a 5 2>$T/refused && grep -q "1 to 4 vCPUs" $T/refused || return 1
  ! resize a 0 2>$T/refused && grep -q "1 to 4 vCPUs" $T/refused && vm_has a 3
}
check impossible_numbers_are_refused refuses
removes() { resize a 2 && wait_until 60 vm_has a 2 && seen a 2 && cpus_are a 2; }
check one_goes removes
comes_again() { resize a 4 && wait_until 30 seen a 4 && cpus_are a 4; }
check it_comes_again_with_another comes_again


moves_with_four() { moved a b precopy && cpus_are b 4; }
check moves_with_four moves_with_four
goes_there() { resize b 1 && wait_until 120 vm_has b 1 && cpus_are b 1; }
check three_go_where_they_never_came goes_there
moves_by_postcopy() { moved b c postcopy && cpus_are c 1; }
check moves_by_postcopy_with_one moves_by_postcopy
resident() { remote c migration-progress | tr -d ' \n' | grep -q '"phase":"done"'; }
adds_there() { wait_until 60 resident && resize c 3 && wait_until 30 seen c 3 && cpus_are c 3; }
check two_come_there adds_there
check nothing_is_logged_there quiet c

# Added while the guest stands still: it hears of it when it runs, here after it was saved and restored.
saved() {
  remote c pause && resize c 4 && remote c snapshot file://$T/saved && remote c shutdown-vmm && ends c 60 || return 1
  start_vmm d && remote d restore source_url=file://$T/saved,resume=true && wait_until 60 state_is d Running &&
    open_console d && wait_until 60 seen d 4 && cpus_are d 4
}
mkdir -p $T/saved
check one_that_came_in_a_pause_is_restored saved
reboots() {
  resize d 2 && wait_until 60 vm_has d 2 && guest d sync && remote d reboot && wait_until $WAIT_S says d "GUEST-READY 2 vcpus" && cpus_are d 2
}
check two_are_left_after_a_reboot reboots
adds_after_reboot() { resize d 4 && wait_until 30 seen d 4 && cpus_are d 4 && quiet d; }
check two_come_after_it adds_after_reboot
power_button() { remote d power-button && ends d 60; }
check ends power_button
check filesystem_clean filesystem_clean
