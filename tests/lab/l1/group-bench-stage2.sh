# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# on_request
# limit_s: 2400
# How long a Debian guest takes to write to each page of its memory after it has moved, with second-stage
# tables filled ahead and without, as a ratio within this run: `scripts/bench stage2-prefault` reads the
# lines that begin with FIGURE and TARGET.
. ./lib.sh
. ./bench-lib.sh

tap_up lab0
TOUCHED=128
brings_its_program() {
  start_guest m0 2 --net tap=lab0,mac=52:54:00:00:00:02 && wait_until $WAIT_S says m0 "GUEST-READY" || return 1
  nc -l -p 7002 </lab/touch-all >/dev/null &
  guest m0 'cat </dev/tcp/10.9.0.1/7002 >/tmp/touch-all && chmod +x /tmp/touch-all && mkdir /tmp/t && (/tmp/touch-all '$TOUCHED' /tmp/t >/dev/null 2>&1 & :) && for i in $(seq 600); do [ -e /tmp/t/ready ] && break; sleep 0.1; done; [ -e /tmp/t/ready ]'
}
# touched NAME: microseconds for all pages, in $took.
touched() {
  guest $1 'rm -f /tmp/t/took; touch /tmp/t/go; for i in $(seq 600); do [ -e /tmp/t/took ] && break; sleep 0.1; done; cat /tmp/t/took' || return 1
  took=$(sed -n '1s/ .*//p' $T/out)
  [ "$(sed -n '1s/.* //p' $T/out)" = 0 ] || { echo "pages are damaged"; return 1; }
}
number=0
# measure on|off: moves the guest, and has it touch its memory when that is all there.
measure() {
  from=m$number to=m$((number + 1))
  start_vmm $to || return 1
  remote $to receive-migration receiver_url=unix:$T/$to.mig,prefault_stage2=$1 >$T/receive.log 2>&1 &
  receiver=$!
  wait_until 30 test -S $T/$to.mig || return 1
  remote $from send-migration --wait destination_url=unix:$T/$to.mig || return 1
  wait $receiver && ends $from 60 && open_console $to || return 1
  number=$((number + 1))
  if [ $1 = on ]; then
    filled() { grep -q stage2-prefault-completed $T/$to.events; }
    wait_until 60 filled || return 1
    took_ms=$(tr -d '\n ' <$T/$to.events | sed -n 's/.*"stage2-prefault-completed"[^}]*"took_ms":"\([0-9]*\)".*/\1/p')
    echo "$took_ms" >>$T/filling
  fi
  touched $to && first=$took && touched $to || return 1
  echo "TOUCHED $1: $first us, and again $took us"
  echo $first >>$T/touched.$1
}
check brings_its_program brings_its_program
round=0
while [ $round -lt $RUNS ]; do
  check off_$round measure off
  check on_$round measure on
  round=$((round + 1))
done
for how in off on; do
  awk '{ print $1 / 1000 }' $T/touched.$how >$T/touched_ms.$how
  figure stage2-prefault $T/touched_ms.$how ms "$TOUCHED MiB of small pages written to after precopy, prefault_stage2=$how"
done
figure stage2-prefault $T/filling ms "filling the tables, while the guest runs"
paste -d' ' $T/touched.off $T/touched.on | awk '{ print $1 / $2 }' >$T/ratios
figure stage2-prefault $T/ratios times "without by with"
target stage2-prefault "$(median $T/ratios)" higher 5 "time to write to all pages, without by with"
power_off() { remote $1 shutdown-vmm; ends $1 30; }
check power_off power_off m$number
