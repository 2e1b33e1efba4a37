"""configs/: every example is read, and names its target."""

import pathlib

import pytest

from eagle3_jax.config import run_file
from eagle3_jax.models.checkpoint import fetch
from eagle3_jax.models.families.gemma3 import Gemma3Config

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
TARGETS = sorted(path.parent.name for path in CONFIGS.glob("targets/*/config.json"))


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_s_shape_is_read(name: str) -> None:
    assert fetch.read_config(CONFIGS / "targets" / name).eos_token_ids


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_run_names_a_target_that_is_here(path: pathlib.Path) -> None:
    name = run_file.load(path).target.name
    assert name in fetch.REGISTERED or any(path.stem.startswith(target) for target in TARGETS)


def test_gemma_s_shape_is_what_its_config_leaves_unsaid() -> None:
    """Published are six fields of the text model; the others are those that the weights have."""
    shape = fetch.read_config(CONFIGS / "targets/gemma3_4b")
    assert isinstance(shape, Gemma3Config)
    assert [i for i in range(34) if i not in shape.local_layers] == [5, 11, 17, 23, 29]
    assert (shape.vocab_size, shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim) == (
        262208,
        8,
        4,
        256,
    )
    assert shape.tie_word_embeddings and shape.eos_token_ids == (1, 106)
