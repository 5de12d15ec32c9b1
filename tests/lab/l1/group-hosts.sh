# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Two machines with one network and one disk, and a Debian guest that moves between them with its
# disk and network in use: there and back in precopy, there in postcopy, and back in postcopy while
# the network between the two is down for half a minute. This is the first machine; peer-hosts.sh is
# the second and does what this one says.
# limit_s: 1500
. ./lib.sh
. ./hosts.sh

meet

start_guest a1 2 --net tap=lab0,mac=52:54:00:00:00:07 || failed start "the VMM did not start"
must boots_with_two_vcpus wait_until $WAIT_S says a1 "GUEST-READY 2 vcpus"

# A loop in the guest that writes, reads back from the disk and compares, and a file whose sum is known.
work='head -c 4194304 /dev/urandom >/root/known; sha256sum </root/known >/root/known.sum; sync; echo 0 >/tmp/rounds; (n=0; while :; do head -c 262144 /dev/urandom >/root/w; s=$(sha256sum </root/w); sync; echo 1 >/proc/sys/vm/drop_caches; [ "$s" = "$(sha256sum </root/w)" ] || echo bad >>/root/bad; n=$((n+1)); echo $n >/tmp/r; mv /tmp/r /tmp/rounds; done) >/dev/null 2>&1 & :'
check starts_disk_load guest_on a a1 "$work"
# A TCP stream to this machine that lasts over all moves: ten lines a second, with the guest's time.
nc -l -p 7003 </dev/null | stamp >$T/stream &
must starts_network_load guest_on a a1 '(n=0; while :; do echo line $n ${EPOCHREALTIME/./}; n=$((n+1)); sleep 0.1; done >/dev/tcp/10.9.0.1/7003) >/dev/null 2>&1 & :'
lines() { [ "$(wc -l <$T/stream)" -ge "$1" ]; }
# The guest's clock behind ours, microseconds, by the line of the next 30 that came fastest.
guest_behind() {
  begin=$(wc -l <$T/stream)
  wait_until 60 lines $((begin + 31)) || return 1
  behind_us=$(sed -n "$((begin + 1)),$((begin + 30))p" $T/stream | awk '{d=$4-$3; if (NR==1 || d<m) m=d} END {printf "%d", m}')
}

# move HOST NAME TO_HOST TO_NAME MODE
move() {
  eval "address=\$HOST_$3"
  same_clock && guest_behind || return 1
  before_us=$behind_us
  begun_s=$(cut -d. -f1 /proc/uptime)
  on $3 "listen $4 $5 $address" || return 1
  on $1 "remote $2 send-migration --wait destination_url=tcp:$address:$MIGRATION_PORT,memory_mode=$5" || return 1
  on $3 "arrived $4" && on $1 "ends $2 60" || return 1
  echo "$5 from $1 to $3 took $(($(cut -d. -f1 /proc/uptime) - begun_s)) s"
}
# The guest's time continued as ours did; what the other host's clock is ahead is not the guest's fault.
clock_kept() {
  sleep 1
  ahead && guest_behind || return 1
  moved_us=$((behind_us - before_us))
  echo "the guest's clock moved by $moved_us us (the other host's is $ahead_us us ahead)"
  near $moved_us 50000
}
# still_right HOST NAME [BAD]: its disk and its programs; BAD is what its kernel must not have said.
still_right() {
  bad="${3:-I/O error|Oops|BUG:|soft lockup|hung task}"
  guest_on $1 $2 'cat /tmp/rounds' || return 1
  rounds=$(cat $T/on.out)
  guest_on $1 $2 "for i in \$(seq 300); do [ \$(cat /tmp/rounds) -gt $rounds ] && break; sleep 0.1; done; [ \$(cat /tmp/rounds) -gt $rounds ] && [ ! -e /root/bad ]" || return 1
  guest_on $1 $2 'echo 3 >/proc/sys/vm/drop_caches; [ "$(sha256sum </root/known)" = "$(cat /root/known.sum)" ] && ! dmesg | grep -E "'"$bad"'"'
}

