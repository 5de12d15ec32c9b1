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
  eval "$(sed -n '/^\(record_results\|commit_here\|cpu_model\)() {/,/^}/p' "$SCRIPTS/test")"
  mkdir -p "$CASE/root/docs" "$CASE/root/scripts/lib"
  ROOT=$CASE/root
  cat "$SCRIPTS/lib/test-results" >"$ROOT/scripts/lib/test-results" && chmod +x "$ROOT/scripts/lib/test-results" || return 1
  printf '| what |\n| --- |\n' >"$ROOT/docs/test-results.md"
  echo 'test lab::g::c ... ok' >"$CASE/log"
  fake nproc 'echo 3'
  fake git 'case "$*" in *rev-parse*) echo 12345678 ;; *) exit "$(cat "'"$CASE"'/changed")" ;; esac'
  echo 1 >"$CASE/changed"
  record_results "$(commit_here)" && grep -qE '^\| unit: a \| passed \| `scripts/test all` \| 12345678 and changes \| .+, 3 CPUs, [0-9]+ GiB \|$' "$ROOT/docs/test-results.md" || return 1
  echo 0 >"$CASE/changed"
  record_results "$(commit_here)" && grep -q '^| lab g | 1 passed, 0 failed | `scripts/lab test g` | 12345678 | ' "$ROOT/docs/test-results.md" || return 1
  # What was checked out during the run is not what has run, whose commit is read before it.
  record_results 87654321 && grep -q ' | 87654321, changed during the run | ' "$ROOT/docs/test-results.md" || return 1
  [ "$(grep -n '^run_\|began_with=\$\|^  "run_' "$SCRIPTS/test" | grep -A 1 began_with= | tail -n 1 | cut -d: -f2)" = '  "run_$level"' ]
}
test_a_machine_with_many_processors_has_a_model() {
  library
  eval "$(sed -n '/^cpu_model() {/,/^}/p' "$SCRIPTS/test")"
  # More than a pipe takes.
  for _ in $(seq 3000); do printf 'processor\t: 0\nmodel name\t: Some(R) Processor(TM) X 12 CPU @ 2.00GHz\nflags\t\t: fpu vme\n'; done >"$CASE/cpuinfo"
  local model
  model=$(cpu_model "$CASE/cpuinfo") && [ "$model" = "Some" ] || { echo "$model"; return 1; }
  printf 'model name\t: AMD EPYC 7763\n' >"$CASE/cpuinfo" && [ "$(cpu_model "$CASE/cpuinfo")" = "AMD EPYC 7763" ]
}
test_a_failure_without_a_word_or_with_many_is_shown_and_the_run_goes_on() {
  library
  eval "$(sed -n '/^failure_of() {/,/^}/p' "$SCRIPTS/test")"
  # As the script is run: inside of a condition a shell does not end.
  local shown="$(declare -f failure_of); failure_of '$CASE/log'; echo on"
  echo 'it hangs' >"$CASE/log" && bash -euo pipefail -c "$shown" >"$CASE/out"
  [ "$(cat "$CASE/out")" = $'it hangs\non' ] || return 1
  # More than a pipe takes.
  seq -f 'error: number %06g' 9000 >"$CASE/log" && bash -euo pipefail -c "$shown" >"$CASE/out"
  [ "$(wc -l <"$CASE/out")" = 141 ]
}
test_what_a_failed_test_says_does_not_make_it_pass() {
  printf '| what |\n| --- |\n' >"$CASE/table" && ln "$CASE/table" "$CASE/reader" || return 1
  printf '%s\n' 'test lab::b::1 ... FAILED (it said "step 3 ... ok")' 'test lab::b::2 ... ok' | results 1111 x || return 1
  grep -q '^| lab b | 1 passed, 1 failed ' "$CASE/table" || { cat "$CASE/table"; return 1; }
  # Who reads it meanwhile has all of one or of the other.
  [ "$(wc -l <"$CASE/reader")" = 2 ] && [ "$(stat -c %a "$CASE/table")" = "$(stat -c %a "$CASE/reader")" ]
}
test_only_good_results_of_a_survey_are_kept() {
  library
  eval "$(sed -n '/^hash_of() {/,/^}/p; /^is_kept() {/p; /^result_of() {/,/^}/p' "$SCRIPTS/kernel-survey")"
  local AGAIN='' NO_BUILD='' kept=$CASE/kept
  PATH=$PATH:/usr/bin:/bin
  try() { echo "$*" >>"$CASE/tried"; cat "$CASE/result"; }
  # surveyed RESULT TIMES: that comes of it, and so often it was tried until now.
  surveyed() { [ "$(result_of 6.12 6.12.1-1 "$kept" 2>/dev/null)" = "$1" ] && [ "$(wc -l <"$CASE/tried")" = "$2" ] || { echo "$1, $2"; return 1; }; }
  echo 'applies, does not build' >"$CASE/result"
  surveyed 'applies, does not build' 1 && absent "$kept" && surveyed 'applies, does not build' 2 || return 1
  echo 'applies and builds' >"$CASE/result" && surveyed 'applies and builds' 3 && echo worse >"$CASE/result" && surveyed 'applies and builds' 3 || return 1
  # What was only applied is built, unless that is not to be.
  echo applies >"$kept" && NO_BUILD=1 && surveyed applies 3 && NO_BUILD='' && surveyed worse 4 && absent "$kept" || return 1
  mkdir "$CASE/series" && echo 1 >"$CASE/series/1.patch"
  [ "$(hash_of "$CASE/series" 'gcc 12')" = "$(hash_of "$CASE/series" 'gcc 12')" ] && [ "$(hash_of "$CASE/series" 'gcc 12')" != "$(hash_of "$CASE/series" 'gcc 14')" ] &&
    [ "$(hash_of '' 'gcc 12')" = none ]
}
test_lists_of_packages_that_cannot_be_read_are_a_failure() {
  root && debian_without
  library
  (apt_update_once) && called '^apt-get update .*APT::Update::Error-Mode=any' || return 1
  ! grep -rnE 'apt-get( -q)? update' "$SCRIPTS/kernel-survey" "$SCRIPTS/lib/install.sh" "$SCRIPTS/../packaging/debian/godwit-kvm" | grep -v Error-Mode | grep -vE 'update (failed|fails)'
}
test_what_does_not_build_is_a_failed_step_of_each_level() {
  local level
  # run_level LEVEL BUILD GUEST: what is run of it, in a shell that ends at a failure, where the two builds end so.
  run_level() {
    bash -c ". '$SCRIPTS/lib/common.sh'; logs='$CASE' lab_fetch='' passed=0 failed=0 summary=()
      $(sed -n '/^\(step\|programs_for\|run_[a-z-]*\)() {/,/^}/p; /^build_programs() {/p' "$SCRIPTS/test")
      tests() { echo \"tests \$1\"; }; run_clients() { :; }
      build_binaries() { echo binaries; return $2; }; build_guest() { return $3; }
      run_$1; printf '%s\n' \"\$failed failed\" \"\${summary[@]}\"" >"$CASE/out" 2>&1
  }
  for level in native lab lab-kernel metal lab-iommufd; do
    run_level $level 0 0 && grep -q '^tests ' "$CASE/out" && grep -qx '0 failed' "$CASE/out" || { cat "$CASE/out"; return 1; }
    for ends in '1 0' '0 1'; do
      run_level $level $ends && ! grep '^tests ' "$CASE/out" && grep -qx '1 failed' "$CASE/out" && grep -q "^FAILED   $level: .*built" "$CASE/out" &&
        grep -qx binaries "$CASE/out" || { cat "$CASE/out"; return 1; }
    done
  done
}
