"""Hosts of one server that differ are refused by name, before they load."""

import pytest
import tiny

from eagle3_jax.config import RunConfig, ServeConfig, TargetConfig
from eagle3_jax.runs import machine, processes
from eagle3_jax.serve import listen


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("targets")
    for seed, name in enumerate(("mine", "other")):
        tiny.write_target(folder / name / "target", seed)
    return folder


def check_as(folder, monkeypatch, host: str, gathered: list, **settings) -> None:
    """`listen.check_hosts` as on a host, which hears what was `gathered` before and what it says itself."""

    def gather(value):
        gathered.append([host, value[1]])
        return gathered[-1:] if len(gathered) <= 3 else [gathered[len(gathered) - 4], gathered[-1]]

    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "gather", gather)
    monkeypatch.chdir(folder / host)
    listen.check_hosts(
        RunConfig(run_dir="x", target=TargetConfig(name="target"), serve=ServeConfig(draft="none", **settings))
    )


@pytest.fixture
def gathered(folder, monkeypatch):
    """What process 0 says: versions, configuration, weights."""
    gathered: list = []
    check_as(folder, monkeypatch, "mine", gathered)
    return gathered


def test_hosts_that_are_alike_pass_and_what_differs_is_refused(folder, monkeypatch, gathered):
    check_as(folder, monkeypatch, "mine", gathered)
    assert len(gathered) == 6
    del gathered[3:]
    with pytest.raises(ValueError, match=r"serve\.batch_size: got 3 on host mine \(process 1\), expected 8 as on host"):
        check_as(folder, monkeypatch, "mine", gathered, batch_size=3)
    del gathered[3:]
    versions = machine.versions() | {"jax": "0"}
    monkeypatch.setattr(machine, "versions", lambda: versions)
    with pytest.raises(ValueError, match="version of jax: got 0 on host mine"):
        check_as(folder, monkeypatch, "mine", gathered)


def test_other_weights_under_the_same_name_are_refused(folder, monkeypatch, gathered):
    with pytest.raises(ValueError, match=r"weights, model\.safetensors: got \w+ on host other \(process 1\)"):
        check_as(folder, monkeypatch, "other", gathered)
