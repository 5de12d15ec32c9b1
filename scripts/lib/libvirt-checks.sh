# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# The checks of scripts/libvirt-check, in their order there; each finds what the one before has left. Sourced, never run.
# PREFIX, BIN, GUEST, ECHO, FOLDER and NAME are the caller's.
# shellcheck shell=bash disable=SC2153,SC2154

PASSED=0 FAILED=0 SKIPPED=0
# The exit code of a check that cannot be made; what it said last is why.
LACKS=77
# Of the test guest; the daemon is beside other work, and a guest is slow where KVM emulates much of it.
READ_MS=60000

virsh() { timeout 120 "$PREFIX/bin/virsh" -q -c "ch:///system?socket=$FOLDER/virtchd-sock" "$@"; }
reader() { "$CARGO_TARGET_DIR/release/guest-reader" --timeout-ms "$READ_MS" --pid "$(pid "$1")" "${@:2}" >/dev/null; }
# within SECONDS COMMAND...: until it succeeds.
within() {
  local left=$(($1 * 20))
  shift
  until "$@"; do
    [ $((left -= 1)) -gt 0 ] || { echo "not in time: $*"; return 1; }
    sleep 0.05
  done
}
# says PATTERN COMMAND...: whether what it prints has a line like that. (A pipe to grep -q may end the command.)
says() {
  local said
  said=$("${@:2}")
  echo "$said"
  grep -q -- "$1" <<<"$said"
}
lacks() {
  echo "$*"
  exit "$LACKS"
}
# supported COMMAND...: a request that a driver may not have.
supported() {
  local said
  said=$(virsh "$@" 2>&1) && { echo "$said"; return 0; }
  echo "$said"
  case $said in *"not supported by the connection driver"*) lacks "the driver has no such call" ;; esac
  return 1
}
state() { virsh domstate "$1"; }
is() { [ "$(state "$1" 2>&1)" = "$2" ]; }
# pid DOMAIN: this driver numbers domains so.
pid() { virsh domid "$1"; }
gone() { ! kill -0 "$1" 2>/dev/null; }
# ended PID: libvirt has told the process to end, or it is told here, as a later version would.
ended() {
  # Not so long for one that has left others.
  local left=40
  [ ! -e "$FOLDER/left" ] || left=4
  until gone "$1"; do
    [ $((left -= 1)) -gt 0 ] || break
    sleep 0.05
  done
  gone "$1" || { echo "$1" >>"$FOLDER/left"; kill "$1"; }
  within 20 gone "$1"
}
# terminal DOMAIN KIND: the path of its serial port or console.
terminal() { virsh dumpxml "$1" | sed -n "/<$2 type='pty'/,/<\/$2>/s/.*<source path='\([^']*\)'.*/\1/p"; }
# vmms: the processes that the daemon has started here.
vmms() { grep -alF "/$NAME-" /proc/[0-9]*/cmdline 2>/dev/null | while IFS=/ read -r _ _ number _; do [ "$(readlink "/proc/$number/exe")" != "$BIN" ] || echo "$number"; done; }

# domain WORD [VCPUS] [DEVICES] [KERNEL] [COMMAND LINE]: writes its description.
domain() {
  cat >"$FOLDER/$1.xml" <<XML
<domain type='kvm'>
  <name>$NAME-$1</name>
  <memory unit='MiB'>192</memory>
  ${2:-<vcpu>2</vcpu>}
  <os><type>hvm</type><kernel>${4:-$GUEST}</kernel><cmdline>${5:-workload=random-write mem=32M}</cmdline></os>
  <devices>${3-}</devices>
</domain>
XML
}
worker_devices() {
  cat <<XML
<disk type='file'><source file='$FOLDER/disk.img'/><target dev='vda' bus='virtio'/></disk>
<disk type='file'><source file='$FOLDER/seed.img'/><target dev='vdb' bus='virtio'/><readonly/></disk>
<interface type='ethernet'><mac address='52:54:00:12:34:56'/><model type='virtio'/><driver queues='2'/></interface>
<serial type='pty'/>
<console type='pty'><target type='virtio'/></console>
XML
}

