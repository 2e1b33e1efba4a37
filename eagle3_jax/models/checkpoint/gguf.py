"""What a GGUF file says of its model in place of config.json and a tokenizer, as llama.cpp's converter writes it.

`describe` writes these files for a file that is a target by itself. `convert` also writes safetensors of the packaged
model, dequantised to float32, so that nothing is rounded again.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from tqdm import tqdm

from eagle3_jax.models.checkpoint.gguf_file import CLASSES, SIZES, header, hf_name, interleaved
from eagle3_jax.models.checkpoint.gguf_tokenizer import ends, needed, one_of, save_tokenizer
from eagle3_jax.models.checkpoint.load import save_tensors
from eagle3_jax.models.layers import RopeScaling, rope_frequencies
from eagle3_jax.models.rope import THETA

GENERATION = "generation_config.json"
_OPTIONAL = ("attention.head_count_kv", "attention.key_length", "rope.freq_base")
_WINDOW = {"attention.sliding_window": "sliding_window"}
_WINDOWS = _WINDOW | {"attention.sliding_window_pattern": "layer_types"}
_MULTIPLIERS = {
    "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
# Keys of one architecture alone -> config.json's; those of a scaling of RoPE; and what the shapes of tensors say too,
# or no config.json does.
_OWN = {
    **{"phi3": _WINDOW, "olmo2": _WINDOWS, "exaone4": _WINDOWS},
    **dict.fromkeys(("granite", "granitehybrid"), _MULTIPLIERS),
}
_SCALING = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
    "attention.temperature_scale": "llama_4_scaling_beta",
}
_OTHERS = ("vocab_size", "attention.value_length", "rope.dimension_count", "rope.scaling.attn_factor")
_OTHERS += ("rope.scaling.finetuned", "tensor_data_layout")


def describe(path: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes config.json, generation_config.json and the tokenizer of a file that is a target by itself.

    Raises:
        ValueError: not a GGUF file, or what its metadata do not tell, by key.
    """
    reader, fields = _read(path)
    _write(folder / "config.json", config(reader, fields))
    _write(folder / GENERATION, {"eos_token_id": ends(fields)})
    save_tokenizer(fields, folder)


def convert(path: pathlib.Path, folder: pathlib.Path) -> None:
    """Converts a Llama. Raises ValueError: not a GGUF file, or an unsupported architecture, tensor or tokenizer."""
    reader, fields = _read(path)
    one_of(fields, "general.architecture", ("llama",))
    values = config(reader, fields) | {"model_type": "llama", "torch_dtype": "float32"}
    tensors = {}
    for tensor in tqdm(reader.tensors, desc="dequantising", unit="tensor"):
        data = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        for part, count in ((".attn_q.", "num_attention_heads"), (".attn_k.", "num_key_value_heads")):
            if part in tensor.name:
                data = data[interleaved(len(data), values[count])]
        tensors[hf_name(tensor.name)] = np.ascontiguousarray(data)
    save_tensors(tensors, folder / "model.safetensors")
    _write(folder / "config.json", values)
    save_tokenizer(fields, folder)


