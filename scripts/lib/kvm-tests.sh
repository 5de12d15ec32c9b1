# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Tests of the package godwit-kvm below another root, and of how scripts/kvm-modules signs. apt, systemd and the build are
# made up; modules are small ones, and keys and signatures real. Sourced by scripts-tests.

KERNEL=6.12.34+deb12-cloud-amd64
DEBIAN=$SCRIPTS/../packaging/debian

# host: a root where the package and a kernel are installed, and systemd runs. Its build is what $CASE/build says.
host() {
  HOST=$CASE/host
  STATE=$HOST/var/lib/godwit-kvm
  PATH=$CASE/bin:/usr/sbin:/usr/bin:/sbin:/bin
  mkdir -p "$HOST"/{usr/sbin,etc,proc,run/systemd/system,usr/share/godwit-kvm/scripts,usr/share/godwit-kvm/kernel/patches/1} \
    "$HOST/lib/modules/$KERNEL/kernel"
  cp "$DEBIAN/godwit-kvm" "$HOST/usr/sbin/"
  echo 'flags : fpu svm' >"$HOST/proc/cpuinfo"
  echo patch | tee "$HOST"/usr/share/godwit-kvm/kernel/patches/1/{kernels,1.patch} >/dev/null
  export GODWIT_KVM_ROOT=$HOST GODWIT_KVM_WAIT_S=0
  fake systemctl && fake apt-get && fake depmod && fake uname "echo $KERNEL"
  # What a build writes and ends with; it installs what it has built.
  : >"$CASE/build"
  cat >"$HOST/usr/share/godwit-kvm/scripts/kvm-modules" <<END
echo "kvm-modules \$*" >>"$CASE/calls"
case \$1 in
  # As the real one, it has its own look at which package the kernel is from.
  build) mkdir -p "\$5/build" && { dpkg-query -W none >"\$5/package" 2>/dev/null || true; } && . "$CASE/build" ;;
  install)
    while [ "\$1" != --out ]; do shift; done
    place=$HOST/lib/modules/\$(basename "\$2")/updates/godwit
    mkdir -p "\$place" && touch "\$place/kvm.ko" && { cp "\$2/package" "\$place/" 2>/dev/null || true; } && echo "== signed by 'me'"
    ;;
  loaded) [ -e "$CASE/is-loaded" ] ;;
  key) [ ! -e "$CASE/no-key" ] || { echo '!! no key here' >&2; exit 1; } ;;
esac
END
}
godwit_kvm() { "$HOST/usr/sbin/godwit-kvm" "$@"; }
hook() { sh "$DEBIAN/godwit-kvm.kernel-$1" "$2" "/boot/vmlinuz-$2" >"$CASE/hook.out"; }
file_has() { grep -qF -- "$2" "$1" || { echo "not in $1: $2"; cat "$1"; return 1; }; }
absent() { [ ! -e "$1" ] || { echo "there is $1"; return 1; }; }

test_the_hook_of_a_kernel_notes_it_and_starts_a_build() {
  host
  DEB_MAINT_PARAMS="'configure' ''" hook postinst "$KERNEL" || return 1
  # debconf may read its standard output.
  [ -f "$STATE/wanted/$KERNEL" ] && [ ! -s "$CASE/hook.out" ] && called '^systemctl --no-block start godwit-kvm-build.service$' &&
    not_called kvm-modules && not_called apt-get
}
test_the_hook_of_a_kernel_never_fails() {
  host
  local version
  for version in '' . .. ../../etc "6.12/../../x" "$KERNEL"; do
    hook postinst "$version" && hook postrm "$version" || { echo "fails for '$version'"; return 1; }
  done
  # What is no version names no file, here or elsewhere.
  mkdir -p "$HOST/lib/x/updates/godwit" && hook postinst ../x && hook postrm ../x || return 1
  absent "$STATE/x" && [ -d "$HOST/lib/x/updates/godwit" ] && [ "$(ls "$STATE/wanted")" = '' ] || return 1
  fake systemctl 'exit 1' && hook postinst "$KERNEL" && [ -f "$STATE/wanted/$KERNEL" ] || return 1
  # A place that cannot be written to, for root neither.
  rm -r "$STATE" && touch "$STATE" && hook postinst "$KERNEL" && hook postrm "$KERNEL" || return 1
  printf '#!/bin/sh\nexit 1\n' >"$HOST/usr/sbin/godwit-kvm" && hook postinst "$KERNEL" && hook postrm "$KERNEL" || return 1
  # The package is gone, and its configuration, as which hooks count, is not.
  rm "$HOST/usr/sbin/godwit-kvm" && hook postinst "$KERNEL" && hook postrm "$KERNEL"
}
test_the_hook_of_a_kernel_does_nothing_where_none_is_installed_or_removed() {
  host
  godwit_kvm install || return 1
  DEB_MAINT_PARAMS="'abort-upgrade' '1'" hook postinst "$KERNEL" && absent "$STATE/wanted/$KERNEL" || return 1
  DEB_MAINT_PARAMS="'upgrade' '1'" hook postrm "$KERNEL" && [ -e "$HOST/lib/modules/$KERNEL/updates/godwit/kvm.ko" ] || return 1
  echo BUILD=no >"$HOST/etc/godwit-kvm.conf"
  hook postinst "$KERNEL" && absent "$STATE/wanted/$KERNEL" && not_called systemctl
}
test_what_was_made_for_a_kernel_goes_with_it() {
  host
  godwit_kvm update && rmdir "$HOST/lib/modules/$KERNEL/kernel" || return 1
  DEB_MAINT_PARAMS="'remove'" hook postrm "$KERNEL" && absent "$HOST/lib/modules/$KERNEL" && absent "$STATE/$KERNEL.ok" && [ -d "$HOST/lib/modules" ]
}

