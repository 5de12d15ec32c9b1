# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Type information (BTF) of the modules of scripts/kvm-modules, for kernels whose own modules have it: BPF programs
# that name types of KVM need it. Sourced by that script.

# has_btf FILE: a module that is not compressed, or a kernel, has type information.
has_btf() { LC_ALL=C readelf -SW "$1" 2>/dev/null | grep -F ' .BTF ' >/dev/null; }

# plain_module FILE: the module, not compressed, on standard output.
plain_module() {
  case $1 in
    *.xz) xz -dc "$1" ;;
    *.zst) zstd -qdc "$1" ;;
    *) cat "$1" ;;
  esac
}

# prepare_btf: puts the kernel's own types into the source's folder, where its build looks for them; sets BTF to yes, or
# to no where modules of this kernel have none, or where its image does not give them.
prepare_btf() {
  local original
  BTF=no
  rm -f "$WORK/linux/vmlinux"
  original=$(find "$WORK/files" -name 'kvm.ko*' -print -quit)
  [ -n "$original" ] || return 0
  # What cannot be read does not say that there are none.
  plain_module "$original" >"$WORK/original.ko" || die "the kernel's own $(basename "$original") cannot be unpacked"
  readelf -h "$WORK/original.ko" >/dev/null || die "the kernel's own $(basename "$original") cannot be read"
  if ! has_btf "$WORK/original.ko"; then
    rm -f "$WORK/original.ko"
    return 0
  fi
  rm -f "$WORK/original.ko"
  if [ -f "$WORK/files/vmlinuz" ] && "$WORK/linux/scripts/extract-vmlinux" "$WORK/files/vmlinuz" >"$WORK/vmlinux.new" 2>/dev/null &&
    has_btf "$WORK/vmlinux.new"; then
    mv "$WORK/vmlinux.new" "$WORK/linux/vmlinux"
    BTF=yes
  else
    rm -f "$WORK/vmlinux.new"
    say "the modules will have no type information (BTF): the image of $VERSION does not give the kernel's own"
  fi
}

# make_modules: the modules, with types if that is to be. Types are no reason to have none: where pahole of this machine
# does not make them, modules are built without.
make_modules() {
  if [ "$BTF" = yes ]; then
    if kmake M=arch/x86/kvm modules >>"$WORK/build.log" 2>&1; then return 0; fi
    warn "the modules do not build with type information (BTF): once more without"
    BTF=no
    rm -f "$WORK/linux/vmlinux"
    say "building ${MODULES[*]} without it"
  fi
  # Debug information takes most of the time; only types are made from it.
  kmake M=arch/x86/kvm KCFLAGS=-g0 modules >>"$WORK/build.log" 2>&1
}

# take_module NAME: a module from the build, without what only its type information was made from.
take_module() {
  cp "$WORK/linux/arch/x86/kvm/$1.ko" "$OUT/$1.ko"
  [ "$BTF" = yes ] || return 0
  strip --strip-debug "$OUT/$1.ko"
  has_btf "$OUT/$1.ko" || warn "$1 has no type information (BTF), as the kernel's own has; $WORK/build.log may say why"
}
