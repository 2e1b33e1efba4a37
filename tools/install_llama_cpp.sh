#!/usr/bin/env bash
# Installs llama.cpp with its server (xllamacpp, 60 MB) into .venv-llama-cpp, for `export --check llama.cpp`.
# Without hashes: CONTRIBUTING.md, "Versions".
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

try() { "$VENV/bin/python" -c 'import xllamacpp; print("xllamacpp", xllamacpp.__version__)' || fail "xllamacpp does not import."; }
install_apart .venv-llama-cpp try xllamacpp==2026.10.11549
