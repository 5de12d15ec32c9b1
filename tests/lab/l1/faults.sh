# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the groups of fault sources share: a Debian guest with two vCPUs that computes checksums of what
# it writes to its disk, moved in postcopy. Sourced after lib.sh.

tap_up lab0
# How often each source moves the guest (GODWIT_FAULT_MOVES).
MOVES=$(sed -n 's/.*lab.moves=\([0-9]*\).*/\1/p' /proc/cmdline)
MOVES=${MOVES:-1}
# A busy host is no reason to give up.
GUEST_S=600

# boot NAME: the guest, with its load under way.
boot() {
  # A guest that may run guests is not refused pages by auto.
  CPUS=,nested=off start_guest $1 2 -v --net tap=lab0,mac=52:54:00:00:00:02 &&
    wait_until $WAIT_S says $1 "GUEST-READY 2 vcpus" &&
    guest $1 'rm -f /root/bad; head -c 4194304 /dev/urandom >/root/known; sha256sum </root/known >/root/known.sum; sync; head -c 8388608 /dev/urandom >/tmp/known; sha256sum </tmp/known >/tmp/known.sum; echo 0 >/tmp/rounds; (n=0; while :; do head -c 262144 /dev/urandom >/root/w; s=$(sha256sum </root/w); sync; echo 1 >/proc/sys/vm/drop_caches; [ "$s" = "$(sha256sum </root/w)" ] || echo bad >>/root/bad; n=$((n+1)); echo $n >/tmp/r; mv /tmp/r /tmp/rounds; done) >/dev/null 2>&1 & :'
}
# move FROM TO FAULT_SOURCE USED: in postcopy; the destination says that it used that source. It gets the
# options in $RECEIVE alongside.
move() {
  start_vmm $2 -v || return 1
  remote $2 receive-migration receiver_url=unix:$T/$2.mig,memory_mode=postcopy,fault_source=$3${RECEIVE:-} >$T/$2.receive.log 2>&1 &
  receiver=$!
  wait_until 30 test -S $T/$2.mig || { cat $T/$2.receive.log; return 1; }
  remote $1 send-migration --wait destination_url=unix:$T/$2.mig,memory_mode=postcopy || return 1
  wait $receiver || { cat $T/$2.receive.log; return 1; }
  ends $1 90 || return 1
  arrived() { remote $2 migration-progress | grep -q '"phase": *"done"'; }
  wait_until 60 arrived - $2 || { remote $2 migration-progress; return 1; }
  remote $2 migration-progress | tr -d '\n ' | sed 's/.*"faults":\({[^}]*}[^}]*}\).*/FAULTS \1/'; echo
  remote $2 migration-progress | grep -q "\"source\": *\"$4\"" || return 1
  state_is $2 Running && open_console $2
}
# works NAME: the load continues, and nothing that it wrote is damaged.
works() {
  guest $1 'cat /tmp/rounds' || return 1
  rounds=$(cat $T/out)
  guest $1 "for i in \$(seq 300); do [ \$(cat /tmp/rounds) -gt $((rounds + 1)) ] && break; sleep 0.1; done; [ \$(cat /tmp/rounds) -gt $((rounds + 1)) ] && [ ! -e /root/bad ]" || return 1
  guest $1 'echo 3 >/proc/sys/vm/drop_caches; [ "$(sha256sum </root/known)" = "$(cat /root/known.sum)" ] && [ "$(sha256sum </tmp/known)" = "$(cat /tmp/known.sum)" ] && ! dmesg | grep -E "I/O error|Oops|BUG:|soft lockup|hung task|segfault"'
}
# again NAME VMM FAULT_SOURCE USED: the rest of the moves with that source, the guest being in VMM after the
# first one; it is in $last then.
again() {
  last=$2 moved=1
  while [ $moved -lt $MOVES ]; do
    move $last $2$moved $3 $4 && works $2$moved || { failed $1_$((moved + 1)) "after $moved of $MOVES"; return 1; }
    rm -f $T/$last.*
    last=$2$moved
    moved=$((moved + 1))
    ok $1_$moved
  done
  echo "MOVES $1: $moved of $MOVES"
}
# filled NAME: its vCPUs' tables have been filled, with most of its memory.
filled() {
  tables() { tr -d '\n ' <$T/$1.events | grep -q '"stage2-prefault-completed"'; }
  wait_until 60 tables $1 || return 1
  bytes=$(tr -d '\n ' <$T/$1.events | sed -n 's/.*"stage2-prefault-completed"[^}]*"filled_bytes":"\([0-9]*\)".*/\1/p')
  echo "stage2: $bytes bytes"
  [ "${bytes:-0}" -ge 67108864 ]
}
power_off() { remote $1 power-button && wait_until 60 says $1 "POWER-BUTTON" && ends $1 60; }
