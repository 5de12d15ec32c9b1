# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Signatures of the modules of scripts/kvm-modules: with which key, whether this machine takes modules without one,
# and how they are made. Sourced by that script. Paths are below $SYSROOT, which is empty but for another root.

# conf_value NAME: a setting of /etc/godwit-kvm.conf, the last one of that name.
conf_value() {
  sed -n "s/^$1=[\"']\{0,1\}\([^\"']*\)[\"']\{0,1\}[[:space:]]*$/\1/p" "$SYSROOT/etc/godwit-kvm.conf" 2>/dev/null | tail -n 1 || true
}

# find_key: sets KEY and CERT: from the environment, the configuration, or DKMS's own; both empty where there are none.
find_key() {
  KEY=${SIGN_KEY:-$(conf_value SIGN_KEY)}
  CERT=${SIGN_CERT:-$(conf_value SIGN_CERT)}
  if [ "$KEY" = none ]; then
    KEY='' CERT=''
  elif [ -z "$KEY$CERT" ]; then
    KEY=$SYSROOT/var/lib/dkms/mok.key CERT=$SYSROOT/var/lib/dkms/mok.pub
    [ -e "$KEY" ] && [ -e "$CERT" ] || KEY='' CERT=''
  elif [ -z "$KEY" ] || [ -z "$CERT" ]; then
    die "a key needs its certificate: set both SIGN_KEY and SIGN_CERT, or neither"
  else
    # sign-file would take some names for those of a token.
    [[ $KEY = /* && $CERT = /* ]] || die "SIGN_KEY and SIGN_CERT have to be whole paths"
    as_root test -f "$KEY" || die "the key $KEY is missing"
    [ -f "$CERT" ] || die "the certificate $CERT is missing"
  fi
}

# efi_byte NAME: the value of an EFI variable of one byte; nothing where there is none.
efi_byte() { od -An -v -tu1 -j4 -N1 "$SYSROOT/sys/firmware/efi/efivars/$1" 2>/dev/null | tr -d ' ' || true; }

# is_secure_boot: Secure Boot is on, and shim was not told to check no signatures; the kernel goes by both.
is_secure_boot() {
  [ "$(efi_byte SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c)" = 1 ] &&
    [ "$(efi_byte MokSBStateRT-605dab50-e046-4300-abb6-3dd810dd8b23)" != 1 ]
}

# wants_signatures: whether this machine's kernel refuses modules without a signature, with the reason on standard output.
wants_signatures() {
  if grep -qE '\[(integrity|confidentiality)\]' "$SYSROOT/sys/kernel/security/lockdown" 2>/dev/null; then
    echo "its kernel is locked down"
  elif grep -qx Y "$SYSROOT/sys/module/module/parameters/sig_enforce" 2>/dev/null; then
    echo "its kernel enforces signatures of modules"
  elif is_secure_boot; then
    echo "Secure Boot is on"
  else
    return 1
  fi
}

# key_advice: how a machine gets a key that it trusts. A kernel reads those that mokutil enrols with Secure Boot only.
key_advice() {
  local enrol="run 'mokutil --import CERTIFICATE', and confirm it at the next boot"
  is_secure_boot || enrol="bring CERTIFICATE into the firmware's db: without Secure Boot this kernel takes no keys that mokutil enrols"
  echo "make one (openssl req -new -x509 -newkey rsa:2048 -nodes -days 36500 -subj '/CN=KVM modules of this machine' \
-keyout KEY -outform DER -out CERTIFICATE), name both files as SIGN_KEY and SIGN_CERT in /etc/godwit-kvm.conf, and $enrol"
}

# check_signing: ends where modules would be installed that this machine refuses at its next boot, which would leave it
# without any KVM: modprobe prefers them to the kernel's own.
check_signing() {
  local why said der only
  find_key
  why=$(wants_signatures) || return 0
  only="this machine takes signed modules only ($why)"
  [ -n "$KEY" ] || die "$only, and there is no key to sign with: $(key_advice)"
  # Only what says that it is trusted counts: a key that DKMS has made is enrolled by nothing but its owner.
  command -v mokutil >/dev/null || die "$only, and only mokutil can tell whether it trusts $CERT: install mokutil"
  need_packages openssl
  der=$(mktemp)
  as_der "$CERT" >"$der" || { rm -f "$der"; die "$CERT is no certificate"; }
  said=$(LC_ALL=C mokutil --test-key "$der" 2>&1 || true)
  rm -f "$der"
  said=${said//$der/it}
  case $said in
    *"is already in db"* | *"is already in the built-in trusted keyring"*) ;;
    *"is already enrolled"*)
      is_secure_boot || die "$only, and without Secure Boot it takes no keys that mokutil has enrolled, as $CERT is: switch Secure Boot on, or bring it into the firmware's db" ;;
    *"is already in the enrollment request"*)
      die "$only, and does not trust $CERT yet: reboot, and confirm it there" ;;
    *"is not enrolled"*)
      if is_secure_boot; then
        die "$only, and does not trust $CERT (mokutil: $said): run 'mokutil --import $CERT', reboot, and confirm it there"
      else
        die "$only, and does not trust $CERT (mokutil: $said): bring it into the firmware's db, as without Secure Boot no key counts that mokutil enrols"
      fi ;;
    *) die "$only, and mokutil does not say that it trusts $CERT, but: $said" ;;
  esac
}

# sign_file_of: the program that signs, of this kernel: from the build, or from Debian's packages.
sign_file_of() {
  local file
  for file in "$OUT/sign-file" "$SYSROOT/lib/modules/$VERSION/build/scripts/sign-file" "$SYSROOT/usr/lib/linux-kbuild-$SERIES"*/scripts/sign-file; do
    if [ -x "$file" ]; then echo "$file"; return 0; fi
  done
  return 1
}

# signature_hash: the algorithm that this kernel's own modules are signed with.
signature_hash() {
  local hash
  hash=$(cat "$OUT/build/files/config" "$SYSROOT/boot/config-$VERSION" 2>/dev/null |
    sed -n 's/^CONFIG_MODULE_SIG_HASH="\(.*\)"$/\1/p' | head -n 1 || true)
  echo "${hash:-sha256}"
}

# form_of CERT: DER or PEM.
form_of() { if grep -q 'BEGIN CERTIFICATE' "$1"; then echo PEM; else echo DER; fi; }

# as_der CERT: the certificate as mokutil takes it.
as_der() { openssl x509 -in "$1" -inform "$(form_of "$1")" -outform DER; }

# certified_name CERT: the name that modinfo gives for a signature: that of who issued the certificate, mostly itself.
certified_name() {
  openssl x509 -in "$1" -inform "$(form_of "$1")" -noout -issuer -nameopt multiline,utf8,-esc_msb | sed -n 's/^ *commonName *= //p' | tail -n 1
}

# sign_modules FOLDER: signs the modules there, if there is a key, and reads the signatures again.
sign_modules() {
  local tool hash name module signer
  if [ -z "$KEY" ]; then
    say "not signed, as there is no key: a machine with Secure Boot would refuse these modules"
    return 0
  fi
  need_packages openssl
  tool=$(sign_file_of) || die "there is no sign-file for $VERSION: build first, or install linux-kbuild-$SERIES"
  hash=$(signature_hash)
  name=$(certified_name "$CERT") || die "$CERT is no certificate"
  [ -n "$name" ] || die "the certificate $CERT has no common name"
  for module in "${MODULES[@]}"; do
    as_root "$tool" "$hash" "$KEY" "$CERT" "$1/$module.ko" || die "$module cannot be signed with $KEY and $CERT"
    signer=$(modinfo -F signer "$1/$module.ko")
    [ "$signer" = "$name" ] || die "$module is signed by '$signer' now, not by '$name'"
  done
  say "signed by '$name' ($hash)"
}