def config(reader: GGUFReader, fields: dict[str, Any]) -> dict[str, Any]:
    """Reads the values of config.json. Raises ValueError: keys that are missing, and others that are not known."""
    architecture = one_of(fields, "general.architecture", CLASSES)
    name, prefix = CLASSES[architecture], f"{architecture}."
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    own = {key.removeprefix(prefix): value for key, value in fields.items() if key.startswith(prefix)}
    for key in SIZES:
        if not isinstance(got := own.get(key), int | float) and (got is not None or key not in _OPTIONAL):
            raise ValueError(f"{prefix}{key}: got {got!r}, expected a number")
    known = SIZES | _OWN.get(architecture, {})
    values = {theirs: own[ours] for ours, theirs in known.items() if ours in own}
    scaling = {theirs: own[ours] for ours, theirs in _SCALING.items() if ours in own}
    if scaling.get("factor"):
        scaling = {"rope_type": "linear"} | scaling
    factor = own.get("rope.scaling.yarn_attn_factor")
    if factor and not np.isclose(factor, 0.1 * np.log(scaling.get("factor", 1)) + 1, rtol=1e-4):
        expected = "YaRN's own: readers differ in what another one multiplies; put config.json beside the file"
        raise ValueError(f"{prefix}rope.scaling.yarn_attn_factor: got {factor}, expected {expected}")
    read = {*known, *_SCALING, *_OTHERS, "rope.scaling.yarn_attn_factor"}
    if unread := {prefix + key: value for key, value in own.items() if value and key not in read}:
        raise ValueError(f"got {unread}, which no {name} has")
    heads, layers = values["num_attention_heads"], values["num_hidden_layers"]
    size = values.setdefault("head_dim", values["hidden_size"] // heads)
    if (turned := own.get("rope.dimension_count", size)) != size:
        values["partial_rotary_factor"] = turned / size
    values = {"rope_theta": THETA, "num_key_value_heads": heads} | values
    if isinstance(kinds := values.get("layer_types"), list):
        values["layer_types"] = [f"{'sliding' if local else 'full'}_attention" for local in kinds]
    elif kinds is not None:
        values["sliding_window_pattern"] = values.pop("layer_types")
    if architecture == "olmo2" and values.get("sliding_window"):
        name = "Olmo3ForCausalLM"
    if architecture == "phi3":
        values["sliding_window"] = values.get("sliding_window") or None
        values["original_max_position_embeddings"] = needed(fields, f"{prefix}rope.scaling.original_context_length")
        scaling = {}
        if "rope_factors_long.weight" in tensors:
            lists = {f"{x}_factor": tensors[f"rope_factors_{x}.weight"].data.tolist() for x in ("short", "long")}
            scaling = {"rope_type": "longrope", **lists}
    if architecture == "granitehybrid":
        values |= {"shared_intermediate_size": values["intermediate_size"], "layer_types": ["attention"] * layers}
        values["position_embedding_type"] = "rope" if own.get("rope.scaling.finetuned", True) else None
    if "mscale_all_dim" in scaling:
        scaling["mscale"] = 1.0
    if scaling.get("rope_type", "none") == "none":
        scaling = _llama3(tensors, turned, values["rope_theta"])
    tokens = needed(fields, "tokenizer.ggml.tokens")
    return {
        "architectures": [name],
        **values,
        **({"rope_scaling": scaling} if scaling else {}),
        "hidden_act": "silu",
        "vocab_size": len(tokens),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": False,
        **{f"{x}_token_id": fields.get(f"tokenizer.ggml.{x}_token_id") for x in ("bos", "eos")},
    }


def _llama3(tensors: dict[str, Any], size: int, theta: float) -> dict[str, Any]:
    """Reads Llama 3's scaling from the factors of its frequencies; empty if there is none."""
    if (held := tensors.get("rope_freqs.weight")) is None or (held.data == 1).all():
        return {}
    found = RopeScaling(float(held.data.max()), 1.0, 4.0, 8192)
    plain, scaled = (np.asarray(rope_frequencies(size, theta, scaling)) for scaling in (None, found))
    if held.data.shape != plain.shape or not np.allclose(held.data, plain / scaled, rtol=1e-4):
        expected = "those of low_freq_factor 1, high_freq_factor 4 and 8192 original positions, or config.json beside"
        raise ValueError(f"rope_freqs.weight: got other factors than Llama 3's, expected {expected}")
    return {"rope_type": "llama3", **found.__dict__}


def _read(path: pathlib.Path) -> tuple[GGUFReader, dict[str, Any]]:
    reader = header(path)
    return reader, {name: field.contents() for name, field in reader.fields.items()}


def _write(path: pathlib.Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")
