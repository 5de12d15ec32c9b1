# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Tests of what the package godwit-kvm and scripts/kvm-modules leave where they are interrupted, or where a program or a
# disk fails them. Sourced by scripts-tests, after kvm-tests.sh, whose hosts and modules they use.

# stale_index FOLDER: an index of a kernel names modules, which are gone.
stale_index() { rm -rf "$1/updates" "$CASE/calls" && echo 'updates/godwit/kvm.ko: kernel/x.ko' >"$1/modules.dep"; }
# finds_what_is_there: modprobe would find a module that exists.
finds_what_is_there() {
  local found
  found=$(modinfo -b "$HOST" -k "$KERNEL" -n kvm) && [ -e "$found" ] || { echo "it finds $found"; return 1; }
}
# installing_host: signing_host, whose kernel has modules of its own, and those that were installed before.
installing_host() {
  signing_host || return 1
  small_modules "$HOST/lib/modules/$KERNEL/kernel" "$KERNEL" && kvm_modules install && touch "$INSTALLED/before"
}

test_a_removal_mends_each_index_and_fails_where_it_cannot() {
  host
  local folder=$HOST/lib/modules/$KERNEL
  # One that was interrupted before depmod.
  godwit_kvm update && stale_index "$folder" && godwit_kvm remove && called "^depmod -b $HOST $KERNEL" || return 1
  # Where depmod fails dpkg tries it again, and then there are no modules to be found.
  echo 'kernel/x.ko:' >"$folder/modules.dep" && godwit_kvm update && echo 'updates/godwit/kvm.ko: kernel/x.ko' >"$folder/modules.dep"
  fake depmod 'exit 1'
  export DPKG_ROOT=$HOST
  ! sh "$DEBIAN/godwit-kvm.prerm" remove 2>"$CASE/err" && file_has "$CASE/err" "no KVM" && absent "$folder/updates" || return 1
  fake depmod && rm "$CASE/calls" && sh "$DEBIAN/godwit-kvm.prerm" remove && called '^depmod'
}
test_a_removal_waits_for_a_verb_by_hand_and_leaves_nothing_of_it() {
  host
  local installed=$HOST/lib/modules/$KERNEL/updates/godwit/kvm.ko pid
  godwit_kvm update && exec 8>"$STATE/lock" && flock 8 || return 1
  # Up to a limit.
  ! godwit_kvm remove 8>&- 2>"$CASE/err" && file_has "$CASE/err" 'still under way' && [ -e "$installed" ] || return 1
  GODWIT_KVM_WAIT_S=60 godwit_kvm remove 8>&- >"$CASE/waits" &
  pid=$!
  until_true grep -q waiting "$CASE/waits" && [ -e "$installed" ] || return 1
  exec 8>&- && wait "$pid" && absent "$installed" && absent "$STATE"
}
test_who_waits_for_a_removal_installs_nothing_after_it() {
  host
  local pid
  mkdir -p "$STATE" && exec 8>"$STATE/lock" && flock 8 || return 1
  godwit_kvm update 8>&- >"$CASE/waits" 2>&1 &
  pid=$!
  until_true grep -q waiting "$CASE/waits" && rm -r "$STATE" && exec 8>&- || return 1
  ! wait "$pid" && file_has "$CASE/waits" 'was removed' && not_called '^kvm-modules'
}
test_a_kernel_for_which_nothing_is_built_has_its_index_mended() {
  host
  echo BUILD=no >"$HOST/etc/godwit-kvm.conf"
  godwit_kvm update && stale_index "$HOST/lib/modules/$KERNEL" && hook postinst "$KERNEL" && called "^depmod -b $HOST $KERNEL"
}
test_the_index_that_modprobe_reads_is_mended() {
  host
  local folder=$HOST/lib/modules/$KERNEL
  # depmod was interrupted between its files; the one for modprobe has bytes that are no text.
  echo 'kernel/x.ko:' >"$folder/modules.dep" && printf '\0\1\377updates/godwit/kvm.ko: kernel/x.ko\0' >"$folder/modules.dep.bin"
  godwit_kvm status 2>"$CASE/err" && called "^depmod -b $HOST $KERNEL" && file_has "$CASE/err" interrupted || return 1
  rm "$CASE/calls" && printf '\0kernel/x.ko:\0' >"$folder/modules.dep.bin" && godwit_kvm status && not_called depmod
}
test_modules_that_are_gone_are_wanted_at_a_boot_though_their_request_was_not_noted() {
  host
  fake dpkg-query 'echo 6.12.34-1' && godwit_kvm update || return 1
  # As with a full disk.
  fake dpkg-query 'echo 6.12.34-2' && fake mv 'case "$*" in */wanted/*) exit 1 ;; esac; exec /bin/mv "$@"'
  hook postinst "$KERNEL" && absent "$STATE/wanted/$KERNEL" && absent "$STATE/$KERNEL.ok" && rm "$CASE/bin/mv" || return 1
  ! godwit_kvm check && [ -e "$STATE/wanted/$KERNEL" ]
}
test_a_request_that_comes_during_a_verb_by_hand_is_served_after_it() {
  host
  local other=6.12.99-amd64
  mkdir -p "$HOST/lib/modules/$other/kernel"
  # As systemd does it, without waiting.
  fake systemctl "'$HOST/usr/sbin/godwit-kvm' run >'$CASE/service' 2>&1 9>&- &"
  echo "[ -e '$CASE/once' ] || { touch '$CASE/once'; '$HOST/usr/sbin/godwit-kvm' want $other
    until grep -q waiting '$CASE/service'; do sleep 0.05; done; }" >"$CASE/build"
  timeout 20 "$HOST/usr/sbin/godwit-kvm" update && until_true test -e "$STATE/$other.ok" && [ -e "$STATE/$KERNEL.ok" ]
}
test_other_patches_are_tried_where_those_before_have_failed() {
  host
  local other=6.12.99-amd64
  mkdir -p "$HOST/lib/modules/$other/kernel"
  godwit_kvm update && echo 'exit 1' >"$CASE/build" && ! godwit_kvm update --kernel $other || return 1
  godwit_kvm refresh && [ -z "$(ls "$STATE/wanted")" ] || return 1
  echo more >>"$HOST/usr/share/godwit-kvm/kernel/patches/1/1.patch"
  godwit_kvm refresh && [ -e "$STATE/wanted/$other" ] && [ -e "$STATE/wanted/$KERNEL" ]
}
test_who_has_modules_that_would_be_refused_is_told_of_the_way_back() {
  host
  godwit_kvm update && touch "$CASE/no-key" && ! godwit_kvm update 2>"$CASE/err" || return 1
  file_has "$STATE/$KERNEL.failed" "godwit-kvm restore --kernel $KERNEL" || return 1
  rm -r "$HOST/lib/modules/$KERNEL/updates" && ! godwit_kvm update && ! grep restore "$STATE/$KERNEL.failed"
}
test_an_installation_that_fails_half_way_has_its_index_mended() {
  host
  local folder=$HOST/lib/modules/$KERNEL
  echo "echo 'updates/godwit/kvm.ko: kernel/x.ko' >'$folder/modules.dep'; exit 1" >"$CASE/build"
  ! godwit_kvm update && called "^depmod -b $HOST $KERNEL" || return 1
  fake depmod 'exit 1' && ! godwit_kvm update 2>"$CASE/err" && file_has "$CASE/err" "there would be no KVM" && ! grep "its own KVM" "$CASE/err"
}

