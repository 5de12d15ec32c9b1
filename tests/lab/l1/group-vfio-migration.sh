# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Passed-through devices that move with their guest, on a kernel that has one which can (LAB_KERNEL=iommufd):
# Linux's sample of a serial card with I/O ports, mtty, all of it in software. A Debian guest with its own
# driver moves between VMMs on this machine, is saved and restored, and its move fails; after each the card
# holds what was written before, and interrupts.
# on_request
# limit_s: 2400
# machine: -netdev hubport,id=h0,hubid=0 -device e1000e,netdev=h0,romfile=,mac=52:54:00:00:02:02
. ./lib.sh
. ./passthrough.sh

insmod ./mdev.ko && insmod ./mtty.ko
CARDS=/sys/bus/mdev/devices
# new_card NUMBER PORTS: makes a card.
new_card() { echo $(card $1) >/sys/devices/virtual/mtty/mtty/mdev_supported_types/mtty-$2/create && [ -e $CARDS/$(card $1) ]; }
card() { echo 83b8f4f2-509f-382f-3c1e-00000000000$1; }
# Both ends of a move have one path, which leads to one card at the source, and to another at the
# destination.
PLACE=$T/card
leads_to() { ln -sfn $CARDS/$(card $1) $PLACE; }
all_cards() { for n in 1 2 3 4 5 6 7; do new_card $n 2 || return 1; done; new_card 9 1; }
check makes_cards all_cards
leads_to 1
for id in $PCI/*/device; do
  case $(cat $id) in 0x10d3) nic=$(dirname $id) ;; esac
done
check network_card_is_bound give_to_vfio $nic
GUEST_KERNEL=/lab/vmlinuz-amd64
GUEST_INITRAMFS=/lab/initramfs-amd64.gz
# The program is on the second disk.
DISK_OPTIONS=" path=/lab/ports,readonly=on"

start_guest a 1 -v --device path=$PLACE,id=card || failed start "the VMM did not start"
check boots_with_a_serial_card wait_until $WAIT_S says a "GUEST-READY 1 vcpus"

# Where the guest has the card: its ports, and the names of its lines.
of_the_card='c=$(dirname $(grep -l 0x3253 /sys/bus/pci/devices/*/device | head -n 1)); p0=$(sed -n "1s/0x0*\([0-9a-f]*\) .*/\1/p" $c/resource); p1=$(sed -n "2s/0x0*\([0-9a-f]*\) .*/\1/p" $c/resource)'
finds_the_driver() {
  guest $1 "head -c 1048576 /dev/vdb >/tmp/ports; chmod +x /tmp/ports; $of_the_card; echo \$p0 \$p1 \$(find \$c/ -name 'ttyS*' | sed 's/.*\///' | sort); cat \$c/resource; cat /proc/ioports" || { cat $T/out; return 1; }
  cat $T/out
  set -- $(head -n 1 $T/out)
  line=$4
  grep -q "$1-.*serial" $T/out && grep -q "$2-.*serial" $T/out && [ -n "$line" ]
}
check the_guests_driver_has_both_lines finds_the_driver a

# reads NAME EXPECTED ACCESSES...: the guest reads this from the first line's ports, whose driver sleeps.
reads() {
  vm=$1 expected=$2
  shift 2
  guest $vm "$of_the_card; /tmp/ports \$p0 $*" || { cat $T/out; return 1; }
  [ "$(sed 's/ *$//' $T/out)" = "$expected" ] || { echo "'$(cat $T/out)' in place of '$expected'"; return 1; }
}
# Three bytes in the FIFO, modem control, interrupts, line control, divisor, scratch: all but the last are
# read through other registers when the divisor is hidden again.
writes_state() {
  reads $1 "" w2=07 w0=47 w0=4f w0=44 w4=0b w1=08 w3=9b w0=80 w1=01 w7=a5
}
# The FIFO is emptied by reading, so the next reader needs it filled again.
has_state() {
  reads $1 "9b 0b a5 80 01" r3 r4 r7 r0 r1 && reads $1 "08 47 4f 44 60" w3=1b r1 r0 r0 r0 r5 &&
    reads $1 "" w0=47 w0=4f w0=44 w3=9b w0=80 w1=01
}
check ports_hold_what_is_written writes_state a
check ports_give_it_back has_state a
# talks NAME: the second line, held open by a program, sends back what is written to it, and by interrupts.
interrupts() { guest $1 'sed -n "s/^ *[0-9]*: *\([0-9]*\) .*ttyS.*/\1/p" /proc/interrupts' && cat $T/out; }
talks() {
  before=$(interrupts $1)
  said=said-$1-$(cat $T/serial)
  guest $1 "echo $said >&5; IFS= read -r -t 60 heard <&5; echo \"heard \$heard\"" || { cat $T/out; return 1; }
  grep -q "^heard $said" $T/out || { cat $T/out; return 1; }
  after=$(interrupts $1)
  echo "interrupts before: $before, after: $after"
  [ "$after" -gt "$before" ]
}
opens() { guest $1 "busybox stty -F /dev/$line raw -echo; exec 5<>/dev/$line"; }
check opens_the_second_line opens a
check second_line_interrupts talks a
check first_line_is_another has_state a

