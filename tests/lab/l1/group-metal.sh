# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What scripts/test metal does on a host of one's own, on this machine, which is one with SVM: groups in namespaces, on its
# kernel and KVM; afterwards the host has what it had before.
# on_request
# limit_s: 3600
. ./lib.sh

what_there_is() {
  cut -d' ' -f2,3 /proc/mounts | sort
  ls /sys/class/net /sys/block /dev
  cat /sys/block/*/size
  # None of its processes is left.
  ps | grep -c '[c]loud-hypervisor'
}
# group GROUP: its results are ours.
group() {
  rm -rf $T/tree
  mkdir -p $T/tree
  cp -a /bin /lab /etc $T/tree/
  for dir in /lib /lib64 /usr /sbin; do [ ! -e $dir ] || cp -a $dir $T/tree/; done
  what_there_is >$T/before
  /lab/metal-machine $T/tree $ROOT_DISK $1 "$(cat /proc/cmdline)" >$T/metal.log 2>&1
  grep '^LAB ok ' $T/metal.log | sed "s/^LAB ok /LAB ok $1-/"
  sed "s/^LAB FAILED /LAB FAILED $1-/; s/^LAB finished.*//; s/^LAB ok.*//" $T/metal.log
  rm -rf $T/tree
  check $1-finishes grep -q "^LAB finished $1" $T/metal.log
  what_there_is >$T/after
  check $1-leaves_the_host_as_it_was cmp $T/before $T/after
}
group guest
group migrate
group faults
