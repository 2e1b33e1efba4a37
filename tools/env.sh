# shellcheck shell=bash
# Sourced by the other scripts: finds a Python, makes the virtual environment, installs once, times parts.
# Needs only bash and Python 3.11 or newer.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=${VENV:-.venv}
export PIP_DISABLE_PIP_VERSION_CHECK=1
# Images of containers set it: then each of some hundred processes compiles all modules that it imports.
unset PYTHONDONTWRITEBYTECODE
NEEDED_MIB=4096
LEAST=${LEAST:-11} # of Python 3
# Checks every annotation at run time, see tests/array_annotations.py.
# shellcheck disable=SC2034
EVERY_ANNOTATION=--jaxtyping-packages=eagle3_jax,beartype.beartype
# pytest for every script: time limits, reasons of skips, two workers, the twenty slowest tests.
# shellcheck disable=SC2034
PYTEST=(python -m pytest -p timeout --timeout-method thread -n 2 --dist loadscope -q -rs --durations 20)

# Process that tells every 15 seconds that work goes on.
BEAT=""

beat() {
  while sleep 15 &>/dev/null && kill -0 $$ 2>/dev/null; do echo "... $SECONDS s so far" >&2; done &
  BEAT=$!
}

rest() {
  if [[ -z $BEAT ]]; then return 0; fi # 0: in a trap it is the status before it
  kill "$BEAT" 2>/dev/null || true
  wait "$BEAT" 2>/dev/null || true
  BEAT=""
}

fail() {
  rest
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# A name on the PATH is not enough: shims of version managers may not run.
is_new_enough() {
  "$1" -c "import sys; sys.exit(sys.version_info < (3, $LEAST))" >/dev/null 2>&1
}

find_python() {
  local candidate found=""
  if [[ -n ${PYTHON:-} ]]; then
    is_new_enough "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.$LEAST or newer that runs."
    echo "$PYTHON"
    return
  fi
  for candidate in python3 python3.13 python3.12 python3.11; do
    if is_new_enough "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  found=$(python3 --version 2>/dev/null || true)
  fail "needs Python 3.$LEAST or newer, found ${found:-no Python}. Install one, or name it: PYTHON=/path/to/python3.12 bash $0"
}

# print_command ENGINE CONFIG: prints the command that serves a run's target and head there.
print_command() {
  local script got=${*:2}
  script=$(basename "$0")
  [[ $# -eq 2 && -f $2 ]] || fail "got ${got:-nothing}, expected a config: bash tools/$script configs/llama31_8b.yaml"
  "$VENV/bin/python" tools/draft_size.py "$2" "$1" || fail "$2: see above."
}

# Tells whether this machine has TPU chips, as `machine.has_tpu` of the package does; DEVICES names another /dev.
has_tpu() {
  compgen -G "${DEVICES:-/dev}/accel*" >/dev/null || compgen -G "${DEVICES:-/dev}/vfio/[0-9]*" >/dev/null
}

# Explains a failure in one sentence, from the output of pip or venv.
explain() {
  local output=$1 last
  case $output in
    *"No space left"* | *"Errno 28"* | *"Disk quota"*)
      echo "the disk is full; $VENV needs about $((NEEDED_MIB / 1024)) GiB. Free some space and run the same command again." ;;
    *"DO NOT MATCH THE HASHES"*)
      last=$(tr -s ' \n' ' ' <<<"${output#*DO NOT MATCH THE HASHES*$'\n'}")
      echo "refused a file whose sha256 is not one that requirements/ lists:$last" ;;
    *"ensurepip is not available"* | *"No module named venv"* | *"No module named ensurepip"* | *"No module named 'ensurepip'"*)
      echo "this Python has no venv module. Install it (on Debian and Ubuntu: apt install python3-venv) and run the same command again." ;;
    *"NewConnectionError"* | *"Failed to establish"* | *"Temporary failure"* | *"timed out"* | *"ConnectionError"* | \
      *"ProxyError"* | *"SSLError"* | *"Network is unreachable"* | *"No matching distribution"*)
      echo "could not get the packages: no network, or a package index that does not hold them. Check the connection and run the same command again." ;;
    *)
      last=${output%$'\n'}
      echo "could not make $VENV: ${last##*$'\n'}" ;;
  esac
}

# uv takes a tenth of pip's time. Where the PATH has none, pip installs the locked one beside the other packages.
get_uv() {
  if command -v uv >/dev/null || [[ -x $VENV/bin/uv ]]; then return; fi
  sed -n '/^uv==/,/[^\\]$/p' requirements/test.txt |
    "$VENV/bin/python" -m pip install --quiet --retries 1 --require-hashes --requirement /dev/stdin >/dev/null 2>&1 || true
}

