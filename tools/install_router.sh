#!/usr/bin/env bash
# Installs SGLang's router into .venv-router, for tests/serve/test_router.py. Without hashes: CONTRIBUTING.md, "Versions".
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

install_apart .venv-router true sglang-router==0.3.2
