# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# on_request
# Core scheduling on a machine with hyperthreads, on a kernel that has it (LAB_KERNEL=iommufd): threads of vCPUs have the
# cookies that `core_scheduling` asks for, also of one that is added later, and no other thread has them.
# cpus: 2,threads=2
. ./lib.sh

# start NAME CPUS: a VM whose kernel finds nothing to start, and stays.
start() {
  start_vmm $1 --kernel /lab/vmlinuz --cmdline "panic=0" --cpus "$2" --memory size=128M,shared=on --serial off --console off &&
    wait_until 60 state_is $1 Running
}
# threads NAME vcpu|others: ids.
threads() {
  for task in /proc/$(cat $T/$1.pid)/task/*; do
    case $2-$(cat $task/comm) in vcpu-vcpu*) basename $task ;; vcpu-* | others-vcpu* | others-kvm*) ;; *) basename $task ;; esac
  done
}
# cookies NAME vcpu|others: into $T/cookies.
cookies() { core-cookies $(threads $1 $2) >$T/cookies 2>&1 || { cat $T/cookies; return 1; }; }
# has NAME vcpu|others COUNT KINDS: so many threads, with so many different cookies.
has() {
  cookies $1 $2 && cat $T/cookies
  { [ $3 = any ] || [ $(wc -l <$T/cookies) = $3 ]; } && [ $(sort -u $T/cookies | wc -l) = $4 ]
}
none() { has $1 $2 $3 1 && [ "$(sort -u $T/cookies)" = 0 ]; }
some() { has $1 $2 $3 $4 && ! grep -q '^0$' $T/cookies; }

check has_hyperthreads test "$(cat /sys/devices/system/cpu/smt/active)" = 1
check starts start a boot=2,max=3
check vcpus_of_a_vm_share_one some a vcpu 2 1
sort -u $T/cookies >$T/first
check no_other_thread_has_it none a others any
grows() { remote a resize --cpus 3 && some a vcpu 3 1 && sort -u $T/cookies | cmp - $T/first; }
check one_that_is_added_has_it_too grows
check another_vm_starts start b boot=2
differs() { some b vcpu 2 1 && ! sort -u $T/cookies | cmp -s - $T/first; }
check another_vm_has_another differs
check starts_for_itself start c boot=2,max=3,core_scheduling=vcpu
check each_vcpu_has_its_own some c vcpu 2 2
grows_alone() { remote c resize --cpus 3 && some c vcpu 3 3; }
check so_has_one_that_is_added grows_alone
check starts_without start d boot=2,core_scheduling=off
check off_gives_none none d vcpu 2
for vm in a b c d; do
  remote $vm shutdown-vmm && ends $vm 60 || failed ends_$vm "the VMM did not end"
done