# Ports where the guest puts them, and only while it wants them.
moves_its_ports() {
  guest a "$of_the_card; set_bar() { printf \"\\\\x\$2\\\\x\$1\" | dd of=\$c/config bs=1 seek=16 conv=notrunc 2>/dev/null; }; set_io() { printf \"\\\\x0\$1\" | dd of=\$c/config bs=1 seek=4 conv=notrunc 2>/dev/null; }; set_bar ef 01; /tmp/ports ef00 r7; /tmp/ports \$p0 r7; set_io 2; /tmp/ports ef00 r7; set_io 3; set_bar \${p0%??} \${p0#??}; /tmp/ports ef00 r7; /tmp/ports \$p0 r7" || { cat $T/out; return 1; }
  cat $T/out
  [ "$(sed 's/ *$//' $T/out | tr '\n' ,)" = "a5,ff,ff,ff,a5," ]
}
check ports_follow_their_register moves_its_ports

# Memory that is written all the time, and a sum that is known.
# No card holds anything of another: whatever is read after a move or a restore has come with it.
work='head -c 8388608 /dev/urandom >/tmp/known; sha256sum </tmp/known >/tmp/known.sum; (n=0; while :; do head -c 262144 /dev/urandom >/tmp/w; s=$(sha256sum </tmp/w); [ "$s" = "$(sha256sum </tmp/w)" ] || echo bad >>/tmp/bad; n=$((n+1)); echo $n >/tmp/rounds; done) >/dev/null 2>&1 & :'
check writes_memory guest a "$work"
memory_is_whole() {
  guest $1 'cat /tmp/rounds' || return 1
  rounds=$(cat $T/out)
  guest $1 "for i in \$(seq 300); do [ \$(cat /tmp/rounds) -gt $rounds ] && break; sleep 0.1; done; [ \$(cat /tmp/rounds) -gt $rounds ] && [ ! -e /tmp/bad ] && [ \"\$(sha256sum </tmp/known)\" = \"\$(cat /tmp/known.sum)\" ] && ! dmesg | grep -E 'Oops|BUG:|soft lockup|hung task|nobody cared'"
}
# all_is_well NAME: memory, the first line's state and the second line.
all_is_well() { has_state $1 && talks $1 && memory_is_whole $1; }

# refused TEXT REQUEST...: the VMM refuses, says so, and the guest continues.
refused() {
  text=$1
  shift
  remote a "$@" >$T/refused.log 2>&1 && { cat $T/refused.log; return 1; }
  cat $T/refused.log
  grep -q "$text" $T/refused.log && state_is a Running
}
check postcopy_is_refused refused "cannot wait for pages" send-migration destination_url=unix:$T/none.mig,memory_mode=postcopy
removed() { tr -d ' ' <$T/a.events | grep -q "\"id\":\"$1\"" && happened a device-removed && ! info a "\"id\": *\"$1\""; }
refuses_with_the_network_card() {
  remote a add-device path=$nic,id=nic && refused "'nic': its driver" send-migration destination_url=unix:$T/none.mig || return 1
  mkdir -p $T/never
  remote a pause || return 1
  remote a snapshot file://$T/never >$T/refused.log 2>&1 && return 1
  cat $T/refused.log
  grep -q "'nic': its driver" $T/refused.log && remote a resume && remote a remove-device nic && wait_until 60 removed nic
}
check refuses_with_a_device_that_cannot refuses_with_the_network_card
check all_is_well_after_refusals all_is_well a

