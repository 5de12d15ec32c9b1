# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# on_request
# limit_s: 2400
# How long a Debian guest takes to write to each page of its memory after it has moved, with second-stage
# tables filled ahead and without, as a ratio within this run: `scripts/bench stage2-prefault` prints the
# lines that begin with FIGURE.
. ./lib.sh

tap_up lab0
TOUCHED=128
figure() { echo "LAB FIGURE stage2-prefault $*"; }
runs=$(sed -n 's/.*lab.runs=\([0-9]*\).*/\1/p' /proc/cmdline)
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
    echo "stage2: $(tr -d '\n ' <$T/$to.events | sed -n 's/.*"stage2-prefault-completed"[^}]*\("filled_bytes[^}]*\)}.*/\1/p')"
  fi
  touched $to && first=$took && touched $to || return 1
  echo "TOUCHED $1: $first us, and again $took us"
  echo $first >>$T/touched.$1
}
median() { sort -n $1 | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }
check brings_its_program brings_its_program
round=0
while [ $round -lt "${runs:-3}" ]; do
  check off_$round measure off
  check on_$round measure on
  round=$((round + 1))
done
off=$(median $T/touched.off) on=$(median $T/touched.on)
verdict=$(awk -v off="$off" -v on="$on" 'BEGIN { r = off / on; printf("%.1f times faster (target 5: %s)", r, (r >= 5) ? "met" : "MISSED") }')
figure "$TOUCHED MiB of small pages after precopy: $off emulated us without, $on with: $verdict"
power_off() { remote $1 shutdown-vmm; ends $1 30; }
check power_off power_off m$number
