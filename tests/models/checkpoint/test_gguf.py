"""What GGUF metadata say in place of a folder's files: config, tokenizer; the packaged model's conversion."""

import json
import string
import types
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from eagle3_jax.models.checkpoint import gguf, gguf_tokenizer
from eagle3_jax.models.families import read_shape
from eagle3_jax.models.layers import RopeScaling, rope_frequencies


def test_not_a_gguf_file(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04 not it at all, but long enough to be read as a header")
    with pytest.raises(ValueError, match="not a GGUF"):
        gguf.convert(path, tmp_path)


TOKENS = ["<|pad|>", "<|end|>", *string.ascii_lowercase, *string.digits, "Ġ", "ab", "12"]
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN = 4, 2, 8, 32, 64


def interleaved(weight, heads):
    """Hugging Face rows -> GGUF rows, as llama.cpp's converter permutes them."""
    return weight.reshape(heads, 2, HEAD_DIM // 2, -1).swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture
def written(tmp_path):
    """A GGUF file of one block, and what stands in it by the names of Hugging Face."""
    rng = np.random.default_rng(0)
    attention, mlp, kv = "model.layers.0.self_attn", "model.layers.0.mlp", KV_HEADS * HEAD_DIM
    shapes = {"model.embed_tokens": (len(TOKENS), HIDDEN), "model.norm": (HIDDEN,)}
    shapes |= {f"model.layers.0.{name}_layernorm": (HIDDEN,) for name in ("input", "post_attention")}
    shapes |= {f"{attention}.q_proj": (HEADS * HEAD_DIM, HIDDEN), f"{attention}.k_proj": (kv, HIDDEN)}
    shapes |= {f"{attention}.v_proj": (kv, HIDDEN), f"{attention}.o_proj": (HIDDEN, HEADS * HEAD_DIM)}
    shapes |= {f"{mlp}.gate_proj": (FFN, HIDDEN), f"{mlp}.up_proj": (FFN, HIDDEN), f"{mlp}.down_proj": (HIDDEN, FFN)}
    weights = {f"{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    stems = "token_embd output_norm attn_norm ffn_norm attn_q attn_k attn_v attn_output ffn_gate ffn_up ffn_down"
    names = dict(zip(weights, stems.split(), strict=True))
    writer = GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(12345.0)
    writer.add_layer_norm_rms_eps(3e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.CONTROL] * 2 + [TokenType.NORMAL] * (len(TOKENS) - 2))
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{{ messages }}")
    for name, value in weights.items():
        layer = "blk.0." if ".layers." in name else ""
        rotated = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        stored = interleaved(value, rotated) if rotated else value
        if "down_proj" in name:
            quantised = quantize(stored, GGMLQuantizationType.Q8_0)
            writer.add_tensor(f"{layer}{names[name]}.weight", quantised, raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(f"{layer}{names[name]}.weight", stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "x.gguf", weights


def test_a_converted_model_is_what_was_written(written, tmp_path):
    path, weights = written
    gguf.convert(path, tmp_path)
    got = load_file(tmp_path / "model.safetensors")
    assert got.keys() == weights.keys()
    for name, value in weights.items():
        if "down_proj" in name:  # 8 bits, one scale for 32 numbers: at most half a step of the largest away
            step = np.abs(value).reshape(HIDDEN, -1, 32).max(-1).repeat(32, -1) / 127
            np.testing.assert_array_less(np.abs(got[name] - value), 0.51 * step + 1e-3 * np.abs(value))
        else:
            np.testing.assert_array_equal(got[name], value, err_msg=name)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rms_norm_eps"] == pytest.approx(3e-5, rel=1e-6)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": FFN, "head_dim": HEAD_DIM, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": len(TOKENS)}
    others = {"rope_theta": 12345.0, "tie_word_embeddings": True, "max_position_embeddings": 512}
    assert (sizes | others | {"bos_token_id": 1, "eos_token_id": 1}).items() <= config.items()


def test_a_converted_tokenizer_splits_digits_and_keeps_control_tokens_whole(written, tmp_path):
    gguf.convert(written[0], tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("cab 12<|end|>", add_special_tokens=False)["input_ids"]
    assert [TOKENS[i] for i in ids] == ["c", "ab", "Ġ", "1", "2", "<|end|>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "cab 12"
    assert (tokenizer.bos_token, tokenizer.pad_token) == ("<|end|>", "<|pad|>")
    assert tokenizer.chat_template == "{{ messages }}"


SAID = {
    "context_length": 131072,
    "embedding_length": 32,
    "block_count": 4,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.dimension_count": 32,
    "rope.freq_base": 5e5,
}
OWN = {
    "phi3": {"rope.scaling.original_context_length": 4096},
    "mistral3": {"rope.scaling.type": "yarn", "rope.scaling.factor": 16.0, "attention.temperature_scale": 0.1}
    | {"rope.scaling.original_context_length": 16384, "rope.scaling.yarn_log_multiplier": 1.0},
}


def config_of(architecture: str, *tensors: tuple[str, Any], **changes: Any) -> Any:
    """The config of a file that says `SAID` and these; `__` in a key is a dot, None takes a key away."""
    said = SAID | OWN.get(architecture, {}) | {key.replace("__", "."): x for key, x in changes.items()}
    fields = {f"{architecture}.{key}": x for key, x in said.items() if x is not None}
    fields |= {"general.architecture": architecture, "tokenizer.ggml.tokens": TOKENS}
    reader: Any = types.SimpleNamespace(tensors=[types.SimpleNamespace(name=name, data=x) for name, x in tensors])
    return read_shape(gguf.config(reader, fields))


@pytest.mark.parametrize("architecture", gguf.CLASSES)
def test_every_architecture_has_its_class(architecture):
    config = config_of(architecture)
    assert config.architecture == gguf.CLASSES[architecture]
    assert (config.head_dim, config.rope_theta, config.vocab_size) == (32, 5e5, len(TOKENS))
    assert config.tie_word_embeddings and not config_of(architecture, ("output.weight", None)).tie_word_embeddings


def test_what_some_architectures_say_beside_sizes():
    windows = {"attention__sliding_window": 9, "attention__sliding_window_pattern": [True, False, True, True]}
    assert config_of("olmo2", **windows).local_layers == (0, 2, 3)
    assert config_of("olmo2", **windows).architecture == "Olmo3ForCausalLM"
    assert config_of("phi3", attention__sliding_window=9).local_layers == (0, 1, 2, 3)
    assert config_of("phi3", attention__sliding_window=0, rope__dimension_count=24).rope_dim == 24
    factors = [(f"rope_factors_{name}.weight", np.full(16, x, np.float32)) for name, x in (("short", 1), ("long", 2))]
    assert config_of("phi3", *factors).rope_scaling.long_factor == (2.0,) * 16
    assert config_of("mistral3").rope_scaling.llama_4_scaling_beta == 0.1
    assert config_of("granite", embedding_scale=3.0, logit_scale=4.0).logits_scaling == 4
    assert config_of("seed_oss", ("blk.0.attn_q.bias", None)).attention_bias
    assert config_of("qwen2", rope__scaling__factor=4.0).rope_scaling.factor == 4  # linear, as llama.cpp has it


def test_llama_3s_scaling_is_read_from_its_frequencies():
    scaling = RopeScaling(32.0, 1.0, 4.0, 8192)
    factors = np.array(rope_frequencies(32, 5e5) / rope_frequencies(32, 5e5, scaling))
    assert config_of("llama", ("rope_freqs.weight", factors)).rope_scaling == scaling
    assert config_of("llama", ("rope_freqs.weight", np.ones_like(factors))).rope_scaling is None
    factors[8] *= 1.01
    with pytest.raises(ValueError, match="rope_freqs.weight: got other factors than Llama 3's, expected those of low"):
        config_of("llama", ("rope_freqs.weight", factors))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": None}, "qwen3.block_count: got None, expected a number"),
        ({"attention__head_count_kv": [2, 2, 0, 2]}, r"head_count_kv: got \[2, 2, 0, 2\], expected a number"),
        ({"expert_count": 8}, "got {'qwen3.expert_count': 8}, which no Qwen3ForCausalLM has"),
        ({"attention__sliding_window": 64}, "got {'qwen3.attention.sliding_window': 64}, which no Qwen3"),
        ({"rope__scaling__type": "yarn"}, "rope_scaling.factor: missing"),
        ({"rope__scaling__yarn_attn_factor": 0.8}, "yarn_attn_factor: got 0.8, expected YaRN's own"),
        ({"rope__dimension_count": 16}, "partial_rotary_factor: got 0.5, expected none or 1"),
    ],
)
def test_what_metadata_do_not_tell_is_refused_by_key(changes, message):
    with pytest.raises(ValueError, match=message):
        config_of("qwen3", **changes)


def tokenizer_of(folder: Any, tokens: dict[str, TokenType], **said: Any) -> Tokenizer:
    said = {f"tokenizer.ggml.{key}": x for key, x in said.items()}
    fields = {"general.architecture": "llama", "llama.context_length": 64, "tokenizer.ggml.tokens": list(tokens)}
    gguf_tokenizer.save_tokenizer(fields | {"tokenizer.ggml.token_type": list(tokens.values())} | said, folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_pieces_merge_by_their_scores_and_other_bytes_stand_alone(tmp_path):
    special = {"<unk>": TokenType.UNKNOWN, "<s>": TokenType.CONTROL, "</s>": TokenType.CONTROL}
    pieces = ["▁", "a", "b", "c", "ab", "bc", "▁ab", "abc"]
    tokens = special | {f"<0x{i:02X}>": TokenType.BYTE for i in range(256)} | dict.fromkeys(pieces, TokenType.NORMAL)
    scores = [0.0] * 259 + [-8.0, -8.0, -8.0, -8.0, -2.0, -1.0, -4.0, -3.0]
    found = tokenizer_of(tmp_path, tokens, model="llama", scores=scores)
    assert found.encode("abc é</s>ab").tokens[:4] == ["<s>", "▁", "abc", "▁"]  # bc, then abc; ▁ab would have been next
    assert found.encode("abc é</s>ab").tokens[4:] == ["<0xC3>", "<0xA9>", "</s>", "▁ab"]
    assert found.decode(found.encode("abc é").ids) == "abc é"
    alone = tokenizer_of(tmp_path, tokens, model="llama", scores=scores, add_space_prefix=False, add_bos_token=False)
    assert alone.encode("ab").tokens == ["ab"]


def test_bytes_are_split_as_the_tokenizer_s_name_says(tmp_path):
    letters = ["1", "2", "Ġ", "a", "'", "S", "12", "'S", "Ġa", "a'", "aĠ", "<|eot_id|>"]
    tokens = dict.fromkeys(letters, TokenType.NORMAL) | {"<|eot_id|>": TokenType.CONTROL}
    merges = ["1 2", "' S", "Ġ a", "a '", "a Ġ"]
    for pre, expected in {
        "llama-bpe": ["<|eot_id|>", "a", "'S", "Ġa", "12", "1"],
        "qwen2": ["a", "'S", "Ġa", "1", "2", "1"],
        "smollm": ["a", "'", "S", "Ġa", "1", "2", "1"],
        "gpt-2": ["a", "'", "S", "Ġa", "12", "1"],
    }.items():
        found = tokenizer_of(tmp_path, tokens, model="gpt2", pre=pre, merges=merges, bos_token_id=11)
        assert found.encode("a'S a121").tokens == expected, pre
    for said, message in (
        ({"model": "bert"}, "tokenizer.ggml.model: got 'bert', expected 'gpt2' or 'llama'"),
        ({"model": "gpt2", "pre": "default"}, "tokenizer.ggml.pre: got 'default', expected 'gpt-2' or"),
        ({"model": "gpt2", "pre": "qwen2"}, "tokenizer.ggml.merges: missing"),
        ({"model": "llama"}, "tokenizer.ggml.scores: missing"),
    ):
        with pytest.raises(ValueError, match=message):
            tokenizer_of(tmp_path, tokens, **said)


def test_all_tokens_that_end_an_answer():
    tokens = {"tokenizer.ggml.tokens": ["a", "<|im_end|>", "<|endoftext|>", "<turn>", "<x>"]}
    assert gguf_tokenizer.ends(tokens | {"tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.eot_token_id": 4}) == [
        1,
        2,
        4,
    ]
