# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# How packages and the toolchain are brought in. Nothing is installed without saying so, nothing at all with
# GODWIT_NO_INSTALL=1, and nothing that is there already. Sourced by common.sh.

RUSTUP_VERSION=1.28.2
# Of https://static.rust-lang.org/rustup/archive/$RUSTUP_VERSION/x86_64-unknown-linux-gnu/rustup-init.
RUSTUP_SHA256=20a06e644b0d9bd2fbdbfd52d42540bdde820ea7df86e92e533c073da0cdd43c
# rustup would bring in the toolchain of rust-toolchain.toml at the first call.
[ -z "${GODWIT_NO_INSTALL:-}" ] || export RUSTUP_AUTO_INSTALL=0
# Programs of these are looked for, too, which are not in every user's path.
case :$PATH: in *:/usr/sbin:*) ;; *) PATH=$PATH:/usr/sbin:/sbin ;; esac

# may_ask: sudo can ask for a password.
may_ask() { [ -z "${IN_BACKGROUND:-}" ] && { : </dev/tty; } 2>/dev/null; }

# can_install: whether packages can be installed, with the reason on standard output when they cannot.
can_install() {
  if [ -n "${GODWIT_NO_INSTALL:-}" ]; then
    echo "GODWIT_NO_INSTALL is set"
  elif ! command -v apt-get >/dev/null; then
    echo "there is no apt-get here"
  elif [ "$(id -u)" != 0 ] && ! command -v sudo >/dev/null; then
    echo "this user is not root, and there is no sudo"
  elif [ "$(id -u)" != 0 ] && ! may_ask && ! sudo -n true 2>/dev/null; then
    echo "this user is not root, and sudo wants a password, which cannot be typed here"
  else
    return 0
  fi
  return 1
}

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; elif command -v sudo >/dev/null; then sudo "$@"; else
    die "this step needs root: $*"
  fi
}

# have_package NAME: it is installed, or what these scripts want of it is there by another way.
have_package() {
  [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null || true)" != installed ] || return 0
  case $1 in
    acpica-tools) command -v iasl ;;
    binutils) command -v as && command -v objcopy ;;
    ca-certificates) [ -s /etc/ssl/certs/ca-certificates.crt ] || [ -s /etc/pki/tls/certs/ca-bundle.crt ] ;;
    debian-archive-keyring) [ -s /usr/share/keyrings/debian-archive-keyring.gpg ] ;;
    dpkg-dev) command -v dpkg-gencontrol ;;
    dwarves) command -v pahole ;;
    e2fsprogs) command -v mke2fs ;;
    groff-base) command -v groff ;;
    golang-go) command -v go && command -v gofmt ;;
    kmod) command -v modprobe ;;
    # No pipe: what writes to one that nothing reads fails, and the look with it.
    libc6-dev) cc -x c -o /dev/null - <<<'int main(void) { return 0; }' ;;
    libelf-dev | libssl-dev) return 1 ;;
    libelf1) ldconfig -p | grep -q 'libelf\.so\.1 ' ;;
    maven) command -v mvn && command -v java ;;
    qemu-utils) command -v qemu-img ;;
    systemd) command -v systemd-analyze && command -v systemd-sysusers ;;
    uidmap) command -v newuidmap ;;
    util-linux) command -v setpriv ;;
    xz-utils) command -v xz ;;
    # The others have the name of their program.
    *) command -v "$1" ;;
  esac >/dev/null 2>&1
}

