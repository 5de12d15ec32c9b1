# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# iommufd, on a kernel that has it (LAB_KERNEL=iommufd): Debian guests with every kind of memory, populated
# before, while and after they start, whose passed-through disk is read and written.
# on_request
# limit_s: 2400
# machine: -drive if=none,id=p0,file=@LAB@/vfio.img,format=raw,snapshot=on -device nvme,drive=p0,serial=passed
. ./lib.sh
. ./passthrough.sh

check the_kernel_has_iommufd test -c /dev/iommu
find_disk
fill_disk
check disk_is_bound give_to_vfio $disk
power_button() { remote $1 power-button && wait_until 60 says $1 "POWER-BUTTON" && ends $1 60; }
no_faults() { ! dmesg | grep -E 'handling fault|fault addr|fault reason|WARNING:.*(iommu|vfio)|BUG:'; }

# Mapped by its file, by its address (private), and in pieces that are huge pages.
# kind NAME MEMORY: a guest with that, whose disk is read and written.
kind() {
  MEMORY=$2
  dma_is_right() {
    start_guest $1 1 --device path=$disk,id=disk && wait_until $WAIT_S says $1 "GUEST-READY 1 vcpus" &&
      reads_what_is_there $1 && writes_and_reads_back $1 && pinned_is $1 262144 && power_button $1
  }
  check dma_with_$1 dma_is_right $1
  [ -d "/proc/$(cat $T/$1.pid)" ] && kill -9 "$(cat $T/$1.pid)"
  rm -f $T/$1.*
}
kind small size=256M,shared=on
kind small_background size=256M,shared=on,prefault=background
kind small_prefaulted size=256M,shared=on,prefault=on
kind private size=256M,shared=off
echo advise >/sys/kernel/mm/transparent_hugepage/shmem_enabled
kind huge size=256M,shared=on
kind huge_background size=256M,shared=on,prefault=background
echo never >/sys/kernel/mm/transparent_hugepage/shmem_enabled
echo 128 >/proc/sys/vm/nr_hugepages
HUGETLB=size=256M,shared=on,hugepages=on,hugepage_size=2M
kind hugetlb $HUGETLB
kind hugetlb_background $HUGETLB,prefault=background
kind hugetlb_prefaulted $HUGETLB,prefault=on
echo 0 >/proc/sys/vm/nr_hugepages
check the_iommu_saw_no_fault no_faults
