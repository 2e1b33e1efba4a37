"""Block heads on disk: names, keys and values of each form, round trips to the bit, and what is refused."""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_heads
from flax import nnx
from tiny_blocks import DRAFT_VOCAB, HIDDEN, VOCAB, make_block_head

from eagle3_jax.decoding.load import load_models
from eagle3_jax.formats import heads
from eagle3_jax.formats.blocks.compatibility import CPU, ENGINES
from eagle3_jax.formats.blocks.kinds import BLOCKS, DFLASH, DFLASH2, DSPARK
from eagle3_jax.formats.files import DraftFormatError
from eagle3_jax.formats.kinds import StoredHead
from eagle3_jax.formats.stored import StoredKind
from eagle3_jax.models.checkpoint.fetch import Target
from eagle3_jax.models.drafts.dflash import FULL, SLIDING
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.layers import RopeScaling, YarnScaling
from eagle3_jax.runs import manifest

TARGET = tiny.llama_config(
    vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=6, aux_layers=(1, 2, 4), eos_token_ids=(2,), bos_token_id=1
)
IDS = np.arange(DRAFT_VOCAB) * 2 + (np.arange(DRAFT_VOCAB) > 5)
WHOLE = {"draft_vocab_size": VOCAB}
SLIDE = {"layer_types": (SLIDING,) * 2, "sliding_window": 3}
MIXED = {"layer_types": (SLIDING, FULL), "sliding_window": 3}
LLAMA3 = RopeScaling(8.0, 1.0, 4.0, 64)
KIND = {kind.name: kind for kind in BLOCKS}


def stored(kind: StoredKind, dtype: str = "float32", **changes: Any) -> StoredHead:
    """A head of this kind, over the whole vocabulary unless told otherwise."""
    options: dict[str, Any] = WHOLE | {"aux_layers": TARGET.aux_layers} | changes
    ids = np.arange(VOCAB) if options["draft_vocab_size"] == VOCAB else IDS
    shape = dataclasses.replace(TARGET, aux_layers=options["aux_layers"])
    draft = Draft(make_block_head(kind.network, **options), jnp.asarray(ids, jnp.int32))
    head = kind.stored(draft, shape, dtype, "org/target")
    assert head.problems == ()
    return head


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.make_target(TARGET)


def written(folder: pathlib.Path, head: StoredHead, form: str = "vllm") -> pathlib.Path:
    head.kind.write(folder, head, form)
    return folder


QWEN3 = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "max_position_embeddings": 128,
    "vocab_size": 60,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
    "num_hidden_layers": 2,
    "layer_types": [FULL, FULL],
    "use_sliding_window": False,
}
LAYERS_OF_TARGET = {"mask_token_id": 59, "target_layer_ids": [0, 1, 3]}
MARKOV = {
    "markov_rank": 8,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "sample_from_anchor": True,
}
SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 8, "selector_top_k": 5}
FOLDERS = {
    "dflash": {"architectures": ["DFlashDraftModel"], "dflash_config": LAYERS_OF_TARGET},
    "dspark": {"architectures": ["Qwen3DSparkModel"], **LAYERS_OF_TARGET, **MARKOV},
    "dflash2": {"architectures": ["DFlash2DraftModel"], "dflash_config": LAYERS_OF_TARGET | SELECTOR},
}
LAYER = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (16,))
LAYER |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (8,))
LAYER |= dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (16, 16))
LAYER |= {"self_attn.q_proj": (32, 16), "self_attn.o_proj": (16, 32), "mlp.down_proj": (16, 24)}
LAYER |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (24, 16))
CONVOLUTION = {
    f"{name}.{tensor}": shape
    for name in ("attention_conv", "mlp_conv")
    for tensor, shape in (("base_kernel", (2, 2, 16)), ("kernel_projection.weight", (16, 16)))
}
MARKOV_HEAD = dict.fromkeys(("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"), (60, 8))
CODEBOOKS = {f"candidate_selector.{name}_codebook": (60, 8) for name in ("predecessor", "successor")}
OWN = {
    "dflash": {},
    "dspark": MARKOV_HEAD | {"confidence_head.proj.weight": (1, 24), "confidence_head.proj.bias": (1,)},
    "dflash2": CODEBOOKS | {"candidate_selector.hidden_projection.weight": (8, 16)},
}


