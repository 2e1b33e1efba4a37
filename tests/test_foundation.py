"""What the whole project stands on: test settings, pinned versions, and the scripts that make the environment."""

import ast
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import warnings
from typing import Any

import jax
import jaxtyping
import pytest
from packaging.requirements import Requirement

from eagle3_jax import mesh

ROOT = pathlib.Path(__file__).parent.parent


def test_there_are_eight_virtual_devices():
    assert jax.device_count() == 8


def test_public_functions_are_type_checked():
    not_a_config: Any = "four by two"
    with pytest.raises(jaxtyping.TypeCheckError):
        mesh.make_mesh(not_a_config)


def test_warnings_are_errors():
    with pytest.raises(DeprecationWarning):
        warnings.warn("old", DeprecationWarning, stacklevel=1)


_SKIPS = """
import pytest

def test_passes():
    pass

@pytest.mark.skip(reason="no mount here")
def test_needs_a_mount():
    pass
"""


@pytest.mark.parametrize(
    ("listed", "workers", "unexpected"),
    [
        (
            "skip = []",
            ["-n", "1"],
            ["test_some.py::test_needs_a_mount: no mount here", "test_module.py: could not import"],
        ),
        ('[[skip]]\ntest = "*"\nreason = "mount"', [], ["test_module.py: could not import"]),
        ('[[skip]]\ntest = "*::test_needs_*"\nreason = "mount"\n[[skip]]\ntest = "*"\nreason = "import"', [], []),
    ],
)
def test_a_skip_that_is_not_listed_fails_the_run(tmp_path, listed, workers, unexpected):
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "test_some.py").write_text(_SKIPS)
    (tmp_path / "test_module.py").write_text("import pytest\npytest.importorskip('not_installed')")
    (tmp_path / "allowed_skips.toml").write_text(listed)
    shutil.copy(ROOT / "tests/conftest.py", tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == bool(unexpected), result.stdout + result.stderr
    summary = result.stdout.partition("allowed_skips.toml does not list")[2]
    assert [line in summary for line in unexpected] == [True] * len(unexpected)
    assert summary.count("test_some.py::test_needs") == sum("test_some" in line for line in unexpected)


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("test_*.py")), ids=lambda path: path.name)
def test_what_waits_for_a_process_has_a_timeout(path):
    """A child that hangs must fail its test, not the whole run."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = ast.unparse(node.func)
            starts = name in ("subprocess.run", "subprocess.check_output", "subprocess.check_call", "subprocess.call")
            waits = node.func.attr == "communicate" or (node.func.attr == "wait" and not node.args)
            limited = "timeout" in [keyword.arg for keyword in node.keywords]
            assert limited or not (starts or waits), f"line {node.lineno}: {name}"


def test_every_test_has_a_time_limit(request):
    assert request.node.get_closest_marker("timeout").args == (300,)


@pytest.mark.parametrize(("name", "version"), [("py311", "3.11"), ("py312", "3.12")])
def test_pinned_versions_meet_every_requirement(name, version):
    lines = (ROOT / "constraints" / f"{name}.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9.-]+==[0-9][0-9a-z.]*", pin) for pin in pins)
    pinned = dict(pin.split("==") for pin in pins)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in itertools.chain(project["dependencies"], *project["optional-dependencies"].values()):
        requirement = Requirement(text)
        if requirement.name == project["name"]:  # another extra of its own, which stands here too
            continue
        if requirement.marker is None or requirement.marker.evaluate({"python_version": version}):
            found = pinned[requirement.name.lower()]
            assert requirement.specifier.contains(found), f"{text}, pinned {found}"


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
        shutil.copytree(ROOT / "constraints", self.home / "constraints")
        shutil.copy(ROOT / "pyproject.toml", self.home)
        self.programs.mkdir()
        for name in ("python3", "python3.11", "python3.12", "python3.13"):
            self.program(name, _FAKE_PYTHON)

    def program(self, name: str, text: str) -> None:
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    def prepare(self, arguments: str = 'test "[test]"', **says: str) -> subprocess.CompletedProcess[str]:
        fake = {"FAKE_VERSION": "3.11.7", "FAKE_VENV_SAYS": "", "FAKE_PIP_SAYS": ""} | says
        return subprocess.run(
            ["bash", "-c", f"source {self.home}/tools/env.sh; prepare_environment {arguments}", "test.sh"],
            env={"PATH": f"{self.programs}:/usr/bin:/bin"} | fake,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def pip_calls(self) -> list[str]:
        calls = self.home / "pip-calls"
        return calls.read_text().splitlines() if calls.exists() else []


@pytest.fixture
def machine(tmp_path: pathlib.Path) -> Machine:
    return Machine(tmp_path)


def test_the_environment_is_installed_once(machine):
    first, second = machine.prepare(), machine.prepare()
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert len(machine.pip_calls()) == 1
    assert "--constraint constraints/py311.txt --editable .[test]" in machine.pip_calls()[0]
    assert second.stdout == ""


def test_changed_requirements_are_installed_again(machine):
    machine.prepare()
    with (machine.home / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    machine.prepare()
    assert len(machine.pip_calls()) == 2


def test_tests_add_to_the_runtime_and_contain_it(machine):
    machine.prepare('runtime "" test')
    machine.prepare('test "[test]"')
    machine.prepare('runtime "" test')
    assert [call.rsplit(" ", 1)[1] for call in machine.pip_calls()] == [".", ".[test]"]
    shutil.rmtree(machine.home / ".venv")
    machine.prepare('test "[test]"')
    machine.prepare('runtime "" test')
    assert len(machine.pip_calls()) == 3


@pytest.mark.parametrize(
    ("says", "sentence"),
    [
        ({"FAKE_VERSION": "3.9.18"}, "needs Python 3.11 or newer, found Python 3.9.18."),
        ({"PYTHON": "/nowhere/python"}, "PYTHON=/nowhere/python is not a Python 3.11 or newer that runs."),
        ({"FAKE_VENV_SAYS": "ensurepip is not available"}, "this Python has no venv module."),
        ({"FAKE_VENV_SAYS": "OSError: [Errno 28] No space left on device"}, "the disk is full"),
        ({"FAKE_PIP_SAYS": "ERROR: [Errno 28] No space left on device"}, "the disk is full"),
        ({"FAKE_PIP_SAYS": "NewConnectionError(...)\nERROR: No matching distribution found"}, "no network"),
        ({"FAKE_PIP_SAYS": "Collecting x\nERROR: something odd"}, "could not make .venv: ERROR: something odd"),
    ],
)
def test_what_prevents_an_environment_is_said_in_one_sentence(machine, says, sentence):
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


@pytest.mark.slow
def test_without_network_a_real_python_gives_the_same_sentence(machine):
    offline = {"PYTHON": sys.executable, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"}
    result = machine.prepare(**offline)
    assert result.returncode == 1
    assert "could not get the packages: no network" in result.stderr
    assert "Traceback" not in result.stdout + result.stderr
