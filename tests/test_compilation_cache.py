"""The tests' compilation cache: outside the checkout, whole or not at all; TPU programs are keyed by their lowering."""

import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import compilation_cache
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import lru_cache
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture
def empty(tmp_path, monkeypatch):
    monkeypatch.setenv(compilation_cache.FOLDER, str(tmp_path))
    return tmp_path


def test_entries_are_whole_or_not_there(tmp_path, monkeypatch):
    cache = lru_cache.LRUCache(str(tmp_path), max_size=-1)
    cache.put("one", b"program")
    assert cache.get("one") == b"program"
    assert cache.get("other") is None

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        cache.put("two", b"program")
    assert cache.get("two") is None


def test_what_was_used_longest_ago_is_deleted_first(empty, monkeypatch):
    monkeypatch.setattr(compilation_cache, "_MOST_BYTES", 10)
    for age, name in enumerate(["machine/new-cache", "tpu/middle.json.gz", "machine/old-cache", "peers/older"]):
        (empty / name).parent.mkdir(exist_ok=True)
        (empty / name).write_bytes(b"12345")
        os.utime(empty / name, (1000 - age, 1000 - age))
    compilation_cache.prune()
    assert sorted(path.name for path in empty.glob("*/*")) == ["middle.json.gz", "new-cache", "older"]


def lowered(times: float) -> Any:
    pytest.importorskip("libtpu")
    place = SingleDeviceSharding(topologies.get_topology_desc("v5e:1x1", "tpu").devices[0])
    argument = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=place)
    return jax.jit(lambda x: times * (x @ x)).lower(argument)


@pytest.mark.slow
def test_a_program_for_a_tpu_is_compiled_once(empty, monkeypatch):
    first = lowered(2.0).compile()
    assert isinstance(first, compilation_cache.KeptProgram)
    assert first.memory_analysis().argument_size_in_bytes == 256 * 256 * np.dtype(np.float32).itemsize
    assert "HloModule" in first.as_text()
    assert first.output_shardings.device_set  # not kept: asked of the program itself

    def compiled_again(*_, **__):
        raise AssertionError("compiled again")

    found_or_compiled: Any = jax.stages.Lowered.compile
    monkeypatch.setattr(found_or_compiled.__wrapped__, "__code__", compiled_again.__code__)
    again = lowered(2.0).compile()
    assert again.as_text() == first.as_text()
    assert again.memory_analysis() == first.memory_analysis()
    with pytest.raises(AssertionError, match="compiled again"):
        lowered(3.0).compile()


_KERNEL = """
import jax, jax.numpy as jnp
from jax.experimental import topologies
from eagle3_jax.kernels.cache.api import commit

def test_lowered():
    place = jax.sharding.SingleDeviceSharding(topologies.get_topology_desc("v5e:1x1", "tpu").devices[0])
    def argument(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    caches = [argument((4, 8, 1024, 128), jnp.bfloat16)] * 2
    integers = argument((4,), jnp.int32), argument((4, 8), jnp.int32)
    jax.jit(commit, donate_argnums=0).lower(caches, *integers).compile()
"""


@pytest.mark.long
def test_another_checkout_finds_a_kernel_of_this_one(empty, tmp_path):
    """Its Python stands elsewhere; a run that is `--cold` finds none of it, and leaves nothing."""
    pytest.importorskip("libtpu")
    for checkout, more in (("one", []), ("two", []), ("cold", ["--cold"])):
        home = tmp_path / checkout
        shutil.copytree(ROOT / "eagle3_jax/kernels", home / "eagle3_jax/kernels")
        shutil.copytree(ROOT / "tests/started", home / "started")
        for name in ("conftest.py", "compilation_cache.py"):
            shutil.copy(ROOT / "tests" / name, home)
        for path in (ROOT / "eagle3_jax").glob("*.py"):
            shutil.copy(path, home / "eagle3_jax")
        (home / "allowed_skips.toml").write_text("skip = []")
        (home / "pytest.ini").touch()
        (home / "test_kernel.py").write_text(_KERNEL)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=3", *more]
        environment = os.environ | {"PYTHONPATH": str(home)}
        ended = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=300)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert len(list((empty / "tpu").iterdir())) == 1
