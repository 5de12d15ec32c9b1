# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# takes_turns
# A Debian guest with disks of the kernel's vDPA simulator, by its own virtio driver: what it writes is what it reads,
# also after a pause, a reboot, and where the disk was removed and added; a network that comes; then with memory pinned
# for the device.
# limit_s: 1800
# usual_kernel
. ./lib.sh
BYTES=4194304

# loads [OPTION]: the simulator, with its memory as the option says.
loads() {
  while read -r module; do
    grep -q "^$(basename $module .ko | tr - _) " /proc/modules || insmod /lab/modules/$module || return 1
  done </lab/modules/order
  grep -q '^vringh ' /proc/modules || insmod ./vringh.ko || return 1
  insmod ./vdpa_sim.ko $1 && insmod ./vdpa_sim_blk.ko && insmod ./vdpa_sim_net.ko
}
# node NAME: its character device.
node() { for node in /sys/bus/vdpa/devices/$1/vhost-vdpa-*; do echo /dev/${node##*/}; done; }
has_node() { test -c "$(node $1)"; }
makes() { vdpa dev add name $1 mgmtdev vdpasim_blk && wait_until 10 has_node $1; }
check the_host_has_devices eval 'loads && makes first && makes second'

MEMORY=size=256M,shared=on,hotplug_size=256M
start_guest a 1 --vdpa path=$(node first),id=first --balloon size=0,free_page_reporting=on \
  --landlock --landlock-rules path=/dev,access=rw || { failed start "the VMM did not start"; exit 1; }
check boots wait_until $WAIT_S says a "GUEST-READY 1 vcpus"
# Of 128 MiB, whatever the guest calls it.
found() { guest $1 "grep -l '^262144\$' /sys/block/vd*/size | wc -l" && [ "$(cat $T/out)" = "$2" ] || { cat $T/out; return 1; }; }
check the_guest_finds_it found a 1
disk='$(for size in /sys/block/vd*/size; do [ $(cat $size) = 262144 ] && set -- $size; done; basename $(dirname $1))'
# writes NAME SEED: random contents straight to the disk; their checksum is in $T/SEED.sum.
writes() {
  guest $1 "disk=$disk; head -c $BYTES /dev/urandom >/tmp/data; dd if=/tmp/data of=/dev/\$disk bs=64k oflag=direct conv=fsync 2>&1 || echo failed; sha256sum </tmp/data" || { cat $T/out; return 1; }
  ! grep -q failed $T/out && grep ' -$' $T/out >$T/$2.sum
}
# reads NAME SEED: the same comes back from the disk, past the guest's cache and through it.
reads() {
  guest $1 "disk=$disk; dd if=/dev/\$disk bs=64k count=$((BYTES / 65536)) iflag=direct 2>/dev/null | sha256sum" && grep ' -$' $T/out | cmp - $T/$2.sum &&
    guest $1 "disk=$disk; echo 3 >/proc/sys/vm/drop_caches; head -c $BYTES /dev/\$disk | sha256sum" && grep ' -$' $T/out | cmp - $T/$2.sum
}
check what_it_writes_it_reads eval 'writes a first && reads a first'
counts() { remote a counters | tr -d ' \n' | grep -o '"first":{[^}]*}' | grep -q '"interrupts":[1-9]'; }
check its_interrupts_pass_the_vmm counts
check nothing_is_reported grep -q 'free_page_reporting=on is not offered.*vDPA' $T/a.vmm.log

second_vm() { ! cloud-hypervisor --kernel /lab/vmlinuz --vdpa path=$(node first) >$T/other 2>&1 && grep -q "cannot open $(node first)" $T/other || { cat $T/other; return 1; }; }
check a_second_vm_is_refused second_vm
stays() { ! remote a send-migration destination_url=unix:$T/none 2>$T/refused && grep -q "'first' cannot be migrated or saved" $T/refused || { cat $T/refused; return 1; }; }
check a_migration_is_refused stays
unsaved() { remote a pause && ! remote a snapshot file://$T/saved 2>$T/refused; remote a resume; grep -q "'first' cannot be migrated or saved" $T/refused || { cat $T/refused; return 1; }; }
check a_snapshot_is_refused unsaved
fixed() { ! remote a resize --memory 384M 2>$T/refused && grep -q "mapped for the vDPA device 'first'" $T/refused || { cat $T/refused; return 1; }; }
check more_memory_is_refused fixed

# While it writes: what was under way is completed after the pause.
pauses() {
  guest a "disk=$disk; head -c $BYTES /dev/urandom >/tmp/data; (dd if=/tmp/data of=/dev/\$disk bs=4k oflag=direct 2>/dev/null; echo written >/tmp/over) & sha256sum </tmp/data" || return 1
  grep ' -$' $T/out >$T/paused.sum
  for times in 1 2 3; do remote a pause && remote a resume || return 1; done
  guest a "until [ -e /tmp/over ]; do sleep 0.1; done" && reads a paused
}
check it_goes_on_after_pauses pauses
reboots() { remote a reboot && wait_until $WAIT_S says_times a "GUEST-READY" 2 && found a 1 && reads a paused; }
check it_is_there_after_a_reboot reboots
check and_is_written_there eval 'writes a first && reads a first'

gone() { ! remote $1 info | grep -q "\"id\": *\"$2\""; }
goes() { remote $1 remove-device $2 && wait_until 60 gone $1 $2 && found $1 0; }
check it_goes goes a first
comes() { remote a add-vdpa path=$(node $1),id=$2 >$T/added && wait_until 60 found a 1; }
check it_comes_again_with_its_contents eval 'comes first again && reads a first'
check it_goes_again goes a again
check another_comes eval 'comes second other && writes a other && reads a other'
# What the simulator is sent it sends back, if it is for all.
MAC=02:00:00:00:00:07
net_comes() {
  vdpa dev add name net mgmtdev vdpasim_net mac $MAC && wait_until 10 has_node net || return 1
  ! remote a add-vdpa path=$(node net),id=net 2>$T/refused && grep -q "at least 2 queues" $T/refused || { cat $T/refused; return 1; }
  remote a add-vdpa path=$(node net),num_queues=3,id=net >$T/added && wait_until 60 guest a "grep -l $MAC /sys/class/net/*/address"
}
check a_network_comes net_comes
net='$(basename $(dirname $(grep -l '$MAC' /sys/class/net/*/address)))'
echoes() {
  guest a "net=$net; busybox ip link set \$net up; busybox ip addr add 10.8.0.1/24 dev \$net; busybox arping -c 3 -w 10 -I \$net 10.8.0.2; echo \$(cat /sys/class/net/\$net/statistics/tx_packets /sys/class/net/\$net/statistics/rx_packets)" || { cat $T/out; return 1; }
  tail -n 1 $T/out | { read -r sent got && [ "$sent" -ge 3 ] && [ "$got" -ge 3 ]; } || { cat $T/out; return 1; }
}
check what_it_sends_comes_back echoes
fine() { guest $1 '! dmesg | grep -E "Oops|BUG: [^s]|I/O error|stall"' || { cat $T/out; return 1; }; }
check the_guest_is_fine fine a
ends_it() { remote a power-button && ends a 60; }
check ends ends_it
check filesystem_clean filesystem_clean

# As hardware has it: memory is pinned, and may be private.
check the_host_pins eval 'vdpa dev del first && vdpa dev del second && vdpa dev del net && rmmod vdpa_sim_net vdpa_sim_blk vdpa_sim && loads use_va=0 && makes first'
MEMORY=size=256M
ulimit -l unlimited
start_guest b 1 --vdpa path=$(node first),id=first || { failed start "the VMM did not start"; exit 1; }
check boots_with_pinned_memory wait_until $WAIT_S says b "GUEST-READY 1 vcpus"
check what_it_writes_there_it_reads eval 'writes b first && reads b first'
pinned_kib() { sed -n 's/^VmPin:[^0-9]*\([0-9]*\) kB/\1/p' /proc/$(cat $T/b.pid)/status; }
all_pinned() { [ "$(pinned_kib)" -ge 262144 ] || { pinned_kib; return 1; }; }
check all_of_it_is_pinned all_pinned
none_pinned() { [ "$(pinned_kib)" = 0 ] || { pinned_kib; return 1; }; }
check none_of_it_after_the_device_has_gone eval 'goes b first && none_pinned'
check it_is_pinned_again_for_one_that_comes eval 'remote b add-vdpa path=$(node first),id=first >$T/added && wait_until 60 found b 1 && all_pinned && reads b first'
check none_of_it_after_a_shutdown eval 'remote b shutdown && none_pinned'
# Its driver has read the disk.
drives() { remote b counters | tr -d ' \n' | grep -o '"first":{[^}]*}' | grep -q '"interrupts":[1-9]'; }
check it_is_there_after_another_boot eval 'remote b boot && wait_until $WAIT_S drives && all_pinned'
ends_b() { remote b shutdown-vmm && ends b 60; }
check ends_too ends_b

# Without the right to pin it the guest has no such disk, and the VM goes on.
ulimit -l 8192
start_guest c 1 || { failed start "the VMM did not start"; exit 1; }
check boots_without_it wait_until $WAIT_S says c "GUEST-READY 1 vcpus"
refused() { remote c add-vdpa path=$(node first),id=first >$T/added && wait_until 60 grep -q 'RLIMIT_MEMLOCK' $T/c.vmm.log; }
check memory_that_cannot_be_pinned_is_named refused
alive() { guest c "echo alive" && grep -q alive $T/out; }
check the_guest_goes_on alive
stops() { remote c shutdown-vmm && ends c 60; }
check the_vm_ends stops
