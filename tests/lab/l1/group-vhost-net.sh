# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# takes_turns
# A network with two pairs of queues that another process serves, under a Debian guest: Linux uses both, its frames come
# back by each, also after moves and a restore, where it announces itself; the guest outlives the back end.
. ./lib.sh

network $T/network.socket 4 >$T/network.log 2>&1 &
echo $! >$T/network.pid
wait_until 10 test -S $T/network.socket

start_guest a 2 --net vhost_user=on,socket=$T/network.socket,num_queues=4,mtu=1400,id=lan || failed start "the VMM did not start"
check boots wait_until $WAIT_S says a "GUEST-READY 2 vcpus"
# One at the beginning; the driver has asked for as many as there are vCPUs.
check linux_uses_both_pairs uses_pairs a
has_mtu() { guest a 'cat /sys/class/net/eth0/mtu /sys/class/net/eth0/carrier' && [ "$(tr '\n' ' ' <$T/out)" = "1400 1 " ] || { cat $T/out; return 1; }; }
check linux_has_the_mtu_and_a_link has_mtu
received() { guest $1 'cat /sys/class/net/eth0/statistics/rx_packets' && tail -n 1 $T/out; }
interrupts() { guest $1 "grep 'virtio.*-input.$2' /proc/interrupts | awk '{ print \$2 + \$3 }'" && tail -n 1 $T/out; }
# echoes NAME: each vCPU sends 20 frames, which come back by its own pair.
echoes() {
  guest $1 'busybox arp -s 10.9.0.1 02:00:00:00:00:77' || return 1
  for pair in 0 1; do
    before=$(received $1) irqs=$(interrupts $1 $pair)
    guest $1 "for n in \$(seq 20); do taskset $((1 << pair)) bash -c 'echo frame >/dev/udp/10.9.0.1/9'; done" || { cat $T/out; return 1; }
    [ $(($(received $1) - before)) -ge 20 ] || { echo "pair $pair: of 20 frames $(($(received $1) - before)) came back"; return 1; }
    [ "$(interrupts $1 $pair)" -gt "$irqs" ] || { echo "pair $pair has no interrupts"; return 1; }
  done
}
check frames_come_back_by_both echoes a
# A driver that announces itself sends frames, which come back.
announces() {
  before=$(received a)
  # Told apart from what is sent otherwise, which is nothing.
  moved a b precopy || return 1
  wait_until 30 more_than b $before
}
more_than() { [ "$(received $1)" -gt "$2" ]; }
check it_moves_and_is_announced announces
check frames_come_back_there echoes b
moves_back() { uses_pairs b && moved b c precopy && uses_pairs c && echoes c; }
check it_moves_once_more moves_back
refused() {
  start_vmm x && remote x receive-migration receiver_url=unix:$T/x.mig,memory_mode=postcopy >$T/x.receive.log 2>&1 &
  ! remote c send-migration --wait destination_url=unix:$T/x.mig,memory_mode=postcopy >$T/out 2>&1 && grep -q "another process serves" $T/out && echoes c
}
check postcopy_is_refused_by_name refused
restored() {
  mkdir -p $T/saved
  remote c pause && remote c snapshot file://$T/saved && remote c shutdown-vmm && ends c 60 || return 1
  start_vmm d && remote d restore source_url=file://$T/saved,resume=true && wait_until 60 state_is d Running && open_console d && echoes d
}
check is_restored restored
reboots() { guest d sync && remote d reboot && wait_until $WAIT_S says d "GUEST-READY 2 vcpus" && uses_pairs d && echoes d; }
check a_reboot_connects_again reboots
lost() {
  kill -9 $(cat $T/network.pid)
  wait_until 30 grep -q '"back-end-lost"' $T/d.events && guest d "echo \$((6 * 7))" && grep -qx 42 $T/out
}
check the_guest_outlives_the_back_end lost
power_button() { remote d power-button && ends d 60; }
check ends power_button
check filesystem_clean filesystem_clean
