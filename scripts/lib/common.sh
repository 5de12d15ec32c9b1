# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Shared by the scripts beside this folder: where things are, how packages and the toolchain are
# brought in, how results are counted. Sourced, never run.

set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export ROOT
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$ROOT/target}"

say() { printf '== %s\n' "$*"; }
warn() { printf '!! %s\n' "$*" >&2; }
die() {
  warn "$*"
  exit 1
}

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; elif command -v sudo >/dev/null; then sudo "$@"; else
    die "this step needs root: $*"
  fi
}

# need_packages NAME...: installs the Debian packages that are missing.
need_packages() {
  local missing=() name
  for name in "$@"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$name" 2>/dev/null || true)" = installed ] ||
      missing+=("$name")
  done
  [ ${#missing[@]} = 0 ] && return 0
  say "installing ${missing[*]}"
  apt_update_once
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
    -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300 "${missing[@]}" >/dev/null
}

apt_update_once() {
  [ -n "${APT_UPDATED:-}" ] && return 0
  as_root apt-get update -q -o DPkg::Lock::Timeout=300 >/dev/null || warn "apt-get update failed; going on with the lists at hand"
  export APT_UPDATED=1
}

# QEMU 10 comes from bookworm-backports: the 7.2 of plain bookworm corrupts flags in nested guests.
need_qemu() {
  if command -v qemu-system-x86_64 >/dev/null; then
    local major
    major=$(qemu-system-x86_64 --version | sed -n 's/.*version \([0-9]*\)\..*/\1/p')
    [ "${major:-0}" -ge 10 ] && return 0
  fi
  if ! grep -rqs 'bookworm-backports' /etc/apt/sources.list /etc/apt/sources.list.d; then
    say "adding the suite bookworm-backports for QEMU 10"
    echo 'deb http://deb.debian.org/debian bookworm-backports main' |
      as_root tee /etc/apt/sources.list.d/godwit-backports.list >/dev/null
    unset APT_UPDATED
  fi
  apt_update_once
  say "installing QEMU 10"
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
    -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300 -t bookworm-backports qemu-system-x86 >/dev/null
}

# The Rust toolchain that rust-toolchain.toml names; rustup brings it in when it is missing.
need_rust() {
  need_packages gcc libc6-dev ca-certificates curl
  [ -f "$HOME/.cargo/env" ] && . "$HOME/.cargo/env"
  if ! command -v cargo >/dev/null; then
    say "installing Rust with rustup"
    curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs |
      sh -s -- -y --profile minimal --default-toolchain none >/dev/null
    . "$HOME/.cargo/env"
  fi
  (cd "$ROOT" && cargo --version >/dev/null) || die "cargo does not run; see the message above"
}

build_binaries() {
  say "building cloud-hypervisor, ch-remote and prezero-pool (release)"
  # The same words as in tests/native/harness/programs.rs.
  (cd "$ROOT" && cargo build --release --quiet --locked --package godwit --bins)
}

build_guest() {
  say "building the test guest"
  (cd "$ROOT/tests/guest" && CARGO_TARGET_DIR="$CARGO_TARGET_DIR/guest" \
    cargo build --release --quiet --locked)
}

# have_kvm: whether /dev/kvm can be used, with the reason on standard output when it cannot.
have_kvm() {
  if [ ! -e /dev/kvm ]; then
    echo "no /dev/kvm on this machine"
    return 1
  fi
  if [ ! -r /dev/kvm ] || [ ! -w /dev/kvm ]; then
    echo "/dev/kvm may not be opened by this user"
    return 1
  fi
}
