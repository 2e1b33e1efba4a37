"""Block heads that others published (published.json): each is read and mapped, or refused with the reason."""

import json
import math
import pathlib
from typing import Any

import pytest

from eagle3_jax.formats.blocks import config as block_config
from eagle3_jax.formats.blocks.kinds import BLOCKS, DFLASH
from eagle3_jax.models.drafts.dflash import BlockHeadConfig

PUBLISHED = pathlib.Path(__file__).parents[1] / "published.json"
NAMES = [kind.name for kind in BLOCKS]
HEADS = {
    head["name"]: head
    for head in json.loads(PUBLISHED.read_text())["heads"]
    if head.get("expected", {}).get("form") in NAMES
}
WHOLE = [name for name, head in HEADS.items() if head["config_is"] == "whole"]
SOFTCAP = {"final_logit_softcapping": None, "output_multiplier": None}


def described(head: dict[str, Any], **changes: Any) -> tuple[str, BlockHeadConfig | None, list[str]]:
    """Kind, shape and problems."""
    problems: list[str] = []
    kind = next(kind for kind in BLOCKS if block_config.describes(kind.network, head["config"]))
    inner = head["config"].get("dflash_config", {})
    values = head["config"] | {"dflash_config": inner | {k: v for k, v in changes.items() if k in inner}}
    return kind.name, block_config.read(kind.network, values, problems), problems


@pytest.mark.parametrize("name", HEADS)
def test_a_published_block_head_is_mapped_or_refused_by_field(name: str) -> None:
    head = HEADS[name]
    expected = head["expected"]
    form, config, problems = described(head)
    assert form == expected["form"]
    refused = expected.get("refused", [])
    assert set(refused) <= set(problems)
    others = [problem for problem in problems if problem not in refused]
    if head["config_is"] == "whole":
        assert not others and (config is None) == bool(refused)
    else:
        assert config is None and all(": missing" in problem for problem in others)
    ids = head["config"].get("target_layer_ids") or head["config"].get("dflash_config", {}).get("target_layer_ids")
    assert "aux_layers" not in expected or [i + 1 for i in ids] == expected["aux_layers"]


@pytest.mark.parametrize("name", WHOLE)
def test_a_published_shape(name: str) -> None:
    expected = HEADS[name]["expected"]
    _, config, problems = described(HEADS[name], **SOFTCAP)
    assert config is not None and problems == []
    for field in ("aux_layers", "block_size", "mask_token_id", "layer_types"):
        found = getattr(config, field)
        assert (list(found) if isinstance(found, tuple) else found) == expected[field]


def shapes(name: str) -> dict[str, tuple[int, ...]]:
    _, config, _ = described(HEADS[name], **SOFTCAP)
    kind = next(kind for kind in BLOCKS if block_config.describes(kind.network, HEADS[name]["config"]))
    assert config is not None
    return {tensor: shape for entry in kind.table(config).values() for tensor, shape in entry.tensors.items()}


@pytest.mark.parametrize("name", ["incoai/Muse-Glimmer-30B-DFlash2", "LiquidAI/LFM2.5-1.2B-Instruct-DSpark"])
def test_a_published_header_names_the_tensors_that_are_read(name: str) -> None:
    """Those of which a whole header is at hand."""
    head = HEADS[name]
    published = {DFLASH.canonical(stored): tuple(shape) for stored, shape in head["tensors"].items()}
    layer = {stored: shape for stored, shape in published.items() if stored.startswith("layers.0.")}
    for i in range(1, 5):
        published |= {stored.replace("layers.0.", f"layers.{i}."): shape for stored, shape in layer.items()}
    assert shapes(name) == published


def test_sizes_that_are_known_of_parts() -> None:
    """Of Qwen3.8-27B's head all sizes but the number of its layers of the target, which `fc` tells: five."""
    head = HEADS["z-lab/Qwen3.8-27B-DFlash2"]
    inner = head["config"]["dflash_config"] | {"mask_token_id": 0, "selector_top_k": 16}
    inner |= {"target_layer_ids": [1, 2, 3, 4, 5]}
    problems: list[str] = []
    kind = next(kind for kind in BLOCKS if block_config.describes(kind.network, head["config"]))
    config = block_config.read(kind.network, head["config"] | {"dflash_config": inner, "rope_theta": 1e7}, problems)
    assert config is not None and problems == []
    found = {tensor: shape for entry in kind.table(config).values() for tensor, shape in entry.tensors.items()}
    assert {stored: list(found[stored]) for stored in head["tensors"]} == head["tensors"]
    assert f"{sum(map(math.prod, found.values())) / 1e9:.3f}G" == head["parameters"]


def test_parameters_and_tensors_that_are_known() -> None:
    liquid = "LiquidAI/LFM2.5-1.2B-Instruct-DSpark"
    assert f"{sum(map(math.prod, shapes(liquid).values())) / 1e6:.1f}M" == HEADS[liquid]["parameters"]
    assert len(shapes("RadixArk/Qwen3.8-27B-DSpark")) == 62
