#!/usr/bin/env bash
# Builds the sdist and its wheel, installs the wheel alone into a new environment, and decodes. FOLDER gets both files.
#   tools/ci/test_package.sh [PYTHON [FOLDER]]
source "$(dirname "${BASH_SOURCE[0]}")/../env.sh"

PYTHON=${1:-$(find_python)}
built=${2:+$(realpath "$2")}
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

# Tracked files only: a file that was never added must be missing here too.
mkdir "$place/tree"
git ls-files -z | xargs -0 cp --parents -t "$place/tree"
cp tools/ci/check_package.py tests/tiny.py "$place"
VENV=$place/runtime
"$PYTHON" -m venv "$VENV"
python=$VENV/bin/python
pip_install --require-hashes --requirement requirements/decode.txt

cd "$place/tree" || exit 1
"$python" -c 'import sys, setuptools.build_meta as build; build.build_sdist(sys.argv[1])' "$place" >/dev/null
cd "$place" || exit 1
"$python" -m pip wheel --quiet --no-deps --no-build-isolation "$place"/*.tar.gz
"$python" -m pip install --quiet --no-deps "$place"/*.whl
"$python" -m pip check
# What is compiled runs once: without LLVM's optimizer.
JAX_PLATFORMS=cpu XLA_FLAGS=--xla_backend_optimization_level=0 "$python" -W error::ImportWarning check_package.py
[[ -z $built ]] || install -D -m 644 -t "$built" ./*.tar.gz ./*.whl
