"""Which tests a change can reach: by imports at any remove, by verbs that are started, by files that are named."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tools"))
import affected

FILES = {
    "eagle3_jax/__init__.py": "_HOMES = {'Engine': 'eagle3_jax.engine'}",
    "eagle3_jax/engine.py": "def f():\n    from eagle3_jax.pages import Pool",
    "eagle3_jax/pages.py": "import eagle3_jax  # its version",
    "eagle3_jax/train/__main__.py": "",
    "eagle3_jax/train/card.md": "",
    "tools/fit.py": "from eagle3_jax import pages",
    "tests/helper.py": "import eagle3_jax.pages",
    "tests/test_pool.py": "import helper",
    "tests/test_public.py": "import eagle3_jax",
    "tests/test_verb.py": "import tiny; tiny.run_verb('train', 'docs')",
    "tests/test_tool.py": "SCRIPT = 'tools/fit.py'",
    "tests/deep/conftest.py": "import eagle3_jax.engine",
    "tests/deep/test_none.py": "",
}


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        ("eagle3_jax/pages.py", ["deep/test_none", "test_pool", "test_public", "test_tool"]),
        ("eagle3_jax/engine.py", ["deep/test_none", "test_public"]),
        ("eagle3_jax/train/__main__.py", ["test_verb"]),
        ("eagle3_jax/train/card.md", ["test_verb"]),
        ("docs/page.md", ["test_verb"]),
        ("tests/test_pool.py", ["test_pool"]),
        ("tests/helper.py", ["test_pool"]),
        ("tools/fit.py", ["test_tool"]),
        ("LICENSE", []),
        ("pyproject.toml", ["deep/test_none", "test_pool", "test_public", "test_tool", "test_verb"]),
    ],
)
def test_a_change_reaches_what_stands_on_it(tmp_path, changed, reached):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert affected.Checkout(tmp_path).reached([changed]) == [f"tests/{name}.py" for name in reached]
