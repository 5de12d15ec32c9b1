# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# on_request
# limit_s: 3600
# machine: -icount shift=0
# What a fault on a missing page costs a vCPU on the patched KVM: `scripts/bench fault-exit` reads the
# lines that begin with FIGURE and TARGET. The machine's clock counts its instructions, a nanosecond each,
# so that a busy host changes nothing.
. ./lib.sh
. ./bench-lib.sh

P=/lab/kvm-patch
MIB=12
patched() { rmmod kvm_amd && rmmod kvm && insmod $P/kvm.ko && insmod $P/kvm-amd.ko; }
check patched_modules_load patched

# measured VCPUS MEMORY: every kind in turns; in $T/cost.KIND what a fault of that kind takes more than a
# page that is there, in the same round, and in $T/share.KIND the percentage of uffd's that this is.
measured() {
  rm -f $T/cost.* $T/share.*
  word=$2
  [ "$word" != missing ] || word=
  round=0
  while [ $round -lt $RUNS ]; do
    round=$((round + 1))
    none=$($P/fault-cost none $1 $MIB $word) && uffd=$($P/fault-cost uffd $1 $MIB $word) &&
      sigbus=$($P/fault-cost sigbus $1 $MIB $word) && leave=$($P/fault-cost exit $1 $MIB $word) &&
      ahead=$($P/fault-cost exit $1 $MIB $word prefault) && copy=$($P/fault-cost copy 1 $MIB allocated) || return 1
    echo "ROUND $1 $2: none ${none%% *} uffd ${uffd%% *} sigbus ${sigbus%% *} exit ${leave%% *} exit+map ${ahead%% *} copy ${copy%% *}"
    echo "${copy%% *}" >>$T/cost.copy
    echo "${none%% *}" >>$T/cost.none
    echo "${uffd%% *} ${none%% *}" | awk '{ print $1 - $2 }' >>$T/cost.uffd
    for kind in sigbus exit exit+map; do
      case $kind in sigbus) took=$sigbus ;; exit) took=$leave ;; *) took=$ahead ;; esac
      echo "${took%% *} ${uffd%% *} ${none%% *} $kind" |
        awk -v dir=$T '{ print $1 - $3 >>(dir "/cost." $4); print 100 * ($1 - $3) / ($2 - $3) >>(dir "/share." $4) }'
    done
  done
}
for vcpus in 1 2; do
  for memory in missing allocated filled; do
    check measured_${vcpus}_$memory measured $vcpus $memory
    what="$vcpus vCPU, $memory"
    figure fault-exit $T/cost.none kinstr "$what: a page that is there"
    for kind in uffd sigbus exit exit+map; do
      figure fault-exit $T/cost.$kind kinstr "$what: a fault with $kind"
    done
    for kind in sigbus exit exit+map; do figure fault-exit $T/share.$kind % "$what: $kind by uffd"; done
    [ $memory = missing ] || target fault-exit "$(median $T/share.exit)" lower 33.3 "$what: exit by uffd, %"
  done
done
figure fault-exit $T/cost.copy kinstr "of it, copying the contents of a page"