@pytest.mark.parametrize("name", KIND)
def test_names_shapes_and_config_of_a_block_head(tmp_path: pathlib.Path, name: str) -> None:
    tensors, config = tiny_heads.read(written(tmp_path / "head", stored(KIND[name]), "sglang"))
    assert config == QWEN3 | FOLDERS[name] | {"block_size": 4, "num_target_layers": 6}
    layer = {f"{tensor}.weight": shape for tensor, shape in LAYER.items()} | (CONVOLUTION if name == "dflash2" else {})
    expected = {"fc.weight": (16, 48), "hidden_norm.weight": (16,), "norm.weight": (16,), **OWN[name]}
    expected |= {f"layers.{i}.{tensor}": shape for i in range(2) for tensor, shape in layer.items()}
    assert {tensor: x.shape for tensor, x in tensors.items()} == expected


@pytest.mark.parametrize("name", KIND)
def test_the_wrapper_of_speculators(tmp_path: pathlib.Path, name: str) -> None:
    _, config = tiny_heads.read(written(tmp_path / "head", stored(KIND[name]), "speculators"))
    own = {"dflash": {}, "dspark": MARKOV, "dflash2": SELECTOR}[name]
    assert config == {
        "architectures": FOLDERS[name]["architectures"],
        "speculators_model_type": name,
        "draft_vocab_size": 60,
        "block_size": 4,
        "aux_hidden_state_layer_ids": [1, 2, 4],
        "mask_token_id": 59,
        "sliding_window_non_causal": True,
        "sample_from_anchor": name == "dspark",
        **own,
        "tie_word_embeddings": False,
        "transformer_layer_config": QWEN3,
        "speculators_config": {
            "algorithm": name,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4 if name == "dspark" else 3}],
            "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
        },
    }


OPTIONS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "DFlash": ("dflash", ("sglang", "vllm", "speculators"), {}),
    "DSpark": ("dspark", ("sglang", "vllm", "speculators"), {}),
    "DFlash2": ("dflash2", ("sglang", "vllm", "speculators"), {}),
    "sliding": ("dflash", ("sglang", "vllm", "speculators"), SLIDE),
    "sliding, bidirectional": ("dflash2", ("sglang", "vllm", "speculators"), SLIDE | {"is_causal": False}),
    "causal": ("dflash", ("sglang", "vllm"), {"is_causal": True}),
    "full and sliding, bidirectional": ("dflash", ("vllm", "speculators"), MIXED | {"is_causal": False}),
    "draft vocabulary": ("dflash", ("vllm", "speculators"), {"draft_vocab_size": DRAFT_VOCAB}),
    "draft vocabulary of DFlash2": ("dflash2", ("eagle3_jax",), {"draft_vocab_size": DRAFT_VOCAB}),
    "no confidence": ("dspark", ("sglang", "speculators"), {"confidence": False}),
    "llama3": ("dflash", ("sglang", "speculators"), {"rope_scaling": LLAMA3}),
}


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_every_bit_comes_back_from_every_form_by_every_other(tmp_path: pathlib.Path, target, option: str) -> None:
    name, forms, changes = OPTIONS[option]
    head = stored(KIND[name], "bfloat16", **changes)
    for number, form in enumerate((*forms, forms[0])):
        head = heads.read(written(tmp_path / str(number), head, form))
        assert head.kind is KIND[name]
    assert head.same(stored(KIND[name], "bfloat16", **changes))
    whole = head.config.draft_vocab_size == VOCAB
    loaded = KIND[name].draft(head, target, jnp.bfloat16).head
    original = make_block_head(KIND[name].network, **WHOLE | {"aux_layers": TARGET.aux_layers} | changes)
    found = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(loaded)}
    for path, x in jax.tree_util.tree_leaves_with_path(original):
        if not (whole and "lm_head" in jax.tree_util.keystr(path)):
            np.testing.assert_array_equal(found[jax.tree_util.keystr(path)], x.astype(jnp.bfloat16))


