# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# metal
# Debian guests return memory with their own balloon driver: inflate, deflate, free page
# reporting, out of memory, statistics; and what a migration, a snapshot and a reboot make of it.
. ./lib.sh

. ./balloon-lib.sh

start_guest a 1 --balloon $BALLOON || { failed start "the VMM did not start"; exit 1; }
check boots wait_until $WAIT_S says a "GUEST-READY 1 vcpus"
check driver_is_bound guest a 'ls /sys/bus/virtio/drivers/virtio_balloon | grep -q virtio'
# What the guest keeps through everything.
# As much of memory as there is may be written.
guest a 'busybox mount -o remount,size=95% /tmp'
check keeps_content guest a 'head -c 16777216 /dev/urandom >/tmp/keep; sha256sum </tmp/keep >/tmp/keep.sum'
kept='[ "$(sha256sum </tmp/keep)" = "$(cat /tmp/keep.sum)" ] && ! dmesg | grep -E "Oops|BUG:|Bad page|soft lockup"'

statistics() {
  wait_until 20 has_statistics a || { remote a counters; return 1; }
  total=$(counter a guest_total_bytes) free=$(counter a guest_free_bytes)
  guest a "awk '/MemTotal/ {print \$2 * 1024}' /proc/meminfo" || return 1
  [ "$total" = "$(cat $T/out)" ] && [ "$free" -gt 0 ] && [ "$free" -lt "$total" ]
}
check statistics_are_those_of_the_guest statistics

reports() {
  guest a 'head -c 100663296 /dev/zero | tr "\0" "x" >/tmp/fill' || return 1
  filled=$(blocks a)
  guest a 'rm /tmp/fill' || return 1
  wait_until 30 below a $((filled - 86)) || { echo "$filled MiB, then $(blocks a) MiB"; return 1; }
  echo "LAB note: reporting: $filled MiB filled, $(blocks a) MiB after"
  guest a "$kept"
}
check reported_pages_go_back_to_the_host reports

inflates() {
  guest a 'head -c 100663296 /dev/zero | tr "\0" "y" >/tmp/fill; rm /tmp/fill' || return 1
  remote a resize --balloon 128M || return 1
  wait_until 60 actual_is a 128 || { echo "actual $(counter a actual_bytes)"; return 1; }
  below a 128 || { echo "$(blocks a) MiB of 128 at most"; return 1; }
  remote a info | grep -q "\"memory_actual_size\": *$((128 * MIB))" || return 1
  guest a "$kept"
}
check inflated_pages_go_back_to_the_host inflates

# The guest's kernel runs out of memory as far as its drivers can tell: it takes 1 MiB out of the
# balloon each time that it is about to kill a process. (Without a process that it may kill, and by
# command: an emulated guest that runs into it takes minutes to be sure.)
smaller() { [ "$(counter a actual_bytes)" -le $(($1 * MIB)) ]; }
on_oom() {
  guest a 'for p in /proc/[0-9]*; do echo -1000 >$p/oom_score_adj; done 2>/dev/null; for n in 1 2 3; do echo f >/proc/sysrq-trigger; sleep 0.5; done' || return 1
  wait_until 20 smaller 125 || { echo "$(counter a actual_bytes) bytes are left in the balloon"; return 1; }
  guest a "head -c $(($(counter a guest_free_bytes) / 2)) /dev/zero | tr '\0' 'z' >/tmp/fill; tr -d z </tmp/fill | wc -c" || return 1
  [ "$(cat $T/out)" = 0 ] && guest a "rm /tmp/fill; $kept"
}
check deflates_when_the_guest_is_out_of_memory on_oom

deflates() {
  remote a resize --balloon 0 && wait_until 60 actual_is a 0 || return 1
  guest a 'head -c 88080384 /dev/zero | tr "\0" "w" >/tmp/fill; tr -d w </tmp/fill | wc -c' || return 1
  [ "$(cat $T/out)" = 0 ] && above a 120 && guest a "rm /tmp/fill; $kept"
}
check deflated_pages_come_back deflates
no_balloon_too_large() { ! remote a resize --balloon 1G 2>$T/err && grep -q "does not fit" $T/err; }
check a_balloon_that_does_not_fit_is_refused no_balloon_too_large

