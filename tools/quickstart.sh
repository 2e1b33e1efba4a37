#!/usr/bin/env bash
# The whole path on a real model, from packaged prompts to a measured speed-up, on two CPU cores.
# Run again after an interruption, it goes on where it stopped; run again after success, it only shows the report.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

CONFIG=configs/quickstart.yaml
RUN=runs/quickstart
AGAIN="Run the same command again: it goes on where it stopped."
trap 'fail "stopped. $AGAIN"' INT TERM

# Keeps the longest time that a stage took: a finished stage that is run again returns at once.
record() {
  "$VENV/bin/python" - "$RUN/stages.json" "$1" "$2" <<'PYTHON'
import json, os, pathlib, sys

path, stage, seconds = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
stages = json.loads(path.read_text()) if path.exists() else {}
stages[stage] = max(seconds, stages.get(stage, 0))
partial = path.with_suffix(".partial")
partial.write_text(json.dumps(stages, indent=2) + "\n")
os.replace(partial, path)
PYTHON
}

number=0
# stage NAME VERB ARGUMENTS...
stage() {
  local name=$1 verb=$2 start=$SECONDS
  shift 2
  number=$((number + 1))
  printf '\n== %d/9 %s  (%d:%02d since the start)\n' "$number" "$name" $((SECONDS / 60)) $((SECONDS % 60))
  if ! "$VENV/bin/python" -m "eagle3_jax.$verb" --config "$CONFIG" "$@"; then
    if (($(df -Pm . | awk 'NR == 2 {print $4}') < 100)); then fail "stage '$name': the disk is full. Free some space. $AGAIN"; fi
    fail "stage '$name' did not finish; what it said stands above. $AGAIN"
  fi
  record "$name" $((SECONDS - start))
}

prepare_environment train "" "test[reference]"
mkdir -p "$RUN" || fail "cannot write to $RUN."
record install "$SECONDS"

stage prepare prepare
stage regenerate regenerate
stage extract extract
stage train train
stage export export
held_out=$RUN/prompts/held_out.jsonl
stage evaluate-chain evaluate --prompts "$held_out" --output "$RUN/evaluation/chain.json" \
  --evaluate.tree.num-steps 3 --evaluate.tree.topk 1 --evaluate.tree.num-draft-tokens 4
stage evaluate-tree evaluate --prompts "$held_out" --output "$RUN/evaluation/tree.json" \
  --evaluate.tree.num-steps 3 --evaluate.tree.topk 3 --evaluate.tree.num-draft-tokens 8
stage evaluate-tree-and-text evaluate --prompts "$held_out" --output "$RUN/evaluation/tree_and_text.json" \
  --evaluate.tree.num-steps 3 --evaluate.tree.topk 3 --evaluate.tree.num-draft-tokens 8 --evaluate.tree.lookup-tokens 7
stage report report
printf '\nDone in %d:%02d. Numbers: %s, picture: %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$RUN/report.json" "$RUN/report.png"
