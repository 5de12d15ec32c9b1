# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Figures for `scripts/bench passthrough-boot`: from exec to the guest's first instruction, to its driver's
# first Bus Master Enable, and how long that waited; and what opening the device and mapping memory take, by
# memory, kind of page and mode, and for QEMU. One line each: FIGURE MODE PAGES MIB RUN WHAT MILLISECONDS. On the
# kernel with iommufd each mode is measured by that, too.
# limit_s: 7200
# cpus: 2
# on_request
# machine: -m 9G -mem-prealloc
# machine: -drive if=none,id=p0,file=@LAB@/vfio.img,format=raw,snapshot=on -device nvme,drive=p0,serial=passed
. ./lib.sh
. ./passthrough.sh

find_disk
check disk_is_bound give_to_vfio $disk
runs=$(sed -n 's/.*lab.runs=\([0-9]*\).*/\1/p' /proc/cmdline)
# Of the group with the name, as 'disk' has counters of its own.
value() { sed -n "s/.*\"$1\": \([0-9]*\).*/\1/p" $T/counters | head -n 1; }
measured() { remote a counters >$T/counters 2>/dev/null && [ -n "$(value $1)" ]; }
# 'populated' has no pipeline: all memory is populated, and then mapped.
modes="none populated strict overlap pool qemu"
[ -z "$PASS_BY" ] || modes="$modes strict-iommufd overlap-iommufd prepinned-iommufd"
# The same with a guest that allows DMA as its first thing.
modes="$modes early-overlap early-pool"
[ -z "$PASS_BY" ] || modes="$modes early-overlap-iommufd early-prepinned-iommufd"
# LAB_WORDS=lab.modes=strict,qemu: some of them only.
chosen=$(sed -n 's/.*lab.modes=\([a-z,-]*\).*/\1/p' /proc/cmdline | tr , ' ')
modes=${chosen:-$modes}
# set_aside PAGES MIB: huge pages, if it takes them; transparent ones are there for who asks.
set_aside() {
  case $1 in thp) of_files=advise ;; *) of_files=never ;; esac
  echo $of_files >/sys/kernel/mm/transparent_hugepage/shmem_enabled
  [ $1 = 2m ] || return 0
  echo 1 >/proc/sys/vm/compact_memory
  echo $(($2 / 2)) >/proc/sys/vm/nr_hugepages
}
# uptime_ms: the clock that the VMM's counters have, in hundredths of a second.
uptime_ms() { sed 's/ .*//; s/\.//; s/^0*//; s/$/0/' /proc/uptime; }
now_us() { bash -c 'echo ${EPOCHREALTIME/./}'; }

# with_pool PAGES MIB TABLE...: a pool that has the memory of one VM ready, as the lines of the table say.
with_pool() {
  case $1 in 4k) pages=4K ;; thp) pages=thp ;; 2m) pages=2M ;; esac
  of_slot="size = '${2}M'"
  shift 2
  printf '%s\n' "socket = '$T/pool.sock'" "stats_socket = '$T/stats.sock'" "idle_only = false" "bandwidth = '0'" \
    "keep_free = '0'" "$@" "$of_slot" "pages = '$pages'" >$T/pool.toml
  rm -f $T/pool.sock $T/stats.sock
  prezero-pool run --config $T/pool.toml >$T/pool.vmm.log 2>&1 &
  pool=$!
  wait_until 120 slot_is_ready
}
slot_is_ready() { prezero-pool --config $T/pool.toml stats 2>/dev/null | grep -q 'state="ready".* 1$'; }

