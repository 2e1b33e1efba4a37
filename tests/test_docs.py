"""The documents: what they link to exists, the commands that they show are understood, their Python compiles."""

import ast
import pathlib
import re
import shlex
import subprocess

import pytest

import eagle3_jax
from eagle3_jax import config

ROOT = pathlib.Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
VERBS = ("prepare", "regenerate", "extract", "train", "export", "evaluate", "report")
FLAGS = {"evaluate": ("--prompts", "--output")}  # beside --config


def name(path):
    return str(path.relative_to(ROOT))


def blocks(document):
    """(language, text) of each fenced or indented block."""
    text = document.read_text()
    fenced = re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    paragraphs = re.split(r"\n\n+", rest)
    return fenced + [("", p) for p in paragraphs if all(line.startswith("    ") for line in p.splitlines())]


def commands():
    for document in DOCUMENTS:
        for language, text in blocks(document):
            if language in ("", "bash"):
                for line in text.replace("\\\n", " ").splitlines():
                    if re.search(r"-m eagle3_jax\.|tools/\w+\.(py|sh)", line):
                        yield pytest.param(line.strip(), id=f"{name(document)}: {line.strip()[:60]}")


def anchors(document):
    """Of its headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.*)", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_lead_somewhere(document):
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", document.read_text()):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_files_that_are_named_are_there(document):
    for path in re.findall(r"`((?:eagle3_jax|tests|tools|configs|docs)/[\w./*-]+)`", document.read_text()):
        assert list(ROOT.glob(path.rstrip("/"))), path


@pytest.mark.parametrize("command", list(commands()))
def test_commands_are_understood(command):
    """Verbs by their configs and overrides, tools by their names and flags."""
    words = shlex.split(command, comments=True)
    if len(words) == 1 or "--command" in words:  # a command for other machines, in quotes
        words = shlex.split(words[-1].split("&&")[-1])
    tool = next((word for word in words if word.startswith("tools/")), None)
    if tool is not None:
        assert (ROOT / tool).exists()
        source = (ROOT / tool).read_text()
        own = [word for word in words if re.fullmatch(r"--[a-z]+", word)]
        assert all(f'"{flag}"' in source for flag in own), own
        return
    verb = words[words.index("-m") + 1].removeprefix("eagle3_jax.")
    assert verb in VERBS
    rest, overrides, path = words[words.index("-m") + 2 :], [], None
    while rest:
        flag = rest.pop(0)
        if flag == "--config":
            path = rest.pop(0)
        elif flag in FLAGS.get(verb, ()):
            rest.pop(0)
        else:
            overrides.append(flag)
    assert path is not None
    config.load(ROOT / path, overrides)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_python_compiles_and_names_what_there_is(document):
    for language, text in blocks(document):
        if language == "python":
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ImportFrom) and node.module == "eagle3_jax":
                    assert {alias.name for alias in node.names} <= set(eagle3_jax.__all__)


def test_shell_compiles():
    text = "\n".join(block for document in DOCUMENTS for language, block in blocks(document) if language == "bash")
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


def test_no_address_of_a_package_index_or_of_a_machine():
    for document in DOCUMENTS:
        assert not re.search(r"index-url|pypi\.org/simple|/root/|/tmp/|localhost:\d", document.read_text()), document
