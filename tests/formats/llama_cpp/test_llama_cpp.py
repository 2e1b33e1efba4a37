"""Heads as one GGUF file: names, keys and types, round trips, what llama.cpp cannot run, and damaged files."""

import dataclasses
import json
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_heads
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants
from tiny_blocks import make_block_head
from tiny_heads import AUX_KEY, TARGET, assert_same, make_draft

from eagle3_jax.export.__main__ import main
from eagle3_jax.formats import draft_models, files, heads
from eagle3_jax.formats.blocks.kinds import BLOCKS
from eagle3_jax.formats.eagle3 import EAGLE3
from eagle3_jax.formats.files import DraftFormatError
from eagle3_jax.formats.kinds import StoredHead
from eagle3_jax.models.checkpoint.fetch import TargetError
from eagle3_jax.models.drafts.dflash import FULL, SLIDING
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.layers import LinearScaling, RopeScaling, YarnScaling

WIDE = dataclasses.replace(TARGET, hidden_size=32, vocab_size=64)
KINDS = {kind.name: kind for kind in (EAGLE3, *BLOCKS)}
SIZES = {"hidden_size": 32, "target_hidden_size": 32, "intermediate_size": 64}
BLOCK = {"vocab_size": 64, "draft_vocab_size": 64, "aux_layers": (1, 6, 9), "selector_rank": 32, "markov_rank": 32}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_heads.write_named_target(tmp_path_factory.mktemp("llama_cpp") / "target", WIDE)


def stored(
    name: str, target: str | None, dtype: str = "float32", layers: Any = (2, 6, 9), **changes: Any
) -> StoredHead:
    if name == "eagle3":
        own = dataclasses.replace(WIDE, aux_layers=layers)
        sizes: dict[str, Any] = {"head_dim": 8, "intermediate_size": 64} | changes
        return EAGLE3.stored(make_draft(target=own, **sizes), own, dtype, target)
    head = make_block_head(KINDS[name].network, **SIZES | BLOCK | changes)
    ids = jnp.arange(64) if head.config.draft_vocab_size == 64 else 2 * jnp.arange(head.config.draft_vocab_size)
    return KINDS[name].stored(Draft(head, ids.astype(jnp.int32)), WIDE, dtype, target)


def written(folder: pathlib.Path, head: StoredHead) -> GGUFReader:
    head.kind.write(folder, head, "llama.cpp")
    assert [path.name for path in folder.iterdir()] == ["head.gguf"]
    return GGUFReader(folder / "head.gguf")


def keys(reader: GGUFReader) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}


def rewritten(path: pathlib.Path, tensors: dict[str, Any] | None = None, **fields: Any) -> None:
    """The file with other tensors and keys (`__` for a dot); None removes."""
    reader = GGUFReader(path)
    held = {tensor.name: (np.array(tensor.data), tensor.tensor_type) for tensor in reader.tensors}
    held |= {name: x if x is None else (x, None) for name, x in (tensors or {}).items()}
    changes = {name.replace("__", "."): value for name, value in fields.items()}
    writer = GGUFWriter(
        path.with_suffix(".new"), changes.pop("general.architecture", reader.fields["general.architecture"].contents())
    )
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")) and changes.get(name, "") is not None:
            types: Any = [*field.types, None]
            writer.add_key_value(name, changes.get(name, field.contents()), types[0], types[1])
    for name in changes.keys() - reader.fields.keys():
        writer.add_string(name, changes[name])
    for name, tensor in held.items():
        if tensor is not None:
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".new").replace(path)


TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.merges": ["a b", "c d"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.chat_template": "{{ messages }}",
}
LLAMA = {
    "context_length": 64,
    "embedding_length": 32,
    "block_count": 1,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 8,
    "attention.value_length": 8,
    "attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
    "rope.dimension_count": 8,
    "rope.freq_base": 10000.0,
}
LAYERS = LLAMA | {"context_length": 128, "block_count": 2, "block_size": 4, "target_layers": [1, 6, 9]}
LAYERS |= {"attention.causal": False, "sample_from_anchor": False}
SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 32, "selector_top_k": 5}
KEYS = {
    "eagle3": LLAMA | {"target_layers": [2, 6, 9], "target_hidden_size": 32},
    "dflash": LAYERS,
    "dspark": LAYERS | {"sample_from_anchor": True, "has_confidence_head": True},
    "dflash2": LAYERS | SELECTOR,
}
BLOCK_TENSORS = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
TENSORS = {
    "eagle3": {"fc", "output_norm", "output", "d2t", "blk.0.attn_norm_2"},
    "dflash": {"fc", "output_norm", "enc.output_norm"},
}
TENSORS["dspark"] = TENSORS["dflash"] | {"markov_w1", "markov_w2", "conf_proj"}
TENSORS["dflash2"] = TENSORS["dflash"] | {"selector_predecessor", "selector_successor", "selector_hidden"}
CONVOLUTIONS = {f"{part}_conv_{tensor}" for part in ("attn", "ffn") for tensor in ("base", "proj")}


@pytest.mark.parametrize("name", KINDS)
def test_names_and_keys_are_those_of_llama_cpps_loader(tmp_path: pathlib.Path, target: str, name: str) -> None:
    reader = written(tmp_path / "head", stored(name, target))
    found, arch = keys(reader), "eagle3" if name == "eagle3" else "dflash"
    assert {key: found.pop(key) for key in TOKENIZER} == TOKENIZER
    tokens, kinds = found.pop("tokenizer.ggml.tokens"), found.pop("tokenizer.ggml.token_type")
    assert (len(tokens), tokens[0], tokens[5], tokens[33]) == (64, "<0>", "c", "[PAD33]")
    assert [kinds[i] for i in (0, 2, 5, 33)] == [3, 4, 1, 5]  # control, user-defined, normal, unused
    assert found.pop("tokenizer.ggml.mask_token_id", None) == (None if name == "eagle3" else 59)
    own = json.loads(found.pop("eagle3_jax.config"))
    assert own.get(AUX_KEY, "") == (None if name == "eagle3" else "")  # the default ones
    assert found == {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in KEYS[name].items()}
    layers = 1 if name == "eagle3" else 2
    blocks = {f"blk.{i}.{part}" for i in range(layers) for part in BLOCK_TENSORS}
    blocks |= {f"blk.{i}.attn_{x}_norm" for i in range(layers) for x in "qk" if name != "eagle3"}
    blocks |= {f"blk.{i}.{part}" for i in range(layers) for part in CONVOLUTIONS if name == "dflash2"}
    held = {tensor.name: tensor for tensor in reader.tensors}
    assert {x.removesuffix(".weight").removesuffix(".bias") for x in held} == TENSORS[name] | blocks
    assert {x for x in held if not x.endswith(".weight")} == {
        "eagle3": {"d2t"},
        "dflash": set(),
        "dspark": {"conf_proj.bias"},
        "dflash2": {f"blk.{i}.{part}_conv_base" for i in range(2) for part in ("attn", "ffn")},
    }[name]
    if name == "eagle3":
        assert held["d2t"].tensor_type == GGMLQuantizationType.I64 and held["d2t"].data.tolist() == tiny_heads.IDS


def test_rows_of_queries_and_keys_are_interleaved_in_eagle3_alone(tmp_path: pathlib.Path, target: str) -> None:
    for name, layer in (("eagle3", "midlayer"), ("dflash", "layers.0")):
        head = stored(name, target)
        held = {tensor.name: tensor.data for tensor in written(tmp_path / name, head).tensors}
        for part, count in (("q", 4), ("k", 2), ("v", 2)):
            rows = head.tensors[f"{layer}.self_attn.{part}_proj.weight"]
            if name == "eagle3" and part != "v":
                rows = rows.reshape(count, 2, 4, -1).swapaxes(1, 2).reshape(rows.shape)
            np.testing.assert_array_equal(held[f"blk.0.attn_{part}.weight"], rows)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "q8_0", "q4_0"])
