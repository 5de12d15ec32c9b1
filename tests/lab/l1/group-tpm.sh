# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# metal
# takes_turns
# A TPM that swtpm implements, under a Debian guest: what it has measured moves with the guest in both modes and by a
# snapshot, commands that run meanwhile get their answers, a reboot starts it anew, and its loss leaves the guest running.
. ./lib.sh

# with_tpm COMMAND...: a TPM of its own for this VMM ($vm), whose socket is in the directory that the command runs in.
with_tpm() {
  mkdir -p $T/$vm.tpm && cd $T/$vm.tpm || return 1
  # It leaves this directory.
  swtpm socket --tpm2 --tpmstate dir=$T/$vm.tpm --ctrl type=unixio,path=$T/$vm.tpm/socket --pid file=$T/$vm.tpm/pid --daemon
  exec "$@"
}
LAUNCH=with_tpm

# 32 bytes of 7 into PCR 16, and a number of random bytes, as commands of TPM 2.0.
EXTEND='\200\002\000\000\000\101\000\000\001\202\000\000\000\020\000\000\000\011\100\000\000\011\000\000\000\000\000\000\000\000\001\000\013'
for _ in $(seq 32); do EXTEND="$EXTEND\\007"; done
RANDOM_8='\200\001\000\000\000\014\000\000\001\173\000\010'
# asks NAME COMMAND: the response code of a command, as 8 digits.
asks() { guest $1 "exec 3<>/dev/tpm0; printf '$2' >&3; dd bs=4096 count=1 <&3 2>/dev/null | od -An -v -tx1 -j6 -N4 | tr -d ' '; exec 3>&-"; }
extends() { asks $1 "$EXTEND" && grep -qx 00000000 $T/out || { cat $T/out; return 1; }; }
pcr() { guest $1 'cat /sys/class/tpm/tpm0/pcr-sha256/16' && tail -n 1 $T/out; }
has_pcr() { [ "$(pcr $1)" = "$2" ] || { cat $T/out; return 1; }; }
# Random numbers until told to stop; each failure is a line.
works() { guest $1 "rm -f /tmp/stop /tmp/bad /tmp/count; { n=0; while [ ! -e /tmp/stop ]; do exec 3<>/dev/tpm0; printf '$RANDOM_8' >&3 && [ \$(dd bs=4096 count=1 <&3 2>/dev/null | wc -c) = 20 ] || echo bad >>/tmp/bad; exec 3>&-; n=\$((n+1)); done; echo \$n >/tmp/count; } >/dev/null 2>&1 & sleep 1"; }
has_worked() { guest $1 "touch /tmp/stop; for i in \$(seq 600); do [ -s /tmp/count ] && break; sleep 0.1; done; cat /tmp/count; [ ! -e /tmp/bad ] && [ \$(cat /tmp/count) -gt 2 ]" || { cat $T/out; return 1; }; }

start_guest a 1 --tpm socket=socket || failed start "the VMM did not start"
check boots wait_until $WAIT_S says a "GUEST-READY 1 vcpus"
# Without firmware Linux starts the TPM itself, which it finds by the error 256 of a command before that.
is_a_tpm() { guest a '[ "$(cat /sys/class/tpm/tpm0/tpm_version_major)" = 2 ] && ! dmesg | grep -v "error (256)" | grep -iE "tpm.*(fail|error|bug)"' || { cat $T/out; return 1; }; }
check linux_finds_a_tpm is_a_tpm
ZERO=$(printf '%064d' 0)
check nothing_is_measured has_pcr a $ZERO
check it_measures extends a
MEASURED=$(pcr a)
moves_by_precopy() { [ "$MEASURED" != $ZERO ] && works a && moved a b precopy && has_worked b && has_pcr b "$MEASURED"; }
check moves_by_precopy moves_by_precopy
moves_by_postcopy() { works b && moved b c postcopy && has_worked c && has_pcr c "$MEASURED"; }
check moves_by_postcopy moves_by_postcopy
resident() { remote c migration-progress | tr -d ' \n' | grep -q '"phase":"done"'; }
restored() {
  mkdir -p $T/saved
  wait_until 60 resident && remote c pause && remote c snapshot file://$T/saved && remote c shutdown-vmm && ends c 60 || return 1
  start_vmm d && remote d restore source_url=file://$T/saved,resume=true && wait_until 60 state_is d Running &&
    open_console d && has_pcr d "$MEASURED"
}
check is_restored restored
reboots() { guest d sync && remote d reboot && wait_until $WAIT_S says d "GUEST-READY 1 vcpus" && has_pcr d $ZERO && extends d && has_pcr d "$MEASURED"; }
check a_reboot_starts_it_anew reboots
lost() {
  kill -9 $(cat $T/d.tpm/pid)
  wait_until 30 grep -q '"tpm-lost"' $T/d.events || return 1
  asks d "$RANDOM_8" && ! grep -qx 00000000 $T/out && guest d true
}
check its_loss_is_an_event_and_the_guest_runs lost
power_button() { remote d power-button && ends d 60; }
check ends power_button
check filesystem_clean filesystem_clean