test_modules_for_another_package_of_the_kernel_are_not_kept() {
  host
  local installed=$HOST/lib/modules/$KERNEL/updates/godwit/kvm.ko
  fake dpkg-query 'echo 6.12.34-1' && godwit_kvm update && file_has "$STATE/$KERNEL.ok" "kernel: 6.12.34-1" || return 1
  # The same package once more is no reason, another one is, whatever becomes of the next build.
  hook postinst "$KERNEL" && [ -e "$installed" ] && godwit_kvm run || return 1
  fake dpkg-query 'echo 6.12.34-2' && echo 'exit 1' >"$CASE/build" && hook postinst "$KERNEL" && absent "$installed" && called "^depmod .*$KERNEL" || return 1
  ! godwit_kvm run && absent "$installed" || return 1
  # So it is where nothing is built.
  : >"$CASE/build" && godwit_kvm update && [ -e "$installed" ] && echo BUILD=no >"$HOST/etc/godwit-kvm.conf" &&
    fake dpkg-query 'echo 6.12.34-3' && hook postinst "$KERNEL" && absent "$installed"
}
test_removal_takes_modules_whose_note_is_gone() {
  host
  godwit_kvm update && godwit_kvm want "$KERNEL" && absent "$STATE/$KERNEL.ok" && godwit_kvm remove &&
    absent "$HOST/lib/modules/$KERNEL/updates" && absent "$STATE" && [ -d "$HOST/lib/modules/$KERNEL/kernel" ]
}