test_a_folder_that_was_kept_is_not_taken_for_another_package_of_the_kernel() {
  local files=$CASE/out/build/files version
  fake dpkg-deb "mkdir -p \$3/boot \$3/usr/src/linux-headers-$KERNEL; echo x >\$3/boot/config-$KERNEL; cat $CASE/version >\$3/usr/src/linux-headers-$KERNEL/Module.symvers"
  for version in 6.12.34-1 6.12.34-2; do
    echo $version >"$CASE/version"
    # What an interruption has left of another one; here it ends without the source.
    mkdir -p "$files.new" && touch "$files.new/kvm.ko.xz"
    ! build_with "echo Version: $version" $version && file_has "$files/Module.symvers" $version && absent "$files/kvm.ko.xz" && absent "$files.new" ||
      { cat "$CASE/err"; return 1; }
  done
  rm "$CASE/calls" && ! build_with "echo Version: $version" $version && called 'dpkg-deb .*/source$' && not_called 'dpkg-deb .*/image$'
}
test_modules_for_another_package_of_the_kernel_are_not_installed() {
  signing_host || return 0
  fake dpkg-query 'case $* in *linux-image*) echo installed 6.12.34-2 ;; *) echo installed ;; esac'
  echo 6.12.34-1 >"$CASE/out/package"
  ! kvm_modules install 2>"$CASE/err" && absent "$INSTALLED" && file_has "$CASE/err" "built for 6.12.34-1, and the kernel is 6.12.34-2" || return 1
  called "dpkg-query --admindir=$HOST/var/lib/dpkg " || return 1
  # Where one of both is not known that is no other one.
  rm "$CASE/out/package" && kvm_modules install && echo 6.12.34-2 >"$CASE/out/package" && kvm_modules install && fake dpkg-query 'exit 1' && kvm_modules install
}
test_a_depmod_that_fails_leaves_modules_that_the_index_names() {
  installing_host || return 0
  fake depmod 'exit 1'
  ! kvm_modules install 2>"$CASE/err" && finds_what_is_there && [ -e "$INSTALLED/before" ] && file_has "$CASE/err" "there before are there again" &&
    [ "$(ls -A "$HOST/lib/modules")" = "$KERNEL" ] || return 1
  # The kernel's own.
  rm "$CASE/bin/depmod" && rm -r "$INSTALLED" && depmod -b "$HOST" "$KERNEL" && fake depmod 'exit 1'
  ! kvm_modules install 2>"$CASE/err" && finds_what_is_there && absent "$INSTALLED" && file_has "$CASE/err" "until 'depmod -b $HOST $KERNEL' works"
}
test_a_signal_during_an_installation_leaves_a_kernel_with_kvm() {
  installing_host || return 0
  local signal
  # Between the renames, and before depmod: it goes on to the end.
  for signal in TERM INT HUP; do
    fake mv '/bin/mv "$@"; kill -'$signal' $PPID' && touch "$INSTALLED/before" && kvm_modules install && finds_what_is_there &&
      absent "$INSTALLED/before" && [ "$(ls -A "$HOST/lib/modules")" = "$KERNEL" ] || { echo "$signal"; return 1; }
  done
  # While it is written: all is as before.
  rm "$CASE/bin/mv" && fake sync 'kill -TERM $PPID' && touch "$INSTALLED/before"
  ! kvm_modules install && [ -e "$INSTALLED/before" ] && finds_what_is_there && [ "$(ls -A "$HOST/lib/modules")" = "$KERNEL" ] || return 1
  # What no trap sees, between the renames: the next one does not take the last copy away, whatever becomes of it.
  rm "$CASE/bin/sync" && fake mv '/bin/mv "$@"; kill -KILL $PPID'
  ! kvm_modules install && absent "$INSTALLED" && rm "$CASE/bin/mv" && fake cp 'case "$*" in */.godwit-*) exit 1 ;; esac; exec /bin/cp "$@"' || return 1
  ! kvm_modules install && [ -e "$INSTALLED/before" ] && finds_what_is_there && rm "$CASE/bin/cp" && mv "$INSTALLED" "$HOST/lib/modules/.godwit-$KERNEL.old" || return 1
  ! SIGN_KEY=$CASE/mine.key SIGN_CERT=$CASE/other.cert kvm_modules install && [ -e "$INSTALLED/before" ] && finds_what_is_there
}
test_what_is_taken_away_and_loaded_again_is_not_interrupted() {
  # reloads FUNCTION [FAILING]: with programs that send a signal to the shell, of which that one fails.
  reloads() {
    bash -c ". '$SCRIPTS/lib/common.sh'; SYSROOT='$CASE' VERSION=$KERNEL INSTALL_SUBDIR=updates/godwit
      $(sed -n '/^undisturbed() {/p; /^\(reload\|remove_modules\)() {/,/^}/p' "$SCRIPTS/kvm-modules")
      vendor_module() { echo kvm_amd; }
      as_root() { echo \"\$*\" >>'$CASE/done'; kill -TERM \$\$; ! [ \"\$*\" = '${2:-}' ]; }
      $1" 2>"$CASE/err"
  }
  reloads reload && [ "$(cat "$CASE/done")" = $'modprobe -r kvm_amd\nmodprobe -r kvm\nmodprobe kvm_amd' ] || return 1
  rm "$CASE/done" && reloads remove_modules && grep -q ^depmod "$CASE/done" || return 1
  # It may be that modules were taken away before.
  ! reloads reload 'modprobe -r kvm_amd' && file_has "$CASE/err" 'does not unload' && ! grep 'nothing was changed' "$CASE/err"
}
