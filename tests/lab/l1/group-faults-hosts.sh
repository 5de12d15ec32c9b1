# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Two machines with the patched KVM: a Debian guest moves between them in postcopy with
# fault_source=exit and sigbus, on small pages and on pages of 2 MiB.
# limit_s: 10800
# on_request
. ./lib.sh
. ./hosts.sh
. ./faults-hosts.sh

meet
patched='rmmod kvm_amd && rmmod kvm && insmod /lab/kvm-patch/kvm.ko && insmod /lab/kvm-patch/kvm-amd.ko'
both() { on a "$1" && on b "$1"; }
must patched_modules_load both "$patched"
must boots boots
moves exit exit exit
moves sigbus sigbus sigbus
check ends_well ends_well

must large_pages both 'echo 3 >/proc/sys/vm/drop_caches; echo 140 >/proc/sys/vm/nr_hugepages; [ $(cat /proc/sys/vm/nr_hugepages) = 140 ]'
MEMORY=size=256M,hugepages=on,hugepage_size=2M
must boots_on_large_pages boots
moves exit_on_large_pages exit exit
moves sigbus_on_large_pages sigbus sigbus
check ends_well_on_large_pages ends_well
on b ': >$T/done'
