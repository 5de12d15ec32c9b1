# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# The commands of the README's quick start, as they stand there: a Debian guest with systemd boots, is logged in
# to, moves, and is shut down.
# on_request
# limit_s: 2400
# machine: -m 4G
# machine: -drive if=none,id=q0,file=@LAB@/quickstart/root.img,format=raw,snapshot=on -device nvme,drive=q0,serial=quick
. ./lib.sh
cd ./quickstart || exit 1
mkdir -p target
ln -s /bin target/release
wait_until 20 test -b /dev/nvme1n1
ln -s /dev/$(grep -ls '^quick' /sys/class/nvme/*/serial | cut -d/ -f5)n1 root.img

# collects NAME: collects what the guest prints, as a terminal would.
collects() {
  tail -n 1 $T/$1.said >$T/$1.pty
  stty -F "$(cat $T/$1.pty)" raw -echo
  cat "$(cat $T/$1.pty)" >>$T/$1.console 2>/dev/null &
}
types() { printf '%s\r' "$2" >"$(cat $T/$1.pty)"; }
# The shell switches its terminal's modes: no line begins with what it prints.
answers_console() {
  types $1 "echo it-is-$((20 + 22)) \$(hostname | wc -l)"
  wait_until 60 says $1 "it-is-42 1"
}
boots() {
  # The shell stays, as that of a user does.
  . ./boot.sh >$T/a.said || return 1
  collects a
  wait_until 600 says a "login:"
}
check boots_to_a_login boots
logs_in() {
  types a root
  wait_until 120 says a "root@.*#" && answers_console a
}
check logs_in_without_a_password logs_in
moves() {
  . ./move.sh >$T/b.said || return 1
  collects b
  answers_console b
}
check moves_and_goes_on moves
first_has_ended() { ! pidof cloud-hypervisor | grep -q ' '; }
check the_first_vmm_has_ended wait_until 30 first_has_ended
shuts_down() {
  . ./end.sh || return 1
  none() { ! pidof cloud-hypervisor >/dev/null; }
  wait_until 240 none
}
check shuts_down_and_the_vmm_ends shuts_down
