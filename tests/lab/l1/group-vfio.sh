# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# A Debian guest with a passed-through NVMe disk, SATA controller and network card (virtio, but behind the
# IOMMU, so that it is hardware as far as this machine is concerned): drivers, DMA by content in both
# directions, MSI-X, MSI and the interrupt pin, reboot with all memory mapped, what a VM with devices refuses, and
# memory that is mapped while the guest runs.
# machine: -drive if=none,id=p0,file=@LAB@/vfio.img,format=raw,snapshot=on -device nvme,drive=p0,serial=passed,romfile=@LAB@/vfio-rom.img
# machine: -device ich9-ahci,id=sata -drive if=none,id=p1,file=@LAB@/vfio.img,format=raw,snapshot=on -device ide-hd,drive=p1,bus=sata.0
# machine: -netdev hubport,id=h0,hubid=0 -device virtio-net-pci,netdev=h0,romfile=,mac=52:54:00:00:02:01
# machine: -netdev hubport,id=h1,hubid=0 -device virtio-net-pci,netdev=h1,romfile=,mac=52:54:00:00:02:02,iommu_platform=on,disable-legacy=on
. ./lib.sh
. ./passthrough.sh

find_disk
nic=
for net in /sys/class/net/*; do
  case $(cat $net/address) in
    52:54:00:00:02:01) ours=$(basename $net) ;;
    52:54:00:00:02:02) nic=$PCI/$(basename "$(dirname "$(readlink -f $net/device)")") ;;
  esac
done
for class in $PCI/*/class; do
  # Not the controller that every machine has.
  case $(cat $class),$class in 0x010601,*:1f.2/class) ;; 0x010601,*) sata=$(dirname $class) ;; esac
done
echo "SATA $sata, disk $disk, network card $nic, our end $ours"
fill_disk

refuses_what_is_not_bound() {
  cloud-hypervisor $PASS_BY --kernel /lab/vmlinuz --memory size=256M --device path=$disk >$T/refused.log 2>&1 && return 1
  cat $T/refused.log
  grep -q "belongs to nvme; bind it to vfio-pci first" $T/refused.log
}
check refuses_what_is_not_bound refuses_what_is_not_bound
# As the kernel here reads it.
rom=$(cd $disk && echo 1 >rom && sha256sum <rom; echo 0 >rom)
check disk_is_bound give_to_vfio $disk
check sata_is_bound give_to_vfio $sata
check network_card_is_bound give_to_vfio $nic
ip addr add 10.9.0.1/24 dev $ours
ip link set $ours up

refuses_too_many_mappings() {
  entries=/sys/module/vfio_iommu_type1/parameters/dma_entry_limit
  before=$(cat $entries)
  echo 1 >$entries
  cloud-hypervisor --kernel /lab/vmlinuz --memory size=256M --device path=$disk >$T/refused.log 2>&1
  code=$?
  echo $before >$entries
  cat $T/refused.log
  [ $code != 0 ] && grep -q "dma_entry_limit" $T/refused.log
}
# A limit of type1's.
[ -n "$PASS_BY" ] || check refuses_too_many_mappings refuses_too_many_mappings
# Debian's kernels have no iommufd.
refuses_iommufd() {
  cloud-hypervisor --platform iommufd=on --kernel /lab/vmlinuz --memory size=256M --device path=$disk >$T/refused.log 2>&1 && return 1
  cat $T/refused.log
  grep "CONFIG_IOMMUFD" $T/refused.log | grep -q "without iommufd=on"
}
[ -n "$PASS_BY" ] || check refuses_iommufd_that_the_kernel_does_not_have refuses_iommufd
refuses_too_little_locked_memory() {
  /bin/setpriv --bounding-set=-ipc_lock prlimit --memlock=67108864 cloud-hypervisor $PASS_BY --kernel /lab/vmlinuz \
    --memory size=256M --device path=$disk >$T/refused.log 2>&1 && return 1
  cat $T/refused.log
  grep -q "ulimit -l" $T/refused.log
}
check refuses_too_little_locked_memory refuses_too_little_locked_memory

