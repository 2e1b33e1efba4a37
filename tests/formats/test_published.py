"""Heads that others published (published.json): each is read and mapped, or refused with the reason."""

import json
import math
import pathlib
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tiny_heads

from eagle3_jax.formats import fields, forms
from eagle3_jax.formats.eagle2 import heads as eagle2
from eagle3_jax.formats.tensors import canonical, draft_table, head_problems
from eagle3_jax.models.drafts.eagle3 import DraftHeadConfig
from eagle3_jax.models.drafts.mtp import MimoMtp
from eagle3_jax.models.families import read_shape
from eagle3_jax.models.families.qwen2 import MimoConfig
from eagle3_jax.models.rope import read_rope
from eagle3_jax.models.target_config import default_aux_layers

HEADS = {
    head["name"]: head for head in json.loads((pathlib.Path(__file__).parent / "published.json").read_text())["heads"]
}
WITH_CONFIG = [name for name, head in HEADS.items() if "config" in head]
EAGLE3 = [name for name in WITH_CONFIG if HEADS[name]["expected"]["form"] in forms.FORMS]
READ = [name for name in EAGLE3 if "draft_vocab_size" in HEADS[name]["expected"]]


def described(head: dict[str, Any]) -> tuple[str, dict[str, Any], DraftHeadConfig | None, list[str]]:
    """Form, flat config.json, shape, and problems."""
    form, problems = forms.form_of(head["config"]), []
    values = form.flatten(head["config"])
    return form.name, values, fields.read(form, values, problems), problems


def sizes(config: DraftHeadConfig) -> dict[str, tuple[int, ...]]:
    """Of all tensors that a checkpoint holds."""
    table = {name: shape for entry in draft_table(config).values() for name, shape in entry.tensors.items()}
    whole = config.draft_vocab_size == config.vocab_size
    return table | ({} if whole else {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)})


def empty(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Tensors of these shapes that take no memory; the draft vocabulary is the first tokens."""
    kinds: dict[str, Any] = {"d2t": np.int64, "t2d": np.bool_}
    made: dict[str, np.ndarray] = {
        name: np.broadcast_to(np.zeros((), kinds.get(name, ml_dtypes.bfloat16)), s) for name, s in shapes.items()
    }
    if "d2t" in shapes and "t2d" in shapes:
        made["t2d"] = np.arange(*shapes["t2d"]) < shapes["d2t"][0]
    return made


@pytest.mark.parametrize("name", EAGLE3)
def test_its_config_is_mapped_or_refused_by_field(name):
    head = HEADS[name]
    expected = head["expected"]
    form, values, config, problems = described(head)
    assert form == expected["form"]
    refused = expected.get("refused", [])
    assert set(refused) <= set(problems)
    others = [problem for problem in problems if problem not in refused]
    if head["config_is"] == "whole":
        assert not others and (config is None) == bool(refused)
    else:
        assert all(problem.endswith(": missing") for problem in others)
    if "aux_layers" in expected:
        aux_layers = forms.FORMS[form].read_aux(values, []) or default_aux_layers(head["target_layers"])
        assert list(aux_layers) == expected["aux_layers"]
    if "rope_scaling" in expected:
        _, scaling = read_rope(values, [])
        assert (None if scaling is None else vars(scaling)) == expected["rope_scaling"]
    if config is not None:
        assert (config.draft_vocab_size, config.rope_theta) == (expected["draft_vocab_size"], expected["rope_theta"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if i > 1 else ()) for i, name in enumerate(READ)]
)
def test_its_tensors_are_those_that_are_read(name):
    """Under the names and in the shapes that were published, where they were found; else as the form has them."""
    _, values, config, _ = described(HEADS[name])
    assert config is not None
    shapes = sizes(config)
    published = HEADS[name].get("tensors", {})
    for stored, shape in published.items():
        assert shape is None or tuple(shape) == shapes[canonical(stored)]
    names = {canonical(stored) for stored in published} or shapes.keys()
    tensors = empty({tensor: shapes[tensor] for tensor in names})
    assert head_problems(tensors, draft_table(config), config) == []
    assert not values.get("tie_word_embeddings") or "lm_head.weight" in tensors
    without = {tensor: x for tensor, x in tensors.items() if tensor != "fc.weight"}
    assert head_problems(without, draft_table(config), config) == [
        f"missing tensor fc.weight {list(shapes['fc.weight'])}"
    ]


@pytest.mark.parametrize("name", [name for name in READ if "parameters" in HEADS[name]])
def test_it_has_as_many_parameters_as_its_page_says(name):
    _, _, config, _ = described(HEADS[name])
    assert config is not None
    count, stated = sum(map(math.prod, sizes(config).values())), HEADS[name]["parameters"]
    assert count == stated if isinstance(stated, int) else f"{count / 1e6:.0f}M" == stated


@pytest.mark.parametrize("name", [name for name, head in HEADS.items() if "tensors" in head and "config" not in head])
def test_names_alone_tell_what_would_be_missing(name):
    config = tiny_heads.make_draft().head.config
    shapes = sizes(config) | {"embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    tensors = empty({stored: shapes[stored] for stored in map(canonical, HEADS[name]["tensors"])})
    problems = head_problems(tensors, draft_table(config), config)
    missing = {problem.rpartition(" [")[0] for problem in problems}
    refused = set(HEADS[name]["expected"]["refused"])
    assert refused <= missing and bool(refused) == bool(missing)


def test_an_eagle_2_head_is_told_by_its_config_and_its_names():
    head = HEADS["lmsys/sglang-EAGLE-llama2-chat-7B"]
    names = {canonical(name): tuple(shape) for name, shape in head["tensors"].items()}
    for architecture in (head["config"]["architectures"][0], "LlamaForCausalLMEagle"):
        assert eagle2.may_be_eagle2(head["config"] | {"architectures": [architecture]})
    assert not names.keys() & set(eagle2.ONLY_EAGLE3)
    problems: list[str] = []
    config = eagle2.read_config(head["config"], head["target_layers"], 32000, "fc.bias" in names, problems)
    assert config is not None and not problems
    assert (config.rope_theta, config.rope_scaling) == (head["expected"]["rope_theta"], None)
    expected = {name: shape for entry in eagle2.table(config).values() for name, shape in entry.tensors.items()}
    assert names == expected | {"embed_tokens.weight": (32000, 4096)}
    assert f"{sum(map(math.prod, expected.values())) / 1e9:.2f}B" == head["parameters"]


def test_mimo_s_layer_has_the_names_of_its_checkpoint():
    head = HEADS["XiaomiMiMo/MiMo-7B-RL"]
    config = read_shape(head["config"], None)
    assert isinstance(config, MimoConfig)
    read = {name for entry in MimoMtp.table(config).values() for name in entry.tensors}
    assert read == head["tensors"].keys()


def test_the_page_names_heads_that_are_mapped():
    text = (pathlib.Path(__file__).parents[2] / "docs/your-model.md").read_text()
    named = [word for word in re.findall(r"`([\w.-]+/[\w.-]+)`", text) if not word.startswith("tests/")]
    assert len(named) >= 10
    assert [name for name in named if "form" not in HEADS[name].get("expected", {})] == []
