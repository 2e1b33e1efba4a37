"""Several processes as one run: who joins, what they agree on, and how they end. Here with real processes."""

import signal
import subprocess
import sys
import time

import pytest
import tiny

from eagle3_jax.config import TargetConfig
from eagle3_jax.models.checkpoint import fetch
from eagle3_jax.runs import machine, processes


@pytest.mark.parametrize(
    ("environment", "tpu", "endpoints", "several"),
    [
        ({}, False, "", False),
        ({"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234"}, False, "", True),
        ({"MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.1"}, False, "", True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, True, "a,b", False),
        ({"TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2"}, True, "", True),
        ({}, True, "a:b:10.0.0.1,a:b:10.0.0.2", True),
        ({}, True, "a:b:10.0.0.1", False),
        ({"TPU_SKIP_MDS_QUERY": "1"}, True, "a,b", False),
    ],
)
def test_several_hosts_are_recognised(monkeypatch, environment, tpu, endpoints, several):
    monkeypatch.setattr(machine, "has_tpu", lambda: tpu)
    monkeypatch.setattr(processes, "_worker_endpoints", lambda: endpoints)
    assert processes._is_multi_host(environment) is several


def test_a_single_process_has_all_of_it_for_nothing():
    assert (processes.index(), processes.count()) == (0, 1)
    assert processes.agree(lambda: (1, "a")) == (1, "a")
    assert processes.gather(3) == [3]
    assert processes.share("abc") == "abc"
    processes.barrier()
    with processes.among([0]), pytest.raises(ZeroDivisionError):
        processes.agree(lambda: 1 // 0)


def test_jax_is_not_imported_for_a_single_process():
    check = (
        "import sys\nfrom eagle3_jax.runs import processes\nprocesses.agree(lambda: 1)\nsys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check], cwd=tiny.REPOSITORY, timeout=60).returncode == 0


PROGRAM = """
import os, signal, sys, time
import numpy as np
from jax.experimental import multihost_utils
from eagle3_jax.runs import command, disk, processes
from eagle3_jax.config import TargetConfig
from eagle3_jax.models.checkpoint import fetch

case = sys.argv[1]
with command.run("train"):
    me = processes.index()
    if case == "agree":
        own = processes.agree(lambda: {"pid": os.getpid(), "pair": (1, 2)})
        print("agreed", own["pid"] == os.getpid(), own["pair"], processes.gather(me), flush=True)
        with processes.among([me]):  # each for itself
            print("alone", processes.agree(lambda: me), processes.share("abc"), flush=True)
        print("shares", processes.gather(processes.share("abc")), flush=True)
        try:
            processes.agree(lambda: int("seven"))
        except ValueError as error:
            print("refused", type(error).__name__, error, flush=True)
        print("stops", [s for s in range(9) if processes.agree_to_stop(s, 3, asked=me == 1 and s == 2)], flush=True)
        time.sleep(me)  # one leaves before the other
    elif case == "target":
        digest, read = disk.digest, []
        disk.digest = lambda path: read.append(path.name) or digest(path)
        target = TargetConfig(name=sys.argv[2], aux_layers=(1, 2, 3))
        print("target", fetch.load_target(target, only=()).identity["weights"], read, flush=True)
    elif case == "disk full":
        if me == 1:
            raise OSError(28, "No space left on device", "runs/a/shard")
        processes.barrier()
    elif case == "bug":
        if me == 0:
            raise KeyError("of nobody")
        processes.barrier()
    elif case == "stopped":
        if me == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            while True:
                command.stop_point()
        processes.barrier()
    else:
        victim, where = case.split()
        if me == int(victim):
            time.sleep(2)
            os.kill(os.getpid(), signal.SIGKILL)
        if where == "barrier":
            processes.barrier()
        else:
            multihost_utils.process_allgather(np.ones(3))
    print("ended", flush=True)
"""


def test_the_heartbeat_is_a_number_of_seconds(monkeypatch):
    assert processes.heartbeat_seconds() == 100
    for value, expected in (("0", "got 0, expected at least 1"), ("soon", "got 'soon', expected a number")):
        monkeypatch.setenv("EAGLE3_JAX_HEARTBEAT_SECONDS", value)
        with pytest.raises(ValueError, match=f"EAGLE3_JAX_HEARTBEAT_SECONDS: {expected}"):
            processes.heartbeat_seconds()


def run(*case: str, timeout: float = 100) -> list[tuple[int, str]]:
    return tiny.end_processes(tiny.start_processes(2, ["-c", PROGRAM, *case]), timeout)


@pytest.mark.slow
def test_processes_agree_and_leave_together():
    (status, first), (other, second) = run("agree")
    assert (status, other) == (0, 0), first + second
    assert "agreed True [1, 2] [0, 1]" in first and "agreed False [1, 2] [0, 1]" in second
    assert "alone 0 abc" in first and "alone 1 abc" in second
    assert "shares ['ac', 'b']" in first and "shares ['ac', 'b']" in second
    refusal = "invalid literal for int() with base 10: 'seven'"
    assert f"refused ValueError {refusal}" in first and f"refused Refused {refusal}" in second
    assert "stops [5, 6, 7, 8]" in second
    assert "ended" in first and "ended" in second


@pytest.mark.long
def test_each_process_reads_its_share_of_the_weights(tmp_path):
    """The identity is a single process's."""
    folder = tiny.write_target(tmp_path)
    (folder / "more.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    alone = fetch.load_target(TargetConfig(name=str(folder), aux_layers=(1, 2, 3)), only=()).identity["weights"]
    (status, first), (other, second) = run("target", str(folder))
    assert (status, other) == (0, 0), first + second
    assert f"target {alone} ['model.safetensors']\n" in first
    assert f"target {alone} ['more.safetensors']\n" in second


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "expected", "sentence"),
    [
        pytest.param("disk full", 1, "eagle3_jax.train: runs/a/shard: No space left on device", marks=pytest.mark.long),
        pytest.param("bug", 1, "KeyError: 'of nobody'", marks=pytest.mark.long),
        ("stopped", 75, "eagle3_jax.train: stopped by SIGTERM; run it again, and it goes on from here"),
    ],
)
def test_what_ends_one_process_ends_all_with_its_sentence(case, expected, sentence):
    for status, output in run(case):
        assert status == expected and sentence in output and "ended\n" not in output, output


@pytest.mark.long
@pytest.mark.parametrize(("victim", "where"), [(0, "collective"), (1, "barrier"), (0, "barrier"), (1, "collective")])
def test_a_killed_process_is_missed(victim, where):
    start = time.monotonic()
    ends = run(f"{victim} {where}")
    status, output = ends[1 - victim]
    assert ends[victim][0] == -signal.SIGKILL
    # Of process 0, which holds the service, JAX is mostly the first to know, and aborts the others.
    missed, aborted = f"process {victim} of 2 is gone", f"process {1 - victim} of 2 was killed, or JAX ended it"
    assert "eagle3_jax.train: " in output, output
    sentence = output[output.rindex("eagle3_jax.train: ") :]  # JAX's own threads may write into the line
    assert "run the same command on all hosts again" in sentence, output
    assert missed in sentence or (victim == 0 and aborted in sentence), output
    assert status in (1, -signal.SIGABRT) and time.monotonic() - start < 90


def test_what_another_host_has_otherwise_is_reported_by_name(monkeypatch):
    """On all of them: the first field, in order, of the first process that has another value."""
    alike = {"jax": "1", "serve.port": 8000}
    first = ["alpha", alike]
    monkeypatch.setattr(processes, "gather", lambda own: [first, first, ["beta", {"jax": "2", "serve.port": None}]])
    with pytest.raises(ValueError, match=r"jax: got 2 on host beta \(process 2\), expected 1 as on host alpha"):
        processes.check_alike({})
    monkeypatch.setattr(processes, "gather", lambda own: [first, ["beta", dict(alike)]])
    processes.check_alike({})
