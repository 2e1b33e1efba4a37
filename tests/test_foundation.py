"""Foundations of the project: test settings, pinned versions, and the scripts that make the environment."""

import importlib.metadata
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
from typing import Any

import array_annotations
import jax.numpy as jnp
import jaxtyping
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from eagle3_jax import mesh
from eagle3_jax.config.kinds import KINDS
from eagle3_jax.formats import kinds
from eagle3_jax.models import layers
from eagle3_jax.training.kinds.kind import named

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.slow
def test_programs_from_a_compilation_cache_are_loaded_in_silence(tmp_path):
    """XLA logs pages of "features" that it misses for each of them, on the very machine that compiled it."""
    code = (
        "from eagle3_jax.runs import environment; environment.prepare()\n"
        "import os, jax; jax.jit(lambda x: x @ x + x.sum())(jax.numpy.ones((64, 64))).block_until_ready();"
        "print(os.environ['TF_CPP_MIN_LOG_LEVEL'])"  # some CPUs miss nothing
    )
    kept = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    env = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"} | kept
    command = [sys.executable, "-c", code]
    started = [
        subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True) for _ in range(2)
    ]
    assert list(tmp_path.iterdir()) and [process.stderr for process in started] == ["", ""]
    assert [process.stdout for process in started] == ["3\n", "3\n"]


def test_shapes_are_checked():
    with pytest.raises(jaxtyping.TypeCheckError):
        layers.rms_norm(jnp.ones((1, 2, 3)), jnp.ones((1, 2)), 1e-6)


@pytest.mark.smoke
@pytest.mark.skipif(not array_annotations.ALL, reason="checked in smoke tests and long runs")
def test_public_functions_are_type_checked():
    not_a_config: Any = "four by two"
    with pytest.raises(jaxtyping.TypeCheckError):
        mesh.make_mesh(not_a_config)


def test_only_models_and_formats_tell_heads_apart():
    """All others ask the head, or its record in `formats.kinds`."""
    told = re.compile(r"isinstance.*(DFlash|DSpark|DraftModel|MtpHead|StoredHead|DraftHead)")
    files = [x for x in (ROOT / "eagle3_jax").rglob("*.py") if not {"models", "formats"} & set(x.parts)]
    assert len(files) > 100 and [x for x in files if told.search(x.read_text())] == []


def test_every_kind_of_head_has_its_record_and_its_training():
    for name, row in KINDS.items():
        trained = named(name)
        assert kinds.named(name).name == name and (trained is None) == (row.training is None)
        assert trained is None or trained.name == name


def locked(role: str, python: str) -> dict[str, str]:
    """Name -> version of what requirements/{role}.txt, with the files it includes, installs on Linux with `python`.

    Every line must be an included file, or an exact version that a blank and hashes follow: no address, no option.
    """
    text = (ROOT / "requirements" / f"{role}.txt").read_text()
    entry = r"([a-z0-9.-]+==[0-9][0-9a-z.]*(?: ; .+)?) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)"
    assert re.fullmatch(rf"(?:-r [a-z]+\.txt\n)?(?:{entry})+", text), f"{role}: not only exact versions with hashes"
    included = re.match(r"-r ([a-z]+)\.txt\n", text)
    versions = locked(included[1], python) if included else {}
    for line, _ in re.findall(entry, text):
        requirement = Requirement(line)
        environment = {"python_version": python, "python_full_version": f"{python}.9", "sys_platform": "linux"}
        if requirement.marker is None or requirement.marker.evaluate(environment):
            version = str(requirement.specifier).removeprefix("==")
            assert versions.setdefault(requirement.name, version) == version, f"{role}: two versions of {line}"
    return versions


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.14"])
@pytest.mark.parametrize("role", ["decode", "train", "test", "docs", "tpu-inference"])
def test_locked_versions_meet_every_requirement(role, python):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    optional = project["project"]["optional-dependencies"]
    requirements = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    site = optional.pop("docs")
    optional.pop("beam")  # in an environment of its own: it holds back other packages
    if role == "docs":
        requirements += site
    elif role in ("train", "test"):
        requirements += itertools.chain(*map(optional.pop, ("prepare", "train", "report")))
    if role == "test":
        requirements += itertools.chain(*optional.values())
    versions = locked("decode", python) | locked(role, python)  # tpu-inference.txt replaces some of them
    for requirement in map(Requirement, requirements):
        # Another extra of its own; torch, whose wheel the index chooses.
        if requirement.name in (project["project"]["name"], "torch"):
            continue
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
            found = versions[requirement.name.lower()]
            assert requirement.specifier.contains(found), f"{requirement}, locked {found}"