# want_packages NAME...: installs the Debian packages that are missing. Where that cannot be it fails, with the
# reason in $lacking.
want_packages() {
  local missing=() name why
  lacking=
  for name in "$@"; do have_package "$name" || missing+=("$name"); done
  [ ${#missing[@]} = 0 ] && return 0
  if ! why=$(can_install); then
    lacking="${missing[*]} missing, and not installed: $why"
    return 1
  fi
  apt_update_once
  apt_install "${missing[@]}" && return 0
  lacking="apt-get cannot install ${missing[*]}"
  return 1
}

# need_packages NAME...: the same, for what a script cannot do without.
need_packages() { want_packages "$@" || die "$lacking; install them by hand"; }

# apt_install ARGUMENT...: with the options that all installations have. Nothing that is there is removed for it.
apt_install() {
  say "installing on this machine: $* (GODWIT_NO_INSTALL=1 forbids that)"
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends --no-remove \
    -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300 "$@" >/dev/null
}

apt_update_once() {
  [ -n "${APT_UPDATED:-}" ] && return 0
  if can_install >/dev/null; then
    as_root apt-get update -q -o DPkg::Lock::Timeout=300 -o APT::Update::Error-Mode=any >/dev/null || warn "apt-get update failed; going on with the lists at hand"
  fi
  export APT_UPDATED=1
}

# os_release NAME: a field of /etc/os-release.
os_release() { sed -n "s/^$1=\"\{0,1\}\([^\"]*\)\"\{0,1\}$/\1/p" /etc/os-release 2>/dev/null || true; }

# offers_qemu_10 [SUITE]: apt knows a QEMU that will do, in the suites that it takes from by itself or in that one.
offers_qemu_10() {
  local version
  version=$(apt-get install -s -q ${1:+-t "$1"} qemu-system-x86 2>/dev/null |
    sed -n 's/^Inst qemu-system-x86 .*(\([0-9]*:\)\{0,1\}\([0-9]*\)\..*/\2/p' | head -n 1 || true)
  [ "${version:-0}" -ge 10 ]
}

# want_qemu: QEMU 10 or newer: the 7.2 of Debian 12 corrupts flags in nested guests. Debian 12 has it in
# bookworm-backports, the one suite that is ever added to apt's sources, and to Debian 12's alone: with the
# packages of another release apt would replace the machine's. Where it cannot be had it fails, with the reason
# in $lacking.
want_qemu() {
  local major why suite=
  lacking=
  if command -v qemu-system-x86_64 >/dev/null; then
    major=$(qemu-system-x86_64 --version | sed -n 's/.*version \([0-9]*\)\..*/\1/p')
    [ "${major:-0}" -ge 10 ] && return 0
  fi
  lacking="QEMU 10 or newer is missing, and not installed"
  why=$(can_install) || { lacking+=": $why"; return 1; }
  apt_update_once
  if ! offers_qemu_10; then
    suite=bookworm-backports
    if [ "$(os_release ID) $(os_release VERSION_ID)" != "debian 12" ]; then
      lacking+=": the suites in apt's sources have none; install one by hand"
      return 1
    fi
    if ! offers_qemu_10 "$suite"; then
      say "adding $suite to apt's sources for QEMU 10: /etc/apt/sources.list.d/godwit-backports.list (GODWIT_NO_INSTALL=1 forbids that)"
      echo "deb http://deb.debian.org/debian $suite main" |
        as_root tee /etc/apt/sources.list.d/godwit-backports.list >/dev/null
      unset APT_UPDATED
      apt_update_once
    fi
  fi
  apt_install ${suite:+-t "$suite"} qemu-system-x86 && return 0
  lacking="apt-get cannot install QEMU 10"
  return 1
}

need_qemu() { want_qemu || die "$lacking"; }

# The Rust toolchain that rust-toolchain.toml names; rustup brings it in when it is missing. Where cargo and a C
# compiler work nothing else is asked for.
need_rust() {
  local why
  need_packages gcc libc6-dev
  case :$PATH: in *":${CARGO_HOME:-${HOME:-}/.cargo}/bin:"*) ;; *) PATH="${CARGO_HOME:-${HOME:-}/.cargo}/bin:$PATH" ;; esac
  command -v cargo >/dev/null || install_rust
  need_toolchain
  why=$(cd "$ROOT" && cargo --version 2>&1) ||
    die "cargo does not run: $why; rust-toolchain.toml says which version of Rust is needed"
}

# need_toolchain: says so when rustup is about to bring in a version of Rust. One that knows nothing of
# RUSTUP_AUTO_INSTALL would do it although it is forbidden.
need_toolchain() {
  local version
  command -v rustup >/dev/null && [ -z "${RUSTUP_TOOLCHAIN:-}" ] || return 0
  version=$(sed -n 's/^channel = "\(.*\)"/\1/p' "$ROOT/rust-toolchain.toml")
  ! rustup toolchain list 2>/dev/null | grep -q "^$version-" || return 0
  [ -z "${GODWIT_NO_INSTALL:-}" ] || die "Rust $version is missing, and GODWIT_NO_INSTALL is set"
  say "rustup installs Rust $version (GODWIT_NO_INSTALL=1 forbids that)"
}

# install_rust: rustup, of a version and with a checksum that are written down above, without the profile.
install_rust() {
  local place=${CARGO_HOME:-${HOME:-}/.cargo} file
  [ -z "${GODWIT_NO_INSTALL:-}" ] || die "cargo is missing, and GODWIT_NO_INSTALL is set; rust-toolchain.toml says which version of Rust is needed"
  [ "$(uname -m)" = x86_64 ] || die "cargo is missing; install Rust by hand: this is for x86-64 only"
  need_packages ca-certificates curl
  say "installing Rust with rustup $RUSTUP_VERSION in $place and ${RUSTUP_HOME:-${HOME:-}/.rustup} (GODWIT_NO_INSTALL=1 forbids that)"
  mkdir -p "$CARGO_TARGET_DIR"
  file=$(mktemp "$CARGO_TARGET_DIR/rustup-init.XXXXXX")
  curl --proto '=https' --tlsv1.2 -sSf -o "$file" \
    "https://static.rust-lang.org/rustup/archive/$RUSTUP_VERSION/x86_64-unknown-linux-gnu/rustup-init" ||
    { rm -f "$file"; die "rustup cannot be downloaded"; }
  echo "$RUSTUP_SHA256  $file" | sha256sum --check --quiet - ||
    { rm -f "$file"; die "what was downloaded is not rustup $RUSTUP_VERSION: its checksum is another one"; }
  chmod +x "$file"
  # Not in a folder that may be mounted without execution, as /tmp may.
  "$file" -y -q --no-modify-path --profile minimal --default-toolchain none ||
    { rm -f "$file"; die "rustup cannot be installed"; }
  rm -f "$file"
}