@pytest.mark.parametrize("name", KINDS)
def test_a_head_comes_back_as_its_types_hold_it(tmp_path: pathlib.Path, target: str, name: str, dtype: str) -> None:
    head = stored(name, target, dtype)
    reader = written(tmp_path / "head", head)
    again = heads.read(tmp_path / "head")
    assert (again.kind, again.config) == (head.kind, head.config)
    np.testing.assert_array_equal(again.token_ids, head.token_ids)
    kind = GGMLQuantizationType[{"float32": "F32", "float16": "F16", "bfloat16": "BF16"}.get(dtype, dtype.upper())]
    types = {tensor.name: tensor.tensor_type for tensor in reader.tensors}
    assert types["fc.weight"] == types["blk.0.attn_q.weight"] == types["blk.0.ffn_down.weight"] == kind
    assert types["output_norm.weight"] == GGMLQuantizationType.F32
    assert again.tensors.keys() == head.tensors.keys()
    for name_, got in again.tensors.items():
        expected = head.tensors[name_]
        if head.blocks and expected.ndim == 2 and len(expected) > 1:
            expected = quants.dequantize(quants.quantize(expected, kind), kind)
        np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32), name_)
    shape = dataclasses.replace(WIDE, aux_layers=(2, 6, 9))
    for place in (tmp_path / "head", tmp_path / "head/head.gguf"):
        if name == "eagle3":  # the others leave their LM head to a loaded target
            draft = heads.load_draft(place, target=shape, dtype=jnp.float32)
            rows = np.asarray(draft.head.fc[...]).T
            np.testing.assert_array_equal(rows, again.tensors["fc.weight"].astype(np.float32))
        assert heads.read(place, shape).same(again)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("eagle3", {"layers": (1, 6, 9)}),
        ("eagle3", {"rms_norm_eps": 1e-6, "rope_theta": 12345.678}),  # no float32
        ("eagle3", {"norm_before_residual": True, "norm_before_fc": True}),
        ("eagle3", {"rope_scaling": RopeScaling(8.0, 1.0, 4.0, 16)}),
        ("eagle3", {"rope_scaling": LinearScaling(2.0)}),
        ("eagle3", {"ids": list(range(64))}),
        ("dflash", {"draft_vocab_size": 24}),
        ("dflash", {"is_causal": True}),
        ("dflash", {"layer_types": (SLIDING, FULL), "sliding_window": 3, "is_causal": False}),
        ("dspark", {"confidence": False, "draft_vocab_size": 24}),
        ("dflash2", {"layer_types": (SLIDING,) * 2, "sliding_window": 3}),
    ],
)
def test_every_property_that_runs_there_comes_back(
    tmp_path: pathlib.Path, target: str, name: str, changes: Any
) -> None:
    head = stored(name, target, **changes)
    reader = written(tmp_path / "head", head)
    assert heads.read(tmp_path / "head").same(head)
    held = {tensor.name: tensor.data for tensor in reader.tensors}
    if (scaling := getattr(head.config, "rope_scaling", None)) is not None:
        expected = [2.0] * 4 if isinstance(scaling, LinearScaling) else [8.0, 8.0, 8.0, 8.0]
        expected[0] = 2.0 if isinstance(scaling, LinearScaling) else held["rope_freqs.weight"][0]
        np.testing.assert_allclose(held["rope_freqs.weight"], expected, rtol=1e-6)


def test_a_file_of_another_writer_is_read_by_the_loaders_keys_alone(tmp_path: pathlib.Path, target: str) -> None:
    for name in KINDS:
        head = stored(name, target)
        written(tmp_path / name, head)
        rewritten(tmp_path / name / "head.gguf", eagle3_jax__config=None)
        again = heads.read(tmp_path / name)
        config = dataclasses.replace(again.config, rms_norm_eps=head.config.rms_norm_eps)
        layers = {"aux_layers": (2, 6, 9)} if name == "eagle3" else {}
        assert config == dataclasses.replace(head.config, **layers)
        assert again.tensors.keys() == head.tensors.keys()


def test_the_tokenizer_of_a_gguf_target_is_copied(tmp_path: pathlib.Path) -> None:
    name = tiny_heads.write_named_target(tmp_path / "target", WIDE)
    written(tmp_path / "first", stored("eagle3", name))
    rewritten(tmp_path / "first/head.gguf", tokenizer__ggml__pre="llama-bpe")
    (tmp_path / "first/head.gguf").replace(tmp_path / "target/model.gguf")
    (tmp_path / "target/tokenizer.json").unlink()
    found = keys(written(tmp_path / "second", stored("eagle3", name)))
    assert found["tokenizer.ggml.pre"] == "llama-bpe" and found["tokenizer.ggml.merges"] == ["a b", "c d"]
    tokens = found["tokenizer.ggml.tokens"][:63]
    rewritten(tmp_path / "target/model.gguf", tokenizer__ggml__tokens=tokens)
    with pytest.raises(TargetError, match=r"tokenizer.ggml.tokens: got 63, expected vocab_size = 64"):
        EAGLE3.write(tmp_path / "third", stored("eagle3", name), "llama.cpp")


