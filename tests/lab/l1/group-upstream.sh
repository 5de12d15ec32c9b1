# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# A Debian guest that cloud-hypervisor v53 boots (the program that --bin names), moved from it to Godwit and back, and
# between two of it, with its disk, its memory and a TCP stream in use; how long each kind of move takes. The two hosts are
# namespaces of one machine, each with a tap of one name, as two machines have them.
# on_request
# figures
# limit_s: 1800
. ./lib.sh
while read -r module; do insmod /lab/modules/$module 2>/dev/null; done </lab/modules/order

ROUNDS=$(sed -n 's/.*lab\.migrations=\([0-9]*\).*/\1/p' /proc/cmdline)
# Not in PATH, where busybox's is.
IP=/lab/ip
MIGRATION_PORT=6000
MAC=52:54:00:00:00:02
DISK_OPTIONS=,image_type=raw

# must NAME COMMAND...: as check, but nothing else makes sense without it.
must() {
  must_name=$1
  shift
  if "$@"; then ok $must_name; return 0; fi
  failed $must_name "$*"
  looks
  figures
  exit 1
}
# looks: what of the guest still goes on, for who reads why a check failed: its threads' ticks of a processor, its datagrams
# and lines of its stream, twice, and whether it answers a minute later.
looks() {
  [ -n "${guest_vm:-}" ] || return 0
  for time in first second; do
    echo "$time look: $(wc -l <$T/ticks) datagrams, $(wc -l <$T/stream) lines"
    for task in /proc/$(cat $T/$guest_vm.pid)/task/*; do
      echo "$(cat $task/comm) $(awk '{ print $3, $14, $15 }' $task/stat) $(cat $task/wchan)"
    done
    sleep 5
  done
  GUEST_S=60 guest $guest_vm "cat /proc/interrupts" && cat $T/out
  remote $guest_vm nmi
  sleep 5
  tail -n 5 $T/$guest_vm.console
}
now_us() { bash -c 'echo ${EPOCHREALTIME/./}'; }

in_host() { netns=$1; shift; nsenter --net=/run/netns/$netns "$@"; }
# host NAME ADDRESS MAC: a bridge to the machine's own, with the guest's tap in it. The tap of the destination gets the address
# of that of the source, as v53 sends it along, and a bridge takes that of a port unless it has one of its own.
host() {
  $IP netns add $1 && $IP link add port-$1 type veth peer name out netns $1 || return 1
  $IP link set port-$1 master br0 && $IP link set port-$1 up || return 1
  in_host $1 $IP link set lo up && in_host $1 $IP link add br0 address $3 type bridge && in_host $1 $IP tuntap add dev lab0 mode tap || return 1
  for port in out lab0; do in_host $1 $IP link set $port master br0 && in_host $1 $IP link set $port up || return 1; done
  in_host $1 $IP addr add $2/24 dev br0 && in_host $1 $IP link set br0 up
}
network() {
  mkdir -p /run/netns
  $IP link add br0 address 02:00:00:00:09:01 type bridge && $IP addr add 10.9.0.1/24 dev br0 && $IP link set br0 up &&
    host a 10.9.0.11 02:00:00:00:09:0a && host b 10.9.0.12 02:00:00:00:09:0b
}
address_of() { [ $1 = a ] && echo 10.9.0.11 || echo 10.9.0.12; }
# options_of PROGRAM: linked to glibc, the source of v53 makes a system call that its own filter kills it for, with the guest.
options_of() { [ $1 = godwit ] || echo "--seccomp false -v"; }
# launched PROGRAM HOST: what stands before the VMM's name.
launched() {
  echo "nsenter --net=/run/netns/$2 env PATH=$([ $1 = v53 ] && echo /lab/upstream:)$PATH"
}

must two_hosts network
echo "LAB note: $(/lab/upstream/cloud-hypervisor --version | sed -n 1p)"
LAUNCH=$(launched v53 a)
start_guest v0 2 $(options_of v53) --net tap=lab0,mac=$MAC --balloon size=16M,deflate_on_oom=on,free_page_reporting=on || failed start "the VMM did not start"
must v53_boots_debian_with_two_vcpus wait_until $WAIT_S says v0 "GUEST-READY 2 vcpus"
# Where the guest is.
guest_vm=v0 guest_program=v53 guest_host=a number=0
has_drivers() { guest v0 'for d in blk net console rng balloon; do ls /sys/bus/virtio/drivers/virtio_$d | grep -q "^virtio[0-9]" || echo no $d; done' && [ ! -s $T/out ] || { cat $T/out; return 1; }; }
check drivers_of_all_devices has_drivers

# What is in memory and what is on the disk; a loop that writes to the disk, reads back and compares.
work='head -c 16777216 /dev/urandom >/tmp/keep; sha256sum </tmp/keep; head -c 4194304 /dev/urandom >/root/known; sha256sum </root/known; sync; echo 0 >/tmp/rounds; (n=0; while :; do head -c 262144 /dev/urandom >/root/w; s=$(sha256sum </root/w); sync; echo 1 >/proc/sys/vm/drop_caches; [ "$s" = "$(sha256sum </root/w)" ] || echo bad >>/root/bad; n=$((n+1)); echo $n >/tmp/r; mv /tmp/r /tmp/rounds; done) >/dev/null 2>&1 & :'
must starts_disk_load guest v0 "$work"
kept=$(sed -n 1p $T/out)
mkdir -p $T/sums
sed -n 2p $T/out >$T/sums/known
# A TCP stream that lasts over all moves: one line every tenth of a second.
nc -l -p 7003 </dev/null >$T/stream &
must starts_stream guest v0 '(n=0; while :; do echo line $n; n=$((n+1)); sleep 0.1; done >/dev/tcp/10.9.0.1/7003) >/dev/null 2>&1 & :'
# Datagrams, many a second, of which none waits for another: what is missing between two is how long the guest stood.
socat -u UDP-RECV:7004 STDOUT | stamp >$T/ticks &
must starts_ticks guest v0 'mkfifo /tmp/never; (exec 3>/dev/udp/10.9.0.1/7004 4<>/tmp/never; while :; do echo t >&3; read -t 0.01 -u 4; done) >/dev/null 2>&1 & :'
lines() { [ "$(wc -l <$T/$1)" -gt "$2" ]; }
check stream_flows wait_until 60 lines stream 10
check ticks_flow wait_until 60 lines ticks 300

# tick_after TIME
tick_after() { tail -n 1 $T/ticks | awk -v at=$1 '{ exit !($2 + 0 > at) }'; }
# longest_gap LINE: between any two of the ticks from that line on, in ms.
longest_gap() { tail -n +$1 $T/ticks | awk 'NF == 2 { if (last && $2 - last > most) most = $2 - last; last = $2 } END { printf "%.1f\n", most / 1000 }'; }

# source_says: how long the guest stood by what its last VMM has said of the move, in ms.
source_says() {
  if [ $guest_program = v53 ]; then
    sed -n 's/.*Migration completed after .* with a downtime of \([0-9]*\)ms.*/\1/p' $T/$guest_vm.vmm.log | tail -n 1
  else
    sed -n 's/.*"downtime_us": *"*\([0-9]*\).*/\1/p' $T/$guest_vm.events | awk '{ last = $1 } END { if (NR) printf "%.0f\n", last / 1000 }'
  fi
}
# move PROGRAM: to that one at the other host, and how long it took.
move() {
  number=$((number + 1))
  local to=v$number to_host began ended first
  [ $guest_host = a ] && to_host=b || to_host=a
  LAUNCH=$(launched $1 $to_host)
  start_vmm $to $(options_of $1) || { echo "$1 does not start"; return 1; }
  url=tcp:$(address_of $to_host):$MIGRATION_PORT
  { remote $to receive-migration receiver_url=$url >$T/$to.receive.log 2>&1
    code=$?
    now_us >$T/$to.at
    echo $code >$T/$to.received; } >/dev/null 2>&1 &
  wait_until 30 grep -q migration-receive-ready $T/$to.events || { echo "$1 does not listen"; return 1; }
  first=$(wc -l <$T/ticks)
  began=$(now_us)
  # That of v53 is answered when it has begun.
  remote $guest_vm send-migration $([ $guest_program = v53 ] || echo --wait) destination_url=$url || return 1
  wait_until 400 test -s $T/$to.received || { echo "it never arrived"; return 1; }
  [ "$(cat $T/$to.received)" = 0 ] || { cat $T/$to.receive.log; return 1; }
  ended=$(cat $T/$to.at)
  ends $guest_vm 60 && state_is $to Running && open_console $to || return 1
  wait_until 60 tick_after $((ended + 300000)) || { echo "no datagrams come from it"; return 1; }
  said=$(source_says)
  [ -n "$said" ] || { echo "$guest_program does not say how long the guest stood"; tail -n 30 $T/$guest_vm.events; return 1; }
  # What Godwit knows of it is for who looks into the log.
  [ $1 = v53 ] || remote $to migration-progress | tr -d ' \n'
  echo " $guest_program-to-$1"
  echo "$guest_program-to-$1 $said $(longest_gap $first) $(((ended - began) / 1000))" | tee -a $T/moves
  guest_vm=$to guest_program=$1 guest_host=$to_host
}
# still_right: its memory, its disk, its programs, its stream; it leaves a file that is compared when it has ended.
still_right() {
  local before
  before=$(wc -l <$T/stream)
  guest $guest_vm 'cat /tmp/rounds; sha256sum </tmp/keep' || return 1
  [ "$(sed -n 2p $T/out)" = "$kept" ] || { echo "its memory has other contents"; return 1; }
  rounds=$(sed -n 1p $T/out)
  guest $guest_vm "for i in \$(seq 300); do [ \$(cat /tmp/rounds) -gt $rounds ] && break; sleep 0.1; done; [ \$(cat /tmp/rounds) -gt $rounds ] && [ ! -e /root/bad ]" || { echo "its disk load does not go on, or finds other contents"; return 1; }
  guest $guest_vm "head -c 262144 /dev/urandom >/root/after-$number; sync; sha256sum </root/after-$number" || return 1
  cp $T/out $T/sums/after-$number
  guest $guest_vm 'dmesg | grep -E "I/O error|EXT4-fs error|Oops|BUG:|soft lockup|hung task|balloon.*fail" | tail -n 5' && [ ! -s $T/out ] || { cat $T/out; return 1; }
  wait_until 60 lines stream $((before + 5))
}
# One name for each kind of move, as often as it is made.
there_and_back() {
  for to in godwit v53 v53; do
    moving=$guest_program-to-$to-$1
    must ${moving}_moves move $to
    must ${moving}_all_is_right still_right
  done
}
# median FIELD KIND: with its range and number, of what was measured.
median() { awk -v f=$1 -v kind=$2 '$1 == kind { print $f }' $T/moves | sort -n | awk '{ v[NR] = $1 } END { printf "%s/%s/%s/%d\n", NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2, v[1], v[NR], NR }'; }
figures() {
  [ -s $T/moves ] || return 0
  [ -z "${quiet:-}" ] || echo "LAB FIGURE upstream $quiet ms without a datagram, no move"
  for kind in v53-to-v53 v53-to-godwit godwit-to-v53; do
    grep -q "^$kind " $T/moves || continue
    echo "LAB FIGURE upstream $(median 2 $kind) ms $kind, downtime that the source says"
    echo "LAB FIGURE upstream $(median 3 $kind) ms $kind, longest time without a datagram"
    echo "LAB FIGURE upstream $(median 4 $kind) ms $kind, in all"
  done
}

