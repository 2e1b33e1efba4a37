#!/usr/bin/env bash
# All verbs of a recipe, one after the other, for hours beside other work, at the lowest priority:
#
#     bash tools/recipe.sh configs/smollm2_135m.yaml
#
# Run again after anything, it goes on where it stopped; what is finished returns at once, and what another machine or
# version measured is measured again.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

AGAIN="Run the same command again: it goes on where it stopped."
child=""
trap '[[ -z $child ]] || kill "$child" 2>/dev/null; wait; fail "stopped. $AGAIN"' INT TERM

# Linux shares the cores between sessions first (autogroups), where nice says nothing: a session of its own, and the
# lowest priority for that too.
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
