# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# takes_turns
# Debian guests with every kind of memory, populated before, while and after they start, and from a pool, whose
# passed-through disk is read and written.
# limit_s: 2400
# kernel: hugepagesz=1G hugepages=1
# machine: -m 4G
# machine: -drive if=none,id=p0,file=@LAB@/vfio.img,format=raw,snapshot=on -device nvme,drive=p0,serial=passed
. ./lib.sh
. ./passthrough.sh

find_disk
fill_disk
check disk_is_bound give_to_vfio $disk
power_button() { remote $1 power-button && wait_until 60 says $1 "POWER-BUTTON" && ends $1 60; }
no_faults() { ! dmesg | grep -E 'handling fault|fault addr|fault reason|WARNING:.*(iommu|vfio)|BUG:'; }

# kind NAME MEMORY: a guest with that, whose disk is read and written.
kind() {
  MEMORY=$2
  mib=256
  case $2 in size=1G*) mib=1024 ;; esac
  dma_is_right() {
    start_guest $1 1 --device path=$disk,id=disk && wait_until $WAIT_S says $1 "GUEST-READY 1 vcpus" &&
      reads_what_is_there $1 && writes_and_reads_back $1 && pinned_is $1 $((mib * 1024)) || return 1
    case $2 in *prezeroed*) happened $1 prezeroed-taken || return 1 ;; esac
    power_button $1
  }
  check dma_with_$1 dma_is_right $1 $2
  [ -d "/proc/$(cat $T/$1.pid)" ] && kill -9 "$(cat $T/$1.pid)"
  rm -f $T/$1.*
}
# Mapped by its file, by its address (private), and in pieces that are huge pages.
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
kind gigantic size=1G,shared=on,hugepages=on,hugepage_size=1G

# From a pool, with both kinds of pages. What the first guest wrote is not what the second finds.
printf '%s\n' "socket = '$T/pool.sock'" "stats_socket = '$T/stats.sock'" "idle_only = false" "bandwidth = '0'" \
  "keep_free = '0'" "[[slots]]" "size = '256M'" "pages = '4K'" "count = 1" \
  "[[slots]]" "size = '256M'" "pages = '2M'" "count = 1" >$T/pool.toml
prezero-pool run --config $T/pool.toml >$T/pool.log 2>&1 &
ready_slots_are() { [ "$(prezero-pool --config $T/pool.toml stats 2>/dev/null | grep -c 'state="ready".* 1$')" = $1 ]; }
check pool_is_ready wait_until 120 ready_slots_are 2
kind small_of_the_pool size=256M,shared=on,prezeroed=$T/pool.sock
kind hugetlb_of_the_pool $HUGETLB,prezeroed=$T/pool.sock
check pool_has_its_memory_again wait_until 120 ready_slots_are 2
kind small_of_the_pool_again size=256M,shared=on,prezeroed=$T/pool.sock
check the_iommu_saw_no_fault no_faults
