#!/usr/bin/env bash
# Checks everything: style, types, layers, tests. `tools/test.sh fast` leaves the slow tests out (everyday work).
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

case "${1:-}" in
  "") select=() ;;
  fast) select=(-m "not slow") ;;
  *) fail "got '$1', expected nothing or 'fast'." ;;
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
check python -m pytest -n 2 --dist worksteal -q --durations 10 ${select[@]+"${select[@]}"}
((${#failed[@]} == 0)) || fail "failed: $(printf '%s; ' "${failed[@]}")"
