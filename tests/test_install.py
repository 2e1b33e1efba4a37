"""What pip installs beside this package: an older JAX stays and computes, and JAX's engines come along."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from test_readme import ROOT, clone_into

pytestmark = pytest.mark.long
_OLD = "0.11.2"  # for Python 3.12 and later: wrong on CPUs but for a flag


def run(*words: str | pathlib.Path, fails: bool = False, given: str = "") -> str:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    ended = subprocess.run(
        words, cwd=ROOT, env=environment, input=given, capture_output=True, text=True, timeout=1200, check=False
    )
    if "No matching distribution found for jax" in ended.stderr or "Request failed after" in ended.stderr:
        pytest.skip("no network")
    assert bool(ended.returncode) == fails, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def test_an_older_jax_stays_and_computes(tmp_path):
    newer = [f"python3.{minor}" for minor in range(12, 20)]
    here = sys.version_info >= (3, 12) and sys.executable
    program = here or next(filter(_starts, filter(None, map(shutil.which, newer))), None)
    if program is None:
        pytest.skip("no Python 3.12")
    run(program, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    run(*pip, f"jax=={_OLD}", f"jaxlib=={_OLD}")
    (tmp_path / "clone").mkdir()
    run(*pip, clone_into(tmp_path / "clone"))
    first = "import os; os.chdir('/'); import eagle3_jax, jax; from eagle3_jax import Engine; "
    sums = "f = jax.jit(lambda x, y: (x @ jax.numpy.broadcast_to(y, (129, 16))).sum(-1)); "
    show = "print(jax.__version__, f(jax.numpy.ones((300, 129)), 1.0).max())"
    assert run(python, "-c", first + sums + show) == f"{_OLD} 2064.0\n"
    late = run(python, "-c", "import os; os.chdir('/'); import jax; jax.devices(); import eagle3_jax", fails=True)
    assert f"ImportError: jaxlib: got {_OLD}, whose results on CPUs are wrong" in late


def _starts(program: str) -> bool:
    """A version manager's shim need not."""
    return subprocess.run([program, "-c", ""], capture_output=True, check=False).returncode == 0


def resolve(peer: str, python: str, fails: bool = False) -> str:
    """The versions that an index has for both, or why there are none; installs nothing."""
    options = ["--no-header", "--no-annotate", "--python-version", python, "--python-platform", "x86_64-manylinux_2_31"]
    uv = pathlib.Path(sys.executable).with_name("uv")
    return run(uv, "pip", "compile", "--quiet", *options, "pyproject.toml", "-", given=peer, fails=fails)


@pytest.mark.parametrize(
    ("peer", "python", "jax"),
    [
        ("google-tunix==0.1.7", "3.11", "0.10.2"),
        ("google-tunix==0.1.7", "3.12", "0.12.0.1"),
        ("tpu-inference==0.32.0", "3.12", "0.11.2"),
        ("tpu-inference==0.32.0", "3.13", "0.11.2"),
    ],
)
def test_an_engine_is_installed_beside_it(peer, python, jax):
    """docs/install.md has these pairs. A newer jax than this one is as good."""
    found = dict(line.split("==") for line in resolve(peer, python).splitlines() if "==" in line)
    assert found[peer.partition("==")[0]] == peer.partition("==")[2]
    assert [int(part) for part in found["jax"].split(".")] >= [int(part) for part in jax.split(".")]


@pytest.mark.parametrize("peer", ["sglang-jax==0.0.2", "sglang-jax==0.1.0rc0"])
def test_an_engine_that_pins_older_packages_is_not(peer):
    assert "depends on transformers>=4.5" in " ".join(resolve(peer, "3.12", fails=True).split())
