#!/usr/bin/env bash
# Prints a Markdown table of the configs that fit each TPU: bash tools/tpu_fit_table.sh FOLDER
# Writes a JSON file into FOLDER for each line of the list below. Existing files are kept, unless a kernel or the compiler
# refused a program ("refused").
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$1
PYTHON=${PYTHON:-.venv/bin/python}
mkdir -p "$folder"
# config, topology, mesh.model, verbs
while read -r config topology model verbs; do
  file=$folder/$config-${topology/:/-}-$verbs.json
  if [[ -f $file ]] && ! grep -q '"refused"' "$file"; then continue; fi
  target=${config%_eagle2} target=${target%_dflash} target=${target%_dspark}
  draft=()
  if [[ -d configs/heads/$config ]]; then draft=(--evaluate.draft "configs/heads/$config"); fi
  flags=${LIBTPU_INIT_ARGS:-}
  if [[ $config-$topology-$verbs == llama4_scout-tpu7x:*-extract ]]; then # libtpu 0.0.51 fails otherwise
    flags+=" --xla_tpu_enable_sparse_core_collective_offload_all_reduce=false"
  fi
  LIBTPU_INIT_ARGS=$flags "$PYTHON" tools/tpu_fit.py \
    --config "configs/$config.yaml" --target.name "configs/targets/$target" \
    --topology "$topology" --mesh.model "$model" --verbs "$verbs" --json "$file" "${draft[@]}" >&2 ||
    [[ -f $file ]] # also where something does not fit
done <<'LIST'
llama31_8b v5e:2x2 4 evaluate,extract
llama31_8b v5e:2x2 2 train
llama31_8b v6e:2x2 4 evaluate,extract
llama31_8b v6e:2x2 2 train
llama31_8b v5p:2x2x1 4 evaluate,extract
llama31_8b v5p:2x2x1 2 train
llama31_8b tpu7x:2x2x1 8 evaluate,extract
llama31_8b tpu7x:2x2x1 4 train
llama33_70b v5e:4x4 16 evaluate,extract,train
llama33_70b v6e:4x4 8 evaluate,extract,train
llama33_70b v5p:2x2x4 8 evaluate,extract,train
llama33_70b tpu7x:2x2x1 8 evaluate,extract,train
llama2_7b_eagle2 v5e:2x2 4 evaluate
llama2_7b_eagle2 v6e:1x1 1 evaluate
llama2_7b_eagle2 v5p:2x2x1 4 evaluate
llama2_7b_eagle2 tpu7x:2x2x1 8 evaluate
gemma3_4b v5e:2x2 2 evaluate,extract,train
gemma3_4b v6e:1x1 1 evaluate,extract,train
gemma3_4b v5p:2x2x1 4 evaluate,extract,train
gemma3_4b tpu7x:2x2x1 4 evaluate,extract,train
qwen25_7b v5e:2x2 4 evaluate,extract,train
qwen25_7b v6e:1x1 1 evaluate,extract,train
qwen25_7b v5p:2x2x1 4 evaluate,extract,train
qwen25_7b tpu7x:2x2x1 4 evaluate,extract,train
mimo_7b v5e:2x2 4 evaluate,extract,train
mimo_7b v6e:1x1 1 evaluate,extract,train
mimo_7b v5p:2x2x1 4 evaluate,extract,train
mimo_7b tpu7x:2x2x1 4 evaluate,extract,train
qwen3_8b v5e:2x2 4 evaluate,extract,train
qwen3_8b v6e:2x4 8 evaluate,extract,train
qwen3_8b v5p:2x2x1 4 evaluate,extract,train
qwen3_8b tpu7x:2x2x1 8 evaluate,extract,train
qwen3_8b_dflash v6e:2x4 8 evaluate,train
qwen3_8b_dspark v6e:2x4 8 evaluate,train
llama31_8b_dflash v6e:2x4 8 evaluate,train
llama31_8b_dspark v6e:2x4 8 evaluate,train
gpt_oss_20b v5e:2x4 8 evaluate,extract,train
gpt_oss_20b v6e:2x2 4 evaluate,extract,train
gpt_oss_20b v5p:2x2x1 4 evaluate,extract,train
gpt_oss_20b tpu7x:2x2x1 8 evaluate,extract,train
qwen3_30b_a3b v5e:4x4 16 evaluate,extract,train
qwen3_30b_a3b v6e:2x4 4 evaluate,extract,train
qwen3_30b_a3b v5p:2x2x1 4 evaluate,extract,train
qwen3_30b_a3b tpu7x:2x2x1 4 evaluate,extract,train
llama4_scout v5e:4x4 16 evaluate,extract,train
llama4_scout v6e:4x4 16 evaluate,extract,train
llama4_scout v5p:2x2x2 8 evaluate,extract,train
llama4_scout tpu7x:2x2x1 8 evaluate,train
llama4_scout tpu7x:2x2x1 8 extract
LIST
"$PYTHON" - "$folder" <<'PYTHON'
import json, pathlib, sys

PROGRAMS = ("evaluate: prefill", "evaluate: rounds", "extract", "train: step")
print("| config | chips | mesh (data x model) | prefill | rounds | extraction | training step |")
print("|---|---|---|---|---|---|---|")
plans = {}
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.json")):
    for row in json.loads(path.read_text()):
        plans.setdefault((path.stem.partition("-")[0], row["topology"]), {})[row["program"]] = row
for (config, topology), rows in plans.items():
    cells, meshes = [], []
    for row in map(rows.get, PROGRAMS):
        mesh = " x ".join(map(str, row["mesh"].values())) if row else None
        if mesh and mesh not in meshes:
            meshes.append(mesh)
        if row is None:
            cells.append("")
        elif "refused" in row:
            cells.append(row["refused"].partition("\n")[0])
        else:
            total, hbm = row["total"] / 2**30, row["hbm"] / 2**30
            cells.append(f"{total:.1f} ({total / hbm:.0%})" if row["fits"] else f"{total - hbm:.1f} GiB too much")
    print("|", " | ".join([config, topology.replace(":", " "), ", ".join(meshes), *cells]), "|")
PYTHON
