"""The README: its Python runs, its commands are understood."""

import argparse
import contextlib
import functools
import io
import os
import pathlib
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest.mock
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

import eagle3_jax
from eagle3_jax import config
from eagle3_jax.config import DraftConfig, TargetConfig
from eagle3_jax.export import __main__ as export
from eagle3_jax.models.drafts.eagle3 import DraftHead, DraftHeadConfig
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.runs import command_line
from eagle3_jax.serve import __main__ as serve

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MORE = pytest.mark.slow  # marks of the other pages


def commands() -> list[str]:
    """Indented or fenced lines that start a script or a verb; comments, continuations and loops are taken out."""
    found = []
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        program = r"((?:[A-Z_]+=\S+ )*(?:\S*bin/python|bash) [^`\n]*?)"
        for line in re.findall(rf"^(?:    |  |until )?{program}(?: &&|; do [^\n]*)?$", text, re.MULTILINE):
            found.append(shlex.join(shlex.split(line, comments=True)))
    return sorted(set(found))


def understand_script(script: str, arguments: list[str]) -> None:
    """What `bash script arguments` would refuse. Raises AssertionError."""
    assert (ROOT / script).is_file(), script
    subprocess.run(["bash", "-n", ROOT / script], check=True, timeout=60)
    if script == "tools/tpu_vm.sh":
        command, *more = ("configs/llama31_8b.yaml" if word == "my-head.yaml" else word for word in arguments)
        with tempfile.TemporaryDirectory() as folder:  # the script asks gcloud behind its checks
            gcloud = pathlib.Path(folder) / "gcloud"
            gcloud.write_text("#!/bin/sh\necho asked >&2\nexit 1\n")
            gcloud.chmod(0o755)
            done = subprocess.run(
                ["bash", ROOT / script, command, *more],
                env=os.environ | {"VENV": sys.prefix, "PATH": f"{folder}:{os.environ['PATH']}"},
                capture_output=True,
                text=True,
                timeout=60,
            )
        assert done.stderr == "tpu_vm.sh: asked\n", done.stderr
        return
    text = "\n".join(line for line in (ROOT / script).read_text().splitlines() if not line.startswith("#"))
    known = re.findall(r"^ *\"?([a-z]*)\"?\)", text, re.MULTILINE)
    assert not known or not arguments or arguments[0] in known, f"{arguments[0]}: not an argument of {script}"
    text += "\n".join((ROOT / path).read_text() for path in re.findall(r"tools/\w+\.py", text))
    for word in arguments:
        if word.startswith("--"):
            assert re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text), f"{word}: not a flag of {script}"
        elif word.endswith(".yaml"):
            assert (ROOT / word).is_file(), word


# Configs of a user's own, in the pages' commands -> one that is here.
OWN = {"my-head.yaml": "configs/quickstart.yaml"}


def understand_verb(verb: str, flags: list[str]) -> tuple[config.RunConfig | None, argparse.Namespace]:
    """The configuration that a verb's command line makes, and its own flags. Raises SystemExit: it is refused."""
    if verb == "serve":
        return serve.configure(flags), argparse.Namespace()
    if "--from" in flags:
        export.arguments_to_convert(flags)
        return None, argparse.Namespace()
    if verb == "benchmark":
        verb, flags = f"benchmark {flags[0]}", flags[1:]
    return command_line.read(verb, flags)


@pytest.mark.slow
@pytest.mark.parametrize("command", commands())
def test_every_command_is_understood(command, monkeypatch):
    words = [word for word in shlex.split(command) if not re.fullmatch(r"[A-Z_0-9]+=\S*", word)]
    program, what, *arguments = words
    if program == "bash":
        understand_script(what, arguments)
    elif what == "-m" and arguments[0].startswith("eagle3_jax."):
        verb, *flags = arguments
        monkeypatch.chdir(ROOT)
        understand_verb(verb.removeprefix("eagle3_jax."), [OWN.get(word, word) for word in flags])
    elif what == "-c":
        exec(compile(arguments[0], "a page's command", "exec"), {})
    elif what != "-m":
        assert (ROOT / what).is_file()
        for word in arguments:
            if word.startswith("--") and "." not in word:
                assert word in help_of(what), f"{word}: not a flag of {what}"


@functools.cache
def help_of(tool: str) -> str:
    """What it prints, in this process: it has imported most of what a tool does."""
    there = unittest.mock.patch.multiple(sys, argv=[tool, "--help"], path=[str((ROOT / tool).parent), *sys.path])
    shown, loaded = io.StringIO(), set(sys.modules)
    with there, unittest.mock.patch.dict(os.environ), contextlib.redirect_stdout(shown):
        with pytest.raises(SystemExit, match="^0$"):
            runpy.run_path(str(ROOT / tool), run_name="__main__")
    for name in set(sys.modules) - loaded:
        first = ROOT / "tools" / name.partition(".")[0]
        if first.is_dir() or first.with_suffix(".py").exists():
            del sys.modules[name]  # a test that reads it anew may have another environment
    return shown.getvalue()


