# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the group vfio-dma needs besides the usual machine: the module of tests/lab/modules/edu-vfio-pci, built
# for the lab's kernel from Debian's headers of it, and the program that drives the device from within the
# guest. Sourced by scripts/lab.

# fetch_headers DIR: unpacks the headers of the lab's kernel there; nothing is installed. The folder to
# build against is DIR/build.
fetch_headers() {
  local dir=$1 version package packages
  version=$(cat "$LAB/kernel/version")
  [ "$(cat "$dir/version" 2>/dev/null || true)" != "$version" ] || return 0
  apt_update_once
  # Those that all machines share, and the programs of the build.
  packages=$(apt-cache depends "linux-headers-$version" | sed -nE 's/.*Depends: (linux-(headers|kbuild)-[^ ]*)$/\1/p')
  [ -n "$packages" ] || die "apt knows no linux-headers-$version: a newer kernel? then remove $LAB/kernel"
  say "fetching the headers of $version"
  rm -rf "$dir"
  mkdir -p "$dir/root"
  for package in "linux-headers-$version" $packages; do
    (cd "$dir" && apt-get download -q "$package" >/dev/null && dpkg-deb -x "$package"_*.deb root && rm -f ./*.deb) ||
      die "cannot download $package"
  done
  # It names its other half by where that would be installed.
  sed -i "s|/usr/src/|$dir/root/usr/src/|" "$dir/root/usr/src/linux-headers-$version/Makefile"
  ln -s "root/usr/src/linux-headers-$version" "$dir/build"
  echo "$version" >"$dir/version"
}

# build_module NAME: $LAB/NAME/NAME.ko, of tests/lab/modules/NAME.
build_module() {
  local out=$LAB/$1 headers=$LAB/kernel-headers source=$SRC/modules/$1 stamp compiler
  stamp=$(cat "$source"/* "$LAB/kernel/version" "$ROOT/scripts/lib/lab-edu.sh" | sha256sum)
  [ "$(cat "$out/stamp" 2>/dev/null || true)" != "$stamp" ] || return 0
  fetch_headers "$headers"
  compiler=$(sed -n 's/^CONFIG_CC_VERSION_TEXT="x86_64-linux-gnu-\([^ ]*\) .*/\1/p' "$headers/build/.config")
  need_packages make "${compiler:-gcc}" libelf1
  say "building $1"
  rm -rf "$out"
  mkdir -p "$out"
  cp "$source"/* "$out/"
  # Types for BPF would need pahole; no structure depends on that.
  make -s -C "$headers/build" M="$out" CONFIG_DEBUG_INFO_BTF_MODULES= KCFLAGS=-g0 modules >"$out/log" 2>&1 ||
    { cat "$out/log"; die "$1 does not build"; }
  echo "$stamp" >"$out/stamp"
}

build_extra_vfio_dma() {
  local tree=$LAB/vfio-dma
  [ -z "${LAB_KERNEL:-}" ] || die "vfio-dma is for the usual kernel: the module is written for Linux 6.12"
  build_module edu-vfio-pci
  rm -rf "$tree"
  mkdir -p "$tree/lab"
  cp "$LAB/edu-vfio-pci/edu-vfio-pci.ko" "$tree/lab/"
  gcc -O2 -Wall -Wextra -static -s -o "$tree/lab/edu-dma" "$SRC/probes/edu-dma.c"
  # A disk of whole MiB.
  truncate -s 1M "$tree/lab/edu-dma"
  pack "$tree" "$1"
}
