# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# takes_turns
# Debian guests that allocate and free most of their memory in a loop, on every kind of memory that
# returns in a way of its own: 2 MiB pages of hugetlb, transparent huge pages of a memfd, private
# anonymous memory. The host's memory follows and every page holds what the guest wrote; a paused
# guest gives nothing.
. ./lib.sh
. ./balloon-lib.sh

GUEST_MIB=320
BALLOON=size=0,deflate_on_oom=on,free_page_reporting=on
# Nothing of this machine may huge pages be made of but what the tests ask for.
echo 0 >/sys/kernel/mm/transparent_hugepage/khugepaged/max_ptes_none

# fill MIB SEED in the guest: takes memory, writes all of it, and reads all of it again before it
# goes; between the two it waits for /tmp/go. The page's number is in every word.
fill=$(cat <<'END'
fill() { perl -e 'my ($n, $s) = @ARGV; $n *= 256; my $x = ""; $x .= pack("Q", $_ * 40503 + $s) x 512 for 0 .. $n - 1; open my $f, ">", "/tmp/filled"; close $f; select undef, undef, undef, 0.1 until -e "/tmp/go"; for (0 .. $n - 1) { die "page $_" if substr($x, $_ * 4096, 4096) ne pack("Q", $_ * 40503 + $s) x 512 }' $1 $2; }
END
)