daemon_start() {
  cat >"$FOLDER/virtchd.conf" <<CONF
auth_unix_rw = "none"
unix_sock_dir = "$FOLDER"
log_filters = "1:ch"
log_outputs = "1:file:$FOLDER/virtchd.log"
CONF
  start_group env "PATH=$FOLDER/bin:$PATH" "$PREFIX/sbin/virtchd" -f "$FOLDER/virtchd.conf" -p "$FOLDER/virtchd.pid" 2>>"$FOLDER/virtchd.out"
  DAEMON=$started
  within 20 virsh uri >/dev/null 2>&1 || { cat "$FOLDER/virtchd.out"; return 1; }
}
# events: what libvirt tells of domains, until it is ended.
events() { exec "$PREFIX/bin/virsh" -c "ch:///system?socket=$FOLDER/virtchd-sock" event --event lifecycle --loop >"$FOLDER/events" 2>&1; }
daemon_stop() {
  kill -TERM "$DAEMON"
  wait "$DAEMON" || true
  forget_ended
}
end_all() {
  local code=$? number folder
  trap - EXIT
  trap '' INT TERM HUP
  for number in $(vmms); do kill "$number" 2>/dev/null && within 10 gone "$number" >/dev/null || kill -KILL "$number" 2>/dev/null || true; done
  end_started
  find /sys/fs/cgroup -depth -type d -path "*/ch-*-$NAME*" -exec rmdir {} + 2>/dev/null || true
  for folder in run/libvirt/ch var/run/libvirt/ch var/log/libvirt/ch var/lib/libvirt/ch/save; do
    rm -rf "${PREFIX:?}/$folder/$NAME-"*
  done
  rm -rf "$FOLDER"
  exit "$code"
}

# check NAME: calls the function of that name, and says what came of it.
check() {
  local code=0 before began=$SECONDS
  before=$(wc -l <"$FOLDER/virtchd.log")
  set +e
  (
    set -e
    "$1"
  ) >"$FOLDER/said" 2>&1
  code=$?
  set -e
  case $code in
    0) echo "test libvirt::$1 ... ok ($((SECONDS - began)) s)" && PASSED=$((PASSED + 1)) ;;
    "$LACKS") echo "SKIPPED libvirt::$1: $(tail -n 1 "$FOLDER/said")" && SKIPPED=$((SKIPPED + 1)) ;;
    *)
      echo "test libvirt::$1 ... FAILED ($((SECONDS - began)) s)"
      sed 's/^/  /' "$FOLDER/said"
      sed "1,${before}d" "$FOLDER/virtchd.log" | grep -E ' (warning|error) : |Stopping VM|Source: ' | sed 's/^/  log: /' | tail -n 30 || true
      FAILED=$((FAILED + 1))
      ;;
  esac
}

connects() {
  local version
  version=$("$BIN" --version | sed -n '1s/^cloud-hypervisor v\([0-9.]*[0-9]\).*/\1/p')
  says "^Running hypervisor: CH $version\$" virsh version --daemon
}
defines() {
  domain worker '' "$(worker_devices)"
  virsh define "$FOLDER/worker.xml"
  says "^$NAME-worker\$" virsh list --all --name
  is "$NAME-worker" 'shut off'
}
starts() {
  virsh start "$NAME-worker"
  is "$NAME-worker" running
  [ "$(readlink "/proc/$(pid "$NAME-worker")/exe")" = "$BIN" ]
  reader "$NAME-worker" wait-for --heartbeat
}
vcpus_are_known_and_pinned() {
  local number last thread
  number=$(pid "$NAME-worker") last=$(($(getconf _NPROCESSORS_ONLN) - 1))
  [ "$(virsh vcpuinfo "$NAME-worker" | grep -c '^State: *running')" = 2 ]
  virsh vcpupin "$NAME-worker" 0 "$last"
  virsh emulatorpin "$NAME-worker" 0
  thread=$(grep -lx vcpu0 "/proc/$number/task/"*/comm)
  grep -P "^Cpus_allowed_list:\t$last$" "${thread%comm}status"
  grep -P "^Cpus_allowed_list:\t0$" "/proc/$number/status"
  # Where libvirt has given the machine control groups, a vCPU has its own.
  ! grep -q "$NAME-worker.*/emulator$" "/proc/$number/cgroup" || grep -q "$NAME-worker.*/vcpu0$" "${thread%comm}cgroup"
  virsh emulatorpin "$NAME-worker" "0-$last"
  virsh vcpupin "$NAME-worker" 0 "0-$last"
}
the_network_is_a_tap() {
  local tap
  tap=$(virsh domiflist "$NAME-worker" | awk '/52:54:00:12:34:56/ { print $1 }')
  grep -qx "iff:[[:space:]]*$tap" "/proc/$(pid "$NAME-worker")/fdinfo/"*
  [ $(($(cat "/sys/class/net/$tap/flags") & 1)) = 1 ]
}
suspends_and_resumes() {
  virsh suspend "$NAME-worker"
  is "$NAME-worker" paused
  reader "$NAME-worker" verify-all
  virsh resume "$NAME-worker"
  is "$NAME-worker" running
  reader "$NAME-worker" wait-for --heartbeat
}
reboots() {
  local number kind path
  number=$(pid "$NAME-worker")
  virsh reboot "$NAME-worker"
  is "$NAME-worker" running
  [ "$(pid "$NAME-worker")" = "$number" ]
  reader "$NAME-worker" wait-for --heartbeat
  for kind in serial console; do
    path=$(terminal "$NAME-worker" "$kind")
    [ -c "$path" ] || { echo "$kind: '$path'"; return 1; }
  done
}
refuses_what_the_driver_lacks() {
  local said
  said=$(virsh snapshot-create "$NAME-worker" 2>&1) && return 1
  echo "$said"
  is "$NAME-worker" running
  reader "$NAME-worker" wait-for --heartbeat
}
attaches_a_disk() {
  supported attach-disk "$NAME-worker" "$FOLDER/later.img" vdc --live
  says "^$FOLDER/later.img\$" readlink "/proc/$(pid "$NAME-worker")/fd/"*
}
attaches_a_network() {
  printf "<interface type='ethernet'><mac address='52:54:00:12:34:57'/><model type='virtio'/></interface>\n" >"$FOLDER/net.xml"
  supported attach-device "$NAME-worker" "$FOLDER/net.xml" --live
  says 52:54:00:12:34:57 virsh domiflist "$NAME-worker"
}
changes_the_vcpus() { supported setvcpus "$NAME-worker" 1 --live; }