# What the machine itself makes of it: the longest time between two datagrams while nothing moves.
first=$(wc -l <$T/ticks)
wait_until 60 lines ticks $((first + 500))
quiet=$(longest_gap $((first + 1)))
round=0
while [ $round -lt $ROUNDS ]; do
  round=$((round + 1))
  there_and_back $round
done
figures
stream_is_whole_here() { stream_is_whole && lines stream 100; }
check stream_is_whole stream_is_whole_here
power_button() { remote $guest_vm power-button && wait_until 60 says $guest_vm "POWER-BUTTON" && ends $guest_vm 60; }
check power_button_after_moves power_button
check filesystem_clean filesystem_clean
# What the guest said of its files is what the disk holds.
disk_holds() {
  mkdir -p $T/disk && mount -t ext4 -o ro $ROOT_DISK $T/disk || return 1
  for file in $T/sums/*; do
    [ "$(sha256sum <$T/disk/root/${file##*/})" = "$(cat $file)" ] || { echo "${file##*/} has other contents"; umount $T/disk; return 1; }
  done
  [ "$(ls $T/sums | wc -l)" = $((number + 1)) ] && [ ! -e $T/disk/root/bad ]
  set -- $?
  umount $T/disk
  return $1
}
check disk_holds_what_was_written disk_holds
