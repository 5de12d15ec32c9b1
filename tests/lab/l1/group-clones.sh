# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# metal
# takes_turns
# A Debian guest that was moved is saved and restored twice: its kernel is told of each restore by the
# generation ID, seeds its random numbers anew, and the two copies draw others; it is not told of the move.
. ./lib.sh

start_guest a 1 || failed start "the VMM did not start"
check boots wait_until $WAIT_S says a "GUEST-READY 1 vcpus"
# The copies have one disk, one after the other, and must not find it changed.
check leaves_its_disk_alone guest a 'sync; busybox mount -o remount,ro /'
# Where drivers of platform devices have it, and those of ACPI before Linux 6.8.
has_the_driver() {
  guest a 'cat /sys/bus/*/drivers/vmgenid/*/firmware_node/path /sys/bus/*/drivers/vmgenid/*/path 2>&1; true' &&
    grep -q VGEN $T/out || { cat $T/out; return 1; }
}
check has_the_driver has_the_driver
# It is made when it is first read.
check knows_its_boot guest a 'cat /proc/sys/kernel/random/boot_id'
boot_id=$(cat $T/out)

move() {
  start_vmm b || return 1
  remote b receive-migration receiver_url=unix:$T/b.mig,memory_mode=precopy >$T/b.receive.log 2>&1 &
  receiver=$!
  wait_until 30 test -S $T/b.mig || return 1
  remote a send-migration --wait destination_url=unix:$T/b.mig,memory_mode=precopy || return 1
  wait $receiver || { cat $T/b.receive.log; return 1; }
  ends a 60 && state_is b Running && open_console b
}
check moves move
check answers_after_the_move guest b 'test -z "$(dmesg | grep -i "virtual machine fork")"'

save() {
  mkdir -p $T/saved
  remote b pause && remote b snapshot file://$T/saved || return 1
  kill -9 "$(cat $T/b.pid)"
  wait_until 30 ended "$(cat $T/b.pid)"
}
check is_saved save

# copy NAME: a guest restored from the one snapshot; what it draws first is in $T/NAME.drawn.
copy() {
  start_vmm $1 || return 1
  remote $1 restore source_url=file://$T/saved,resume=on || return 1
  state_is $1 Running && open_console $1 || return 1
  # Its kernel is told by an interrupt, and sees to it on a thread. Had the move been told, there would be two.
  guest $1 'for i in $(seq 300); do dmesg | grep -q "virtual machine fork" && break; sleep 0.1; done; dmesg | grep -c "crng reseeded due to virtual machine fork"' || return 1
  [ "$(cat $T/out)" = 1 ] || { cat $T/out; return 1; }
  guest $1 'head -c 16 /dev/urandom | od -An -tx1; cat /proc/sys/kernel/random/boot_id' || return 1
  cp $T/out $T/$1.drawn
  kill -9 "$(cat $T/$1.pid)"
  wait_until 30 ended "$(cat $T/$1.pid)"
}
check first_copy_is_told copy c
check second_copy_is_told copy d
# The same guest, and other numbers.
draw_others() {
  cat $T/c.drawn $T/d.drawn
  for drawn in $T/c.drawn $T/d.drawn; do
    [ "$(sed -n 2p $drawn)" = "$boot_id" ] && sed -n 1p $drawn | grep -qE '^( [0-9a-f]{2}){16}$' || return 1
  done
  [ "$(sed -n 1p $T/c.drawn)" != "$(sed -n 1p $T/d.drawn)" ]
}
check draw_others draw_others
