# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the groups share that move a Debian guest between two machines with each fault source, as often
# as GODWIT_FAULT_MOVES says. It has two vCPUs, and its memory, its disk and a TCP stream are in use.
# Sourced by the first machine, after lib.sh and hosts.sh.

MOVES=$(sed -n 's/.*lab.moves=\([0-9]*\).*/\1/p' /proc/cmdline)
MOVES=${MOVES:-1}
# A busy host is no reason to give up.
GUEST_S=600
BAD="I/O error|Oops|BUG:|soft lockup|hung task|segfault"
STREAM_PORT=7003

# What the guest does: one loop reads back from its disk what it has written, one copies what it has in
# memory, and a line goes out ten times a second. /tmp is memory.
DISK_WORK='head -c 2097152 /dev/urandom >/root/known; sha256sum </root/known >/root/known.sum; sync; echo 0 >/tmp/rounds; (n=0; while :; do head -c 262144 /dev/urandom >/root/w; s=$(sha256sum </root/w); sync; echo 1 >/proc/sys/vm/drop_caches; [ "$s" = "$(sha256sum </root/w)" ] || echo disk >>/root/bad; n=$((n+1)); echo $n >/tmp/r; mv /tmp/r /tmp/rounds; done) >/dev/null 2>&1 & :'
MEMORY_WORK='head -c 8388608 /dev/urandom >/tmp/known; sha256sum </tmp/known >/tmp/known.sum; echo 0 >/tmp/copies; (n=0; while :; do cat /tmp/known >/tmp/copy.$((n%2)); cmp /tmp/known /tmp/copy.$((n%2)) || echo memory >>/root/bad; n=$((n+1)); echo $n >/tmp/c; mv /tmp/c /tmp/copies; done) >/dev/null 2>&1 & :'
STREAM_WORK='(n=0; while :; do echo line $n; n=$((n+1)); sleep 0.1; done >/dev/tcp/10.9.0.1/7003) >/dev/null 2>&1 & :'

# boots: a guest on this machine, with its work under way.
boots() {
  host=a vmm=v0 number=0
  rm -f $T/stream
  nc -l -p $STREAM_PORT </dev/null >$T/stream &
  # A guest that may run guests is not refused pages.
  CPUS=,nested=off start_guest $vmm 2 --net tap=lab0,mac=52:54:00:00:00:07 &&
    wait_until $WAIT_S says $vmm "GUEST-READY 2 vcpus" || return 1
  guest_on a $vmm 'rm -f /root/bad' && guest_on a $vmm "$DISK_WORK" && guest_on a $vmm "$MEMORY_WORK" && guest_on a $vmm "$STREAM_WORK"
}
# move FAULT_SOURCE USED: to the other machine, whose VMM says that it used that source. What comes
# before it there is in $LAUNCH_WITH.
move() {
  [ $host = a ] && other=b || other=a
  number=$((number + 1))
  there=v$number
  eval "address=\$HOST_$other"
  # The guest's time is not looked at here, and a busy host keeps no better one.
  same_clock || echo "the clocks differ"
  on $other "LAUNCH='${LAUNCH_WITH:-}' RECEIVE=,fault_source=$1; listen $there postcopy $address" || return 1
  on $host "remote $vmm send-migration --wait destination_url=tcp:$address:$MIGRATION_PORT,memory_mode=postcopy" || return 1
  on $other "arrived $there" && on $host "ends $vmm 90" || return 1
  on $other "all_here() { remote $there migration-progress | grep -q '\"phase\": *\"done\"'; }; wait_until 60 all_here; remote $there migration-progress" || return 1
  tr -d '\n ' <$T/on.out | sed 's/.*"faults":\({[^}]*}[^}]*}\).*/FAULTS \1/'; echo
  grep -q "\"source\": *\"$2\"" $T/on.out || return 1
  # What has ended is not needed any more.
  on $host "rm -f $T/$vmm.*"
  host=$other vmm=$there
}
# further FILE: the guest has continued with that count.
further() {
  guest_on $host $vmm "cat $1" || return 1
  count=$(cat $T/on.out)
  guest_on $host $vmm "for i in \$(seq 300); do [ \$(cat $1) -gt $count ] && break; sleep 0.2; done; [ \$(cat $1) -gt $count ]"
}
lines() { [ "$(wc -l <$T/stream)" -gt "$1" ]; }
# works: its programs continue, and nothing that it had or has written is damaged.
works() {
  lines_then=$(wc -l <$T/stream)
  further /tmp/rounds && further /tmp/copies || return 1
  guest_on $host $vmm 'echo 3 >/proc/sys/vm/drop_caches; [ ! -e /root/bad ] && [ "$(sha256sum </root/known)" = "$(cat /root/known.sum)" ] && [ "$(sha256sum </tmp/known)" = "$(cat /tmp/known.sum)" ] && ! dmesg | grep -E "'"$BAD"'"' || return 1
  wait_until 60 lines $lines_then
}
# moves NAME FAULT_SOURCE USED: as often as it was asked for.
moves() {
  good=0
  while [ $good -lt $MOVES ]; do
    begun_s=$(cut -d. -f1 /proc/uptime)
    move $2 $3 || break
    moved_s=$(cut -d. -f1 /proc/uptime)
    works || break
    good=$((good + 1))
    ok $1_$good
    echo "moved in $((moved_s - begun_s)) s, looked at in $(($(cut -d. -f1 /proc/uptime) - moved_s)) s"
  done
  echo "MOVES $1: $good of $MOVES"
  [ $good = $MOVES ] || must $1_$((good + 1)) false
}
stream_is_whole() {
  head -n -1 $T/stream | awk '$1 != "line" || $2 != NR-1 {print "line " NR ": " $0; bad=1; exit} END {exit bad}'
}
# ends_well: the guest ends by its power button, and has left its disk clean.
ends_well() {
  stream_is_whole && on $host "remote $vmm power-button && wait_until 60 says $vmm POWER-BUTTON && ends $vmm 60" || return 1
  on $host "rm -f $T/$vmm.*"
  filesystem_clean
}