start_guest a 1 --device path=$disk,id=disk path=$nic,id=nic path=$sata,id=sata || failed start "the VMM did not start"
check boots_with_devices wait_until $WAIT_S says a "GUEST-READY 1 vcpus"
memory_is_mapped_while_the_guest_runs() {
  wait_until 60 grep -q '"event": "passthrough-pinned"' $T/a.events || return 1
  remote a counters
  [ "$(event a booted)" -lt "$(event a passthrough-pinned)" ] && remote a info | grep -q '"pinned_bytes": *268435456'
}
check memory_is_mapped_while_the_guest_runs memory_is_mapped_while_the_guest_runs
drivers_load() {
  guest a "cat /sys/class/nvme/nvme0/serial; cat /sys/class/net/eth0/address; dmesg | grep -iE 'nvme|eth0|virtio_net'"
  cat $T/out
  grep -q "^passed" $T/out && grep -q "^52:54:00:00:02:02" $T/out
}
check drivers_load drivers_load
reads_the_expansion_rom() {
  guest a "cd /sys/class/nvme/nvme0/device; ls -l rom; echo 1 >rom; sha256sum <rom; echo 0 >rom"
  cat $T/out
  [ -n "$rom" ] && [ "$rom" != "$(sha256sum </dev/null)" ] && grep -qF "$rom" $T/out
}
check reads_the_expansion_rom reads_the_expansion_rom
check reads_by_dma reads_what_is_there a
check writes_by_dma writes_and_reads_back a
interrupts_by_msix() {
  guest a "grep -E 'MSIX?' /proc/interrupts" || return 1
  cat $T/out
  awk '/MSI-?X/ && /nvme0q/ && $2 > 0 {disk=1} /MSI-?X/ && /virtio.*input/ && $2 > 0 {nic=1} END {exit !disk}' $T/out
}
check interrupts_by_msix interrupts_by_msix
sata_by_msi() {
  guest a "head -c 16777216 /dev/urandom >/tmp/w; dd if=/tmp/w of=/dev/sda bs=1M conv=fsync 2>/dev/null; echo 3 >/proc/sys/vm/drop_caches; sha256sum </tmp/w; dd if=/dev/sda bs=1M count=16 2>/dev/null | sha256sum; rm /tmp/w; grep ahci /proc/interrupts" || return 1
  cat $T/out
  [ "$(sed -n 1p $T/out)" = "$(sed -n 2p $T/out)" ] && awk '/PCI-MSI-/ && $2 > 0 {msi=1} END {exit !msi}' $T/out
}
check sata_by_msi sata_by_msi
# pin DRIVER FUNCTION: the driver starts again and may use nothing but the pin.
pin='pin() { echo $2 >/sys/bus/pci/drivers/$1/unbind; echo 0 >/sys/bus/pci/devices/$2/msi_bus; echo $2 >/sys/bus/pci/drivers/$1/bind; }'
disk_by_pin() {
  guest a "$pin; pin nvme \$(basename \$(readlink /sys/class/nvme/nvme0/device)); for i in \$(seq 100); do [ -b /dev/nvme0n1 ] && break; sleep 0.1; done; grep nvme /proc/interrupts" || return 1
  cat $T/out
  awk '/fasteoi/ && $2 > 0 {pin=1} END {exit !pin}' $T/out && reads_what_is_there a && writes_and_reads_back a
}
check disk_by_pin disk_by_pin
check network_from_guest from_guest a
check network_to_guest to_guest a
refuses_to_move() {
  remote a send-migration destination_url=unix:$T/none.mig >$T/refused.log 2>&1 && return 1
  cat $T/refused.log
  grep -q "'disk': its driver.*'nic': its driver.*'sata': its driver" $T/refused.log && state_is a Running
}
check refuses_to_migrate refuses_to_move
refuses_to_be_saved() {
  mkdir -p $T/saved
  remote a pause && ! remote a snapshot file://$T/saved >$T/refused.log 2>&1 && remote a resume || return 1
  cat $T/refused.log
  grep -q "'disk': its driver.*'nic': its driver.*'sata': its driver" $T/refused.log
}
check refuses_to_be_saved refuses_to_be_saved
# Memory stays mapped, by groups that are open without their devices.
check guest_restarts_itself_with_memory_mapped restarts_pinned a a 262144
check memory_is_pinned_after_restart eval "info a '\"state\": *\"Pinned\"' && info a '\"pinned_bytes\": *268435456'"
check reads_by_dma_after_restart reads_what_is_there a
check writes_by_dma_after_restart writes_and_reads_back a
check network_from_guest_after_restart from_guest a
# is_open_elsewhere FUNCTION: this process cannot open its group, of which it can be open once.
is_open_elsewhere() { ! (exec 8<>"/dev/vfio/$(basename "$(readlink $1/iommu_group)")") 2>/dev/null; }
is_free() { ! is_open_elsewhere $1; }
sata_goes() {
  is_open_elsewhere $sata && is_open_elsewhere $nic || return 1
  remote a remove-device sata && wait_until 30 happened a device-removed || return 1
  wait_until 10 is_free $sata && is_open_elsewhere $nic && pinned_is a 262144 && reads_what_is_there a
}
# By iommufd no group is open.
[ -n "$PASS_BY" ] || check a_device_that_goes_then_takes_its_group_along_but_no_memory sata_goes
power_button() { remote a power-button && wait_until 60 says a "POWER-BUTTON" && ends a 60; }
check power_button_ends_the_vmm power_button
