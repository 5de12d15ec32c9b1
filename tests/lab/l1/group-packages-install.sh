# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# on_request
# Debian packages on a Debian with systemd, which is this machine: they are installed, a guest runs as a unit and by a
# socket that systemd has, with memory of the pool, and goes on during an upgrade; then all is removed without a trace.
# usual_kernel
# limit_s: 1800
# machine: -m 3G
# machine: -drive if=none,id=p0,file=@LAB@/packages-install/root.img,format=raw,snapshot=on -device nvme,drive=p0,serial=debian
. ./lib.sh
VM=/var/lib/vms/lab
CONF=/etc/cloud-hypervisor/lab.conf
DROP_IN=/etc/systemd/system/cloud-hypervisor@lab.service.d
SERVICE=cloud-hypervisor@lab.service
# Who has the API is no part of what is tested, but that root has it.
API=/run/cloud-hypervisor-lab/api.sock
ln -s $API $T/lab.sock

is() { [ "$1" = "$2" ] || { echo "'$1', and not '$2'"; return 1; }; }
state() { systemctl show --property ActiveState --value "$1"; }
state_of() { [ "$(state "$1")" = "$2" ]; }
main_pid() { systemctl show --property MainPID --value $SERVICE; }
# everything: what this machine has, but for what is no part of an installation, and what dpkg and the users' files leave.
everything() {
  find / -xdev \( -path /proc -o -path /sys -o -path /run -o -path /tmp -o -path /dev -o -path /lab -o -path /var/log \
    -o -path /var/tmp -o -path /var/cache -o -path /var/lib/dpkg -o -path /var/lib/systemd -o -path /root \) -prune -o -print |
    grep -vE -e '-$|\.lock$' | sort
  sort /etc/passwd /etc/group
}
# logs: why a unit did not do what it should.
logs() { journalctl --no-pager --quiet -n 30 -u "$SERVICE" -u prezero-pool.service; return 1; }

everything >$T/before
installs() { dpkg -i ./*.deb >$T/dpkg.log 2>&1 && [ -z "$(dpkg --audit)" ] || { cat $T/dpkg.log; return 1; }; }
check packages_are_installed installs
starts_nothing() {
  is "$(systemctl is-enabled prezero-pool.service)" disabled && is "$(state prezero-pool.service)" inactive &&
    is "$(systemctl is-enabled $SERVICE)" disabled && id prezero-pool
}
check nothing_is_started_by_that starts_nothing
programs() {
  cloud-hypervisor --version && ch-remote --version && prezero-pool check &&
    is "$(dpkg -S /usr/bin/ch-remote)" "godwit: /usr/bin/ch-remote" && dpkg --verify godwit prezero-pool >$T/verify && is "$(cat $T/verify)" ""
}
check programs_and_configuration_are_whole programs

# A VM, as docs/packages.md has it.
useradd --system --shell /usr/sbin/nologin vm-lab
install -d -o vm-lab $VM $DROP_IN
mv vmlinuz initramfs.gz root.img $VM
chown vm-lab $VM/root.img
printf '[Service]\nReadWritePaths=%s\nSupplementaryGroups=prezero-pool\n' $VM >$DROP_IN/vm.conf
# configure MEMORY [LINE]
configure() {
  printf 'OPTIONS=--kernel %s/vmlinuz --initramfs %s/initramfs.gz --cmdline "%s" --cpus boot=1 \\\n  --memory size=256M%s --disk path=%s/root.img,image_type=raw --serial off --console pty\n%s\n' \
    $VM $VM "$CMDLINE" "$1" $VM "${2:-}" >$CONF
}
# runs: the guest is there and obeys, and its process is its user's, in a sandbox.
runs() {
  open_console lab && wait_until $WAIT_S says lab GUEST-READY && guest lab "echo it-is-$((20 + 22))" && grep -q it-is-42 $T/out || { logs; return 1; }
  awk -v uid="$(id -u vm-lab)" '/^Uid:/ {u=$2} /^CapEff:/ {c=$2} /^Seccomp:/ {s=$2} END {exit !(u == uid && c ~ /^0*$/ && s == 2)}' "/proc/$(main_pid)/status"
}
forget_console() { : >$T/lab.console; }
boots() { configure "" && systemctl daemon-reload && systemctl start $SERVICE && runs; }
check a_unit_runs_a_guest boots
upgrades() {
  pid=$(main_pid)
  dpkg -i ./*.deb >$T/dpkg.log 2>&1 || { cat $T/dpkg.log; return 1; }
  is "$(main_pid)" "$pid" && guest lab "echo still-there" && grep -q still-there $T/out
}
check an_upgrade_leaves_it_alone upgrades
ends_by_itself() { remote lab power-button && wait_until 120 state_of $SERVICE inactive && is "$(systemctl show --property Result --value $SERVICE)" success; }
check the_unit_ends_with_its_guest ends_by_itself

pool() {
  printf '[limits.users]\n%s = "1G"\n[[slots]]\nsize = "256M"\npages = "thp"\ncount = 1\n' "$(id -u vm-lab)" >>/etc/prezero-pool.toml
  systemctl enable --now prezero-pool.service && wait_until 120 slot ready || { prezero-pool stats; logs; return 1; }
}
slot() { prezero-pool stats 2>/dev/null | grep "^prezero_pool_slots.*state=\"$1\"" | grep -q ' 1$'; }
check the_pool_runs_as_its_unit pool
takes_from_it() {
  forget_console
  configure ,prezeroed=/run/prezero-pool/pool.sock && systemctl start $SERVICE && runs && slot lent || { prezero-pool stats; return 1; }
}
check a_guest_has_memory_of_the_pool takes_from_it
stops() { systemctl stop $SERVICE && is "$(state $SERVICE)" inactive && is "$(systemctl show --property Result --value $SERVICE)" success && wait_until 120 slot ready; }
check it_is_stopped_and_the_memory_returns stops

by_socket() {
  forget_console
  configure "" API_SOCKET=fd=3 && systemctl enable --now cloud-hypervisor@lab.socket && is "$(state $SERVICE)" inactive || return 1
  ln -sf /run/cloud-hypervisor-lab.sock $T/lab.sock
  is "$(stat -c %a /run/cloud-hypervisor-lab.sock)" 600 && remote lab ping && is "$(state $SERVICE)" active && runs
}
check a_request_at_the_socket_starts_it by_socket
systemctl stop cloud-hypervisor@lab.socket $SERVICE
check the_socket_goes_with_its_unit test ! -e /run/cloud-hypervisor-lab.sock
enabled() { systemctl enable $SERVICE && [ -L /etc/systemd/system/multi-user.target.wants/$SERVICE ]; }
check the_unit_can_be_enabled enabled

# What the administrator has made; what is enabled goes with the packages.
rm -r $CONF $DROP_IN /var/lib/vms
userdel vm-lab
removes() { dpkg --purge godwit prezero-pool >$T/dpkg.log 2>&1 || { cat $T/dpkg.log; return 1; }; }
check packages_are_purged removes
leaves_nothing() {
  everything >$T/after
  diff $T/before $T/after && is "$(systemctl list-unit-files --no-legend 'cloud-hypervisor*' 'prezero-pool*')" "" &&
    is "$(systemctl list-units --failed --no-legend 'cloud-hypervisor*' 'prezero-pool*')" "" && [ ! -e /run/prezero-pool ] && ! pidof cloud-hypervisor prezero-pool
}
check nothing_is_left leaves_nothing
