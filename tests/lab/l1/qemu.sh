# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# QEMU alongside the VMM, with the same guest, for groups that compare the two. Busybox sh; after lib.sh.
# What it is told, and says, goes over a terminal of its own in JSON (QMP).

NOTHING="{}"
qmp_number=0
# qmp NAME COMMAND [ARGUMENTS]: the answer is in $T/answer.
qmp() {
  qmp_number=$((qmp_number + 1))
  echo "{\"execute\": \"$2\", \"arguments\": ${3:-$NOTHING}, \"id\": \"q$qmp_number\"}" >"$(cat $T/$1.control)"
  wait_until 60 answered $1 || { echo "QEMU does not answer to $2"; return 1; }
  tr -d '\r' <$T/$1.qmp | grep "\"q$qmp_number\"" >$T/answer
  ! grep -q '"error":' $T/answer || { cat $T/answer; return 1; }
}
answered() { grep -q "\"id\": \"q$qmp_number\"" $T/$1.qmp 2>/dev/null; }
# answer FIELD: the number in the last answer.
answer() { tr ',{}' '\n\n\n' <$T/answer | sed -n "s/^ *\"$1\": *\([0-9]*\).*/\1/p" | head -n 1; }

# start_qemu NAME BALLOON ARG...: boots the guest of start_guest; BALLOON are properties of its balloon.
start_qemu() {
  vm=$1 balloon=$2
  shift 2
  rm -f $T/$vm.exit $T/$vm.qmp
  {
    qemu-system-x86_64 -L /bin/qemu -accel kvm -cpu host -M q35,memory-backend=ram -smp ${QEMU_VCPUS:-1} -m ${QEMU_MIB:-256}M \
      -object memory-backend-memfd,id=ram,size=${QEMU_MIB:-256}M,share=on -object iothread,id=io \
      -nodefaults -display none -no-reboot -bios /bin/qemu/qboot.rom \
      -kernel /lab/vmlinuz -initrd ${GUEST_INITRAMFS:-/lab/initramfs.gz} -append "$CMDLINE" \
      -drive if=none,id=d,file=$ROOT_DISK,format=raw,file.locking=off -device virtio-blk-pci,drive=d \
      -device virtio-rng-pci -device virtio-balloon-pci,id=balloon,disable-legacy=on$balloon \
      -chardev pty,id=console -device virtio-serial-pci -device virtconsole,chardev=console \
      -chardev pty,id=control -mon chardev=control,mode=control "$@" >$T/$vm.vmm.log 2>&1 &
    echo $! >$T/$vm.pid
    wait $!
    echo $? >$T/$vm.exit
  } >/dev/null 2>&1 &
  wait_until 30 grep -q "label control" $T/$vm.vmm.log || return 1
  for label in console control; do
    sed -n "s|.* \(/dev/pts/[0-9]*\) (label $label).*|\1|p" $T/$vm.vmm.log >$T/$vm.$label
    stty -F "$(cat $T/$vm.$label)" raw -echo
  done
  mv $T/$vm.console $T/$vm.pty
  cat "$(cat $T/$vm.pty)" >>$T/$vm.console 2>/dev/null &
  cat "$(cat $T/$vm.control)" >>$T/$vm.qmp 2>/dev/null &
  qmp $vm qmp_capabilities
}
