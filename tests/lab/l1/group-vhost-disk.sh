# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# takes_turns
# A disk of two queues that another process serves, under a Debian guest: contents are compared with the image, also after
# pauses with writes in flight, a reboot, and removal and return; what is impossible with it is refused by name; the guest
# outlives the back end, and has the disk again from another one.
. ./lib.sh
truncate -s 16M $T/served.img

# serves: a back end, which another follows for the next connection until there is a file `last`.
serves() {
  rm -f $T/last
  {
    until [ -e $T/last ]; do
      disk $T/disk.socket $T/served.img 2 >>$T/disk.log 2>&1 &
      echo $! >$T/disk.pid
      wait $!
    done
  } >/dev/null 2>&1 &
  wait_until 10 test -S $T/disk.socket
}
serves
start_guest a 2 --disk vhost_user=on,socket=$T/disk.socket,num_queues=2,id=served || { failed start "the VMM did not start: $(cat $T/disk.log)"; exit 1; }
check boots wait_until $WAIT_S says a "GUEST-READY 2 vcpus"
queues() { guest a 'ls /sys/block/vdb/mq | wc -l' && [ "$(tail -n 1 $T/out)" = 2 ] || { cat $T/out; return 1; }; }
check linux_uses_both_queues queues
# All of the disk, of which the second half is written all the time when the guest works.
part() { dd if=$1 bs=64k count=128 2>/dev/null | sha256sum; }
same() { guest $1 'dd if=/dev/vdb bs=64k count=128 iflag=direct 2>/dev/null | sha256sum' && [ "$(tail -n 1 $T/out)" = "$(part $T/served.img)" ] || { cat $T/out; part $T/served.img; return 1; }; }
writes() {
  before=$(part $T/served.img)
  guest $1 'for cpu in 1 2; do taskset $cpu dd if=/dev/urandom of=/dev/vdb bs=64k seek=$((64 * (cpu - 1))) count=64 oflag=direct 2>/dev/null || echo bad; done' && [ ! -s $T/out ] && same $1 &&
    [ "$(part $T/served.img)" != "$before" ]
}
check what_each_vcpu_writes_is_in_the_image writes a
changed() {
  head -c 65536 /dev/urandom | dd of=$T/served.img bs=64k seek=5 conv=notrunc 2>/dev/null
  same a
}
check what_the_host_writes_is_read changed

LOAD='rm -f /tmp/stop /tmp/stopped /tmp/rounds; (n=0; while [ ! -e /tmp/stop ]; do at=$((128 + n % 8 * 4)); head -c 262144 /dev/urandom >/tmp/w; dd if=/tmp/w of=/dev/vdb bs=64k seek=$at oflag=direct 2>/dev/null; dd if=/dev/vdb bs=64k skip=$at count=4 iflag=direct 2>/dev/null | cmp - /tmp/w || echo $n >>/tmp/bad; n=$((n+1)); echo $n >/tmp/r; mv /tmp/r /tmp/rounds; done; touch /tmp/stopped) >/dev/null 2>&1 &'
advances() { guest $1 'r=$(cat /tmp/rounds); for i in $(seq 300); do [ $(cat /tmp/rounds) -gt $r ] && break; sleep 0.1; done; [ $(cat /tmp/rounds) -gt $r ] && [ ! -e /tmp/bad ]' || { cat $T/out; return 1; }; }
pauses() {
  guest a "$LOAD for i in \$(seq 600); do [ -e /tmp/rounds ] && break; sleep 0.1; done; [ -e /tmp/rounds ]" || return 1
  for _ in 1 2 3; do
    remote a pause || return 1
    # Nothing is in flight.
    before=$(sha256sum <$T/served.img)
    sleep 1
    [ "$(sha256sum <$T/served.img)" = "$before" ] || { echo "written in a pause"; return 1; }
    remote a resume && advances a || return 1
  done
  guest a 'touch /tmp/stop; for i in $(seq 300); do [ -e /tmp/stopped ] && break; sleep 0.1; done; [ -e /tmp/stopped ] && [ ! -e /tmp/bad ]' && same a
}
check a_pause_completes_what_is_in_flight pauses

# refused WORDS COMMAND...: it fails and says so, and the guest goes on.
refused() {
  words=$1
  shift
  ! "$@" >$T/refused 2>&1 && grep -q "$words" $T/refused && same a || { cat $T/refused; return 1; }
}
check a_move_is_refused_by_name refused "'served' cannot be migrated" remote a send-migration destination_url=unix:$T/none
check a_new_size_is_refused_by_name refused "served" remote a resize-disk --disk served --size 32M
snapshot() { remote a pause && ! remote a snapshot file://$T/none >$T/refused 2>&1 && grep -q served $T/refused && remote a resume && same a || { cat $T/refused; return 1; }; }
check a_snapshot_is_refused_by_name snapshot

fine() { guest a '! dmesg | grep -E "Oops|BUG: [^s]|I/O error|hung task"' || { cat $T/out; return 1; }; }
reboots() { fine && guest a sync && remote a reboot && wait_until $WAIT_S says_times a "GUEST-READY 2 vcpus" 2 && queues && same a && writes a; }
check it_is_there_after_a_reboot reboots
gone() { remote a info >$T/info && ! grep -q '"id": *"served"' $T/info; }
absent() { guest a 'test ! -e /dev/vdb'; }
returns() {
  remote a remove-device served && wait_until 60 gone && wait_until 30 absent || return 1
  wait_until 10 test -S $T/disk.socket
  remote a add-disk vhost_user=on,socket=$T/disk.socket,num_queues=2,id=served >$T/added && wait_until 60 guest a 'test -b /dev/vdb' && same a && writes a
}
check it_goes_and_comes_back returns
lost() {
  fine || return 1
  touch $T/last
  kill -9 $(cat $T/disk.pid)
  wait_until 30 grep -q '"back-end-lost"' $T/a.events && guest a "echo \$((6 * 7))" && grep -qx 42 $T/out && state_is a Running
}
check the_guest_outlives_the_back_end lost
again() { serves && remote a reboot && wait_until $WAIT_S says_times a "GUEST-READY 2 vcpus" 3 && same a && writes a; }
check another_serves_it_after_a_reboot again
check the_guest_is_fine fine
power_button() { touch $T/last && remote a power-button && ends a 60; }
check ends power_button
check filesystem_clean filesystem_clean
