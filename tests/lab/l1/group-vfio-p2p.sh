# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# takes_turns
# Two passed-through NVMe controllers in one Debian guest: what one writes by DMA arrives in the memory of the
# other, as long as the guest has that switched on and where it has put it; and does not with
# vfio_p2p_dma=off.
# limit_s: 600
# machine: -device nvme,id=n1,serial=writes -device nvme,id=n2,serial=buffer,cmb_size_mb=2
. ./lib.sh
. ./passthrough.sh

# function_of SERIAL: the directory of the controller's function, here or in the guest.
function_of='function_of() { echo /sys/bus/pci/devices/$(basename $(readlink $(dirname $(grep -ls "^$1" /sys/class/nvme/*/serial))/device)); }'
eval "$function_of"
both_there() { grep -qs '^writes' /sys/class/nvme/*/serial && grep -qs '^buffer' /sys/class/nvme/*/serial; }
wait_until 20 both_there
ROOT_DISK=/dev/$(grep -ls '^lab' /sys/class/nvme/*/serial | cut -d/ -f5)n1
writes=$(function_of writes)
buffer=$(function_of buffer)
echo "writes $writes, buffer $buffer"
check both_are_bound eval "give_to_vfio $writes && give_to_vfio $buffer"
# The program is on the second disk.
DISK_OPTIONS=" path=/lab/nvme-peer,readonly=on"

# one_writes NAME: the guest takes both from their driver for as long as the program runs, whose lines are in
# $T/out.
one_writes() {
  guest $1 "$function_of; head -c 1048576 /dev/vdb >/tmp/nvme-peer; chmod +x /tmp/nvme-peer; for i in \$(seq 100); do grep -qs '^buffer' /sys/class/nvme/*/serial && grep -qs '^writes' /sys/class/nvme/*/serial && break; sleep 0.1; done; a=\$(function_of writes); b=\$(function_of buffer); for f in \$a \$b; do basename \$f >/sys/bus/pci/drivers/nvme/unbind; done; /tmp/nvme-peer \$a \$b 2>&1; code=\$?; for f in \$a \$b; do basename \$f >/sys/bus/pci/drivers/nvme/bind; done; test \$code = 0"
  code=$?
  cat $T/out
  return $code
}
# the_line TEXT: one of the lines is that, whatever the controller says of it.
the_line() { grep -q "^$1 (" $T/out; }

start_guest a 1 --device path=$writes,id=writes path=$buffer,id=buffer || failed start "the VMM did not start"
check boots_with_both wait_until $WAIT_S says a "GUEST-READY 1 vcpus"
check disk_writes_to_guest_memory one_writes a
check disk_writes_to_the_other_device the_line "other device: arrives"
check not_while_its_decoding_is_off the_line "other device with decoding off: does not arrive"
check again_when_it_is_on the_line "other device with decoding on again: arrives"
check not_where_it_was the_line "where it was before it moved: does not arrive"
check where_it_moved_to the_line "where it moved to: arrives"
check where_it_is_again the_line "where it is again: arrives"
# Nothing that is mapped for the other keeps it here.
comes_and_goes() {
  remote a remove-device buffer && wait_until 60 happened a device-removed || return 1
  basename $buffer >$buffer/driver/unbind && [ ! -e $buffer/driver ] && give_to_vfio $buffer || return 1
  remote a add-device path=$buffer,id=buffer && one_writes a && the_line "other device: arrives" && the_line "where it moved to: arrives"
}
check other_device_comes_and_goes comes_and_goes
# What is mapped of guest memory stays; BARs are mapped where the next guest has them.
check restarts_itself_with_memory_mapped restarts_pinned a a 262144
check disk_writes_to_guest_memory_after_restart one_writes a
check and_to_the_other_device the_line "other device: arrives"
check and_where_that_moved_to the_line "where it moved to: arrives"
all_of_it_is_mapped() { ! grep -E "cannot reach all of device|stays mapped" $T/a.vmm.log; }
check all_of_it_is_mapped all_of_it_is_mapped
power_button() { remote $1 power-button && wait_until 60 says $1 "POWER-BUTTON" && ends $1 60; }
check power_button_ends_the_vmm power_button a

start_guest b 1 --platform vfio_p2p_dma=off --device path=$writes,id=writes path=$buffer,id=buffer || failed start "the VMM did not start"
check boots_without_peers wait_until $WAIT_S says b "GUEST-READY 1 vcpus"
check disk_writes_to_guest_memory_alone one_writes b
nothing_arrives() { the_line "other device: does not arrive" && ! grep -q ": arrives" $T/out; }
check nothing_arrives_in_the_other_device nothing_arrives
check power_button_ends_that_vmm power_button b
