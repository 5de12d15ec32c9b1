# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# takes_turns
# A Debian guest with four PCI segments and forty devices: it finds each where vm.info says, reads a disk on segment 2,
# and is given one on segment 3, and a passed-through one on segment 2; it reboots, moves, and is saved and restored with
# the others.
# machine: -drive if=none,id=p0,file=@LAB@/vfio.img,format=raw,snapshot=on -device nvme,drive=p0,serial=passed
. ./lib.sh
. ./passthrough.sh

# One --platform has it all.
platform=num_pci_segments=4
[ -z "$PASS_BY" ] || platform=$platform,iommufd=on
PASS_BY=
find_disk
fill_disk
check disk_is_bound give_to_vfio $disk

# One disk more than those that the files are for: the root disk. With the console and the entropy device: forty.
disks=""
for number in $(seq 1 37); do
  segment=$((number % 4))
  echo "disk $number is on segment $segment" >$T/d$number.img
  truncate -s 1M $T/d$number.img
  disks="$disks path=$T/d$number.img,id=d$number,serial=d$number,pci_segment=$segment"
done
DISK_OPTIONS=$disks

# There is one host bridge in each segment besides what vm.info has.
functions() {
  guest $1 "ls -1 /sys/bus/pci/devices" && grep -v ':00:00\.0$' $T/out | sort >$T/seen || return 1
  remote $1 info | sed -n 's/.*"pci_bdf": *"\([0-9a-f:.]*\)".*/\1/p' | sort -u >$T/told
  [ "$(grep -c ':00:00\.0$' $T/out)" = 4 ] && cmp -s $T/seen $T/told && [ "$(wc -l <$T/seen)" = "$2" ] ||
    { echo "seen:"; cat $T/out; echo "told:"; cat $T/told; return 1; }
}
# Runs a command in the guest with $d as the path in sysfs of the disk with a serial number, $b as its device.
with_disk() { guest $1 "b=; for d in /sys/block/vd*; do [ \"\$(cat \$d/serial)\" != $2 ] || { b=/dev/\${d##*/}; d=\$(readlink -f \$d); break; }; done; [ -n \"\$b\" ] && { $3; }"; }
reads() {
  for number in 1 2 18 37; do
    segment=$((number % 4))
    with_disk $1 d$number "echo \$d | grep -q /pci000$segment:00/ && head -n 1 \$b" || return 1
    grep -q "^disk $number is on segment $segment\$" $T/out || { cat $T/out; return 1; }
  done
}
all_there() { functions $1 $2 && reads $1; }
# Every configuration space is reached, no BAR has been moved, and the AML has no error.
quiet() { guest $1 '! dmesg | grep -iE "ACPI (Error|Warning|BIOS)|MMCONFIG information|t claim|failed to assign|no space for|no compatible bridge window|t assign|BUG:|Oops"' || { cat $T/out; return 1; }; }

start_guest a 1 --platform $platform --pci-segment pci_segment=3,mmio64_aperture_weight=2 || failed start "the VMM did not start"
check boots_with_forty_devices wait_until $WAIT_S says a "GUEST-READY 1 vcpus"
check finds_each_and_reads all_there a 40
check nothing_is_logged quiet a

truncate -s 8M $T/hot.img
# comes NAME SEGMENT: a disk is added there, and what the guest writes is in its file.
comes() {
  remote $1 add-disk path=$T/hot.img,id=hot,serial=hot,pci_segment=$2 >$T/added || return 1
  grep -q "\"bdf\": *\"000$2:00:" $T/added || { cat $T/added; return 1; }
  wait_until 30 with_disk $1 hot "echo \$d | grep -q /pci000$2:00/" || return 1
  with_disk $1 hot 'head -c 4194304 /dev/urandom >/tmp/w; dd if=/tmp/w of=$b bs=1M conv=fsync 2>/dev/null; sha256sum </tmp/w; rm /tmp/w' || return 1
  [ "$(head -n 1 $T/out)" = "$(head -c 4194304 $T/hot.img | sha256sum)" ]
}
gone() { ! remote $1 info | grep -q '"id": *"hot"'; }
goes() { remote $1 remove-device hot && wait_until 30 gone $1 && functions $1 40 && quiet $1; }
check a_disk_comes_to_segment_3 comes a 3
check it_is_found_with_the_others functions a 41
check it_goes goes a
# The guest finds it once memory is mapped; its driver enables DMA, and what it reads has come by that.
passed_through() {
  remote a add-device path=$disk,id=passed,pci_segment=2 >$T/added && grep -q '"bdf": *"0002:00:' $T/added || { cat $T/added; return 1; }
  wait_until 60 guest a "test -b /dev/nvme0n1 && readlink -f /sys/class/nvme/nvme0/device | grep -q /pci0002:00/" && reads_what_is_there a && writes_and_reads_back a
}
check a_passed_through_disk_comes_to_segment_2 passed_through
passed_is_gone() { ! remote a info | grep -q '"id": *"passed"'; }
goes_back() {
  remote a remove-device passed && wait_until 30 passed_is_gone && guest a "test ! -e /dev/nvme0n1" && functions a 40 && quiet a
}
check it_goes_back_to_the_host goes_back
check another_comes_to_segment_1 comes a 1
refuses() { ! remote a add-disk path=$T/hot.img,id=none,pci_segment=4 2>$T/refused && grep -q "no PCI segment 4" $T/refused; }
check a_segment_that_is_not_there_is_refused refuses

reboots() {
  guest a sync && remote a reboot && wait_until $WAIT_S says_times a "GUEST-READY" 2 && all_there a 41 && quiet a
}
check they_are_there_after_a_reboot reboots
moves() { moved a b precopy && all_there b 41; }
check they_are_there_after_a_move moves
check it_goes_where_it_never_came goes b
check one_comes_there comes b 2
postcopy() { moved b d postcopy && all_there d 41; }
check they_are_there_after_a_move_in_postcopy postcopy

saved() {
  mkdir -p $T/saved
  remote d pause && remote d snapshot file://$T/saved && remote d shutdown-vmm && ends d 60 || return 1
  start_vmm c && remote c restore source_url=file://$T/saved,resume=true && wait_until 60 state_is c Running &&
    open_console c && all_there c 41
}
check they_are_there_after_a_restore saved
check it_goes_there goes c
power_button() { remote c power-button && ends c 60; }
check ends power_button
check filesystem_clean filesystem_clean
