"""Importing the package changes nothing that a program set; a verb sets what its user left open."""

import os
import subprocess
import sys

import pytest

from eagle3_jax.runs import environment

# Set by tests/conftest.py, and by JAX at its import.
_SET = ("JAX_PLATFORMS", "TF_CPP_MIN_LOG_LEVEL", "TRANSFORMERS_NO_ADVISORY_WARNINGS")
CUDA = {"JAX_PLATFORMS": "cuda"}


def run(*words: str, **variables: str) -> str:
    """What a Python prints whose user set none of the variables but these."""
    kept = {name: value for name, value in os.environ.items() if name not in _SET and not name.startswith("TPU_")}
    command = [sys.executable, *words]
    answer = subprocess.run(command, env=kept | variables, capture_output=True, text=True, timeout=280)
    assert (answer.returncode, answer.stderr) == (0, ""), answer.stderr
    return answer.stdout


@pytest.mark.long
def test_importing_every_module_changes_no_setting():
    code = """
import importlib, os, pkgutil
import jax, jax._src.monitoring as monitoring
# Packages that set or declare something themselves when they are imported.
import jax.experimental.pallas.tpu
import flax, grain, optax, orbax.checkpoint, tensorboardX, transformers, uvicorn
def settings():
    return {**os.environ, **jax.config.values, "listeners": list(monitoring.get_event_duration_listeners())}
before = settings()
import eagle3_jax
modules = [module.name for module in pkgutil.walk_packages(eagle3_jax.__path__, "eagle3_jax.")]
for name in modules:
    if name not in ("eagle3_jax.prepare.beam", "eagle3_jax.tunix"):  # their packages have environments of their own
        importlib.import_module(name)
after = settings()
print(len(modules) > 150, {name: after.get(name) for name in before | after if before.get(name) != after.get(name)})
"""
    assert run("-c", code) == "True {}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["-m", "eagle3_jax.report"], pytest.param(["-m", "eagle3_jax", "report"], marks=pytest.mark.long)]
)
def test_a_verb_sets_what_its_user_left_open(words, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os, sys\n"
        f"atexit.register(lambda: print('\\n', {{name: os.environ.get(name) for name in {_SET}}}, sep=''))\n"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    path = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}
    printed = run(*words, "--help", **path, TF_CPP_MIN_LOG_LEVEL="0").splitlines()[-1]
    expected = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "0", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
    assert printed == str(expected)


@pytest.mark.parametrize(("tpu", "levels"), [(False, ["3", None]), (True, ["1", "1"])])
def test_warnings_of_a_tpu_s_libraries_are_shown_on_its_host_alone(tpu, levels, monkeypatch):
    names = ("TF_CPP_MIN_LOG_LEVEL", "TPU_STDERR_LOG_LEVEL")
    monkeypatch.setattr(os, "environ", {"JAX_PLATFORMS": "cpu"})
    monkeypatch.delitem(sys.modules, "jaxlib", raising=False)  # as where a verb begins
    monkeypatch.setattr(environment.machine, "has_tpu", lambda: tpu)
    environment.prepare()
    assert [os.environ.get(name) for name in names] == levels
    os.environ.update(dict.fromkeys(names, "0"))
    environment.prepare()
    assert [os.environ[name] for name in names] == ["0", "0"], "its user's"


@pytest.mark.parametrize(
    ("own", "tpu", "plugins", "platforms"),
    [({}, False, [], "cpu"), ({}, True, [], None), ({}, False, ["xla_cuda13"], None), (CUDA, False, [], "cuda")],
)
def test_libtpu_starts_only_where_a_tpu_could_be(own, tpu, plugins, platforms, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(own))
    monkeypatch.setattr(environment.machine, "has_tpu", lambda: tpu)
    monkeypatch.setattr(environment.importlib.metadata, "entry_points", lambda group: plugins)
    environment.prepare()
    assert os.environ.get("JAX_PLATFORMS") == platforms


@pytest.mark.slow
def test_nobody_hears_that_there_is_no_pytorch():
    """In a program that loads a tokenizer; a verb sets the same variable for good."""
    code = (
        "import importlib.util, os\nfind = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest)\n"
        "from eagle3_jax.runs import environment\n"
        "with environment.importing_transformers(): from transformers import AutoTokenizer\n"
    )
    assert run("-c", code + "print(os.environ.get('TRANSFORMERS_NO_ADVISORY_WARNINGS'))") == "None\n"


@pytest.mark.slow
@pytest.mark.parametrize(("first", "level"), [("", "3"), ("import jax", "1")])
def test_an_import_silences_xla_where_it_still_can(first, level):
    code = f"import os; L = 'TF_CPP_MIN_LOG_LEVEL'\n{first}\nimport eagle3_jax; print(os.environ[L])"
    assert run("-c", code) == f"{level}\n"
