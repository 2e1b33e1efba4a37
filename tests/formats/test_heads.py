"""Heads on disk, whatever their form: what is written comes back to the bit, and all that does not fit is refused."""

import dataclasses
import json
import pathlib
import stat
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiny
import tiny_heads
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from tiny_heads import IDS, TARGET, alter, assert_same, make_draft

from eagle3_jax.formats import files, heads
from eagle3_jax.formats.eagle3 import EAGLE3
from eagle3_jax.formats.files import DraftFormatError
from eagle3_jax.formats.forms import FORMS
from eagle3_jax.formats.heads import load_draft, save_draft
from eagle3_jax.formats.kinds import StoredHead
from eagle3_jax.formats.stored import StoredKind
from eagle3_jax.models.cache import LayerPass, Pass
from eagle3_jax.models.layers import LinearScaling, RopeScaling, YarnScaling

LLAMA3 = RopeScaling(8.0, 1.0, 4.0, 16)
YARN = YarnScaling(4.0, 1024, truncate=False)
EMBEDDINGS = "embed_tokens.weight"


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> pathlib.Path:
    save_draft(tmp_path / "head", make_draft(), target=TARGET, dtype="float32")
    return tmp_path / "head"


# ------------------------------------------------------------------------------------------------- what a head computes


def numpy_chain(
    folder: pathlib.Path, embeds: np.ndarray, aux: np.ndarray, drafted: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The head straight from its files, in float64: prefix pairs, then a chain from the last one.

    Args:
        embeds: [t, H], embeddings of tokens 1..t; aux: [t, n_aux * H]; drafted: [steps, H], of the chain's tokens.

    Returns:
        Logits [1 + steps, Vd], behind the prefix and behind each drafted token, and the ids that the rows stand for.
    """
    tensors, c = tiny_heads.read(folder)
    w = {k: v.astype(np.float64) for k, v in tensors.items()}
    heads, kv, d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + c["rms_norm_eps"]) * w[name]

    scaling: dict[str, Any] = c.get("rope_scaling") or {"rope_type": "default"}

    def frequencies() -> np.ndarray:
        inverse = 1 / c["rope_theta"] ** (np.arange(0, d, 2) / d)
        if scaling["rope_type"] == "linear":
            return inverse / scaling["factor"]
        if scaling["rope_type"] == "llama3":  # Llama-3.1: waves that are long beside the old context become longer
            turns = scaling["original_max_position_embeddings"] * inverse / (2 * np.pi)
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            share = np.clip((turns - low) / (high - low), 0, 1)
            return share * inverse + (1 - share) * inverse / scaling["factor"]
        if scaling["rope_type"] == "yarn":  # from dimension `low` on, frequencies shrink, to all of it at `high`
            turns = [scaling[name] for name in ("beta_fast", "beta_slow")]
            context, base = scaling["original_max_position_embeddings"], c["rope_theta"]
            low, high = (d * np.log(context / (2 * np.pi * n)) / (2 * np.log(base)) for n in turns)
            if scaling.get("truncate", True):
                low, high = np.floor(low), np.ceil(high)
            low, high = max(low, 0), min(high, d - 1)
            share = np.clip((np.arange(d // 2) - low) / (high - low), 0, 1)
            return share * inverse / scaling["factor"] + (1 - share) * inverse
        return inverse

    amplitude = 1 + 0.1 * np.log(scaling["factor"]) if scaling["rope_type"] == "yarn" else 1.0

    def rope(x: np.ndarray, position: int) -> np.ndarray:
        angle = position * frequencies()
        cos, sin = amplitude * np.cos(np.tile(angle, 2)), amplitude * np.sin(np.tile(angle, 2))
        return x * cos + np.concatenate([-x[:, d // 2 :], x[:, : d // 2]], axis=-1) * sin

    keys: list[np.ndarray] = []
    values: list[np.ndarray] = []

    def step(embed: np.ndarray, z: np.ndarray, position: int) -> np.ndarray:
        normed = norm(z, "midlayer.hidden_norm.weight")
        u = np.concatenate([norm(embed, "midlayer.input_layernorm.weight"), normed])
        q, k, v = (w[f"midlayer.self_attn.{x}_proj.weight"] @ u for x in "qkv")
        q, k = q.reshape(heads, d), k.reshape(kv, d)
        if c["model_type"] == "qwen3":
            q, k = (norm(x, f"midlayer.self_attn.{name}_norm.weight") for name, x in (("q", q), ("k", k)))
        keys.append(rope(k, position))
        values.append(v.reshape(kv, d))
        q = rope(q, position)
        seen = slice(-c.get("sliding_window", 0), None)  # 0 is all
        out = []
        for n in range(heads):
            group = n // (heads // kv)
            scores = np.array([q[n] @ key[group] for key in keys[seen]]) / np.sqrt(d)
            weights = np.exp(scores - scores.max())
            out.append(sum(p * value[group] for p, value in zip(weights / weights.sum(), values[seen], strict=True)))
        residual = normed if c.get("norm_before_residual") else z
        h1 = residual + w["midlayer.self_attn.o_proj.weight"] @ np.concatenate(out)
        m = norm(h1, "midlayer.post_attention_layernorm.weight")
        gate, up = w["midlayer.mlp.gate_proj.weight"] @ m, w["midlayer.mlp.up_proj.weight"] @ m
        h2 = h1 + w["midlayer.mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        return norm(h2, "norm.weight") if c.get("norm_output") else h2

    if c.get("norm_before_fc"):
        aux = norm(aux, "input_norm.weight")
    if c.get("fc_norm"):
        parts = np.split(aux, len(aux[0]) // c["hidden_size"], axis=-1)
        aux = np.concatenate([norm(x, f"fc_norm.{i}.weight") for i, x in enumerate(parts)], axis=-1)
    states = [step(embed, w["fc.weight"] @ a, t) for t, (embed, a) in enumerate(zip(embeds, aux, strict=True))][-1:]
    for i, embed in enumerate(drafted):
        states.append(step(embed, states[-1], len(embeds) + i))
    final = [g if c.get("norm_output") else norm(g, "norm.weight") for g in states]
    return np.stack(final) @ w["lm_head.weight"].T, np.arange(len(w["d2t"])) + tensors["d2t"]


VARIANTS: dict[str, dict[str, Any]] = {
    "EAGLE-3": {},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "norm_before_residual": {"norm_before_residual": True},
    "llama3": {"rope_scaling": LLAMA3},
    "linear": {"rope_scaling": LinearScaling(4.0)},
    "norm_before_fc": {"norm_before_fc": True},
    "yarn": {"rope_scaling": YARN},
    "qk_norm": {"qk_norm": True},
    "sliding_window": {"sliding_window": 4},
    "qk_norm and sliding_window": {"qk_norm": True, "sliding_window": 4, "norm_output": True},
}
FAST = ("EAGLE-3.1", "qk_norm and sliding_window")


@pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in VARIANTS],
)
def test_a_plain_network_read_from_the_file_drafts_as_the_head_does(tmp_path: pathlib.Path, variant: str) -> None:
    draft = make_draft(**VARIANTS[variant])
    save_draft(tmp_path / "head", draft, target=TARGET, dtype="float32", form="vllm")
    rng = np.random.default_rng(2)
    prefix, steps = 9, 3
    embeds, drafted = rng.normal(size=(prefix, 16)), rng.normal(size=(steps, 16))
    aux = rng.normal(size=(prefix, 48))
    expected, ids = numpy_chain(tmp_path / "head", embeds, aux, drafted)

    head = draft.head
    (cache,) = head.empty_cache(1, prefix + steps).layers

    def run(embed: np.ndarray, features: Any, start: int) -> Any:
        nonlocal cache
        this = Pass(jnp.arange(start, start + len(embed), dtype=jnp.int32)[None], jnp.array([start], jnp.int32))
        attend = LayerPass(this, cache)
        state, cache = head(jnp.asarray(embed[None], jnp.float32), features, this, attend), attend.cache
        return state[:, -1:]

    state = run(embeds, head.fuse(jnp.asarray(aux[None], jnp.float32)), 0)
    got = [head.logits(state)]
    for i in range(steps):
        state = run(drafted[i : i + 1], state, prefix + i)
        got.append(head.logits(state))
    np.testing.assert_allclose(np.concatenate(got, axis=1)[0], expected, rtol=2e-4, atol=2e-4)
    np.testing.assert_array_equal(ids, draft.token_ids)


# ---------------------------------------------------------------------------------------------------- there and back

HEADS = st.fixed_dictionaries(
    {
        "fc_norm": st.booleans(),
        "norm_output": st.booleans(),
        "norm_before_residual": st.booleans(),
        "norm_before_fc": st.booleans(),
        "qk_norm": st.booleans(),
        "sliding_window": st.sampled_from([None, 4]),
        "rope_theta": st.sampled_from([10000.0, 500000.0]),
        "rope_scaling": st.sampled_from([None, LLAMA3, LinearScaling(2.0), YARN, YarnScaling(4.0, 16)]),
        "head_dim": st.sampled_from([4, 6]),
        "num_key_value_heads": st.sampled_from([1, 2, 4]),
    }
)
AUX_LAYERS = st.sets(st.integers(0, 12), min_size=1).map(lambda found: tuple(sorted(found)))
VOCABULARIES = st.one_of(st.just(list(range(50))), st.sets(st.integers(0, 49), min_size=1).map(sorted))


@pytest.mark.slow
@examples(60)
@given(
    form=st.sampled_from(sorted(FORMS)),
    changes=HEADS,
    layers=st.one_of(st.just((2, 6, 9)), AUX_LAYERS),
    ids=VOCABULARIES,
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_any_head_in_any_form_comes_back_to_the_bit_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, form: str, changes: Any, layers: Any, ids: Any, dtype: str
) -> None:
    folder = tmp_path_factory.mktemp("head") / "head"
    name = tiny_heads.write_named_target(folder.with_name("target"), TARGET)
    target = dataclasses.replace(TARGET, aux_layers=layers)
    draft = make_draft(jnp.dtype(dtype), ids=ids, target=target, **changes)
    refused = EAGLE3.refusals(EAGLE3.stored(draft, target, dtype, None), form)
    if refused:
        with pytest.raises(DraftFormatError) as caught:
            save_draft(folder, draft, target=target, dtype=dtype, form=form)
        assert all(line in str(caught.value) for line in refused)
        assert not folder.exists()
    else:
        save_draft(folder, draft, target=target, dtype=dtype, form=form, target_name=name)
        assert_same(load_draft(folder, target=target, dtype=jnp.dtype(dtype)), draft)


def test_the_whole_vocabulary_needs_no_mapping(tmp_path: pathlib.Path) -> None:
    """vLLM has no place for one there, and ends."""
    save_draft(tmp_path / "head", make_draft(ids=list(range(50))), target=TARGET, dtype="float32")
    tensors, config = tiny_heads.read(tmp_path / "head")
    assert not {"d2t", "t2d"} & tensors.keys() and config["draft_vocab_size"] == 50
    alter(tmp_path / "head", {"d2t": np.zeros(50, np.int64)})  # as EAGLE's own may have it
    assert load_draft(tmp_path / "head", target=TARGET).token_ids.tolist() == list(range(50))


def test_float16_stays_float16_and_may_be_read_by_another_user(saved: pathlib.Path) -> None:
    """Heads of SafeAILab's and SpecForge's own are in it; an engine in a container may be another user."""
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in saved.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"] != 0o600
    tensors, _ = tiny_heads.read(saved)
    alter(saved, {name: x.astype(np.float16) for name, x in tensors.items() if x.dtype == np.float32})
    EAGLE3.write(saved.with_name("other"), heads.read(saved), "vllm")
    again, config = tiny_heads.read(saved.with_name("other"))
    assert again["fc.weight"].dtype == np.float16 and config["torch_dtype"] == "float16"


def test_a_head_without_an_lm_head_takes_the_targets_rows(tmp_path: pathlib.Path, saved: pathlib.Path) -> None:
    target = tiny.make_target(dataclasses.replace(TARGET, tie_word_embeddings=False))
    alter(saved, {"lm_head.weight": None})
    got = load_draft(saved, target=target).head.lm_head[...]
    np.testing.assert_array_equal(got, target.model.output_rows[jnp.asarray(IDS)])
    with pytest.raises(
        DraftFormatError, match=r"missing tensor lm_head.weight \[6, 16\].*expected a target that is loaded"
    ):
        load_draft(saved, target=TARGET)
    with pytest.raises(DraftFormatError, match=r"lm_head.weight: missing, expected 6 rows \(load the head with its"):
        EAGLE3.write(tmp_path / "other", heads.read(saved), "sglang")


@pytest.mark.parametrize("form", ["sglang", "vllm", "speculators"])
def test_the_targets_own_lm_head_is_left_to_the_target(tmp_path: pathlib.Path, form: str) -> None:
    """Of a head over the whole vocabulary; SGLang is told so by a null."""
    save_draft(tmp_path / "own", make_draft(ids=list(range(50))), target=TARGET, dtype="float32")
    alter(tmp_path / "own", {"lm_head.weight": None})
    head = heads.read(tmp_path / "own")
    EAGLE3.write(tmp_path / "tied", head, form)
    assert heads.read(tmp_path / "tied").same(head)
    tensors, config = tiny_heads.read(tmp_path / "tied")
    assert "lm_head.weight" not in tensors and "d2t" not in tensors and "t2d" not in tensors
    assert config["draft_vocab_size"] == (None if form == "sglang" else 50)
    with pytest.raises(DraftFormatError, match=r"lm_head.weight: missing, .*; EAGLE \(to .*\): ignored"):
        EAGLE3.write(tmp_path / "eagle", head, "eagle")


def test_a_head_narrower_than_its_target_keeps_its_embeddings(tmp_path: pathlib.Path) -> None:
    """It goes from form to form, but the decoder here feeds the target's embeddings."""
    head = EAGLE3.stored(make_draft(target_hidden_size=24), TARGET, "float32", None)
    embeddings = np.arange(50 * 16, dtype=np.float32).reshape(50, 16)
    own = dataclasses.replace(head, tensors=head.tensors | {EMBEDDINGS: embeddings}, problems=())
    EAGLE3.write(tmp_path / "a", own, "sglang")
    EAGLE3.write(tmp_path / "b", heads.read(tmp_path / "a"), "speculators")
    np.testing.assert_array_equal(heads.read(tmp_path / "b").tensors[EMBEDDINGS], embeddings)
    wide = dataclasses.replace(TARGET, hidden_size=24)
    with pytest.raises(DraftFormatError, match=r"hidden_size: got 16, expected 24, the target's"):
        load_draft(tmp_path / "b", target=wide)
    alter(tmp_path / "a", {EMBEDDINGS: None})
    with pytest.raises(DraftFormatError, match=r"missing tensor embed_tokens.weight \[50, 16\]"):
        heads.read(tmp_path / "a")


# ------------------------------------------------------------------------------------------------------------- files


def shard(folder: pathlib.Path) -> None:
    """Two files and an index in place of one file."""
    tensors, _ = tiny_heads.read(folder)
    weight_map = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        safetensors.numpy.save_file({k: v for k, v in tensors.items() if weight_map[k] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()


def test_a_sharded_head_is_read_by_its_index(saved: pathlib.Path) -> None:
    expected = load_draft(saved, target=TARGET)
    shard(saved)
    safetensors.numpy.save_file({"fc.weight": np.zeros(1, np.float32)}, saved / "leftover.safetensors")  # not named
    assert_same(load_draft(saved, target=TARGET), expected)
    assert "model.safetensors.index.json" in files.file_digests(saved)


def test_an_index_that_promises_too_much_is_refused(saved: pathlib.Path) -> None:
    shard(saved)
    index = saved / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    first = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps({"weight_map": weight_map | {"more.weight": first}}))
    with pytest.raises(DraftFormatError, match=rf"{first}: the index promises more.weight, the file does not hold it"):
        load_draft(saved, target=TARGET)
    index.write_text("{")
    with pytest.raises(DraftFormatError, match=r"index.json: not valid JSON"):
        load_draft(saved, target=TARGET)


def test_pickles_and_broken_files_are_named(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    message = r"pytorch_model.bin: pickles run code when read.*python -c 'import torch"
    with pytest.raises(DraftFormatError, match=message):
        load_draft(tmp_path, target=TARGET)
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


def test_what_does_not_read_back_the_same_is_an_error(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = StoredKind.read

    def read(self: StoredKind, folder: pathlib.Path) -> StoredHead:
        head = whole(self, folder)
        head.tensors["norm.weight"][3] += np.float32(2**-20)
        return head

    monkeypatch.setattr(StoredKind, "read", read)
    with pytest.raises(DraftFormatError, match="does not read back the same"):
        save_draft(tmp_path / "head", make_draft(), target=TARGET, dtype="float32")
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------------------------------------- spoiled exports


def test_all_that_is_wrong_is_reported_at_once(saved: pathlib.Path) -> None:
    alter(
        saved,
        {
            "midlayer.hidden_norm.weight": None,
            "fc.weight": None,
            "fcc.weight": np.zeros((16, 48), np.float32),
            "norm.weight": np.zeros(15, np.float32),
            "lm_head.weight": np.zeros((6, 16), np.int8),
            "embed_tokens.weight": np.zeros((51, 16), np.float32),
            "midlayer.mlp.down_proj.weight": np.full((16, 20), np.inf, np.float16),
        },
    )
    with pytest.raises(DraftFormatError) as caught:
        load_draft(saved, target=TARGET)
    for part in (
        "missing tensor midlayer.hidden_norm.weight [16]",
        "missing tensor fc.weight [16, 48]",
        "surplus tensor fcc.weight",
        "norm.weight: got shape [15], expected [16]",
        "lm_head.weight: got dtype int8, expected floating point",
        "embed_tokens.weight: got shape [51, 16], expected [50, 16]",
        "midlayer.mlp.down_proj.weight: got NaN or infinity, expected finite numbers",
    ):
        assert part in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["sglang", "speculators"])
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_act", "gelu", "hidden_act: got 'gelu', expected 'silu'"),
        ("eagle_config", {"use_aux_hidden_state": False}, "eagle_config.use_aux_hidden_state: got False, expected"),
        ("vocab_size", 51, "vocab_size: got 51, expected 50"),
        ("draft_vocab_size", 51, "draft_vocab_size: got 51, expected at most"),
        ("target_hidden_size", 32, "target_hidden_size: got 32, expected 16"),
        ("intermediate_size", "20", "intermediate_size: got '20', expected a positive integer"),
        ("num_key_value_heads", 3, "num_attention_heads: got 4, expected a multiple"),
        ("rope_theta", 0, "rope_theta: got"),
        ("rope_scaling", {"rope_type": "longrope", "factor": 32.0}, "rope_scaling.rope_type: got 'longrope'"),
        ("rope_scaling", {"type": "linear", "factor": -1}, "rope_scaling.factor: got -1, expected a positive number"),
        ("rope_scaling", {"type": "llama3", "factor": 8.0}, "rope_scaling.low_freq_factor: missing"),
        ("num_aux_hidden_states", 4, "num_aux_hidden_states: got 4, expected 3"),
        ("architectures", [["x"]], "architectures: got [['x']], expected ['"),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor: got 0.5, expected none or 1"),
        ("eagle_config", [1], "eagle_config: got [1], expected an object"),
    ],
)
def test_config_that_does_not_fit_is_refused(
    tmp_path: pathlib.Path, form: str, field: str, value: Any, message: str
) -> None:
    save_draft(tmp_path / "head", make_draft(head_dim=4), target=TARGET, dtype="float32", form=form)
    _, config = tiny_heads.read(tmp_path / "head")
    layer = config.get("transformer_layer_config", {})
    if field in layer and field not in config:
        alter(tmp_path / "head", transformer_layer_config=layer | {field: value})
    else:
        alter(tmp_path / "head", **{field: value})
    with pytest.raises(DraftFormatError) as caught:
        load_draft(tmp_path / "head", target=TARGET)
    assert message in str(caught.value)
