#!/usr/bin/env bash
# Runs every verb on a real model, from packaged prompts to a measured speed-up, on two CPU cores.
# Measures the machine first, and takes as many prompts as fit 20 minutes (tools/quickstart_size.py).
# Resumes after an interruption; after success it only prints the report.
# Measurements of another machine or version are repeated.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

RUN=runs/quickstart
CONFIG=$RUN/config.yaml
AGAIN="Run the same command again: it goes on where it stopped."
trap 'fail "stopped. $AGAIN"' INT TERM

# Records the longest time of a stage, since a finished stage returns at once.
record() {
  "$VENV/bin/python" - "$RUN/stages.json" "$1" "$2" <<'PYTHON'
import pathlib, sys
from eagle3_jax.runs import disk

path, stage, seconds = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
stages = disk.read_json(path) if path.exists() else {}
disk.write_json(path, stages | {stage: max(seconds, stages.get(stage, 0))})
PYTHON
}

number=0
# timed NAME PYTHON-ARGUMENTS...
timed() {
  local name=$1 start=$SECONDS
  shift
  number=$((number + 1))
  printf '\n== %d/10 %s  (%d:%02d since the start)\n' "$number" "$name" $((SECONDS / 60)) $((SECONDS % 60))
  if ! "$VENV/bin/python" "$@"; then
    if (($(df -Pm . | awk 'NR == 2 {print $4}') < 100)); then fail "stage '$name': the disk is full. Free some space. $AGAIN"; fi
    fail "stage '$name' did not finish; what it said stands above. $AGAIN"
  fi
  record "$name" $((SECONDS - start))
}

# stage NAME VERB ARGUMENTS...
stage() {
  timed "$1" -m "eagle3_jax.$2" --config "$CONFIG" "${@:3}"
}

prepare_environment train "" "test[reference]"
mkdir -p "$RUN" || fail "cannot write to $RUN."
record install "$SECONDS"

timed size tools/quickstart_size.py configs/quickstart.yaml --spent "$SECONDS"
for verb in prepare regenerate extract train export; do stage "$verb" "$verb"; done
compare() { # NAME ARGUMENTS...
  stage "evaluate-$1" evaluate --replace --prompts "$RUN/prompts/held_out.jsonl" --output "$RUN/evaluation/$1.json" "${@:2}"
}
compare chain --evaluate.tree.num-steps 3 --evaluate.tree.topk 1 --evaluate.tree.num-draft-tokens 4
compare tree --evaluate.tree.num-steps 3 --evaluate.tree.topk 3 --evaluate.tree.num-draft-tokens 8
# The default of users: the engine chooses for every dispatch, vanilla decoding included.
compare auto --evaluate.tree auto
stage report report
printf '\nDone in %d:%02d. Numbers: %s, picture: %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$RUN/report.json" "$RUN/report.png"