@pytest.mark.parametrize("role", ["decode", "train", "tpu", "test"])
def test_what_is_locked_is_all_that_its_packages_need(role):
    """As installed here: pip refuses a lock that lacks one of them, but only when somebody installs it."""
    versions = locked(role, f"{sys.version_info[0]}.{sys.version_info[1]}")
    for name in versions:
        for text in importlib.metadata.requires(name) or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                assert canonicalize_name(requirement.name) in versions, f"{name} needs {text}"


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.14"])
def test_hosts_have_the_compiler_that_tests_compile_with(python):
    assert locked("tpu", python)["libtpu"] == locked("test", python)["libtpu"]


@pytest.mark.smoke
def test_a_tpu_host_has_the_libtpu_that_its_jax_names_and_so_do_tests():
    """Of Python 3.12 and later, which `tools/tpu_vm.sh install` takes; pyproject.toml says why 3.11 has it too."""
    libtpu = locked("tpu", f"{sys.version_info[0]}.{sys.version_info[1]}")["libtpu"]
    assert importlib.metadata.version("libtpu") == libtpu
    named = [x for x in map(Requirement, importlib.metadata.requires("jax") or ()) if x.name == "libtpu"]
    (pinned,) = [x for x in named if x.marker is not None and x.marker.evaluate({"extra": "tpu"})]
    assert pinned.specifier.contains(libtpu) or sys.version_info < (3, 12)


# A Python that does nothing but what the scripts ask of it: versions, `-m venv`, `-m pip`.
_FAKE_PYTHON = """#!/usr/bin/env bash
case "$*" in
  --version) echo "Python $FAKE_VERSION" ;;
  "-m venv"*) mkdir -p .venv/bin; echo "$FAKE_VENV_SAYS"; [[ -z $FAKE_VENV_SAYS ]] && cp "$0" .venv/bin/python ;;
  "-m pip install"*) echo "$*" >>pip-calls; echo "$FAKE_PIP_SAYS"; [[ -z $FAKE_PIP_SAYS ]] ;;
  -c*"(3, 11)"*) [[ $FAKE_VERSION != 3.9* ]] ;;
esac
"""


