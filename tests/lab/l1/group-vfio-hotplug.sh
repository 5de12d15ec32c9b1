# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# takes_turns
# Devices that come and go while a Debian guest runs: a passed-through NVMe disk, for which memory is mapped
# when it comes and unmapped when it goes, and a virtio disk and network device. Content is compared on both
# sides.
# machine: -drive if=none,id=p0,file=@LAB@/vfio.img,format=raw,snapshot=on -device nvme,drive=p0,serial=passed
. ./lib.sh
. ./passthrough.sh

find_disk
fill_disk
check disk_is_bound give_to_vfio $disk
start_guest a 1 || failed start "the VMM did not start"
check boots wait_until $WAIT_S says a "GUEST-READY 1 vcpus"

# refused TEXT REQUEST...: the VMM refuses, and says so.
refused() {
  text=$1
  shift
  remote a "$@" >$T/refused.log 2>&1 && { cat $T/refused.log; return 1; }
  cat $T/refused.log
  grep -q "$text" $T/refused.log
}
guest_sees() { guest a "for i in \$(seq 200); do $1 && exit_code=0 && break || exit_code=1; sleep 0.1; done; test \$exit_code = 0"; }
removed() { tr -d ' ' <$T/a.events | grep -q "\"id\":\"$1\"" && happened a device-removed && ! info a "\"id\": *\"$1\""; }

add_disk() {
  pinned_is a 0 && remote a add-device path=$disk,id=disk >$T/added || return 1
  cat $T/added
  grep -q '"id": "disk"' $T/added && grep -q '"bdf": "0000:00:0' $T/added && wait_until 60 happened a device-added
}
check adds_a_disk add_disk
check guest_finds_it guest_sees "test -b /dev/nvme0n1"
memory_is_mapped() {
  wait_until 60 happened a passthrough-pinned && info a '"state": *"Pinned"' && pinned_is a 262144
}
check memory_is_mapped_for_it memory_is_mapped
check reads_by_dma reads_what_is_there a
check writes_by_dma writes_and_reads_back a
check refuses_an_id_twice refused "used twice" add-disk path=/tmp/none,id=disk
check refuses_a_device_twice refused "already passed through" add-device path=$disk,id=other
check refuses_what_is_not_there refused "there is no PCI device" add-device path=$PCI/0000:00:1e.7,id=other
check refuses_to_remove_a_stranger refused "has no device 'absent'" remove-device absent
check refuses_to_remove_the_console refused "cannot be removed" remove-device __console
check refuses_to_migrate_with_it refused "passed-through devices: 'disk': its driver" send-migration destination_url=unix:$T/none.mig

# The host has the disk again, and finds on it what the guest wrote.
ours_again() {
  guest a "dd if=/dev/nvme0n1 bs=1M skip=16 count=32 2>/dev/null | sha256sum" || return 1
  expected=$(head -n 1 $T/out)
  remote a remove-device disk && wait_until 30 removed disk || return 1
  pinned_is a 0 && info a '"state": *"Running"' && ! grep -q passthrough $T/info || return 1
  guest a "test ! -e /dev/nvme0n1" || return 1
  echo >$disk/driver_override
  basename $disk >$disk/driver/unbind
  basename $disk >/sys/bus/pci/drivers_probe
  wait_until 20 test -b /dev/${own}n1
  [ "$(dd if=/dev/${own}n1 bs=1M skip=16 count=32 2>/dev/null | sha256sum)" = "$expected" ]
}
check gives_it_back_with_what_was_written ours_again
check disk_is_bound_again give_to_vfio $disk
add_again() { remote a add-device path=$disk,id=disk,pin=strict && info a '"state": *"Pinned"' && guest_sees "test -b /dev/nvme0n1"; }
check adds_it_again_with_all_memory_mapped_first add_again
check reads_by_dma_again reads_what_is_there a
check writes_by_dma_again writes_and_reads_back a
guest_restarts_itself() {
  echo "sync; busybox reboot -f || reboot -f" >"$(cat $T/a.pty)" && wait_until $WAIT_S says_times a "GUEST-READY" 2
}
check guest_restarts_itself guest_restarts_itself
check reads_by_dma_after_restart reads_what_is_there a

# The host's driver for passing through releases the disk: that waits until the guest has.
wanted_back() {
  echo >$disk/driver_override
  basename $disk >$disk/driver/unbind
  happened a passthrough-device-wanted && wait_until 30 removed disk && pinned_is a 0 && [ ! -e $disk/driver ]
}
check guest_lets_go_of_what_the_host_wants_back wanted_back

# Not passed through: the same slots.
truncate -s 64M $T/second.img
virtio_disk() {
  remote a add-disk path=$T/second.img,id=second && guest_sees "test -b /dev/vdb" || return 1
  guest a "head -c 16777216 /dev/urandom >/tmp/w; dd if=/tmp/w of=/dev/vdb bs=1M conv=fsync 2>/dev/null; sha256sum </tmp/w; rm /tmp/w" || return 1
  [ "$(head -n 1 $T/out)" = "$(head -c 16777216 $T/second.img | sha256sum)" ] || return 1
  remote a remove-device second && wait_until 30 removed second && guest a "test ! -e /dev/vdb"
}
check virtio_disk_comes_and_goes virtio_disk
network() {
  remote a add-net tap=vmtap0,id=net && guest_sees "test -e /sys/class/net/eth0" || return 1
  ip addr add 10.9.0.1/24 dev vmtap0
  ip link set vmtap0 up
  guest a "busybox ip addr add 10.9.0.2/24 dev eth0; busybox ip link set eth0 up"
  from_guest a && to_guest a || return 1
  remote a remove-device net && wait_until 30 removed net && guest a "test ! -e /sys/class/net/eth0" && [ ! -e /sys/class/net/vmtap0 ]
}
check network_device_comes_and_goes network
power_button() { remote a power-button && wait_until 60 says a "POWER-BUTTON" && ends a 60; }
check power_button_ends_the_vmm power_button