# move FROM TO MODE: with a balloon, and a guest that releases memory while it goes.
move() {
  start_vmm $2 || return 1
  remote $2 receive-migration receiver_url=unix:$T/$2.mig,memory_mode=$3 >$T/$2.receive.log 2>&1 &
  receiver=$!
  wait_until 30 test -S $T/$2.mig || return 1
  guest $1 'rm -f /tmp/churned; (for n in 1 2 3 4 5 6; do head -c 16777216 /dev/zero | tr "\0" "v" >/tmp/churn; rm /tmp/churn; done; touch /tmp/churned) & :' || return 1
  remote $1 send-migration --wait destination_url=unix:$T/$2.mig,memory_mode=$3 || return 1
  wait $receiver || { cat $T/$2.receive.log; return 1; }
  ends $1 60 || return 1
  state_is $2 Running && open_console $2 && guest $2 "until [ -e /tmp/churned ]; do sleep 0.2; done; $kept"
}
check precopy_with_a_balloon_in_use move a b precopy
check postcopy_with_a_balloon_in_use move b c postcopy
after_moves() {
  remote c resize --balloon 96M && wait_until 60 actual_is c 96 || return 1
  wait_until 30 below c 160 || { echo "$(blocks c) MiB of 160 at most"; return 1; }
  wait_until 20 has_statistics c && guest c "$kept"
}
check the_balloon_works_after_moves after_moves
snapshot() {
  remote c pause && mkdir -p $T/snap && remote c snapshot file://$T/snap || return 1
  remote c shutdown-vmm || return 1
  ends c 30 && start_vmm d || return 1
  remote d restore source_url=file://$T/snap && remote d resume && open_console d || return 1
  guest d "$kept" || return 1
  [ "$(counter d actual_bytes)" = $((96 * MIB)) ] || return 1
  below d 160 && remote d resize --balloon 0 && wait_until 60 actual_is d 0 && guest d "$kept"
}
check a_snapshot_keeps_the_balloon snapshot
# Restored on demand: the balloon grows and the guest releases memory while its memory is still to come.
on_demand() {
  remote d resize --balloon 64M && wait_until 60 actual_is d 64 || return 1
  remote d pause && mkdir -p $T/snap2 && remote d snapshot file://$T/snap2 || return 1
  remote d shutdown-vmm || return 1
  ends d 30 && start_vmm e || return 1
  remote e restore source_url=file://$T/snap2,memory_restore_mode=ondemand && remote e resize --balloon 112M || return 1
  remote e resume && open_console e || return 1
  guest e 'for n in 1 2 3; do head -c 16777216 /dev/zero | tr "\0" "v" >/tmp/churn; rm /tmp/churn; done' || return 1
  wait_until 60 actual_is e 112 && guest e "$kept" || return 1
  wait_until 120 grep -q restore-memory-completed $T/e.events || return 1
  # What could not go while it was still to come has gone since.
  wait_until 30 below e 144 || { echo "$(blocks e) MiB of 144 at most"; return 1; }
  remote e resize --balloon 0 && wait_until 60 actual_is e 0 || return 1
  guest e 'head -c 88080384 /dev/zero | tr "\0" "w" >/tmp/fill; tr -d w </tmp/fill | wc -c' || return 1
  [ "$(cat $T/out)" = 0 ] && guest e "rm /tmp/fill; $kept"
}
check an_on_demand_restore_with_a_balloon_in_use on_demand
# The guest boots again while its balloon is full: its driver fills it anew, as its own count of pages says.
inflated_itself() { guest e "awk '/^balloon_inflate / { print int(\$2 / 256) }' /proc/vmstat" && [ "$(cat $T/out)" -ge $1 ]; }
reboots() {
  remote e resize --balloon 96M && wait_until 60 actual_is e 96 || { echo "not full: $(counter e actual_bytes) bytes"; return 1; }
  remote e reboot && wait_until $WAIT_S says e "GUEST-READY 1 vcpus" || { echo "not booted"; return 1; }
  wait_until 120 inflated_itself 96 || { echo "of 96 MiB the driver has filled:"; cat $T/out; return 1; }
  wait_until 60 actual_is e 96 && wait_until 60 below e 160 || { echo "$(counter e actual_bytes) bytes, $(blocks e) MiB of 160 at most"; return 1; }
  guest e 'busybox mount -o remount,size=95% /tmp; head -c 16777216 /dev/urandom >/tmp/keep; sha256sum </tmp/keep >/tmp/keep.sum' || { cat $T/out; return 1; }
  wait_until 60 has_statistics e || { echo "no statistics"; remote e counters; return 1; }
  remote e resize --balloon 0 && wait_until 60 actual_is e 0 || { echo "not empty: $(counter e actual_bytes) bytes"; return 1; }
  guest e 'head -c 88080384 /dev/zero | tr "\0" "w" >/tmp/fill; tr -d w </tmp/fill | wc -c' || { cat $T/out; return 1; }
  [ "$(cat $T/out)" = 0 ] && guest e "rm /tmp/fill; $kept"
}
check a_reboot_with_a_full_balloon reboots