# measure_qemu PAGES MIB RUN: QEMU with the same guest and disk. KVM's own trace keeps the first entries into a
# guest, QEMU's has the writes to the disk's configuration.
TRACING=/sys/kernel/tracing
mount -t tracefs tracefs $TRACING
asks_for_dma() { sed -n 's/^[0-9]*@\([0-9]*\)\.\([0-9]*\):vfio_pci_write_config .*@0x4, 0x[0-9a-f]*[4-7c-f], len=.*/\1\2/p' $T/q.trace | head -n 1; }
has_asked() { [ -n "$(asks_for_dma)" ] || [ ! -d /proc/$vmm ]; }
measure_qemu() {
  huge=
  [ $1 != 2m ] || huge=,hugetlb=on,hugetlbsize=2M
  set_aside $1 $2
  echo vfio_pci_write_config >$T/q.trace-events
  : >$T/q.trace
  for set in tracing_on=0 trace_clock=mono options/overwrite=0 buffer_size_kb=64 events/kvm/kvm_entry/enable=1 tracing_on=1; do
    echo "${set#*=}" >$TRACING/${set%=*}
  done
  echo >$TRACING/trace
  begin_us=$(now_us) begin_ms=$(uptime_ms)
  qemu-system-x86_64 -L /bin/qemu -accel kvm -cpu host -M q35,memory-backend=ram -smp 1 -m ${2}M \
    -object memory-backend-memfd,id=ram,size=${2}M,share=on$huge -nodefaults -display none -no-reboot \
    -bios /bin/qemu/qboot.rom -kernel /lab/vmlinuz -initrd /lab/initramfs.gz -append "$CMDLINE" \
    -device vfio-pci,host=$(basename $disk) -msg timestamp=on -trace events=$T/q.trace-events,file=$T/q.trace \
    >$T/q.vmm.log 2>&1 &
  vmm=$!
  wait_until 240 has_asked
  asked=$(asks_for_dma)
  echo 0 >$TRACING/tracing_on
  first=$(sed -n 's/.* \([0-9]*\)\.\([0-9]*\): kvm_entry:.*/\1\2/p' $TRACING/trace | head -n 1)
  if [ -n "$asked" ] && [ -n "$first" ]; then
    key="qemu $1 $2 $3"
    echo "FIGURE $key first-instruction $((first / 1000 - begin_ms))"
    echo "FIGURE $key bus-master-asked $(((asked - begin_us) / 1000))"
    echo "FIGURE $key waited 0"
  else
    # It is the peer, not what is tested: its figure is missing.
    echo "LAB note: QEMU ended early with $2 MiB on $1 pages"
  fi
  kill -9 $vmm
  wait $vmm 2>/dev/null
  echo 0 >/proc/sys/vm/nr_hugepages
}
# measure MODE PAGES MIB RUN
measure() {
  [ $1 != qemu ] || { measure_qemu $2 $3 $4; return; }
  pin=${1#early-} zone= pool=
  pin=${pin%-iommufd} kind=$pin
  set_aside $2 $3
  if [ $kind = populated ]; then
    pin=strict zone=,prefault=on
  elif [ $kind = pool ]; then
    pin=overlap zone=,prezeroed=$T/pool.sock
    with_pool $2 $3 "[[slots]]" "count = 1" || { failed "pool_$2_$3" "no memory is ready"; return; }
  elif [ $kind = prepinned ]; then
    pin="overlap -v" zone=,prezeroed=$T/pool.sock
    with_pool $2 $3 "[[device_slots]]" "device = '$(basename $disk)'" || { failed "prepinned_$2_$3" "no slot is ready"; return; }
  fi
  device="--device path=$disk,id=disk,pci_device_id=9,pin=$pin"
  case $1 in
    early-*) kernel=/lab/test-guest initramfs= words="workload=idle prefill=0 bus_master=9" ;;
    *) kernel=/lab/vmlinuz initramfs="--initramfs /lab/initramfs.gz" words=$CMDLINE ;;
  esac
  case $1 in *-iommufd) device="$PASS_BY $device" ;; esac
  last=bus_master_waited_us
  [ $1 != none ] || { device=; last=first_mmio_monotonic_us; }
  case $2 in 4k) pages=,thp=off ;; thp) pages= ;; 2m) pages=,hugepages=on,hugepage_size=2M ;; esac
  # The file of events is appended to.
  rm -f $T/a.sock $T/a.events
  begin_ms=$(uptime_ms)
  cloud-hypervisor --api-socket path=$T/a.sock --event-monitor path=$T/a.events --kernel $kernel $initramfs \
    --cmdline "$words" --cpus boot=1 --memory size=${3}M,shared=on$pages$zone \
    --serial off --console off $device >$T/a.vmm.log 2>&1 &
  vmm=$!
  polls=0
  # Each look costs the machine's CPUs something.
  until measured $last; do
    polls=$((polls + 1))
    [ $polls -lt 120 ] && [ -d /proc/$vmm ] || { failed "$1_$2_$3" "no $last"; break; }
    sleep 2
  done
  since() { echo "FIGURE $1 $(($2 / 1000 - begin_ms))"; }
  lasted() { echo "FIGURE $1 $(($2 / 1000)).$(printf %03d $(($2 % 1000)))"; }
  key="$1 $2 $3 $4"
  [ -z "$pool" ] || grep -qE 'prezeroed-taken|prepinned-taken' $T/a.events || failed "$1_$2_$3" "the pool gave nothing"
  since "$key first-instruction" "$(value first_instruction_monotonic_us)"
  if [ $1 != none ]; then
    since "$key bus-master-asked" "$(value bus_master_asked_monotonic_us)"
    lasted "$key waited" "$(value bus_master_waited_us)"
    [ $kind != prepinned ] ||
      lasted "$key attaching" "$(sed -n 's/.*reaches all memory after \([0-9]*\) us.*/\1/p' $T/a.vmm.log)"
    echo "FIGURE $key opening $(sed -n '/passthrough-device-opened/,/}/s/.*"took_ms": "\([0-9]*\)".*/\1/p' $T/a.events)"
    echo "FIGURE $key pinning $(sed -n '/passthrough-pinned/,/}/s/.*"took_ms": "\([0-9]*\)".*/\1/p' $T/a.events)"
  fi
  kill -9 $vmm $pool
  wait $vmm $pool 2>/dev/null
  echo 0 >/proc/sys/vm/nr_hugepages
}
run=0
# One more than counted: the first fills the page cache.
while [ $run -le ${runs:-1} ]; do
  for mode in $modes; do
    measure $mode 4k 256 $run
    [ $run = 0 ] && continue
    measure $mode 4k 1024 $run
    for pages_of in 4k thp 2m; do measure $mode $pages_of 4096 $run; done
  done
  run=$((run + 1))
done
ok measured