saves() {
  local number
  number=$(pid "$NAME-worker")
  virsh managedsave "$NAME-worker"
  is "$NAME-worker" 'shut off'
  says 'Managed save: *yes' virsh dominfo "$NAME-worker"
  ended "$number"
}
# restoring COMMAND...: starts a process for what was saved, unless this libvirt cannot.
restoring() {
  local said
  said=$(virsh "$@" 2>&1) && return 0
  echo "$said"
  # It reads the number of the new process from a file for which it has no name.
  ! grep -q "$NAME-worker didn't show up: Bad address" "$FOLDER/virtchd.log" ||
    lacks "this libvirt does not find the process that it starts for it"
  return 1
}
restored() {
  is "$NAME-worker" running
  virsh suspend "$NAME-worker"
  reader "$NAME-worker" verify-all
  virsh resume "$NAME-worker"
  reader "$NAME-worker" wait-for --heartbeat
}
starts_from_what_was_saved() {
  restoring start "$NAME-worker"
  restored
}
saves_to_a_folder() {
  local number
  running
  number=$(pid "$NAME-worker")
  virsh save "$NAME-worker" "$FOLDER/saved"
  is "$NAME-worker" 'shut off'
  ended "$number"
}
restores() {
  restoring restore "$FOLDER/saved"
  restored
}
# running: has the domain run, whatever it is in.
running() {
  local number
  ! is "$NAME-worker" running || return 0
  for number in $(vmms); do ended "$number"; done
  virsh managedsave-remove "$NAME-worker" || true
  virsh start "$NAME-worker"
  reader "$NAME-worker" wait-for --heartbeat
}
shuts_down() {
  local number
  running
  number=$(pid "$NAME-worker")
  virsh shutdown "$NAME-worker"
  within 20 is "$NAME-worker" 'shut off'
  ended "$number"
}
starts_each_time() {
  local number
  for _ in 1 2 3 4 5 6 7 8 9 10; do
    virsh start "$NAME-worker"
    number=$(pid "$NAME-worker")
    virsh destroy "$NAME-worker"
    ended "$number"
  done
}
destroys() {
  local number
  running
  number=$(pid "$NAME-worker")
  virsh destroy "$NAME-worker"
  is "$NAME-worker" 'shut off'
  ended "$number"
}
undefines() {
  virsh undefine "$NAME-worker"
  ! says "^$NAME-worker\$" virsh list --all --name
}
tells_of_events() {
  within 10 grep -q "'lifecycle' for domain '$NAME-worker': Undefined" "$FOLDER/events" || return 1
  grep -q "'lifecycle' for domain '$NAME-worker': Started" "$FOLDER/events"
  grep -q "'lifecycle' for domain '$NAME-worker': Stopped Destroyed" "$FOLDER/events"
}