class Machine:
    """A copy of the scripts on a machine whose only Python is the fake one."""

    def __init__(self, home: pathlib.Path):
        self.home = home / "project"
        self.programs = home / "programs"
        shutil.copytree(ROOT / "tools", self.home / "tools")
        shutil.copytree(ROOT / "requirements", self.home / "requirements")
        shutil.copy(ROOT / "pyproject.toml", self.home)
        self.programs.mkdir()
        for name in ("python3", "python3.11", "python3.12", "python3.13"):
            self.program(name, _FAKE_PYTHON)

    def program(self, name: str, text: str) -> None:
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    def prepare(self, arguments: str = "test", **says: str) -> subprocess.CompletedProcess[str]:
        return self._bash("-c", f"source {self.home}/tools/env.sh; prepare_environment {arguments}", "test.sh", **says)

    def run(self, script: str, *arguments: str, **says: str) -> subprocess.CompletedProcess[str]:
        return self._bash(str(self.home / "tools" / script), *arguments, **says)

    def _bash(self, *arguments: str, **says: str) -> subprocess.CompletedProcess[str]:
        fake = {"FAKE_VERSION": "3.11.7", "FAKE_VENV_SAYS": "", "FAKE_PIP_SAYS": ""} | says
        return subprocess.run(
            ["bash", *arguments],
            env={"PATH": f"{self.programs}:/usr/bin:/bin"} | fake,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def pip_calls(self) -> list[str]:
        """What pip was called with, without the calls for uv, which this machine cannot have."""
        calls = self.home / "pip-calls"
        lines = calls.read_text().splitlines() if calls.exists() else []
        return [line for line in lines if not line.endswith("/dev/stdin")]


@pytest.fixture
def machine(tmp_path: pathlib.Path) -> Machine:
    return Machine(tmp_path)


def test_the_environment_is_installed_once_and_again_where_requirements_change(machine):
    first, second = machine.prepare(), machine.prepare()
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    locked_packages, package = machine.pip_calls()
    assert locked_packages.endswith(" --require-hashes --requirement requirements/test.txt")
    assert package.endswith(" --no-build-isolation --no-deps --editable .")
    assert second.stdout == ""
    for count, file in enumerate(("pyproject.toml", "requirements/decode.txt"), 2):
        with (machine.home / file).open("a") as changed:
            changed.write("# changed\n")
        machine.prepare()
        assert len(machine.pip_calls()) == 2 * count


def test_an_environment_without_pip_gets_it(machine):
    """As uv makes one; it stays otherwise as it is."""
    machine.prepare()
    bare = _FAKE_PYTHON.replace(
        '  "-m pip install"*)',
        '  "-m pip --version") [[ -f pip ]] ;;\n  "-m ensurepip") touch pip ;;\n  "-m pip install"*)',
    )
    python = machine.home / ".venv/bin/python"
    python.write_text(bare)
    result = machine.prepare()
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == ".venv has no pip (uv leaves it out); adding it ...\n" and python.read_text() == bare


@pytest.mark.parametrize("role", ["train", 'test "[reference]"'])
def test_hello_installs_decoding_alone_and_nothing_beside_a_larger_environment(machine, role):
    ended = machine.run("hello.sh")
    assert ended.returncode == 0, ended.stderr
    assert [call.rsplit(" ", 1)[1] for call in machine.pip_calls()] == ["requirements/decode.txt", "."]
    shutil.rmtree(machine.home / ".venv")
    machine.prepare(role)
    before = machine.pip_calls()
    machine.run("hello.sh")
    assert machine.pip_calls() == before


@pytest.mark.parametrize("device", ["accel0", "vfio/0"])
def test_hello_installs_what_a_tpu_needs_where_there_is_one(machine, tmp_path, device):
    """An environment without libtpu would compute on the VM's CPU."""
    (tmp_path / "dev" / device).parent.mkdir(parents=True)
    (tmp_path / "dev" / device).touch()
    machine.prepare('train "" "test[reference]"')
    ended = machine.run("hello.sh", DEVICES=str(tmp_path / "dev"))
    assert ended.returncode == 0, ended.stderr
    assert [call.rsplit(" ", 1)[1] for call in machine.pip_calls()][2:] == ["requirements/tpu.txt", "."]


def test_tests_add_to_training_and_contain_it(machine):
    machine.prepare('train "" "test[reference]"')
    machine.prepare('test "[reference]"')
    machine.prepare('train "" "test[reference]"')
    package = "."
    installed = [call.rsplit(" ", 1)[1] for call in machine.pip_calls()]
    assert installed == ["requirements/train.txt", package, "requirements/test.txt", package, ".[reference]"]
    shutil.rmtree(machine.home / ".venv")
    machine.prepare('test "[reference]"')
    machine.prepare('train "" "test[reference]"')
    assert len(machine.pip_calls()) == 8


@pytest.mark.parametrize(
    ("says", "sentence"),
    [
        ({"FAKE_VERSION": "3.9.18"}, "needs Python 3.11 or newer, found Python 3.9.18."),
        ({"PYTHON": "/nowhere/python"}, "PYTHON=/nowhere/python is not a Python 3.11 or newer that runs."),
        ({"FAKE_VENV_SAYS": "ensurepip is not available"}, "this Python has no venv module."),
        ({"FAKE_VENV_SAYS": "OSError: [Errno 28] No space left on device"}, "the disk is full"),
        ({"FAKE_PIP_SAYS": "ERROR: [Errno 28] No space left on device"}, "the disk is full"),
        ({"FAKE_PIP_SAYS": "NewConnectionError(...)\nERROR: No matching distribution found"}, "no network"),
        (
            {"FAKE_PIP_SAYS": "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE FILE.\n  a==1:\n   Expected 0"},
            "refused a file whose sha256 is not one that requirements/ lists: a==1: Expected 0",
        ),
        ({"FAKE_PIP_SAYS": "Collecting x\nERROR: something odd"}, "could not make .venv: ERROR: something odd"),
    ],
)
def test_what_prevents_an_environment_is_reported_in_one_sentence(machine, says, sentence):
    for _ in range(2):  # what is half-made does not count as done
        result = machine.prepare(**says)
        assert result.returncode == 1
        assert result.stderr.startswith("test.sh: ") and sentence in result.stderr
        assert result.stderr.count("\n") == 1
    repaired = machine.prepare()
    assert (repaired.returncode, repaired.stderr) == (0, "")


def test_a_nearly_full_disk_is_seen_before_the_download(machine):
    machine.program(
        "df", "#!/usr/bin/env bash\nprintf 'Filesystem 1M-blocks Used Available\\n/dev/x 9000 8900 100\\n'\n"
    )
    result = machine.prepare()
    assert result.returncode == 1
    assert "the disk is nearly full: .venv needs about 4 GiB, 100 MiB are free." in result.stderr
    assert machine.pip_calls() == []
