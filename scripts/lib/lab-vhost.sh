# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the lab's group `vhost-net` needs besides the usual machine: a back end of networks. Sourced by scripts/lab.

# build_extra_vhost_net FILE: writes an initramfs with it.
build_extra_vhost_net() {
  local tree=$LAB/extra-vhost-net
  need_rust
  say "building the back end of networks"
  (cd "$ROOT" && cargo build --quiet --locked --package vhost-user-disk --example network)
  rm -rf "$tree"
  mkdir -p "$tree/bin"
  add_program "$tree" "$CARGO_TARGET_DIR/debug/examples/network"
  pack "$tree" "$1"
}
