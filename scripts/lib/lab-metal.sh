# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Groups of the lab without its emulated machine: on the KVM of the host, in namespaces (metal-machine). Sourced by
# scripts/lab.

# metal_unfit: why this host cannot run them; fails where it can.
metal_unfit() {
  have_kvm && {
    if [ "$(id -u)" != 0 ]; then echo "it needs root: for namespaces, a tap and a loop device"
    elif ! grep -qwE 'vmx|svm' /proc/cpuinfo; then echo "the processor has neither VT-x nor SVM, without which no Linux guest runs"
    elif [ ! -e /dev/net/tun ]; then echo "there is no /dev/net/tun: modprobe tun"
    elif [ ! -e /dev/loop-control ]; then echo "there is no /dev/loop-control: modprobe loop"
    else return 1; fi
  }
  return 0
}

# metal_groups: those that need no device, network or kernel of their machine, and leave the host's settings alone.
metal_groups() {
  local group
  for group in "$SRC"/l1/group-*.sh; do
    ! grep -q '^# metal$' "$group" || basename "$group" .sh | sed 's/^group-//'
  done
}

# run_metal GROUP: as run_group, on the host; the disk is a copy.
run_metal() (
  # What was printed before is no result of this run, also if this gets no further.
  : >"$LAB/$1$VARIANT.log"
  tree=$(mktemp -d "$LAB/metal.XXXXXX")
  image=$tree.img
  trap 'rm -rf "$tree" "$image"' EXIT
  gzip -dc "$LAB/l1$VARIANT.gz" | (cd "$tree" && cpio -idm --quiet)
  [ ! -f "$LAB/extra-$1.gz" ] || gzip -dc "$LAB/extra-$1.gz" | (cd "$tree" && cpio -idmu --quiet)
  cp --sparse=always "$LAB/root.img" "$image"
  disk=$(losetup --show -f "$image")
  # What has it open keeps it.
  rm -f "$image"
  # In the group of this shell, so that what ends that ends this.
  timeout --foreground --kill-after=30 "$(limit_s_of "$1")" "$ROOT/scripts/lib/metal-machine" "$tree" "$disk" "$1" \
    "lab.moves=${GODWIT_FAULT_MOVES:-1} lab.migrations=${GODWIT_MIGRATIONS:-3} lab.runs=${LAB_RUNS:-1} ${LAB_WORDS:-}" \
    </dev/null >"$LAB/$1$VARIANT.log" 2>&1 || true
  # Where it ended before it had the disk.
  losetup -d "$disk" 2>/dev/null || true
)

# build_extra_metal: the group of this name tries all that in the emulated machine.
build_extra_metal() {
  local tree=$LAB/extra-metal
  rm -rf "$tree"
  mkdir -p "$tree/lab"
  install -m 755 "$ROOT/scripts/lib/metal-machine" "$tree/lab/"
  build_extra_guest "$LAB/extra-guest.gz"
  cp "$LAB/guest/lab/early-guest" "$tree/lab/"
  pack "$tree" "$1"
}
