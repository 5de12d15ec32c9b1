# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# metal
# takes_turns
# A Debian guest whose root disk, network device and a second disk are behind a virtual IOMMU: each is in a group, what
# it reads and writes is right, and there is no fault; disks come and go in a segment behind the IOMMU; a process of the
# guest drives a third disk by VFIO, and reaches what it has mapped alone; the guest reboots, moves in both modes, and is
# saved and restored.
. ./lib.sh

GUEST_INITRAMFS=/lab/initramfs-iommu.gz
CMDLINE="$CMDLINE iommu.strict=1"
truncate -s 8M $T/second.img $T/hot.img
head -c 262144 /dev/urandom >$T/given.img
cp $T/given.img $T/given.orig
DISK_OPTIONS=",iommu=on,id=root path=$T/second.img,id=second,serial=second,iommu=on,pci_segment=1 path=$T/given.img,id=given,serial=given,iommu=on,pci_segment=1"
platform=num_pci_segments=2,iommu_segments=[1],iommu_address_width=48

# grouped NAME COUNT: so many devices are in groups of the IOMMU, each in one of its own.
grouped() {
  guest $1 'ls -d /sys/kernel/iommu_groups/*/devices/*' || return 1
  [ "$(wc -l <$T/out)" = $2 ] && [ "$(cut -d/ -f5 $T/out | sort -u | wc -l)" = $2 ] || { cat $T/out; return 1; }
}
# Addresses are translated: the domain of each is one for DMA.
translated() {
  guest $1 'cat /sys/kernel/iommu_groups/*/type' && ! grep -v '^DMA' $T/out || { cat $T/out; return 1; }
}
quiet() {
  guest $1 '! dmesg | grep -iE "virtio_iommu.*(fault|fail|error)|fault from EP|I/O error|BUG:|Oops|WARNING: CPU"' || { cat $T/out; return 1; }
}
# with_disk NAME SERIAL COMMAND: runs a command in the guest with $b as the disk's device.
with_disk() { guest $1 "b=; for d in /sys/block/vd*; do [ \"\$(cat \$d/serial)\" != $2 ] || { b=/dev/\${d##*/}; break; }; done; [ -n \"\$b\" ] && { $3; }"; }
# writes NAME SERIAL IMAGE: what the guest writes is in the image.
writes() {
  with_disk $1 $2 'head -c 4194304 /dev/urandom >/tmp/w; dd if=/tmp/w of=$b bs=1M conv=fsync 2>/dev/null; sha256sum </tmp/w; rm /tmp/w' || return 1
  [ "$(head -n 1 $T/out)" = "$(head -c 4194304 $3 | sha256sum)" ]
}
# reads NAME: programs on the root disk are what they were at first.
reads() {
  guest $1 'echo 3 >/proc/sys/vm/drop_caches; find /usr/bin -type f | sort | head -n 50 | xargs cat | sha256sum' || return 1
  [ -f $T/sum ] || cp $T/out $T/sum
  cmp -s $T/out $T/sum || { cat $T/out $T/sum; return 1; }
}
works() { grouped $1 $2 && translated $1 && writes $1 second $T/second.img && reads $1 && quiet $1; }

tap_up lab0
start_guest a 1 --platform $platform --net tap=lab0,iommu=on,id=net || failed start "the VMM did not start"
check boots_from_a_disk_behind_it wait_until $WAIT_S says a "GUEST-READY 1 vcpus"
check devices_are_in_groups works a 4
network() { from_guest $1 && to_guest $1 && quiet $1; }
check frames_go_both_ways network a
comes() {
  remote $1 add-disk path=$T/hot.img,id=hot,serial=hot,iommu=on,pci_segment=1 >$T/added &&
    wait_until 30 with_disk $1 hot true && grouped $1 5 && writes $1 hot $T/hot.img && quiet $1
}
gone() { ! remote $1 info | grep -q '"id": *"hot"'; }
goes() { remote $1 remove-device hot && wait_until 30 gone $1 && grouped $1 4 && quiet $1; }
check a_disk_comes comes a
check it_goes goes a
refuses() { ! remote a add-disk path=$T/hot.img,id=none,iommu=on 2>$T/refused && grep -q iommu_segments $T/refused; }
check another_segment_is_refused refuses
# bound NAME DRIVER: the given disk's function has this driver; an empty name stands for the kernel's choice. $function has it.
bound() { guest $1 "echo $2 >$function/driver_override; echo ${function##*/} >$function/driver/unbind; echo ${function##*/} >/sys/bus/pci/drivers_probe"; }
by_process() {
  with_disk $1 given 'readlink -f /sys/block/${b##*/}/device/..' && function=$(head -n 1 $T/out) || return 1
  nc -l -p 7002 </lab/iommu-user >/dev/null &
  guest $1 'cat </dev/tcp/10.9.0.1/7002 >/tmp/iommu-user; chmod +x /tmp/iommu-user; echo 1 >/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts' &&
    bound $1 vfio-pci || { cat $T/out; return 1; }
  guest $1 "/tmp/iommu-user $function /tmp/copy && cat /tmp/copy | sha256sum && perl -0777 -ne 'print ~\$_' /tmp/copy | sha256sum" || { cat $T/out; return 1; }
  { cat $T/given.orig | sha256sum; cat $T/given.img | sha256sum; } >$T/sums
  # The kernel's report of what was not mapped may stand between them.
  grep -qx done $T/out && [ "$(tail -n 2 $T/out)" = "$(cat $T/sums)" ] || { cat $T/out $T/sums; return 1; }
}
check a_process_drives_a_disk by_process a
reported() { guest $1 'dmesg | grep "fault from EP"; dmesg -C' && grep -q "fault from EP" $T/out || { cat $T/out; return 1; }; }
check what_it_has_not_mapped_is_reported reported a
given_back() { bound $1 "" && wait_until 30 with_disk $1 given true && writes_head $1 && works $1 4; }
writes_head() {
  with_disk $1 given 'head -c 262144 /dev/urandom >/tmp/w; dd if=/tmp/w of=$b bs=64k conv=fsync 2>/dev/null; sha256sum </tmp/w' || return 1
  [ "$(head -n 1 $T/out)" = "$(cat $T/given.img | sha256sum)" ]
}
check the_kernel_has_it_again given_back a
reboots() { guest a sync && remote a reboot && wait_until $WAIT_S says_times a "GUEST-READY" 2 && works a 4; }
check works_after_a_reboot reboots
moves() { moved $1 $2 $3 && works $2 4; }
check works_after_precopy moves a b precopy
check a_disk_comes_there comes b
check it_goes_there goes b
check works_after_postcopy moves b c postcopy
saved() {
  mkdir -p $T/saved
  remote c pause && remote c snapshot file://$T/saved && remote c shutdown-vmm && ends c 60 || return 1
  start_vmm d && remote d restore source_url=file://$T/saved,resume=true && wait_until 60 state_is d Running &&
    open_console d && works d 4
}
check works_after_a_restore saved
power_button() { remote d power-button && ends d 60; }
check ends power_button
check filesystem_clean filesystem_clean
