# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Shared by the two forms of the demo: its folder, its processes, how it ends. Sourced after
# common.sh, never run.

DEMO=$(mktemp -d "${TMPDIR:-/tmp}/godwit-demo.XXXXXX")
DEMO_PIDS=()
DEMO_DONE=

# demo_pid PID: a process that the demo started and takes away again.
demo_pid() { DEMO_PIDS+=("$1"); }

demo_end() {
  local code=$? pid
  trap - EXIT
  trap '' INT TERM HUP
  end_started
  for pid in "${DEMO_PIDS[@]:-}"; do
    [ -n "$pid" ] && kill "$pid" 2>/dev/null || true
  done
  for pid in "${DEMO_PIDS[@]:-}"; do
    [ -n "$pid" ] || continue
    for _ in $(seq 50); do
      kill -0 "$pid" 2>/dev/null || break
      sleep 0.05
    done
    kill -9 "$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
  done
  if [ -z "$DEMO_DONE" ]; then
    [ "$code" != 0 ] || code=1
    demo_logs
    echo "demo: FAILED ${DEMO_REASON:-(see above)}"
  fi
  rm -rf "$DEMO"
  exit "$code"
}
trap demo_end EXIT
trap 'DEMO_REASON="interrupted"; exit 130' INT TERM HUP

demo_logs() {
  local log
  for log in "$DEMO"/*.log "$DEMO"/*.err; do
    [ -s "$log" ] || continue
    echo "--- $(basename "$log")"
    tail -n 25 "$log"
  done
}

fail() {
  DEMO_REASON=$*
  exit 1
}

# field JSON NAME: a number or word of a flat JSON object (the demo brings no JSON tool along).
field() { sed -n 's/.*"'"$2"'" *: *"\{0,1\}\([^",}]*\).*/\1/p' <<<"$1" | head -n 1; }

# until_true SECONDS WHAT COMMAND...: waits for a command to succeed.
until_true() {
  local end=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    [ "$SECONDS" -lt "$end" ] || fail "$what did not happen in time"
    sleep 0.05
  done
}

# us NANOSECONDS and ms MICROSECONDS, for people.
us() { awk -v n="${1:-0}" 'BEGIN { printf "%.1f us", n / 1000 }'; }
ms() { awk -v n="${1:-0}" 'BEGIN { printf "%.2f ms", n / 1000 }'; }
