#!/usr/bin/env bash
# Runs batch jobs on Cloud TPU VMs: requests a slice (a queued resource), installs on all its hosts, runs a verb on all.
#
#     bash tools/tpu_vm.sh create  --name head --zone us-west4-a --type v5litepod-16 --spot
#     bash tools/tpu_vm.sh install --name head --zone us-west4-a
#     bash tools/tpu_vm.sh first-run --name head --zone us-west4-a   # is all of it right here, and how fast
#     bash tools/tpu_vm.sh extract --name head --zone us-west4-a --config my.yaml   # run_dir: gs://my-bucket/my-head
#     bash tools/tpu_vm.sh train   --name head --zone us-west4-a --config my.yaml -- --train.learning-rate 1e-4
#     bash tools/tpu_vm.sh serve   --name head --zone us-west4-a --config my.yaml --port 8000
#     bash tools/tpu_vm.sh delete  --name head --zone us-west4-a
#
# Every command resumes when it is run again. --project names another project than gcloud's own.
# See docs/batch-jobs-on-tpu-vms.md.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

# Label of the slices that `create` makes; others are never used or deleted.
LABEL=eagle3_jax
PAUSE=20 # seconds between two looks
PATIENCE=5 # looks in a row at which a host may stay silent
STOPPED=75 # a verb's exit status after SIGTERM, as eagle3_jax/runs/command.py has it
# A bucket is asked as the VM's service account.
VERBS_ENVIRONMENT="PYTHONUNBUFFERED=1 EAGLE3_JAX_CREDENTIALS=machine"

# ------------------------------------------------------------------------------------------------------------ arguments
declare -A OPTIONS=([create]="--type --wait-minutes --spot" [install]="" [first-run]=--run-dir [regenerate]=--config
  [extract]=--config [train]=--config [serve]="--config --port" [delete]="")
command=${1:-nothing}
[[ -v OPTIONS[$command] ]] ||
  fail "got $command, expected create, install, first-run, regenerate, extract, train, serve or delete."
shift
options="--name --zone --project ${OPTIONS[$command]}"

