# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# metal
# takes_turns
# A Debian guest with two vCPUs is saved with its disk and network in use, its VMM killed, and the
# guest restored by another VMM: first in one go, then, from a second snapshot, on demand.
. ./lib.sh

tap_up lab0
start_guest a 2 --net tap=lab0,mac=52:54:00:00:00:02 || failed start "the VMM did not start"
check boots_with_two_vcpus wait_until $WAIT_S says a "GUEST-READY 2 vcpus"

# A loop in the guest that writes and reads back from the disk, and files whose sums are known: one
# on the disk, one that is in memory only.
work='head -c 4194304 /dev/urandom >/root/known; sha256sum </root/known >/root/known.sum; head -c 8388608 /dev/urandom >/tmp/known; sha256sum </tmp/known >/tmp/known.sum; sync; echo 0 >/tmp/rounds; (n=0; while [ ! -e /tmp/stop ]; do head -c 262144 /dev/urandom >/root/w; s=$(sha256sum </root/w); sync; echo 1 >/proc/sys/vm/drop_caches; [ "$s" = "$(sha256sum </root/w)" ] || echo bad >>/root/bad; n=$((n+1)); echo $n >/tmp/r; mv /tmp/r /tmp/rounds; done; touch /tmp/stopped) >/dev/null 2>&1 & :'
check starts_disk_load guest a "$work"
check knows_its_boot guest a 'cat /proc/sys/kernel/random/boot_id'
boot_id=$(cat $T/out)

# save FROM DIRECTORY: pauses and saves it, then kills its VMM.
save() {
  mkdir -p $2
  remote $1 pause && remote $1 snapshot file://$2 || return 1
  state_is $1 Paused || return 1
  # A lock that is held is not to be had, however the VM stands.
  start_vmm x || return 1
  remote x restore source_url=file://$2 2>$T/refused && return 1
  grep -q "$ROOT_DISK" $T/refused || { cat $T/refused; return 1; }
  remote x shutdown-vmm && ends x 60 || return 1
  kill -9 "$(cat $T/$1.pid)"
  wait_until 30 ended "$(cat $T/$1.pid)"
}
# restore TO DIRECTORY MODE
restore() {
  start_vmm $1 || return 1
  remote $1 restore source_url=file://$2,memory_restore_mode=$3 || return 1
  state_is $1 Paused && open_console $1 && remote $1 resume && state_is $1 Running
}
# goes_on NAME: the same boot, the loop has continued, no data is lost, the kernel has no complaint.
goes_on() {
  guest $1 'cat /proc/sys/kernel/random/boot_id' && [ "$(cat $T/out)" = "$boot_id" ] || return 1
  guest $1 'cat /tmp/rounds' || return 1
  rounds=$(cat $T/out)
  guest $1 "for i in \$(seq 300); do [ \$(cat /tmp/rounds) -gt $rounds ] && break; sleep 0.1; done; [ \$(cat /tmp/rounds) -gt $rounds ] && [ ! -e /root/bad ]" || return 1
  guest $1 '[ "$(sha256sum </tmp/known)" = "$(cat /tmp/known.sum)" ]' || return 1
  guest $1 'echo 3 >/proc/sys/vm/drop_caches; [ "$(sha256sum </root/known)" = "$(cat /root/known.sum)" ] && ! dmesg | grep -E "I/O error|Oops|BUG:|hung task"'
}
# clock_is_right NAME: the guest's wall clock and this machine's agree within two (emulated) seconds,
# however long the guest takes to answer.
clock_is_right() {
  asked=$(date +%s)
  guest $1 'date +%s' || return 1
  answered=$(date +%s) said=$(cat $T/out)
  [ "$said" -ge $((asked - 2)) ] && [ "$said" -le $((answered + 2)) ] || { echo "the guest says $said between $asked and $answered"; return 1; }
}
# A debugger finds the kernel's own description, which says by how much its addresses are shifted.
dumped() {
  guest a 'uname -r' && release=$(cat $T/out) || return 1
  remote a pause && remote a coredump file://$T/core || return 1
  timeout 120 crash --osrelease $T/core >$T/release && [ "$(cat $T/release)" = "$release" ] || { cat $T/release; return 1; }
  head -c 131072 $T/core | grep -q '^KERNELOFFSET=[0-9a-f]' || return 1
  rm $T/core && remote a resume
}
check dumped_for_debuggers dumped
check saved_and_killed save a $T/first
check restored_copy restore b $T/first copy
check goes_on_after_copy goes_on b
check clock_after_copy clock_is_right b
check network_after_copy from_guest b
filled() { grep -q stage2-prefault-completed $T/$1.events; }
check stage2_is_filled_after_copy wait_until 60 filled b
check saved_and_killed_again save b $T/second
check restored_ondemand restore c $T/second ondemand
check goes_on_after_ondemand goes_on c
all_memory_came() { grep -q restore-memory-completed $T/c.events; }
check all_memory_came wait_until 120 all_memory_came
check stage2_is_filled_after_ondemand wait_until 60 filled c
check clock_after_ondemand clock_is_right c
check network_after_ondemand from_guest c
check network_back_after_ondemand to_guest c
# The guest cannot leave its disk clean while something writes to it.
stops_disk_load() { guest c 'touch /tmp/stop; for i in $(seq 300); do [ -e /tmp/stopped ] && break; sleep 0.1; done; sync; [ -e /tmp/stopped ]'; }
check stops_disk_load stops_disk_load
power_button() { remote c power-button && wait_until 60 says c "POWER-BUTTON" && ends c 60; }
check power_button_at_the_end power_button
check filesystem_clean filesystem_clean
