# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# A Debian guest with half of its memory in the balloon that really runs out of the other half: its kernel
# takes pages out, a MiB each time that it would have to kill a process, and no process is killed.
# on_request
# limit_s: 1800
. ./lib.sh
. ./balloon-lib.sh
# Each time takes an emulated guest long.
GUEST_S=1200

start_guest a 1 --balloon $BALLOON || { failed start "the VMM did not start"; exit 1; }
check boots wait_until $WAIT_S says a "GUEST-READY 1 vcpus"
guest a 'busybox mount -o remount,size=600M /tmp'
inflated() { remote a resize --balloon 100M && wait_until 60 actual_is a 100; }
check inflates inflated

# Pages of /tmp cannot go anywhere, as there is no swap. What is written is 24 MiB more than there is.
pressure() {
  guest a 'echo 3 >/proc/sys/vm/drop_caches; awk "/^MemAvailable/ { print int(\$2 / 1024) }" /proc/meminfo' || return 1
  want=$(($(tail -n 1 $T/out) + 24))
  guest a "head -c $((want * MIB)) /dev/zero | tr '\0' 'p' >/tmp/fill; ls -l /tmp/fill" || return 1
  grep -q " $((want * MIB)) " $T/out || { cat $T/out; return 1; }
  left=$(counter a actual_bytes)
  echo "LAB note: wrote $want MiB, $((left / MIB)) MiB of 100 are left in the balloon"
  [ "$left" -le $((90 * MIB)) ]
}
check what_is_in_the_balloon_comes_out_under_pressure pressure
intact() { guest a "tr -d p </tmp/fill | wc -c" && [ "$(tail -n 1 $T/out)" = 0 ]; }
check every_page_holds_what_was_written intact
nobody_was_killed() { guest a '! dmesg | grep -E "Out of memory|Killed process|Oops|Bad page"' || { cat $T/out; return 1; }; }
check nobody_was_killed nobody_was_killed
# With room again the balloon grows to what it is to have, when the guest is told to once more.
grows_again() { guest a 'rm /tmp/fill' && remote a resize --balloon 100M && wait_until 120 actual_is a 100; }
check grows_again_when_there_is_room grows_again
off() { remote a shutdown-vmm && ends a 60; }
check it_ends off
