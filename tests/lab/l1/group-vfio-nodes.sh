# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# takes_turns
# A machine with two nodes, and a guest whose memory is bound to both, with a passed-through disk: each zone's pages are in
# its node, small, transparent huge and hugetlb ones, all are pinned, and DMA reaches each. A device with a BAR of 8 MiB
# beside it is mapped by large pages.
# machine: -m 3G -object memory-backend-ram,id=r0,size=1536M -object memory-backend-ram,id=r1,size=1536M
# machine: -numa node,memdev=r0,cpus=0 -numa node,memdev=r1
# machine: -drive if=none,id=p0,file=@LAB@/vfio.img,format=raw,snapshot=on -device nvme,drive=p0,serial=passed
# machine: -object memory-backend-ram,id=bar,size=8M,share=on -device ivshmem-plain,memdev=bar
. ./lib.sh
. ./passthrough.sh

find_disk
fill_disk
mount -t debugfs debugfs /sys/kernel/debug || failed debugfs "$(cat /proc/filesystems)"
THP=/sys/kernel/mm/transparent_hugepage/shmem_enabled
NODES=/sys/devices/system/node
two_nodes() { [ -d $NODES/node0 ] && [ -d $NODES/node1 ] && ! [ -d $NODES/node2 ]; }
check the_machine_has_two_nodes two_nodes
check disk_is_bound give_to_vfio $disk
bar=$(dirname "$(grep -l 0x1110 $PCI/*/device | head -n 1)")
check the_other_device_is_bound give_to_vfio $bar

# pages NAME NODE OF: pages of the memory that is bound to NODE which are in node OF, in KiB.
pages() {
  grep "bind:$2 " /proc/$(cat $T/$1.pid)/numa_maps | while read -r line; do
    size=$(echo "$line" | sed -n 's/.*kernelpagesize_kB=\([0-9]*\).*/\1/p')
    count=$(echo "$line" | sed -n "s/.* N$3=\\([0-9]*\\).*/\\1/p")
    echo $((${count:-0} * size))
  done | awk '{ sum += $1 } END { print sum + 0 }'
}
# bound NAME: each zone of 192 MiB is in its node, whole.
bound() {
  for node in 0 1; do
    here=$(pages $1 $node $node) there=$(pages $1 $node $((1 - node)))
    [ "$here" -ge 196608 ] && [ "$there" = 0 ] || { echo "node $node: $here KiB there, $there KiB elsewhere"; grep bind: /proc/$(cat $T/$1.pid)/numa_maps; return 1; }
  done
}
# reads_on NAME NODE: a program of the guest whose memory is of that node reads the disk into it.
reads_on() {
  guest $1 "mkdir -p /tmp/cg; grep -q /tmp/cg /proc/mounts || busybox mount -t cgroup2 none /tmp/cg; echo +cpuset >/tmp/cg/cgroup.subtree_control; mkdir -p /tmp/cg/n$2; echo $2 >/tmp/cg/n$2/cpuset.mems; (echo 0 >/tmp/cg/n$2/cgroup.procs && cat /proc/self/cgroup && dd if=/dev/nvme0n1 bs=8M count=1 iflag=direct 2>/dev/null | sha256sum)" || { cat $T/out; return 1; }
  grep -q "/n$2$" $T/out && [ "$(tail -n 1 $T/out)" = "$(sha256sum <$T/known)" ] || { cat $T/out; return 1; }
}
by_dma() { reads_on $1 0 && reads_on $1 1 && writes_and_reads_back $1; }
# starts NAME OPTIONS ZONE_OPTIONS: with two zones.
starts() {
  MEMORY="size=0$2 --memory-zone id=m0,size=192M,host_numa_node=0$3 id=m1,size=192M,host_numa_node=1$3"
  start_guest $1 1 --numa 'guest_numa_id=0,cpus=[0],memory_zones=[m0]' 'guest_numa_id=1,memory_zones=[m1]' --device path=$disk,id=disk
}
off() { remote $1 power-button && ends $1 60; }
tries() {
  starts $1 "$2" $3 || { failed start_$1 "the VMM did not start"; return; }
  check boots_on_$1_pages wait_until $WAIT_S says $1 "GUEST-READY 1 vcpus"
  check all_$1_pages_are_pinned wait_until 60 pinned_is $1 393216
  check each_zone_of_$1_pages_is_in_its_node bound $1
  [ $1 != transparent ] || check they_are_huge huge $1
  check dma_reaches_both_nodes_of_$1_pages by_dma $1
  check ends_with_$1_pages off $1
}
huge() { [ "$(sed -n 's/^ShmemPmdMapped: *\([0-9]*\) kB/\1/p' /proc/$(cat $T/$1.pid)/smaps_rollup)" -ge 388000 ] || { cat /proc/$(cat $T/$1.pid)/smaps_rollup; return 1; }; }
tries small ,thp=off ,shared=on
echo advise >$THP
tries transparent "" ,shared=on
echo never >$THP
has_pages() {
  for node in 0 1; do echo 100 >$NODES/node$node/hugepages/hugepages-2048kB/nr_hugepages; done
  [ "$(cat $NODES/node*/hugepages/hugepages-2048kB/nr_hugepages | tr '\n' ' ')" = "100 100 " ]
}
check each_node_has_huge_pages has_pages
tries hugetlb "" ,shared=on,hugepages=on
for node in 0 1; do echo 0 >$NODES/node$node/hugepages/hugepages-2048kB/nr_hugepages; done

# KVM maps memory of small pages, and the BAR by pages of 2 MiB.
large() { cat /sys/kernel/debug/kvm/pages_2m; }
MEMORY=size=256M,shared=on,thp=off
start_guest b 1 --device path=$bar,id=bar || failed start_b "the VMM did not start"
check boots_with_the_large_bar wait_until $WAIT_S says b "GUEST-READY 1 vcpus"
touches() {
  before=$(large)
  guest b 'd=$(dirname "$(grep -l 0x1110 /sys/bus/pci/devices/*/device)"); echo 1 >$d/enable; a=$(sed -n 3p $d/resource | cut -d" " -f1); echo $a; for n in 0 1 2 3; do busybox devmem $((a + n * 2097152)) 32 $((n + 77)); done; for n in 0 1 2 3; do busybox devmem $((a + n * 2097152)); done' || { cat $T/out; return 1; }
  [ "$(tail -n 4 $T/out | tr '\n' ' ')" = "0x0000004D 0x0000004E 0x0000004F 0x00000050 " ] || { cat $T/out; return 1; }
  after=$(large)
  echo "$before and $after large pages"
  [ $((after - before)) -ge 4 ]
}
check the_bar_is_mapped_by_large_pages touches
check ends_with_the_large_bar off b
no_faults() { ! dmesg | grep -E 'handling fault|fault addr|fault reason'; }
check the_iommu_saw_no_fault no_faults
