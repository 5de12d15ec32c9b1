# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# metal
# A disk that firmware reaches, and one Debian guest with one vCPU: boot, console, disk, network, pause, reboot, power button.
. ./lib.sh

# What stays in 32-bit mode without page tables, as firmware is at first, reads the size of a disk.
firmware_reaches_a_disk() {
  timeout 60 cloud-hypervisor --firmware /lab/early-guest --memory size=64M --disk path=$ROOT_DISK \
    --console off --serial file=$T/early >$T/early.vmm.log 2>&1 || { cat $T/early; return 1; }
  sectors=$(printf %08x "$(cat /sys/block/${ROOT_DISK#/dev/}/size)")
  tr -d '\r' <$T/early | grep -q "^disk \[[cde][0-9a-f]* sectors $sectors\]$" || { cat $T/early; return 1; }
}
check firmware_reaches_a_disk firmware_reaches_a_disk
tap_up lab0
start_guest a 1 --net tap=lab0,mac=52:54:00:00:00:01 || failed start "the VMM did not start"
check boots_with_one_vcpu wait_until $WAIT_S says a "GUEST-READY 1 vcpus"
check console_obeys guest a "uname -a; cat /etc/debian_version"
clock_has_a_driver() {
  guest a "cat /sys/class/rtc/rtc0/name; cat /sys/class/rtc/rtc0/since_epoch; date +%s" || return 1
  grep -q "^rtc_cmos" $T/out && [ $(($(sed -n 3p $T/out) - $(sed -n 2p $T/out))) -le 2 ]
}
check clock_has_a_driver clock_has_a_driver
# By a day, as the guest's driver does it; the system's own time goes back at once.
clock_can_be_set() {
  guest a 'busybox date -s @$(($(date +%s) + 86400)) && busybox hwclock -w -u -f /dev/rtc0; busybox date -s @$(($(date +%s) - 86400)); echo AHEAD $(($(cat /sys/class/rtc/rtc0/since_epoch) - $(date +%s)))' || return 1
  ahead=$(sed -n 's/^AHEAD //p' $T/out)
  [ "$ahead" -ge 86397 ] && [ "$ahead" -le 86403 ] || { cat $T/out; return 1; }
}
check clock_can_be_set clock_can_be_set
disk_keeps_content() {
  guest a "head -c 8388608 /dev/urandom >/root/f; sha256sum </root/f; sync; echo 3 >/proc/sys/vm/drop_caches; sha256sum </root/f" &&
    [ "$(sed -n 1p $T/out)" = "$(sed -n 2p $T/out)" ]
}
check disk_keeps_content disk_keeps_content
check network_from_guest from_guest a
check network_to_guest to_guest a
pauses() {
  remote a pause && state_is a Paused &&
    echo "echo ANSWERED-AFTER-PAUSE" >"$(cat $T/a.pty)" && sleep 2 && ! says a "^ANSWERED-AFTER-PAUSE"
}
check pauses pauses
resumes() { remote a resume && state_is a Running && wait_until 60 says a "^ANSWERED-AFTER-PAUSE"; }
check resumes resumes
# registers_of BELOW...: the disks are there, and these lines of where their registers are lie below 4 GiB.
registers_of() {
  guest a 'for i in $(seq 300); do [ -e /sys/block/vdb ] && break; sleep 0.1; done; for d in vda vdb; do head -n 1 /sys/block/$d/device/../resource; done' || return 1
  below=$(grep -n '^0x00000000' $T/out | cut -d: -f1 | tr '\n' ' ')
  [ "$below" = "$1 " ] && [ "$(wc -l <$T/out)" = 2 ] || { cat $T/out; return 1; }
}
# Linux says so of one that no device explains; a paused guest hears of it afterwards.
nmi() {
  remote a nmi && wait_until 60 says a "NMI received for unknown reason" || return 1
  remote a pause && remote a nmi && state_is a Paused && remote a resume &&
    wait_until 60 says_times a "NMI received for unknown reason" 2
}
check nmi nmi
comes_later() { truncate -s 1M $T/later.img && remote a add-disk path=$T/later.img,id=later && registers_of 1; }
check disk_that_comes_later_is_above_4_gib comes_later
reboots() { guest a sync && remote a reboot && wait_until $WAIT_S says_times a "GUEST-READY" 2; }
check reboots reboots
check disks_at_boot_are_below_4_gib registers_of "1 2"
guest_restarts_itself() {
  echo "sync; busybox reboot -f || reboot -f" >"$(cat $T/a.pty)" && wait_until $WAIT_S says_times a "GUEST-READY" 3
}
check guest_restarts_itself guest_restarts_itself
check disk_after_reboot guest a "test \"\$(stat -c %s /root/f)\" = 8388608"
power_button() { remote a power-button && wait_until 60 says a "POWER-BUTTON" && ends a 60; }
check power_button_ends_the_vmm power_button
check filesystem_clean filesystem_clean
