"""Weights in memory: the names of four trees, their layouts, and what is refused."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_heads
from flax import nnx

from eagle3_jax.config import MeshConfig
from eagle3_jax.mesh import make_mesh, mesh_of
from eagle3_jax.models.checkpoint import trees
from eagle3_jax.models.checkpoint.load import WeightsError, parameter_path
from eagle3_jax.models.families import family_of
from eagle3_jax.models.families.llama import Llama, LlamaConfig
from eagle3_jax.models.families.qwen2 import Qwen2, Qwen2Config
from eagle3_jax.models.families.qwen3 import Qwen3, Qwen3Config
from eagle3_jax.models.target import TargetModel

FIELDS = {field.name: getattr(tiny.llama_config(), field.name) for field in dataclasses.fields(LlamaConfig)}
UNTIED = FIELDS | {"tie_word_embeddings": False, "head_dim": 6}
MODELS = {
    "llama": lambda: Llama(tiny.llama_config(), rngs=nnx.Rngs(0)),
    "qwen2": lambda: Qwen2(Qwen2Config(**UNTIED), rngs=nnx.Rngs(0)),
    "qwen3": lambda: Qwen3(Qwen3Config(**UNTIED), rngs=nnx.Rngs(0)),
}


def make(name: str) -> TargetModel:
    rng = np.random.default_rng(1)
    shape = jax.tree.map(lambda leaf: leaf, tiny_heads.initialise(MODELS[name], 0))
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), shape)


def hugging_face(model: TargetModel) -> dict[str, np.ndarray]:
    """Torch's: projections [out, in]."""
    leaves = {parameter_path(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(model)}
    table = family_of(model.config).table(model.config)
    return {
        name: tensor
        for path, entry in table.items()
        for name, tensor in zip(entry.tensors, entry.split(leaves[path]), strict=True)
    }


def projections(model: TargetModel) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Splits Hugging Face's tensors: projections of attention by head [in, heads, size] or [heads, size, out], and of
    the MLP [in, out]; then all others."""
    c, split, rest = model.config, {}, {}
    for name, x in hugging_face(model).items():
        if name.endswith("o_proj.weight"):
            split[name] = x.T.reshape(-1, c.head_dim, c.hidden_size)
        elif "self_attn" in name and name.endswith("proj.weight"):
            split[name] = x.T.reshape(c.hidden_size, -1, c.head_dim)
        elif name.endswith("proj.weight") or name == "lm_head.weight":
            split[name] = x.T
        else:
            rest[name] = x
    return split, rest


def tunix(model: TargetModel) -> dict[str, Any]:
    """As the flat `nnx.state(model).to_pure_dict()` of Tunix's models: lists of layers are dicts by number."""
    split, rest = projections(model)
    named = split | rest
    tree = {"embedder/input_embedding": named["model.embed_tokens.weight"], "final_norm/w": named["model.norm.weight"]}
    if "lm_head.weight" in named:
        tree["lm_head/w"] = named["lm_head.weight"]
    for i in range(model.config.num_hidden_layers):
        to, of = f"layers/{i}", f"model.layers.{i}."
        names = {f"{x}_layernorm/w": f"{x}_layernorm.weight" for x in ("input", "post_attention")}
        names |= {f"attn/{x}_proj/w": f"self_attn.{x}_proj.weight" for x in "qkvo"}
        names |= {f"attn/{x}_norm/w": f"self_attn.{x}_norm.weight" for x in "qk"}
        names |= {f"attn/{x}_bias": f"self_attn.{x}_proj.bias" for x in "qkv"}
        names |= {f"mlp/{x}_proj/kernel": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
        tree |= {f"{to}/{theirs}": named[of + ours] for theirs, ours in names.items() if of + ours in named}
    return tree


NORMS = {"pre": "input", "post": "post_attention"}
MLP = {"wi_0": "gate", "wi_1": "up", "wo": "down"}
ATTENTION = {"query": "q", "key": "k", "value": "v", "out": "o"}


def maxtext(model: TargetModel, *, stacked: bool) -> dict[str, Any]:
    """As MaxText's train state has them. Its Llama rotates neighbours, and has the scores' scale in the queries."""
    split, rest = projections(model)
    named, c = split | rest, model.config

    def neighbours(x: np.ndarray) -> np.ndarray:
        return np.stack(np.split(x, 2, axis=-1), axis=-1).reshape(x.shape)

    layers: list[dict[str, np.ndarray]] = []
    for i in range(c.num_hidden_layers):
        own = {name.removeprefix(f"model.layers.{i}."): x for name, x in named.items() if f".layers.{i}." in name}
        layer = {f"{x}_self_attention_layer_norm/scale": own[f"{y}_layernorm.weight"] for x, y in NORMS.items()}
        layer |= {f"mlp/{x}/kernel": own[f"mlp.{y}_proj.weight"] for x, y in MLP.items()}
        for x, y in ATTENTION.items():
            layer[f"self_attention/{x}/kernel"] = own[f"self_attn.{y}_proj.weight"]
            if f"self_attn.{y}_proj.bias" in own:
                layer[f"self_attention/{x}/bias"] = own[f"self_attn.{y}_proj.bias"].reshape(-1, c.head_dim)
            if f"self_attn.{y}_norm.weight" in own:
                layer[f"self_attention/{x}_norm/scale"] = own[f"self_attn.{y}_norm.weight"]
        if c.architecture == "LlamaForCausalLM":
            q, k = (layer[f"self_attention/{x}/kernel"] for x in ("query", "key"))
            layer["self_attention/query/kernel"] = neighbours(q) / np.float32(c.head_dim**0.5)
            layer["self_attention/key/kernel"] = neighbours(k)
        layers.append(layer)
    tree = {"token_embedder/embedding": named["model.embed_tokens.weight"]}
    tree["decoder/decoder_norm/scale"] = named["model.norm.weight"]
    if "lm_head.weight" in named:
        tree["decoder/logits_dense/kernel"] = named["lm_head.weight"]
    if stacked:
        whole = {name: np.stack([layer[name] for layer in layers], axis=1) for name in layers[0]}
        tree |= {f"decoder/layers/{name}": x for name, x in whole.items()}
    else:
        tree |= {f"decoder/layers_{i}/{name}": x for i, layer in enumerate(layers) for name, x in layer.items()}
    return {f"params/{name}": x for name, x in tree.items()}


TREES = {
    "own": lambda model: model,
    "hugging_face": hugging_face,
    "tunix": tunix,
    "maxtext": lambda model: maxtext(model, stacked=False),
    "maxtext_stacked": lambda model: maxtext(model, stacked=True),
}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "qwen3"))]
)
def test_every_name_finds_its_parameter(family, tree):
    model = make(family)
    found = trees.target_of(TREES[tree](model), model.config, jnp.float32)
    assert found.config is model.config
    compare = np.testing.assert_allclose if "maxtext" in tree else np.testing.assert_array_equal
    jax.tree.map(lambda got, expected: compare(got, expected), found, model)


