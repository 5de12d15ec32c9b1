# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What a script starts and does not wait for at once: process groups that end with it, also when it is
# interrupted. Sourced by common.sh.

# Leaders of the groups.
STARTED=()
# For groups to end by themselves after SIGTERM, in tenths of a second: less in a script that another one has
# started, which has to end its own before it is ended.
END_TENTHS=$((150 / (1 + ${IN_BACKGROUND:-0})))

# start_group COMMAND...: runs a command, or a function, in a process group of its own, whose number is in
# $started then. `wait` gives its exit code. It must not read the terminal, which would stop it.
start_group() {
  forget_ended
  set -m
  # A program leads its group itself: `timeout`, which makes a group of its own unless it leads one, would
  # leave this one.
  { export IN_BACKGROUND=1; [ "$(type -t "$1")" != file ] || exec "$@"; "$@"; } </dev/null &
  set +m
  started=$!
  STARTED+=("$started")
}

# wait_group COMMAND...: the same, and waits for it. Unlike a command in the foreground this is interrupted
# by a signal at once.
wait_group() {
  local started code=0
  start_group "$@"
  wait "$started" || code=$?
  forget_ended
  return "$code"
}

# forget_ended: groups that have ended are not those of this script any more; others may get their numbers. One
# that still has members keeps its own. To be called after each `wait` for groups.
forget_ended() {
  local left=() leader
  for leader in "${STARTED[@]}"; do ! kill -0 -- "-$leader" 2>/dev/null || left+=("$leader"); done
  STARTED=("${left[@]}")
}

# end_started: ends all that was started and what that has started.
end_started() {
  local leader
  for leader in "${STARTED[@]}"; do kill -TERM -- "-$leader" 2>/dev/null || true; done
  for leader in "${STARTED[@]}"; do
    for _ in $(seq "$END_TENTHS"); do
      kill -0 -- "-$leader" 2>/dev/null || break
      sleep 0.1
    done
    kill -KILL -- "-$leader" 2>/dev/null || true
  done
  STARTED=()
}

end_interrupted() {
  trap '' INT TERM HUP
  exit "$1"
}

# A script with an end of its own sets other traps, and calls end_started.
trap end_started EXIT
trap 'end_interrupted 130' INT
trap 'end_interrupted 143' TERM
trap 'end_interrupted 129' HUP
