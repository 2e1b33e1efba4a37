"""Draft heads for tests: tiny, every weight its own, in memory and on disk."""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
import tiny
from flax import nnx

from eagle3_jax.formats.compatibility import Engines
from eagle3_jax.mesh import parameter_path
from eagle3_jax.models.drafts.eagle3 import DraftHead, DraftHeadConfig
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.drafts.model import DraftModel
from eagle3_jax.models.families.llama import Llama, LlamaConfig

AUX_KEY = "eagle_aux_hidden_state_layer_ids"
TARGET = tiny.llama_config(
    vocab_size=50, num_hidden_layers=12, rope_theta=500000.0, eos_token_ids=(2,), aux_layers=(2, 6, 9), bos_token_id=1
)
IDS = [0, 3, 4, 17, 20, 49]
ATTENTION, MLP = "midlayer.self_attn", "midlayer.mlp"
# Of `make_draft()`.
SHAPES = {
    "fc.weight": (16, 48),
    "midlayer.input_layernorm.weight": (16,),
    "midlayer.hidden_norm.weight": (16,),
    "midlayer.post_attention_layernorm.weight": (16,),
    f"{ATTENTION}.q_proj.weight": (24, 32),
    f"{ATTENTION}.k_proj.weight": (12, 32),
    f"{ATTENTION}.v_proj.weight": (12, 32),
    f"{ATTENTION}.o_proj.weight": (16, 24),
    f"{MLP}.gate_proj.weight": (20, 16),
    f"{MLP}.up_proj.weight": (20, 16),
    f"{MLP}.down_proj.weight": (16, 20),
    "norm.weight": (16,),
    "lm_head.weight": (6, 16),
    "d2t": (6,),
    "t2d": (50,),
}


def make_draft(
    dtype: Any = jnp.float32, ids: list[int] | None = None, target: LlamaConfig = TARGET, **changes: Any
) -> Draft:
    ids = IDS if ids is None else ids
    config = DraftHeadConfig(
        vocab_size=target.vocab_size,
        draft_vocab_size=len(ids),
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=20,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=64,
        aux_layers=target.aux_layers,
    )
    shape = nnx.eval_shape(lambda: DraftHead(dataclasses.replace(config, **changes), rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(1)  # every weight its own values, norms included
    head = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.3 + 0.1, dtype), shape)
    return Draft(head, jnp.asarray(ids, jnp.int32))


def write_eagle2(folder: pathlib.Path, model: Any) -> pathlib.Path:
    """As SafeAILab's: a plain Llama config, a copy of the embeddings, no norm in front of attention, no LM head."""
    target, rng = model.config, np.random.default_rng(0)
    h, f, heads, kv = target.hidden_size, 40, 4, 2
    d = h // heads

    def matrix(*size: int) -> np.ndarray:
        return (rng.normal(size=size) * 0.05).astype(np.float32)

    tensors = {
        "embed_tokens.weight": np.asarray(model.embed[...], np.float32),
        "fc.weight": matrix(h, 2 * h),
        "fc.bias": matrix(h),
        "layers.0.self_attn.q_proj.weight": matrix(heads * d, h),
        "layers.0.self_attn.k_proj.weight": matrix(kv * d, h),
        "layers.0.self_attn.v_proj.weight": matrix(kv * d, h),
        "layers.0.self_attn.o_proj.weight": matrix(h, heads * d),
        "layers.0.post_attention_layernorm.weight": 1 + matrix(h),
        "layers.0.mlp.gate_proj.weight": matrix(f, h),
        "layers.0.mlp.up_proj.weight": matrix(f, h),
        "layers.0.mlp.down_proj.weight": matrix(h, f),
    }
    folder.mkdir(exist_ok=True)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    values = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": h,
        "intermediate_size": f,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "vocab_size": target.vocab_size,
        "bias": True,
    }
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def write_named_target(folder: pathlib.Path, config: Any) -> str:
    """A target's folder without weights: config.json, and a tokenizer of 32 tokens and two merges. Returns its name."""
    letters = [chr(97 + i) for i in range(26)] + ["ab", "cd", "!", "?"]
    special = [{"id": i, "content": f"<{i}>", "special": i < 2} for i in (0, 1, 2)]
    model = {
        "type": "BPE",
        "vocab": {token: 3 + i for i, token in enumerate(letters)},
        "merges": [["a", "b"], ["c", "d"]],
    }
    digits = {"type": "Digits", "individual_digits": True}
    tokenizer = {"model": model, "added_tokens": special, "pre_tokenizer": {"pretokenizers": [digits]}}
    folder.mkdir()
    for name, values in (
        ("config.json", config.to_hf()),
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", {"bos_token": "<1>", "eos_token": "<0>", "chat_template": "{{ messages }}"}),
    ):
        (folder / name).write_text(json.dumps(values))
    return str(folder)


