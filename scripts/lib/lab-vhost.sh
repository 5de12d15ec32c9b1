# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the lab's groups `vhost-net` and `vhost-disk` need besides the usual machine: a back end. Sourced by scripts/lab.

# build_extra_vhost_net FILE, build_extra_vhost_disk FILE: write an initramfs with it.
build_extra_vhost_net() { build_extra_with_back_end vhost-net network "$1"; }
build_extra_vhost_disk() { build_extra_with_back_end vhost-disk disk "$1"; }

# build_extra_with_back_end GROUP EXAMPLE FILE
build_extra_with_back_end() {
  local tree=$LAB/extra-$1
  need_rust
  say "building the back end of the group $1"
  (cd "$ROOT" && cargo build --quiet --locked --package vhost-user-disk --example "$2")
  rm -rf "$tree"
  mkdir -p "$tree/bin"
  add_program "$tree" "$CARGO_TARGET_DIR/debug/examples/$2"
  pack "$tree" "$3"
}
