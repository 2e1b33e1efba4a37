#!/usr/bin/env bash
# Measures one head with several draft sizes: bash tools/sweep_trees.sh CONFIG PROMPTS.jsonl [--evaluate.limit 20 ...]
# Reports go to <run_dir>/evaluation/; sizes that are measured already are not measured again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
config=$1 prompts=$2
shift 2
PYTHON=${PYTHON:-.venv/bin/python}
folder=$("$PYTHON" -c 'import sys; from eagle3_jax import config; print(config.load(sys.argv[1]).folder("evaluate"))' "$config")
mkdir -p "$folder"
# num_steps topk num_draft_tokens
for size in "3 1 4" "4 1 5" "5 1 6" "7 1 8" "4 3 8" "5 4 16" "6 4 32"; do
  read -r steps topk nodes <<<"$size"
  "$PYTHON" -m eagle3_jax.evaluate --config "$config" --prompts "$prompts" --output "$folder/$steps-$topk-$nodes.json" \
    --evaluate.tree.num-steps "$steps" --evaluate.tree.topk "$topk" --evaluate.tree.num-draft-tokens "$nodes" "$@" >&2
done
"$PYTHON" - "$folder" <<'PYTHON'
import json, pathlib, sys

print("| num_steps | topk | num_draft_tokens | tau | speed-up | identical | accepted per position |")
print("|---|---|---|---|---|---|---|")
for path in sorted(pathlib.Path(sys.argv[1]).glob("*-*-*.json"), key=lambda p: [int(x) for x in p.stem.split("-")][1:]):
    report = json.loads(path.read_text())
    steps, topk, nodes = path.stem.split("-")
    alpha = " ".join("-" if share is None else f"{share:.2f}" for share in report["alpha"])
    same = f"{report['identical']}/{report['prompts']}"
    print(f"| {steps} | {topk} | {nodes} | {report['tau']:.2f} | {report['speedup']:.2f} | {same} | {alpha} |")
PYTHON
