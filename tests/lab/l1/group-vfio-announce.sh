# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# takes_turns
# limit_s: 1500
# Memory whose mapping takes long, and a device whose opening does: no vCPU waits for it, at boot or when a device is added. The guest finds the
# device when memory is mapped; until then, all other devices respond as ever.
# machine: -drive if=none,id=p0,file=@LAB@/vfio.img,format=raw,snapshot=on -device nvme,drive=p0,serial=passed
. ./lib.sh
. ./passthrough.sh

find_disk
fill_disk
check disk_is_bound give_to_vfio $disk
# A kernel reports a vCPU that stands still after about 20 s; the guest has to be there by then.
SLOW_MAP_S=75
slow() { echo "/bin/busybox env LD_PRELOAD=/bin/slow-open.so SLOW_MAP_S=$SLOW_MAP_S $1"; }
MEMORY=size=1G,shared=on

# is_withheld NAME: vm.info names it, and the guest has none.
is_withheld() {
  info $1 '"state": *"Pinning"' && info $1 '"withheld_ms": *[1-9]' &&
    tr -d ' \n' <$T/info | grep -q '"withheld":\[{"id":"disk"' || return 1
  ! happened $1 device-added && guest $1 "test ! -e /dev/nvme0n1"
}
# responds NAME: the guest reads the configuration space of all of its devices, and nothing waits.
responds() {
  guest $1 "cut -d. -f1 /proc/uptime; for i in 1 2 3; do cat /sys/bus/pci/devices/*/config | wc -c; done; cut -d. -f1 /proc/uptime" || return 1
  cat $T/out
  [ $(($(sed -n 5p $T/out) - $(sed -n 1p $T/out))) -lt 10 ] && [ "$(sed -n 2p $T/out)" -ge 512 ]
}
guest_finds_it() {
  wait_until $((SLOW_MAP_S + 120)) happened $1 device-added || return 1
  [ "$(event $1 passthrough-pinned)" -lt "$(event $1 device-added)" ] &&
    guest $1 "for i in \$(seq 200); do test -b /dev/nvme0n1 && break; sleep 0.1; done; test -b /dev/nvme0n1"
}
never_stalled() {
  guest $1 "dmesg | grep -i -e stall -e lockup -e 'blocked for'; true"
  cat $T/out
  ! grep -q -i -e stall -e lockup -e blocked $T/out
}
# did_not_wait NAME: as the VMM measured it.
did_not_wait() {
  waited=$(counter $1 bus_master_waited_us)
  echo "waited $waited us"
  [ "$waited" -lt 1000000 ]
}
power_button() { remote $1 power-button && wait_until 60 says $1 "POWER-BUTTON" && ends $1 60; }

LAUNCH=$(slow)
start_guest a 2 --device path=$disk,id=disk || failed start "the VMM did not start"
check boots wait_until $WAIT_S says a "GUEST-READY 2 vcpus"
check runs_without_the_device is_withheld a
check other_devices_respond responds a
still_refused() {
  remote a send-migration destination_url=unix:$T/none.mig >$T/refused.log 2>&1 && return 1
  cat $T/refused.log
  grep -q "'disk'" $T/refused.log
}
check refuses_to_migrate still_refused
check guest_finds_it_when_memory_is_mapped guest_finds_it a
check reads_by_dma reads_what_is_there a
check writes_by_dma writes_and_reads_back a
check its_driver_did_not_wait did_not_wait a
check no_vcpu_stalled never_stalled a
check power_button_ends_the_vmm power_button a

# A device that takes as long to open: no vCPU waits for it, nor for the disk whose registers are placed after it.
LAUNCH="/bin/busybox env LD_PRELOAD=/bin/slow-open.so SLOW_OPEN_S=75"
start_guest l 2 --device path=$disk,id=disk || failed start "the VMM did not start"
boots_meanwhile() {
  wait_until $WAIT_S says l "GUEST-READY 2 vcpus" && ! happened l passthrough-device-opened && guest l "test ! -e /dev/nvme0n1"
}
check boots_while_the_device_is_opened boots_meanwhile
check other_devices_respond_while_it_is_opened responds l
# The kernel counts in steps: 1 GiB, but for some pages.
is_populated() { [ "$(sed -n 's/^RssShmem:[^0-9]*\([0-9]*\) kB/\1/p' /proc/$(cat $T/l.pid)/status)" -ge 1000000 ]; }
populated_meanwhile() { wait_until 60 is_populated && ! happened l passthrough-device-opened; }
check memory_is_populated_while_it_is_opened populated_meanwhile
check guest_finds_it_when_it_is_open guest_finds_it l
check reads_by_dma_of_the_late_one reads_what_is_there l
check driver_of_the_late_one_did_not_wait did_not_wait l
check no_vcpu_stalled_for_the_late_one never_stalled l
check power_button_ends_the_vmm_of_the_late_one power_button l

