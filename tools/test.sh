#!/usr/bin/env bash
# Checks everything: style, types, layers, tests.
#   tools/test.sh fast   everyday work: without the slow tests
#   tools/test.sh        as CI runs it: without the long tests
#   tools/test.sh long   all of it: the long tests, new examples of every property
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

case "${1:-}" in
  fast) select=(-m "not slow and not long") ;;
  "") select=(-m "not long") ;;
  long) select=(--hypothesis-profile=long) ;;
  *) fail "got '$1', expected nothing, 'fast' or 'long'." ;;
esac

prepare_environment test "[test,reference]"
export PATH="$PWD/$VENV/bin:$PATH"

# Each check runs even when one before it failed, so that one run shows all there is to mend.
failed=()
check() {
  echo "== $*"
  "$@" || failed+=("$*")
}
check ruff check .
check ruff format --check .
check pyright
check lint-imports
check python -m pytest -p pytest_timeout --timeout-method thread -n 2 --dist worksteal -q -rs --durations 20 "${select[@]}"
((${#failed[@]} == 0)) || fail "failed: $(printf '%s; ' "${failed[@]}")"
