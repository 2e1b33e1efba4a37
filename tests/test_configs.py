"""configs/: every example is read, and names its target."""

import pathlib
import re
from typing import Any

import pytest
import yaml

from eagle3_jax.config import RunConfig, flags, run_file
from eagle3_jax.models.checkpoint import fetch
from eagle3_jax.models.families.gemma3 import Gemma3Config
from eagle3_jax.training.kinds.kind import kind_of

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
TARGETS = sorted(path.parent.name for path in CONFIGS.glob("targets/*/config.json"))


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_s_shape_is_read(name: str) -> None:
    assert fetch.read_config(CONFIGS / "targets" / name).eos_token_ids


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_run_names_a_target_that_is_here(path: pathlib.Path) -> None:
    name = run_file.load(path).target.name
    assert name in fetch.REGISTERED or any(path.stem.startswith(target) for target in TARGETS)


@pytest.mark.parametrize("path", [*CONFIGS.glob("*_dflash.yaml"), *CONFIGS.glob("*_dspark.yaml")], ids=lambda x: x.stem)
def test_a_block_head_reads_what_published_ones_read_and_all_engines_draft_it(path: pathlib.Path) -> None:
    config = run_file.load(path)
    target, kind = path.stem.rsplit("_", 1)
    shape = fetch.read_config(CONFIGS / "targets" / target, config.target.aux_layers)
    head = kind_of(config, shape)
    assert head.name == kind
    assert head.aux_layers == {32: (2, 9, 16, 23, 30), 36: (2, 10, 18, 26, 34)}[shape.num_hidden_layers]
    assert head.shape.draft_vocab_size == shape.vocab_size, "SGLang reads no d2t of a block head"
    tree = config.evaluate.tree
    assert tree != "auto" and tree.num_steps == head.num_drafts


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


def test_gemma_4_s_layers_are_those_of_its_weights() -> None:
    """Layers 15 to 34 of E2B read the keys and values of 13 and 14; the full layers of 12B have one wide KV head."""
    small: Any = fetch.read_config(CONFIGS / "targets/gemma4_e2b")
    assert [layer for layer in range(35) if not small.shares(layer)] == list(range(15))
    assert (small.lender(local=True), small.lender(local=False)) == (13, 14)
    assert (small.heads(13), small.heads(14), small.mlp_width(14), small.mlp_width(15)) == (
        (1, 256),
        (1, 512),
        6144,
        12288,
    )
    large: Any = fetch.read_config(CONFIGS / "targets/gemma4_12b")
    assert (large.heads(4), large.heads(5), large.projections(5)) == ((8, 256), (1, 512), ("q", "k"))
    assert (large.hidden_size_per_layer_input, large.num_experts, large.eos_token_ids) == (0, None, (1, 106))


def test_every_option_is_set_by_a_config_or_named_on_a_page() -> None:
    """An option that neither shows is found by nobody: show it, or cut it."""
    root = CONFIGS.parent
    pages = "\n".join(path.read_text() for path in [root / "README.md", *sorted(root.glob("docs/*.md"))])
    pages = re.sub(r"(?<=\w)-(?=\w)", "_", pages)  # flags are written with dashes
    named = {
        word
        for code in re.findall(r"`([^`\n]+)`|^ {4}(.+)$", pages, re.M)
        for word in re.findall(r"\w+", "".join(code))
    }
    used = [_paths(yaml.safe_load(path.read_text())) for path in CONFIGS.glob("*.yaml")]
    options = {field.place for field in flags.fields(RunConfig)}
    unseen = [place for place in options.difference(*used) if place.rpartition(".")[2] not in named]
    assert not unseen


def _paths(values: dict[str, Any], prefix: str = "") -> set[str]:
    own = {f"{prefix}{name}" for name in values}
    return own.union(*(_paths(x, f"{prefix}{name}.") for name, x in values.items() if isinstance(x, dict)))
