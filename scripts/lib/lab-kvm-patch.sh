# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the lab's groups kvm-patch, faults-* and bench-* need besides the usual machine: KVM modules built from
# the patches of kernel/patches for the lab's own kernel, KVM selftests of the same source, and the cost
# probe. They are an initramfs of their own that is laid over the machine's. Sourced by scripts/lab.

# kvm_modules VERB...: scripts/kvm-modules for the lab's kernel, on a Debian that has it.
kvm_modules() {
  local verb=$1 run=()
  shift
  [ "${LAB_KERNEL:-}" != 7.2 ] || run=(in_sid)
  "${run[@]}" "$ROOT/scripts/kvm-modules" "$verb" --kernel "$(cat "$LAB/kernel/version")" --out "$LAB/kvm-modules" "$@"
}

# build_extra_kvm_patch FILE: writes that initramfs.
build_extra_kvm_patch() {
  local version tree=$LAB/kvm-patch out=$LAB/kvm-modules program
  version=$(cat "$LAB/kernel/version")
  kvm_modules build
  kvm_modules selftests
  rm -rf "$tree"
  mkdir -p "$tree/bin" "$tree/lab/kvm-patch"
  cp "$out/kvm.ko" "$out/kvm-amd.ko" "$tree/lab/kvm-patch/"
  gcc -O2 -Wall -pthread -static -s -o "$tree/lab/kvm-patch/fault-cost" "$SRC/probes/fault-cost.c"
  cp -r "$out/selftests" "$tree/lab/kvm-patch/selftests"
  # What one kernel's source has is not what all have.
  grep -v '^#' "$SRC/kvm-selftests.txt" | while read -r program; do
    [ ! -x "$out/selftests/${program%% *}" ] || echo "$program"
  done >"$tree/lab/kvm-patch/selftests.list"
  add_module_script "$tree" "$version" "$out"
  pack "$tree" "$1"
}

# patched_modules_tree NAME: an initramfs with the modules alone, in $tree.
patched_modules_tree() {
  tree=$LAB/$1
  kvm_modules build
  rm -rf "$tree"
  mkdir -p "$tree/lab/kvm-patch"
  cp "$LAB/kvm-modules/kvm.ko" "$LAB/kvm-modules/kvm-amd.ko" "$tree/lab/kvm-patch/"
}
build_extra_faults_patched() {
  local tree
  patched_modules_tree faults-patched
  pack "$tree" "$1"
}
build_extra_faults_hosts() { build_extra_faults_patched "$1"; }
build_extra_bench_faults() {
  local tree
  patched_modules_tree bench-faults
  gcc -O2 -Wall -pthread -static -s -o "$tree/lab/kvm-patch/fault-cost" "$SRC/probes/fault-cost.c"
  pack "$tree" "$1"
}
# The program that a guest is measured with.
build_extra_bench_stage2() {
  local tree=$LAB/bench-stage2
  rm -rf "$tree"
  mkdir -p "$tree/lab"
  gcc -O2 -Wall -static -s -o "$tree/lab/touch-all" "$SRC/probes/touch-all.c"
  pack "$tree" "$1"
}

# add_module_script DIR VERSION OUT: scripts/kvm-modules and what it needs to install, load and restore,
# with /lib/modules as a Debian machine has it.
add_module_script() {
  local dir=$1 modules=lib/modules/$2 tool
  mkdir -p "$dir/$modules" "$dir/lab/kvm-patch/scripts/lib" "$dir/lab/kvm-patch/kernel/patches"
  cp "$ROOT/scripts/kvm-modules" "$dir/lab/kvm-patch/scripts/"
  cp "$ROOT"/scripts/lib/{common,children,install,kernel-patches,kvm-btf,kvm-signing}.sh "$dir/lab/kvm-patch/scripts/lib/"
  # All three, as install wants them.
  cp "$3/kvm-intel.ko" "$dir/lab/kvm-patch/"
  (cd "$LAB/kernel/root/$modules" && cp -a --parents kernel/arch/x86/kvm kernel/virt modules.order modules.builtin modules.builtin.modinfo "$dir/$modules/")
  # Before busybox installs itself: its own modprobe and depmod know neither xz nor updates.
  add_program "$dir" /bin/bash
  add_program "$dir" /bin/kmod
  for tool in modprobe depmod modinfo lsmod rmmod insmod; do ln -sf kmod "$dir/bin/$tool"; done
}