def test_the_lm_head_of_the_whole_vocabulary_is_the_targets_own_array(target) -> None:
    rows = target.model.output_rows
    assert isinstance(rows, jax.Array)
    whole = DFLASH.draft(stored(DFLASH), target, rows.dtype).head
    assert whole.lm_head[...] is rows
    head = stored(DFLASH, draft_vocab_size=DRAFT_VOCAB)
    bare = dataclasses.replace(head, tensors={k: x for k, x in head.tensors.items() if k != "lm_head.weight"})
    loaded = DFLASH.draft(bare, target, jnp.float32).head
    assert isinstance(loaded.lm_head, nnx.Param)
    np.testing.assert_array_equal(loaded.lm_head[...], np.asarray(rows, np.float32)[IDS])
    with pytest.raises(DraftFormatError, match=r"missing tensor lm_head.weight \[60, 16\]: to use the target's rows"):
        DFLASH.draft(stored(DFLASH), TARGET, jnp.float32)


def test_a_target_is_observed_where_the_head_says(tmp_path: pathlib.Path) -> None:
    """Whatever it was loaded for; a layer that it has not is refused."""
    target = tiny.make_target(dataclasses.replace(TARGET, aux_layers=(1, 3, 5)))
    head = make_block_head(DFLASH2.network, **WHOLE, aux_layers=(2, 6))
    trained_with = dataclasses.replace(TARGET, aux_layers=(2, 6))
    draft = Draft(head, jnp.arange(VOCAB, dtype=jnp.int32))
    heads.save_draft(tmp_path / "head", draft, target=trained_with, dtype="float32")
    manifest.begin(tmp_path / "head", {"verb": "export", "target": target.identity | {"aux_layers": [2, 6]}})
    manifest.finish(tmp_path / "head")
    options: dict[str, Any] = dict.fromkeys(("dtype", "weights", "mesh", "token_map"))
    model, _, loaded, _ = load_models(target, tmp_path / "head", **options)
    assert isinstance(loaded, Draft)
    assert model.config.aux_layers == loaded.head.config.aux_layers == (2, 6)
    shallow = dataclasses.replace(TARGET, num_hidden_layers=5, aux_layers=(1, 2, 4))
    with pytest.raises(DraftFormatError, match=r"aux layers .*: got \(2, 6\), expected boundaries up to 5"):
        heads.load_draft(tmp_path / "head", target=shallow)


def renamed(folder: pathlib.Path, *pairs: tuple[str, str]) -> None:
    tensors, _ = tiny_heads.read(folder)
    for old, new in pairs:
        tiny_heads.alter(folder, {k: None for k in tensors if k.startswith(old)})
        tiny_heads.alter(folder, {new + k.removeprefix(old): x for k, x in tensors.items() if k.startswith(old)})


def test_other_names_of_tensors(tmp_path: pathlib.Path) -> None:
    head = stored(DFLASH)
    written(tmp_path / "head", head)
    renamed(tmp_path / "head", ("layers.0.", "midlayer."), ("fc.", "encoder.fc."), ("hidden_", "encoder.output_"))
    renamed(tmp_path / "head", ("encoder.output_norm", "encoder.output_norm_enc"))
    assert heads.read(tmp_path / "head").same(head)
    renamed(tmp_path / "head", ("", "model."))
    assert heads.read(tmp_path / "head").same(head)


