# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Memory that is mapped for DMA while the guest runs: the guest's driver waits exactly as long as it must,
# what it then reads is right, and when memory cannot be mapped the device is gone and the guest is not.
# machine: -drive if=none,id=p0,file=@LAB@/vfio.img,format=raw,snapshot=on -device nvme,drive=p0,serial=passed
. ./lib.sh
. ./passthrough.sh

find_disk
fill_disk
check disk_is_bound give_to_vfio $disk
MEMORY=size=512M,shared=on

vmm_ends() { remote $1 shutdown-vmm && ends $1 60; }
# The threads that map memory get only what the guest's CPU leaves them, so that the guest's driver is
# there first; when it waits they have all of the CPU.
slow_down() {
  for task in /proc/$(cat $T/$1.pid)/task/*; do
    case $(cat $task/comm) in pin | prefault*) /bin/chrt -i -p 0 "$(basename $task)" >/dev/null ;; esac
  done
}
start_guest a 1 --device path=$disk,id=disk || failed start "the VMM did not start"
slow_down a
not_pinned_yet() { info a '"state": *"Pinning"' && ! happened a passthrough-pinned && happened a booted; }
check runs_before_memory_is_mapped not_pinned_yet
check boots wait_until $WAIT_S says a "GUEST-READY 1 vcpus"
driver_waited() {
  remote a counters >$T/counters
  cat $T/counters $T/a.events
  happened a passthrough-pinned && info a '"pinned_bytes": *536870912' && [ "$(counter a bus_master_waited_us)" -gt 10000 ]
}
check driver_waited_for_the_last_piece driver_waited
check reads_by_dma_into_memory_mapped_late reads_what_is_there a
check writes_by_dma writes_and_reads_back a
power_button() { remote $1 power-button && wait_until 60 says $1 "POWER-BUTTON" && ends $1 60; }
check power_button_ends_the_vmm power_button a

# The limit on locked memory falls while memory is being mapped.
LAUNCH="/bin/setpriv --bounding-set=-ipc_lock prlimit --memlock=unlimited"
lower_limit() {
  wait_until 30 answers b && prlimit --pid "$(cat $T/b.pid)" --memlock=65536 && wait_until 60 happened b passthrough-failed
}
start_guest b 1 --device path=$disk,id=disk || failed start "the VMM did not start"
check mapping_fails_in_the_middle lower_limit
failure_is_told() {
  cat $T/b.events
  wait_until 10 happened b passthrough-device-lost && info b '"state": *"Failed"' && info b "ulimit -l" && state_is b Running
}
check failure_is_told failure_is_told
check guest_goes_on wait_until $WAIT_S says b "GUEST-READY 1 vcpus"
device_is_gone() { guest b "test ! -e /dev/nvme0n1; echo \$?; dmesg | grep -i nvme; true" && cat $T/out && [ "$(head -n 1 $T/out)" = 0 ]; }
check device_is_gone_for_the_guest device_is_gone
# With the limit back where it was, the device is taken out and put in again.
recovers() {
  prlimit --pid "$(cat $T/b.pid)" --memlock=unlimited
  remote b remove-device disk && wait_until 60 happened b device-removed || return 1
  remote b add-device path=$disk,id=disk && wait_until 60 happened b passthrough-pinned || return 1
  guest b "for i in \$(seq 200); do test -b /dev/nvme0n1 && break; sleep 0.1; done; test -b /dev/nvme0n1" && reads_what_is_there b
}
check is_of_use_when_added_again recovers
check power_button_ends_that_vmm power_button b
LAUNCH=

# A guest that allows DMA as the very first thing continues when the last piece is mapped, and not later.
MEMORY=size=1G,shared=on
EARLY="workload=idle prefill=0 bus_master=9"
start_early() {
  start_vmm $1 --kernel /lab/test-guest --cmdline "$EARLY" --cpus boot=1 --memory $MEMORY --serial off --console off \
    --device path=$disk,id=disk,pci_device_id=9,pin=overlap && wait_until 60 happened $1 booted
}
read_guest() { guest-reader --json --timeout-ms 60000 --pid "$(cat $T/$1.pid)" wait-for --heartbeat >$T/guest; }
# said NAME: what the guest says of the device.
said() { tr -d ' \n' <$T/guest | sed -n "s/.*\"bus_master\":{[^}]*\"$1\":\([0-9]*\).*/\1/p"; }
waits_exactly() {
  read_guest e || return 1
  pinned=$(counter e pinned_monotonic_us) asked=$(counter e bus_master_asked_monotonic_us)
  waited=$(counter e bus_master_waited_us)
  early=$((pinned - asked)) late=$((asked + waited - pinned))
  echo "asked $early us before the last piece was mapped, continued $late us after that"
  # How fast this machine is does not matter: it maps no faster than it lets a vCPU continue.
  [ $early -gt 0 ] && [ $late -ge 0 ] && [ $late -lt $((early / 2)) ] &&
    [ $(($(said command) & 4)) = 4 ] && [ "$(said waited_ns)" -gt 0 ]
}
start_early e || failed start "the VMM did not start"
check a_guest_that_asks_at_once_waits_for_the_last_piece waits_exactly
check shuts_that_one_down vmm_ends e
LAUNCH="/bin/setpriv --bounding-set=-ipc_lock prlimit --memlock=unlimited"
turned_away() {
  start_early f && prlimit --pid "$(cat $T/f.pid)" --memlock=65536 && wait_until 60 happened f passthrough-failed || return 1
  read_guest f && [ "$(said command)" = 65535 ] && wait_until 10 happened f passthrough-device-lost && state_is f Running
}
check a_guest_that_asks_at_once_is_turned_away turned_away
check shuts_that_one_down_too vmm_ends f
LAUNCH=

# strict: nothing runs before the last piece.
MEMORY=size=512M,shared=on
strict() {
  start_vmm c --kernel /lab/vmlinuz --initramfs /lab/initramfs.gz --cmdline "$CMDLINE" --cpus boot=1 \
    --memory $MEMORY --disk path=$ROOT_DISK --serial off --console null --device path=$disk,pin=strict && wait_until 60 happened c booted || return 1
  cat $T/c.events
  [ "$(event c passthrough-pinned)" -lt "$(event c booted)" ]
}
check strict_maps_before_the_guest_runs strict
check shuts_down vmm_ends c

# A device that takes long to open keeps no guest from its first instruction, only from the device.
slow() { echo "/bin/busybox env LD_PRELOAD=/bin/slow-open.so SLOW_OPEN_S=4 $1"; }
LAUNCH=$(slow)
MEMORY=size=256M,shared=on
start_guest o 1 --device path=$disk,id=disk || failed start "the VMM did not start"
check opens_the_device_while_the_guest_runs opened_meanwhile o
check boots_with_a_slow_device wait_until $WAIT_S says o "GUEST-READY 1 vcpus"
check reads_by_dma_of_a_slow_device reads_what_is_there o
check power_button_ends_the_vmm_of_a_slow_device power_button o
# Neither a vCPU nor the next VMM waits for a device that does not come.
LAUNCH=
cannot_be_opened() {
  $(slow SLOW_OPEN_FAILS=1) cloud-hypervisor $PASS_BY --kernel /lab/vmlinuz --initramfs /lab/initramfs.gz --memory size=256M \
    --serial off --console off --device path=$disk,id=disk >$T/refused.log 2>&1
  code=$?
  cat $T/refused.log
  [ $code = 1 ] && grep -q "cannot pass through 'disk' ($disk)" $T/refused.log
}
check says_that_a_device_cannot_be_opened cannot_be_opened

# The opening of a device that hangs is cancelled by removing it; it is closed when it is open at last, and can be added.
LAUNCH=$(slow SLOW_OPEN_S=20)
start_guest h 1 || failed start "the VMM did not start"
check boots_without_the_device wait_until $WAIT_S says h "GUEST-READY 1 vcpus"
is_adding() { remote h info | tr -d ' ' | grep -q '"doing":"changed"'; }
gives_it_up() {
  remote h add-device path=$disk,id=disk >$T/added.log 2>&1 &
  added=$!
  wait_until 15 is_adding || { cat $T/added.log; return 1; }
  asked=$(cut -d. -f1 /proc/uptime)
  remote h remove-device disk || return 1
  [ $(($(cut -d. -f1 /proc/uptime) - asked)) -lt 10 ] || { echo "it waited until the device was open"; return 1; }
  wait $added && { cat $T/added.log; return 1; }
  cat $T/added.log
  grep -q "'disk' was removed" $T/added.log && state_is h Running && ! info h '"id": *"disk"' && ! info h passthrough
}
check gives_up_a_device_whose_opening_hangs gives_it_up
adds_it() { remote h add-device path=$disk,id=disk; }
check adds_it_when_it_is_closed wait_until 120 adds_it
guest_has_it() { guest h "for i in \$(seq 200); do test -b /dev/nvme0n1 && break; sleep 0.1; done; test -b /dev/nvme0n1"; }
check guest_finds_the_device guest_has_it
check reads_by_dma_of_the_device reads_what_is_there h
check power_button_ends_the_vmm_that_gave_up power_button h
LAUNCH=
