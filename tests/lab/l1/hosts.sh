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

# listen NAME MODE HOST: a VMM that waits for a guest.
listen() {
  start_vmm $1 || return 1
  { remote $1 receive-migration receiver_url=tcp:$3:$MIGRATION_PORT,memory_mode=$2 >$T/$1.receive.log 2>&1
    echo $? >$T/$1.received; } >/dev/null 2>&1 &
  wait_until 30 grep -q migration-receive-ready $T/$1.events
}
# arrived NAME: the guest is there, and the VMM has said so.
arrived() {
  wait_until 120 test -s $T/$1.received || { echo "it never arrived"; return 1; }
  [ "$(cat $T/$1.received)" = 0 ] || { cat $T/$1.receive.log; return 1; }
  state_is $1 Running && open_console $1
}
