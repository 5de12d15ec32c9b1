# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the groups that measure share: results for scripts/lib/lab-report, medians of files of numbers,
# one a line. Sourced after lib.sh.

RUNS=$(sed -n 's/.*lab.runs=\([0-9]*\).*/\1/p' /proc/cmdline)
RUNS=${RUNS:-3}
# summary FILE: median/least/most/count.
summary() {
  sort -n "$1" | awk '{ v[NR] = $1 } END { if (NR) { m = NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2; printf("%.1f/%.1f/%.1f/%d", m, v[1], v[NR], NR) } }'
}
median() { summary "$1" | cut -d/ -f1; }
# figure BENCH FILE UNIT NAME...: the median of a file.
figure() {
  bench=$1 values=$(summary "$2") unit=$3
  shift 3
  echo "LAB FIGURE $bench $values $unit $*"
}
# target BENCH VALUE lower|higher LIMIT NAME...
target() { echo "LAB TARGET $*"; }