name="" zone="" project="" type="" config="" spot="" run_dir=""
port=8000 wait_minutes=60
overrides=()
while (($#)); do
  if [[ $1 == -- && " $options " == *" --config "* ]]; then
    overrides=("${@:2}")
    break
  fi
  [[ $1 == --* && " $options " == *" $1 "* ]] || fail "$command: got '$1', expected some of $options."
  variable=${1#--}
  variable=${variable//-/_}
  if [[ $1 == --spot ]]; then
    spot=yes
    shift
  else
    (($# > 1)) && [[ $2 != --* ]] || fail "$1: got nothing, expected a value."
    printf -v "$variable" %s "$2"
    shift 2
  fi
done

say() { echo "$*" >&2; }

# expect OPTION VALUE PATTERN WORDS
expect() {
  [[ $2 =~ ^($3)$ ]] || fail "$1: got ${2:-nothing}, expected $4."
}

# slice TYPE: sets its hosts and the software of its VMs. Status 1 for an unknown type.
declare -A SOFTWARE=([v5litepod]=v2-alpha-tpuv5-lite [v6e]=v2-alpha-tpuv6e [v5p]=v2-alpha-tpuv5)
slice() {
  local size=${1##*-}
  if [[ $1 =~ ^(v5litepod|v6e)-[148]$ ]]; then
    hosts=1
  elif [[ $1 =~ ^(v5litepod|v6e)-(16|32|64|128|256)$ ]]; then
    hosts=$((size / 4))
  elif [[ $1 =~ ^v5p-(8|16|32|64|128|256|512|1024)$ ]]; then
    hosts=$((size / 8)) # the number counts cores: two for each chip, four chips for each host
  else
    return 1
  fi
  software=${SOFTWARE[${1%%-*}]}
}

expect --name "$name" '[a-z]([a-z0-9-]{0,61}[a-z0-9])?' "lower-case letters, digits and hyphens, 63 at most"
expect --zone "$zone" '[a-z]+-[a-z]+[0-9]+-[a-z0-9]+' "a zone such as us-west4-a"
[[ -z $project ]] || expect --project "$project" '[a-z][a-z0-9.:-]+' "a project's id"
expect --port "$port" '[1-9][0-9]{3,4}' "a port from 1000 on"
expect --wait-minutes "$wait_minutes" '[1-9][0-9]{0,3}' "1 to 9999"
if [[ $command == create ]]; then
  slice "$type" || fail "--type: got ${type:-nothing}, expected v5litepod-N or v6e-N (N chips: 1, 4, 8, 16 ... 256), or v5p-N \
(N cores: 8, 16 ... 1024). A tpu7x is lent through Kubernetes alone: examples/kubernetes/jobset.yaml."
fi
if [[ $options == *--config* ]]; then
  [[ -f $config ]] || fail "--config: got ${config:-nothing}, expected a file of a run, such as configs/llama31_8b.yaml."
  if [[ -x $VENV/bin/python ]]; then # else the host refuses what is wrong in it
    run_dir=$("$VENV/bin/python" -c 'if True:
      import sys
      from eagle3_jax import config
      try:
        print(config.load(sys.argv[1], sys.argv[2:]).run_dir)
      except config.ConfigError as error:
        sys.exit(str(error))' "$config" ${overrides[@]+"${overrides[@]}"}) || fail "--config $config: see above."
  fi
fi
where=("--zone=$zone")
[[ -z $project ]] || where+=("--project=$project")
command -v gcloud >/dev/null || fail "no gcloud on the PATH, expected the Google Cloud CLI."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# --------------------------------------------------------------------------------------------------------------- gcloud
# look: sets state (NONE without a slice), label, type and tier (spot, or empty) of the slice.
look() {
  local fields="state.state,tpu.nodeSpec[0].node.labels.made_by,tpu.nodeSpec[0].node.acceleratorType" answer
  fields+=",spot.encode(base64)" # an empty message where it is there, which prints as nothing itself
  if ! answer=$(gcloud compute tpus queued-resources describe "$name" "${where[@]}" "--format=csv[no-heading]($fields)" 2>"$scratch/error"); then
    grep -q "NOT_FOUND: .*/$name\b" "$scratch/error" || fail "$(<"$scratch/error")"
    state=NONE
  else
    IFS=, read -r state label kind tier <<<"$answer"
    tier=${tier:+yes}
  fi
  [[ $state == NONE || $label == "$LABEL" ]] ||
    fail "--name: got $name, whose label made_by is ${label:-missing}, expected a slice that 'create' made ($LABEL)."
}

# ready: looks, fails unless the slice is usable, and sets its hosts.
ready() {
  look
  case $state in
    ACTIVE) slice "$kind" || fail "$name: got $kind, expected a type that 'create' makes." ;;
    NONE) fail "--name: got $name, expected a slice that 'create' made; there is none of this name in $zone." ;;
    SUSPENDING | SUSPENDED)
      fail "$name is $state: it was reclaimed. Run 'create', 'install' and then this command again: what is in the bucket \
stays, and the run goes on from there." ;;
    *) fail "$name is $state, expected ACTIVE: run 'create' again, which waits for it." ;;
  esac
}

# everywhere WORD SCRIPT: runs the script on all hosts at once; fails unless each one completes it.
everywhere() {
  local output=$scratch/output count
  on_hosts "$2"$'\n'"echo \"tpu_vm: \$(hostname) $1\"" | tee "$output" || true
  count=$(grep -c "^tpu_vm: .* $1\$" "$output" || true)
  ((count == hosts)) || fail "$1: $count of $hosts hosts; what was said stands above. Run the same command again."
}

on_hosts() {
  gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker=all --quiet "--command=$1"
}

# ------------------------------------------------------------------------------------------------- what runs on a host
install_script() {
  cat <<EOF
set -eu
mkdir -p eagle3_jax
tar -xzf eagle3_jax.tar.gz -C eagle3_jax
cd eagle3_jax
export LEAST=12 # the newest JAX, with the libtpu that it names
python=\$(bash -c 'source tools/env.sh; find_python' 2>/dev/null) || python=""
if ! "\$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
  # Images of Ubuntu 22.04 have Python 3.10. uv is locked by hash, and knows the hash of the Python that it fetches.
  python3 -m pip --version >/dev/null 2>&1 || { sudo apt-get update -q && sudo apt-get install -y -q python3-pip; }
  sed -n '/^uv==/,/[^\\]\$/p' requirements/test.txt |
    python3 -m pip install --quiet --require-hashes --upgrade --target .uv --requirement /dev/stdin
  .uv/bin/uv python install 3.12
  python=\$(.uv/bin/uv python find --managed-python 3.12)
fi
PYTHON=\$python bash -c 'source tools/env.sh; prepare_environment tpu' install
EOF
}

# The job outlives this connection. It holds a lock while it runs, and writes its exit status to a file.
start_script() {
  local end=END_OF_THE_FILE line=""
  if ((${#overrides[@]})); then printf -v line ' %q' "${overrides[@]}"; fi
  cat <<EOF
set -eu
[ -x eagle3_jax/.venv/bin/python ] || { echo "\$(hostname): no eagle3_jax, expected what 'install' makes" >&2; exit 1; }
mkdir -p eagle3_jax/jobs/$command
cd eagle3_jax/jobs/$command
cat >config.partial <<'$end'
$(<"$config")
$end
if flock -n lock true; then
  mv config.partial config.yaml
  rm -f status pid
  if [ -f log ]; then mv log log.before; fi
  cat >run.sh <<'END_OF_THE_RUN'
echo \$\$ >pid
cd ../..
status=0
env $VERBS_ENVIRONMENT .venv/bin/python -m eagle3_jax.$command --config jobs/$command/config.yaml$line || status=\$?
if [ \$status = $STOPPED ]; then status=stopped; fi
echo \$status >jobs/$command/status.partial
mv jobs/$command/status.partial jobs/$command/status
END_OF_THE_RUN
  setsid nohup flock -w 60 lock bash run.sh >log 2>&1 </dev/null &
  for _ in \$(seq 100); do
    if [ -f status ] || ! flock -n lock true; then break; fi
    sleep 0.1
  done
else
  rm config.partial
  echo "\$(hostname): runs already"
fi
EOF
}

# State: "running", the verb's exit status, "stopped" (by SIGTERM; it can resume) or "killed".
status_script() {
  cat <<EOF
cd eagle3_jax/jobs/$command || exit 1
state=running
if flock -n lock true; then state=killed; fi
if [ -f status ]; then state=\$(cat status); fi
lines=20
if [ "\$state" = running ]; then lines=1; fi
# A progress bar may leave its line open; the state needs a new one.
if [ "\$state" != 0 ]; then tail -c 10000 log | tr '\r' '\n' | grep -a . | tail -n \$lines; fi
echo "tpu_vm: \$(hostname) \$state"
EOF
}

# ------------------------------------------------------------------------------------------------------------- commands
create() {
  local waited asked=""
  slice "$type"
  for ((waited = 0; waited <= 60 * wait_minutes; waited += PAUSE)); do
    look
    [[ $state == NONE || $kind == "$type" ]] || fail "--type: got $type, expected $kind, which $name is; delete it first."
    [[ $state == NONE || $tier == "$spot" ]] || fail "--spot: got ${spot:-no}, expected ${tier:-no}, as $name has it; delete it first."
    if [[ -z $asked && $state =~ ^(SUSPENDED|FAILED)$ ]]; then
      say "$name is $state; asking for another one."
      delete
      state=NONE
    fi
    if [[ -z $asked && $state == NONE ]]; then
      # The request expires when this wait would; until then it stays, even if nobody waits.
      asked=yes
      gcloud compute tpus queued-resources create "$name" "--node-id=$name" "${where[@]}" "--accelerator-type=$type" \
        "--runtime-version=$software" "--labels=made_by=$LABEL" ${spot:+--spot} "--valid-until-duration=${wait_minutes}m" --async --quiet
    fi
    case $state in
      ACTIVE)
        say "$name is ACTIVE: $type, $hosts hosts. Next: install."
        return
        ;;
      SUSPENDED | FAILED) fail "$name is $state, expected ACTIVE. The same command asks again; gcloud compute tpus queued-resources describe $name ${where[*]} says why." ;;
    esac
    say "$name: $state. Ctrl-C ends the waiting alone: it may still come, and costs then; 'delete' ends it."
    sleep "$PAUSE"
  done
  fail "$name is $state after $wait_minutes minutes, expected ACTIVE. The same command waits on, or asks again; 'delete' ends the request."
}

install() {
  local agent=""
  ready
  # If an agent runs with other keys, gcloud copies to several hosts only with its own key in it.
  ((hosts == 1)) || agent=", after ssh-add ~/.ssh/google_compute_engine where the SSH agent lacks this key"
  git diff --quiet HEAD || say "Changes that are not committed stay here."
  git archive --format=tar.gz "--output=$scratch/eagle3_jax.tar.gz" HEAD
  gcloud compute tpus tpu-vm scp "$scratch/eagle3_jax.tar.gz" "$name:eagle3_jax.tar.gz" "${where[@]}" --worker=all --quiet ||
    fail "not copied to all hosts; see above. Run the same command again$agent."
  everywhere installed "$(install_script)"
}

first_run() {
  local status=0
  ready
  ((hosts == 1)) || [[ -n $run_dir ]] || say "Without --run-dir gs://BUCKET/FOLDER the verb train is left out on $hosts hosts."
  on_hosts "cd eagle3_jax && env $VERBS_ENVIRONMENT .venv/bin/python tools/tpu_first_run.py\
${run_dir:+ --run-dir $(printf %q "$run_dir")}" || status=$?
  mkdir -p runs
  gcloud compute tpus tpu-vm scp "$name:eagle3_jax/runs/first_run/first_run.json" runs/first_run.json "${where[@]}" --worker=0 --quiet ||
    fail "got no table from host 0; what was said stands above."
  say "runs/first_run.json holds all figures."
  ((status == 0)) || fail "first-run: something is WRONG, or a host did not answer; see above."
}

job() {
  ready
  case $run_dir in
    "" | /* | gs://*) ;;
    *) say "run_dir $run_dir lies on the host's own disk and goes with it; gs://BUCKET/$run_dir would stay." ;;
  esac
  everywhere started "$(start_script)"
  say "Ctrl-C leaves the job running; the same command follows it again."
  follow
}

follow() {
  local output=$scratch/output silent=0
  while true; do
    on_hosts "$(status_script)" >"$output" || true
    cat "$output"
    if (($(grep -c "^tpu_vm: .* 0\$" "$output" || true) == hosts)); then
      say "$command: finished on $hosts of $hosts hosts."
      return
    fi
    if (($(grep -c "^tpu_vm: " "$output" || true) == hosts)); then
      silent=0
      grep -q "^tpu_vm: .* running\$" "$output" || fail "$command ended, its log stands above. Run the same command again: it goes on where it was."
    else
      ready
      ((++silent < PATIENCE)) || fail "not all $hosts hosts answer. The job goes on; the same command follows it again."
    fi
    sleep "$PAUSE"
  done
}

# The tunnel's end stops the server, on all hosts: Ctrl-C and a lost connection send SIGTERM to the verb on host 0.
tunnel_script() {
  cat <<EOF
cd eagle3_jax/jobs/serve
job=\$(cat pid)
trap 'until pkill -TERM -P \$job || ! kill -0 \$job; do sleep 0.1; done' HUP INT TERM
tail -n +1 -f --pid=\$job log &
until wait; do :; done
[ "\$(cat status)" = 0 ]
EOF
}

serve() {
  ready
  overrides=(--host 127.0.0.1 --port "$port" ${overrides[@]+"${overrides[@]}"})
  everywhere started "$(start_script)"
  say "On http://127.0.0.1:$port while this runs; Ctrl-C ends the server and the tunnel."
  gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker=0 --quiet --ssh-flag=-tt "--ssh-flag=-L 127.0.0.1:$port:127.0.0.1:$port" \
    "--command=$(tunnel_script)" || fail "serve ended, its log stands above. Run the same command again."
}

delete() {
  look
  if [[ $state == NONE ]]; then
    say "There is no $name in $zone."
  else
    gcloud compute tpus queued-resources delete "$name" "${where[@]}" --force --quiet
  fi
}

case $command in
  regenerate | extract | train) job ;;
  *) "${command/-/_}" ;;
esac