ENDINGS, SPACES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.mark.parametrize(
    ("changes", "keys_"),
    [
        ({"byte_fallback": True}, ("llama", "default")),
        (
            {"pattern": ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES},
            ("gpt2", "llama-bpe"),
        ),
        (
            {"pattern": ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES},
            ("gpt2", "qwen2"),
        ),
        ({"pattern": "another"}, ("gpt2", "default")),
    ],
)
def test_a_tokenizer_is_named_as_llama_cpp_names_it(tmp_path: pathlib.Path, changes: Any, keys_: Any) -> None:
    name = tiny_heads.write_named_target(tmp_path / "target", WIDE)
    path = tmp_path / "target/tokenizer.json"
    values = json.loads(path.read_text())
    values["model"] |= {"byte_fallback": changes.get("byte_fallback", False)}
    if pattern := changes.get("pattern"):
        values["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": pattern}}
    path.write_text(json.dumps(values))
    found = keys(written(tmp_path / "head", stored("eagle3", name)))
    assert (found["tokenizer.ggml.model"], found["tokenizer.ggml.pre"]) == keys_
    assert ("tokenizer.ggml.scores" in found) == (keys_[0] == "llama") == ("tokenizer.ggml.merges" not in found)
    values["model"]["type"] = "WordPiece"
    path.write_text(json.dumps(values))
    with pytest.raises(TargetError, match=r"model.type: got 'WordPiece', expected 'BPE'"):
        EAGLE3.write(tmp_path / "other", stored("eagle3", name), "llama.cpp")


