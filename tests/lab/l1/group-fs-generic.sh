# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# takes_turns
# The directory of the group `fs` as a device of which the VMM knows the type alone (generic vhost-user): Linux finds its tag
# and its queues in the configuration, which is virtiofsd's; each finds what the other has written, also after pauses with
# writes in flight, a reboot, and removal and return; what is impossible with it is refused by name; the guest outlives
# its file server.
. ./lib.sh
. ./fs-lib.sh

serves a share --tag=share
DEVICE=socket=$T/a.fs/share,device_type=fs,queue_sizes=[512,512],id=any
start_guest a 1 --generic-vhost-user $DEVICE || failed start "the VMM did not start: $(cat $T/a.fs/log)"
check boots wait_until $WAIT_S says a "GUEST-READY 1 vcpus"
check linux_mounts_it_by_the_tag_of_its_server mounts a
check the_guest_reads_what_the_host_has_written same a of-host
check the_host_reads_what_the_guest_has_written writes
check a_file_is_changed_in_its_middle changes
check directories_names_and_modes_are_the_same names
check what_the_host_makes_meanwhile_is_there appears
check a_pause_completes_what_is_in_flight pauses
check a_reboot_finds_all_of_it reboots

# refused COMMAND...: it fails with the device's name, and the guest goes on.
refused() { ! "$@" >$T/refused 2>&1 && grep -q "'any' cannot be migrated or saved" $T/refused && same a of-guest || { cat $T/refused; return 1; }; }
for mode in precopy postcopy; do
  check a_move_in_${mode}_is_refused_by_name refused remote a send-migration --wait destination_url=unix:$T/none,memory_mode=$mode
done
snapshot() { remote a pause && ! remote a snapshot file://$T/none >$T/refused 2>&1 && grep -q "'any' cannot be migrated or saved" $T/refused && remote a resume && same a of-guest || { cat $T/refused; return 1; }; }
check a_snapshot_is_refused_by_name snapshot

gone() { ! remote a info | grep -q '"id": *"any"'; }
returns() {
  guest a "busybox umount /tmp/m" && remote a remove-device any && wait_until 60 gone || return 1
  remote a add-generic-vhost-user $DEVICE >$T/added && wait_until 60 mounts a && same a of-guest && writes && same a of-host || { cat $T/added $T/a.fs/log; return 1; }
}
check it_goes_and_comes_back returns
lost() { lose a && guest a "echo \$((6 * 7))" && grep -qx 42 $T/out && state_is a Running; }
check the_guest_outlives_its_file_server lost
again() { serves a share --tag=share && remote a reboot && wait_until $WAIT_S says_times a "GUEST-READY 1 vcpus" 3 && mounts a && same a of-guest && same a of-host && writes; }
check another_server_serves_it_after_a_reboot again
fine() { guest a '! dmesg | grep -E "Oops|BUG: [^s]|hung task"' || { cat $T/out; return 1; }; }
check the_guest_is_fine fine
power_button() { guest a "busybox umount /tmp/m" && touch $T/a.fs/last && remote a power-button && ends a 60; }
check ends power_button
check filesystem_clean filesystem_clean
