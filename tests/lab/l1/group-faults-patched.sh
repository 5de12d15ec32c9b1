# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# The same on the patched KVM: fault_source=exit (the bitmap) by name and by auto, and sigbus with the
# address from the exit.
# limit_s: 7200
# on_request
. ./lib.sh
. ./faults.sh

P=/lab/kvm-patch
patched() { rmmod kvm_amd && rmmod kvm && insmod $P/kvm.ko && insmod $P/kvm-amd.ko; }
check patched_modules_load patched
check boots boot a
check exit move a b exit exit
check works_after_exit works b
check stage2_is_filled_after_exit filled b
again exit b exit exit
check sigbus_without_bpf move $last c sigbus sigbus
check works_after_sigbus works c
check stage2_is_filled_after_sigbus filled c
again sigbus_without_bpf c sigbus sigbus
check auto_takes_exit move $last d auto exit
check works_after_auto works d
check power_button power_off d
check filesystem_clean filesystem_clean

# Memory of large host pages, which the guest sees in small ones while they arrive.
echo 256 >/proc/sys/vm/nr_hugepages
MEMORY=size=256M,hugepages=on,hugepage_size=2M
check boots_on_large_pages boot h
check exit_on_large_pages move h i exit exit
check works_after_exit_on_large_pages works i
again exit_on_large_pages i exit exit
check sigbus_on_large_pages move $last j sigbus sigbus
check works_after_sigbus_on_large_pages works j
again sigbus_on_large_pages j sigbus sigbus
check power_button_on_large_pages power_off $last
echo 0 >/proc/sys/vm/nr_hugepages

# Private memory has one mapping, which the bitmap does not mind.
MEMORY=size=256M
check boots_on_private_memory boot p
check exit_on_private_memory move p q auto exit
check works_after_exit_on_private_memory works q
check power_button_on_private_memory power_off q
check filesystem_clean_at_the_end filesystem_clean