def test_a_mesh_s_parameters_lie_as_loaded_ones_do_in_the_dtype_that_is_asked_for():
    model, mesh = make("llama"), make_mesh(MeshConfig(data=1, model=2), jax.devices()[:2])
    weights = jax.tree.map(jnp.asarray, hugging_face(model))
    found = trees.target_of(weights, model.config, jnp.bfloat16, mesh)
    qkv = found.blocks[0].attention.qkv[...]
    assert mesh_of(qkv) == mesh and qkv.dtype == jnp.bfloat16
    assert {shard.data.shape for shard in qkv.addressable_shards} == {(16, 16)}
    jax.tree.map(lambda got, x: np.testing.assert_array_equal(got, x.astype(jnp.bfloat16)), found, model)


def test_an_lm_head_that_is_tied_may_be_written_twice():
    model = make("llama")
    weights = hugging_face(model)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    found = trees.target_of(weights, model.config, jnp.float32)
    np.testing.assert_array_equal(found.embed, model.embed)
    weights["lm_head.weight"] = 2 * weights["lm_head.weight"]
    with pytest.raises(WeightsError, match=r"lm_head.weight: got other values than model.embed_tokens.weight"):
        trees.target_of(weights, model.config, jnp.float32)


def test_every_problem_is_named_as_the_caller_names_it():
    model = make("llama")
    weights = tunix(model)
    del weights["layers/0/mlp/up_proj/kernel"]
    weights["layers/1/attn/q_proj/w"] = np.zeros((16, 4, 5), np.float32)
    weights["layers/1/mlp/gate_proj/kernel"] = np.zeros((16, 24), np.int32)
    weights["layers/2/more"] = np.zeros(3, np.float32)
    with pytest.raises(WeightsError) as raised:
        trees.target_of(weights, model.config, jnp.float32)
    assert str(raised.value).splitlines() == [
        "weights do not fit (4 problems):",
        "  layers/1/attn/q_proj/w: got shape [16, 4, 5], expected [16, 4, 4]",
        "  layers/1/mlp/gate_proj/kernel: got dtype int32, expected floating point",
        "  missing tensor layers/0/mlp/up_proj/kernel [16, 24]",
        "  surplus tensor layers/2/more",
    ]
    weights = maxtext(model, stacked=True)
    weights["params/decoder/layers/mlp/wo/kernel"][3, 1, 2] = np.nan
    for of in (weights, jax.tree.map(jnp.asarray, weights)):  # on the host, and on a device
        with pytest.raises(WeightsError, match=r"params/decoder/layers/mlp/wo/kernel: got NaN or infinity"):
            trees.target_of(of, model.config, jnp.float32)
    with pytest.raises(WeightsError, match=r"weights: got a/b, c ..., expected names of Hugging Face, Tunix, MaxText"):
        trees.target_of({"a": {"b": np.zeros(1)}, "c": np.zeros(1)}, model.config, jnp.float32)
