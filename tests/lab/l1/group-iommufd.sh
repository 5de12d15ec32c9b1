# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# iommufd, on a kernel that has it (LAB_KERNEL=iommufd): a Debian guest with a passed-through network card
# and NVMe disk in one address space, which restarts, and whose devices go and come again; a device and
# /dev/iommu that come as open descriptors; refusals.
# on_request
# limit_s: 2400
# machine: -drive if=none,id=p0,file=@LAB@/vfio.img,format=raw,snapshot=on -device nvme,drive=p0,serial=passed
# machine: -netdev hubport,id=h0,hubid=0 -device virtio-net-pci,netdev=h0,romfile=,mac=52:54:00:00:02:01
# machine: -netdev hubport,id=h1,hubid=0 -device e1000e,netdev=h1,romfile=,mac=52:54:00:00:02:02
. ./lib.sh
. ./passthrough.sh

check the_kernel_has_iommufd test -c /dev/iommu
find_disk
for id in $PCI/*/device; do
  case $(cat $id) in 0x10d3) nic=$(dirname $id) ;; esac
done
for net in /sys/class/net/*; do
  case $(cat $net/address) in 52:54:00:00:02:01) ours=$(basename $net) ;; esac
done
echo "disk $disk, network card $nic, our end $ours"
fill_disk
check disk_is_bound give_to_vfio $disk
check network_card_is_bound give_to_vfio $nic
ip addr add 10.9.0.1/24 dev $ours
ip link set $ours up
power_button() { remote $1 power-button && wait_until 60 says $1 "POWER-BUTTON" && ends $1 60; }
no_faults() { ! dmesg | grep -E 'handling fault|fault addr|fault reason|WARNING:.*(iommu|vfio)|BUG:'; }

# Two devices, one address space, real drivers. The kernel for virtual machines lacks that of the card.
GUEST_KERNEL=/lab/vmlinuz-amd64
GUEST_INITRAMFS=/lab/initramfs-amd64.gz
MEMORY=size=384M,shared=on
start_guest a 1 --device path=$disk,id=disk path=$nic,id=nic || failed start "the VMM did not start"
check boots_with_two_devices wait_until $WAIT_S says a "GUEST-READY 1 vcpus"
memory_is_pinned() { wait_until 60 happened a passthrough-pinned && pinned_is a 393216; }
check memory_is_pinned_once memory_is_pinned
drivers_load() {
  guest a "cat /sys/class/nvme/nvme0/serial; basename \$(readlink /sys/class/net/eth0/device/driver)"
  cat $T/out
  grep -q "^passed" $T/out && grep -q "^e1000e" $T/out
}
check drivers_load drivers_load
check reads_by_dma reads_what_is_there a
check writes_by_dma writes_and_reads_back a
check network_from_guest from_guest a
check network_to_guest to_guest a
interrupts_by_msix() {
  guest a "grep -E 'MSIX?' /proc/interrupts" || return 1
  cat $T/out
  awk '/MSI-?X/ && /nvme0q/ && $2 > 0 {disk=1} /MSI-?X/ && /eth0/ && $2 > 0 {nic=1} END {exit !(disk && nic)}' $T/out
}
check interrupts_by_msix interrupts_by_msix
refuses_what_is_in_use() {
  cloud-hypervisor $PASS_BY --kernel /lab/vmlinuz --memory size=256M --device path=$disk >$T/refused.log 2>&1 && return 1
  cat $T/refused.log
  grep -q "another process, or another VM, has it" $T/refused.log && reads_what_is_there a
}
check refuses_what_another_vm_has refuses_what_is_in_use
# Memory stays mapped, so what the devices of the guest before could reach, those of this one do at once.
check guest_restarts_itself_with_memory_mapped restarts_pinned a a 393216
check memory_is_pinned_after_restart eval "info a '\"state\": *\"Pinned\"' && info a '\"pinned_bytes\": *402653184'"
check reads_by_dma_after_restart reads_what_is_there a
check writes_by_dma_after_restart writes_and_reads_back a
check network_from_guest_after_restart from_guest a
removed() { tr -d ' ' <$T/a.events | grep -q "\"id\":\"$1\"" && happened a device-removed && ! info a "\"id\": *\"$1\""; }
devices_go() {
  remote a remove-device nic && wait_until 30 removed nic && pinned_is a 393216 && reads_what_is_there a || return 1
  remote a remove-device disk && wait_until 30 removed disk && pinned_is a 0
}
check devices_go_and_memory_with_the_last devices_go
devices_come() {
  remote a add-device path=$nic,id=nic && remote a add-device path=$disk,id=disk && pinned_is a 393216 || wait_until 60 pinned_is a 393216 || return 1
  guest a "for i in \$(seq 200); do test -b /dev/nvme0n1 && test -e /sys/class/net/eth0 && break; sleep 0.1; done; busybox ip addr add 10.9.0.2/24 dev eth0; busybox ip link set eth0 up; test -b /dev/nvme0n1"
}
check devices_come_again devices_come
check reads_by_dma_again reads_what_is_there a
check network_from_guest_again from_guest a
check network_to_guest_again to_guest a
check power_button_ends_the_vmm power_button a
check the_iommu_saw_no_fault no_faults
unset GUEST_KERNEL GUEST_INITRAMFS

# Opened by another process: the VMM has no access to what is in /dev.
MEMORY=size=256M,shared=on
LAUNCH="/bin/setpriv --bounding-set=-dac_override,-dac_read_search"
exec 7<>/dev/null 8<>/dev/iommu 9<>/dev/vfio/devices/$(ls $disk/vfio-dev)
chmod 000 /dev/iommu /dev/vfio/devices/*
refuses_without_access() {
  $LAUNCH cloud-hypervisor --platform iommufd=on,iommufd_fd=8 --kernel /lab/vmlinuz --memory size=256M --device path=$disk >$T/refused.log 2>&1 && return 1
  cat $T/refused.log
  grep -q "needs access to /dev/vfio/devices/vfio" $T/refused.log
}
check refuses_a_path_that_it_may_not_open refuses_without_access
refuses_what_is_no_device() {
  cloud-hypervisor --platform iommufd=on,iommufd_fd=8 --kernel /lab/vmlinuz --memory size=256M --device fd=7 >$T/refused.log 2>&1 && return 1
  cat $T/refused.log
  grep -q "not a device in /dev/vfio/devices" $T/refused.log
}
check refuses_a_descriptor_of_something_else refuses_what_is_no_device
PASS_BY="--platform iommufd=on,iommufd_fd=8"
given() {
  start_guest $1 1 --device fd=9,id=disk && wait_until $WAIT_S says $1 "GUEST-READY 1 vcpus" &&
    reads_what_is_there $1 && writes_and_reads_back $1
}
check dma_with_given_descriptors given d
restarts_with_given_descriptors() {
  echo "sync; busybox reboot -f || reboot -f" >"$(cat $T/d.pty)" && wait_until $WAIT_S says_times d "GUEST-READY" 2 &&
    reads_what_is_there d
}
check dma_with_given_descriptors_after_restart restarts_with_given_descriptors
check power_button_ends_that_vmm power_button d
check another_vmm_takes_them_over given e
check power_button_ends_the_last_vmm power_button e
exec 7>&- 8>&- 9>&-
check the_iommu_saw_no_fault_at_last no_faults
