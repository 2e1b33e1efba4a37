"""Converts a Llama-architecture GGUF file to a Hugging Face folder (config.json, model.safetensors, tokenizer).

Quantised tensors are dequantised to float32 on disk, so that nothing is rounded again; the result is the model. All
other code reads Hugging Face folders only.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

from eagle3_jax.models.checkpoint.gguf_file import hf_name, interleaved
from eagle3_jax.models.checkpoint.load import save_tensors

_CONTROL = 3  # gguf.TokenType.CONTROL


def convert(path: pathlib.Path, folder: pathlib.Path) -> None:
    """Converts a file. Raises ValueError: not a GGUF file, or an unsupported architecture, tensor or tokenizer."""
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError) as error:
        raise ValueError(f"{path}: truncated or not a GGUF file ({error})") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    for field, expected in (("general.architecture", "llama"), ("tokenizer.ggml.model", "gpt2")):
        if fields.get(field) != expected:
            raise ValueError(f"{path}: {field}: got {fields.get(field)!r}, expected {expected!r}")
    config = _config(fields, tied=not any(tensor.name == "output.weight" for tensor in reader.tensors))
    tensors = {}
    for tensor in tqdm(reader.tensors, desc="dequantising", unit="tensor"):
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        for part, count in ((".attn_q.", "num_attention_heads"), (".attn_k.", "num_key_value_heads")):
            if part in tensor.name:
                values = values[interleaved(len(values), config[count])]
        tensors[hf_name(tensor.name)] = np.ascontiguousarray(values)
    save_tensors(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _save_tokenizer(fields, folder)


def _config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "rms_norm_eps": float(np.float32(fields["llama.attention.layer_norm_rms_epsilon"])),
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "max_position_embeddings": fields["llama.context_length"],
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
    }


def _save_tokenizer(fields: dict[str, Any], folder: pathlib.Path) -> None:
    """Writes a byte-level BPE tokenizer that splits digits: GGUF's pre-tokenizer "smollm"."""
    pre = fields.get("tokenizer.ggml.pre")
    if pre != "smollm":
        raise ValueError(f"tokenizer.ggml.pre: got {pre!r}, expected 'smollm'")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
