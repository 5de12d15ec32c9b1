# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# on_request
# A Debian image with cloud-init, as clouds have them: firmware boots it by GRUB, a second disk configures it, it is
# logged in to on its console and by ssh, installs a package while it moves, reboots, and is shut down.
# usual_kernel
# limit_s: 3600
# machine: -m 3G
# machine: -drive if=none,id=c0,file=@LAB@/cloud.img,format=raw,snapshot=on -device nvme,drive=c0,serial=cloud
. ./lib.sh
# See tests/lab/modules/cr8-writes-exit.
insmod ./cr8-writes-exit.ko || failed module "$(dmesg | tail -n 3)"

wait_until 20 grep -qs '^cloud' /sys/class/nvme/*/serial
IMAGE=/dev/$(grep -ls '^cloud' /sys/class/nvme/*/serial | cut -d/ -f5)n1
tap_up lab0
httpd -h /lab/packages -p 10.9.0.1:80

# in_guest COMMAND: what a user with the key runs.
in_guest() { ssh -q -i /lab/key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o ConnectTimeout=60 -o ServerAliveInterval=30 -o ServerAliveCountMax=10 lab@10.9.0.2 "$1" </dev/null; }
boots() {
  start_vmm a --firmware /lab/firmware --cpus boot=1 --memory size=768M,shared=on \
    --disk path=$IMAGE,image_type=raw path=/lab/seed.img,image_type=raw,readonly=on \
    --net tap=lab0,mac=52:54:00:00:00:02 --serial pty --console off && open_console a || return 1
  wait_until 1500 says a "cloud login:"
}
check boots_to_a_login boots
check cloud_init_finishes_with_its_disk wait_until 900 says a "finished at .*DataSourceNoCloud.*/dev/vdb"

types() { printf '%s\r' "$2" >"$(cat $T/$1.pty)"; }
# No line begins with what the shell prints: it switches its terminal's modes.
answers_console() { types $1 "echo it-is-$((20 + 22))-\$((1 + 1))" && wait_until 120 says $1 "it-is-42-2"; }
logs_in() {
  types a lab && wait_until 120 says a "Password:" || return 1
  types a emulated && wait_until 120 says a 'lab@cloud' && answers_console a
}
check logs_in_on_the_console_with_its_password logs_in
# GRUB tells the kernel by what name it was loaded.
is_configured() {
  in_guest 'set -e; [ "$(hostname)" = cloud ]; [ "$(id -un)" = lab ]; grep -q BOOT_IMAGE=/vmlinuz /proc/cmdline; grep -q "written by cloud-init" /etc/motd; [ -d /sys/firmware/efi ]; sudo cat /root/ran; df --output=size / | tail -n 1' >$T/out || { cat $T/out; return 1; }
  [ "$(grep -c ^boot $T/out)" = 1 ] && [ "$(tail -n 1 $T/out)" -ge $((1450 * 1024)) ] || { cat $T/out; return 1; }
}
check is_booted_by_grub_configured_and_grown is_configured

# A session that lasts until it is told to end, and leaves the package installed.
installs='while :; do sudo apt-get -q install -y vim || exit 1; echo INSTALLED; [ ! -e /tmp/enough ] || break; sudo apt-get -q purge -y vim vim-runtime || exit 2; done'
begins() {
  { in_guest "sudo apt-get -q update && $installs" >$T/apt.log 2>&1; echo $? >$T/apt.exit; } &
  wait_until 600 grep -q '^Unpacking vim-runtime' $T/apt.log || { tail -n 20 $T/apt.log; return 1; }
}
check begins_to_install_a_package begins
lines() { [ "$(wc -l <$T/apt.log)" -gt "$1" ]; }
# move FROM TO MODE: apt prints more after it, and the terminal is there.
move() { moved $1 $2 $3 && [ ! -s $T/apt.exit ] && wait_until 600 lines "$(wc -l <$T/apt.log)" && answers_console $2; }
check moves_while_it_installs move a b precopy
check moves_by_postcopy_while_it_installs move b c postcopy
is_installed() {
  in_guest 'touch /tmp/enough' && wait_until 1200 test -s $T/apt.exit && [ "$(cat $T/apt.exit)" = 0 ] || { tail -n 20 $T/apt.log; return 1; }
  in_guest 'sudo sh -c "sync; echo 3 >/proc/sys/vm/drop_caches"; sudo dpkg --verify vim vim-runtime vim-common libsodium23 && sudo dpkg --audit && vim --version | head -n 1; sudo dmesg | grep -E "I/O error|EXT4-fs (error|warning)|Oops|BUG:|soft lockup|hung task"' >$T/out 2>&1
  echo "installed $(grep -c ^INSTALLED $T/apt.log) times"
  [ "$(wc -l <$T/out)" = 1 ] && grep -q '^VIM - Vi IMproved' $T/out || { cat $T/out; return 1; }
}
check package_is_whole is_installed

boot_id() { in_guest 'cat /proc/sys/kernel/random/boot_id'; }
is_another_boot() { now=$(boot_id) && [ -n "$now" ] && [ "$now" != "$1" ]; }
reboots() {
  before=$(boot_id) || return 1
  in_guest 'sudo systemctl reboot'
  wait_until 1500 is_another_boot "$before" || return 1
  # What is done once is not done again.
  in_guest 'grep -q BOOT_IMAGE=/vmlinuz /proc/cmdline && sudo cat /root/ran; sudo dpkg --verify vim vim-runtime' >$T/out && [ "$(wc -l <$T/out)" = 1 ] || { cat $T/out; return 1; }
}
check reboots_by_its_boot_loader reboots
power_button() { remote c power-button && ends c 600; }
check the_power_button_ends_it power_button
# The guest has changed the table of partitions.
clean() { blockdev --rereadpt $IMAGE && wait_until 10 test -b ${IMAGE}p2 && e2fsck -fn ${IMAGE}p2 >$T/fsck 2>&1 || { cat $T/fsck; return 1; }; }
check filesystem_clean clean
