# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# The same on the patched KVM: fault_source=exit (the bitmap), and sigbus with the address from the exit.
# on_request
. ./lib.sh
. ./faults.sh

P=/lab/kvm-patch
patched() { rmmod kvm_amd && rmmod kvm && insmod $P/kvm.ko && insmod $P/kvm-amd.ko; }
check patched_modules_load patched
check boots boot a
check exit move a b exit exit
check works_after_exit works b
check sigbus_without_bpf move b c sigbus sigbus
check works_after_sigbus works c
check power_button power_off c
check filesystem_clean filesystem_clean