# idle_vmm NAME: a VMM without a VM, so without options of one.
idle_vmm() {
  kept=$PASS_BY PASS_BY=""
  start_vmm $1
  code=$?
  PASS_BY=$kept
  return $code
}
# receives NAME CARD: a VMM that waits for the guest, with that card.
receives() {
  leads_to $2
  idle_vmm $1 || return 1
  remote $1 receive-migration receiver_url=unix:$T/$1.mig >$T/$1.receive.log 2>&1 &
  receiver=$!
  wait_until 30 test -S $T/$1.mig
}
# move FROM TO CARD
move() {
  receives $2 $3 || return 1
  remote $1 send-migration --wait destination_url=unix:$T/$2.mig || { cat $T/$2.receive.log; return 1; }
  wait $receiver || { cat $T/$2.receive.log; return 1; }
  ends $1 60 || return 1
  state_is $2 Running && open_console $2
}
# A card with one line: the destination finds that out before the guest stops.
other_hardware() {
  receives x 9 || return 1
  remote a send-migration --wait destination_url=unix:$T/x.mig >$T/refused.log 2>&1 && return 1
  cat $T/refused.log
  grep -q "BARs" $T/refused.log && state_is a Running || return 1
  wait_until 60 ended $receiver
  remote x shutdown-vmm && ends x 60
}
check another_kind_of_card_is_refused other_hardware
check all_is_well_at_the_source all_is_well a
peer_dies() {
  receives y 5 || return 1
  remote a send-migration destination_url=unix:$T/y.mig,bandwidth=16M || return 1
  wait_until 60 phase_is a precopy || { remote a migration-progress; return 1; }
  kill -9 "$(cat $T/y.pid)"
  wait_until 60 phase_is a failed && wait_until 60 state_is a Running
}
phase_is() { remote $1 migration-progress | tr -d ' \n' | grep -q "\"phase\":\"$2\""; }
check a_peer_that_dies_fails_the_move peer_dies
check all_is_well_without_the_peer all_is_well a

check moves_in_precopy move a b 2
# Beside the document: this is logged when all of it is acknowledged.
came_as_bytes() { grep -E "[1-9][0-9]* bytes of the state of 1 devices were sent" $T/a.vmm.log; }
check the_state_of_the_card_came_as_bytes came_as_bytes
logs_dma() { ! grep -q "cannot log" $T/a.vmm.log; }
check the_card_logs_its_dma logs_dma
check all_is_well_where_it_arrived all_is_well b
check moves_again move b c 3
check all_is_well_again all_is_well c

saved() {
  mkdir -p $T/saved
  remote c pause && remote c snapshot file://$T/saved || return 1
  kill -9 "$(cat $T/c.pid)"
  wait_until 30 ended "$(cat $T/c.pid)"
}
restored() {
  leads_to 4
  idle_vmm d && remote d restore source_url=file://$T/saved || return 1
  state_is d Paused && open_console d && remote d resume && state_is d Running
}
check saved_and_killed saved
check restored_with_another_card restored
check all_is_well_after_restore all_is_well d
on_demand_is_refused() {
  idle_vmm z || return 1
  remote z restore source_url=file://$T/saved,memory_restore_mode=ondemand >$T/refused.log 2>&1 && return 1
  cat $T/refused.log
  remote z shutdown-vmm && ends z 60
}
check on_demand_is_refused on_demand_is_refused
# A second card comes while the guest runs; its ports are its own.
another_card() {
  remote d add-device path=$CARDS/$(card 5),id=other || return 1
  guest d 'for i in $(seq 300); do c=$(dirname $(grep -l 0x3253 /sys/bus/pci/devices/*/device | sed -n 2p)) && find $c/ -name "ttyS*" 2>/dev/null | grep -q . && break; sleep 0.1; done; head -n 2 $c/resource; p=$(sed -n "1s/0x0*\([0-9a-f]*\) .*/\1/p" $c/resource); /tmp/ports $p w7=3c r7' || { cat $T/out; return 1; }
  cat $T/out
  [ "$(tail -n 1 $T/out)" = "3c " ] && has_state d
}
check another_card_comes another_card
power_button() { remote $1 power-button && wait_until 60 says $1 "POWER-BUTTON" && ends $1 60; }
check power_button_at_last power_button d

# The same by type1, whose groups need no IOMMU for such devices.
PASS_BY=""
leads_to 6
by_type1() {
  start_guest e 1 --device path=$PLACE,id=card && wait_until $WAIT_S says e "GUEST-READY 1 vcpus" &&
    finds_the_driver e && writes_state e && opens e && guest e "$work" && all_is_well e
}
check works_by_type1 by_type1
check moves_by_type1 move e f 7
check all_is_well_by_type1 all_is_well f
check power_button_by_type1 power_button f