# uv ignores pip's settings; these four are passed on.
uv_install() (
  uv=$(command -v uv || echo "$VENV/bin/uv")
  [[ -x $uv ]] || exit
  [[ -z ${PIP_CERT:-} ]] || export SSL_CERT_FILE=$PIP_CERT
  [[ -z ${PIP_INDEX_URL:-} ]] || export UV_DEFAULT_INDEX=$PIP_INDEX_URL
  [[ -z ${PIP_FIND_LINKS:-} ]] || export UV_FIND_LINKS=$PIP_FIND_LINKS
  [[ -z ${PIP_NO_INDEX:-} ]] || export UV_NO_INDEX=1
  "$uv" pip install --quiet --python "$VENV/bin/python" "$@" >/dev/null 2>&1
)

# Installs with uv; if it is missing or fails, with pip, whose error is explained.
pip_install() {
  local output
  if uv_install "$@"; then return; fi
  output=$("$VENV/bin/python" -m pip install --progress-bar off "$@" 2>&1) || fail "$(explain "$output")"
}

# prepare_environment ROLE [EXTRA [SUPERSET...]]
# Installs the packages of requirements/ROLE.txt, by hash, and this package into $VENV, once for each set of versions.
# Packages of EXTRA ("[reference]") that are not locked come without hashes.
# A stamp marks a complete environment. The stamp of a SUPERSET, a role and extra that include this one, counts too.
# An interrupted installation leaves no stamp, so the next run completes it.
prepare_environment() {
  beat
  make_environment "$@"
  rest
}

make_environment() {
  local role=$1 extra=${2:-} superset python key output free known=""
  if is_new_enough "$VENV/bin/python" && ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    echo "$VENV has no pip (uv leaves it out); adding it ..."
    "$VENV/bin/python" -m ensurepip >/dev/null 2>&1 || echo "No pip to add; making $VENV anew ..."
  fi
  if ! is_new_enough "$VENV/bin/python" || ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    echo "Making $VENV with $("$python" --version) ..."
    output=$("$python" -m venv --clear "$VENV" 2>&1) || fail "$(explain "$output")"
  fi
  key=$(cat pyproject.toml requirements/*.txt | cksum)
  for superset in "$role$extra" "${@:3}"; do
    if [[ ! -f $VENV/.installed-$superset ]]; then continue; fi
    if [[ $(<"$VENV/.installed-$superset") == "$key" ]]; then return; fi
    known=$superset
  done

  free=$(df -Pm "$VENV" | awk 'NR == 2 {print $4}')
  if [[ -z $known ]] && ((free < NEEDED_MIB)); then
    fail "the disk is nearly full: $VENV needs about $((NEEDED_MIB / 1024)) GiB, $free MiB are free. Free some space and run the same command again."
  fi
  echo "Installing into $VENV (minutes the first time, only once) ..."
  rm -f "$VENV/.installed-$role$extra"
  get_uv
  pip_install --require-hashes --requirement "requirements/$role.txt"
  # pip cannot hash a folder; everything that the build needs is installed by now.
  pip_install --no-build-isolation --no-deps --editable .
  if [[ -n $extra ]]; then pip_install --no-build-isolation --editable ".$extra"; fi
  echo "$key" >"$VENV/.installed-$role$extra" || fail "the disk is full. Free some space and run the same command again."
}

# install_apart FOLDER AFTER ARGUMENTS...: makes an environment of its own by these arguments of pip, then runs AFTER.
# It is made anew where an argument has changed, or of an editable package pyproject.toml.
install_apart() {
  local key=${*:3} python
  VENV=$1
  [[ $key != *--editable* ]] || key+=" $(cksum <pyproject.toml)"
  if [[ -f $VENV/.installed && $(<"$VENV/.installed") == "$key" ]]; then return; fi
  python=$(find_python)
  "$python" -m venv --clear "$VENV"
  echo "Installing ${*:3} into $VENV ..."
  pip_install "${@:3}"
  "$2"
  echo "$key" >"$VENV/.installed"
}

# Lines of `timed`.
TIMES=()

# timed NAME COMMAND...: runs the command and records its time for `show_times`.
timed() {
  local name=$1 start=$SECONDS status=0
  shift
  echo "== $name"
  "$@" || status=$?
  TIMES+=("$(printf '%3d:%02d  %s' $(((SECONDS - start) / 60)) $(((SECONDS - start) % 60)) "$name")")
  return "$status"
}

show_times() {
  echo "== minutes"
  printf '%s\n' "${TIMES[@]}" "$(printf '%3d:%02d  in all' $((SECONDS / 60)) $((SECONDS % 60)))"
}