def test_other_places_of_keys(tmp_path: pathlib.Path) -> None:
    """Everything nested, as SpecForge's raw export; boundaries in place of layers, as vLLM reads first."""
    head = stored(DSPARK)
    folder = written(tmp_path / "head", head)
    _, config = tiny_heads.read(folder)
    nested = ("mask_token_id", "target_layer_ids", "block_size", "markov_rank", "enable_confidence_head")
    inner = {key: config[key] for key in nested} | {"projector_type": "dspark"}
    tiny_heads.alter(folder, dflash_config=inner, architectures=["DSparkDraftModel"], **dict.fromkeys(nested))
    assert heads.read(folder).same(head)
    tiny_heads.alter(
        folder, dflash_config=inner | {"target_layer_ids": None}, eagle_aux_hidden_state_layer_ids=[1, 2, 4]
    )
    assert heads.read(folder).same(head)


def block_states(tensors: dict[str, Any], config: Any, embed: Any, aux: Any, anchor: int) -> np.ndarray:
    """States of the block behind all features `aux` [t, 3h], in plain numpy, with RoPE over neighbours."""
    c, d, t = config, config.head_dim, len(aux)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + c.rms_norm_eps) * tensors[f"{name}.weight"]

    def product(x: np.ndarray, name: str) -> np.ndarray:
        return x @ tensors[f"{name}.weight"].T

    def rotated(x: np.ndarray, name: str, norm_name: str, positions: np.ndarray) -> np.ndarray:
        heads = norm(product(x, name).reshape(len(x), -1, d), norm_name)
        angles = positions[:, None, None] * c.rope_theta ** (-np.arange(0, d, 2) / d)
        turned = (heads[..., ::2] + 1j * heads[..., 1::2]) * np.exp(1j * angles)
        return np.stack([turned.real, turned.imag], axis=-1).reshape(heads.shape)

    context, at, own = norm(product(aux, "fc"), "hidden_norm"), np.arange(t), t + np.arange(c.block_size)
    x = embed[[anchor] + [c.mask_token_id] * (c.block_size - 1)]
    for i in range(len(c.layer_types)):
        layer, a = f"layers.{i}", f"layers.{i}.self_attn"
        u = norm(x, f"{layer}.input_layernorm")
        q = rotated(u, f"{a}.q_proj", f"{a}.q_norm", own)
        keys = np.concatenate([rotated(y, f"{a}.k_proj", f"{a}.k_norm", p) for y, p in ((context, at), (u, own))])
        values = product(np.concatenate([context, u]), f"{a}.v_proj").reshape(len(keys), -1, d)
        keys, values = (y.repeat(q.shape[1] // y.shape[1], axis=1) for y in (keys, values))
        weights = np.exp(np.einsum("rnd,snd->nrs", q, keys) / np.sqrt(d))
        attended = np.einsum("nrs,snd->rnd", weights / weights.sum(-1, keepdims=True), values)
        x = x + product(attended.reshape(len(x), -1), f"{a}.o_proj")
        u = norm(x, f"{layer}.post_attention_layernorm")
        gate = product(u, f"{layer}.mlp.gate_proj")
        x = x + product(gate / (1 + np.exp(-gate)) * product(u, f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj")
    return norm(x, "norm")


@pytest.mark.parametrize("style", ["rope_is_neox_style", "is_neox_style"])
def test_a_head_that_rotates_neighbours_is_read_as_one_that_rotates_halves(tmp_path: pathlib.Path, style: str) -> None:
    """With the keys of Liquid AI's heads for LFM2.5. Written again, it rotates halves in every form."""
    folder = written(tmp_path / "head", stored(DSPARK))
    inner = LAYERS_OF_TARGET | {"num_target_layers": 6}
    absent = dict.fromkeys((*inner, "sample_from_anchor", "confidence_head_with_markov"))
    fields = absent | {style: False, "dflash_config": inner, "architectures": ["Lfm2DSparkDraftModel"]}
    tiny_heads.alter(folder, **fields)
    tensors, _ = tiny_heads.read(folder)
    head = heads.read(folder, TARGET)
    rows = {"lm_head.weight": np.zeros((VOCAB, HIDDEN), np.float32)}
    whole = dataclasses.replace(head, tensors=head.tensors | rows)
    network: Any = DSPARK.draft(whole, TARGET, jnp.float32).head
    rng = np.random.default_rng(5)
    embed, aux = rng.normal(size=(VOCAB, HIDDEN)), rng.normal(size=(7, 3 * HIDDEN))
    expected = block_states(tensors, network.config, embed, aux, 11)
    context = network.context(network.fuse(jnp.asarray(aux[None], jnp.float32)), jnp.arange(7)[None])
    anchor, at, first = (jnp.array([[x]]) for x in (11, 7, 0))
    got = network.states(jnp.asarray(embed, jnp.float32), anchor, at, context, first, at)
    np.testing.assert_allclose(got[0, 0], expected, atol=1e-4, rtol=1e-4)
    for form in ("vllm", "sglang", "speculators"):
        again = written(tmp_path / form, head, form)
        assert not {"rope_is_neox_style", "is_neox_style"} & tiny_heads.read(again)[1].keys()
        assert heads.read(again).same(head)


def test_causality_of_vllm_alone_becomes_that_of_both_engines(tmp_path: pathlib.Path) -> None:
    folder = written(tmp_path / "head", stored(DFLASH, **SLIDE))
    _, config = tiny_heads.read(folder)
    tiny_heads.alter(folder, dflash_config=config["dflash_config"] | {"causal": False})
    head = heads.read(folder)
    assert head.same(stored(DFLASH, **SLIDE, is_causal=False))
    _, config = tiny_heads.read(written(tmp_path / "again", stored(DFLASH, **SLIDE, is_causal=False)))
    assert config["is_causal"] is False and "causal" not in config["dflash_config"]
    swa = config["dflash_config"] | {"use_swa": True, "swa_window_size": 3}
    tiny_heads.alter(folder, dflash_config=swa, layer_types=None, sliding_window=None, is_causal=None)
    assert heads.read(folder).same(head)


def test_copies_of_the_targets_embeddings_and_lm_head(tmp_path: pathlib.Path, target) -> None:
    """DeepSpec's checkpoints have both; vLLM drafts with them, SGLang with the target's."""
    head = stored(DFLASH)
    embed, rows = (np.asarray(x, np.float32) for x in (target.model.embed[...], target.model.output_rows))
    folder = written(tmp_path / "head", head)
    tiny_heads.alter(folder, {"embed_tokens.weight": embed, "lm_head.weight": rows})
    loaded = heads.read(folder, target)
    assert loaded.kind.draft(loaded, target, target.model.embed.dtype).head.lm_head[...] is target.model.output_rows
    for name, x in (("embed_tokens.weight", embed), ("lm_head.weight", rows)):
        tiny_heads.alter(folder, {name: x + 1})
        with pytest.raises(DraftFormatError, match=f"{name}: got other values than the target's"):
            heads.read(folder, target)
        tiny_heads.alter(folder, {name: x})


INNER = LAYERS_OF_TARGET


def rope(**fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4} | fields}


REFUSED: list[tuple[StoredKind, dict[str, Any], dict[str, Any], str]] = [
    (DSPARK, {}, {"markov_head_type": "gated"}, "markov_head_type: got 'gated', expected 'vanilla': the Markov heads"),
    (DSPARK, {}, {"confidence_head_with_markov": False}, "confidence_head_with_markov: got False, expected True"),
    (DSPARK, {}, {"sample_from_anchor": False}, "sample_from_anchor: got False, expected True of DSpark"),
    (DFLASH, {}, {"sample_from_anchor": True}, "sample_from_anchor: got True, expected False of DFlash"),
    (DFLASH, {}, {"attention_bias": True}, "attention_bias: got True, expected False"),
    (DFLASH, {}, {"dflash_config": INNER | {"projector_type": "domino"}}, "projector_type: got 'domino', expected"),
    (DFLASH, {}, {"rope_theta": None, "rope_parameters": None}, "rope_theta: missing"),
    (DFLASH, {}, {"partial_rotary_factor": 0.25}, "partial_rotary_factor: got 0.25, expected none or 1"),
    (DFLASH, {}, rope(partial_rotary_factor=0.25), "rope_parameters.partial_rotary_factor: got 0.25, expected"),
    (DFLASH, {}, rope(mrope_section=[11, 11, 10]), "rope_parameters.mrope_section: got [11, 11, 10], expected none"),
    (DFLASH, {}, rope(rope_type="proportional"), "rope_parameters.rope_type: got 'proportional', expected 'default'"),
    (
        DSPARK,
        {},
        {"is_neox_style": True, "rope_is_neox_style": False},
        "rope_is_neox_style: got {'is_neox_style': True",
    ),
    (DFLASH, {}, {"layer_types": [FULL]}, "layer_types: got ['full_attention'], expected 2 of"),
    (DFLASH, {}, {"layer_types": [SLIDING, FULL]}, "sliding_window: missing"),
    (DFLASH, {}, {"block_size": 1}, "block_size: got 1, expected an integer from 2 on"),
    (DFLASH, {}, {"mask_token_id": 58}, "dflash_config.mask_token_id: got 59, expected 58, the value at top level"),
    (DFLASH, {}, {"dflash_config": INNER | {"mask_token_id": 60}}, "mask_token_id: got 60, expected a token below"),
    (DFLASH, {}, {"dflash_config": {"mask_token_id": 59}}, "target_layer_ids: missing"),
    (DFLASH, {}, {"dflash_config": INNER | {"target_layer_ids": [1, 0, 3]}}, "target_layer_ids: got [1, 0, 3]"),
    (DFLASH, {}, {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, "got boundaries [[1, 2, 4], [0, 1, 3]], expected"),
    (DFLASH, {}, {"num_target_layers": 7}, "num_target_layers: got 7, expected 6, the target's"),
    (DFLASH, {"mask_hidden": np.zeros(16, np.float32)}, {}, "surplus tensor mask_hidden"),
    (DFLASH, {}, {"draft_vocab_size": 24}, "missing tensor d2t [24]"),
    (DFLASH2, {}, {"dflash_config": INNER | SELECTOR | {"final_logit_softcapping": 20.0}}, "final_logit_softcapping"),
]


@pytest.mark.parametrize(("kind", "tensors", "fields", "message"), REFUSED, ids=[row[3] for row in REFUSED])
def test_another_network_is_refused_by_field(tmp_path, kind, tensors, fields, message) -> None:
    folder = written(tmp_path / "head", stored(kind))
    tiny_heads.alter(folder, tensors, **fields)
    with pytest.raises(DraftFormatError) as caught:
        heads.read(folder, TARGET)
    assert message in str(caught.value)


def test_a_mask_embedding_in_a_pickle_and_another_architecture_are_refused(tmp_path: pathlib.Path) -> None:
    folder = written(tmp_path / "head", stored(DFLASH))
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(DraftFormatError, match=r"mask_embedding.pt: got a pickle, which is never read; expected none"):
        heads.read(folder)
    tiny_heads.alter(folder, architectures=["LiLiCorrDraftModel"])
    with pytest.raises(DraftFormatError, match=r"architectures: got \['LiLiCorrDraftModel'\]"):
        heads.read(folder)


def test_a_wrapper_that_its_readers_read_differently_is_refused(tmp_path: pathlib.Path) -> None:
    folder = written(tmp_path / "sliding", stored(DFLASH, **SLIDE), "speculators")
    tiny_heads.alter(folder, sliding_window_non_causal=None)
    with pytest.raises(DraftFormatError, match="sliding_window_non_causal: missing; vLLM takes an absent one for True"):
        heads.read(folder)
    folder = written(tmp_path / "dspark", stored(DSPARK), "speculators")
    tiny_heads.alter(folder, sample_from_anchor=None)
    with pytest.raises(DraftFormatError, match="sample_from_anchor: missing, expected True"):
        heads.read(folder)


def test_full_layers_of_speculators_are_bidirectional_whatever_the_flag_says(tmp_path: pathlib.Path) -> None:
    """Its own default; vLLM would make them causal, and gets the flag that keeps them as they were trained."""
    head = stored(DFLASH)
    folder = written(tmp_path / "head", head, "speculators")
    tiny_heads.alter(folder, sliding_window_non_causal=False)
    assert heads.read(folder).same(head)


UNABLE: list[tuple[str, StoredKind, dict[str, Any], str]] = [
    ("sglang", DFLASH, {"draft_vocab_size": DRAFT_VOCAB}, "as no d2t is read; SGLang (to 0.5.23): ignored"),
    ("vllm", DFLASH2, {"draft_vocab_size": DRAFT_VOCAB}, "as the selector has no d2t; vLLM (to 0.32.0): fails"),
    ("speculators", DFLASH, MIXED, "the form has one causality for all layers; vLLM (to 0.32.0): ignored"),
    ("speculators", DFLASH, {"is_causal": True}, "expected bidirectional full layers, as speculators has them; vLLM"),
    ("sglang", DFLASH, {"rope_scaling": YarnScaling(4.0, 64, attention_factor=1.2)}, "attention_factor: got 1.2"),
    ("eagle", DFLASH, {}, "head: got a DFlash head, expected an EAGLE-3 head; EAGLE has no DFlash heads"),
]


@pytest.mark.parametrize(("form", "kind", "changes", "message"), UNABLE, ids=[row[3] for row in UNABLE])
def test_what_the_forms_engine_cannot_run_is_refused(tmp_path, form, kind, changes, message) -> None:
    head = stored(kind, **changes)
    with pytest.raises(DraftFormatError) as caught:
        kind.write(tmp_path / "head", head, form)
    assert message in str(caught.value) and f"export.format: got {form!r}, expected " in str(caught.value)
    assert not (tmp_path / "head").exists()


def test_engines_that_run_a_head_are_named() -> None:
    assert DFLASH.served_by(stored(DFLASH2, draft_vocab_size=DRAFT_VOCAB), "eagle3_jax") == "served by eagle3_jax"
    sentences = {kind.name: DFLASH.served_by(stored(kind, layer_types=(FULL,)), "vllm") for kind in BLOCKS}
    unread = "`head_dim` not 64 or a multiple of 128 fails, RoPE, as config.json has it ignored"
    assert sentences["dflash"] == (
        "served by SGLang 0.5.23, vLLM 0.32.0, vLLM on a CPU 0.32.0 and later; "
        f"not by tpu-inference (to 0.32.0): {unread}"
    )
    assert sentences["dspark"] == (
        "served by SGLang 0.5.23, vLLM 0.32.0 and later; not by vLLM on a CPU (to 0.32.0): DSpark fails; "
        f"not by tpu-inference (to 0.32.0): DSpark fails, {unread}"
    )
    assert "; not by sglang-jax (to cddbf6f (2026-08)): sliding layers ignored" in DFLASH.served_by(
        stored(DFLASH, **SLIDE), "sglang"
    )
    assert "(RoPE, as config.json has it)" in DFLASH.warning(stored(DFLASH), "vllm")
    several = DFLASH.served_by(stored(DFLASH), "vllm")
    assert "and later; not by vLLM on a CPU (to 0.32.0): several layers ignored; not by" in several
    assert DFLASH.refusals(stored(DFLASH, **MIXED), "vllm") == []
    (problem,) = ENGINES.cannot_run(CPU, stored(DFLASH, **MIXED), "vllm")
    assert problem.startswith("layer_types: got ['sliding_attention', 'full_attention'], expected all of one type")
    assert ENGINES.cannot_run(CPU, stored(DFLASH, **SLIDE), "vllm") == []
