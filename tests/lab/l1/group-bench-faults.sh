# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# on_request
# limit_s: 2400
# What a fault on a missing page costs a vCPU on the patched KVM, as ratios within this run:
# `scripts/bench fault-exit` prints the lines that begin with FIGURE.
. ./lib.sh

P=/lab/kvm-patch
MIB=12
figure() { echo "LAB FIGURE fault-exit $*"; }
patched() { rmmod kvm_amd && rmmod kvm && insmod $P/kvm.ko && insmod $P/kvm-amd.ko; }
check patched_modules_load patched
# One round of each in turn; a busy host only ever adds, so the least of all rounds counts.
rounds() {
  rm -f $T/cost.*
  for round in 1 2 3 4 5 6 7 8 9; do
    for mode in none uffd sigbus exit; do
      $P/fault-cost $mode $1 $MIB $2 | cut -d' ' -f1 >>$T/cost.$mode || return 1
    done
  done
}
least() { sort -n $T/cost.$1 | head -n 1; }
for vcpus in 1 2; do
  for allocated in "" allocated; do
    check measured_${vcpus}_${allocated:-missing} rounds $vcpus $allocated
    figure "$(awk -v none="$(least none)" -v uffd="$(least uffd)" -v sigbus="$(least sigbus)" -v leave="$(least exit)" \
      -v vcpus=$vcpus -v memory="${allocated:-missing}" 'BEGIN {
        u = uffd - none; s = sigbus - none; e = leave - none; share = 100 * e / u
        printf("%d vCPUs, %s memory: a fault costs %.0f emulated us with uffd, %.0f with sigbus, %.0f with exit: %.0f percent of uffd", vcpus, memory, u, s, e, share)
        if (memory == "allocated") printf(" (target 33: %s)", (share <= 100 / 3) ? "met" : "MISSED")
      }')"
  done
done
