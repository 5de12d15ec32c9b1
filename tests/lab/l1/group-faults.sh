# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# A Debian guest moved in postcopy on the kernel's own KVM, whose vCPUs bring their pages themselves
# (fault_source=sigbus with a BPF program), and again with the default.
. ./lib.sh
. ./faults.sh

check boots boot a
check sigbus_by_bpf move a b sigbus sigbus
check works_after_sigbus works b
check auto move b c auto uffd
check works_after_auto works c
exit_is_refused() {
  start_vmm d || return 1
  remote d receive-migration receiver_url=unix:$T/d.mig,memory_mode=postcopy,fault_source=exit >$T/refused 2>&1 && return 1
  cat $T/refused
  grep -q 'scripts/kvm-modules' $T/refused
}
check exit_is_refused_without_the_patches exit_is_refused
check power_button power_off c
check filesystem_clean filesystem_clean