# host_mib NAME: what the host has for the guest's memory, whatever it is made of.
host_mib() {
  if [ $kind = private ]; then
    awk '/^RssAnon/ { print int($2 / 1024) }' /proc/"$(cat $T/$1.pid)"/status
  else
    blocks $1
  fi
}
host_below() { [ "$(host_mib $1)" -le "$2" ]; }
# huge_mib NAME: how much of it is in transparent huge pages.
huge_mib() { awk '/^(AnonHugePages|ShmemPmdMapped)/ { kib += $2 } END { print int(kib / 1024) }' /proc/"$(cat $T/$1.pid)"/smaps; }
# balloon_ms NAME: processor time of the balloon's thread.
balloon_ms() {
  for task in /proc/"$(cat $T/$1.pid)"/task/*; do
    case $(cat $task/comm) in *balloon*) sed 's/.*) //' $task/stat | awk '{ print ($12 + $13) * 10 }' ;; esac
  done
}

# hold NAME SEED: the guest has 70 % of its memory in use when this returns.
hold() {
  guest $1 "$fill; rm -f /tmp/go /tmp/filled; (fill $most $2 && echo whole || echo torn) >/tmp/verdict 2>&1 & filler=\$!; until [ -e /tmp/filled ]; do sleep 0.1; done"
}
# let_fill_end NAME: it has freed that when this returns, and every page was right.
let_fill_end() { guest $1 'touch /tmp/go; wait $filler; grep -q whole /tmp/verdict || { cat /tmp/verdict; false; }'; }

# gone NAME: the host lacks at least 95 % of that.
gone() {
  reportable $1 && [ $((GUEST_MIB - $(host_mib $1))) -ge $((free * 95 / 100)) ]
}

# round NAME SEED: 70 % of the guest's memory, once.
round() {
  hold $1 $2 || return 1
  filled=$(host_mib $1) huge=$(huge_mib $1) cpu=$(balloon_ms $1) given=$(counter $1 reported_given_back_bytes)
  [ $filled -ge $most ] || { echo "$filled MiB on the host of $most"; return 1; }
  if [ $kind = thp ]; then [ $huge -ge $((most / 2)) ] || { echo "$huge MiB in huge pages"; return 1; }; fi
  let_fill_end $1 || return 1
  begin=$(now_ms)
  wait_until 30 gone $1 || { echo "$filled MiB, then $(host_mib $1) MiB, although $free are free"; return 1; }
  took=$(($(now_ms) - begin)) left=$(host_mib $1)
  # Most of it has to be reportable, or nothing was tested.
  [ $((filled - left)) -ge $((most * 6 / 10)) ] || { echo "$filled MiB, then $left MiB"; return 1; }
  given=$((($(counter $1 reported_given_back_bytes) - given) / MIB))
  echo "LAB note: $kind: $most MiB freed, $filled MiB on the host ($huge huge), $left after $took emulated ms, when the guest could report $free of $GUEST_MIB; $(($(balloon_ms $1) - cpu)) ms of the balloon's thread for $given MiB"
}
rounds() { for seed in 1 2; do round $1 $seed || return 1; done && guest $1 "$kept"; }

# The guest frees and reports; whatever moment a pause comes at, nothing goes while it lasts.
pauses() {
  hold $1 7 || return 1
  filled=$(host_mib $1)
  guest $1 'touch /tmp/go' || return 1
  levels=
  for n in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16; do
    remote $1 pause || return 1
    before=$(host_mib $1) given=$(counter $1 reported_given_back_bytes)
    for look in 1 2 3; do
      sleep 0.1
      [ "$(host_mib $1) $(counter $1 reported_given_back_bytes)" = "$before $given" ] || { echo "a paused guest returned memory"; return 1; }
    done
    levels="$levels $before"
    remote $1 resume || return 1
    [ $before -gt $((filled - most * 6 / 10)) ] || break
    sleep 0.3
  done
  wait_until 30 gone $1 || { echo "$filled MiB, then $(host_mib $1) MiB, although $free are free"; return 1; }
  left=$(host_mib $1)
  echo "LAB note: $kind: paused with$levels MiB on the host, of $filled before and $left afterwards"
  # There was something to give while it was paused.
  [ "$(echo $levels | cut -d' ' -f1)" -gt $((left + 4)) ] && let_fill_end $1 && guest $1 "$kept"
}

# What is in the balloon is not with the host, and comes back when the guest takes it out.
inflates() {
  hold $1 8 && let_fill_end $1 || return 1
  remote $1 resize --balloon 192M || return 1
  wait_until 60 actual_is $1 192 || { echo "actual $(counter $1 actual_bytes)"; return 1; }
  # A guest's pages do not always make a whole huge page.
  wait_until 20 host_below $1 $((GUEST_MIB - 192 + slack)) || { echo "$(host_mib $1) MiB of $GUEST_MIB"; return 1; }
  echo "LAB note: $kind: $(($(counter $1 inflated_given_back_bytes) / MIB)) of 192 MiB in the balloon were returned, $(host_mib $1) MiB are left"
  guest $1 "$kept" && remote $1 resize --balloon 0 && wait_until 60 actual_is $1 0 || return 1
  hold $1 9 && let_fill_end $1 && guest $1 "$kept"
}

# kind_of KIND MEMORY SLACK_MIB
kind_of() {
  kind=$1 MEMORY=$2 slack=$3
  start_guest $1 1 --balloon $BALLOON || { failed $1_starts "the VMM did not start"; return; }
  check ${kind}_boots wait_until $WAIT_S says $1 "GUEST-READY 1 vcpus"
  guest $1 'head -c 8388608 /dev/urandom >/tmp/keep; sha256sum </tmp/keep >/tmp/keep.sum; awk "/MemTotal/ { print int(\$2 * 7 / 10 / 1024) }" /proc/meminfo'
  most=$(cat $T/out)
  check ${kind}_goes_back_when_it_is_freed rounds $1
  check ${kind}_stays_while_the_guest_is_paused pauses $1
  check ${kind}_goes_into_the_balloon_and_comes_back inflates $1
  remote $1 shutdown-vmm
  check ${kind}_ends ends $1 30
}
kept='[ "$(sha256sum </tmp/keep)" = "$(cat /tmp/keep.sum)" ] && ! dmesg | grep -E "Oops|BUG:|Bad page|soft lockup"'

pool=/proc/sys/vm/nr_hugepages
echo $((GUEST_MIB / 2)) >$pool
[ "$(cat $pool)" = $((GUEST_MIB / 2)) ] || failed hugetlb_pool "the machine has $(cat $pool) huge pages"
kind_of hugetlb size=${GUEST_MIB}M,shared=on,hugepages=on,hugepage_size=2M 32
pool_is_whole() { [ "$(awk '/HugePages_Free/ { print $2 }' /proc/meminfo)" = $((GUEST_MIB / 2)) ]; }
check hugetlb_pool_is_whole_afterwards wait_until 10 pool_is_whole
echo 0 >$pool

echo advise >/sys/kernel/mm/transparent_hugepage/shmem_enabled
kind_of thp size=${GUEST_MIB}M,shared=on,thp=on 24
# Without mergeable=on the VMM takes whichever kind of private memory has huge pages.
kind_of private size=${GUEST_MIB}M,mergeable=on 24
