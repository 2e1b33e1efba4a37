#!/usr/bin/env bash
# Tests the rollouts of Tunix in .venv-tunix, an environment of its own, since Tunix holds back versions of other packages.
#   tools/ci/test_tunix.sh [ARGUMENTS OF PYTEST]
# Without hashes: CONTRIBUTING.md, "Versions".
source "$(dirname "${BASH_SOURCE[0]}")/../env.sh"

# Tunix takes safetensors below 0.8, which later versions of transformers do not. Its own imports warn of deprecated ones.
install_apart .venv-tunix true --editable ".[train]" \
  google-tunix==0.1.7 transformers==5.12.1 beartype hypothesis pytest pytest-timeout pytest-xdist
"$VENV/bin/python" -m pytest -p timeout --timeout-method thread -n 0 -q -rs -W ignore::DeprecationWarning \
  tests/test_tunix.py "$@"