test_a_build_that_works_is_noted_and_cleaned_up() {
  host
  godwit_kvm want "$KERNEL" && godwit_kvm run || return 1
  file_has "$STATE/$KERNEL.ok" "signed by 'me'" && absent "$STATE/wanted/$KERNEL" && absent "$STATE/$KERNEL.failed" &&
    [ -z "$(ls "$HOST/var/cache/godwit-kvm")" ] || return 1
  # It waits for apt first, which may be what installs this kernel.
  [ "$(grep -nE 'DPkg::Lock::Timeout=[0-9]+ check$' "$CASE/calls" | cut -d: -f1)" -lt "$(grep -n '^kvm-modules build' "$CASE/calls" | cut -d: -f1)" ] &&
    not_called '^kvm-modules load$' && not_called 'apt-get.*install'
}
test_a_build_that_fails_is_an_error_of_the_journal_and_the_next_one_is_made() {
  host
  local other=6.12.99-amd64
  mkdir -p "$HOST/lib/modules/$other/kernel"
  echo '[ $3 != '"$KERNEL"' ] || { echo "== building"; echo "!! the patches do not apply" >&2; echo "to it"; exit 1; }' >"$CASE/build"
  godwit_kvm want "$KERNEL" && godwit_kvm want "$other" || return 1
  : >"$CASE/err"
  ! JOURNAL_STREAM=$(stat -c %d:%i "$CASE/err") godwit_kvm run 2>>"$CASE/err" || { echo "it does not fail"; return 1; }
  file_has "$CASE/err" "<3>godwit-kvm: no KVM with userfault exits was built for Linux $KERNEL: the patches do not apply to it" &&
    file_has "$STATE/$KERNEL.failed" "the patches do not apply to it" && [ -e "$STATE/$other.ok" ] &&
    [ "$(grep -c '^kvm-modules build' "$CASE/calls")" = 2 ] && [ -z "$(ls "$STATE/wanted" "$HOST/var/cache/godwit-kvm" | grep -v :)" ]
}
test_what_may_be_over_by_itself_is_tried_again_with_a_limit() {
  host
  echo 'echo "!! cannot download it" >&2; exit 75' >"$CASE/build"
  godwit_kvm want "$KERNEL" && ! godwit_kvm run || return 1
  [ "$(grep -c '^kvm-modules build' "$CASE/calls")" = 5 ] && file_has "$STATE/$KERNEL.failed" "cannot download it" || return 1
  rm "$CASE/calls"
  echo "[ \$(grep -c '^kvm-modules build' '$CASE/calls') = 2 ] || exit 75" >"$CASE/build"
  godwit_kvm update && called '^apt-get -q -o APT::Update::Error-Mode=any update$' && [ -e "$STATE/$KERNEL.ok" ] && absent "$STATE/$KERNEL.failed"
}
test_nothing_is_built_without_space_or_for_a_kernel_that_would_refuse_it() {
  host
  echo 'SPACE_MIB=999999999' >"$HOST/etc/godwit-kvm.conf"
  ! godwit_kvm update || return 1
  file_has "$STATE/$KERNEL.failed" "999999999 MiB" || return 1
  rm "$HOST/etc/godwit-kvm.conf" && touch "$CASE/no-key"
  ! godwit_kvm update || return 1
  file_has "$STATE/$KERNEL.failed" "no key here" && not_called '^kvm-modules build'
}
test_one_build_is_made_at_a_time() {
  host
  local pid
  mkdir -p "$STATE"
  exec 8>"$STATE/lock" && flock 8
  godwit_kvm update 8>&- >"$CASE/waits" &
  pid=$!
  until_true grep -q waiting "$CASE/waits" && not_called '^kvm-modules' || return 1
  # The other one is done.
  mkdir -p "$HOST/lib/modules/$KERNEL/updates/godwit" && touch "$HOST/lib/modules/$KERNEL/updates/godwit/kvm.ko" && echo new >"$STATE/$KERNEL.ok" &&
    : >"$CASE/calls" && exec 8>&- && wait "$pid" && not_called '^kvm-modules' || return 1
  godwit_kvm update && called '^kvm-modules build'
}
test_verbs_by_hand_wait_for_a_build() {
  host
  local pid verb
  for verb in build install load restore run; do
    # The service has something to do.
    [ $verb != run ] || godwit_kvm want "$KERNEL" 8>&- || return 1
    rm -f "$CASE/calls" && mkdir -p "$STATE" && exec 8>"$STATE/lock" && flock 8 || return 1
    godwit_kvm "$verb" 8>&- >"$CASE/waits" &
    pid=$!
    until_true grep -q waiting "$CASE/waits" && not_called '^kvm-modules' || return 1
    exec 8>&- && wait "$pid" && called "^kvm-modules ${verb/run/build}" || return 1
  done
  # A file in place of the folder: that is no build under way.
  rm -r "$STATE" && touch "$STATE" && ! godwit_kvm run 2>"$CASE/err" && file_has "$CASE/err" "cannot be opened" &&
    ! grep "under way" "$CASE/err"
}
test_a_request_that_comes_during_a_build_is_not_lost() {
  host
  local want="$HOST/usr/sbin/godwit-kvm want $KERNEL" ending
  fake dpkg-query "cat $CASE/package"
  for ending in true 'exit 1'; do
    rm -rf "$STATE" "$CASE/calls" "$CASE/once" "$CASE/sums" && echo 6.12.34-1 >"$CASE/package"
    # apt installs another package of the kernel, and another one of this, during the first build.
    echo "[ -e '$CASE/once' ] || { touch '$CASE/once'; echo 6.12.34-2 >'$CASE/package'
      echo newer >>'$HOST/usr/share/godwit-kvm/kernel/patches/1/1.patch'; $want; $ending; }" >"$CASE/build"
    godwit_kvm want "$KERNEL" && godwit_kvm run || { echo "fails after '$ending'"; return 1; }
    [ "$(grep -c '^kvm-modules build' "$CASE/calls")" = 2 ] && [ "$(grep -c '^kvm-modules install' "$CASE/calls")" = 1 ] || return 1
    file_has "$STATE/$KERNEL.ok" 'kernel: 6.12.34-2' && [ -z "$(ls -A "$STATE/wanted")" ] && absent "$STATE/$KERNEL.failed" || return 1
    file_has "$HOST/lib/modules/$KERNEL/updates/godwit/package" 6.12.34-2 || return 1
    file_has "$STATE/$KERNEL.ok" "patches: $(cat "$HOST"/usr/share/godwit-kvm/kernel/patches/1/{kernels,1.patch} | sha256sum | cut -d' ' -f1)" || return 1
  done
  # The same package and patches: who asks again is not told of what was begun before.
  rm -f "$CASE/once" "$CASE/calls" && echo "[ -e '$CASE/once' ] || { touch '$CASE/once'; $want; }" >"$CASE/build"
  godwit_kvm want "$KERNEL" && godwit_kvm run && [ "$(grep -c '^kvm-modules build' "$CASE/calls")" = 2 ] || return 1
  # A package that changes without a request, in an update by hand; and one that is another one at each look.
  rm -f "$CASE/once" "$CASE/calls" && echo "[ -e '$CASE/once' ] || { touch '$CASE/once'; echo 6.12.34-3 >'$CASE/package'; }" >"$CASE/build"
  godwit_kvm update && [ "$(grep -c '^kvm-modules build' "$CASE/calls")" = 2 ] && file_has "$STATE/$KERNEL.ok" 'kernel: 6.12.34-3' &&
    [ -z "$(ls -A "$STATE/wanted")" ] || return 1
  rm "$CASE/calls" && echo "cat /proc/sys/kernel/random/uuid >'$CASE/package'" >"$CASE/build"
  ! godwit_kvm update && [ "$(grep -c '^kvm-modules build' "$CASE/calls")" = 3 ] && absent "$STATE/$KERNEL.ok"
}
test_what_was_built_for_another_package_than_dpkg_names_is_not_kept() {
  host
  fake dpkg-query 'echo 6.12.34-2' && echo 'echo 6.12.34-1 >"$5/package"' >"$CASE/build"
  ! godwit_kvm update && file_has "$STATE/$KERNEL.failed" "built for 6.12.34-1, and the kernel is 6.12.34-2" &&
    absent "$HOST/lib/modules/$KERNEL/updates"
}
test_modules_without_a_note_are_outdated_all_the_same() {
  host
  local installed=$HOST/lib/modules/$KERNEL/updates/godwit/kvm.ko
  # A build that fails takes the note of the one before, not its modules, and says so.
  fake dpkg-query 'echo 6.12.34-1' && godwit_kvm update && echo 'exit 1' >"$CASE/build" || return 1
  ! godwit_kvm update 2>"$CASE/err" && [ -e "$installed" ] && file_has "$CASE/err" "before stay" && ! grep "its own KVM" "$CASE/err" || return 1
  fake dpkg-query 'echo 6.12.34-2' && hook postinst "$KERNEL" && absent "$installed" || return 1
  ! godwit_kvm update 2>"$CASE/err" && file_has "$CASE/err" "its own KVM" || return 1
  # By hand.
  : >"$CASE/build" && godwit_kvm build && godwit_kvm install && fake dpkg-query 'echo 6.12.34-3' && hook postinst "$KERNEL" && absent "$installed" || return 1
  # Which package they are for is not known; and without a hook.
  godwit_kvm update && hook postinst "$KERNEL" && [ -e "$installed" ] && rm "${installed%/*}/package" && hook postinst "$KERNEL" && absent "$installed" || return 1
  godwit_kvm update && fake dpkg-query 'echo 6.12.34-4' && ! godwit_kvm check && absent "$installed" && [ -e "$STATE/wanted/$KERNEL" ]
}
test_an_interrupted_removal_leaves_no_index_of_what_is_gone() {
  host
  local index=$HOST/lib/modules/$KERNEL/modules.dep verb
  for verb in check status update; do
    rm -f "$CASE/calls" && echo 'updates/godwit/kvm.ko: kernel/x.ko' >"$index"
    rm -rf "$HOST/lib/modules/$KERNEL/updates"
    godwit_kvm "$verb" >"$CASE/out" 2>&1
    called "^depmod -b $HOST $KERNEL" && file_has "$CASE/out" interrupted || { echo "$verb"; return 1; }
  done
  # The other way round, for a kernel that does not run, and nothing where all is well.
  fake uname 'echo 6.12.99-amd64' && echo 'kernel/x.ko:' >"$index" && rm "$CASE/calls" && godwit_kvm check 2>/dev/null
  called "^depmod -b $HOST $KERNEL" || return 1
  echo 'updates/godwit/kvm.ko: kernel/x.ko' >>"$index" && rm "$CASE/calls" && godwit_kvm check 2>/dev/null
  not_called depmod
}
test_another_package_of_a_kernel_leaves_a_kernel_with_an_index() {
  host
  godwit_kvm update && rm "$CASE/calls" && DEB_MAINT_PARAMS=purge hook postrm "$KERNEL" && called "^depmod -b $HOST $KERNEL" &&
    absent "$HOST/lib/modules/$KERNEL/updates"
}
test_a_request_ends_after_its_result_is_there() {
  host
  # A result that cannot be written.
  mkdir -p "$STATE/$KERNEL.ok.new" && echo "mkdir -p '$STATE/$KERNEL.ok.new'" >"$CASE/build" || return 1
  godwit_kvm want "$KERNEL" && ! godwit_kvm update 2>"$CASE/err" && [ -e "$STATE/wanted/$KERNEL" ] && absent "$STATE/$KERNEL.ok" &&
    file_has "$CASE/err" "cannot be written" || return 1
  # It is tried once, and what no run has finished is removed, as what is no request is left alone.
  touch "$STATE/x.failed.new" && mkdir "$STATE/wanted/x" && touch "$STATE/wanted/x/$KERNEL" "$STATE/wanted/no-version" && rm "$CASE/calls"
  ! timeout 20 "$HOST/usr/sbin/godwit-kvm" run 2>"$CASE/err" && [ "$(grep -c '^kvm-modules build' "$CASE/calls")" = 1 ] &&
    absent "$STATE/x.failed.new" && absent "$STATE/wanted/$KERNEL"
}
test_a_request_that_was_taken_and_not_ended_counts() {
  host
  mkdir -p "$STATE/wanted" && echo 1 >"$STATE/$KERNEL.wanted.new" && touch "$STATE/wanted/.new" "$STATE/wanted/.old" &&
    touch -d '1 hour ago' "$STATE/wanted/.old" || return 1
  godwit_kvm run && called '^kvm-modules build' && absent "$STATE/$KERNEL.wanted.new" && [ "$(ls -A "$STATE/wanted")" = .new ]
}
test_a_kernel_that_is_removed_during_its_build_leaves_nothing() {
  host
  # After the installation, too, which makes its folder anew.
  echo "trap 'mkdir -p $HOST/lib/modules/$KERNEL/updates/godwit' EXIT; rm -r '$HOST/lib/modules/$KERNEL'; '$HOST/usr/sbin/godwit-kvm' forget '$KERNEL'" >"$CASE/build"
  godwit_kvm want "$KERNEL" && ! godwit_kvm run && absent "$HOST/lib/modules/$KERNEL" && absent "$STATE/$KERNEL.failed" && [ -z "$(ls -A "$STATE/wanted")" ]
}
test_the_reason_is_what_ended_a_build() {
  host
  printf '%s\n' 'echo "!! without types: once more" >&2; echo "== building"; echo "-rw kvm.ko"; echo "cp: No space left" >&2; exit 1' >"$CASE/build"
  ! godwit_kvm update && file_has "$STATE/$KERNEL.failed" "cp: No space left" && ! grep types "$STATE/$KERNEL.failed" || return 1
  echo 'echo "!! only a warning" >&2; echo "== on it goes"; exit 9' >"$CASE/build"
  ! godwit_kvm update && file_has "$STATE/$KERNEL.failed" "the build ended with 9"
}
test_a_boot_without_the_modules_says_so_and_has_them_built_once() {
  host
  ! godwit_kvm check 2>"$CASE/err" || { echo "it does not fail"; return 1; }
  file_has "$CASE/err" "godwit-kvm update" && [ -e "$STATE/wanted/$KERNEL" ] && called '^systemctl --no-block start' || return 1
  echo 'echo "!! so it is" >&2; exit 1' >"$CASE/build"
  ! godwit_kvm run || return 1
  rm "$CASE/calls"
  ! godwit_kvm check 2>"$CASE/err" || return 1
  file_has "$CASE/err" "so it is" && absent "$STATE/wanted/$KERNEL" && not_called systemctl || return 1
  # What was noted and never built, as before a boot.
  : >"$CASE/build"
  godwit_kvm want "$KERNEL" && rm "$CASE/calls"
  ! godwit_kvm check && called '^systemctl --no-block start'
}
test_a_boot_says_when_the_kvm_that_is_loaded_is_another() {
  host
  godwit_kvm update || return 1
  ! godwit_kvm check 2>"$CASE/err" && file_has "$CASE/err" "KVM is not loaded" || return 1
  mkdir -p "$HOST/sys/module/kvm"
  ! godwit_kvm check 2>"$CASE/err" && file_has "$CASE/err" "godwit-kvm load" || return 1
  touch "$CASE/is-loaded"
  godwit_kvm check 2>"$CASE/err" && [ ! -s "$CASE/err" ] && not_called '^kvm-modules load '
}
test_other_patches_are_built_for_kernels_that_have_modules() {
  host
  local other=6.12.99-amd64
  mkdir -p "$HOST/lib/modules/$other/kernel"
  godwit_kvm refresh && [ "$(ls "$STATE/wanted")" = "$KERNEL" ] && godwit_kvm run && godwit_kvm update --kernel "$other" || return 1
  godwit_kvm refresh && [ -z "$(ls "$STATE/wanted")" ] || return 1
  echo more >>"$HOST/usr/share/godwit-kvm/kernel/patches/1/1.patch"
  # Not for one whose modules the administrator has removed, who is not told of it at each boot.
  rm -r "$HOST/lib/modules/$other/updates" && godwit_kvm refresh && [ "$(ls "$STATE/wanted")" = "$KERNEL" ] && godwit_kvm run || return 1
  godwit_kvm restore && rm -r "$HOST/lib/modules/$KERNEL/updates" && godwit_kvm check 2>"$CASE/err" && [ ! -s "$CASE/err" ] &&
    absent "$STATE/wanted/$KERNEL"
}

