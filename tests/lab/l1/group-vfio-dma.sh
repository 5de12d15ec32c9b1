# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# takes_turns
# A passed-through device that does DMA and can be moved (QEMU's edu, by a VFIO driver of ours): after a move
# and after a restore the device and the processor find the same in every page, also in those that became
# zero while memory was on its way.
# usual_kernel
# limit_s: 1200
# machine: -device edu,dma_mask=0xffffffffffffffff -device edu,dma_mask=0xffffffffffffffff
. ./lib.sh
. ./passthrough.sh
# A check is some 80 transfers of 100 ms.
GUEST_S=240

insmod ./edu-vfio-pci.ko
functions=""
for id in $PCI/*/device; do
  case $(cat $id) in 0x11e8) functions="$functions $(dirname $id)" ;; esac
done
set -- $functions
first=$1 second=$2
check both_are_bound eval "give_to_vfio $first edu-vfio-pci && give_to_vfio $second edu-vfio-pci"
# Both ends of a move have one path, which leads to one function here and to another there.
PLACE=$T/edu
leads_to() { ln -sfn $1 $PLACE; }
# The program is on the second disk.
DISK_OPTIONS=" path=/lab/edu-dma,readonly=on"

# begins NAME: the program runs in the guest, which leaves its pages where they are.
begins() {
  guest $1 'echo 0 >/proc/sys/vm/compact_unevictable_allowed; head -c 1048576 /dev/vdb >/tmp/edu-dma; chmod +x /tmp/edu-dma; mkfifo /tmp/dma.in; : >/tmp/dma.out; /tmp/edu-dma $(dirname $(grep -l 0x11e8 /sys/bus/pci/devices/*/device)) </tmp/dma.in >>/tmp/dma.out 2>&1 & exec 7>/tmp/dma.in; until grep -q "done\|failed" /tmp/dma.out; do sleep 0.1; done; cat /tmp/dma.out; grep -q done /tmp/dma.out' || { cat $T/out; return 1; }
}
# dma NAME COMMAND [MORE]: what the program answers is good; MORE is done in the guest after it.
dma() {
  guest $1 ": >/tmp/dma.out; echo $2 >&7; until grep -q '^done\|^wrong\|^failed' /tmp/dma.out; do sleep 0.1; done; ${3:-:}; cat /tmp/dma.out; grep -q '^done' /tmp/dma.out" || { cat $T/out; return 1; }
}
# receives NAME FUNCTION: a VMM that waits for the guest, with that function.
receives() {
  leads_to $2
  start_vmm $1 || return 1
  remote $1 receive-migration receiver_url=unix:$T/$1.mig >$T/$1.receive.log 2>&1 &
  receiver=$!
  wait_until 30 test -S $T/$1.mig
}
# has_sent NAME MIB: the first round has no more left than that.
has_sent() {
  left=$(remote $1 migration-progress | tr ',{}' '\n\n\n' | sed -n 's/^ *"remaining_bytes": *\([0-9]*\).*/\1/p' | head -n 1)
  [ -n "$left" ] && [ "$left" -lt $(($2 * 1048576)) ]
}
# move FROM TO FUNCTION: nothing logs what the device writes, so all memory goes once more when the guest has stopped.
# By then pages have become zero that went before.
move() {
  guest $1 'head -c 25165824 /dev/urandom >/tmp/known' || return 1
  receives $2 $3 || return 1
  remote $1 send-migration destination_url=unix:$T/$2.mig,bandwidth=4M,timeout_strategy=ignore || { cat $T/$2.receive.log; return 1; }
  wait_until 120 has_sent $1 96 || { remote $1 migration-progress; return 1; }
  dma $1 zero || return 1
  wait_until 240 ended $receiver || { remote $1 migration-progress; return 1; }
  wait $receiver || { cat $T/$2.receive.log; cat $T/$1.vmm.log; return 1; }
  ends $1 60 || return 1
  state_is $2 Running && open_console $2
}
# stays FROM TO FUNCTION: that would take longer than is allowed, so the guest goes on where it is.
stays() {
  receives $2 $3 || return 1
  remote $1 send-migration --wait destination_url=unix:$T/$2.mig,downtime_ms=20 >$T/refused.log 2>&1 && return 1
  wait $receiver
  grep -q "nothing logs what devices outside of the VMM write to guest memory (edu)" $T/refused.log || { cat $T/refused.log; return 1; }
  state_is $1 Running && remote $2 shutdown-vmm && ends $2 60
}
# restored FROM TO: saved, killed, and restored with the same function.
restored() {
  mkdir -p $T/saved
  remote $1 pause && remote $1 snapshot file://$T/saved || return 1
  kill -9 "$(cat $T/$1.pid)"
  wait_until 30 ended "$(cat $T/$1.pid)"
  start_vmm $2 && remote $2 restore source_url=file://$T/saved || return 1
  rm -r $T/saved
  state_is $2 Paused && open_console $2 && remote $2 resume && state_is $2 Running
}
# all_of_it A B C WHAT: a guest of that memory, moved and restored. Memory is mapped before anything arrives,
# or it would depend on who is faster what is.
all_of_it() {
  leads_to $first
  start_guest $1 1 -v --device path=$PLACE,id=edu,pin=strict || failed start_$4 "the VMM did not start"
  check boots_with_$4 wait_until $WAIT_S says $1 "GUEST-READY 1 vcpus"
  check begins_with_$4 begins $1
  check dma_is_right_with_$4 eval "dma $1 fill && dma $1 check"
  check stays_within_the_downtime_with_$4 stays $1 $1.other $second
  check moves_with_$4 move $1 $2 $second
  # Beside the document: this is logged when all of it is acknowledged.
  check state_came_as_bytes_with_$4 grep -E "[1-9][0-9]* bytes of the state of 1 devices were sent" $T/$1.vmm.log
  check dma_is_right_after_the_move_with_$4 dma $2 check
  check restores_with_$4 eval "dma $2 zero && restored $2 $3"
  check dma_is_right_after_the_restore_with_$4 dma $3 check
}
# Small pages: the kernel does not split a huge one that is pinned, so that a hole in it changes no page.
MEMORY=size=192M,shared=on,thp=off
all_of_it a b c shared_memory
power_button() { remote $1 power-button && wait_until 60 says $1 "POWER-BUTTON" && ends $1 60; }
check power_button power_button c
MEMORY=size=192M,mergeable=on
all_of_it d e f private_memory
check power_button_at_last power_button f
