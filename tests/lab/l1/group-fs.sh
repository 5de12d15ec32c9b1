# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# takes_turns
# A directory of this machine that virtiofsd serves to a Debian guest: each finds what the other has written, also after a
# pause, a reboot, a move and a restore, with files that stay open; the guest outlives its file server.
. ./lib.sh
GUEST_INITRAMFS=/lab/initramfs-fs.gz
SHARE=$T/share

# serves NAME: a file server for this VMM, which serves one connection; another follows it until there is a file `last`.
serves() {
  mkdir -p $T/$1.fs
  rm -f $T/$1.fs/last
  {
    until [ -e $T/$1.fs/last ]; do
      virtiofsd --socket-path=$T/$1.fs/socket --shared-dir=$SHARE --sandbox=none --log-level=warn >>$T/$1.fs/log 2>&1 &
      echo $! >$T/$1.fs/pid
      wait $!
    done
  } >/dev/null 2>&1 &
}
# with_fs COMMAND...: in the directory with the socket, whose path is the same for each VMM.
with_fs() {
  serves $vm
  cd $T/$vm.fs && exec "$@"
}
LAUNCH=with_fs

# sum FILE: its checksum here. guest_sum NAME FILE: that which the guest finds.
sum() { sha256sum <$SHARE/$1; }
guest_sum() { guest $1 "sha256sum </tmp/m/$2" && tail -n 1 $T/out; }
same() { [ "$(guest_sum $1 $2)" = "$(sum $2)" ] || { cat $T/out; sum $2; return 1; }; }
mounts() { guest $1 "mkdir -p /tmp/m && busybox mount -t virtiofs share /tmp/m" || { cat $T/out; return 1; }; }

mkdir -p $SHARE
head -c 4194304 /dev/urandom >$SHARE/of-host
start_guest a 1 --fs tag=share,socket=socket || failed start "the VMM did not start: $(cat $T/a.fs/log)"
check boots wait_until $WAIT_S says a "GUEST-READY 1 vcpus"
check linux_mounts_it mounts a
check the_guest_reads_what_the_host_has_written same a of-host
writes() { guest a "head -c 8388608 /dev/urandom >/tmp/m/of-guest && sync && sha256sum </tmp/m/of-guest" && [ "$(tail -n 1 $T/out)" = "$(sum of-guest)" ] && same a of-guest; }
check the_host_reads_what_the_guest_has_written writes
# In the middle and at the end of a file, without a cache of the guest in between.
changes() {
  guest a "printf changed | dd of=/tmp/m/of-host bs=1 seek=123456 conv=notrunc 2>/dev/null && printf more >>/tmp/m/of-host && sync" &&
    [ "$(dd if=$SHARE/of-host bs=1 skip=123456 count=7 2>/dev/null)" = changed ] && [ "$(tail -c 4 $SHARE/of-host)" = more ] && same a of-host
}
check a_file_is_changed_in_its_middle changes
names() {
  guest a "mkdir /tmp/m/d && for n in \$(seq 200); do echo \$n >/tmp/m/d/\$n; done && mv /tmp/m/d/7 /tmp/m/d/seven && rm /tmp/m/d/8 && ln -s seven /tmp/m/d/link && chmod 600 /tmp/m/d/9" || { cat $T/out; return 1; }
  [ "$(ls $SHARE/d | wc -l)" = 200 ] && [ "$(cat $SHARE/d/link)" = 7 ] && [ "$(stat -c %a $SHARE/d/9)" = 600 ] && [ ! -e $SHARE/d/8 ]
}
check directories_names_and_modes_are_the_same names
appears() { echo now >$SHARE/d/now && guest a "cat /tmp/m/d/now; rm -r /tmp/m/d" && grep -qx now $T/out && [ ! -e $SHARE/d ]; }
check what_the_host_makes_meanwhile_is_there appears

# Lines until told to stop; each is written before the next.
works() { guest $1 "rm -f /tmp/stop; { n=0; while [ ! -e /tmp/stop ]; do n=\$((n+1)); echo \$n >>/tmp/m/lines || echo \$n >>/tmp/bad; sync; done; echo \$n >/tmp/count; } >/dev/null 2>&1 & sleep 1"; }
has_worked() { guest $1 "touch /tmp/stop; for i in \$(seq 600); do [ -s /tmp/count ] && break; sleep 0.1; done; cat /tmp/count; [ ! -e /tmp/bad ]" && [ "$(tail -n 1 $T/out)" = "$(wc -l <$SHARE/lines)" ] && [ "$(tail -n 1 $SHARE/lines)" = "$(wc -l <$SHARE/lines)" ]; }
lines_are_more() { [ "$(wc -l <$SHARE/lines)" -gt "$1" ]; }
pauses() {
  works a && wait_until 60 lines_are_more 3 || return 1
  for _ in 1 2 3; do
    remote a pause || return 1
    # Nothing is in flight.
    before=$(wc -l <$SHARE/lines)
    sleep 1
    [ "$(wc -l <$SHARE/lines)" = "$before" ] || { echo "written in a pause"; return 1; }
    remote a resume && wait_until 60 lines_are_more $before || return 1
  done
  has_worked a || { cat $T/out; return 1; }
}
check a_pause_completes_what_is_in_flight pauses

reboots() { guest a sync && remote a reboot && wait_until $WAIT_S says_times a "GUEST-READY 1 vcpus" 2 && mounts a && same a of-guest && same a of-host; }
check a_reboot_finds_all_of_it reboots
# A file that stays open meanwhile.
holds() { guest $1 "exec 8>/tmp/m/held && echo before >&8"; }
held() { guest $1 "echo after >&8 && exec 8>&- && sync" && [ "$(tr '\n' ' ' <$SHARE/held)" = "before after " ] && same $1 held; }
moves() {
  rm -f $SHARE/lines
  works a && holds a && moved a b precopy && has_worked b && held b && same b of-guest && same b of-host || { cat $T/out $T/a.fs/log $T/b.fs/log; return 1; }
}
check it_moves_with_an_open_file_and_writes moves
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

lost() {
  touch $T/c.fs/last
  kill -9 $(cat $T/c.fs/pid)
  wait_until 30 grep -q '"back-end-lost"' $T/c.events || return 1
  # What touches the file system waits for an answer.
  guest c "(cat /tmp/m/of-guest >/dev/null 2>&1 &) ; sleep 1; echo \$((6 * 7))" && grep -qx 42 $T/out && state_is c Running &&
    remote c pause && ! remote c snapshot file://$T/lost >$T/out 2>&1 && grep -q "back end is lost" $T/out && remote c resume
}
check the_guest_outlives_its_file_server lost
again() { serves c && remote c reboot && wait_until $WAIT_S says c "GUEST-READY 1 vcpus" && mounts c && same c of-guest && same c of-host; }
check another_server_serves_it_after_a_reboot again
power_button() { guest c "busybox umount /tmp/m" && touch $T/c.fs/last && remote c power-button && ends c 60; }
check ends power_button
check filesystem_clean filesystem_clean
