# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# takes_turns
# A Debian guest of two NUMA nodes: what it has found of each, vCPUs and memory that come later and land in theirs, and
# contents that are bound to one, over a move, a restore and a reboot.
. ./lib.sh
# What the guest adds it keeps free of what cannot be moved away. Bounce buffers of 1 MiB, for 64.
CMDLINE="$CMDLINE memhp_default_state=online_movable swiotlb=512"
# A package for each vCPU: vCPUs of different nodes share no cache.
CPUS=,max=4,topology=1:1:1:4
MEMORY=size=0,hotplug_method=virtio-mem
ZONES="id=m0,size=256M,shared=on,hotplug_size=256M id=m1,size=128M,shared=on,hotplug_size=256M"

# node NAME NUMBER CPULIST MIB DISTANCES: the guest has such a node; it counts less than it booted with in full.
node() {
  guest $1 "cd /sys/devices/system/node/node$2 && echo CPUS \$(cat cpulist); echo DISTANCE \$(cat distance); awk '/MemTotal/ { print \"MIB\", int(\$4 / 1024) }' meminfo" || { cat $T/out; return 1; }
  mib=$(sed -n 's/^MIB //p' $T/out)
  echo "node $2 has ${mib:-no} MiB"
  grep -q "^CPUS $3\$" $T/out && grep -q "^DISTANCE $5\$" $T/out && [ "$mib" -gt $(($4 - 90)) ] && [ "$mib" -le $4 ] || { cat $T/out; return 1; }
}
# nodes NAME CPULIST0 MIB0 CPULIST1 MIB1
nodes() { node $1 0 $2 $3 "10 17" && node $1 1 $4 $5 "17 10"; }
online() { guest $1 'for c in /sys/devices/system/cpu/cpu[0-9]*/online; do [ "$(cat $c)" = 1 ] || echo 1 >$c; done'; }
seen() { guest $1 "[ \$(ls -d /sys/devices/system/cpu/cpu[0-9]* | wc -l) = $2 ]"; }
# Not one message about tables that are not used, or processors that contradict them.
quiet() { guest $1 '! dmesg | grep -iE "numa: .*(not used|faking)|faking a node|SRAT.*(not|bad|invalid)|SLIT.*(not|bad|invalid)|llc-sibling|firmware bug|stall|BUG:|Oops"' || { cat $T/out; return 1; }; }
# vcpus NAME COUNT: the guest gets that many, and uses them.
vcpus() { remote $1 resize --cpus $2 && wait_until 30 seen $1 $2 && online $1; }
# total NAME NODE MIB: the node has more than that.
total() { guest $1 "awk '/MemTotal/ { exit \$4 / 1024 < $3 }' /sys/devices/system/node/node$2/meminfo"; }
grows() { remote $1 resize-zone --id $2 --size ${3}M; }

start_guest a 2 --memory-zone $ZONES --numa 'guest_numa_id=0,cpus=[0,2],memory_zones=[m0],distances=[1@17]' \
  'guest_numa_id=1,cpus=[1,3],memory_zones=[m1]' || failed start "the VMM did not start"
check boots wait_until $WAIT_S says a "GUEST-READY 2 vcpus"
check has_two_nodes nodes a 0 256 1 128
check nothing_is_logged quiet a
devices() { guest a '[ "$(cat /sys/bus/pci/devices/*/numa_node | sort -u)" = 0 ]' || { guest a 'cat /sys/bus/pci/devices/*/numa_node'; cat $T/out; return 1; }; }
check devices_are_in_node_0 devices

adds_vcpu() { vcpus a 3 && nodes a 0,2 256 1 128; }
check a_vcpu_lands_in_its_node adds_vcpu
# By 128 MiB, which is what Linux adds at a time; the other node stays as it is.
adds_memory() { grows a m1 256 && wait_until 60 total a 1 200 && nodes a 0,2 256 1 256; }
check memory_lands_in_its_node adds_memory
adds_memory_to_0() { grows a m0 384 && wait_until 60 total a 0 300 && nodes a 0,2 384 1 256; }
check memory_lands_in_the_other_node adds_memory_to_0

# A file in memory of node 1 alone.
binds() {
  guest a 'mkdir -p /tmp/n1 && busybox mount -t tmpfs -o mpol=bind:1,size=100M tmpfs /tmp/n1 && head -c 62914560 /dev/urandom >/tmp/n1/file; sha256sum </tmp/n1/file; for n in 0 1; do awk "/Shmem:/ { print \"SHMEM$n\", int(\$4 / 1024) }" /sys/devices/system/node/node$n/meminfo; done' || { cat $T/out; return 1; }
  grep ' -$' $T/out >$T/bound
  [ "$(sed -n 's/^SHMEM1 //p' $T/out)" -ge 60 ] && [ "$(sed -n 's/^SHMEM0 //p' $T/out)" -lt 60 ] || { cat $T/out; return 1; }
}
check contents_are_bound_to_a_node binds
same() { guest $1 'sha256sum </tmp/n1/file' && grep ' -$' $T/out | cmp - $T/bound; }

moves() { moved a b precopy && nodes b 0,2 384 1 256 && same b; }
check moves_with_its_nodes moves
adds_there() { vcpus b 4 && nodes b 0,2 384 1,3 256; }
check a_vcpu_lands_in_its_node_there adds_there
adds_memory_there() { grows b m1 384 && wait_until 60 total b 1 330 && nodes b 0,2 384 1,3 384; }
check memory_lands_in_its_node_there adds_memory_there
postcopy() { moved b d postcopy && nodes d 0,2 384 1,3 384 && same d; }
check moves_in_postcopy_with_its_nodes postcopy

saved() {
  mkdir -p $T/saved
  remote d pause && remote d snapshot file://$T/saved && remote d shutdown-vmm && ends d 60 || return 1
  start_vmm c && remote c restore source_url=file://$T/saved,resume=true && wait_until 60 state_is c Running &&
    open_console c && nodes c 0,2 384 1,3 384 && same c
}
check is_restored_with_its_nodes saved
reboots() {
  guest c sync && remote c reboot && wait_until $WAIT_S says c "GUEST-READY 4 vcpus" && wait_until 60 total c 1 330 && wait_until 60 total c 0 300 && nodes c 0,2 384 1,3 384
}
check reboots_with_its_nodes reboots
check nothing_is_logged_after_it quiet c
power_button() { remote c power-button && ends c 60; }
check ends power_button
check filesystem_clean filesystem_clean
