"""tools/tpu_vm.sh asks the right things of gcloud, in the right order; what it sends to hosts runs there.

`gcloud` is a program that writes down what it was asked and answers with the states that a test tells it. What is meant
for a host runs in a folder that stands for it.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
from typing import Any

import pytest
import yaml

from eagle3_jax.runs import command
from eagle3_jax.runs.bucket import clients

ROOT = pathlib.Path(__file__).parents[1]

GCLOUD = f"""#!{sys.executable} -IS
import fcntl, json, os, pathlib, shutil, signal, subprocess, sys
fake = pathlib.Path(os.environ["FAKE"])
asked = sys.argv[1:]
with open(fake / "asked.jsonl", "a") as log:
    log.write(json.dumps(asked) + "\\n")
settings = json.loads((fake / "says.json").read_text())
hosts = sorted((fake / "hosts").iterdir())
option = dict(word.removeprefix("--").split("=", 1) for word in asked if word.startswith("--") and "=" in word)
what = asked[asked.index("tpus") + 2] if "tpus" in asked else asked[1]
if what == "describe":
    state, *later = settings["states"]
    if later:
        (fake / "says.json").write_text(json.dumps(settings | {{"states": later}}))
    error = "ERROR: (gcloud.compute.tpus.queued-resources.describe) "
    if state == "NONE":
        resource = "projects/mine/locations/us-west4-a/queuedResources/head"
        sys.exit(f"{{error}}NOT_FOUND: Resource '{{resource}}' was not found. This command is authenticated as me")
    if state == "FORBIDDEN":
        sys.exit(f"{{error}}PERMISSION_DENIED: Project 'mine' not found or permission denied.")
    print(state, settings["label"], settings["type"], "e30=" if settings["spot"] else "", sep=",")
elif what == "scp" and ":" in asked[asked.index("scp") + 1]:  # from a host
    path = asked[asked.index("scp") + 1].split(":")[1]
    shutil.copy(hosts[int(option["worker"])] / path, fake / asked[asked.index("scp") + 2].split("/")[-1])
elif what == "scp":
    for host in hosts:
        shutil.copy(asked[asked.index("scp") + 1], host / asked[asked.index("scp") + 2].split(":")[1])
elif what == "ssh":
    if settings["release_after"] and len((fake / "asked.jsonl").read_text().splitlines()) > settings["release_after"]:
        (fake / "hold").unlink(missing_ok=True)
    chosen = hosts if option["worker"] == "all" else [hosts[int(option["worker"])]]
    deaf = [host for host in chosen if host.name in settings["deaf"] and settings["deaf_to"] in option["command"]]
    for job in [job for host in chosen for job in host.glob("eagle3_jax/jobs/*") if not (fake / "hold").exists()]:
        with (job / "lock").open("a") as lock:  # a job that nothing holds has ended when somebody looks
            fcntl.flock(lock, fcntl.LOCK_EX)
    del os.environ["VENV"]
    for ends in (signal.SIGHUP, signal.SIGINT):  # as sshd starts programs, whoever ignores a signal here (nohup)
        signal.signal(ends, signal.SIG_DFL)
    script = ["bash", "-c", option["command"]]
    status = [subprocess.run(script, cwd=host, timeout=15).returncode for host in chosen if host not in deaf]
    sys.exit(max(status, default=0) or len(deaf))
