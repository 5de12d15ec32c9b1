# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# on_request
# What giving memory back is worth, as ratios within this run: `scripts/bench balloon` and
# `scripts/bench migration-hints` print the lines that begin with FIGURE.
. ./lib.sh
. ./balloon-lib.sh

figure() { echo "LAB FIGURE $*"; }
# target VALUE RELATION LIMIT: in words.
target() { if [ "$1" "$2" "$3" ]; then echo "target $3: met"; else echo "target $3: MISSED"; fi; }
now_ms() { awk '{ print int($1 * 1000) }' /proc/uptime; }
GUEST_S=240
FREED=96
power_off() { remote "$1" shutdown-vmm; ends "$1" 30; }
# alone: ends what a test that failed has left behind, as guests share a disk.
alone() { for pid in $T/*.pid; do kill -9 "$(cat "$pid" 2>/dev/null)" 2>/dev/null; done; rm -f $T/*.pid; }
# room NAME: its temporary files may take all of memory.
room() { guest "$1" 'busybox mount -o remount,size=95% /tmp'; }
# churn NAME: the guest writes FREED MiB and frees them.
churn() { guest "$1" "head -c $((FREED * MIB)) /dev/zero | tr '\0' 'x' >/tmp/fill; rm /tmp/fill"; }

# Bytes of a precopy of a guest that has used all of its memory and uses a quarter of it now.
moved() {
  case $1 in
    nothing) options=size=0 ;;
    reporting) options=size=0,free_page_reporting=on ;;
    hinting) options=size=0,free_page_hinting=on ;;
  esac
  start_guest m$1 1 --balloon $options && wait_until $WAIT_S says m$1 "GUEST-READY" && room m$1 || return 1
  # Without reports everything that was freed stays with the host.
  guest m$1 'head -c 146800640 /dev/zero | tr "\0" "x" >/tmp/fill; rm /tmp/fill; head -c 20971520 /dev/urandom >/tmp/keep; sha256sum </tmp/keep >/tmp/keep.sum; echo 3 >/proc/sys/vm/drop_caches; sleep 6; awk "/MemTotal|MemFree/ { print \$2 }" /proc/meminfo' || return 1
  total_kib=$(sed -n 1p $T/out) free_kib=$(sed -n 2p $T/out)
  used_mib=$(((256 * 1024 - free_kib) / 1024))
  start_vmm t$1 || return 1
  remote t$1 receive-migration receiver_url=unix:$T/t$1.mig >$T/t$1.receive.log 2>&1 &
  receiver=$!
  wait_until 30 test -S $T/t$1.mig || return 1
  begin=$(now_ms)
  remote m$1 send-migration --wait destination_url=unix:$T/t$1.mig >$T/$1.progress || return 1
  took=$(($(now_ms) - begin))
  wait $receiver && open_console t$1 || return 1
  remote t$1 migration-progress >$T/$1.progress
  sent=$(tr ',{}' '\n\n\n' <$T/$1.progress | sed -n 's/^ *"memory_bytes_received": *\([0-9]*\).*/\1/p' | head -n 1)
  guest t$1 '[ "$(sha256sum </tmp/keep)" = "$(cat /tmp/keep.sum)" ]' || return 1
  share=$((sent * 100 / MIB / used_mib)) verdict=""
  [ $1 = nothing ] || verdict=" ($(target $share -le 110))"
  figure migration-hints "with $1: $((sent / MIB)) MiB in $took emulated ms, $share percent of the $used_mib MiB that the guest uses$verdict"
  power_off t$1
}
for what in hinting reporting nothing; do check precopy_$what moved $what; alone; done

# What comes back of what the guest frees, and how fast the balloon is.
start_guest a 1 --balloon $BALLOON || { failed start "the VMM did not start"; exit 1; }
check boots wait_until $WAIT_S says a "GUEST-READY 1 vcpus"
room a
share_after_5_s() {
  guest a "head -c $((FREED * MIB)) /dev/zero | tr '\0' 'x' >/tmp/fill" || return 1
  filled=$(blocks a)
  guest a "rm /tmp/fill" || return 1
  sleep 5
  share=$(((filled - $(blocks a)) * 100 / FREED))
  figure balloon "$share percent of what the guest freed are back after 5 s ($(target $share -ge 95))"
}
check share_after_5_s share_after_5_s
rates() {
  churn a || return 1
  for size in 128 0; do
    begin=$(now_ms)
    remote a resize --balloon ${size}M && wait_until 60 actual_is a $size || return 1
    figure balloon "from $((128 - size)) to $size MiB in the balloon in $(($(now_ms) - begin)) emulated ms"
  done
}
check rates rates
check power_off_a power_off a
alone

# What the guest is slowed down by reports: the same work with and without.
slowdown() {
  for reporting in off on off on; do
    start_guest s$reporting 1 --balloon size=0,free_page_reporting=$reporting || return 1
    wait_until $WAIT_S says s$reporting "GUEST-READY" && room s$reporting || return 1
    guest s$reporting 'for n in 1 2 3; do head -c 50331648 /dev/zero >/tmp/f; rm /tmp/f; done; sleep 3; read a _ </proc/uptime; for n in 1 2 3 4; do head -c 50331648 /dev/zero >/tmp/f; rm /tmp/f; done; read b _ </proc/uptime; echo "$a $b"' || return 1
    awk '{ print ($2 - $1) * 1000 }' $T/out >>$T/took.$reporting
    power_off s$reporting && rm -f $T/s$reporting.* || return 1
  done
  work=$(cat $T/took.on $T/took.off | awk '{ t[NR] = $1 } END { print int((t[1] + t[2]) * 100 / (t[3] + t[4])) }')
  figure balloon "a guest that allocates and frees takes $work percent of the time without reports ($(target $work -le 103))"
}
check slowdown slowdown