YARN = YarnScaling(4.0, 1024)
REFUSED = [
    (
        "eagle3",
        {"fc_norm": True},
        r"fc_norm: got True, expected False; llama.cpp \(to 2026.10\): fails; without it: --dr",
    ),
    ("eagle3", {"norm_output": True}, r"norm_output: got True, .*: ignored; without it: --draft.no-norm-output"),
    ("eagle3", {"layers": (1, 2, 6, 9)}, r"target.aux_layers: got 4 layers, expected 3; .*--target.aux-layers"),
    ("eagle3", {"rope_scaling": YARN}, r"rope_scaling: got 'yarn', expected none; llama.cpp"),
    ("dflash", {"rope_scaling": YARN}, r"rope_scaling: got a scaling, expected none; llama.cpp"),
    ("dflash", {"layer_types": (SLIDING, FULL), "sliding_window": 3}, r"layer_types: .* one causality; llama.cpp"),
    (
        "dflash2",
        {"draft_vocab_size": 24},
        r"draft_vocab_size: got 24, expected vocab_size = 64, as the selector has no",
    ),
    (
        "dflash2",
        {"selector_top_k": 6},
        r"selector_top_k: got 6, expected k \(k \+ 1\) up to hidden_size = 32; llama.cpp",
    ),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_what_llama_cpp_cannot_run_is_refused_by_field(
    tmp_path: pathlib.Path, target: str, name: str, changes: Any, message: str
) -> None:
    head = stored(name, target, **changes)
    with pytest.raises(DraftFormatError, match=message):
        head.kind.write(tmp_path / "head", head, "llama.cpp")
    assert not (tmp_path / "head").exists()


def test_a_head_without_its_target_and_blocks_in_other_forms_are_refused(tmp_path: pathlib.Path, target: str) -> None:
    with pytest.raises(DraftFormatError, match="target: unknown, expected the name of the target"):
        EAGLE3.write(tmp_path / "head", stored("eagle3", None), "llama.cpp")
    with pytest.raises(
        DraftFormatError, match="export.dtype: got 'q8_0', expected a dtype of floats in the form 'vllm'"
    ):
        EAGLE3.write(tmp_path / "head", stored("eagle3", target, "q8_0"), "vllm")
    name = tiny_heads.write_named_target(tmp_path / "other", dataclasses.replace(WIDE, vocab_size=80))
    with pytest.raises(DraftFormatError, match="vocab_size: got 64, expected 80, the target's"):
        EAGLE3.write(tmp_path / "head", stored("eagle3", name), "llama.cpp")
    assert not (tmp_path / "head").exists()


FAULTS = [
    ({"fc.weight": None}, {}, r"missing tensor fc.weight \[32, 96\]"),
    ({"fc.weight": np.zeros((32, 64), np.float32)}, {}, r"fc.weight: got shape \[32, 64\], expected \[32, 96\]"),
    (
        {"blk.0.attn_q.weight": np.zeros((30, 64), np.float32)},
        {},
        r"q_proj.weight: got shape \[30, 64\], expected \[32",
    ),
    ({"blk.0.attn_q.bias": np.zeros(32, np.float32)}, {}, r"surplus tensor blk.0.attn_q.bias"),
    ({"d2t": np.array([0, 3, 4, 17, 20, 64])}, {}, r"d2t: got int64 0..64, expected target ids below 64"),
    ({"d2t": np.array([0, 4, 3, 17, 20, 49])}, {}, r"d2t: as offsets .*: token ids: .* expected ascending"),
    ({"rope_freqs.weight": np.ones(4, np.float32)}, {}, r"surplus tensor rope_freqs.weight"),
    ({}, {"eagle3__rope__scaling__type": "yarn"}, r"rope_scaling.factor: missing"),
    ({}, {"eagle3__embedding_length": None}, r"hidden_size: missing"),
    ({}, {"general__architecture": "llama"}, r"general.architecture: got 'llama', expected 'eagle3' or 'dflash'"),
]


@pytest.mark.parametrize(("tensors", "fields", "message"), FAULTS)
def test_a_file_that_does_not_fit_is_refused_by_name(
    tmp_path: pathlib.Path, target: str, tensors: Any, fields: Any, message: str
) -> None:
    written(tmp_path / "head", stored("eagle3", target))
    rewritten(tmp_path / "head/head.gguf", tensors, **fields)
    with pytest.raises(DraftFormatError, match=message):
        heads.read(tmp_path / "head/head.gguf")


def test_a_truncated_file_is_refused(tmp_path: pathlib.Path, target: str) -> None:
    written(tmp_path / "head", stored("dspark", target))
    path = tmp_path / "head/head.gguf"
    content = path.read_bytes()
    for kept in (0, 3, 200, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:kept])
        with pytest.raises(DraftFormatError, match=r"head.gguf: truncated, or not a GGUF file"):
            heads.read(path)


def test_export_converts_to_a_gguf_file_and_from_one(tmp_path: pathlib.Path, target: str, capsys: Any) -> None:
    head = stored("eagle3", None)
    EAGLE3.write(tmp_path / "sglang", head, "sglang")
    here = ("--from", str(tmp_path / "sglang"), "--to", "llama.cpp")
    with pytest.raises(SystemExit, match="target: unknown, expected the name of the target"):
        main([*here, str(tmp_path / "gguf")])
    main([*here, str(tmp_path / "gguf"), "--target", target])
    main([*here, str(tmp_path / "q4_0"), "--target", target, "--dtype", "q4_0"])
    assert "served by llama.cpp 2026.10" in capsys.readouterr().err
    assert heads.read(tmp_path / "q4_0").tensors["fc.weight"].std() != head.tensors["fc.weight"].std()
    main(["--from", str(tmp_path / "gguf/head.gguf"), "--to", "sglang", str(tmp_path / "again")])
    assert_same(heads.load_draft(tmp_path / "again", target=WIDE), heads.load_draft(tmp_path / "sglang", target=WIDE))
    before, after = (json.loads((tmp_path / x / "config.json").read_text()) for x in ("sglang", "again"))
    assert before == after
    assert files.file_digests(tmp_path / "gguf").keys() == {"head.gguf"}
    assert draft_models.resolve(str(tmp_path / "gguf/head.gguf")) == tmp_path / "gguf/head.gguf"
