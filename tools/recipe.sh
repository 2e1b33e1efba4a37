#!/usr/bin/env bash
# Runs all verbs of a recipe at the lowest priority, for hours beside other work:
#
#     bash tools/recipe.sh configs/smollm2_135m.yaml
#
# Resumes after any end: finished verbs return at once, and measurements of another machine or version are repeated.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

AGAIN="Run the same command again: it goes on where it stopped."
child=""
trap '[[ -z $child ]] || kill "$child" 2>/dev/null; wait; fail "stopped. $AGAIN"' INT TERM

# Linux first shares the cores between sessions (autogroups), where nice has no effect: a session of its own, whose
# autogroup has the lowest priority too.
lowest_priority() {
  setsid bash -c '{ echo 19 >/proc/self/autogroup; } 2>/dev/null; exec nice -n 19 "$@"' lowest_priority "$@" &
  child=$!
  wait "$child"
}

[[ $# -eq 1 && -f $1 ]] || fail "got ${*:-nothing}, expected a config: bash tools/recipe.sh configs/smollm2_135m.yaml"
config=$1
prepare_environment train "" "test[reference]"
run=$("$VENV/bin/python" -c 'import sys; from eagle3_jax import config; print(config.load(sys.argv[1]).run_dir)' "$config") ||
  fail "$config: see above."

# stage VERB ARGUMENTS...
stage() {
  local verb=$1
  shift
  printf '\n== %s  (%d:%02d since the start)\n' "$verb" $((SECONDS / 60)) $((SECONDS % 60))
  lowest_priority "$VENV/bin/python" -m "eagle3_jax.$verb" --config "$config" "$@" ||
    fail "'$verb' did not finish; what it said stands above. $AGAIN"
}

for verb in prepare regenerate extract train export; do stage "$verb"; done
stage evaluate --replace --prompts "$run/prompts/held_out.jsonl" --output "$run/evaluation/held_out.json"
stage report
printf '\nDone in %d:%02d. The head: %s, its numbers: %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$run/export" "$run/evaluation/held_out.json"
