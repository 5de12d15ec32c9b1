# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Options that the forms of scripts/bench share. Sourced by them.

bench_usage() {
  warn "$*; see the head of scripts/bench"
  exit 2
}

# bench_runs NUMBER: that number, if it is one.
bench_runs() {
  [[ $1 =~ ^[1-9][0-9]*$ ]] || bench_usage "--runs is a number above 0, not '$1'"
  echo "$1"
}