# talk DOMAIN TEXT: types it at the domain's console until it comes back.
talk() {
  local said=$FOLDER/console number
  mkfifo "$FOLDER/keys"
  socat - "EXEC:$PREFIX/bin/virsh -c ch\:///system?socket=$FOLDER/virtchd-sock console $1,pty,setsid,ctty,stderr,rawer" <"$FOLDER/keys" >"$said" 2>&1 &
  number=$!
  exec 9>"$FOLDER/keys"
  rm "$FOLDER/keys"
  within 20 grep -q 'Escape character' "$said" || true
  for _ in $(seq 100); do
    printf '%s' "$2" >&9 || break
    sleep 0.1
    ! grep -qF "$2" <(sed 1,2d "$said") || break
  done
  exec 9>&-
  kill "$number" 2>/dev/null || true
  wait "$number" || true
  cat "$said"
  sed 1,2d "$said" | grep -qF "$2"
}
the_console_speaks() {
  domain echo '<vcpu>1</vcpu>' "<serial type='pty'/>" "$ECHO" 'echo'
  virsh define "$FOLDER/echo.xml"
  virsh start "$NAME-echo"
  talk "$NAME-echo" 'hello there'
}
the_console_speaks_after_a_reboot() {
  virsh reboot "$NAME-echo"
  talk "$NAME-echo" 'once more'
}
a_guest_ends_its_domain() {
  local number
  number=$(pid "$NAME-echo")
  # It switches the machine off for a q.
  talk "$NAME-echo" 'q' || true
  within 20 is "$NAME-echo" 'shut off'
  ended "$number"
  virsh undefine "$NAME-echo"
}
socket_says() { printf "hello socket" | timeout 5 socat -t 1 - "UNIX:$FOLDER/serial.sock" >"$FOLDER/socket-said" && grep -F "hello socket" "$FOLDER/socket-said"; }
the_serial_port_is_a_socket() {
  local number
  domain socket '<vcpu>1</vcpu>' "<serial type='unix'><source mode='bind' path='$FOLDER/serial.sock'/></serial>" "$ECHO" 'echo'
  virsh create "$FOLDER/socket.xml"
  number=$(pid "$NAME-socket")
  within 20 socket_says
  virsh destroy "$NAME-socket"
  ended "$number"
}
a_domain_is_transient() {
  local number
  domain passing '' "<interface type='ethernet'><model type='virtio'/></interface>"
  virsh create "$FOLDER/passing.xml"
  number=$(pid "$NAME-passing")
  reader "$NAME-passing" wait-for --heartbeat
  virsh destroy "$NAME-passing"
  ended "$number"
  ! says "^$NAME-passing\$" virsh list --all --name
}
fewer_vcpus_than_there_may_be() {
  local number
  domain fewer "<vcpu current='1'>2</vcpu>"
  virsh create "$FOLDER/fewer.xml"
  number=$(pid "$NAME-fewer")
  reader "$NAME-fewer" wait-for --heartbeat
  [ "$(virsh vcpucount "$NAME-fewer" --current --live)" = 1 ]
  virsh destroy "$NAME-fewer"
  ended "$number"
}
three_start_at_once() {
  local word number starts=()
  for word in one two three; do
    domain "$word"
    virsh create "$FOLDER/$word.xml" &
    starts+=($!)
  done
  for number in "${starts[@]}"; do wait "$number"; done
  for word in one two three; do
    number=$(pid "$NAME-$word")
    reader "$NAME-$word" wait-for --heartbeat
    virsh destroy "$NAME-$word"
    ended "$number"
  done
}
a_refused_start_says_why() {
  local number log
  domain refused '' '' /etc/hostname
  ! virsh create "$FOLDER/refused.xml" || return 1
  log=$(find "$PREFIX/var/log" /var/log/libvirt -name "$NAME-refused.log" 2>/dev/null) || true
  cat "$log"
  grep -q '^HTTP response code from CH: [45]' "$log"
  grep -q '^Response = \[".*"\]' "$log"
  for number in $(vmms); do ended "$number"; done
}
# What libvirt took amiss of an answer, an event or a thread.
the_log_has_no_complaint() {
  ! grep -E 'Invalid JSON|Mismatch in the number of cpus|missing .* from cloud-hypervisor|Unexpected response|cgroup.threads' "$FOLDER/virtchd.log" |
    grep -v "$NAME-fewer\|expected: 2, actual: 1"
}
another_is_there_at_the_end() {
  domain lasting
  virsh create "$FOLDER/lasting.xml"
  pid "$NAME-lasting" >"$FOLDER/lasting"
}
# The daemon has ended, and the events have no reader.
the_vmm_outlives_the_daemon() {
  local number socket request
  number=$(cat "$FOLDER/lasting")
  socket=$(tr '\0' '\n' <"/proc/$number/cmdline" | sed -n 's/^path=\(.*\)-event-monitor-fifo$/\1-socket/p')
  for request in vm.pause vm.resume; do
    printf 'PUT /api/v1/%s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n' "$request" |
      timeout 20 socat -t 10 - "UNIX:$socket" >"$FOLDER/answer"
    sed 1q "$FOLDER/answer"
    sed 1q "$FOLDER/answer" | grep ' 20[04] '
  done
  "$CARGO_TARGET_DIR/release/guest-reader" --timeout-ms "$READ_MS" --pid "$number" wait-for --heartbeat
}
the_daemon_finds_the_domain_again() {
  says "^$NAME-lasting\$" virsh list --name || lacks "the driver knows no domains of an earlier daemon"
  is "$NAME-lasting" running
  virsh destroy "$NAME-lasting"
  ended "$(cat "$FOLDER/lasting")"
}
