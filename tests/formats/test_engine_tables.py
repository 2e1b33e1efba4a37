"""The pages of engines repeat the records; exported heads have the names, shapes and keys that TPU engines look for."""

import dataclasses
import pathlib
import re

import jax.numpy as jnp
import pytest
import tiny_heads
from tiny_blocks import make_block_head

from eagle3_jax.formats import engines, mtp
from eagle3_jax.formats.blocks.compatibility import ENGINES as BLOCKS
from eagle3_jax.formats.blocks.compatibility import ROPE
from eagle3_jax.formats.blocks.kinds import DFLASH
from eagle3_jax.formats.compatibility import FAILS, SILENT, Engines
from eagle3_jax.formats.eagle2.heads import ENGINES as EAGLE2
from eagle3_jax.formats.eagle3 import EAGLE3
from eagle3_jax.models.drafts.dflash import DFlash
from eagle3_jax.models.drafts.head import Draft

ROOT = pathlib.Path(__file__).parents[2]
PAGE, SOURCES = ((ROOT / "docs" / name).read_text() for name in ("engines.md", "engines-sources.md"))
KINDS = ("SGLang", "vLLM", *engines.VERSIONS)
ALL = (EAGLE3.engines, BLOCKS, mtp.ENGINES, EAGLE2)


def worst(table: Engines, engine: str, rows: tuple[str, ...]) -> str:
    cells = [table.cell(engine, row) for row in rows]
    return next((x for x in (FAILS, SILENT) if x in cells), cells[0])


def test_the_page_has_the_tables() -> None:
    rows = {"EAGLE-3": (EAGLE3.engines, ("EAGLE-3",)), "EAGLE-3.1": (EAGLE3.engines, ("`fc_norm`", "`norm_output`"))}
    rows |= {name: (BLOCKS, (name, ROPE)) for name in ("DFlash", "DSpark", "DFlash2")}
    rows |= {name: (mtp.ENGINES, (name,)) for name in engines.MTP_ROWS} | {"EAGLE-2": (EAGLE2, ("EAGLE-2",))}
    cells = {name: [worst(table, x, own) for x in KINDS] for name, (table, own) in rows.items()}
    assert tiny_heads.markdown("head", KINDS, cells) in PAGE
    assert tiny_heads.table(EAGLE3.engines, "EAGLE-3 head") in PAGE
    assert tiny_heads.table(BLOCKS, "block head") in PAGE
    assert tiny_heads.sources("head", *ALL) in SOURCES


@pytest.mark.parametrize("table", ALL)
def test_every_verdict_has_its_place(table: Engines) -> None:
    for engine, column in table.columns.items():
        assert column.keys() <= {**table.since, **table.by_target}.keys()
        for cell, where in column.values():
            assert cell in (SILENT, FAILS) or engines.VERSIONS[engine].startswith(cell)
            assert where if engine == engines.LLAMA_CPP else re.fullmatch(r"[\w/]+\.py:\d+", where)


LAYER_OF_EAGLE3 = {
    *(f"self_attn.{x}_proj" for x in "qkvo"),
    *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
    *("input_layernorm", "hidden_norm", "post_attention_layernorm"),
}


def test_sglang_jax_finds_every_tensor_and_key_of_eagle3(tmp_path: pathlib.Path) -> None:
    """Its list of names (models/llama_eagle3.py:273-354); shapes (:58-80, :171); keys (:236-249, llama.py:220-232)."""
    EAGLE3.write(
        tmp_path / "head", EAGLE3.stored(tiny_heads.make_draft(), tiny_heads.TARGET, "float32", None), "sglang"
    )
    tensors, config = tiny_heads.read(tmp_path / "head")
    names = {"d2t", *(f"{x}.weight" for x in ("fc", "lm_head", "norm"))}
    assert tensors.keys() == names | {f"midlayer.{x}.weight" for x in LAYER_OF_EAGLE3} | {"t2d"}  # which it skips
    h, heads, kv, d = (config[x] for x in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
    shapes = {"q_proj": (heads * d, 2 * h), "k_proj": (kv * d, 2 * h), "v_proj": (kv * d, 2 * h)}
    assert {x: tensors[f"midlayer.self_attn.{x}.weight"].shape for x in shapes} == shapes
    assert tensors["fc.weight"].shape == (h, 3 * h)
    expected = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "tie_word_embeddings": False}
    expected |= {"draft_vocab_size": 6, "rope_theta": 10000.0}
    assert {x: config[x] for x in expected} == expected and "rope_scaling" not in config


def test_both_find_every_tensor_and_key_of_dflash(tmp_path: pathlib.Path) -> None:
    """sglang-jax's names (models/dflash.py:408-488) and keys (:37-98, speculative/dflash_util.py:59-83), which are
    tpu-inference's too (models/jax/dflash.py:536-570, :354; spec_decode/jax/dflash.py:88-91).
    """
    shape = dataclasses.replace(tiny_heads.TARGET, vocab_size=60)
    head = Draft(make_block_head(DFlash, draft_vocab_size=60, aux_layers=(1, 2, 4)), jnp.arange(60))
    DFLASH.write(tmp_path / "head", DFLASH.stored(head, shape, "float32", None), "vllm")
    tensors, config = tiny_heads.read(tmp_path / "head")
    layer = LAYER_OF_EAGLE3 - {"hidden_norm"} | {"self_attn.q_norm", "self_attn.k_norm"}
    names = {f"{x}.weight" for x in ("fc", "hidden_norm", "norm")}
    assert tensors.keys() == names | {f"layers.{i}.{x}.weight" for i in range(2) for x in layer}
    assert config["dflash_config"] == {"target_layer_ids": [0, 1, 3], "mask_token_id": 59}
    expected = {"architectures": ["DFlashDraftModel"], "block_size": 4, "rope_theta": 1e4, "head_dim": 8}
    assert {x: config[x] for x in expected} == expected
