"""Programs are kept where a later start finds them."""

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import emulator
import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from eagle3_jax.models.checkpoint import fetch
from eagle3_jax.runs import environment, machine

SETTINGS: Any = jax.config


@pytest.fixture
def untouched() -> Iterator[None]:
    """JAX's settings as in a program that made none."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_enable_compilation_cache")
    before = {name: getattr(SETTINGS, name) for name in names}
    for name, value in zip(names, (None, 1.0, True), strict=True):
        SETTINGS.update(name, value)
    yield
    for name, value in before.items():
        SETTINGS.update(name, value)
    compilation_cache.reset_cache()


def kept_in() -> tuple[pathlib.Path, float]:
    """The folder around those of each kind of processor, and the least seconds of a compilation."""
    return (
        pathlib.Path(SETTINGS.jax_compilation_cache_dir).parent,
        SETTINGS.jax_persistent_cache_min_compile_time_secs,
    )


def test_programs_are_kept_by_default_and_the_last_folder_that_was_asked_for_has_them(untouched, tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3_JAX_CACHE", str(tmp_path))
    assert fetch.keep_programs() == tmp_path / "programs"
    assert kept_in() == (tmp_path / "programs", 1.0)
    jax.jit(lambda x: x + 1)(1.0)  # JAX opens the folder
    machine.keep_programs(tmp_path / "mine")
    assert kept_in() == (tmp_path / "mine", 0.0)
    fetch.keep_programs()
    jax.jit(lambda x: x + 2)(1.0).block_until_ready()
    assert kept_in()[0] == tmp_path / "mine" and list((tmp_path / "mine").glob("*/*-cache"))
    machine.keep_programs(None)
    assert not SETTINGS.jax_enable_compilation_cache


@pytest.mark.parametrize("own", ["", "/mine"])
def test_a_folder_that_the_user_chose_stays(untouched, own, tmp_path):
    SETTINGS.update("jax_compilation_cache_dir", own)
    fetch.keep_programs()
    machine.keep_programs(tmp_path)
    machine.keep_programs(None)
    assert (SETTINGS.jax_compilation_cache_dir, SETTINGS.jax_persistent_cache_min_compile_time_secs) == (own, 1.0)
    assert SETTINGS.jax_enable_compilation_cache


def test_where_xla_would_fill_the_log_programs_are_not_kept_unasked(untouched, tmp_path, monkeypatch):
    """It read its level before this package was imported."""
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")
    environment.silence_xla()
    fetch.keep_programs()
    assert SETTINGS.jax_compilation_cache_dir is None and not environment.xla_is_silent()


_PROGRAM = """
import sys
import jax
from eagle3_jax.models.checkpoint import fetch
from eagle3_jax.runs import machine
machine.has_tpu = lambda: True
found = []
jax.monitoring.register_event_listener(lambda name, **_: found.append(name.rpartition("/")[2]))
fetch.keep_programs_in_bucket(sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # a small program for a large one
jax.jit(lambda x: x + 1)(1.0)
print("cache_hits" in found)
"""


@pytest.mark.slow
def test_on_tpu_hosts_programs_of_a_run_in_a_bucket_outlive_the_host():
    run = f"{emulator.new_bucket()}/run"
    own = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    for expected in ("False\n", "True\n"):
        command = [sys.executable, "-W", "error", "-c", _PROGRAM, run]
        ended = subprocess.run(command, env=own, capture_output=True, text=True, timeout=200)
        assert (ended.stdout, ended.returncode) == (expected, 0), ended.stderr
