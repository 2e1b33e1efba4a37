#!/usr/bin/env bash
# The package as a user gets it: sdist, the wheel made of it, installed alone into an environment of its own, decodes.
#   tools/test_package.sh [PYTHON]
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

PYTHON=${1:-$(find_python)}
root=$PWD
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
constraints=$root/$("$PYTHON" -c 'import sys; print("constraints/py312.txt" if sys.version_info >= (3, 12) else "constraints/py311.txt")')

# Only what git knows: a file that was never added must be missing here too.
mkdir "$place/tree"
git ls-files -z | xargs -0 cp --parents -t "$place/tree"
"$PYTHON" -m venv "$place/build"
"$place/build/bin/pip" install --quiet --constraint "$constraints" build
PIP_CONSTRAINT=$constraints "$place/build/bin/python" -m build --outdir "$place/dist" "$place/tree"

"$PYTHON" -m venv "$place/runtime"
"$place/runtime/bin/pip" install --quiet --constraint "$constraints" "$place"/dist/*.whl
cp tools/check_package.py tests/tiny.py "$place"
cd "$place" || exit 1
JAX_PLATFORMS=cpu runtime/bin/python -W error::ImportWarning check_package.py