def read(folder: pathlib.Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tensors and config of a saved head, as they are."""
    return safetensors.numpy.load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def alter(folder: pathlib.Path, tensors: dict[str, Any] | None = None, **fields: Any) -> None:
    """Replaces tensors and config fields of a saved head; None removes."""
    held, config = read(folder)
    for kind, changes in ((held, tensors or {}), (config, fields)):
        for name, value in changes.items():
            kind.pop(name, None)
            if value is not None:
                kind[name] = value
    safetensors.numpy.save_file(held, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def table(engines: Engines, title: str) -> str:
    """The Markdown of a table of compatibility, as pages have it."""
    return markdown(
        title, engines.versions, {row: [engines.cell(x, row) for x in engines.versions] for row in engines.since}
    )


def sources(title: str, *tables: Engines) -> str:
    """The Markdown of where the code of the engines with columns says what tables have."""
    rows = {row: table for table in tables for row in {**table.since, **table.by_target}}
    names = list(tables[0].columns)
    places = {row: [table.columns[x].get(row, ("", ""))[1] for x in names] for row, table in rows.items()}
    return markdown(title, names, places)


def markdown(title: str, columns: Iterable[str], rows: Mapping[str, Iterable[str]]) -> str:
    lines: list[tuple[str, ...]] = [(title, *columns), *((name, *cells) for name, cells in rows.items())]
    lines.insert(1, ("---",) * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def assert_same(one: Draft, other: Draft) -> None:
    """To the bit."""
    assert one.head.config == other.head.config
    pairs = zip(jax.tree.leaves((one.head, one.token_ids)), jax.tree.leaves((other.head, other.token_ids)), strict=True)
    for got, expected in pairs:
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


def draft_model(target: Llama, layers: int, width: int) -> Draft:
    """A target's first layers as its draft model, in a residual stream of another width, which changes no logit."""
    c = target.config
    config = dataclasses.replace(c, num_hidden_layers=layers, hidden_size=width)
    shape = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    scale = (c.hidden_size / width) ** 0.5  # of norms, whose mean is over more entries
    ours = {parameter_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(target)}

    def widen(path: Any, leaf: Any) -> jax.Array:
        name = parameter_path(path)
        padded = jnp.pad(ours[name], [(0, new - old) for new, old in zip(leaf.shape, ours[name].shape, strict=True)])
        return padded * scale if name.endswith("norm") else padded

    return Draft(DraftModel(jax.tree_util.tree_map_with_path(widen, shape)), jnp.arange(c.vocab_size, dtype=jnp.int32))


def initialise(build, seed: int):
    """The module that `build` describes, its weights drawn by numpy: nothing to compile."""
    rng = np.random.default_rng(seed)

    def fill(leaf):
        return jnp.asarray(np.ones(leaf.shape) if leaf.ndim == 1 else 0.02 * rng.normal(size=leaf.shape), leaf.dtype)

    return jax.tree.map(fill, jax.eval_shape(build))
