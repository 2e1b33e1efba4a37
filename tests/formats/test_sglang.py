"""The SGLang form: a plain numpy network read from the file equals the head; all that does not fit is refused."""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiny
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_jax.formats.sglang import DraftFormatError, load_draft, save_draft
from eagle3_jax.formats.sglang_config import served_by
from eagle3_jax.models.draft import Draft, DraftHead, DraftHeadConfig
from eagle3_jax.models.llama import LlamaConfig

AUX_KEY = "eagle_aux_hidden_state_layer_ids"
TARGET = tiny.llama_config(
    vocab_size=50, num_hidden_layers=12, rope_theta=500000.0, eos_token_ids=(2,), aux_layers=(2, 6, 9), bos_token_id=1
)


def make_draft(
    dtype: Any = jnp.float32, ids: list[int] | None = None, target: LlamaConfig = TARGET, **changes: Any
) -> Draft:
    ids = [0, 3, 4, 17, 20, 49] if ids is None else ids
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


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> pathlib.Path:
    save_draft(tmp_path / "head", make_draft(), target=TARGET, dtype="float32")
    return tmp_path / "head"


def alter(folder: pathlib.Path, tensors: dict[str, Any] | None = None, **fields: Any) -> None:
    """Replaces tensors and config fields of a saved head; None removes."""
    held = safetensors.numpy.load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    for kind, changes in ((held, tensors or {}), (config, fields)):
        for name, value in changes.items():
            kind.pop(name, None)
            if value is not None:
                kind[name] = value
    safetensors.numpy.save_file(held, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def bits(draft: Draft) -> list[np.ndarray]:
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(draft.head)]
    return [*leaves, np.asarray(draft.token_ids)]