must precopy_to_the_other_host move a a1 b b1 precopy
check clock_after_precopy clock_kept
check disk_after_precopy still_right b b1
must precopy_back move b b1 a a2 precopy
check clock_after_precopy_back clock_kept
check disk_after_precopy_back still_right a a2
must postcopy_to_the_other_host move a a2 b b2 postcopy
check clock_after_postcopy clock_kept
check disk_after_postcopy still_right b b2

# The link of this machine goes down in the middle of a postcopy and comes back; no request gives a
# command. The guest runs here by then, so that its console and its progress are at hand.
CUT_S=30
# progress_says NAME KEY VALUE: what the VMM says of its migration.
progress_says() { remote $1 migration-progress 2>/dev/null | tr -d ' \n' | grep -q "\"$2\":\"*$3\"*[,}]"; }
goes_on() { progress_says $1 phase fault || progress_says $1 phase done; }
cut_for() {
  ip link set eth0 down || return 1
  cut_s=$(cut -d. -f1 /proc/uptime)
  wait_until $((CUT_S - 5)) progress_says $1 phase postcopy-paused
  noticed=$?
  noticed_s=$(($(cut -d. -f1 /proc/uptime) - cut_s))
  down_long_enough() { [ "$(cut -d. -f1 /proc/uptime)" -ge $((cut_s + CUT_S)) ]; }
  wait_until $((2 * CUT_S)) down_long_enough
  # Still there, and still short of pages: a guest that has all of them would prove nothing.
  progress_says $1 phase postcopy-paused && progress_says $1 recoveries 0
  waits=$?
  ip link set eth0 up || return 1
  [ $noticed = 0 ] || { echo "the loss was not noticed in $noticed_s s"; return 1; }
  [ $waits = 0 ] || { echo "it did not hold still"; remote $1 migration-progress; return 1; }
  echo "the loss was noticed within $noticed_s s"
}
# move_through_cut HOST NAME TO_NAME: to this machine, slowly enough that the cut is in its middle.
move_through_cut() {
  same_clock && guest_behind || return 1
  before_us=$behind_us
  begun_s=$(cut -d. -f1 /proc/uptime)
  listen $3 postcopy $HOST_a || return 1
  on $1 "remote $2 send-migration destination_url=tcp:$HOST_a:$MIGRATION_PORT,memory_mode=postcopy,bandwidth=2M" || return 1
  wait_until 120 progress_says $3 phase fault || { echo "the guest did not start here"; return 1; }
  cut_for $3 || return 1
  up_s=$(cut -d. -f1 /proc/uptime)
  wait_until 60 goes_on $3 || { echo "it does not continue"; remote $3 migration-progress; return 1; }
  echo "it continued $(($(cut -d. -f1 /proc/uptime) - up_s)) s after the link was back"
  wait_until 300 progress_says $3 phase done || { echo "it does not end"; remote $3 migration-progress; return 1; }
  progress_says $3 losses 0 && { echo "nothing was lost"; return 1; }
  arrived $3 && on $1 "ends $2 60" || return 1
  echo "postcopy from $1 with a cut of $CUT_S s took $(($(cut -d. -f1 /proc/uptime) - begun_s)) s"
}
must postcopy_heals_after_the_network_was_down move_through_cut b b2 a3
check clock_after_cut clock_kept
# A vCPU that waited for a page all that time may say that it was stuck, and nothing else.
check disk_after_cut still_right a a3 "I/O error|Oops|BUG: unable|hung task"
stream_is_whole() {
  head -n -1 $T/stream | awk '$1 != "line" || $2 != NR-1 {print "line " NR ": " $0; bad=1; exit} END {exit bad}'
}
check stream_is_whole stream_is_whole
power_button() { remote a3 power-button && wait_until 60 says a3 POWER-BUTTON && ends a3 60; }
check power_button_after_moves power_button
check filesystem_clean filesystem_clean
on b ': >$T/done'
