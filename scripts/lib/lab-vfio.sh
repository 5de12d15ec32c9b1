# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the groups with passed-through devices need besides the usual machine: a disk to pass through, and
# programs that change limits of a process. Sourced by scripts/lab.

# write_rom FILE: an expansion ROM of 40 KiB for an NVMe disk; its checksum is wrong, so that no firmware runs it.
write_rom() {
  {
    # Signature, length in 512 bytes, where the structure "PCIR" is; vendor, device, its length, class, the
    # image's length, that it is the last.
    printf '\125\252\120'
    head -c 21 /dev/zero
    printf '\034\000\000\000PCIR\066\033\020\000\000\000\030\000\000\002\010\001\120\000\000\000\000\200\000\000'
    seq 20000
  } >"$1"
  truncate -s 40K "$1"
}
# build_extra_vfio FILE: writes the disk, and an initramfs with the programs.
build_extra_vfio() {
  local tree=$LAB/vfio
  truncate -s 256M "$LAB/vfio.img"
  write_rom "$LAB/vfio-rom.img"
  rm -rf "$tree"
  mkdir -p "$tree/bin"
  add_program "$tree" /usr/bin/prlimit
  add_program "$tree" /usr/bin/setpriv
  add_program "$tree" /usr/bin/chrt
  pack "$tree" "$1"
}
# add_kernel_amd64 TREE: for a guest, Debian's kernel for all machines rather than that for virtual ones.
add_kernel_amd64() {
  local kernel=$LAB/kernel-amd64
  fetch_kernel linux-image-6.12-amd64 "$kernel"
  build_l2_initramfs l2-initramfs-amd64 "$kernel" nvme e1000e
  mkdir -p "$1/lab"
  cp "$kernel/vmlinuz" "$1/lab/vmlinuz-amd64"
  cp "$LAB/l2-initramfs-amd64.gz" "$1/lab/initramfs-amd64.gz"
}
# The guest has a real network card's driver.
build_extra_iommufd() {
  build_extra_vfio "$1"
  add_kernel_amd64 "$LAB/vfio"
  pack "$LAB/vfio" "$1"
}
# The benchmark compares with QEMU, and has a pool.
build_extra_bench_passthrough() {
  build_extra_vfio "$1"
  add_qemu "$LAB/vfio"
  add_program "$LAB/vfio" "$CARGO_TARGET_DIR/release/prezero-pool"
  add_test_guest "$LAB/vfio"
  pack "$LAB/vfio" "$1"
}
# The program that drives one disk from within the guest, as a disk of its own.
build_extra_vfio_p2p() {
  local tree=$LAB/vfio-p2p
  rm -rf "$tree"
  mkdir -p "$tree/lab"
  gcc -O2 -Wall -Wextra -static -s -o "$tree/lab/nvme-peer" "$SRC/probes/nvme-peer.c"
  truncate -s 1M "$tree/lab/nvme-peer"
  pack "$tree" "$1"
}
# The driver of the serial cards on the host, and the program that reads and writes their ports from within
# the guest, as a disk of its own; the guest's kernel has /dev/port.
build_extra_vfio_migration() {
  local tree=$LAB/vfio-migration modules
  modules=$(echo "$MACHINE_KERNEL"/root/lib/modules/*/kernel)
  [ -f "$modules/samples/vfio-mdev/mtty.ko" ] || die "vfio-migration needs LAB_KERNEL=iommufd: no other kernel here has mtty"
  rm -rf "$tree"
  mkdir -p "$tree/lab"
  cp "$modules/drivers/vfio/mdev/mdev.ko" "$modules/samples/vfio-mdev/mtty.ko" "$tree/lab/"
  gcc -O2 -Wall -Wextra -static -s -o "$tree/lab/ports" "$SRC/probes/ports.c"
  truncate -s 1M "$tree/lab/ports"
  add_kernel_amd64 "$tree"
  pack "$tree" "$1"
}
# add_test_guest TREE: a guest that allows DMA at once, and what reads its memory.
add_test_guest() {
  build_guest
  (cd "$ROOT" && cargo build --release --quiet --locked -p guest-reader)
  add_program "$1" "$CARGO_TARGET_DIR/release/guest-reader"
  mkdir -p "$1/lab"
  cp "$CARGO_TARGET_DIR/guest/release/test-guest" "$1/lab/"
}
# add_slow_open TREE: what makes devices take long to open, and memory to be mapped.
add_slow_open() { gcc -O2 -Wall -Wextra -shared -fPIC -s -o "$1/bin/slow-open.so" "$SRC/probes/slow-open.c" -ldl; }
build_extra_vfio_gate() {
  build_extra_vfio "$1"
  add_slow_open "$LAB/vfio"
  add_test_guest "$LAB/vfio"
  pack "$LAB/vfio" "$1"
}
build_extra_vfio_announce() {
  build_extra_vfio "$1"
  add_slow_open "$LAB/vfio"
  pack "$LAB/vfio" "$1"
}
build_extra_vfio_ends() { build_extra_vfio_announce "$@"; }
build_extra_vfio_nodes() { build_extra_vfio "$@"; }
build_extra_vfio_memory() {
  build_extra_vfio "$1"
  add_program "$LAB/vfio" "$CARGO_TARGET_DIR/release/prezero-pool"
  pack "$LAB/vfio" "$1"
}
# Alongside the pool a program that keeps a descriptor of a VMM.
build_extra_pool_device() {
  build_extra_vfio "$1"
  add_slow_open "$LAB/vfio"
  add_program "$LAB/vfio" "$CARGO_TARGET_DIR/release/prezero-pool"
  gcc -O2 -Wall -Wextra -static -s -o "$LAB/vfio/bin/hold-fd" "$SRC/probes/hold-fd.c"
  pack "$LAB/vfio" "$1"
}
build_extra_vfio_hotplug() { build_extra_vfio "$@"; }
build_extra_balloon_vfio() { build_extra_vfio "$@"; }
build_extra_mem() { build_extra_vfio "$@"; }
build_extra_segments() { build_extra_vfio "$@"; }
