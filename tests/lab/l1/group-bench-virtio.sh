# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# on_request
# limit_s: 5400
# machine: -m 3G
# Disks, networks and vsock of a Debian guest, beside the same guest under QEMU, which has an I/O thread, io_uring
# and the kernel's vhost: `scripts/bench virtio` reads the lines that begin with FIGURE and TARGET.
. ./lib.sh
. ./bench-lib.sh
. ./qemu.sh

while read -r module; do insmod ./more/modules/$module rd_nr=2 rd_size=98304 2>/dev/null || insmod ./more/modules/$module 2>/dev/null; done <./more/modules/order
# LAB_WORDS=lab.rows=block,net: some of the rows only; lab.load_s=N: how long each is measured.
rows=$(sed -n 's/.*lab.rows=\([a-z,]*\).*/\1/p' /proc/cmdline)
has() { case ,${rows:-block,net,queues,vsock}, in *,$1,*) ;; *) return 1 ;; esac; }
LOAD_S=$(sed -n 's/.*lab.load_s=\([0-9]*\).*/\1/p' /proc/cmdline)
LOAD_S=${LOAD_S:-3}
GUEST_INITRAMFS=/lab/initramfs-vsock.gz
GUEST_S=240
RAW=/dev/ram0
QCOW2=$T/images/data.qcow2
VSOCK_PORT=7101
mkdir -p $T/images $T/rows
prepared() {
  ./mke2fs -q -t ext4 /dev/ram1 && mount -t ext4 /dev/ram1 $T/images && cp data.qcow2 $QCOW2 &&
    dd if=/dev/zero of=$RAW bs=1M count=64 2>/dev/null && test -c /dev/vhost-net && test -c /dev/vhost-vsock
}
# Both VMMs make the tap, with the queues and headers that they want.
tap_is_up() { [ -d /sys/class/net/lab0 ] && ip addr add 10.9.0.1/24 dev lab0 && ip link set lab0 up; }
# start WHO QUEUES: the guest $vm has its disks as vdb (raw) and vdc (qcow2).
start() {
  vm=$1
  rm -f $T/$vm.*
  case $1 in
    ours)
      start_guest ours $2 --disk path=$RAW,direct=on,image_type=raw,num_queues=1 path=$QCOW2,direct=on,image_type=qcow2,num_queues=1 \
        --net tap=lab0,mac=52:54:00:00:00:02,num_queues=$((2 * $2)) --vsock cid=3,socket=$T/vsock || return 1
      ;;
    qemu)
      queues=
      [ $2 = 1 ] || queues=,queues=$2
      QEMU_VCPUS=$2 start_qemu qemu "" \
        -drive if=none,id=raw,file=$RAW,format=raw,cache=none,aio=io_uring -device virtio-blk-pci,drive=raw,iothread=io,num-queues=1 \
        -drive if=none,id=qcow2,file=$QCOW2,format=qcow2,cache=none,aio=io_uring -device virtio-blk-pci,drive=qcow2,iothread=io,num-queues=1 \
        -netdev tap,id=net,ifname=lab0,script=no,downscript=no,vhost=$vhost$queues \
        -device virtio-net-pci,netdev=net,mac=52:54:00:00:00:02,romfile=,$([ $2 = 1 ] || echo mq=on,vectors=$((2 * $2 + 2)),)disable-legacy=on \
        -device vhost-vsock-pci,guest-cid=3,disable-legacy=on || return 1
      ;;
  esac
  wait_until 30 tap_is_up && wait_until $WAIT_S says $vm "GUEST-READY" || return 1
  nc -l -p 7002 </lab/io-load >/dev/null &
  guest $vm 'cat </dev/tcp/10.9.0.1/7002 >/tmp/io-load && chmod +x /tmp/io-load'
}
ended_both() {
  case $1 in
    ours) remote ours shutdown-vmm && ends ours 30 ;;
    qemu) kill "$(cat $T/qemu.pid)" && wait_until 30 test -s $T/qemu.exit ;;
  esac
  rm -f $T/vsock $T/vsock_*
}
# row NAME WHO ARGUMENT...: what the load in the guest gets, in a file of its own.
row() {
  file=$T/rows/$1.$2 who=$2
  shift 2
  guest $who "/tmp/io-load $*" || { cat $T/out; return 1; }
  tail -n 1 $T/out >>$file
  echo "ROW $(basename $file) $(tail -n 1 $T/out)"
}
disks() {
  for image in raw:vdb qcow2:vdc; do
    disk=/dev/${image#*:} kind=${image%:*}
    # The image has all its clusters before it is measured.
    guest $1 "busybox dd if=/dev/zero of=$disk bs=1M count=64 oflag=direct 2>/dev/null" || return 1
    for what in read write; do
      row $kind-$what-4k-1 $1 block $disk $what random 4096 1 $LOAD_S &&
        row $kind-$what-4k-32 $1 block $disk $what random 4096 32 $LOAD_S &&
        row $kind-$what-1m $1 block $disk $what sequential 1048576 4 $LOAD_S || return 1
    done
  done
}
# network WHO NAME CONNECTIONS
network() {
  row $2-send $1 send tcp:10.9.0.1:7100 $3 $LOAD_S && row $2-receive $1 receive tcp:10.9.0.1:7100 $3 $LOAD_S &&
    row $2-ask $1 ask tcp:10.9.0.1:7100 $3 $LOAD_S
}
vsock() {
  # Ours ends at Unix sockets, QEMU's in the host's kernel.
  case $1 in ours) address=unix:$T/vsock_$VSOCK_PORT ;; qemu) address=vsock:2:$VSOCK_PORT ;; esac
  ./io-load serve $address &
  server=$!
  for what in send receive ask; do
    row vsock-$what $1 $what vsock:2:$VSOCK_PORT 1 $LOAD_S || { kill $server; return 1; }
  done
  kill $server
}
# measured WHO QUEUES NAME: with the kernel's vhost or without, as $vhost says.
measured() {
  start $1 $2 || return 1
  case $3 in
    one)
      if has block; then disks $1 || return 1; fi
      if has net; then network $1 net 1 || return 1; fi
      if has vsock; then vsock $1 || return 1; fi
      ;;
    novhost) network $1 net-novhost 1 || return 1 ;;
    queues) network $1 queues $2 || return 1 ;;
  esac
  ended_both $1
}
check prepared prepared
./io-load serve tcp:0.0.0.0:7100 &
round=0
while [ $round -lt $RUNS ]; do
  for who in qemu ours; do
    vhost=on
    check ${who}_$round measured $who 1 one
    kill -9 "$(cat $T/$who.pid)" 2>/dev/null
  done
  if has net; then
    vhost=off
    check qemu_without_vhost_$round measured qemu 1 novhost
    kill -9 "$(cat $T/qemu.pid)" 2>/dev/null
  fi
  if has queues; then
    vhost=on
    for who in qemu ours; do
      check ${who}_queues_$round measured $who 2 queues
      kill -9 "$(cat $T/$who.pid)" 2>/dev/null
    done
  fi
  round=$((round + 1))
