# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Memory of the pool that is mapped for a device before a VM asks (LAB_KERNEL=iommufd): a Debian guest that
# starts on it, killed VMMs, descriptors that another process kept, other users, sizes that do not fit, a second
# device, two zones.
# on_request
# limit_s: 2400
# machine: -drive if=none,id=p0,file=@LAB@/vfio.img,format=raw,snapshot=on -device nvme,drive=p0,serial=passed
# machine: -drive if=none,id=p1,file=@LAB@/vfio.img,format=raw,snapshot=on -device nvme,drive=p1,serial=second
# Limits only, for a host that has other things to do.
WAIT_S=600 GUEST_S=300
. ./lib.sh
. ./passthrough.sh

check the_kernel_has_iommufd test -c /dev/iommu
# Later memory is in too many pieces.
echo 128 >/proc/sys/vm/nr_hugepages
find_disk
fill_disk
second=$PCI/$(basename "$(readlink /sys/class/nvme/$(grep -ls '^second' /sys/class/nvme/*/serial | cut -d/ -f5)/device)")
dd if=$T/known of=/dev/$(grep -ls '^second' /sys/class/nvme/*/serial | cut -d/ -f5)n1 bs=1M conv=fsync 2>/dev/null
check disk_is_bound give_to_vfio $disk
check second_disk_is_bound give_to_vfio $second
no_faults() { ! dmesg | grep -E 'handling fault|fault addr|fault reason|WARNING:.*(iommu|vfio)|BUG:'; }

printf '%s\n' "socket = '$T/pool.sock'" "socket_mode = '0666'" "stats_socket = '$T/stats.sock'" "idle_only = false" \
  "bandwidth = '0'" "keep_free = '0'" "[[device_slots]]" "device = '$(basename $disk)'" "size = '256M'" "pages = '4K'" \
  "users = [1000]" >$T/pool.toml
start_pool() {
  prezero-pool run --config $T/pool.toml -v >>$T/pool.vmm.log 2>&1 &
  pool=$!
  echo $pool >$T/pool.pid
}
start_pool
stats() { prezero-pool --config $T/pool.toml stats 2>/dev/null; }
slot_is() { stats | grep "^prezero_pool_device_slots" | grep -q "state=\"$1\"} 1$"; }
check slot_becomes_ready wait_until $WAIT_S slot_is ready
check the_pool_has_it_pinned pinned_is pool 262144

# Without a right to the device nothing is to be had, and nothing is disturbed.
chmod 666 /dev/kvm
refuses_other_users() {
  /bin/setpriv --reuid 1001 --clear-groups cloud-hypervisor $PASS_BY --kernel /lab/vmlinuz \
    --memory size=256M,shared=on,prezeroed=$T/pool.sock --device path=$disk >$T/refused.log 2>&1 && return 1
  cat $T/refused.log
  grep -q "user 1001 may have no memory" $T/refused.log && slot_is ready
}
check refuses_a_user_who_is_not_named refuses_other_users

MEMORY=size=256M,shared=on,prezeroed=$T/pool.sock
# takes_slot NAME ARG...
takes_slot() {
  taker=$1
  shift
  start_guest $taker 1 -v --device path=$disk,id=disk "$@" || return 1
  happened $taker prepinned-taken || { cat $T/$taker.vmm.log; return 1; }
  info $taker '"state": *"Pinned"' && info $taker '"pinned_bytes": *268435456' || { cat $T/info; return 1; }
  echo "LAB attach: $(grep -o 'reaches all memory after [0-9]* us' $T/$taker.vmm.log)"
  pinned_is $taker 0 && pinned_is pool 262144 && slot_is lent
}
on_slot() { takes_slot "$@" && wait_until $WAIT_S says $1 "GUEST-READY 1 vcpus"; }
# That the device takes long to reset keeps the guest from nothing but the device.
LAUNCH="/bin/busybox env LD_PRELOAD=/bin/slow-open.so SLOW_RESET_S=5"
check guest_starts_on_the_slot on_slot a
LAUNCH=
check resets_the_device_while_the_guest_runs opened_meanwhile a
check reads_by_dma reads_what_is_there a
check writes_by_dma writes_and_reads_back a

# A VMM that asks while the slot is lent does as without a pool.
killed() { kill -9 "$(cat $T/$1.pid)"; wait_until 30 test -s $T/$1.exit; }
# bytes_in_pool: how many bytes of the pool's memory are not zero.
bytes_in_pool() {
  sum=none
  for fd in /proc/$pool/fd/*; do
    case $(readlink $fd) in /memfd:ram-pool*) sum=$((${sum#none} + $(tr -d '\000' <$fd | wc -c))) ;; esac
  done
  echo $sum
}
fills_its_memory() {
  guest a "head -c 67108864 /dev/zero | tr '\000' Q >/tmp/q; wc -c </tmp/q" && [ "$(head -n 1 $T/out)" = 67108864 ] &&
    [ "$(bytes_in_pool)" -gt 67108864 ]
}
check guest_fills_its_memory fills_its_memory
comes_back_clear() {
  killed a && wait_until $WAIT_S slot_is ready || return 1
  left=$(bytes_in_pool)
  echo "$left bytes are not zero"
  [ "$left" = 0 ] && pinned_is pool 262144
}
check comes_back_clear_after_sigkill comes_back_clear
check next_guest_starts_on_it on_slot b
check next_guest_reads_by_dma reads_what_is_there b
check next_guest_writes_by_dma writes_and_reads_back b

# A second device joins what is mapped; with the last one memory is unpinned, and it can come again.
second_joins() {
  remote b add-device path=$second,id=second || return 1
  guest b "for i in \$(seq 200); do test -b /dev/nvme1n1 && break; sleep 0.1; done; head -c 8388608 /dev/nvme1n1 | sha256sum" &&
    [ "$(head -n 1 $T/out)" = "$(sha256sum <$T/known)" ] && pinned_is b 0
}
check a_second_device_joins second_joins
removed() { tr -d ' ' <$T/b.events | grep -q "\"id\":\"$1\"" && ! info b "\"id\": *\"$1\""; }
devices_go() {
  remote b remove-device second && wait_until 30 removed second && reads_what_is_there b || return 1
  remote b remove-device disk && wait_until 30 removed disk && wait_until 10 pinned_is pool 0
}
check memory_is_unpinned_with_the_last_device devices_go
comes_again() {
  remote b add-device path=$disk,id=disk && wait_until 60 pinned_is b 262144 || return 1
  guest b "for i in \$(seq 200); do test -b /dev/nvme0n1 && break; sleep 0.1; done" && reads_what_is_there b
}
check the_device_comes_again comes_again

# While a process has the iommufd, the memory is not leased.
kept_by_somebody() {
  rm -f $T/held
  hold-fd $(cat $T/b.pid) /dev/iommu >$T/held &
  holder=$!
  wait_until 60 grep -q held $T/held && killed b && wait_until 60 slot_is lingering || return 1
  # Long enough for the pool to have looked again.
  wait_until 5 false
  slot_is lingering && [ "$(bytes_in_pool)" -gt 0 ] || return 1
  kill -9 $holder
  wait_until $WAIT_S slot_is ready && [ "$(bytes_in_pool)" = 0 ]
}
check waits_for_who_kept_the_iommufd kept_by_somebody
device_kept() {
  rm -f $T/held
  takes_slot c || return 1
  hold-fd $(cat $T/c.pid) /dev/vfio/devices/ >$T/held &
  holder=$!
  wait_until 60 grep -q held $T/held && killed c && wait_until 60 slot_is lingering || return 1
  wait_until 5 false
  slot_is lingering || return 1
  kill -9 $holder
  wait_until $WAIT_S slot_is ready && [ "$(bytes_in_pool)" = 0 ]
}
check waits_for_who_kept_the_device device_kept

# A reboot keeps the slot's memory, mapped as it is.
restarts() {
  on_slot d && restarts_pinned d pool 262144 && reads_what_is_there d && writes_and_reads_back d && slot_is lent &&
    pinned_is d 0
}
check guest_restarts_itself restarts
killed d
check ready_after_the_restarted_guest wait_until $WAIT_S slot_is ready

# Two devices from the start, of which the second has the slot: the first joins what is mapped for it.
both_read() {
  guest $1 "for i in \$(seq 200); do test -b /dev/nvme1n1 && test -b /dev/nvme0n1 && break; sleep 0.1; done; head -c 8388608 /dev/nvme0n1 | sha256sum; head -c 8388608 /dev/nvme1n1 | sha256sum" &&
    [ "$(grep -c "$(sha256sum <$T/known | cut -d' ' -f1)" $T/out)" = 2 ]
}
both_from_the_start() {
  start_guest t 1 -v --device path=$second,id=second path=$disk,id=disk || return 1
  happened t prepinned-taken && info t '"state": *"Pinned"' && pinned_is t 0 && pinned_is pool 262144 && slot_is lent &&
    wait_until $WAIT_S says t "GUEST-READY 1 vcpus" && both_read t
}
check two_devices_share_what_is_mapped both_from_the_start
killed t
check ready_after_both wait_until $WAIT_S slot_is ready

# What does not fit is done without.
MEMORY=size=192M,shared=on,prezeroed=$T/pool.sock
does_without() {
  start_guest e 1 --device path=$disk,id=disk && happened e prepinned-unavailable && ! happened e prepinned-taken &&
    wait_until $WAIT_S says e "GUEST-READY 1 vcpus" && wait_until 60 pinned_is e 196608 && reads_what_is_there e &&
    writes_and_reads_back e && slot_is waiting
}
check another_size_does_without does_without
killed e
check ready_when_the_device_is_free wait_until $WAIT_S slot_is ready
stats | grep -v '^#'

# Huge pages, and a balloon, out of which the guest takes memory that the device then writes.
huge_slot() {
  kill $pool && wait_until 60 ended $pool || return 1
  sed -i "s/pages = '4K'/pages = '2M'/" $T/pool.toml
  start_pool
  wait_until $WAIT_S slot_is ready && pinned_is pool 262144
}
check slot_of_huge_pages_becomes_ready huge_slot
MEMORY=size=256M,shared=on,hugepages=on,hugepage_size=2M,prezeroed=$T/pool.sock
check guest_starts_on_huge_pages on_slot h --balloon size=0
check reads_by_dma_into_huge_pages reads_what_is_there h
holds() { [ "$(counter h actual_bytes)" = $1 ]; }
in_and_out() {
  for bytes in 100663296 0 67108864 0; do
    remote h resize --balloon $bytes && wait_until 60 holds $bytes || { echo "the balloon is not $bytes"; return 1; }
    guest h 'echo 3 >/proc/sys/vm/drop_caches' && reads_what_is_there h || { echo "wrong with a balloon of $bytes"; return 1; }
  done
}
check dma_is_right_beside_a_balloon in_and_out
check writes_by_dma_from_huge_pages writes_and_reads_back h
killed h
huge_again() { wait_until $WAIT_S slot_is ready && [ "$(bytes_in_pool)" = 0 ]; }
check huge_pages_come_back_clear huge_again

# Two zones of one slot.
slot_of_zones() {
  kill $pool && wait_until 60 ended $pool || return 1
  sed -i -e "/^size = '256M'/d" -e "s/^pages = .*/zones = [{ size = '160M', pages = '4K' }, { size = '96M', pages = '2M' }]/" $T/pool.toml
  start_pool
  wait_until $WAIT_S slot_is ready && pinned_is pool 262144
}
check slot_of_two_zones_becomes_ready slot_of_zones
MEMORY=size=0
on_zones() {
  on_slot $1 --memory-zone id=a,size=160M,shared=on,prezeroed=$T/pool.sock \
    id=b,size=96M,hugepages=on,hugepage_size=2M,prezeroed=$T/pool.sock
}
check guest_starts_on_two_zones on_zones z
check reads_by_dma_into_both_zones reads_what_is_there z
check writes_by_dma_from_both_zones writes_and_reads_back z
zones_restart() { restarts_pinned z pool 262144 && reads_what_is_there z && slot_is lent && pinned_is z 0; }
check guest_on_two_zones_restarts_itself zones_restart
killed z
zones_again() { wait_until $WAIT_S slot_is ready && [ "$(bytes_in_pool)" = 0 ]; }
check zones_come_back_clear zones_again
check the_iommu_saw_no_fault no_faults
kill $pool
