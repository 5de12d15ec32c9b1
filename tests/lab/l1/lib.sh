# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the groups share: starting a VMM, talking to its guest over the console, checks. Busybox sh.

WAIT_S=${WAIT_S:-240}
# QEMU's emulation (10.0) delivers an interrupt that KVM injects a second time now and then, whatever the guest's
# interrupt flag says. Linux takes a lock in its handler of asynchronous page faults, and stops for good there.
CMDLINE="console=hvc0 quiet panic=5 no-kvmapf"
ROOT_DISK=${ROOT_DISK:-/dev/nvme0n1}
T=/tmp/lab
mkdir -p $T

ok() { echo "LAB ok $1"; }
# failed NAME WHY: reports and shows what the VMMs said.
failed() {
  echo "LAB FAILED $1: $2"
  for log in $T/*.vmm.log $T/*.console; do
    [ -f "$log" ] && { echo "--- $log"; tail -n 25 "$log"; }
  done
}
# check NAME COMMAND...: one test.
check() {
  name=$1
  shift
  if "$@"; then ok "$name"; else failed "$name" "$*"; fi
}

# wait_until SECONDS COMMAND...: polls until the command is true.
wait_until() {
  # The command may wait as well.
  local limit=$(($(cut -d. -f1 /proc/uptime) + $1))
  shift
  until "$@"; do
    [ "$(cut -d. -f1 /proc/uptime)" -ge "$limit" ] && return 1
    sleep 0.2
  done
}

remote() {
  vm=$1
  shift
  # A request that is never answered is a failed check, and not a machine that stops.
  timeout 400 ch-remote --pretty --api-socket $T/$vm.sock "$@"
}
answers() { remote "$1" ping >/dev/null 2>&1; }
state_is() { remote "$1" info 2>/dev/null | grep -q "\"state\": *\"$2\""; }

# confinement ARG...: with LAB_WORDS=lab.landlock, the options that confine a VMM whose VM the arguments describe. Beside
# the files of its VM it has those that a group plugs in later.
confinement() {
  grep -qw lab.landlock /proc/cmdline || return 0
  case " $* " in
    *" --landlock "*) ;;
    *" --kernel "* | *" --firmware "*)
      echo "--landlock --landlock-rules path=$T,access=rw path=/lab,access=r path=/dev,access=rw path=/sys,access=rw" ;;
  esac
}
# start_vmm NAME ARG...: a VMM with an API socket; its pid is in $T/NAME.pid. $LAUNCH stands before it,
# $PASS_BY says how devices are passed through.
start_vmm() {
  vm=$1
  shift
  # The shell around it keeps the exit code, also when the reader is not its parent.
  {
    ${LAUNCH:-} cloud-hypervisor --api-socket path=$T/$vm.sock --event-monitor path=$T/$vm.events ${PASS_BY:-} "$@" $(confinement "$@") >$T/$vm.vmm.log 2>&1 &
    echo $! >$T/$vm.pid
    wait $!
    echo $? >$T/$vm.exit
  } >/dev/null 2>&1 &
  wait_until 30 answers $vm
}
# start_guest NAME VCPUS ARG...: a VMM that boots the Debian guest.
start_guest() {
  vm=$1
  vcpus=$2
  shift 2
  start_vmm $vm --kernel ${GUEST_KERNEL:-/lab/vmlinuz} --initramfs ${GUEST_INITRAMFS:-/lab/initramfs.gz} --cmdline "$CMDLINE" \
    --cpus boot=$vcpus${CPUS:-} --memory ${MEMORY:-size=256M,shared=on} --disk path=$ROOT_DISK${DISK_OPTIONS:-} --rng src=/dev/urandom \
    --serial off --console pty "$@" && open_console $vm
}
# has_terminal NAME: the VM is there, and $pty is its terminal.
has_terminal() {
  pty=$(remote "$1" info | sed -n 's/.*"file": *"\(\/dev\/pts\/[0-9]*\)".*/\1/p' | head -n 1)
  [ -n "$pty" ]
}
# open_console NAME: collects what the guest prints in $T/NAME.console from now on.
open_console() {
  wait_until 60 has_terminal "$1" || return 1
  echo "$pty" >$T/$1.pty
  stty -F "$pty" raw -echo
  cat "$pty" >>$T/$1.console 2>/dev/null &
}
says() { tr -d '\r' <$T/$1.console | grep -q "$2"; }
# says_times NAME TEXT COUNT: the console has at least that many lines with the text.
says_times() { [ "$(tr -d '\r' <$T/$1.console | grep -c "$2")" -ge "$3" ]; }

