#!/usr/bin/env bash
# Prints the command that serves a run's target and head in SGLang, with the best tree that was measured:
#
#     bash tools/serve_sglang.sh configs/llama31_8b.yaml
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

[[ $# -eq 1 && -f $1 ]] || fail "got ${*:-nothing}, expected a config: bash tools/serve_sglang.sh configs/llama31_8b.yaml"
"$VENV/bin/python" tools/draft_size.py "$1" sglang || fail "$1: see above."