def numpy_chain(
    folder: pathlib.Path, embeds: np.ndarray, aux: np.ndarray, drafted: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """EAGLE3_SPEC section 1.1 straight from the files, in float64: prefix pairs, then a chain from the last one.

    Args:
        embeds: [t, H], embeddings of tokens 1..t; aux: [t, n_aux * H]; drafted: [steps, H], of the chain's tokens.

    Returns:
        Logits [1 + steps, Vd], behind the prefix and behind each drafted token, and the ids that the rows stand for.
    """
    w = {k: v.astype(np.float64) for k, v in safetensors.numpy.load_file(folder / "model.safetensors").items()}
    c = json.loads((folder / "config.json").read_text())
    heads, kv, d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + c["rms_norm_eps"]) * w[name]

    def rope(x: np.ndarray, position: int) -> np.ndarray:
        angle = position / c["rope_theta"] ** (np.arange(0, d, 2) / d)
        cos, sin = np.cos(np.tile(angle, 2)), np.sin(np.tile(angle, 2))
        return x * cos + np.concatenate([-x[:, d // 2 :], x[:, : d // 2]], axis=-1) * sin

    keys: list[np.ndarray] = []
    values: list[np.ndarray] = []

    def step(embed: np.ndarray, z: np.ndarray, position: int) -> np.ndarray:
        u = np.concatenate([norm(embed, "midlayer.input_layernorm.weight"), norm(z, "midlayer.hidden_norm.weight")])
        q, k, v = (w[f"midlayer.self_attn.{x}_proj.weight"] @ u for x in "qkv")
        keys.append(rope(k.reshape(kv, d), position))
        values.append(v.reshape(kv, d))
        q = rope(q.reshape(heads, d), position)
        out = []
        for n in range(heads):
            group = n // (heads // kv)
            scores = np.array([q[n] @ key[group] for key in keys]) / np.sqrt(d)
            weights = np.exp(scores - scores.max())
            out.append(sum(p * value[group] for p, value in zip(weights / weights.sum(), values, strict=True)))
        h1 = z + w["midlayer.self_attn.o_proj.weight"] @ np.concatenate(out)
        m = norm(h1, "midlayer.post_attention_layernorm.weight")
        gate, up = w["midlayer.mlp.gate_proj.weight"] @ m, w["midlayer.mlp.up_proj.weight"] @ m
        h2 = h1 + w["midlayer.mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        return norm(h2, "norm.weight") if c.get("norm_output") else h2

    if c.get("fc_norm"):
        parts = np.split(aux, len(aux[0]) // c["hidden_size"], axis=-1)
        aux = np.concatenate([norm(x, f"fc_norm.{i}.weight") for i, x in enumerate(parts)], axis=-1)
    states = [step(embed, w["fc.weight"] @ a, t) for t, (embed, a) in enumerate(zip(embeds, aux, strict=True))][-1:]
    for i, embed in enumerate(drafted):
        states.append(step(embed, states[-1], len(embeds) + i))
    final = [g if c.get("norm_output") else norm(g, "norm.weight") for g in states]
    d2t = safetensors.numpy.load_file(folder / "model.safetensors")["d2t"]
    return np.stack(final) @ w["lm_head.weight"].T, np.arange(len(d2t)) + d2t


@pytest.mark.parametrize(
    ("fc_norm", "norm_output"),
    [
        (True, True),
        *(pytest.param(*flags, marks=pytest.mark.slow) for flags in [(False, False), (True, False), (False, True)]),
    ],
)
def test_a_plain_network_read_from_the_file_drafts_as_the_head_does(
    tmp_path: pathlib.Path, fc_norm: bool, norm_output: bool
) -> None:
    draft = make_draft(fc_norm=fc_norm, norm_output=norm_output)
    save_draft(tmp_path / "head", draft, target=TARGET, dtype="float32")
    rng = np.random.default_rng(2)
    prefix, steps = 4, 3
    embeds, drafted = rng.normal(size=(prefix, 16)), rng.normal(size=(steps, 16))
    aux = rng.normal(size=(prefix, 48))
    expected, ids = numpy_chain(tmp_path / "head", embeds, aux, drafted)

    head = draft.head
    cache = head.empty_cache(1, prefix + steps)
    held = {"cache": cache}

    def run(embed: np.ndarray, features: Any, start: int) -> Any:
        length = len(embed)
        lengths = jnp.array([start], jnp.int32)

        def attend(q: Any, k: Any, v: Any) -> Any:
            attended, held["cache"] = held["cache"].append_and_attend(0, q, k, v, lengths, None)
            return attended

        positions = jnp.arange(start, start + length, dtype=jnp.int32)[None]
        return head(jnp.asarray(embed[None], jnp.float32), features, positions, attend)[:, -1:]

    state = run(embeds, head.fuse(jnp.asarray(aux[None], jnp.float32)), 0)
    got = [head.logits(state)]
    for i in range(steps):
        state = run(drafted[i : i + 1], state, prefix + i)
        got.append(head.logits(state))
    np.testing.assert_allclose(np.concatenate(got, axis=1)[0], expected, rtol=2e-4, atol=2e-4)
    np.testing.assert_array_equal(ids, draft.token_ids)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("changes", [{}, {"fc_norm": True, "norm_output": True}, {"num_key_value_heads": 4}])
def test_round_trip_keeps_every_bit(tmp_path: pathlib.Path, dtype: str, changes: dict[str, Any]) -> None:
    draft = make_draft(jnp.dtype(dtype), **changes)
    save_draft(tmp_path / "head", draft, target=TARGET, dtype=dtype)
    again = load_draft(tmp_path / "head", target=TARGET, dtype=jnp.dtype(dtype))
    assert again.head.config == draft.head.config
    for got, expected in zip(bits(again), bits(draft), strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_names_shapes_and_dtypes_on_disk(saved: pathlib.Path) -> None:
    tensors = safetensors.numpy.load_file(saved / "model.safetensors")
    attention, mlp = "midlayer.self_attn", "midlayer.mlp"
    assert {name: x.shape for name, x in tensors.items()} == {
        "fc.weight": (16, 48),
        "midlayer.input_layernorm.weight": (16,),
        "midlayer.hidden_norm.weight": (16,),
        "midlayer.post_attention_layernorm.weight": (16,),
        f"{attention}.q_proj.weight": (24, 32),
        f"{attention}.k_proj.weight": (12, 32),
        f"{attention}.v_proj.weight": (12, 32),
        f"{attention}.o_proj.weight": (16, 24),
        f"{mlp}.gate_proj.weight": (20, 16),
        f"{mlp}.up_proj.weight": (20, 16),
        f"{mlp}.down_proj.weight": (16, 20),
        "norm.weight": (16,),
        "lm_head.weight": (6, 16),
        "d2t": (6,),
        "t2d": (50,),
    }
    assert tensors["d2t"].dtype == np.int64 and tensors["t2d"].dtype == np.bool_
    assert tensors["d2t"].tolist() == [0, 2, 2, 14, 16, 44]
    assert np.flatnonzero(tensors["t2d"]).tolist() == [0, 3, 4, 17, 20, 49]


def test_config_says_what_engines_read(saved: pathlib.Path) -> None:
    assert json.loads((saved / "config.json").read_text()) == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 64,
        "vocab_size": 50,
        "draft_vocab_size": 6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }


def test_transformers_reads_the_config(saved: pathlib.Path) -> None:
    from transformers import LlamaConfig as HFConfig

    config = HFConfig.from_pretrained(saved)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert (config.head_dim, config.draft_vocab_size) == (6, 6)


def test_other_aux_layers_are_written_for_both_conventions(tmp_path: pathlib.Path) -> None:
    target = dataclasses.replace(TARGET, aux_layers=(1, 5, 8, 11))
    draft = make_draft(target=target)
    save_draft(tmp_path / "head", draft, target=target, dtype="float32")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config[AUX_KEY] == [1, 5, 8, 11]
    assert config["eagle_config"] == {AUX_KEY: [0, 4, 7, 10], "use_aux_hidden_state": True}
    assert load_draft(tmp_path / "head", target=target).head.config.aux_layers == (1, 5, 8, 11)
    alter(tmp_path / "head", {}, **{AUX_KEY: None})  # SGLang's part alone
    assert load_draft(tmp_path / "head", target=target).head.config.aux_layers == (1, 5, 8, 11)
    with pytest.raises(DraftFormatError, match=r"aux layers.*got \(1, 5, 8, 11\), expected \(2, 6, 9\)"):
        load_draft(tmp_path / "head", target=TARGET)
    alter(tmp_path / "head", {}, **{AUX_KEY: [1, 5, 8, 10]})
    with pytest.raises(DraftFormatError, match=r"eagle_config.*got \[0, 4, 7, 10\], expected \[0, 4, 7, 9\]"):
        load_draft(tmp_path / "head", target=target)


@pytest.mark.parametrize("layers", [(0, 6, 9), (2, 6, 12)])
def test_boundaries_that_sglang_cannot_capture_are_refused(tmp_path: pathlib.Path, layers: tuple[int, ...]) -> None:
    """SGLang adds the residual at the entry of blocks 0 to 11: there is none at 0, and no entry 12."""
    target = dataclasses.replace(TARGET, aux_layers=layers)
    expected = r"target\.aux_layers: got .*, expected boundaries 1 to 11: SGLang captures neither 0 .* nor 12"
    with pytest.raises(DraftFormatError, match=expected):
        save_draft(tmp_path / "head", make_draft(target=target), target=target, dtype="float32")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "layers", "said"),
    [
        ({}, (2, 6, 9), "served by SGLang (0.5.23) and vLLM (0.33.0), sglang-jax and tpu-inference"),
        ({}, (1, 6, 9), "sglang-jax and tpu-inference feed the default aux layers instead"),
        ({"fc_norm": True}, (2, 6, 9), "sglang-jax (to cddbf6f, 2026-08) drop fc_norm without a word"),
        ({"norm_output": True, "fc_norm": True}, (2, 6, 9), "refuse fc_norm and norm_output"),
    ],
)
def test_the_engines_that_run_a_head_are_named(changes: dict[str, Any], layers: tuple[int, ...], said: str) -> None:
    target = dataclasses.replace(TARGET, aux_layers=layers)
    found = served_by(make_draft(target=target, **changes).head.config, target)
    assert said in found and found.startswith("served by SGLang (0.5.23) and vLLM (0.33.0)")
    assert ("vLLM (0.33.0), sglang-jax" in found) == (not changes and layers == TARGET.aux_layers)


def test_a_shallow_target_whose_default_collides_has_its_layers_written(tmp_path: pathlib.Path) -> None:
    target = dataclasses.replace(TARGET, num_hidden_layers=4, aux_layers=(1, 2))
    save_draft(tmp_path / "head", make_draft(target=target), target=target, dtype="float32")
    assert json.loads((tmp_path / "head" / "config.json").read_text())[AUX_KEY] == [1, 2]


@pytest.mark.parametrize("prefix", ["layers.0.", "model.midlayer.", "model.layers.0."])
def test_names_that_engines_take_are_taken(saved: pathlib.Path, prefix: str) -> None:
    expected = bits(load_draft(saved, target=TARGET))
    held = safetensors.numpy.load_file(saved / "model.safetensors")
    renamed = {name.replace("midlayer.", prefix): x for name, x in held.items() if name != "t2d"}
    renamed["embed_tokens.weight"] = np.zeros((50, 16), np.float32)
    safetensors.numpy.save_file(renamed, saved / "model.safetensors")
    alter(saved, rope_theta=None, rope_parameters=None, head_dim=6, architectures=["Eagle3LlamaForCausalLM"])
    again = load_draft(saved, target=TARGET)
    assert again.head.config.rope_theta == 10000.0
    for got, wanted in zip(bits(again), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_all_that_is_wrong_is_said_at_once(saved: pathlib.Path) -> None:
    alter(
        saved,
        {
            "midlayer.hidden_norm.weight": None,
            "fc.weight": None,
            "fcc.weight": np.zeros((16, 48), np.float32),
            "norm.weight": np.zeros(15, np.float32),
            "lm_head.weight": np.zeros((6, 16), np.int8),
        },
    )
    with pytest.raises(DraftFormatError) as caught:
        load_draft(saved, target=TARGET)
    for part in (
        "missing tensor midlayer.hidden_norm.weight [16]",
        "missing tensor fc.weight [16, 48]",
        "surplus tensor fcc.weight",
        "norm.weight: got shape [15], expected [16]",
        "lm_head.weight: got int8, expected floating point",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("architectures", ["LlamaForCausalLMEagle"], "architectures: got"),
        ("hidden_act", "gelu", "hidden_act: got 'gelu', expected 'silu'"),
        ("num_hidden_layers", 2, "num_hidden_layers: got 2, expected 1"),
        ("tie_word_embeddings", True, "tie_word_embeddings: got True"),
        ("norm_before_residual", True, "norm_before_residual: got True"),
        ("eagle_config", {"norm_before_fc": True}, "eagle_config.norm_before_fc: got True"),
        ("draft_vocab_size", None, "draft_vocab_size: missing"),
        ("vocab_size", 51, "vocab_size: got 51, expected 50"),
        ("target_hidden_size", 32, "target_hidden_size: got 32, expected 16"),
        ("intermediate_size", "20", "intermediate_size: got '20', expected a positive integer"),
        ("num_key_value_heads", 3, "num_attention_heads: got 4, expected a multiple"),
        ("fc_norm", 1, "fc_norm: got 1, expected true or false"),
        ("rope_theta", 5e5, "rope_theta: got"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 32.0}, "rope_scaling.rope_type: got 'yarn'"),
        (AUX_KEY, ["1"], f"{AUX_KEY}: got ['1'], expected a list of integers"),
    ],
)
def test_config_that_does_not_fit_is_refused(saved: pathlib.Path, field: str, value: Any, message: str) -> None:
    alter(saved, **{field: value})
    with pytest.raises(DraftFormatError) as caught:
        load_draft(saved, target=TARGET)
    assert message in str(caught.value)


IDS = np.array([0, 3, 4, 17, 20, 49])
OTHER = np.isin(np.arange(50), [0, 3, 4, 17, 20, 48])


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"d2t": None}, "missing tensor d2t"),
        ({"d2t": IDS}, "absolute target ids"),
        ({"d2t": np.array([0, 3, 4, 7, 10, 12]), "t2d": None}, "as absolute ids do"),
        ({"d2t": IDS, "t2d": None}, "within 0..49"),
        ({"d2t": np.array([0, 2, 2, 14, 16, -3]), "t2d": None}, "ascending, distinct"),
        ({"d2t": (IDS - np.arange(6)).astype(np.float32)}, "d2t: got float32"),
        ({"t2d": OTHER}, "t2d: got other tokens"),
        ({"t2d": OTHER[:-1]}, "t2d: got shape [49], expected [50]"),
    ],
)
def test_a_vocabulary_mapping_that_is_wrong_is_refused(
    saved: pathlib.Path, tensors: dict[str, Any], message: str
) -> None:
    alter(saved, tensors)
    with pytest.raises(DraftFormatError) as caught:
        load_draft(saved, target=TARGET)
    assert message in str(caught.value)


