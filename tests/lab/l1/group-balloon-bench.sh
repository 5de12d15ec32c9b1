# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# on_request
# limit_s: 3600
# What returning memory is worth, compared with QEMU with the same guest: `scripts/bench balloon` and
# `scripts/bench migration-hints` read the lines that begin with FIGURE and TARGET.
. ./lib.sh
. ./balloon-lib.sh
. ./qemu.sh

# figure BENCH VALUE UNIT NAME...
figure() { echo "LAB FIGURE $*"; }
# target BENCH VALUE lower|higher LIMIT NAME...
target() { echo "LAB TARGET $*"; }
GUEST_S=240
MEMORY_MIB=256
MEMORY=size=${MEMORY_MIB}M,shared=on
FREED=96
IN_BALLOON=128
# power_off NAME: ours asks; QEMU is ended.
power_off() { if [ -S $T/$1.sock ]; then remote $1 shutdown-vmm; ends $1 30; else kill "$(cat $T/$1.pid)"; wait_until 30 test -s $T/$1.exit; fi; }
# alone: ends what a test that failed has left behind, as guests share a disk.
alone() { for pid in $T/*.pid; do kill -9 "$(cat "$pid" 2>/dev/null)" 2>/dev/null; done; rm -f $T/*.pid $T/*.sock; }
# room NAME: its temporary files may take all of memory.
room() { guest "$1" 'busybox mount -o remount,size=95% /tmp'; }
# start WHO NAME reports|hints|nothing: ours or QEMU with a guest that is up.
start() {
  case $1-$3 in
    ours-reports) start_guest $2 1 --balloon size=0,free_page_reporting=on ;;
    ours-hints) start_guest $2 1 --balloon size=0,free_page_hinting=on ;;
    ours-nothing) start_guest $2 1 --balloon size=0 ;;
    qemu-reports) start_qemu $2 ,free-page-reporting=on ;;
    qemu-hints) start_qemu $2 ,free-page-hint=on,iothread=io ;;
    qemu-nothing) start_qemu $2 "" ;;
  esac && wait_until $WAIT_S says $2 "GUEST-READY" && room $2
}
# set_balloon WHO NAME MIB
set_balloon() {
  if [ $1 = ours ]; then remote $2 resize --balloon ${3}M; else qmp $2 balloon "{\"value\": $(((MEMORY_MIB - $3) * MIB))}"; fi
}

# What a VMM is asked to move is counted where both have to pass: on the loopback interface.
PORT=7100
lo_bytes() { awk '/^ *lo:/ { sub(/.*lo:/, ""); print $1 }' /proc/net/dev; }
migrated() { qmp $1 query-migrate && grep -q '"status": "completed"' $T/answer; }
# move WHO FROM TO HOW
move() {
  if [ $1 = ours ]; then
    start_vmm $3 || return 1
    remote $3 receive-migration receiver_url=tcp:127.0.0.1:$PORT >$T/$3.receive.log 2>&1 &
    receiver=$!
    wait_until 30 listens || return 1
    before=$(lo_bytes) begin=$(now_ms)
    remote $2 send-migration --wait destination_url=tcp:127.0.0.1:$PORT >$T/$2.progress || return 1
    took=$(($(now_ms) - begin)) sent=$(($(lo_bytes) - before))
    wait $receiver && open_console $3
  else
    # The destination's balloon is like the source's, or its state would not fit.
    case $4 in
      reports) props=,free-page-reporting=on ;;
      hints) props=,free-page-hint=on,iothread=io ;;
      *) props= ;;
    esac
    start_qemu $3 "$props" -incoming tcp:127.0.0.1:$PORT || return 1
    wait_until 30 listens || return 1
    # Without a limit of its own.
    qmp $2 migrate-set-parameters '{"max-bandwidth": 1099511627776}' || return 1
    before=$(lo_bytes) begin=$(now_ms)
    qmp $2 migrate "{\"uri\": \"tcp:127.0.0.1:$PORT\"}" && wait_until 240 migrated $2 || return 1
    took=$(($(now_ms) - begin)) sent=$(($(lo_bytes) - before))
  fi
}
listens() { netstat -ltn | grep -q ":$PORT "; }

# A precopy of a guest that has written most of its memory and uses a part of it now.
moved() {
  who=$1 how=$2 from=$1m$2 to=$1t$2
  start $who $from $how || return 1
  guest $from 'head -c 146800640 /dev/zero | tr "\0" "x" >/tmp/fill; rm /tmp/fill; head -c 20971520 /dev/urandom >/tmp/keep; sha256sum </tmp/keep >/tmp/keep.sum; echo 3 >/proc/sys/vm/drop_caches; sleep 6; awk "/MemFree/ { print \$2 }" /proc/meminfo' || return 1
  used_mib=$(((MEMORY_MIB * 1024 - $(cat $T/out)) / 1024))
  move $who $from $to $how || return 1
  guest $to '[ "$(sha256sum </tmp/keep)" = "$(cat /tmp/keep.sum)" ]' || return 1
  share=$((sent * 100 / MIB / used_mib))
  figure migration-hints $((sent / MIB)) MiB "$who with $how: bytes of a precopy"
  figure migration-hints $share % "$who with $how: bytes by the $used_mib MiB that the guest uses"
  figure migration-hints $took ms "$who with $how: time, emulated"
  [ $who-$how = ours-nothing ] || [ $who = qemu ] || target migration-hints $share lower 110 "bytes by those in use, with $how, %"
  power_off $to
}
if ! grep -q lab.only=balloon /proc/cmdline; then
  ip link set lo up
  for how in hints reports nothing; do
    for who in ours qemu; do
      check precopy_of_${who}_with_$how moved $who $how
      alone
    done
  done
fi

# What comes back of what the guest frees.
share_after_5_s() {
  start $1 s$1 reports || return 1
  guest s$1 "head -c $((FREED * MIB)) /dev/zero | tr '\0' 'x' >/tmp/fill" || return 1
  filled=$(blocks s$1)
  guest s$1 "rm /tmp/fill" || return 1
  sleep 5
  left=$(blocks s$1)
  figure balloon $(((filled - left) * 100 / FREED)) % "$1: of what the guest freed back after 5 s"
  # Linux reports large blocks of free memory only.
  reportable s$1 || return 1
  share=$(((MEMORY_MIB - left) * 100 / free))
  [ $share -le 100 ] || share=100
  figure balloon $share % "$1: of what the guest can report with the host after 5 s"
  [ $1 = qemu ] || target balloon $share higher 95 "of what the guest can report with the host after 5 s, %"
  power_off s$1
}

# The guest itself looks how fast pages go into the balloon and out of it, so that both VMMs are
# watched in the same way: from the first page that it sees move to the last one. It looks seldom, as it
# has the only processor.
watch=$(cat <<'END'
pages() { while read -r key now; do [ "$key" = $1 ] && return; done </proc/vmstat; }; watch() { pages $1; first=$now last=$((now + $2)) begin=; : >/tmp/watching; while :; do pages $1; read -r at rest </proc/uptime; [ -n "$begin" ] || [ $now = $first ] || begin=$at seen=$now; [ $now -lt $last ] || break; busybox usleep 200000; done; echo "$begin $at $((now - seen))"; }
END
)
rate() {
  guest r$1 "$watch; rm -f /tmp/watching; watch balloon_$2 $((IN_BALLOON * 256 * 98 / 100)) >/tmp/watched & watcher=\$!; until [ -e /tmp/watching ]; do sleep 0.1; done" || return 1
  set_balloon $1 r$1 $3 && guest r$1 'wait $watcher; cat /tmp/watched' || return 1
  awk '{ printf "%.1f\n", $3 * 4 / 1024 / ($2 - $1 + 0.01) }' $T/out >>$T/rates.$1.$2
}
rates() {
  start $1 r$1 nothing || return 1
  # The guest's memory is there, as in a guest that has run for a while.
  guest r$1 "head -c $((IN_BALLOON * MIB)) /dev/zero | tr '\0' 'x' >/tmp/fill; rm /tmp/fill" || return 1
  for n in 1 2 3; do rate $1 inflate $IN_BALLOON && rate $1 deflate 0 || return 1; done
  power_off r$1
}
median() { sort -n $1 | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }

# What a guest is slowed down by reports: the same work with and without, in turns. It frees most of its
# memory, and works on what it holds while that is reported; then it allocates and frees most of it over
# and over, which is the worst there is: all of it has to come from the host again.
held='head -c 50331648 /dev/urandom >/tmp/held; head -c 100663296 /dev/zero >/tmp/f; rm /tmp/f; read a _ </proc/uptime; for n in 1 2 3 4 5 6; do sha256sum </tmp/held >/dev/null; done; read b _ </proc/uptime; rm /tmp/held; echo "$a $b"'
anew='for n in 1 2 3; do head -c 50331648 /dev/zero >/tmp/f; rm /tmp/f; done; sleep 3; read a _ </proc/uptime; for n in 1 2 3 4; do head -c 50331648 /dev/zero >/tmp/f; rm /tmp/f; done; read b _ </proc/uptime; echo "$a $b"'
# slowdown ours|qemu 4k|2m
slowdown() {
  took=$T/took.$1.$2
  for how in nothing reports nothing reports; do
    start $1 s$how $how || return 1
    for work in held anew; do
      eval "words=\$$work"
      guest s$how "$words" && awk '{ print ($2 - $1) * 1000 }' $T/out >>$took.$work.$how || return 1
    done
    power_off s$how && rm -f $T/s$how.* || return 1
  done
  for work in held anew; do
    case $work in
      held) what="a guest that works on memory that it holds" ;;
      anew) what="a guest that allocates and frees only" ;;
    esac
    for how in nothing reports; do figure balloon "$(median $took.$work.$how)" ms "$1, $2: $what, with $how, emulated"; done
    more=$(cat $took.$work.reports $took.$work.nothing | awk '{ t[NR] = $1 } END { printf "%.1f\n", (t[1] + t[2]) * 100 / (t[3] + t[4]) }')
    figure balloon $more % "$1, $2: $what, by the same without reports"
    [ $1 = qemu ] || target balloon $more lower 103 "$2: $what, by the same without reports, %"
  done
}
if ! grep -q lab.only=migration-hints /proc/cmdline; then
  for who in ours qemu; do
    check share_after_5_s_of_$who share_after_5_s $who
    alone
    check rates_of_$who rates $who
    alone
  done
  for what in inflate deflate; do
    for who in ours qemu; do figure balloon "$(median $T/rates.$who.$what)" MiB/s "$who: $what, emulated"; done
    ratio=$(echo "$(median $T/rates.ours.$what) $(median $T/rates.qemu.$what)" | awk '{ printf "%.1f", $1 * 100 / $2 }')
    target balloon $ratio higher 100 "$what by that of QEMU, %"
  done
  for who in ours qemu; do check slowdown_of_$who slowdown $who 4k; alone; done
  echo $((MEMORY_MIB / 2)) >/proc/sys/vm/nr_hugepages
  MEMORY=$MEMORY,hugepages=on,hugepage_size=2M
  check slowdown_on_huge_pages slowdown ours 2m
fi
