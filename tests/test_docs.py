"""The documents: what they link to and name exists. Their commands and their Python are those of `test_readme.py`."""

import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def name(path):
    return str(path.relative_to(ROOT))


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


def test_shell_compiles():
    fenced = [re.findall(r"^ *```bash\n(.*?)^ *```", page.read_text(), re.MULTILINE | re.DOTALL) for page in DOCUMENTS]
    text = "\n".join(block for blocks in fenced for block in blocks)
    assert "speculative-config" in text
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


def test_no_address_of_a_package_index_or_of_a_machine():
    for document in DOCUMENTS:
        assert not re.search(r"index-url|/simple/|/(root|home|tmp)/|localhost:\d", document.read_text()), document
