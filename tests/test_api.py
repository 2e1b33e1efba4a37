"""The public names, their docstrings, and the extras that verbs need."""

import importlib
import importlib.metadata
import importlib.util
import os
import pathlib
import pkgutil
import re
import subprocess
import sys
import tomllib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import eagle3_jax
from eagle3_jax.config import FOLDERS
from eagle3_jax.runs.command import EXTRAS


def test_every_public_name_is_there():
    for name in eagle3_jax.__all__:
        assert getattr(eagle3_jax, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = eagle3_jax.nothing


BEAM = importlib.util.find_spec("apache_beam") is not None  # no part of the tests' environment
# Modules that need what is in environments of their own -> whether it is here.
ELSEWHERE = {"eagle3_jax.prepare.beam": BEAM, "eagle3_jax.tunix": importlib.util.find_spec("tunix") is not None}


@pytest.mark.smoke
def test_every_module_is_imported():
    for module in pkgutil.walk_packages(eagle3_jax.__path__, "eagle3_jax."):
        if ELSEWHERE.get(module.name, True):
            importlib.import_module(module.name)


def test_what_is_public_is_what_is_listed():
    assert {"Engine", "SamplingParams", "Output", "Piece", "Request"} <= set(eagle3_jax.__all__)
    names = dir(eagle3_jax)
    assert {*eagle3_jax.__all__, "__version__"} <= set(names)
    assert [name for name in names if name.startswith("_") and not name.endswith("__")] == [] and "os" not in names
    project = tomllib.loads((pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert eagle3_jax.__version__ == project["project"]["version"]
    (typed,) = pathlib.Path(eagle3_jax.__file__).parent.glob("py.typed")
    assert typed.name in project["tool"]["setuptools"]["package-data"]["eagle3_jax"]


def test_the_package_itself_lists_its_verbs():
    def run(*arguments):
        command = [sys.executable, "-m", "eagle3_jax", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    listed = [line.split()[0] for line in run().stdout.splitlines() if line.startswith("  ")]
    folder = pathlib.Path(eagle3_jax.__file__).parent
    files = [*folder.glob("*.py"), *(path.parent for path in folder.glob("*/__main__.py"))]
    verbs = {path.stem for path in files if path.stem in FOLDERS or path.stem in ("report", "serve")}
    assert set(listed) == verbs | {"chat", "generate"} and len(listed) == len(verbs) + 2
    assert re.fullmatch(r"python [\d.]+, eagle3_jax [\d.]+, jax [\d.]+, jaxlib [\d.]+, .*\n", run("--version").stdout)
    wrong = run("trian", "--config", "x.yaml")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("eagle3_jax: got 'trian', expected one of prepare, regenerate, extract, train, ")


@pytest.mark.parametrize(
    ("modules", "absent"), [("eagle3_jax.train.__main__", "torch"), ("eagle3_jax, eagle3_jax.config", "jax")]
)
def test_what_is_not_needed_is_not_imported(modules, absent):
    subprocess.run([sys.executable, "-c", f"import sys, {modules}; sys.exit({absent!r} in sys.modules)"], check=True)


@pytest.mark.parametrize("jaxlib", ["0.10.2", "0.11.0", "0.11.1", "0.11.2", "0.12.0"])
def test_a_jaxlib_that_is_wrong_on_cpus_computes_without_ynnpack(jaxlib, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", None)
    monkeypatch.setenv("XLA_FLAGS", f"--xla_a=1 {eagle3_jax._NO_YNNPACK}LIBRARY_FUSION_TYPE_REDUCE")
    eagle3_jax._switch_ynnpack_off(jaxlib)
    assert os.environ["XLA_FLAGS"] == f"{eagle3_jax._NO_YNNPACK} --xla_a=1"


@pytest.mark.parametrize("jaxlib", ["0.10.1", "0.12.0.1"])
def test_a_jaxlib_that_is_right_keeps_its_flags(jaxlib, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", None)
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    eagle3_jax._switch_ynnpack_off(jaxlib)
    assert os.environ["XLA_FLAGS"] == "--xla_a=1"


@pytest.mark.parametrize("flags", ["", eagle3_jax._NO_YNNPACK])
def test_a_backend_that_runs_with_ynnpack_is_refused(flags):
    """On CPUs; the flags are those that it was started with, whatever the environment says now."""
    code = (
        "import importlib.metadata as m, jax, os; jax.devices(); os.environ['XLA_FLAGS'] = ''; real = m.version\n"
        "m.version = lambda name: '0.10.2' if name == 'jaxlib' else real(name)\n"
        "import eagle3_jax"
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert answer.returncode == (0 if flags else 1), answer.stderr
    assert ("ImportError: jaxlib: got 0.10.2, whose results on CPUs are wrong" in answer.stderr) == (not flags)


def test_an_accelerator_is_not_refused(monkeypatch):
    bridge = types.SimpleNamespace(
        backends_are_initialized=lambda: True, get_backend=lambda: types.SimpleNamespace(platform="tpu")
    )
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", bridge)
    eagle3_jax._switch_ynnpack_off("0.11.2")


def test_no_version_of_jax_is_excluded():
    project = tomllib.loads((pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    for name in ("jax", "jaxlib"):
        (specifier,) = [x.specifier for x in map(Requirement, project["dependencies"]) if x.name == name]
        assert all(version in specifier for version in (*eagle3_jax._WRONG_ON_CPU, "0.10.1", "0.12.0.1"))


@pytest.mark.smoke
def test_sums_of_many_small_products_are_right():
    """jaxlib 0.10.2 lost the last rows of 32,769 on a CPU."""
    rows = jnp.zeros((32_769, 3)).at[:, 0].set(jnp.arange(32_769.0))
    matrix = jnp.eye(3)
    squares = jax.jit(jax.vmap(lambda row: jnp.sum((matrix @ row) ** 2)))(rows)
    np.testing.assert_allclose(squares, np.arange(32_769.0) ** 2, rtol=1e-6)


@pytest.mark.smoke
def test_what_the_package_switches_off_is_what_was_wrong():
    """Under a jaxlib of `_WRONG_ON_CPU`, in a process that sets no flag: one number broadcast, then summed."""
    code = (
        "import eagle3_jax, jax, jax.numpy as jnp\n"
        "f = jax.jit(lambda x, y: (x @ jnp.broadcast_to(y, (129, 16))).sum(-1))\n"
        "print(jnp.abs(f(jnp.ones((300, 129)), jnp.float32(0.5)) - 1032).max() < 0.01)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert answer.stdout == "True\n" or importlib.metadata.version("jaxlib") not in eagle3_jax._WRONG_ON_CPU


@pytest.mark.slow
def test_decoding_imports_nothing_of_an_extra():
    code = (
        "import sys, eagle3_jax, eagle3_jax.decoding.measure.compare\n"
        "for name in eagle3_jax.__all__: getattr(eagle3_jax, name)\n"
        # flax brings optax and orbax with it, huggingface_hub httpx2
        "from eagle3_jax.runs.command import EXTRAS\n"
        "held = {name for names in EXTRAS.values() for name in names} | {'spacy', 'tensorflow'}\n"
        # and Pallas is a third of a start's imports, for TPUs alone
        "held |= {'jax.experimental.pallas'}\n"
        "print(held & set(sys.modules) - {'optax', 'orbax', 'httpx2'})\n"
        "sys.exit(any(m.startswith(('eagle3_jax.data', 'eagle3_jax.training')) for m in sys.modules))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (answer.returncode, answer.stdout.strip()) == (0, "set()"), answer.stderr


def test_the_extras_of_the_verbs_are_those_of_the_project():
    project = tomllib.loads((pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    distributions = importlib.metadata.packages_distributions()
    for extra, modules in EXTRAS.items():
        named = {Requirement(text).name for text in project["optional-dependencies"][extra]}
        if extra == "beam" and not BEAM:
            assert named == {"apache-beam"}
            continue
        assert {canonicalize_name(distributions[module][0]) for module in modules} == set(map(canonicalize_name, named))
    assert (
        f"eagle3-jax[{','.join(extra for extra in EXTRAS if extra != 'beam')},gcs]"
        in project["optional-dependencies"]["test"]
    )


VERBS = {  # a verb and its words -> the extra that it needs
    "prepare": "prepare",  # without what only a source `tfds` needs
    "prepare --prepare.runner beam": "beam",
    "regenerate": None,
    "extract": "train",
    "train": "train",
    "export": "train",
    "export --check sglang --prompts x --sglang http://127.0.0.1:9": "report",
    "evaluate --prompts x --output y": None,
    "report": "report",
    "benchmark decode --prompts x": "report",
    "benchmark tune --prompts x": "report",
    "benchmark serve --prompts x": "report,serve",
    "serve": "serve",
}


SHORT = ("prepare",)  # the others are long


@pytest.mark.slow
@pytest.mark.parametrize("words", [x if x in SHORT else pytest.param(x, marks=pytest.mark.long) for x in VERBS])
def test_a_verb_names_the_extra_that_it_misses(tmp_path, words):
    """Its `--help` needs none; a verb that needs none starts without all of them."""
    extra, verb = VERBS[words], words.partition(" ")[0]
    missing = [EXTRAS[name] for name in (EXTRAS if extra is None else extra.split(","))]
    names = tuple(name for group in missing for name in group)
    needed = [name for name in names if words != "prepare" or name != "tensorflow_datasets"]
    (tmp_path / "sitecustomize.py").write_text(
        f"import importlib.util, sys\nmissing = {names}\nfind = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name in missing else find(name, *rest)\n"
        # flax and huggingface_hub import these three themselves
        "sys.modules.update(dict.fromkeys(set(missing) - {'optax', 'orbax', 'httpx2'}))\n"
    )
    (tmp_path / "x.yaml").write_text(f"run_dir: {tmp_path / 'run'}\ntarget: {{name: {tmp_path}}}\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{pathlib.Path(__file__).parents[1]}"}

    def run(*arguments: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", f"eagle3_jax.{verb}", *arguments]
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        return answer.returncode, answer.stdout, answer.stderr

    status, printed, errors = run(*words.split()[1:2], "--help") if verb == "benchmark" else run("--help")
    assert (status, errors) == (0, "") and "--config" in printed
    status, _, errors = run(*words.split()[1:], "--config", str(tmp_path / "x.yaml"))
    assert status == 1
    if extra is None:
        assert "the extra" not in errors and errors.startswith(f"eagle3_jax.{verb}: ")
        return
    sentence = f"got no {', '.join(needed)}, expected the extra `{extra}`: pip install 'eagle3-jax[{extra}]'\n"
    assert errors == f"eagle3_jax.{verb}: {sentence}"
