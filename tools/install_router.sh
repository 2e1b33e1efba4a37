#!/usr/bin/env bash
# Installs SGLang's router into .venv-router, for tests/serve/test_router.py. Without hashes: CONTRIBUTING.md, "Versions".
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

VENV=.venv-router
VERSION=sglang-router==0.3.2
if [[ -f $VENV/.installed && $(<"$VENV/.installed") == "$VERSION" ]]; then exit; fi
"$(find_python)" -m venv --clear "$VENV"
echo "Installing $VERSION into $VENV ..."
pip_install "$VERSION"
echo "$VERSION" >"$VENV/.installed"
