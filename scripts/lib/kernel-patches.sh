# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Which series of kernel/patches is for which kernel, and how it is applied. Sourced by scripts/kvm-modules and
# scripts/kernel-survey.

# patches_for SERIES: the folder of the patches for a kernel of this series (6.12, say); nothing if there are none.
patches_for() {
  local list
  for list in "$ROOT"/kernel/patches/*/kernels; do
    if [ -f "$list" ] && grep -qxF "$1" "$list"; then dirname "$list"; fi
  done
}

# apply_patches FOLDER TREE: applies a series to a kernel's source; ends at the first patch that needs fuzz. A
# patch that applies at other lines than its own is not refused: the survey's builds say whether that was right.
apply_patches() {
  local patch
  for patch in "$1"/*.patch; do
    echo "   applying $(basename "$patch")"
    if ! patch -d "$2" -p1 --quiet --fuzz=0 --no-backup-if-mismatch <"$patch"; then
      warn "$(basename "$patch") does not apply"
      return 1
    fi
  done
}
