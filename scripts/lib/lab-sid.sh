# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# The lab with a kernel that this release of Debian does not have: LAB_KERNEL=7.2. A small Debian of the
# suite sid in a directory gives that kernel's packages, and is where its modules are built, with the
# compiler that built the kernel. Sourced by scripts/lab. Needs root.

SID=$CARGO_TARGET_DIR/sid-root
SID_KERNEL_META=linux-image-cloud-amd64
# What scripts/kvm-modules needs, and would install itself otherwise.
SID_PACKAGES=make,gcc,libc6-dev,flex,bison,bc,libelf-dev,libssl-dev,xz-utils,patch,kmod,dpkg-dev,dwarves,rsync

# packages_of_sid VARIANT PACKAGES DIR: what mmdebstrap makes of these packages of the suite sid, of which it checks the
# archive's signature.
packages_of_sid() {
  local valid
  # A mirror that is kept as it was on some day is one for this machine's apt, too.
  valid=$(apt-config dump Acquire::Check-Valid-Until)
  mmdebstrap --quiet --variant="$1" --aptopt="${valid:-Acquire::Check-Valid-Until \"true\";}" --include="$2" sid "$3" \
    "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian sid main"
}

# make_sid: that directory, once.
make_sid() {
  [ -f "$SID/complete" ] && return 0
  [ "$(id -u)" = 0 ] || die "LAB_KERNEL=$LAB_KERNEL needs root: it makes a Debian of the suite sid in $SID"
  say "making a Debian of the suite sid in $SID"
  rm -rf "$SID"
  packages_of_sid apt "$SID_PACKAGES" "$SID" || die "mmdebstrap cannot make it"
  chroot "$SID" apt-get update -q >/dev/null || die "apt-get update fails in $SID"
  touch "$SID/complete"
}

# in_sid COMMAND...: a command in there, which sees this checkout and the lab's directory where they are.
in_sid() {
  make_sid
  mkdir -p "$SID$ROOT" "$SID$LAB"
  # The mounts go with the command.
  unshare --mount bash -c '
    set -e
    mount -t proc proc "$0/proc"
    mount --bind /dev "$0/dev"
    mount --bind "$1" "$0$1"
    mount --bind "$2" "$0$2"
    target=$3
    root=$0
    shift 3
    exec chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C APT_UPDATED=1 CARGO_TARGET_DIR="$target" "$@"
  ' "$SID" "$ROOT" "$LAB" "$CARGO_TARGET_DIR" "$@"
}

# fetch_sid_kernel: as fetch_kernel, for a kernel whose files are in several packages.
fetch_sid_kernel() {
  local package version part
  [ -f "$LAB/kernel/version" ] && return 0
  package=$(in_sid apt-cache depends "$SID_KERNEL_META" | sed -n 's/.*Depends: \(linux-image-[0-9][^ ]*\).*/\1/p' | head -n 1)
  version=${package#linux-image-}
  case $version in
    "$LAB_KERNEL".*) ;;
    *) die "the suite sid has Linux '$version' now, not $LAB_KERNEL" ;;
  esac
  say "fetching $package"
  rm -rf "$LAB/kernel"
  mkdir -p "$LAB/kernel/root/usr/lib" "$LAB/kernel/debs"
  ln -s usr/lib "$LAB/kernel/root/lib"
  for part in base binary modules; do
    in_sid bash -c "cd '$LAB/kernel/debs' && apt-get download -q -o APT::Sandbox::User=root linux-$part-$version" >/dev/null || die "cannot download linux-$part-$version"
  done
  for part in "$LAB"/kernel/debs/*.deb; do dpkg-deb -x "$part" "$LAB/kernel/root"; done
  rm -rf "$LAB/kernel/debs"
  depmod -b "$LAB/kernel/root" "$version"
  cp "$LAB/kernel/root/lib/modules/$version/vmlinuz" "$LAB/kernel/vmlinuz"
  echo "$version" >"$LAB/kernel/version"
}
