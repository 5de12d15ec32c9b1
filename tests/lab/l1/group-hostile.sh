# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# The test guest that attacks its devices, on the kernel's own KVM: for a minute, or for the seconds of
# LAB_WORDS=lab.seconds=N, then after a restore of its snapshot. Its second vCPU writes memory that no device was
# told of, all of which is compared.
# on_request
# limit_s: 2400
. ./lib.sh
SECONDS_WANTED=$(sed -n 's/.*lab\.seconds=\([0-9]*\).*/\1/p' /proc/cmdline)
SECONDS_WANTED=${SECONDS_WANTED:-60}
truncate -s 16M $T/a.img $T/b.img
tap_up lab0

hostile() {
  start_vmm a --kernel /lab/test-guest --cmdline "workload=hostile vcpus=2 mem=16M reserve=24M verify=full seed=$(date +%s)" \
    --cpus boot=3 --memory size=128M,shared=on,hotplug_method=virtio-mem,hotplug_size=128M \
    --balloon size=16M,free_page_reporting=on,free_page_hinting=on,statistics_interval_s=1 \
    --disk path=$T/a.img,image_type=raw,queue_size=256 path=$T/b.img,image_type=raw,readonly=on,num_queues=2 \
    --net tap=lab0,mac=52:54:00:00:00:01 --vsock cid=3,socket=$T/vsock --watchdog --pvpanic --rtc id=clock \
    --serial off --console null
}
reader() { guest-reader --pid "$(cat $T/a.pid)" --timeout-ms 120000 "$@"; }
attacks() { reader --json status | grep -o '"attacks":\[[0-9,]*\]' | head -n 1 | tr -cd '0-9,' | tr ',' '+' | sed 's/^$/0/'; }
spent() { set -- /proc/"$(cat $T/a.pid)"; echo "$(ls $1/task | wc -l) threads, $(ls $1/fd | wc -l) descriptors, $(sed -n 's/^RssAnon:[^0-9]*//p' $1/status), $(cat $T/a.vmm.log $T/a.events | wc -c) bytes of log"; }

# goes_on SECONDS: meanwhile the API answers, and the guest attacks.
goes_on() {
  before=$(($(attacks)))
  until=$(($(cut -d. -f1 /proc/uptime) + $1))
  while [ "$(cut -d. -f1 /proc/uptime)" -lt $until ]; do
    [ ! -s $T/a.exit ] || { echo "the VMM ended with $(cat $T/a.exit)"; return 1; }
    timeout 20 ch-remote --api-socket $T/a.sock ping >/dev/null || { echo "no answer"; return 1; }
    sleep 1
  done
  after=$(($(attacks)))
  echo "LAB note: $((after - before)) attacks in $1 s; $(spent)"
  [ $after -gt $before ] && reader wait-for --heartbeat
}
limits() {
  [ "$(ls /proc/"$(cat $T/a.pid)"/task | wc -l)" -le $((threads + 24)) ] &&
    [ "$(ls /proc/"$(cat $T/a.pid)"/fd | wc -l)" -le $((descriptors + 128)) ]
}

hostile || { failed start "the VMM did not start"; exit 1; }
check guest_attacks reader wait-for --heartbeat --iterations 1
threads=$(ls /proc/"$(cat $T/a.pid)"/task | wc -l) descriptors=$(ls /proc/"$(cat $T/a.pid)"/fd | wc -l)
check vmm_goes_on goes_on $SECONDS_WANTED
check within_its_limits limits
check memory_is_intact reader verify-all --hold
reader release
saved() {
  remote a pause && mkdir $T/snap && remote a snapshot file://$T/snap && remote a shutdown-vmm && ends a 60 &&
    rm $T/a.exit &&
    start_vmm a && remote a restore source_url=file://$T/snap,resume=on
}
check saved_and_restored saved
check goes_on_after_a_restore goes_on 10
check memory_is_intact_after_a_restore reader verify-all --hold
reader release
off() { remote a shutdown-vmm && ends a 60; }
check it_ends off
