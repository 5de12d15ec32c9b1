# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# takes_turns
# A directory of this machine that virtiofsd serves to a Debian guest, and another one that comes while it runs: each finds
# what the other has written, also after a pause, a reboot, a move and a restore, with files that stay open; the guest
# outlives its file server.
. ./lib.sh
. ./fs-lib.sh

# with_fs COMMAND...: in the directory with the sockets, whose paths are the same for each VMM.
with_fs() {
  serves $vm share
  serves $vm more
  cd $T/$vm.fs && exec "$@"
}
LAUNCH=with_fs

start_guest a 1 --fs tag=share,socket=share || failed start "the VMM did not start: $(cat $T/a.fs/log)"
check boots wait_until $WAIT_S says a "GUEST-READY 1 vcpus"
check linux_mounts_it mounts a
check the_guest_reads_what_the_host_has_written same a of-host
check the_host_reads_what_the_guest_has_written writes
check a_file_is_changed_in_its_middle changes
check directories_names_and_modes_are_the_same names
check what_the_host_makes_meanwhile_is_there appears
check a_pause_completes_what_is_in_flight pauses

# The other one.
mounts_more() { guest $1 'mkdir -p /tmp/more; for i in $(seq 300); do busybox mount -t virtiofs more /tmp/more 2>/tmp/why && break; sleep 0.1; done; busybox grep " /tmp/more virtiofs" /proc/mounts || { cat /tmp/why; false; }' || { cat $T/out; return 1; }; }
# more_is_same NAME: each reads there what the other writes now, in files that no cache has.
more_is_same() {
  number=$(cat $T/serial)
  head -c 1048576 /dev/urandom >$T/more/host-$number
  guest $1 "cd /tmp/more && head -c 1048576 /dev/urandom >guest-$number && sync && sha256sum host-$number guest-$number && cd /" && (cd $T/more && sha256sum host-$number guest-$number) | cmp - $T/out || { cat $T/out; return 1; }
}
comes() {
  remote a add-fs tag=more,socket=more,id=more >$T/added && mounts_more a && more_is_same a || { cat $T/added $T/a.fs/log; return 1; }
}
check another_comes_while_it_runs comes
check a_reboot_finds_all_of_it reboots
reboot_keeps() { mounts_more a && more_is_same a; }
check a_reboot_keeps_the_other reboot_keeps
# A file that stays open meanwhile.
holds() { guest $1 "exec 8>/tmp/m/held && echo before >&8"; }
held() { guest $1 "echo after >&8 && exec 8>&- && sync" && [ "$(tr '\n' ' ' <$SHARE/held)" = "before after " ] && same $1 held; }
moves() {
  rm -f $SHARE/lines
  works a && holds a && moved a b precopy && has_worked b && held b && same b of-guest && same b of-host || { cat $T/out $T/a.fs/log $T/b.fs/log; return 1; }
}
check it_moves_with_an_open_file_and_writes moves
check the_other_moves_with_it more_is_same b
postcopy() { start_vmm x; ! remote b send-migration --wait destination_url=unix:$T/x.mig,memory_mode=postcopy >$T/out 2>&1 && grep -q "another process serves" $T/out && same b of-guest; }
check postcopy_is_refused_by_name postcopy
restores() {
  mkdir -p $T/saved
  rm -f $SHARE/lines
  works b && holds b && remote b pause && remote b snapshot file://$T/saved || { cat $T/out $T/b.fs/log; return 1; }
  # It could continue: its file server has given its state, and keeps it.
  remote b resume && same b of-host && remote b shutdown-vmm && ends b 60 || return 1
  start_vmm c && remote c restore source_url=file://$T/saved,resume=true && wait_until 60 state_is c Running && open_console c || return 1
  held c && same c of-guest && same c of-host || { cat $T/out $T/c.fs/log; return 1; }
}
check it_is_saved_and_restored_with_an_open_file restores
check the_other_is_restored_with_it more_is_same c
more_is_gone() { ! remote c info | grep -q '"id": *"more"'; }
goes() { guest c "busybox umount /tmp/more" && remote c remove-device more && wait_until 60 more_is_gone && same c of-guest; }
check the_other_goes_where_it_never_came goes

lost() {
  lose c || return 1
  # What touches the file system waits for an answer.
  guest c "(cat /tmp/m/of-guest >/dev/null 2>&1 &) ; sleep 1; echo \$((6 * 7))" && grep -qx 42 $T/out && state_is c Running &&
    remote c pause && ! remote c snapshot file://$T/lost >$T/out 2>&1 && grep -q "back end is lost" $T/out && remote c resume
}
check the_guest_outlives_its_file_server lost
again() { serves c share && remote c reboot && wait_until $WAIT_S says c "GUEST-READY 1 vcpus" && mounts c && same c of-guest && same c of-host; }
check another_server_serves_it_after_a_reboot again
power_button() { guest c "busybox umount /tmp/m" && touch $T/c.fs/last && remote c power-button && ends c 60; }
check ends power_button
check filesystem_clean filesystem_clean