# One that cannot be opened after all that time: the guest, which has begun to work, goes on without it.
LAUNCH="/bin/busybox env LD_PRELOAD=/bin/slow-open.so SLOW_OPEN_S=40 SLOW_OPEN_FAILS=1"
start_guest n 2 --device path=$disk,id=disk || failed start "the VMM did not start"
check boots_without_one_that_will_fail wait_until $WAIT_S says n "GUEST-READY 2 vcpus"
goes_on_without() {
  wait_until 90 happened n device-removed && happened n passthrough-device-lost && state_is n Running && ! info n '"id": *"disk"' &&
    guest n "test ! -e /dev/nvme0n1"
}
check goes_on_without_it goes_on_without
check power_button_ends_the_vmm_without_it power_button n

SLOW_MAP_S=60
LAUNCH=$(slow)
start_guest b 2 || failed start "the VMM did not start"
check boots_without_a_device wait_until $WAIT_S says b "GUEST-READY 2 vcpus"
answers_at_once() {
  asked=$(cut -d. -f1 /proc/uptime)
  remote b add-device path=$disk,id=disk >$T/added || { cat $T/added; return 1; }
  [ $(($(cut -d. -f1 /proc/uptime) - asked)) -lt 30 ]
}
check adding_one_is_answered_at_once answers_at_once
check guest_runs_without_it is_withheld b
check other_devices_respond_meanwhile responds b
# Removed while the kernel is in the middle of mapping: other requests do not wait for that.
removed_meanwhile() {
  asked=$(cut -d. -f1 /proc/uptime)
  remote b remove-device disk && remote b pause && remote b resume || return 1
  echo "$(($(cut -d. -f1 /proc/uptime) - asked)) s"
  [ $(($(cut -d. -f1 /proc/uptime) - asked)) -lt 12 ] && ! happened b device-removed && ! happened b device-added || return 1
  remote b add-device path=$disk,id=disk2 >$T/refused.log 2>&1 && return 1
  cat $T/refused.log
  wait_until $((SLOW_MAP_S + 30)) happened b device-removed && pinned_is b 0 && ! happened b device-added
}
check one_that_is_removed_keeps_nothing_waiting removed_meanwhile
check adding_it_again_is_answered_at_once answers_at_once
check guest_finds_the_added_one guest_finds_it b
check reads_by_dma_of_the_added_one reads_what_is_there b
check driver_of_the_added_one_did_not_wait did_not_wait b
check no_vcpu_stalled_for_it never_stalled b
check power_button_ends_that_vmm power_button b

# Announced while the kernel boots, before it listens for new devices or after.
comes_while_booting() {
  start_guest $1 1 --device path=$disk,id=disk,pin=announce || return 1
  wait_until $WAIT_S says $1 "GUEST-READY 1 vcpus" && wait_until 60 happened $1 device-added &&
    guest $1 "for i in \$(seq 600); do test -b /dev/nvme0n1 && break; sleep 0.1; done; test -b /dev/nvme0n1" && power_button $1
}
MEMORY=size=128M,shared=on
for SLOW_MAP_S in 0 1 2 4; do
  LAUNCH=$(slow)
  check guest_finds_what_came_after_${SLOW_MAP_S}_s comes_while_booting boot$SLOW_MAP_S
done
MEMORY=size=1G,shared=on

# Memory that cannot be mapped: the guest never sees the device, and nothing stays pinned.
SLOW_MAP_S=20
LAUNCH="/bin/setpriv --bounding-set=-ipc_lock prlimit --memlock=unlimited $(slow)"
start_guest c 1 --device path=$disk,id=disk,pin=announce || failed start "the VMM did not start"
lower_limit() {
  wait_until 30 answers c && prlimit --pid "$(cat $T/c.pid)" --memlock=65536 && wait_until 120 happened c device-removed
}
check device_without_memory_is_removed lower_limit
is_as_without() {
  cat $T/c.events
  happened c passthrough-failed && ! happened c device-added && ! info c '"id": *"disk"' && ! info c '"passthrough"' &&
    state_is c Running && pinned_is c 0
}
check vm_is_as_without_it is_as_without
check that_guest_goes_on wait_until $WAIT_S says c "GUEST-READY 1 vcpus"
check power_button_ends_the_last_vmm power_button c
