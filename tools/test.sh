#!/usr/bin/env bash
# Checks everything: style, types, layers, tests.
#   tools/test.sh fast   everyday work: quick tests of the files that a change can reach, see tools/affected.py; the
#                        change is what differs from main, or from $BASE
#   tools/test.sh        without the long tests
#   tools/test.sh long   all of it: the long tests, new examples of every property, every mutant
# What follows these words goes to pytest; `--cold` uses nothing that earlier runs compiled.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

which=""
if (($#)) && [[ $1 != -* ]]; then
  which=$1
  shift
fi
case "$which" in
  fast) select=(-m "not slow and not long") ;;
  "") select=(-m "not long") ;;
  long)
    select=(-m "not long" --hypothesis-profile=long "$EVERY_ANNOTATION")
    export XLA_FLAGS=${XLA_FLAGS:-} # as users have them; `tests/conftest.py` takes the optimizer away
    ;;
  *) fail "got '$which', expected nothing, 'fast' or 'long'." ;;
esac

timed environment prepare_environment test "[reference]"
PATH="$(cd "$VENV/bin" && pwd):$PATH"
export PATH

files=()
if [[ $which == fast && $# == 0 ]]; then
  reached=$(python tools/affected.py ${BASE:+"$BASE"}) || fail "no change to look at; name a commit: BASE=HEAD~1 $0 fast"
  mapfile -t files <<<"${reached:-tests/test_foundation.py}" # where no test reads what changed
fi

# Each check runs even when one before it failed, so that one run shows all there is to mend.
failed=()
check() {
  timed "$*" "$@" || failed+=("$*")
}
check ruff check .
check ruff format --check .
check pyrefly check --min-severity error --summary=none --python-interpreter-path "$(command -v python)"
check lint-imports
check shellcheck --external-sources --source-path SCRIPTDIR tools/*.sh tools/ci/*.sh .ci/run
quick() { "$@" || (($? == 5)); } # 5: none of them is quick
check ${files:+quick} "${PYTEST[@]}" "${select[@]}" "${files[@]}" "$@"
if [[ $which == long ]]; then
  # One at a time: several of them start processes of their own, which must find each other within gloo's 30 seconds.
  check "${PYTEST[@]}" -n 0 -m long --hypothesis-profile=long "$EVERY_ANNOTATION"
  check bash tools/ci/test_beam.sh
  check bash tools/ci/test_tunix.sh
  check python tools/mutants.py
fi
show_times
((${#failed[@]} == 0)) || fail "failed: $(printf '%s; ' "${failed[@]}")"