"""

# The Python of a host's virtual environment: leaves its arguments and ends as it is told, or waits while it is held.
VERB = """#!/usr/bin/env bash
printf '%s\\0' "$@" >>asked
echo "$EAGLE3_JAX_CREDENTIALS" >credentials
echo "step 1"
while [ -e "$FAKE/hold" ]; do sleep 0.02; done
echo "the last words of the verb"
exit "$(cat "$FAKE/exit" 2>/dev/null || echo 0)"
"""


# What gcloud answers in a run, unless a test says otherwise: the states of the slice, the last one again and again; its
# label, its type, and whether it is a spot one; which hosts cannot be reached with a script that contains `deaf_to`;
# after how many questions the verb is no longer held.
SAYS: dict[str, Any] = {
    "states": ["ACTIVE"],
    "label": "eagle3_jax",
    "type": "v5p-16",
    "spot": False,
    "deaf": [],
    "deaf_to": "",
    "release_after": 0,
}


class Cloud:
    """A zone with one slice, or none yet, of two hosts."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.programs = folder / "programs"
        self.programs.mkdir()
        self.path = f"{self.programs}:/usr/bin:/bin"
        self.program("gcloud", GCLOUD)
        self.program("sleep", "#!/bin/sh\nexec /bin/sleep 0.02\n")
        self.new_hosts()
        self.install()

    def program(self, name: str, text: str) -> None:
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    def new_hosts(self) -> None:
        for name in ("0", "1"):
            (self.folder / "hosts" / name).mkdir(parents=True)

    def install(self) -> None:
        """As the command of that name, but with a Python that only writes down what it is asked."""
        for host in self.hosts:
            python = host / "eagle3_jax/.venv/bin/python"
            python.parent.mkdir(parents=True)
            python.write_text(VERB)
            python.chmod(0o755)

    @property
    def hosts(self) -> list[pathlib.Path]:
        return sorted((self.folder / "hosts").iterdir())

    def run(
        self, command: str, *arguments: str, venv: str = "/no venv", **says: Any
    ) -> subprocess.CompletedProcess[str]:
        slice_ = ["--name", "head", "--zone", "us-west4-a"]
        return self.bash(str(ROOT / "tools/tpu_vm.sh"), command, *slice_, *arguments, venv=venv, **says)

    def bash(self, *arguments: str, venv: str = "/no venv", **says: Any) -> subprocess.CompletedProcess[str]:
        (self.folder / "says.json").write_text(json.dumps(SAYS | says))
        (self.folder / "asked.jsonl").write_text("")
        return subprocess.run(
            ["bash", *arguments],
            # What names a Python here, for tools/env.sh, is no host's.
            env=os.environ | {"PATH": self.path, "FAKE": str(self.folder), "VENV": venv, "PYTHON": ""},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )

    def asked(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.folder / "asked.jsonl").read_text().splitlines()]

    def verbs(self) -> list[str]:
        """What was asked, in a word each: describe, create, delete, scp, ssh, or buckets."""
        return [call[call.index("tpus") + 2] if "tpus" in call else call[1] for call in self.asked()]

    def on_host(self, index: int) -> list[str]:
        """The arguments of the verbs that ran on a host."""
        return (self.hosts[index] / "eagle3_jax/asked").read_text().split("\0")[:-1]


@pytest.fixture
def cloud(tmp_path: pathlib.Path) -> Cloud:
    return Cloud(tmp_path)


