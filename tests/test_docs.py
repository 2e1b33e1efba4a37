"""The pages: links, named files and tests, the site. `test_readme.py` has their commands and their Python."""

import ast
import dataclasses
import functools
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

import eagle3_jax
from eagle3_jax import config

ROOT = pathlib.Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
PAGES = sorted(ROOT.glob("docs/*.md"))
PROSE = [path for path in DOCUMENTS if path.name != "CHANGELOG.md"]
SUFFIXES = ("cpp", "html", "json", "jsonl", "md", "png", "py", "safetensors", "txt", "yaml")


def name(path):
    return str(path.relative_to(ROOT))


def anchors(document):
    """Of its headings, as code hosts and the site name them."""
    headings = re.findall(r"^#+ (.*)", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(document):
    return re.findall(r"\]\((?!https?:)([^)]+)\)", document.read_text())


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_lead_somewhere(document):
    for link in links(document):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("document", PAGES, ids=name)
def test_links_of_the_site_stay_in_it(document):
    assert [link for link in links(document) if "/" in link] == []


FOLDERS = ("eagle3_jax", "tests", "tools", "examples", "configs", "docs")
FILES = [path for folder in FOLDERS for path in sorted(ROOT.glob(f"{folder}/**/*")) if "__pycache__" not in path.parts]
PLACES = "\n".join(f"/{name(path)}" for path in [*FILES, *ROOT.glob("*.py")])
STEMS = {part for path in FILES for part in (path.stem, path.parent.name)}
SECTIONS = [field.name for field in dataclasses.fields(config.RunConfig)]


def prose(path):
    """A page's text; of other files the comments and docstrings."""
    text = path.read_text()
    docstrings = re.findall(r'(?:\A|:\n) *"""(?:.*?)"""', text, re.DOTALL)
    return text if path.suffix == ".md" else "\n".join([*docstrings, *re.findall(r"(?:^|\s)# .*", text)])


@functools.cache
def there(end):
    """The paths that end so; a suffix may be left out."""
    ending = re.escape(end).replace(r"\*", ".*")
    return re.findall(rf"^/((?:.*/)?{ending}(?:\.\w+)?)$", PLACES, re.MULTILINE)


@functools.cache
def defined(pattern):
    """Names of functions, classes and assignments in the files."""
    texts = "\n".join((ROOT / path).read_text() for path in there(pattern))
    return {
        first or second for first, second in re.findall(r"^ *(?:(?:def|class) (\w+)|(\w+)[:,]? )", texts, re.MULTILINE)
    }


def stale(text):
    """Files, modules, their names, and fields of a config that a text names and that are not there."""
    files = set(re.findall(r"(?<![\w/.-])((?:eagle3_jax|tests|tools|examples|docs)/[\w./*-]*\w)", text))
    files |= set(re.findall(r"`(configs/[\w./*-]*\w|(?:\w+/)*\w+\.py)`", text))
    found = {path for path in files if not there(path)}
    for first, second in re.findall(r"`((?!config\.)[a-z]\w*)\.([A-Za-z]\w*)", text):
        if first not in STEMS or second in SUFFIXES:
            continue
        module, folder = f"{first}.py", f"{first}/__init__.py"
        known = second in defined("eagle3_jax/config/*.py") or there(f"{first}/{second}")
        if not known and (there(folder) or second[0].isupper()):
            known = second in defined(module) | defined(folder) or not there(module) + there(folder)
        elif not known and there(module):  # or a variable of this name
            known = second in defined(module) | defined("eagle3_jax/*.py")
        if not known and (first in SECTIONS or there(module) + there(folder)):
            found.add(f"{first}.{second}")
    return found


def test_what_texts_point_to_is_there():
    texts = [path for path in FILES if path.suffix in (".py", ".sh", ".yaml", ".toml")]
    assert {name(path): names for path in [*texts, *PROSE] if (names := stale(prose(path)))} == {}


@pytest.mark.slow
def test_tests_that_are_named_are_there():
    files = [path.name for path in ROOT.glob("tests/**/test_*.py")]
    trees = [ast.parse(path.read_text()) for path in ROOT.glob("tests/**/test_*.py")]
    there = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for document in PROSE:
        named = re.findall(r"`(test_\w+(?:\.py)?)`", document.read_text())
        assert [test for test in named if test not in there and test not in files] == [], document


def test_no_address_of_a_package_index_or_of_a_machine():
    for document in DOCUMENTS:
        assert not re.search(r"index-url|/simple/|/(root|home|tmp)/|localhost:\d", document.read_text()), document


# ----------------------------------------------------------------------------------------------------------- the site
def test_every_page_is_in_the_navigation_and_in_the_table_of_the_first():
    def pages(entry):
        if isinstance(entry, str):
            return [entry]
        return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in pages(part)]

    navigation = pages(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"])
    there = sorted(path.name for path in PAGES)
    assert sorted(navigation) == there
    assert sorted({"index.md", *(link for link in links(ROOT / "docs/index.md") if link.endswith(".md"))}) == there


def test_the_reference_has_every_public_name():
    named = re.findall(r"^::: eagle3_jax\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(eagle3_jax.__all__)


def test_the_site_is_built_without_a_warning(tmp_path):
    generator = shutil.which("zensical", path=pathlib.Path(sys.executable).parent)
    if generator is None:
        pytest.skip("no zensical")
    shutil.copy(ROOT / "zensical.toml", tmp_path)  # it builds beside the file that a link leads to
    for folder in ("docs", "eagle3_jax"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    command = [generator, "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.stem for path in PAGES} <= {path.stem for path in (tmp_path / "site").glob("*.html")}
    assert "warm_up" in (tmp_path / "site/api.html").read_text()
