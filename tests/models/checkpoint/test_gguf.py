"""GGUF conversion: weights, names, tokenizer, and refusal of what is not known."""

import json
import string
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from eagle3_jax.models.checkpoint import gguf


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