# guest NAME COMMAND: runs a command in the guest; its output is in $T/out, its exit code is ours.
guest() {
  # In a file: a subshell's count would be forgotten, and an older answer taken for this one.
  serial_number=$(($(cat $T/serial 2>/dev/null || echo 0) + 1))
  echo $serial_number >$T/serial
  mark="END-$$-$serial_number-$1"
  echo "echo BEGIN-$$-$serial_number-$1; { $2; }; echo $mark=\$?" >"$(cat $T/$1.pty)"
  wait_until "${GUEST_S:-90}" says "$1" "^$mark=" || { echo "the guest did not answer: $2"; return 99; }
  tr -d '\r' <$T/$1.console | sed -n "/^BEGIN-$$-$serial_number-$1\$/,/^$mark=/p" | sed '1d;$d' >$T/out
  return "$(tr -d '\r' <$T/$1.console | sed -n "s/^$mark=\([0-9]*\).*/\1/p" | tail -n 1)"
}

# ended PID: a child that is not reaped yet counts as ended, but not while threads of it are left: they
# hold its devices.
ended() {
  [ -d "/proc/$1" ] || return 0
  grep -q '^State:.*Z' "/proc/$1/status" 2>/dev/null && [ "$(ls "/proc/$1/task" 2>/dev/null | wc -l)" -le 1 ]
}
# ends NAME SECONDS: the VMM ends by itself, with exit code 0.
ends() {
  wait_until "$2" test -s $T/$1.exit || { echo "$1 does not end"; return 1; }
  [ "$(cat $T/$1.exit)" = 0 ] || { echo "$1 ended with $(cat $T/$1.exit)"; return 1; }
}
# sent FROM TO MODE [OPTION]: moves a guest to a new VMM on this machine, which receives it with one more option; the old
# one has ended.
sent() {
  start_vmm $2 || return 1
  remote $2 receive-migration "receiver_url=unix:$T/$2.mig,memory_mode=$3${4:+,$4}" >$T/$2.receive.log 2>&1 &
  receiver=$!
  wait_until 30 test -S $T/$2.mig || return 1
  remote $1 send-migration --wait destination_url=unix:$T/$2.mig,memory_mode=$3 || return 1
  wait $receiver || { cat $T/$2.receive.log; return 1; }
  ends $1 60
}
# moved FROM TO MODE [OPTION]: the same, and the guest runs there, with its console open.
moved() { sent $1 $2 $3 "${4:-}" && state_is $2 Running && open_console $2; }
filesystem_clean() { e2fsck -fn $ROOT_DISK >$T/fsck 2>&1 || { cat $T/fsck; return 1; }; }

tap_up() {
  ip tuntap add dev $1 mode tap 2>/dev/null || tunctl -t $1 >/dev/null
  ip addr add 10.9.0.1/24 dev $1
  ip link set $1 up
}
# uses_pairs NAME: the guest's network device has two pairs of queues.
uses_pairs() { guest $1 'ls -d /sys/class/net/eth0/queues/rx-* /sys/class/net/eth0/queues/tx-* | wc -l' && [ "$(tail -n 1 $T/out)" = 4 ] || { cat $T/out; return 1; }; }
# stream_is_whole: $T/stream has numbered lines without a gap, of which the last may be cut.
stream_is_whole() {
  head -n -1 $T/stream | awk '$0 != "line " NR-1 {print "line " NR ": " $0; bad=1; exit} END {exit bad}'
}
# from_guest NAME and to_guest NAME: 4 MiB over the network, checksums compared.
from_guest() {
  nc -l -p 7001 </dev/null >$T/got &
  receiver=$!
  guest $1 "head -c 4194304 /dev/urandom >/root/out.bin; sha256sum </root/out.bin; cat /root/out.bin >/dev/tcp/10.9.0.1/7001" || return 1
  wait_until 60 ended $receiver || { kill $receiver; return 1; }
  [ "$(head -n 1 $T/out)" = "$(sha256sum <$T/got)" ]
}
to_guest() {
  head -c 4194304 /dev/urandom >$T/send
  nc -l -p 7002 <$T/send >/dev/null &
  guest $1 "cat </dev/tcp/10.9.0.1/7002 >/root/in.bin; sha256sum </root/in.bin" || return 1
  [ "$(head -n 1 $T/out)" = "$(sha256sum <$T/send)" ]
}
