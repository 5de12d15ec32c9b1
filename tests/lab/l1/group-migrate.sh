# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# metal
# One Debian guest with two vCPUs, moved between VMMs on this machine with its disk and network in use:
# in precopy, in postcopy, and in postcopy by a page server, whose VMM has ended by then.
. ./lib.sh

tap_up lab0
start_guest a 2 --net tap=lab0,mac=52:54:00:00:00:02 || failed start "the VMM did not start"
check boots_with_two_vcpus wait_until $WAIT_S says a "GUEST-READY 2 vcpus"

# A loop in the guest that writes and reads back from the disk, and a file whose sum is known.
work='head -c 4194304 /dev/urandom >/root/known; sha256sum </root/known >/root/known.sum; sync; echo 0 >/tmp/rounds; (n=0; while :; do head -c 262144 /dev/urandom >/root/w; s=$(sha256sum </root/w); sync; echo 1 >/proc/sys/vm/drop_caches; [ "$s" = "$(sha256sum </root/w)" ] || echo bad >>/root/bad; n=$((n+1)); echo $n >/tmp/r; mv /tmp/r /tmp/rounds; done) >/dev/null 2>&1 & :'
check starts_disk_load guest a "$work"
# A TCP stream that lasts over both moves: one line every tenth of a second.
nc -l -p 7003 </dev/null >$T/stream &
check starts_network_load guest a '(n=0; while :; do echo line $n; n=$((n+1)); sleep 0.1; done >/dev/tcp/10.9.0.1/7003) >/dev/null 2>&1 & :'
lines() { [ "$(wc -l <$T/stream)" -gt "$1" ]; }
check stream_flows wait_until 60 lines 10

# figures HOW SIDE: what the destination knows of a move that is over, on a line that scripts/demo shows.
figures() {
  remote $2 migration-progress | tr -d ' \n' >$T/figures
  for field in elapsed_ms downtime_us memory_bytes_received seen; do
    value=$(sed -n "s/.*\"$field\":\([0-9]*\)[,}].*/\1/p" $T/figures)
    [ -n "$value" ] || { echo "$field is not known: $(cat $T/figures)"; return 1; }
    eval "$field=$value"
  done
  [ $downtime_us -gt 0 ] || { cat $T/figures; return 1; }
  echo "FIGURES $1 $elapsed_ms $downtime_us $memory_bytes_received $seen"
}
is_done() { remote $1 migration-progress | tr -d ' \n' | grep -q '"phase":"done"'; }
# move FROM TO MODE
move() {
  sent $1 $2 $3 || return 1
  wait_until 60 is_done $2 && figures $3 $2 || return 1
  state_is $2 Running && open_console $2
}
after_move() {
  before=$(wc -l <$T/stream)
  guest $1 'cat /tmp/rounds' || return 1
  rounds=$(cat $T/out)
  guest $1 "for i in \$(seq 300); do [ \$(cat /tmp/rounds) -gt $rounds ] && break; sleep 0.1; done; [ \$(cat /tmp/rounds) -gt $rounds ] && [ ! -e /root/bad ]" || return 1
  guest $1 'echo 3 >/proc/sys/vm/drop_caches; [ "$(sha256sum </root/known)" = "$(cat /root/known.sum)" ] && ! dmesg | grep -E "I/O error|Oops|BUG:|soft lockup|hung task"' || return 1
  wait_until 60 lines $((before + 5))
}
check precopy move a b precopy
check disk_and_network_after_precopy after_move b
# Where KVM can do it, as here, the tables of the vCPUs are filled after every move.
filled() { grep -q stage2-prefault-completed $T/$1.events; }
check stage2_is_filled_after_precopy wait_until 60 filled b
check postcopy move b c postcopy
check disk_and_network_after_postcopy after_move c
# handed_on FROM TO: slowly enough that most pages come when the VMM has gone.
handed_on() {
  start_vmm $2 || return 1
  remote $2 receive-migration receiver_url=unix:$T/$2.mig,memory_mode=postcopy >$T/$2.receive.log 2>&1 &
  receiver=$!
  wait_until 30 test -S $T/$2.mig || return 1
  remote $1 send-migration destination_url=unix:$T/$2.mig,memory_mode=postcopy,page_server=on,bandwidth=16M || return 1
  ends $1 60 || return 1
  phase() { remote $1 migration-progress | tr -d ' \n' | grep -q "\"phase\":\"$2\""; }
  phase $2 fault || { echo "nothing was left when the VMM had ended"; remote $2 migration-progress; return 1; }
  wait $receiver || { cat $T/$2.receive.log; return 1; }
  state_is $2 Running && open_console $2 || return 1
  wait_until 300 phase $2 done || { remote $2 migration-progress; return 1; }
  figures page-server $2
}
check postcopy_by_a_page_server handed_on c d
check disk_and_network_after_the_page_server after_move d
check stream_is_whole stream_is_whole
power_button() { remote d power-button && wait_until 60 says d "POWER-BUTTON" && ends d 60; }
check power_button_after_moves power_button
check filesystem_clean filesystem_clean
