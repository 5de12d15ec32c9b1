# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the groups with passed-through devices share. Busybox sh; after lib.sh.

PCI=/sys/bus/pci/devices
# PASS_BY: what every VMM is told; PINNED: where the kernel counts what a process has pinned.
if grep -q lab-iommufd /proc/cmdline; then
  PASS_BY="--platform iommufd=on" PINNED=VmPin
  echo 1 >/sys/module/iommufd/parameters/allow_unsafe_interrupts
else
  PASS_BY="" PINNED=VmLck
  echo 1 >/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts
fi
# pinned NAME: KiB that the VMM has pinned.
pinned() { sed -n "s/^$PINNED:[^0-9]*\([0-9]*\).*/\1/p" "/proc/$(cat $T/$1.pid)/status"; }
pinned_is() { [ "$(pinned $1)" = $2 ]; }
# restarts_pinned NAME PINNER KIB: the guest restarts itself, and all the while PINNER has that much pinned.
restarts_pinned() {
  before=$(grep -c '"event": "passthrough-kept"' $T/$1.events)
  echo "sync; busybox reboot -f || reboot -f" >"$(cat $T/$1.pty)"
  restarted() {
    pinned_is $2 $3 || { echo "$(pinned $2) KiB are pinned"; return 0; }
    says_times $1 "GUEST-READY" 2
  }
  wait_until $WAIT_S restarted $1 $2 $3 && pinned_is $2 $3 && says_times $1 "GUEST-READY" 2 &&
    [ "$(grep -c '"event": "passthrough-kept"' $T/$1.events)" = $((before + 1)) ]
}

# give_to_vfio DIRECTORY [DRIVER]: binds a function to vfio-pci, or a variant of it.
give_to_vfio() {
  function=$(basename $1)
  driver=${2:-vfio-pci}
  echo $driver >$1/driver_override
  [ ! -e $1/driver ] || echo $function >$1/driver/unbind
  echo $function >/sys/bus/pci/drivers_probe
  [ "$(basename "$(readlink $1/driver)")" = $driver ]
}
# find_disk: the disk to pass through is $own here, and its function $disk.
find_disk() {
  wait_until 20 test -b /dev/nvme1n1
  # Which of the two controllers is which is not settled.
  ROOT_DISK=/dev/$(grep -ls '^lab' /sys/class/nvme/*/serial | cut -d/ -f5)n1
  own=$(grep -ls '^passed' /sys/class/nvme/*/serial | cut -d/ -f5)
  disk=$PCI/$(basename "$(readlink /sys/class/nvme/$own/device)")
}
# fill_disk: what the guest is to find there; it comes by DMA, from nowhere else.
fill_disk() {
  head -c 8388608 /dev/urandom >$T/known
  dd if=$T/known of=/dev/${own}n1 bs=1M conv=fsync 2>/dev/null
}
reads_what_is_there() {
  guest $1 "head -c 8388608 /dev/nvme0n1 | sha256sum" && [ "$(head -n 1 $T/out)" = "$(sha256sum <$T/known)" ]
}
writes_and_reads_back() {
  guest $1 "head -c 33554432 /dev/urandom >/tmp/w; dd if=/tmp/w of=/dev/nvme0n1 bs=1M seek=16 conv=fsync 2>/dev/null; echo 3 >/proc/sys/vm/drop_caches; sha256sum </tmp/w; dd if=/dev/nvme0n1 bs=1M skip=16 count=32 2>/dev/null | sha256sum; rm /tmp/w" &&
    [ "$(sed -n 1p $T/out)" = "$(sed -n 2p $T/out)" ]
}
# event NAME EVENT: at which line of the VMM's events it is.
event() { grep -n "\"event\": \"$2\"" $T/$1.events | tail -n 1 | cut -d: -f1; }
happened() { [ -n "$(event $1 $2)" ]; }
# info NAME TEXT: vm.info has the text.
info() {
  remote $1 info >$T/info
  grep -q "$2" $T/info
}
# counter NAME COUNTER: its value, or nothing.
counter() { remote $1 counters | sed -n "s/.*\"$2\": \([0-9]*\).*/\1/p" | head -n 1; }
# opened_meanwhile NAME: the guest ran for two seconds before its device was there.
opened_meanwhile() {
  remote $1 counters >$T/counters
  cat $T/counters
  first=$(sed -n 's/.*"first_instruction_monotonic_us": *\([0-9]*\).*/\1/p' $T/counters)
  opened=$(sed -n 's/.*"opened_monotonic_us": *\([0-9]*\).*/\1/p' $T/counters)
  [ $((opened - first)) -gt 2000000 ]
}
