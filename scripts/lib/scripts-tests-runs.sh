# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Tests of what a run of the tests leaves behind. Sourced by scripts-tests, whose functions it uses.

# results COMMIT COMMAND: writes lines of standard input to the table in $CASE/table.
results() { "$SCRIPTS/lib/test-results" "$CASE/table" "$1" "A B, 2 CPUs, 4 GiB" "$2"; }
test_the_table_of_results_has_the_last_of_each_step_and_each_group() {
  local on='A B, 2 CPUs, 4 GiB' head='| what | result | command | commit | machine |'
  printf '%s\n' 'A text.' '' "$head" '| --- | --- | --- | --- | --- |' >"$CASE/table"
  printf '%s\n' 'ok       unit: two: of a kind (3 s)' 'SKIPPED  unit: three: no reason: 1 passed' '         unit took 2 minutes' \
    'ok       lab: all: 5 passed, 0 failed, 2 skipped (4 s)' 'test lab::b::1 | x ... ok' 'test lab::b::2 ... FAILED (why)' \
    'test lab::a::1 ... ok' 'test lab-iommufd::a::1 ... ok' '== again' 'test lab::b::1 | x ... ok' 'test lab::b::2 ... ok' | results 1111 'scripts/test all' || return 1
  printf '%s\n' 'A text.' '' "$head" '| --- | --- | --- | --- | --- |' \
    "| lab a | 1 passed, 0 failed | \`scripts/lab test a\` | 1111 | $on |" \
    "| lab b | 2 passed, 0 failed | \`scripts/lab test b\` | 1111 | $on |" \
    "| lab-iommufd a | 1 passed, 0 failed | \`LAB_KERNEL=iommufd scripts/lab test a\` | 1111 | $on |" \
    "| lab: all | 5 passed, 0 failed, 2 skipped | \`scripts/test all\` | 1111 | $on |" \
    "| unit: two: of a kind | passed | \`scripts/test all\` | 1111 | $on |" >"$CASE/expected"
  diff "$CASE/expected" "$CASE/table" || return 1
  # What runs later takes the place of its row, and of no other.
  printf '%s\n' 'FAILED   unit: two: of a kind (log: /x)' 'test lab::a::1 ... FAILED' | results 2222 'scripts/test unit' || return 1
  sed -i "s/.*lab a | .*/| lab a | 0 passed, 1 failed | \`scripts\/lab test a\` | 2222 | $on |/; s/.*two.*/| unit: two: of a kind | failed | \`scripts\/test unit\` | 2222 | $on |/" "$CASE/expected"
  diff "$CASE/expected" "$CASE/table" && [ "$(ls "$CASE")" = $'bin\nexpected\nsaid\ntable' ]
}
test_results_are_recorded_with_what_was_run_where() {
  library
  local name command='scripts/test --record all' summary=('ok       unit: a (1 s)') ran_logs=("$CASE/log") again_logs=()
  eval "$(sed -n '/^record_results() {/,/^}/p' "$SCRIPTS/test")"
  mkdir -p "$CASE/root/docs" "$CASE/root/scripts/lib"
  ROOT=$CASE/root
  cat "$SCRIPTS/lib/test-results" >"$ROOT/scripts/lib/test-results" && chmod +x "$ROOT/scripts/lib/test-results" || return 1
  printf '| what |\n| --- |\n' >"$ROOT/docs/test-results.md"
  echo 'test lab::g::c ... ok' >"$CASE/log"
  fake nproc 'echo 3'
  fake git 'case "$*" in *rev-parse*) echo 12345678 ;; *) exit "$(cat "'"$CASE"'/changed")" ;; esac'
  echo 1 >"$CASE/changed"
  record_results && grep -qE '^\| unit: a \| passed \| `scripts/test all` \| 12345678 and changes \| .+, 3 CPUs, [0-9]+ GiB \|$' "$ROOT/docs/test-results.md" || return 1
  echo 0 >"$CASE/changed"
  record_results && grep -q '^| lab g | 1 passed, 0 failed | `scripts/lab test g` | 12345678 | ' "$ROOT/docs/test-results.md"
}
