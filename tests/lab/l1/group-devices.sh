# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# takes_turns
# A Debian guest with disks in each format, of which one has two queues and one a limit and another size later, a vsock, and
# the panic device and the debug console; the vsock is replaced and a network device comes while it runs: contents are
# compared after a reboot, moves in both modes and a restore, also by the program that made the images; streams go both
# ways by vsock and network; a panic is reported.
# limit_s: 1500
. ./lib.sh
GUEST_INITRAMFS=/lab/initramfs-devices.gz
CMDLINE="$CMDLINE earlyprintk=serial,0xe9,115200,keep"
# The guest's names of the disks, in the order of the command line.
DISKS="vdb vdc vdd vde"
PORT_OF_GUEST=7001 PORT_OF_HOST=7000

cp disk.qcow2 disk.vhdx disk.vhd $T/
truncate -s 16M $T/raw.img
head -c 3000000 /dev/urandom >$T/data

start_guest a 2 --disk path=$T/disk.qcow2,image_type=qcow2,num_queues=2,id=qcow2 path=$T/disk.vhdx,image_type=vhdx,id=vhdx \
  path=$T/disk.vhd,image_type=vhd,id=vhd path=$T/raw.img,image_type=raw,bw_size=1048576,bw_refill_time=1000,id=raw \
  --vsock cid=3,socket=$T/vsock,id=sock --pvpanic --debug-console file=$T/debug || failed start "the VMM did not start"
check boots wait_until $WAIT_S says a "GUEST-READY 2 vcpus"

# Two parts of each disk stay as they are; between them is written all the time.
SUMS='sums() { for d in '$DISKS'; do { dd if=/dev/$d bs=64k count=64 iflag=direct; dd if=/dev/$d bs=64k skip=200 count=16 iflag=direct; } 2>/dev/null | sha256sum; done; }'
knows_sums() { guest $1 "$SUMS; sums" && [ "$(wc -l <$T/out)" = 4 ] || { cat $T/out; return 1; }; }
same() { knows_sums $1 && cmp $T/out $T/sums; }
writes() {
  guest $1 "for d in $DISKS; do dd if=/dev/urandom of=/dev/\$d bs=64k count=64 oflag=direct && dd if=/dev/urandom of=/dev/\$d bs=64k seek=200 count=16 oflag=direct || echo bad; done 2>/dev/null" && [ ! -s $T/out ] &&
    knows_sums $1 && cp $T/out $T/sums && [ "$(sort -u $T/sums | wc -l)" = 4 ]
}
check each_disk_is_written_and_read writes a
queues() { guest a 'ls /sys/block/vdb/mq | wc -l; ls /sys/block/vdc/mq | wc -l' && [ "$(tr '\n' ' ' <$T/out)" = "2 1 " ] || { cat $T/out; return 1; }; }
check linux_uses_two_queues queues
# Of 5 MiB all but the burst wait for the limit, which is 1 MiB a second.
limited() {
  guest a 'a=$(date +%s); dd if=/dev/urandom of=/dev/vde bs=64k count=80 oflag=direct 2>/dev/null; b=$(date +%s); dd if=/dev/urandom of=/dev/vdd bs=64k count=80 oflag=direct 2>/dev/null; c=$(date +%s); echo $((b - a)) $((c - b))' || return 1
  read -r limited free <$T/out
  [ "$limited" -ge 3 ] && [ "$free" -lt "$limited" ] || { cat $T/out; return 1; }
}
check a_limit_holds limited
blocks() { stat -c %b $T/raw.img; }
discards() {
  before=$(blocks)
  guest a 'blkdiscard -o 12582912 -l 2097152 /dev/vde; dd if=/dev/vde bs=64k skip=200 count=16 iflag=direct of=/tmp/z 2>/dev/null; wc -c </tmp/z; tr -d "\000" </tmp/z | wc -c' && [ "$(tr '\n' ' ' <$T/out)" = "1048576 0 " ] &&
    [ "$(blocks)" -lt "$before" ] || { cat $T/out; echo "$before $(blocks)"; return 1; }
}
check what_is_discarded_is_given_back discards
check and_is_written_again writes a
sized() { guest $1 "test \$(cat /sys/block/vde/size) = $(($2 * 2048))"; }
grows() {
  remote a resize-disk --disk raw --size 24M && wait_until 60 sized a 24 && [ "$(stat -c %s $T/raw.img)" = 25165824 ] &&
    guest a 'echo the-new-end | dd of=/dev/vde bs=512 seek=49151 conv=sync,fsync 2>/dev/null' && tail -c 512 $T/raw.img | grep -aq the-new-end
}
check a_disk_grows_while_it_is_used grows
refuses() { ! remote a resize-disk --disk qcow2 --size 24M 2>$T/refused && grep -q "raw" $T/refused || { cat $T/refused; return 1; }; }
check one_of_another_format_does_not refuses

