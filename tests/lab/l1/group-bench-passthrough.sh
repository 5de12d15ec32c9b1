# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Figures for `scripts/bench passthrough-boot`: from exec to the guest's first instruction, to its driver's
# first Bus Master Enable, and to that being granted, by memory, kind of page and mode. One line each:
# FIGURE MODE PAGES MIB RUN WHAT MILLISECONDS. On the kernel with iommufd each mode is measured by that, too.
# limit_s: 2400
# on_request
# machine: -drive if=none,id=p0,file=@LAB@/vfio.img,format=raw,snapshot=on -device nvme,drive=p0,serial=passed
. ./lib.sh
. ./passthrough.sh

find_disk
check disk_is_bound give_to_vfio $disk
runs=$(sed -n 's/.*lab.runs=\([0-9]*\).*/\1/p' /proc/cmdline)
# Of the group with the name, as 'disk' has counters of its own.
value() { sed -n "s/.*\"$1\": \([0-9]*\).*/\1/p" $T/counters | head -n 1; }
measured() { remote a counters >$T/counters 2>/dev/null && [ -n "$(value $1)" ]; }
modes="none strict overlap"
[ -z "$PASS_BY" ] || modes="$modes strict-iommufd overlap-iommufd"
# measure MODE PAGES MIB RUN
measure() {
  device="--device path=$disk,id=disk,pin=${1%-iommufd}"
  case $1 in *-iommufd) device="$PASS_BY $device" ;; esac
  last=bus_master_waited_us
  [ $1 != none ] || { device=; last=first_mmio_monotonic_us; }
  pages=
  if [ $2 = 2m ]; then
    echo $(($3 / 2)) >/proc/sys/vm/nr_hugepages
    pages=,hugepages=on,hugepage_size=2M
  fi
  rm -f $T/a.sock
  # Hundredths of a second; all that follows are seconds.
  begin_ms=$(sed 's/ .*//; s/\.//; s/^0*//; s/$/0/' /proc/uptime)
  cloud-hypervisor --api-socket path=$T/a.sock --event-monitor path=$T/a.events --kernel /lab/vmlinuz \
    --initramfs /lab/initramfs.gz --cmdline "$CMDLINE" --cpus boot=1 --memory size=${3}M,shared=on$pages \
    --serial off --console off $device >$T/a.vmm.log 2>&1 &
  vmm=$!
  polls=0
  # Each look costs the machine's one CPU something.
  until measured $last; do
    polls=$((polls + 1))
    [ $polls -lt 120 ] && [ -d /proc/$vmm ] || { failed "$1_$2_$3" "no $last"; break; }
    sleep 2
  done
  since() { echo "FIGURE $1 $(($2 / 1000 - begin_ms))"; }
  key="$1 $2 $3 $4"
  since "$key first-instruction" "$(value first_instruction_monotonic_us)"
  if [ $1 != none ]; then
    asked=$(value bus_master_asked_monotonic_us)
    since "$key bus-master-asked" $asked
    since "$key bus-master-granted" $((asked + $(value bus_master_waited_us)))
    echo "FIGURE $key pinning $(sed -n 's/.*"took_ms": "\([0-9]*\)".*/\1/p' $T/a.events)"
  fi
  kill -9 $vmm
  wait $vmm 2>/dev/null
  echo 0 >/proc/sys/vm/nr_hugepages
}
run=0
# One more than counted: the first fills the page cache.
while [ $run -le ${runs:-1} ]; do
  for mode in $modes; do
    for size in 256 512 1024; do
      [ $run = 0 ] && [ $size != 256 ] && continue
      measure $mode 4k $size $run
      [ $run = 0 ] || [ $size != 1024 ] || measure $mode 2m $size $run
    done
  done
  run=$((run + 1))
done
ok measured