@pytest.fixture
def config(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / 'my run\'s "first" $config.yaml'
    path.write_text("run_dir: gs://my-bucket/head  # $HOME `id` 'quoted'\n")
    return path


# --------------------------------------------------------------------------------------------------- create and delete
def test_create_asks_once_and_waits(cloud):
    ended = cloud.run(
        *("create", "--type", "v5p-16", "--spot", "--project", "mine", "--wait-minutes", "30"),
        states=["NONE", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"],
        spot=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert cloud.verbs() == ["describe", "create", "describe", "describe", "describe"]
    what, flags = cloud.asked()[1][:5], cloud.asked()[1][5:]
    assert what == ["compute", "tpus", "queued-resources", "create", "head"]
    assert sorted(flags) == sorted(
        [
            *("--node-id=head", "--zone=us-west4-a", "--project=mine"),
            *("--accelerator-type=v5p-16", "--runtime-version=v2-alpha-tpuv5"),
            *("--spot", "--labels=made_by=eagle3_jax", "--valid-until-duration=30m", "--async", "--quiet"),
        ]
    )
    assert "head is ACTIVE: v5p-16, 2 hosts" in ended.stderr
    again = cloud.run("create", "--type", "v5p-16", states=["ACTIVE"])
    assert again.returncode == 0 and cloud.verbs() == ["describe"]
    on_demand = cloud.run("create", "--type", "v5p-16", states=["NONE", "ACTIVE"])
    assert on_demand.returncode == 0 and "--spot" not in cloud.asked()[1]


def test_create_does_not_wait_for_ever(cloud):
    ended = cloud.run("create", "--type", "v5p-16", "--wait-minutes", "1", states=["NONE", "WAITING_FOR_RESOURCES"])
    assert ended.returncode == 1
    assert "head is WAITING_FOR_RESOURCES after 1 minutes, expected ACTIVE" in ended.stderr
    assert cloud.verbs() == ["describe", "create", "describe", "describe", "describe"]


@pytest.mark.parametrize("name", ["INT", "TERM"])
def test_whoever_stops_waiting_hears_what_goes_on(cloud, name):
    number = signal.Signals[f"SIG{name}"]
    cloud.program("sleep", f"#!/bin/sh\nkill -{name} $PPID $$\n")  # as a terminal does
    before = signal.signal(number, lambda *_: None)  # what is ignored here would be in the script, too
    try:
        ended = cloud.run("create", "--type", "v5p-16", states=["NONE", "WAITING_FOR_RESOURCES"])
    finally:
        signal.signal(number, before)
    assert ended.returncode == -number  # so a loop around it ends too
    assert "it may still come, and costs then; 'delete' ends it" in ended.stderr
    assert cloud.verbs() == ["describe", "create"]
    assert cloud.verbs() == ["describe", "create"]


@pytest.mark.slow
@pytest.mark.parametrize("state", ["SUSPENDED", "FAILED"])
def test_create_replaces_what_was_reclaimed_or_refused(cloud, state):
    ended = cloud.run("create", "--type", "v5p-16", "--spot", states=[state, state, "NONE", "ACTIVE"], spot=True)
    assert ended.returncode == 0, ended.stderr
    assert cloud.verbs() == ["describe", "describe", "delete", "create", "describe", "describe"]
    ended = cloud.run("create", "--type", "v5p-16", states=["NONE", "PROVISIONING", state])
    assert ended.returncode == 1 and f"head is {state}, expected ACTIVE" in ended.stderr
    assert cloud.verbs() == ["describe", "create", "describe", "describe"]


def test_another_type_or_another_s_slice_is_left_alone(cloud):
    ended = cloud.run("create", "--type", "v6e-8")
    assert ended.returncode == 1 and "--type: got v6e-8, expected v5p-16" in ended.stderr
    for words in (["create", "--type", "v5p-16"], ["delete"], ["install"]):
        ended = cloud.run(*words, states=["SUSPENDED"], label="somebody")
        assert (
            ended.returncode == 1
            and "whose label made_by is somebody, expected a slice that 'create' made" in ended.stderr
        )
        assert cloud.verbs() == ["describe"]


@pytest.mark.parametrize(
    ("flags", "spot", "words"), [([], True, "got no, expected yes"), (["--spot"], False, "got yes, expected no")]
)
def test_a_spot_slice_is_no_other(cloud, flags, spot, words):
    ended = cloud.run("create", "--type", "v5p-16", *flags, spot=spot)
    assert ended.returncode == 1 and f"--spot: {words}, as head has it; delete it first" in ended.stderr
    assert cloud.verbs() == ["describe"]


def test_delete_asks_for_the_slice_and_nothing_else(cloud):
    assert cloud.run("delete").returncode == 0
    assert cloud.verbs() == ["describe", "delete"]
    assert cloud.asked()[1] == [
        *("compute", "tpus", "queued-resources", "delete", "head", "--zone=us-west4-a", "--force", "--quiet")
    ]
    ended = cloud.run("delete", states=["NONE"])
    assert ended.returncode == 0 and cloud.verbs() == ["describe"] and "There is no head" in ended.stderr
    ended = cloud.run("delete", states=["FORBIDDEN"])
    assert ended.returncode == 1 and "PERMISSION_DENIED" in ended.stderr and cloud.verbs() == ["describe"]


# -------------------------------------------------------------------------------------------------------------- install
@pytest.mark.parametrize("image", ["3.12", "3.12 without venv", "3.10"])
def test_install_copies_the_commit_and_installs_from_the_locks(cloud, image):
    """With Python 3.12, which the locked uv fetches where the image has none that makes environments."""
    cloud.program(
        "git",
        '#!/bin/sh\ncase $1 in archive) tar -czf "${3#--output=}" tools/env.sh pyproject.toml requirements ;; esac\n',
    )
    python = """#!/usr/bin/env bash
case "$*" in
  "-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
  "-m pip install"*"--target .uv"*) mkdir -p .uv/bin; cp "$FAKE/programs/fetched-uv" .uv/bin/uv; cat >uv-lock ;;
  "-m pip install"*) echo "$*" >>pip-calls ;;
"""
    new = python + "esac\n"
    cloud.program("new-python", new)
    cloud.program(
        "fetched-uv", '#!/bin/sh\necho "$*" >>uv-calls\ncase $2 in find) echo "$FAKE/programs/new-python" ;; esac\n'
    )
    lacks = {"3.12": "", "3.12 without venv": "  -c*ensurepip*) exit 1 ;;\n", "3.10": '  -c*"(3, 12)"*) exit 1 ;;\n'}[
        image
    ]
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        cloud.program(name, python + lacks + "esac\n")
    for host in cloud.hosts:
        (host / "eagle3_jax/.venv/bin/python").unlink()
    ended = cloud.run("install")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert cloud.verbs() == ["describe", "scp", "ssh"]
    assert all("--worker=all" in call for call in cloud.asked()[1:])
    for host in cloud.hosts:
        home = host / "eagle3_jax"
        if lacks:
            assert (home / "uv-calls").read_text() == "python install 3.12\npython find --managed-python 3.12\n"
            assert re.fullmatch(r"uv==\S+ (\\\n +--hash=sha256:\w{64} ?)+\n", (home / "uv-lock").read_text())
        assert (home / ".venv/bin/python").read_text() == new
        uv, locked, package = (home / "pip-calls").read_text().splitlines()
        assert uv.endswith("--require-hashes --requirement /dev/stdin")
        assert locked.endswith("--require-hashes --requirement requirements/tpu.txt")
        assert package.endswith("--no-build-isolation --no-deps --editable .")


# ------------------------------------------------------------------------------------------------------------ first run
@pytest.mark.parametrize(("status", "words"), [(0, ["--run-dir", "gs://my-bucket/a b"]), (1, [])])
def test_a_first_run_is_on_all_hosts_and_its_figures_come_back(cloud, status, words):
    for number, host in enumerate(cloud.hosts):
        (host / "eagle3_jax/runs/first_run").mkdir(parents=True)
        (host / "eagle3_jax/runs/first_run/first_run.json").write_text(f"of host {number}")
    (cloud.folder / "exit").write_text(str(status))
    ended = cloud.run("first-run", *words)
    assert ended.returncode == status, ended.stdout + ended.stderr
    assert cloud.verbs() == ["describe", "ssh", "scp"] and "--worker=all" in cloud.asked()[1]
    for index in range(len(cloud.hosts)):
        assert cloud.on_host(index) == ["tools/tpu_first_run.py", *words]
    assert (cloud.folder / "first_run.json").read_text() == "of host 0"
    assert ("the verb train is left out on 2 hosts" in ended.stderr) == (not words)
    assert ("something is WRONG" in ended.stderr) == (status > 0)


# ----------------------------------------------------------------------------------------------------------------- jobs
@pytest.mark.parametrize("verb", ["regenerate", "extract", "train"])
def test_a_verb_runs_on_all_hosts_with_its_config_and_arguments(cloud, config, verb):
    words = ["--target.name", '/mnt/my models/it\'s $HOME; "8B"', "--train.learning-rate", "1e-4"]
    ended = cloud.run(verb, "--config", str(config), "--", *words)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{verb}: finished on 2 of 2 hosts." in ended.stderr
    assert cloud.verbs() == ["describe", "ssh", "ssh"]
    assert all("--worker=all" in call for call in cloud.asked()[1:])
    for index, host in enumerate(cloud.hosts):
        assert cloud.on_host(index) == ["-m", f"eagle3_jax.{verb}", "--config", f"jobs/{verb}/config.yaml", *words]
        assert (host / f"eagle3_jax/jobs/{verb}/config.yaml").read_text() == config.read_text()
        assert (host / "eagle3_jax/credentials").read_text() == "machine\n", "a bucket is asked as the VM"


@pytest.mark.slow
def test_a_job_outlives_the_connection_and_is_followed_again(cloud, config):
    (cloud.folder / "hold").touch()
    started = cloud.run("train", "--config", str(config), states=["ACTIVE"], deaf=["1"])
    assert started.returncode == 1 and "started: 1 of 2 hosts" in started.stderr  # host 1 could not be reached
    followed = cloud.run("train", "--config", str(config), release_after=5)
    assert followed.returncode == 0, followed.stdout + followed.stderr
    assert followed.stdout.count("runs already") == 1  # on host 0
    assert "step 1" in followed.stdout and "finished on 2 of 2 hosts" in followed.stderr
    assert [len(cloud.on_host(index)) for index in (0, 1)] == [4, 4]  # the verb ran once on each


@pytest.mark.slow
def test_hosts_that_stay_silent_do_not_end_the_job(cloud, config):
    (cloud.folder / "hold").touch()
    ended = cloud.run("train", "--config", str(config), deaf=["1"], deaf_to="tail -c")  # the looks at the job
    assert ended.returncode == 1 and "not all 2 hosts answer. The job goes on" in ended.stderr
    assert cloud.verbs() == ["describe", "ssh"] + ["ssh", "describe"] * 5
    (cloud.folder / "hold").unlink()
    assert cloud.run("train", "--config", str(config)).returncode == 0


def test_a_verb_that_fails_is_told_with_its_log(cloud, config):
    (cloud.folder / "exit").write_text("1")
    ended = cloud.run("train", "--config", str(config))
    assert ended.returncode == 1
    assert "the last words of the verb" in ended.stdout and "train ended, its log stands above" in ended.stderr
    (cloud.folder / "exit").write_text("0")
    assert cloud.run("train", "--config", str(config)).returncode == 0  # the same command goes on


@pytest.mark.slow
def test_a_reclaimed_slice_is_replaced_and_the_run_goes_on(cloud, config):
    (cloud.folder / "hold").touch()
    ended = cloud.run(
        "train", "--config", str(config), deaf=["0", "1"], deaf_to="tail -c", states=["ACTIVE", "SUSPENDED"]
    )
    assert ended.returncode == 1
    assert "head is SUSPENDED: it was reclaimed. Run 'create', 'install' and then this command again" in ended.stderr
    (cloud.folder / "hold").unlink()
    (cloud.folder / "hosts").rename(cloud.folder / "gone")
    cloud.new_hosts()
    states = ["SUSPENDED", "SUSPENDED", "NONE", "ACTIVE"]
    assert cloud.run("create", "--type", "v5p-16", "--spot", states=states, spot=True).returncode == 0
    assert cloud.verbs()[2:4] == ["delete", "create"] and "--spot" in cloud.asked()[3]
    ended = cloud.run("train", "--config", str(config))  # the new hosts have nothing yet
    assert ended.returncode == 1 and "expected what 'install' makes" in ended.stderr
    cloud.install()
    assert cloud.run("train", "--config", str(config)).returncode == 0
    assert cloud.on_host(0) == ["-m", "eagle3_jax.train", "--config", "jobs/train/config.yaml"]


# ---------------------------------------------------------------------------------------------------------------- serve
@pytest.mark.parametrize("kind", ["v6e-8", "v5p-16"])
def test_a_server_listens_on_loopback_behind_a_tunnel(cloud, config, kind):
    """On all hosts of the slice; the tunnel leads to the first one."""
    if kind == "v6e-8":
        shutil.rmtree(cloud.hosts[1])
    ended = cloud.run("serve", "--config", str(config), "--port", "8123", "--", "--target.name", "a b", type=kind)
    assert ended.returncode == 0, ended.stderr
    assert cloud.verbs() == ["describe", "ssh", "ssh"] and "--worker=all" in cloud.asked()[1]
    assert {"--worker=0", "--ssh-flag=-L 127.0.0.1:8123:127.0.0.1:8123", "--ssh-flag=-tt"} <= set(cloud.asked()[2])
    flags = ["--host", "127.0.0.1", "--port", "8123", "--target.name", "a b"]
    for index in range(len(cloud.hosts)):
        assert cloud.on_host(index) == ["-m", "eagle3_jax.serve", "--config", "jobs/serve/config.yaml", *flags]
    assert "the last words of the verb" in ended.stdout


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGHUP])
def test_the_end_of_a_tunnel_stops_the_server(cloud, config, sent):
    """As the connection's end does on host 0: the verb there gets SIGTERM, and its end ends the tunnel."""
    (cloud.folder / "hold").touch()
    stopping = "trap 'echo it drains; exit 0' TERM\nprintf"
    python = cloud.hosts[0] / "eagle3_jax/.venv/bin/python"
    python.write_text(VERB.replace("printf", stopping, 1))
    wait = "until grep -q step log; do /bin/sleep 0.05; done"
    cloud.program("tail", f'#!/bin/sh\n({wait}; kill -{sent.name[3:]} $PPID) &\nexec /usr/bin/tail "$@"\n')
    ended = cloud.run("serve", "--config", str(config))
    assert ended.returncode == 0 and "it drains" in ended.stdout, ended.stdout + ended.stderr
    (cloud.folder / "hold").unlink()


# ------------------------------------------------------------------------------------------------------------ bad input
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["start"], "got start, expected create, install, "),
        (["create"], "--type: got nothing, expected v5litepod-N"),
        (["create", "--type", "v5litepod-12"], "--type: got v5litepod-12, expected v5litepod-N"),
        (["create", "--type", "tpu7x-8"], "examples/kubernetes/jobset.yaml"),
        (["create", "--type", "v6e-8", "--name", "Head"], "--name: got Head, expected lower-case letters"),
        (
            ["create", "--type", "v6e-8", "--zone", "us-west4"],
            "--zone: got us-west4, expected a zone such as us-west4-a",
        ),
        (["train", "--config", "nowhere.yaml"], "--config: got nowhere.yaml, expected a file of a run"),
        (
            ["train", "--config", "configs/llama31_8b.yaml", "--train.epochs", "1"],
            "train: got '--train.epochs', expected some",
        ),
        (
            ["serve", "--config", "configs/llama31_8b.yaml", "--port", "80"],
            "--port: got 80, expected a port from 1000 on",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_is_asked(cloud, arguments, sentence):
    ended = cloud.run(*arguments)
    assert ended.returncode == 1 and sentence in ended.stderr, ended.stderr
    assert cloud.asked() == []


def test_a_config_that_a_verb_would_refuse_is_refused_here(cloud, tmp_path):
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("run_dir: x\ntrain: {epochs: many}\n")
    ended = cloud.run("train", "--config", str(wrong), venv=sys.prefix)
    assert ended.returncode == 1 and "train.epochs" in ended.stderr and cloud.asked() == []


@pytest.mark.parametrize("state", ["NONE", "PROVISIONING", "SUSPENDED"])
def test_a_slice_that_is_not_there_runs_nothing(cloud, config, state):
    ended = cloud.run("train", "--config", str(config), states=[state])
    assert ended.returncode == 1 and cloud.verbs() == ["describe"]
    assert ended.stderr.startswith("tpu_vm.sh: ") and "create" in ended.stderr


# ----------------------------------------------------------------------------------------------- Kubernetes, containers
def test_the_jobset_is_one_slice_whose_hosts_agree():
    jobset = yaml.safe_load((ROOT / "examples/kubernetes/jobset.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    spec = jobset["spec"]
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]

    # Hosts x chips are the slice.
    chips = math.prod(int(size) for size in pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
    hosts = job["completions"]
    assert replicated["replicas"] == 1 and job["parallelism"] == hosts and job["completionMode"] == "Indexed"
    assert hosts * container["resources"]["limits"]["google.com/tpu"] == chips

    # Every host is told the same first one, by the name that the headless service has for it, and its own number.
    variables = {entry["name"]: entry for entry in container["env"]}
    address = f"{jobset['metadata']['name']}-{replicated['name']}-0-0.{spec['network']['subdomain']}"
    port = container["ports"][0]["containerPort"]
    assert variables["JAX_COORDINATOR_ADDRESS"]["value"] == f"{address}:{port}"
    assert variables["JAX_NUM_PROCESSES"]["value"] == str(hosts)
    assert "job-completion-index" in variables["JAX_PROCESS_ID"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert spec["network"]["enableDNSHostnames"]

    # A reclaimed node and a stopped verb restart all of them, as often as it happens; a failing verb only a few times.
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true" and pod["restartPolicy"] == "Never"
    assert pod["tolerations"][0]["key"] == "cloud.google.com/gke-spot" and job["backoffLimit"] == 0
    assert job["podFailurePolicy"]["rules"] == [
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget"}]},
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [command.STOPPED]}},
    ]
    (rule,) = spec["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts" and rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert 0 < spec["failurePolicy"]["maxRestarts"] < 10

    # The run and its config lie in the bucket, which the service account may use.
    verb, config, *path, option, run_dir = container["args"]
    assert importlib.util.find_spec(verb) and (config, option) == ("--config", "--run-dir")
    assert all(address.startswith("gs://my-bucket/") for address in (*path, run_dir))
    assert variables[clients.CREDENTIALS]["value"] == "machine" and pod["serviceAccountName"]