# vsock: what comes in is sent back, and a file is sent to a socket of the host.
ECHO='perl -e '\''socket(S,40,1,0)||die; bind(S,pack("SSLLL",40,0,'$PORT_OF_GUEST',4294967295,0))||die; listen(S,8)||die; while(1){accept(C,S)||next; while(($n=sysread(C,$b,65536))>0){$o=0; while($o<$n){$w=syswrite(C,$b,$n-$o,$o); last unless $w; $o+=$w} last if $o<$n} close C}'\'''
SEND='perl -e '\''socket(S,40,1,0)||die; connect(S,pack("SSLLL",40,0,'$PORT_OF_HOST',2,0))||die "$!"; while(($n=sysread(STDIN,$b,65536))>0){$o=0; while($o<$n){$w=syswrite(S,$b,$n-$o,$o)||die "$!"; $o+=$w}} shutdown(S,1); sysread(S,$b,1)'\'''
serves() { guest $1 "($ECHO >/dev/null 2>&1 &)"; }
is_echoed() {
  { echo "CONNECT $PORT_OF_GUEST"; cat $T/data; } | timeout 120 socat -t 60 - UNIX-CONNECT:$T/vsock >$T/back 2>$T/socat
  head -n 1 $T/back | grep -qx 'OK [0-9]*' && tail -n +2 $T/back | cmp - $T/data || { head -c 200 $T/back; cat $T/socat; return 1; }
}
# The guest may not have come to listen yet.
echoes() { wait_until 60 is_echoed; }
sends() {
  rm -f $T/vsock_$PORT_OF_HOST $T/got
  timeout 120 socat -u UNIX-LISTEN:$T/vsock_$PORT_OF_HOST CREATE:$T/got &
  listener=$!
  wait_until 30 test -S $T/vsock_$PORT_OF_HOST &&
    guest $1 "head -c 2000000 /dev/urandom >/tmp/sent; $SEND </tmp/sent && sha256sum </tmp/sent" || { cat $T/out; kill $listener; return 1; }
  wait $listener
  [ "$(tail -n 1 $T/out)" = "$(sha256sum <$T/got)" ] || { cat $T/out; wc -c $T/got; return 1; }
}
streams() { echoes && sends $1; }
serves a
check streams_go_both_ways streams a

# Another vsock and a network device come while the guest runs, which keeps them from here on.
vsock_is_gone() { ! remote a info | grep -q '"id": *"sock"'; }
# cid_is NAME NUMBER: the address that the guest's driver has; -1 without a device.
CID='perl -e '\''open(V,"</dev/vsock")||die "$!"; $c=pack("L",0); ioctl(V,0x7b9,$c)||die "$!"; print unpack("l",$c)."\n"'\'''
cid_is() { guest $1 "$CID" && [ "$(tail -n 1 $T/out)" = $2 ]; }
replaced() {
  remote a remove-device sock && wait_until 60 vsock_is_gone && wait_until 30 cid_is a -1 || { cat $T/out; return 1; }
  remote a add-vsock cid=4,socket=$T/vsock,id=sock >$T/added && wait_until 30 cid_is a 4 && streams a || { cat $T/out $T/added; return 1; }
}
check another_vsock_comes_while_it_runs replaced
exchanges() { from_guest $1 && to_guest $1 || { cat $T/out; return 1; }; }
network() {
  tap_up lab0
  remote a add-net tap=lab0,mac=52:54:00:00:00:02,id=lan >$T/added || return 1
  guest a 'for i in $(seq 300); do [ -e /sys/class/net/eth0 ] && break; sleep 0.1; done; busybox ip addr add 10.9.0.2/24 dev eth0 && busybox ip link set eth0 up' && exchanges a || { cat $T/out $T/added; return 1; }
}
check a_network_comes_while_it_runs network

# The kernel writes its messages to the port of the debug console, too.
prints() {
  guest $1 "echo '<2>printed-in-$1' >/dev/kmsg; sleep 1" && wait_until 10 grep -aq printed-in-$1 $T/debug || { tail -n 3 $T/debug; return 1; }
}
check the_debug_console_writes_to_its_file prints a
counted() {
  remote a counters | tr -d ' \n' >$T/counters
  for id in qcow2 vhdx vhd raw; do
    sed -n "s/.*\"$id\":{\([^}]*\)}.*/\1/p" $T/counters | grep '"read_bytes":[1-9]' | grep -q '"write_bytes":[1-9]' || { echo $id; cat $T/counters; return 1; }
  done
  for id in sock lan; do grep -q "\"$id\":{[^}]*:[1-9]" $T/counters || { echo $id; cat $T/counters; return 1; }; done
}
check each_device_counts counted

