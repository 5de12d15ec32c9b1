# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# The patched KVM modules in place of the kernel's own, in one running machine: the handshake, the
# kernel's KVM selftests before and after, the selftest of userfault exits with every MMU, a Debian
# guest, what a fault costs, and back to the originals.
# limit_s: 3600
# on_request
. ./lib.sh

P=/lab/kvm-patch
chmod +x $P/fault-cost $P/selftests/*
echo 16 >/proc/sys/vm/nr_hugepages
# On a busy host the machine's one CPU stands still for longer than these allow; what really hangs is a
# test that does not end.
echo 0 >/proc/sys/kernel/soft_watchdog
echo 1 >/sys/module/rcupdate/parameters/rcu_cpu_stall_suppress

# use_modules DIR KVM_OPTIONS AMD_OPTIONS: replaces the loaded modules by those in DIR.
use_modules() {
  rmmod kvm_amd && rmmod kvm && insmod $1/kvm.ko $2 && insmod $1/kvm-amd.ko $3
}
handshake_is() {
  $P/fault-cost handshake
  [ $? = "$1" ]
}
# selftests FILE: what each of the kernel's selftests says, one line each.
selftests() {
  while read -r test arguments; do
    began=$(cut -d. -f1 /proc/uptime)
    timeout "${SELFTEST_S:-120}" $P/selftests/$test $arguments >$T/selftest.log 2>&1 </dev/null
    rc=$?
    # A busy host may have been all that was wrong.
    case $rc in 124 | 143) timeout 480 $P/selftests/$test $arguments >$T/selftest.log 2>&1 </dev/null; rc=$? ;; esac
    case $rc in
      0) result=ok ;;
      4) result=skipped ;;
      124 | 143) result=timeout ;;
      *) result=failed; [ "$1" = $T/after ] && tail -n 8 $T/selftest.log ;;
    esac
    echo "$test $result" >>$1
    echo "selftest $(basename $1): $test $result, $(($(cut -d. -f1 /proc/uptime) - began)) s"
  done <$P/selftests.list
}
userfault_test() {
  timeout 700 $P/selftests/userfault_test >$T/userfault.log 2>&1 </dev/null
  rc=$?
  cat $T/userfault.log
  [ $rc = 0 ] && [ "$(grep -c '^ok ' $T/userfault.log)" = 14 ]
}
kernel_is_quiet() { ! dmesg | grep -E "BUG:|WARNING: CPU|Oops|RIP:|hung task"; }

check stock_has_no_handshake handshake_is 3
# What SIGBUS mode meets without the patches, and the way round (docs/fault-exits.md).
stock_loses_a_refused_fault() { $P/fault-cost refused 20; [ $? = 4 ]; }
check stock_loses_a_refused_fault stock_loses_a_refused_fault
check stock_reports_it_when_halt_does_not_exit $P/fault-cost refused 60 nohlt
selftests $T/before

check modules_load use_modules $P
check handshake handshake_is 0
check refused_fault_is_reported $P/fault-cost refused 60
selftests $T/after
same_as_before() { cmp $T/before $T/after || { diff $T/before $T/after; return 1; }; }
check selftests_as_before same_as_before
some_pass() { [ "$(grep -c ' ok$' $T/after)" -ge 20 ]; }
check selftests_pass some_pass

check userfault_tdp_mmu userfault_test
check userfault_shadow_mmu_with_npt use_modules $P tdp_mmu=0
check userfault_shadow_mmu_with_npt_passes userfault_test
check userfault_shadow_paging use_modules $P "" npt=0
check userfault_shadow_paging_passes userfault_test
check back_to_tdp_mmu use_modules $P

# Which of the two costs less, on memory that the host has: scripts/bench fault-exit says how much. The fault
# alone is a mode's time less that of "none". A busy host only ever adds, so the best of several runs is taken.
best() {
  for run in 1 2 3 4 5; do $P/fault-cost "$@" allocated | cut -d' ' -f1; done | sort -n | head -n 1
}
costs="$(best none 1 12) $(best uffd 1 12) $(best exit 1 12)"
echo "COST: no fault, with uffd, with exit, us: $costs"
cheaper() { echo $costs | awk '{ratio = ($3 - $1) / ($2 - $1); print "exit over uffd: " ratio; exit !(ratio < 1)}'; }
check an_exit_costs_less_than_uffd cheaper

start_guest a 2 || failed start "the VMM did not start"
check debian_boots_on_patched_kvm wait_until $WAIT_S says a "GUEST-READY 2 vcpus"
power_button() { remote a power-button && wait_until 60 says a "POWER-BUTTON" && ends a 60; }
check power_button_ends_the_vmm power_button

check originals_come_back use_modules /modules
check stock_again handshake_is 3

# The same by the script that people use, with the originals in /lib/modules.
kvm_modules() { bash $P/scripts/kvm-modules "$@"; }
depmod
check script_installs kvm_modules install --out $P
refuses_while_in_use() {
  sleep 60 9</dev/kvm &
  holder=$!
  wait_until 10 grep -q -v '^0' /sys/module/kvm_amd/refcnt
  if kvm_modules load; then kill $holder; return 1; fi
  kill $holder
  wait $holder
  handshake_is 3
}
check script_refuses_while_kvm_is_in_use refuses_while_in_use
loads() { kvm_modules load && handshake_is 0 && [ "$(kvm_modules status | grep -c 'it is that one')" = 2 ]; }
check script_loads loads
restores() { kvm_modules restore && handshake_is 3 && [ ! -e "/lib/modules/$(uname -r)/updates" ]; }
check script_restores restores
check kernel_is_quiet kernel_is_quiet