# Walks of a newcomer from the top of a page in a clone, each with the pages that go on where it ends. LEFT_OUT has the
# lines that the tests cannot run, by a pattern -> why. Every other line of a shell block is followed, a new one too.
FOLLOWED = {
    "README.md": ["README.md"],
    "train-your-own-head.md": ["docs/train-your-own-head.md", "docs/training-options.md"],
}
LEFT_OUT = {
    r"-m venv |-m pip install ": "makes the environment, in which the tests run",
    r"tools/(hello|quickstart)\.sh": "downloads packages, trains for 20 minutes; test_hello.py runs what it shows",
    r"bin/tensorboard |eagle3_jax\.serve ": "serves until it is stopped; tensorboard is no package of the tests",
    r"bin/eagle3-jax ": "asks a model of 93 MB; test_terminal.py asks another",
    r"^curl ": "asks that server; serve/test_http.py asks one",
    r"tools/test\.sh": "runs these tests",
    r"tools/recipe\.sh": "takes a night, and prompts that do not come with it",
}


def text_of(walk: str) -> str:
    return "\n".join((ROOT / page).read_text() for page in FOLLOWED[walk])


def shell_lines(text: str) -> list[str]:
    """Of the shell blocks: indented by four spaces, or fenced as bash; diagrams are none."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    bare = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    blocks += re.findall(r"(?<=\n\n)((?:    .*\n)+)", bare)
    shell = [block for block in blocks if " -> " not in block and not re.match(r" *\w+/\n", block)]
    lines = "\n".join(shell).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not any(re.search(p, line.strip()) for p in LEFT_OUT)]


def clone_into(folder: pathlib.Path) -> pathlib.Path:
    """The files of this checkout, as git has them, with the environment in which the tests run."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    for name in filter(None, names.stdout.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


# So little of the quickstart that its page can be followed in minutes.
CUT = {"limit: 520": "limit: 16", "count: 60": "count: 2", "held_out: 0.08": "held_out: 0.2", "epochs: 6": "epochs: 1"}
CUT |= {"max_tokens: 112": "max_tokens: 24", "max_tokens: 96": "max_tokens: 16", "limit: 15": "limit: 2"}


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("walk", FOLLOWED)
def test_a_page_runs_in_a_clone(walk, tmp_path):
    """Every line as it is written, the Python of README too, on a config that is cut."""
    clone = clone_into(tmp_path)
    text = (clone / "configs/quickstart.yaml").read_text()
    for whole, cut in CUT.items():
        assert whole in text
        text = text.replace(whole, cut)
    text += "\nbenchmark: {requests: 2, turns: 1, max_tokens: 8}\n"
    (clone / "configs/quickstart.yaml").write_text(text)
    fast = "--xla_backend_optimization_level=0"
    settings: Any = {"cwd": clone, "env": tiny.environment(PYTHONPATH=str(clone), XLA_FLAGS=fast)}
    for line in shell_lines(text_of(walk)):
        done = subprocess.run(["bash", "-e", "-c", line], capture_output=True, text=True, timeout=3600, **settings)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    if walk == "README.md":
        (block,) = re.findall(r"^```python\n(.*?)^```", text_of(walk), re.MULTILINE | re.DOTALL)
        words = [sys.executable, "-c", block]
        done = subprocess.run(words, capture_output=True, text=True, timeout=3600, **settings)
        assert done.returncode == 0 and "None" not in done.stdout.split(), done.stderr
        assert done.stdout.endswith("\n") and re.search(r"^\d\.\d+$", done.stdout, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.name, marks=[] if page.name == "README.md" else MORE) for page in PAGES],
)
def test_its_python_runs(page, tmp_path, monkeypatch, capsys):
    """As it is written, but for the models: a tiny target in a folder, and a head that knows nothing."""
    found = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    blocks = [block for block in found if "openai" not in block]  # tests/serve/test_http.py runs those
    assert blocks or page.name != "README.md"
    if not blocks:
        return
    folder = tiny.write_target(tmp_path / "target")
    target = eagle3_jax.load_target(TargetConfig(name=str(folder), aux_layers=(1, 2, 3)))
    head = DraftHeadConfig.for_target(DraftConfig(vocab_size=48), target.model.config)
    draft = Draft(DraftHead(head, rngs=nnx.Rngs(0)), jnp.asarray(np.arange(3, 51, dtype=np.int32)))
    load = eagle3_jax.Engine.load
    asked = []

    def load_tiny(name: str, **arguments: Any):
        asked.append((name, arguments))
        given: dict[str, Any] = arguments | {"max_length": 512}
        if {"draft", "tree"} & arguments.keys():
            given["draft"] = draft
        kept = ("draft", "tree", "max_length", "structured_mib")
        return load(target, **{name: given[name] for name in kept if name in given})

    monkeypatch.setattr(eagle3_jax.Engine, "load", load_tiny)
    params: Any = eagle3_jax.SamplingParams
    monkeypatch.setattr(eagle3_jax, "SamplingParams", lambda **given: params(**(given | {"max_tokens": 8})))
    for block in blocks:
        exec(compile(block.replace("9690", "190"), str(page), "exec"), {"__name__": "__main__"})
    loads = any("Engine.load" in block for block in blocks)  # others show a function
    printed = capsys.readouterr().out
    assert bool(asked) == bool(printed.strip()) == loads
    if page.name == "README.md":  # an answer, its tokens a round, another answer
        assert printed.endswith("\n") and re.fullmatch(r"[\d.]+", printed.splitlines()[1])
