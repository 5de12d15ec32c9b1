# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Shared by the scripts alongside this folder: where things are, what is built, how they speak and end.
# Sourced, never run.

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

. "$ROOT/scripts/lib/children.sh"
. "$ROOT/scripts/lib/install.sh"

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
