#!/usr/bin/env bash
# Installs llama.cpp with its server (xllamacpp, 60 MB) into .venv-llama-cpp, for `export --check llama.cpp`.
# Without hashes: CONTRIBUTING.md, "Versions".
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

VENV=.venv-llama-cpp
VERSIONS=(xllamacpp==2026.10.11549)
if [[ -f $VENV/.installed && $(<"$VENV/.installed") == "${VERSIONS[*]}" ]]; then exit; fi
python=$(find_python)
"$python" -m venv --clear "$VENV"
echo "Installing ${VERSIONS[*]} into $VENV ..."
pip_install "${VERSIONS[@]}"
"$VENV/bin/python" -c 'import xllamacpp; print("xllamacpp", xllamacpp.__version__)' || fail "xllamacpp does not import."
echo "${VERSIONS[*]}" >"$VENV/.installed"
