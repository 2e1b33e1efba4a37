"""What the README tells a user to do: its Python runs, its commands are understood."""

import importlib
import os
import pathlib
import re
import shlex
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

import eagle3_jax
from eagle3_jax import config, export
from eagle3_jax.config import DraftConfig, TargetConfig
from eagle3_jax.models.draft import DraftHead, DraftHeadConfig
from eagle3_jax.models.head import Draft

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


def test_there_are_commands():
    assert any("quickstart.sh" in command for command in commands())
    assert any("eagle3_jax.train" in command for command in commands())


def understand_script(script: str, arguments: list[str]) -> None:
    """What `bash script arguments` would refuse. Raises AssertionError."""
    assert (ROOT / script).is_file(), script
    subprocess.run(["bash", "-n", ROOT / script], check=True, timeout=60)
    if script == "tools/tpu_vm.sh":
        command, *more = ("configs/llama31_8b.yaml" if word == "my-head.yaml" else word for word in arguments)
        done = subprocess.run(
            ["bash", ROOT / script, command, "--dry-run", *more],
            env=os.environ | {"VENV": sys.prefix},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
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


@pytest.mark.parametrize(
    "line",
    [
        "tools/hello.sh --draft lookup",
        "tools/recipe.sh configs/smollm2_135m.yaml",
        "tools/test.sh fast",
        "tools/tpu_vm.sh install --name head --zone us-west4-a --bucket my-bucket",
    ],
)
def test_a_right_line_is_understood(line):
    understand_script(line.split()[0], line.split()[1:])


@pytest.mark.parametrize(
    "line",
    [
        "tools/hallo.sh",
        "tools/hello.sh --drafts lookup",
        "tools/recipe.sh configs/smollm2.yaml",
        "tools/test.sh quick",
        "tools/tpu_vm.sh create --nmae head --zone us-west4-a --type v6e-8",
        "tools/tpu_vm.sh create --name head --zone us-west4-a --type v6e-12",
        "tools/tpu_vm.sh train --name head --zone us-west4-a --config configs/nothing.yaml",
    ],
)
def test_a_wrong_line_is_not(line):
    with pytest.raises(AssertionError):
        understand_script(line.split()[0], line.split()[1:])


@pytest.mark.slow
@pytest.mark.parametrize("command", commands())
def test_every_command_is_understood(command, monkeypatch):
    words = [word for word in shlex.split(command) if not re.fullmatch(r"[A-Z_0-9]+=\S*", word)]
    program, what, *arguments = words
    if program == "bash":
        understand_script(what, arguments)
    elif what == "-m" and arguments[0].startswith("eagle3_jax."):
        verb, *flags = arguments
        importlib.import_module(verb)
        if verb == "eagle3_jax.serve":
            importlib.import_module(verb).configure(flags)
            return
        if "--from" in flags:
            export.arguments_to_convert(flags)
            return
        groups = re.findall(r"(--\S+)((?: (?!--)\S+)+)", " ".join(flags))
        values = {name: words.split() for name, words in groups}
        (path,) = values.pop("--config")
        own = {"--prompts", "--output", "--compare", "--check", "--vllm", "--expect", "--write-target", "--push-to-hub"}
        overrides = [word for name, words in values.items() if name not in own for word in (name, *words)]
        config.load(ROOT / path, overrides)
    elif what != "-m":
        assert (ROOT / what).is_file()
        monkeypatch.syspath_prepend(str(ROOT / "tools"))
        shown = subprocess.run(
            [sys.executable, ROOT / what, "--help"], capture_output=True, text=True, timeout=120, cwd=ROOT
        )
        assert shown.returncode == 0, shown.stderr
        for word in arguments:
            if word.startswith("--") and "." not in word:
                assert word in shown.stdout, f"{word}: not a flag of {what}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.name, marks=[] if page.name == "README.md" else MORE) for page in PAGES],
)
def test_its_python_runs(page, tmp_path, monkeypatch, capsys):
    """As it is written, but for the models: a tiny target in a folder, and a head that knows nothing."""
    found = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    blocks = [block for block in found if "openai" not in block]  # tests/serving/test_http.py runs those
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
        given: dict[str, Any] = arguments | {"max_length": 512} | ({"draft": draft} if "draft" in arguments else {})
        return load(target, **{name: given[name] for name in ("draft", "tree", "max_length") if name in given})

    monkeypatch.setattr(eagle3_jax.Engine, "load", load_tiny)
    params: Any = eagle3_jax.SamplingParams
    monkeypatch.setattr(eagle3_jax, "SamplingParams", lambda **given: params(**(given | {"max_tokens": 8})))
    for block in blocks:
        exec(compile(block.replace("9690", "190"), str(page), "exec"), {"__name__": "__main__"})
    assert asked
    assert capsys.readouterr().out.strip()