# Lines until told to stop: each disk is written and compared, between the parts that stay.
LOAD='rm -f /tmp/stop /tmp/stopped /tmp/rounds; (n=0; while [ ! -e /tmp/stop ]; do for d in vdb vdc vdd; do head -c 262144 /dev/urandom >/tmp/w; dd if=/tmp/w of=/dev/$d bs=64k seek=$((128 + n % 4 * 4)) oflag=direct 2>/dev/null; dd if=/dev/$d bs=64k skip=$((128 + n % 4 * 4)) count=4 iflag=direct 2>/dev/null | cmp - /tmp/w || echo $n $d >>/tmp/bad; done; n=$((n+1)); echo $n >/tmp/r; mv /tmp/r /tmp/rounds; done; touch /tmp/stopped) >/dev/null 2>&1 &'
BEGUN='for i in $(seq 600); do [ -e /tmp/rounds ] && break; sleep 0.1; done; [ -e /tmp/rounds ]'
works() { guest $1 "$LOAD $BEGUN"; }
has_worked() { guest $1 'r=$(cat /tmp/rounds); for i in $(seq 300); do [ $(cat /tmp/rounds) -gt $r ] && break; sleep 0.1; done; [ $(cat /tmp/rounds) -gt $r ] && touch /tmp/stop; for i in $(seq 300); do [ -e /tmp/stopped ] && break; sleep 0.1; done; cat /tmp/bad; [ -e /tmp/stopped ] && [ ! -e /tmp/bad ]' || { cat $T/out; return 1; }; }
fine() { guest $1 '! dmesg | grep -E "Oops|BUG: [^s]|I/O error|hung task"' || { cat $T/out; return 1; }; }
# arrives NAME: what was moved or restored works on, with all that it had.
arrives() { has_worked $1 && same $1 && sized $1 24 && cid_is $1 4 && streams $1 && exchanges $1 && prints $1 && fine $1; }
reboots() { guest a sync && remote a reboot && wait_until $WAIT_S says_times a "GUEST-READY" 2 && same a && sized a 24 && serves a && cid_is a 4 && streams a && exchanges a; }
check all_is_there_after_a_reboot reboots
precopy() { works a && moved a b precopy && arrives b; }
check after_a_move_in_precopy precopy
postcopy() { works b && moved b c postcopy && arrives c; }
check after_a_move_in_postcopy postcopy
restores() {
  mkdir -p $T/saved
  works c && remote c pause && remote c snapshot file://$T/saved && remote c shutdown-vmm && ends c 60 || return 1
  start_vmm d && remote d restore source_url=file://$T/saved,resume=true && wait_until 60 state_is d Running && open_console d && arrives d
}
check after_a_restore restores
on_demand() {
  mkdir -p $T/again
  works d && remote d pause && remote d snapshot file://$T/again && remote d shutdown-vmm && ends d 60 || return 1
  start_vmm e && remote e restore source_url=file://$T/again,resume=true,memory_restore_mode=ondemand && wait_until 60 state_is e Running && open_console e && arrives e
}
check after_a_restore_on_demand on_demand

panics() {
  guest e sync && echo 'echo c >/proc/sysrq-trigger' >"$(cat $T/e.pty)"
  wait_until 60 reported || { tail -n 20 $T/e.events; return 1; }
  wait_until $WAIT_S says e "GUEST-READY" && same e
}
reported() { tr -d ' \n' <$T/e.events | grep -q '"source":"guest","event":"panic"'; }
check a_panic_is_reported panics
power_button() { remote e power-button && ends e 60; }
check ends power_button
# part FILE: the two parts of a raw image, as the guest's sums are of them.
part() { { dd if=$1 bs=64k count=64; dd if=$1 bs=64k skip=200 count=16; } 2>/dev/null | sha256sum; }
images() {
  for format in qcow2 vhdx; do
    qemu-img check -q -f $format $T/disk.$format || return 1
    qemu-img convert -f $format -O raw $T/disk.$format $T/converted && part $T/converted
  done >$T/parts
  part $T/disk.vhd >>$T/parts
  part $T/raw.img >>$T/parts
  cmp $T/parts $T/sums && [ "$(tail -c 512 $T/disk.vhd | head -c 8)" = conectix ] || { cat $T/parts $T/sums; return 1; }
}
check others_read_the_same_in_the_images images
check filesystem_clean filesystem_clean
