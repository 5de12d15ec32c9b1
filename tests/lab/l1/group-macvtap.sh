# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# takes_turns
# A Debian guest on a macvtap, whose descriptors the VMM is handed: it gets its address by DHCP from the network beyond
# the lower interface, exchanges content with it, moves to a macvtap on another lower interface and back, by precopy and
# by postcopy, is restored with descriptors of that other one, and gets a second one while it runs.
. ./lib.sh
while read -r module; do insmod /lab/modules/$module 2>/dev/null; done </lab/modules/order

# The network is a bridge in a namespace of its own: the machine itself cannot be reached by a macvtap on its interface.
# Not in PATH, where busybox's is.
IP=/lab/ip
LAN=/run/netns/lan
MAC=52:54:00:00:00:02
in_lan() { nsenter --net=$LAN "$@"; }
# lower NAME PORT: an interface of the machine that is a port of that bridge.
lower() {
  $IP link add $1 type veth peer name $2 && $IP link set $2 netns lan || return 1
  in_lan $IP link set $2 master br0 && in_lan $IP link set $2 up && $IP link set $1 up
}
# macvtap NAME LOWER MAC: an interface on it, with its device node.
macvtap() {
  $IP link add link $2 name $1 address $3 type macvtap mode bridge && $IP link set $1 up || return 1
  wait_until 10 test -c $(node_of $1)
}
node_of() { echo /dev/tap$(cat /sys/class/net/$1/ifindex); }
network() {
  mkdir -p /run/netns && $IP netns add lan || return 1
  in_lan $IP link add br0 address 02:00:00:00:09:01 type bridge && in_lan $IP addr add 10.9.0.1/24 dev br0 &&
    in_lan $IP link set lo up && in_lan $IP link set br0 up || return 1
  lower low0 port0 && lower low1 port1 && lower low2 port2 || return 1
  macvtap mv0 low0 $MAC && macvtap mv1 low1 $MAC && macvtap mv2 low2 52:54:00:00:00:03
}
check network_is_made network
mkdir -p $T/www
head -c 4194304 /dev/urandom >$T/www/content
echo small >$T/www/small
in_lan httpd -h $T/www -p 10.9.0.1:80
printf 'start 10.9.0.50\nend 10.9.0.60\ninterface br0\nlease_file %s\npidfile %s\noption subnet 255.255.255.0\noption router 10.9.0.1\n' $T/leases $T/udhcpd.pid >$T/udhcpd.conf
touch $T/leases
in_lan udhcpd -f $T/udhcpd.conf >$T/udhcpd.log 2>&1 &
# What from_guest listens with, in that namespace. It always runs in the background: a process of its own.
nc() { exec nsenter --net=$LAN nc "$@"; }

start_guest a 2 --net "fd=[3,4],num_queues=4,mac=$MAC,id=lan" 3<>$(node_of mv0) 4<>$(node_of mv0) || failed start "the VMM did not start"
check boots wait_until $WAIT_S says a "GUEST-READY 2 vcpus"
# The address that its init has set would do as well.
dhcp='busybox ip addr flush dev eth0; printf "#!/bin/sh\n[ \$1 != bound ] || busybox ip addr add \$ip/24 dev \$interface\n" >/tmp/dhcp; chmod 755 /tmp/dhcp; busybox udhcpc -i eth0 -n -q -s /tmp/dhcp'
has_address() { guest a "$dhcp && busybox ip addr show dev eth0" && grep -q "inet 10.9.0.5[0-9]/24" $T/out || { cat $T/out $T/udhcpd.log; return 1; }; }
check has_an_address_by_dhcp has_address
pings() { guest $1 "busybox ping -c 3 -W 5 10.9.0.1 >/tmp/ping && busybox ping -c 3 -W 5 -s 1400 10.9.0.1 >>/tmp/ping; cat /tmp/ping; [ \$(grep -c ' 0% packet loss' /tmp/ping) = 2 ]" || { cat $T/out; return 1; }; }
check pings pings a
fetches() {
  guest $1 "busybox wget -q -O - http://10.9.0.1/content | sha256sum" && [ "$(head -n 1 $T/out)" = "$(sha256sum <$T/www/content)" ] || { cat $T/out; return 1; }
}
check fetches_by_http fetches a
check sends_content from_guest a
check linux_uses_both_pairs uses_pairs a
# both_receive NAME: what comes in to 16 ports of the guest is spread over both of its queues.
received() { guest $1 "grep 'virtio.*-input.$2' /proc/interrupts | awk '{ print \$2 + \$3 }'" && tail -n 1 $T/out; }
both_receive() {
  first=$(received $1 0) second=$(received $1 1)
  guest $1 'for n in $(seq 16); do busybox wget -q -O - http://10.9.0.1/small; done | sort | uniq -c' && grep -qx ' *16 small' $T/out || { cat $T/out; return 1; }
  [ "$(received $1 0)" -gt "$first" ] && [ "$(received $1 1)" -gt "$second" ] || { guest $1 'grep virtio /proc/interrupts'; cat $T/out; return 1; }
}
check both_of_them_receive both_receive a
bytes() { cat /sys/class/net/$1/statistics/$2_bytes; }
# counts NAME LINK: the interface has counted 4 MiB in each direction, and its frames were not dropped.
counts() {
  local rx tx
  # What the guest receives is what the interface receives.
  rx=$(bytes $2 rx) tx=$(bytes $2 tx)
  fetches $1 && from_guest $1 || return 1
  [ $(($(bytes $2 rx) - rx)) -ge 4194304 ] && [ $(($(bytes $2 tx) - tx)) -ge 4194304 ] ||
    { $IP -s link show $2; return 1; }
}
check the_interface_counts counts a mv0