done
# compared ROW UNIT NAME...: both, and ours by QEMU's.
compared() {
  ours=$T/rows/$1.ours peer=$T/rows/$1.qemu unit=$2
  shift 2
  [ -s $ours ] && [ -s $peer ] || return 0
  figure virtio $ours $unit "ours: $*"
  figure virtio $peer $unit "QEMU: $*"
  target virtio "$(echo "$(median $ours) $(median $peer)" | awk '{ printf "%.2f", $1 / $2 }')" higher 1 "$*, by QEMU's"
}
for kind in raw qcow2; do
  for what in read write; do
    compared $kind-$what-4k-1 requests/s "$kind: $what 4 KiB at random, one at a time"
    compared $kind-$what-4k-32 requests/s "$kind: $what 4 KiB at random, 32 at a time"
    compared $kind-$what-1m requests/s "$kind: $what 1 MiB one after the other, 4 at a time"
  done
done
for net in net:"one queue" net-novhost:"one queue, QEMU without vhost" queues:"two queues, two connections"; do
  name=${net%%:*}
  [ $name != net-novhost ] || for what in send receive ask; do cp $T/rows/net-$what.ours $T/rows/net-novhost-$what.ours 2>/dev/null; done
  compared $name-send KiB/s "network, ${net#*:}: the guest sends"
  compared $name-receive KiB/s "network, ${net#*:}: the guest receives"
  compared $name-ask requests/s "network, ${net#*:}: requests answered"
done
compared vsock-send KiB/s "vsock: the guest sends"
compared vsock-receive KiB/s "vsock: the guest receives"
compared vsock-ask requests/s "vsock: requests answered"
