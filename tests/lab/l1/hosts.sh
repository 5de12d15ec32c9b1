# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the two machines of the group `hosts` share: one network, one disk, and the way in which the
# first gives orders to the second. Sourced after lib.sh.

HOST_a=10.9.0.1
HOST_b=10.9.0.3
MIGRATION_PORT=6000
CLOCK_PORT=7010
# Both machines see one disk: what one has written must not be in the page cache of the other.
DISK_OPTIONS=,direct=on

# host_up ADDRESS: a bridge to the other machine, with the guest's tap in it.
host_up() {
  brctl addbr br0 &&
    tunctl -t lab0 >/dev/null && brctl addif br0 lab0 && brctl addif br0 eth0 &&
    ip link set lab0 up && ip link set eth0 up && ip link set br0 up && ip addr add $1/24 dev br0
}

# on HOST COMMAND: runs a command with lib.sh on one of the two; its output is in $T/on.out.
on() {
  if [ $1 = a ]; then
    (eval "$2") >$T/on.out 2>&1 && return 0
    cat $T/on.out
    return 1
  fi
  wget -q -O $T/on.all --post-data "$2" http://$HOST_b/cgi-bin/run || { echo "no answer from the other machine: $2"; return 98; }
  sed '$d' $T/on.all >$T/on.out
  [ "$(tail -n 1 $T/on.all)" = EXIT=0 ] && return 0
  cat $T/on.out
  return 1
}
# guest_on HOST NAME COMMAND: as guest; the command must not have single quotes.
guest_on() { on $1 "guest $2 '$3' && cat \$T/out"; }

# listen NAME MODE HOST: a VMM that waits for a guest, with the options in $RECEIVE.
listen() {
  start_vmm $1 || return 1
  { remote $1 receive-migration receiver_url=tcp:$3:$MIGRATION_PORT,memory_mode=$2${RECEIVE:-} >$T/$1.receive.log 2>&1
    echo $? >$T/$1.received; } >/dev/null 2>&1 &
  wait_until 30 grep -q migration-receive-ready $T/$1.events
}
# arrived NAME: the guest is there, and the VMM has said so.
arrived() {
  wait_until 120 test -s $T/$1.received || { echo "it never arrived"; return 1; }
  [ "$(cat $T/$1.received)" = 0 ] || { cat $T/$1.receive.log; return 1; }
  state_is $1 Running && open_console $1
}

# What follows is for the first machine alone.

# must NAME COMMAND...: as check, but nothing else makes sense without it.
must() {
  must_name=$1
  shift
  if "$@"; then ok $must_name; return 0; fi
  failed $must_name "$*"
  on b ': >$T/done'
  exit 1
}
other_answers() { wget -q -O /dev/null --post-data : http://$HOST_b/cgi-bin/run 2>/dev/null; }

# Both clocks must agree, as they would through NTP: the guest's time follows that of its host.
ahead() { clock-ask $HOST_b $CLOCK_PORT >$T/ahead && read -r ahead_us rtt_us <$T/ahead || { echo "no answer from the other clock"; return 1; }; }
near() { [ ${1#-} -lt $2 ]; }
same_clock() {
  latency_us=5000
  for try in 1 2 3 4 5 6; do
    ahead || return 1
    near $ahead_us 8000 && { echo "the other clock is $ahead_us us ahead (round trip $rtt_us us)"; return 0; }
    # What is left after the first setting is what it took.
    [ $try -gt 1 ] && near $ahead_us 500000 && latency_us=$((latency_us - ahead_us))
    on b "clock-set $ahead_us $latency_us" || return 1
  done
  echo "the other clock stays $ahead_us us ahead"
  return 1
}

# meet: the two machines see each other and have one time.
meet() {
  must network_between_hosts host_up $HOST_a
  must other_machine_is_there wait_until 120 other_answers
  must clocks_of_the_hosts_agree same_clock
}