# small_modules FOLDER VERSION: three that modinfo and depmod take.
small_modules() {
  local name
  mkdir -p "$1"
  for name in kvm kvm-amd kvm-intel; do
    printf '.section .modinfo,"a"\n.asciz "vermagic=%s SMP"\n.asciz "name=%s"\n' "$2" "${name//-/_}" | as -o "$1/$name.ko" -
  done
}
# signer FILE: a program that signs as the kernel's sign-file does: a detached signature, 12 bytes about it, and words.
signer() {
  cat >"$1" <<'END'
#!/bin/bash
set -e
form=PEM
grep -q 'BEGIN CERT' "$3" || form=DER
openssl x509 -in "$3" -inform $form -out "$4.pem"
openssl cms -sign -binary -noattr -nocerts -md "$1" -inkey "$2" -signer "$4.pem" -in "$4" -outform DER -out "$4.sig"
{
  cat "$4.sig"
  printf '\0\0\2\0\0\0\0\0'
  printf "$(printf '\\x%02x\\x%02x\\x%02x\\x%02x' 0 0 $(($(stat -c %s "$4.sig") / 256)) $(($(stat -c %s "$4.sig") % 256)))"
  echo '~Module signature appended~'
} >>"$4"
rm "$4.sig" "$4.pem"
END
  chmod +x "$1"
}
# signing_host: a root with a kernel, small modules that were built for it, and a key.
signing_host() {
  local tool
  for tool in as openssl modinfo depmod; do
    if ! PATH=$PATH:/usr/sbin:/sbin command -v "$tool" >/dev/null; then
      skip "there is no $tool here"
      return 1
    fi
  done
  PATH=$CASE/bin:/usr/sbin:/usr/bin:/sbin:/bin
  fake apt-get && fake sudo 'exec "$@"'
  HOST=$CASE/host
  mkdir -p "$HOST/lib/modules/$KERNEL/kernel" "$HOST/etc" "$HOST/boot" "$HOST/sys/firmware/efi/efivars"
  echo 'CONFIG_MODULE_SIG_HASH="sha512"' >"$HOST/boot/config-$KERNEL"
  small_modules "$CASE/out" "$KERNEL" && signer "$CASE/out/sign-file"
  make_key "$CASE/mine" 'Modules of a test' DER && make_key "$CASE/other" 'Of another test' PEM
  INSTALLED=$HOST/lib/modules/$KERNEL/updates/godwit
}
make_key() { openssl req -new -x509 -newkey rsa:2048 -nodes -days 2 -subj "/CN=$2" -keyout "$1.key" -outform "$3" -out "$1.cert" 2>/dev/null; }
kvm_modules() { GODWIT_NO_INSTALL=1 bash "$SCRIPTS/kvm-modules" "$1" --kernel "$KERNEL" --out "$CASE/out" --root "$HOST"; }
# signer_is NAME: all three that are installed have that.
signer_is() {
  local name found
  for name in kvm kvm-amd kvm-intel; do
    found=$(modinfo -F signer "$INSTALLED/$name.ko") && [ "$found" = "$1" ] || { echo "$name is signed by '$found'"; return 1; }
  done
}
test_modules_are_signed_as_they_are_installed() {
  signing_host || return 0
  kvm_modules install && signer_is '' || return 1
  printf '# a comment\nSIGN_KEY=%s\nSIGN_CERT="%s"\n' "$CASE/mine.key" "$CASE/mine.cert" >"$HOST/etc/godwit-kvm.conf"
  kvm_modules install && signer_is 'Modules of a test' && [ "$(modinfo -F sig_hashalgo "$INSTALLED/kvm.ko")" = sha512 ] || return 1
  kvm_modules status >"$CASE/status" && file_has "$CASE/status" "signed by 'Modules of a test'" || return 1
  # What was built is left as it is, and can be signed with another.
  SIGN_KEY=$CASE/other.key SIGN_CERT=$CASE/other.cert kvm_modules install && signer_is 'Of another test' || return 1
  [ -z "$(modinfo -F signer "$CASE/out/kvm.ko")" ] || { echo "what was built has changed"; return 1; }
  [ "$(ls "$INSTALLED")" = "$(printf 'kvm-amd.ko\nkvm-intel.ko\nkvm.ko')" ] && [ "$(ls -A "$HOST/lib/modules")" = "$KERNEL" ]
}
test_modules_are_put_in_place_all_at_once() {
  signing_host || return 0
  local stage=$HOST/lib/modules/.godwit-$KERNEL
  echo 6.12.34-1 >"$CASE/out/package" && kvm_modules install && [ "$(cat "$INSTALLED/package")" = 6.12.34-1 ] || return 1
  # What an interruption has left is ignored; what was in place before goes as a whole.
  touch "$INSTALLED/older.ko" && mkdir "$stage.new" "$stage.old" && touch "$stage.new/part.ko" && kvm_modules install &&
    [ "$(ls "$INSTALLED")" = "$(printf 'kvm-amd.ko\nkvm-intel.ko\nkvm.ko\npackage')" ] && [ "$(ls -A "$HOST/lib/modules")" = "$KERNEL" ] || return 1
  # Each copy is made where depmod does not look, and there are none of one and some of another.
  fake cp 'case "$*" in *"/lib/modules/'"$KERNEL"'/"*) exit 1 ;; esac; exec /bin/cp "$@"' && kvm_modules install || return 1
  fake mv 'exit 1' && ! kvm_modules install 2>"$CASE/err" && file_has "$CASE/err" "none of them is there" && absent "$INSTALLED" &&
    ! grep updates "$HOST/lib/modules/$KERNEL/modules.dep"
}
test_the_state_of_a_kernel_whose_index_names_what_is_gone_is_said() {
  signing_host || return 0
  kvm_modules install && rm -r "$INSTALLED" && kvm_modules status >"$CASE/status" || return 1
  [ "$(grep -c "which is gone: run 'depmod -b $HOST $KERNEL'" "$CASE/status")" = 3 ]
}
# build_with COMMANDS [PACKAGE]: kvm-modules builds where apt-cache does that, and the kernel is of that package.
build_with() {
  PATH=$CASE/bin:/usr/sbin:/usr/bin:/sbin:/bin
  fake apt-get && fake apt-cache "$1" && fake uname 'echo x86_64'
  fake dpkg-query "case \$* in *linux-image*) echo installed ${2:-6.12.34-1} ;; *) echo installed ;; esac"
  GODWIT_NO_INSTALL=1 bash "$SCRIPTS/kvm-modules" build --kernel "$KERNEL" --out "$CASE/out" >"$CASE/err" 2>&1
}
test_a_package_that_apt_does_not_know_is_said_and_may_be_there_later() {
  build_with 'exit 100'
  [ $? = 75 ] && file_has "$CASE/err" "apt knows no linux-headers-$KERNEL" || { cat "$CASE/err"; return 1; }
  build_with 'echo Version: 6.12.34-2'
  [ $? = 75 ] && file_has "$CASE/err" "run apt-get update"
}
test_what_ends_a_build_without_a_word_is_named() {
  mkdir -p "$CASE/bin" && fake mkdir 'case "$*" in *files.new) exit 1 ;; esac; exec /bin/mkdir "$@"'
  ! build_with 'echo Version: 6.12.34-1' && file_has "$CASE/err" 'this has failed: mkdir -p'
}
test_the_key_of_dkms_signs_where_no_other_is_named() {
  signing_host || return 0
  mkdir -p "$HOST/var/lib/dkms" && cp "$CASE/mine.key" "$HOST/var/lib/dkms/mok.key" && cp "$CASE/mine.cert" "$HOST/var/lib/dkms/mok.pub"
  kvm_modules install && signer_is 'Modules of a test' || return 1
  echo SIGN_KEY=none >"$HOST/etc/godwit-kvm.conf"
  kvm_modules install && signer_is ''
}
test_a_key_that_does_not_sign_installs_nothing() {
  signing_host || return 0
  local key cert
  for key in "$CASE/mine.key" "$CASE/none" relative.key ''; do
    for cert in "$CASE/other.cert" "$CASE/none" ''; do
      [ -n "$key$cert" ] || continue
      ! SIGN_KEY=$key SIGN_CERT=$cert kvm_modules install >"$CASE/out.txt" 2>&1 && absent "$INSTALLED" || { echo "'$key' '$cert'"; return 1; }
    done
  done
  # A signature that modinfo does not find again.
  printf '#!/bin/sh\n' >"$CASE/out/sign-file"
  ! SIGN_KEY=$CASE/mine.key SIGN_CERT=$CASE/mine.cert kvm_modules install 2>"$CASE/err" && file_has "$CASE/err" "signed by ''" && absent "$INSTALLED"
}
test_modules_that_a_machine_would_refuse_are_not_installed() {
  signing_host || return 0
  local efi=$HOST/sys/firmware/efi/efivars boot=SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c shim=MokSBStateRT-605dab50-e046-4300-abb6-3dd810dd8b23
  printf '\6\0\0\0\1' >"$efi/$boot"
  ! kvm_modules install 2>"$CASE/err" && file_has "$CASE/err" "Secure Boot is on" && file_has "$CASE/err" "mokutil --import" && absent "$INSTALLED" || return 1
  ! kvm_modules key 2>"$CASE/err" && file_has "$CASE/err" "Secure Boot is on" || return 1
  # shim checks nothing, and the kernel then does not either.
  printf '\6\0\0\0\1' >"$efi/$shim" && kvm_modules key || return 1
  mkdir -p "$HOST/sys/kernel/security" "$HOST/sys/module/module/parameters"
  echo 'none [integrity] confidentiality' >"$HOST/sys/kernel/security/lockdown"
  ! kvm_modules install 2>"$CASE/err" && file_has "$CASE/err" "locked down" && file_has "$CASE/err" "firmware's db" &&
    ! grep 'mokutil --import' "$CASE/err" || return 1
  export SIGN_KEY=$CASE/mine.key SIGN_CERT=$CASE/mine.cert
  # mokutil asks the machine.
  local answer
  for answer in 'is not enrolled' 'is already in the enrollment request' 'is blocked in MokListX' 'failed to read'; do
    fake mokutil "echo \"\$2 $answer\""
    ! kvm_modules install 2>"$CASE/err" && grep -qE "does not (trust|say that it trusts)" "$CASE/err" && absent "$INSTALLED" || { echo "$answer"; return 1; }
    # It is only one of them that an import would mend, and with Secure Boot only.
    ! grep 'mokutil --import' "$CASE/err" || { echo "$answer"; return 1; }
    [ "$answer" != 'is already in the enrollment request' ] || file_has "$CASE/err" 'reboot, and confirm' || return 1
  done
  # A kernel reads what was enrolled with Secure Boot only: not without it, nor where shim checks nothing.
  fake mokutil 'echo "$2 is already enrolled"; exit 1'
  ! kvm_modules install 2>"$CASE/err" && file_has "$CASE/err" "without Secure Boot" && absent "$INSTALLED" || return 1
  rm "$efi/$shim" && printf '\6\0\0\0\0' >"$efi/$boot"
  ! kvm_modules install 2>"$CASE/err" && file_has "$CASE/err" "without Secure Boot" && absent "$INSTALLED" || return 1
  for answer in 'is already in db' 'is already in the built-in trusted keyring'; do
    fake mokutil "echo \"\$2 $answer\""
    kvm_modules key || return 1
  done
  printf '\6\0\0\0\1' >"$efi/$boot" && fake mokutil 'echo "$2 is not enrolled"; exit 1'
  ! kvm_modules key 2>"$CASE/err" && file_has "$CASE/err" 'mokutil --import' || return 1
  fake mokutil 'echo "$2 is already enrolled"; exit 1'
  kvm_modules install && signer_is 'Modules of a test' || return 1
  rm "$efi/$boot"
  unset SIGN_KEY SIGN_CERT
  echo '[none] integrity confidentiality' >"$HOST/sys/kernel/security/lockdown"
  kvm_modules key || return 1
  echo Y >"$HOST/sys/module/module/parameters/sig_enforce"
  ! kvm_modules key 2>"$CASE/err" && file_has "$CASE/err" "enforces"
}

