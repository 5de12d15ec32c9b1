# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# What the lab's group `quickstart` needs besides the usual machine: the commands of the README, and the guest
# that they make. Sourced by scripts/lab.

# readme_commands NAME: the block of commands that stands after that mark.
readme_commands() {
  awk -v mark="<!-- quickstart: $1 -->" '
    $0 == mark { on = 1; next }
    on && /^    / { print substr($0, 5); some = 1; next }
    on && some && NF { exit }
    on && some { print "" }
  ' "$ROOT/README.md"
}

# build_extra_quickstart FILE: makes the guest as the README says, and writes an initramfs with its kernel and
# with the commands that run it.
build_extra_quickstart() {
  local place=$LAB/quickstart block
  local tree=$place/tree
  rm -rf "$tree"
  mkdir -p "$tree/lab/quickstart"
  readme_commands guest >"$place/guest.new"
  [ -s "$place/guest.new" ] || die "README.md has no commands that make the guest"
  if ! cmp -s "$place/guest.new" "$place/guest.sh"; then
    say "making the guest of the README"
    rm -rf "$place/guest" "$place/root.img"
    # On a fresh Debian machine the user is not root; here there may be no sudo.
    (cd "$place" && sed 's/^sudo //' guest.new | bash -eu -o pipefail)
    mv "$place/guest.new" "$place/guest.sh"
  fi
  for block in boot move end; do
    readme_commands $block >"$tree/lab/quickstart/$block.sh"
    [ -s "$tree/lab/quickstart/$block.sh" ] || die "README.md has no commands of '$block'"
  done
  cp "$place/vmlinuz" "$place/initrd.img" "$tree/lab/quickstart/"
  pack "$tree" "$1"
}
