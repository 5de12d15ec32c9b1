# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the lab's group `vdpa` needs besides the usual machine: the kernel's simulator of vDPA devices, which Debian's
# cloud kernel leaves out, built from Debian's source package of that kernel; the modules of vhost-vdpa; and the program
# that makes vDPA devices. Sourced by scripts/lab.

# What is built of the source: the simulator, and the rings of a device in the kernel, which only it uses.
VDPA_SOURCES=(drivers/vdpa/vdpa_sim/vdpa_sim.c drivers/vdpa/vdpa_sim/vdpa_sim.h
  drivers/vdpa/vdpa_sim/vdpa_sim_blk.c drivers/vdpa/vdpa_sim/vdpa_sim_net.c drivers/vhost/vringh.c)

# build_vdpa_sim: $LAB/vdpa-sim/{vringh,vdpa_sim,vdpa_sim_blk,vdpa_sim_net}.ko.
build_vdpa_sim() {
  local out=$LAB/vdpa-sim headers=$LAB/kernel-headers version package compiler stamp
  version=$(cat "$LAB/kernel/version")
  stamp=$(cat "$LAB/kernel/version" "$ROOT/scripts/lib/lab-vdpa.sh" | sha256sum)
  [ "$(cat "$out/stamp" 2>/dev/null || true)" != "$stamp" ] || return 0
  fetch_headers "$headers"
  package=$(apt-cache show --no-all-versions "linux-image-$version" | sed -n 's/^Version: //p' | head -n 1)
  [ -n "$package" ] || die "apt knows no linux-image-$version: a newer kernel? then remove $LAB/kernel"
  say "fetching the source of $version for vdpa_sim"
  rm -rf "$out"
  mkdir -p "$out/source"
  (cd "$out/source" && apt-get download -q "linux-source-6.12=$package" >/dev/null && dpkg-deb -x linux-source-*.deb .) ||
    die "cannot download linux-source-6.12 $package"
  tar -C "$out" -x --xz --strip-components=1 -f "$out"/source/usr/src/linux-source-6.12.tar.xz \
    "${VDPA_SOURCES[@]/#/linux-source-6.12/}" || die "linux-source-6.12 has no vdpa_sim"
  rm -rf "$out/source"
  for file in "${VDPA_SOURCES[@]}"; do mv "$out/$file" "$out/"; done
  rm -rf "$out/drivers"
  echo "obj-m := vringh.o vdpa_sim.o vdpa_sim_blk.o vdpa_sim_net.o" >"$out/Kbuild"
  compiler=$(sed -n 's/^CONFIG_CC_VERSION_TEXT="x86_64-linux-gnu-\([^ ]*\) .*/\1/p' "$headers/build/.config")
  need_packages make "${compiler:-gcc}" libelf1
  say "building vdpa_sim"
  make -s -C "$headers/build" M="$out" CONFIG_DEBUG_INFO_BTF_MODULES= KCFLAGS=-g0 modules >"$out/log" 2>&1 ||
    { cat "$out/log"; die "vdpa_sim does not build"; }
  echo "$stamp" >"$out/stamp"
}

build_extra_vdpa() {
  local tree=$LAB/extra-vdpa
  [ -z "${LAB_KERNEL:-}" ] || die "vdpa is for the usual kernel, of whose source its modules are"
  build_vdpa_sim
  need_packages iproute2
  rm -rf "$tree"
  mkdir -p "$tree/bin" "$tree/lab"
  # Not among the modules that every machine loads.
  add_modules "$tree/lab" "$LAB/kernel" vhost_vdpa
  cp "$LAB"/vdpa-sim/{vringh,vdpa_sim,vdpa_sim_blk,vdpa_sim_net}.ko "$tree/lab/"
  add_program "$tree" "$(PATH=$PATH:/usr/sbin:/sbin command -v vdpa)"
  pack "$tree" "$1"
}