test_types_are_kept_where_the_kernel_has_some() {
  local tool
  for tool in as objcopy readelf strip; do
    if ! command -v "$tool" >/dev/null; then skip "there is no $tool here"; return 0; fi
  done
  . "$SCRIPTS/lib/common.sh"
  . "$SCRIPTS/lib/kvm-btf.sh"
  trap - EXIT
  VERSION=$KERNEL WORK=$CASE/work OUT=$CASE/out
  mkdir -p "$WORK/files" "$WORK/linux/scripts" "$WORK/linux/arch/x86/kvm" "$OUT"
  echo nop | as -o "$CASE/plain" - && echo types >"$CASE/types" && objcopy --add-section ".BTF=$CASE/types" "$CASE/plain" "$CASE/typed"
  # What cannot be unpacked or read is no module without types.
  head -c 100 /dev/zero >"$WORK/files/kvm.ko.xz" && ! (prepare_btf) 2>"$CASE/err" && file_has "$CASE/err" "cannot be unpacked" || return 1
  rm "$WORK/files/kvm.ko.xz" && echo no >"$WORK/files/kvm.ko" && ! (prepare_btf) 2>"$CASE/err" && file_has "$CASE/err" "cannot be read" || return 1
  cp "$CASE/plain" "$WORK/files/kvm.ko"
  prepare_btf && [ "$BTF" = no ] && absent "$WORK/linux/vmlinux" || return 1
  xz -c "$CASE/typed" >"$WORK/files/kvm.ko.xz" && rm "$WORK/files/kvm.ko"
  prepare_btf >"$CASE/said-so" && [ "$BTF" = no ] && file_has "$CASE/said-so" "no type information" || return 1
  printf '#!/bin/sh\ncat "$1"\n' >"$WORK/linux/scripts/extract-vmlinux" && chmod +x "$WORK/linux/scripts/extract-vmlinux"
  cp "$CASE/plain" "$WORK/files/vmlinuz"
  prepare_btf && [ "$BTF" = no ] && absent "$WORK/linux/vmlinux" || return 1
  cp "$CASE/typed" "$WORK/files/vmlinuz"
  prepare_btf && [ "$BTF" = yes ] && cmp "$CASE/typed" "$WORK/linux/vmlinux" || return 1
  cp "$CASE/typed" "$WORK/linux/arch/x86/kvm/kvm.ko"
  take_module kvm && has_btf "$OUT/kvm.ko" || return 1
  cp "$CASE/plain" "$WORK/linux/arch/x86/kvm/kvm.ko"
  take_module kvm 2>"$CASE/err" && file_has "$CASE/err" "no type information" || return 1
  # Where they cannot be made there are modules all the same; a build that fails in another way fails.
  kmake() { echo "$*" >>"$CASE/made" && [ ! -e "$WORK/linux/vmlinux" ] && [ ! -e "$CASE/broken" ]; }
  make_modules 2>"$CASE/err" && [ "$BTF" = no ] && file_has "$CASE/err" "once more without" || return 1
  [ "$(cat "$CASE/made")" = "$(printf 'M=arch/x86/kvm modules\nM=arch/x86/kvm KCFLAGS=-g0 modules')" ] || return 1
  touch "$CASE/broken" && ! make_modules
}
