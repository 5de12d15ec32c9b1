# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# takes_turns
# A Debian guest with a balloon alongside a passed-through disk: free page reporting is not offered, what
# goes into the balloon is unmapped and returned in whole pieces, and the device's DMA goes to the
# pages that the guest has, whatever it did with the balloon in between.
# limit_s: 1500
# machine: -drive if=none,id=p0,file=@LAB@/vfio.img,format=raw,snapshot=on -device nvme,drive=p0,serial=passed
. ./lib.sh
. ./balloon-lib.sh
. ./passthrough.sh
# The guest reads and writes hundreds of MiB.
GUEST_S=300

find_disk
fill_disk
check disk_is_bound give_to_vfio $disk
start_guest a 1 --device path=$disk,id=disk --balloon size=0,free_page_reporting=on,prezero_hints=on || { failed start "the VMM did not start"; exit 1; }
check boots_with_disk_and_balloon wait_until $WAIT_S says a "GUEST-READY 1 vcpus"
guest a 'busybox mount -o remount,size=95% /tmp'

# counter of the balloon: passthrough.sh has one of its own.
of_balloon() { remote a counters | tr ',{}' '\n\n\n' | sed -n "s/^ *\"$1\": *\([0-9]*\).*/\1/p" | head -n 1; }
balloon_is() { [ "$(of_balloon actual_bytes)" = $(($1 * MIB)) ]; }

reporting_is_masked() {
  cat $T/a.vmm.log
  grep "free_page_reporting=on is not offered" $T/a.vmm.log | grep "passed-through" | grep -q "virtio-mem" || return 1
  # Bit 5 of what the guest's device offers, and bit 6, which depends on it.
  guest a 'cut -c6-7 /sys/bus/virtio/drivers/virtio_balloon/virtio*/features' && [ "$(cat $T/out)" = 00 ]
}
check reporting_is_masked_with_a_word_of_why reporting_is_masked

freed_memory_stays() {
  guest a 'head -c 100663296 /dev/zero | tr "\0" "x" >/tmp/fill' || return 1
  before=$(blocks a)
  guest a 'rm /tmp/fill; sleep 4' || return 1
  echo "$before MiB, then $(blocks a) MiB"
  [ "$(blocks a)" = "$before" ] && [ "$(of_balloon reported_bytes)" = 0 ]
}
check freed_memory_stays_with_the_device freed_memory_stays
check reads_by_dma reads_what_is_there a

pinned_mib() { remote a info | tr ',{}' '\n\n\n' | sed -n 's/^ *"pinned_bytes": *\([0-9]*\).*/\1/p' | awk '{ print $1 / 1048576 }'; }

# 120 MiB go in and out twice; in between, and while they are in, the disk is read into, and
# written from, pages that were in the balloon or are next to such. What is in the balloon in whole
# pieces is not with the host; what comes out is mapped again before the guest may let the disk at it.
in_and_out() {
  pinned=$(blocks a) given=0
  [ "$(pinned_mib)" = "$pinned" ] || { echo "$(pinned_mib) MiB are pinned, the host has $pinned"; return 1; }
  for n in 1 2; do
    remote a resize --balloon 120M && wait_until 60 balloon_is 120 || { echo "actual $(of_balloon actual_bytes)"; return 1; }
    gone=$((pinned - $(blocks a)))
    [ "$(pinned_mib)" = $((pinned - gone)) ] || { echo "$(pinned_mib) MiB are pinned, the host has $(blocks a)"; return 1; }
    # The rest lies in pieces of which the guest kept something.
    [ $gone -ge 60 ] || { echo "the host has $gone MiB back of 120"; return 1; }
    echo "LAB note: alongside a device: the host has $gone MiB back of 120 in the balloon"
    guest a 'echo 3 >/proc/sys/vm/drop_caches' && reads_what_is_there a || { echo "round $n: wrong with the balloon full"; return 1; }
    # Half of it comes out, and memory is read into at once.
    remote a resize --balloon 60M && wait_until 60 balloon_is 60 || return 1
    guest a 'echo 3 >/proc/sys/vm/drop_caches' && reads_what_is_there a || { echo "round $n: wrong with the balloon half full"; return 1; }
    [ $((pinned - $(blocks a))) -lt $gone ] || { echo "nothing came back"; return 1; }
    remote a resize --balloon 0 && wait_until 60 balloon_is 0 || return 1
    [ "$(blocks a)" = "$pinned" ] && [ "$(pinned_mib)" = "$pinned" ] || { echo "$(blocks a) MiB of $pinned came back, $(pinned_mib) are pinned"; return 1; }
    # As much of the disk as there is free memory: pages that were in the balloon, first touched by the
    # device.
    guest a 'echo 3 >/proc/sys/vm/drop_caches; dd if=/tmp/want of=/dev/nvme0n1 bs=1M seek=16 conv=fsync 2>/dev/null; echo 3 >/proc/sys/vm/drop_caches; for n in 1 2; do dd if=/dev/nvme0n1 bs=1M skip=16 count=32 2>/dev/null | sha256sum; dd if=/dev/nvme0n1 of=/tmp/more bs=1M skip=64 count=80 2>/dev/null; rm /tmp/more; echo 3 >/proc/sys/vm/drop_caches; done | sort -u; sha256sum </tmp/want' || return 1
    [ "$(wc -l <$T/out)" = 2 ] && [ "$(sort -u $T/out | wc -l)" = 1 ] || { cat $T/out; echo "round $n: wrong with the balloon empty"; return 1; }
  done
  [ "$(of_balloon inflated_given_back_bytes)" -ge $((2 * 60 * MIB)) ]
}
guest a 'head -c 33554432 /dev/urandom >/tmp/want'
check dma_goes_to_the_guests_pages_whatever_the_balloon_does in_and_out
check writes_by_dma writes_and_reads_back a
no_faults() { ! dmesg | grep -E 'handling fault|fault addr|fault reason'; }
check the_iommu_saw_no_fault no_faults

# The balloon is full before the device is there: all of memory is pinned, and what is in whole pieces
# goes again.
power_button() { remote a power-button && wait_until 60 says a "POWER-BUTTON" && ends a 60; }
check power_button_ends_the_vmm power_button
start_guest b 1 --balloon size=120M || { failed start_b "the VMM did not start"; exit 1; }
b_is() { [ "$(remote b counters | tr ',{}' '\n\n\n' | sed -n 's/^ *"actual_bytes": *\([0-9]*\).*/\1/p' | head -n 1)" = $((120 * MIB)) ]; }
later() {
  wait_until $WAIT_S says b "GUEST-READY" && wait_until 60 b_is || return 1
  all=$(remote b info | tr ',{}' '\n\n\n' | sed -n 's/^ *"memory_actual_size": *\([0-9]*\).*/\1/p' | awk '{ print $1 / 1048576 + 120 }')
  remote b add-device path=$disk,id=disk && wait_until 60 happened b passthrough-pinned || return 1
  wait_until 20 below b $((all - 60)) || { echo "$(blocks b) MiB of $all"; return 1; }
  wait_until 60 guest b 'test -b /dev/nvme0n1' && reads_what_is_there b || return 1
  remote b resize --balloon 0 && wait_until 60 above b $all || return 1
  guest b 'echo 3 >/proc/sys/vm/drop_caches' && reads_what_is_there b
}
check a_device_that_comes_later_is_beside_the_same_balloon later
check the_iommu_saw_no_fault_of_that_one no_faults
off() { remote b shutdown-vmm && ends b 60; }
check it_ends off