stream_goes_on() { before=$(wc -l <$T/stream); wait_until 90 more_lines $before; }
more_lines() { [ "$(wc -l <$T/stream)" -gt $(($1 + 5)) ]; }
nc -l -p 7003 </dev/null >$T/stream &
check a_stream_begins guest a '(n=0; while :; do echo line $n; n=$((n+1)); sleep 0.1; done >/dev/tcp/10.9.0.1/7003) >/dev/null 2>&1 & :'
check it_flows wait_until 60 more_lines 5
# arrives FROM TO MODE LINK: at another VMM, which is handed descriptors 5 and 6; its connection and its network are there,
# and it uses that interface.
arrives() { moved $1 $2 $3 "net_fds=[lan@[5,6]]" && stream_goes_on && pings $2 && counts $2 $4; }
other_interface() { arrives a b precopy mv1 5<>$(node_of mv1) 6<>$(node_of mv1); }
check moves_to_another_interface other_interface
exec 5<>$(node_of mv0) 6<>$(node_of mv0)
check moves_back_by_postcopy arrives b c postcopy mv0
# The same descriptors, which this shell keeps open: as a management program does.
check moves_with_its_descriptors arrives c d precopy mv0
# Saved and restored in seconds, which a connection outlasts.
restores() {
  mkdir -p $T/saved
  remote d pause && remote d snapshot file://$T/saved && remote d shutdown-vmm && ends d 60 || return 1
  start_vmm e && remote e restore "source_url=file://$T/saved,resume=true,net_fds=[lan@[5,6]]" && wait_until 60 state_is e Running && open_console e || return 1
  stream_goes_on && pings e && counts e mv1 && uses_pairs e && both_receive e
}
other_descriptors() { restores 5<>$(node_of mv1) 6<>$(node_of mv1); }
check is_restored_with_other_descriptors other_descriptors
# Without them there is no network for it.
without() { start_vmm x && ! remote x restore source_url=file://$T/saved >$T/refused 2>&1 && grep -q "'lan'" $T/refused && remote x shutdown-vmm && ends x 60 || { cat $T/refused; return 1; }; }
check a_restore_without_is_refused_by_name without
check stream_is_whole stream_is_whole

# A second one while the guest runs, which is removed again.
second() { remote e add-net "fd=[3],mac=52:54:00:00:00:03,id=second" 3<>$(node_of mv2) >$T/added || return 1
  guest e 'for i in $(seq 300); do [ -e /sys/class/net/eth1 ] && break; sleep 0.1; done; busybox ip addr flush dev eth0; busybox ip addr add 10.9.0.3/24 dev eth1; busybox ip link set eth1 up; busybox ping -c 3 -W 5 10.9.0.1' && fetches e || { cat $T/out; return 1; }; }
check a_second_comes second
removed() { remote e remove-device second && guest e 'for i in $(seq 300); do [ -e /sys/class/net/eth1 ] || break; sleep 0.1; done; [ ! -e /sys/class/net/eth1 ] && busybox ip addr add 10.9.0.2/24 dev eth0' && fetches e; }
check it_goes removed
reboots() { guest e sync && remote e reboot && wait_until $WAIT_S says e "GUEST-READY 2 vcpus" && fetches e && from_guest e && uses_pairs e && both_receive e; }
check reboots reboots
power_button() { remote e power-button && ends e 60; }
check ends power_button
check filesystem_clean filesystem_clean