@settings(deadline=None, max_examples=15)
@given(ids=st.sets(st.integers(0, 49), min_size=1).map(sorted))
def test_any_vocabulary_comes_back(tmp_path_factory: pytest.TempPathFactory, ids: list[int]) -> None:
    folder = tmp_path_factory.mktemp("vocabulary") / "head"
    save_draft(folder, make_draft(ids=ids), target=TARGET, dtype="float32")
    assert load_draft(folder, target=TARGET).token_ids.tolist() == ids


def test_pickles_are_not_read(tmp_path: pathlib.Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(DraftFormatError, match=r"pytorch_model.bin: pickles run code when read"):
        load_draft(tmp_path, target=TARGET)


def test_broken_files_are_named(saved: pathlib.Path) -> None:
    whole = (saved / "model.safetensors").read_bytes()
    (saved / "model.safetensors").write_bytes(whole[:-8])
    with pytest.raises(DraftFormatError, match=r"model.safetensors: truncated"):
        load_draft(saved, target=TARGET)
    (saved / "model.safetensors").write_bytes(whole)
    (saved / "config.json").write_text("{")
    with pytest.raises(DraftFormatError, match=r"config.json: not valid JSON"):
        load_draft(saved, target=TARGET)
    (saved / "config.json").unlink()
    with pytest.raises(DraftFormatError, match=r"config.json: not found"):
        load_draft(saved, target=TARGET)


def test_nothing_is_left_of_a_save_that_fails(tmp_path: pathlib.Path) -> None:
    with pytest.raises(DraftFormatError, match=r"vocab_size: got 50, expected 51"):
        save_draft(tmp_path / "head", make_draft(), target=dataclasses.replace(TARGET, vocab_size=51), dtype="float32")
    with pytest.raises(DraftFormatError, match="ascending, distinct"):
        save_draft(tmp_path / "head", make_draft(ids=[3, 0]), target=TARGET, dtype="float32")
    draft = make_draft()
    draft.head.fc[...] = draft.head.fc[...].at[0, 0].set(jnp.nan)
    with pytest.raises(DraftFormatError, match="fc: got NaN or infinity"):
        save_draft(tmp_path / "head", draft, target=TARGET, dtype="float32")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "head").mkdir()
    with pytest.raises(FileExistsError):
        save_draft(tmp_path / "head", make_draft(), target=TARGET, dtype="float32")
