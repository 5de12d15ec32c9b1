# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# metal
# A Debian guest moved in postcopy on the kernel's own KVM, whose vCPUs bring their pages themselves
# (fault_source=sigbus with a BPF program) on request; not by themselves (auto), and not
# where the VMM has no right to load the program.
. ./lib.sh
. ./faults.sh

check boots boot a
check sigbus_by_bpf move a b sigbus sigbus
check works_after_sigbus works b
check stage2_is_filled_after_postcopy filled b
again sigbus_by_bpf b sigbus sigbus
check auto_takes_uffd move $last c auto uffd
says_why() { grep -q 'auto takes uffd.*fault_source=sigbus.*scripts/kvm-modules' $T/c.vmm.log; }
check auto_says_why says_why
check works_after_auto works c
# By its path: the shell would take its own of that name.
LAUNCH="/bin/setpriv --bounding-set=-bpf,-perfmon,-sys_admin --inh-caps=-bpf,-perfmon,-sys_admin"
RECEIVE=,prefault_stage2=off
check auto_without_rights_takes_uffd move c d auto uffd
again auto_without_rights_takes_uffd d auto uffd
sigbus_is_refused() {
  start_vmm r || return 1
  remote r receive-migration receiver_url=unix:$T/r.mig,memory_mode=postcopy,fault_source=sigbus >$T/refused 2>&1 && return 1
  cat $T/refused
  grep -q 'setcap cap_bpf,cap_perfmon' $T/refused
}
check sigbus_is_refused_without_rights sigbus_is_refused
LAUNCH= RECEIVE=
check works_without_rights works $last
not_filled() { ! grep -q stage2-prefault $T/$last.events; }
check stage2_is_not_filled_when_nobody_wants_it not_filled
exit_is_refused() {
  start_vmm e || return 1
  remote e receive-migration receiver_url=unix:$T/e.mig,memory_mode=postcopy,fault_source=exit >$T/refused 2>&1 && return 1
  cat $T/refused
  grep -q 'scripts/kvm-modules' $T/refused
}
check exit_is_refused_without_the_patches exit_is_refused
check power_button power_off $last
check filesystem_clean filesystem_clean
