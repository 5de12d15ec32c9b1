# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the lab's group `upstream` needs besides the usual machine: the program of cloud-hypervisor v53, which is no part of
# this repository and is never built here, what makes a network of two hosts and receives datagrams, and a file system.
# Sourced by scripts/lab.

UPSTREAM_BIN=

# upstream_lacks: why the group cannot run, or nothing.
upstream_lacks() {
  local version
  if [ -z "$UPSTREAM_BIN" ]; then
    echo "--bin names no cloud-hypervisor v53"
  elif [ ! -x "$UPSTREAM_BIN" ]; then
    echo "$UPSTREAM_BIN is no program"
  else
    version=$("$UPSTREAM_BIN" --version 2>&1 | head -n 1) || true
    case $version in
      "cloud-hypervisor v53."*) ;;
      *) echo "$UPSTREAM_BIN is no cloud-hypervisor v53, but '$version'" ;;
    esac
  fi
}

# named ARGUMENT...: sets `named` to the groups that are named and can run; the others are said.
named() {
  local group lacks
  named=()
  while [ $# -gt 0 ]; do
    case $1 in
      --bin) [ $# -ge 2 ] || die "--bin needs a path"; UPSTREAM_BIN=$(realpath "$2"); shift ;;
      --bin=*) UPSTREAM_BIN=$(realpath "${1#*=}") ;;
      -*) die "no option '$1': see the head of scripts/lab" ;;
      *) named+=("$1") ;;
    esac
    shift
  done
  [[ " ${named[*]} " = *" upstream "* ]] || { [ -z "$UPSTREAM_BIN" ] || die "--bin is for the group upstream"; return 0; }
  lacks=$(upstream_lacks)
  [ -n "$lacks" ] || return 0
  echo "SKIPPED lab group-upstream: $lacks"
  set -- "${named[@]}"
  named=()
  for group in "$@"; do [ "$group" = upstream ] || named+=("$group"); done
}

# build_extra_upstream FILE: writes an initramfs with it.
build_extra_upstream() {
  local tree=$LAB/extra-upstream
  need_packages iproute2 socat
  rm -rf "$tree"
  mkdir -p "$tree/bin" "$tree/lab/upstream"
  # Not among the modules that every machine loads.
  add_modules "$tree/lab" "$MACHINE_KERNEL" veth bridge ext4
  # Neither the network's program nor cloud-hypervisor takes the place of the one that is in bin already.
  add_program "$tree" "$(command -v ip)"
  mv "$tree/bin/ip" "$tree/lab/ip"
  add_program "$tree" /usr/bin/socat
  add_program "$tree" "$UPSTREAM_BIN"
  mv "$tree/bin/$(basename "$UPSTREAM_BIN")" "$tree/lab/upstream/cloud-hypervisor"
  pack "$tree" "$1"
}
