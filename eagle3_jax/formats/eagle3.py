"""Heads of EAGLE-3 and EAGLE-3.1 on disk, in the forms of `forms`, and the engines that run them.

docs/engines.md repeats `SINCE`.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

from eagle3_jax.formats import engines, fields
from eagle3_jax.formats.compatibility import FAILS, SILENT, UNKNOWN, Engines
from eagle3_jax.formats.forms import EAGLE3_JAX, FORMS, SPECULATORS, form_of
from eagle3_jax.formats.kinds import StoredHead
from eagle3_jax.formats.stored import StoredKind
from eagle3_jax.formats.tensors import LAYER, LM_HEAD, Tensors, canonical, draft_table
from eagle3_jax.models.drafts.eagle3 import DraftHead, DraftHeadConfig
from eagle3_jax.models.families.vision import TEXT_OF
from eagle3_jax.models.layers import LinearScaling, YarnScaling
from eagle3_jax.models.rope import SCALINGS, THETA
from eagle3_jax.models.target_config import ModelConfig, default_aux_layers

# Each engine, and the newest version whose code was read.
ENGINES = {"SGLang": "0.5.23", "vLLM": "0.33.0", "EAGLE": "cb7e084 (2026-02)", **engines.VERSIONS}
# Property of a head -> for each engine the first version known to run it, or the engine's behaviour instead. Read from
# - SGLang's wheels 0.4.5, 0.4.9, 0.5.2, 0.5.11, 0.5.12 and 0.5.23: models/llama_eagle3.py, llama.py, eagle_worker.py,
#   layers/rotary_embedding (YaRN's factor is called `attn_factor` there);
# - vLLM's wheels 0.21.0, 0.22.0 and 0.32.0 (0.33.0 is the same): models/llama_eagle3.py, llama.py, gpu_model_runner.py;
#   0.32.0 alone: qwen3_eagle3.py, and windows;
#   0.24.0 and 0.25.0: configs/speculators/algos.py. 0.21.0 has neither norm, and exactly three aux layers. Up to 0.24.0
#   the form of speculators passes neither flag on;
# - EAGLE's model/cnets.py, which loads with strict=False.
SINCE = {
    # head: SGLang, vLLM, EAGLE
    "EAGLE-3": ("0.4.5", "0.21.0", "cb7e084"),
    "other aux layers": ("0.4.9", "0.21.0", SILENT),
    "other aux layers of DeepSeek, the first not 2": (SILENT, "0.21.0", SILENT),
    "aux layers, not three": ("0.5.12", "0.22.0", FAILS),
    "aux layer 0 or n": (FAILS, "0.21.0", SILENT),
    "`fc_norm`": ("0.5.12", "0.22.0", SILENT),
    "`norm_output`": ("0.5.12", "0.22.0", SILENT),
    "either in the form `speculators`": (FAILS, "0.25.0", FAILS),
    "`norm_before_residual`": (SILENT, "0.21.0", SILENT),
    "`norm_before_fc`": ("0.5.23", "0.21.0", SILENT),
    "`qk_norm`": (SILENT, "0.32.0", SILENT),
    "`sliding_window`": (SILENT, "0.32.0", SILENT),
    "RoPE `llama3`": ("0.4.5", "0.21.0", FAILS),
    "RoPE `linear`": ("0.4.5", "0.21.0", "cb7e084"),
    "RoPE `linear`, `rope_theta` not 10000": ("0.4.5", "0.21.0", SILENT),
    "RoPE `yarn`": ("0.4.9", "0.21.0", FAILS),
    "RoPE `yarn`, `truncate` false": ("0.5.12", "0.21.0", FAILS),
    "RoPE `yarn`, `attention_factor`": (SILENT, "0.32.0", FAILS),
    "`head_dim` of its own": ("0.4.5", "0.21.0", FAILS),
    "not as wide as the target": ("0.4.5", "0.21.0", "cb7e084"),
    "whole vocabulary": ("0.4.9", "0.21.0", "cb7e084"),
    "the target's LM head": ("0.5.2", "0.21.0", SILENT),
    "rows of the target's LM head": (SILENT, UNKNOWN, SILENT),
}
# Property of a target, whose hidden states an engine must capture -> the same. Read from the target's own class in the
# same versions (vLLM: 0.21.0, 0.22.0 and 0.32.0; 0.33.0 is the same).
# - SGLang: gemma3_causal.py of 0.5.23 captures the output of a layer's last part without the residual (0.5.12 did
#   not); mimo.py cannot capture, and lfm2.py and lfm2_moe.py capture for DFlash alone. Qwen 3.5 as a whole model with
#   its tower, in qwen3_5.py; qwen3_next.py. Older versions of these four were not read.
# - vLLM: gemma3.py, gemma3_mm.py, lfm2.py and lfm2_moe.py lack SupportsEagle3; qwen3_5.py and qwen3_next.py of 0.32.0
#   have it; the forward of mimo.py returns no aux states; deepseek_v2.py adds a residual that block 0 lacks, and in
#   0.22.0 captures nothing after the last block.
# - From Mistral on, 0.5.23 and 0.32.0 alone were read. SGLang's Mistral, Ministral 3 and Phi-3 are its Llama;
#   granitemoehybrid.py cannot be asked to capture. vLLM's Mistral, Ministral 3, Phi-3 and ERNIE 4.5 are its Llama;
#   granite.py captures, and so does its base for models of transformers, which runs the five others.
# - DeepSeek-V3.2 and GLM-5, in the same two: SGLang's are its DeepSeek-V3; vLLM's models/deepseek_v32/nvidia/model.py
#   captures nothing after the last block, and amd/model.py adds a residual that block 0 lacks.
# - EAGLE captures in its own Llama and Qwen 3 alone, sglang-jax in llama.py and qwen3.py, tpu-inference in llama3.py.
#   Models that tpu-inference leaves to vLLM's classes were not tried.
BY_TARGET = {
    "aux layer 0 of DeepSeek": (FAILS, FAILS, SILENT),
    "aux layer n of DeepSeek": (FAILS, "0.32.0", SILENT),
    "aux layer n of DeepSeek-V3.2": (FAILS, FAILS, SILENT),
    "Qwen2ForCausalLM": ("0.5.2", "0.21.0", FAILS),
    "Qwen3ForCausalLM": ("0.4.9", "0.21.0", "cb7e084"),
    "Qwen3MoeForCausalLM": ("0.4.9", "0.21.0", FAILS),
    "Gemma3ForCausalLM": (SILENT, FAILS, FAILS),
    "Gemma4ForCausalLM": ("0.5.23", "0.32.0", FAILS),
    "Llama4ForCausalLM": ("0.4.9", "0.21.0", FAILS),
    "GptOssForCausalLM": ("0.5.2", "0.21.0", FAILS),
    "DeepseekV3ForCausalLM": ("0.5.11", "0.21.0", FAILS),
    "DeepseekV32ForCausalLM": ("0.5.23", "0.32.0", FAILS),
    "GlmMoeDsaForCausalLM": ("0.5.23", "0.32.0", FAILS),
    "Lfm2ForCausalLM": (FAILS, FAILS, FAILS),
    "Lfm2MoeForCausalLM": (FAILS, FAILS, FAILS),
    "Qwen3_5ForCausalLM": ("0.5.23", "0.32.0", FAILS),
    "Qwen3_5MoeForCausalLM": ("0.5.23", "0.32.0", FAILS),
    "Qwen3NextForCausalLM": ("0.5.23", "0.32.0", FAILS),
    "MiMoForCausalLM": (FAILS, FAILS, FAILS),
    "MistralForCausalLM": ("0.5.23", "0.32.0", FAILS),
    "Ministral3ForCausalLM": ("0.5.23", "0.32.0", FAILS),
    "Phi3ForCausalLM": ("0.5.23", "0.32.0", FAILS),
    "SmolLM3ForCausalLM": (FAILS, "0.32.0", FAILS),
    "Olmo2ForCausalLM": (FAILS, "0.32.0", FAILS),
    "Olmo3ForCausalLM": (FAILS, "0.32.0", FAILS),
    "GraniteForCausalLM": (FAILS, "0.32.0", FAILS),
    "GraniteMoeHybridForCausalLM": (FAILS, FAILS, FAILS),
    "SeedOssForCausalLM": (FAILS, "0.32.0", FAILS),
    "Exaone4ForCausalLM": (FAILS, FAILS, FAILS),
    "Ernie4_5ForCausalLM": (FAILS, "0.32.0", FAILS),
    "HunYuanDenseV1ForCausalLM": (FAILS, "0.32.0", FAILS),
    "Glm4MoeForCausalLM": ("0.5.23", FAILS, FAILS),
    "MixtralForCausalLM": (FAILS, FAILS, FAILS),
    "MiniMaxM2ForCausalLM": ("0.5.23", "0.32.0", FAILS),
    "Ernie4_5_MoeForCausalLM": (FAILS, FAILS, FAILS),
}

WITHOUT = {
    "aux layers, not three": "--target.aux-layers 2 15 27, or three others",
    "`fc_norm`": "--draft.no-fc-norm",
    "`norm_output`": "--draft.no-norm-output",
    "`norm_before_residual`": "--draft.no-norm-before-residual",
    "`qk_norm`": "--draft.no-qk-norm",
}


def used(head: StoredHead, form: str) -> Iterator[tuple[str, str]]:
    """Yields the rows that apply to a head in a form, each with its reason, see `Engines`."""
    c, last = head.config, head.target_layers or "n"
    architectures: list[str] = [TEXT_OF.get(x, x) for x in map(str, (head.verifier or {}).get("architectures") or ())]
    indexed = bool({"DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"} & {*architectures})
    deepseek = indexed or any(name.startswith("Deepseek") for name in architectures)
    yield "EAGLE-3", ""
    for name in architectures:
        if name in BY_TARGET:
            yield name, ""
    if c.aux_layers is not None:
        plain = f"target.aux_layers: got {c.aux_layers}, expected the default (2, n // 2, n - 3)"
        yield "other aux layers", plain
        if c.aux_layers[0] != 2 and deepseek:
            # SGLang counts the layers of these targets from 1 only if the first id is 1 (sglang#25454).
            yield "other aux layers of DeepSeek, the first not 2", plain
    if c.num_aux_layers != 3:
        yield "aux layers, not three", f"target.aux_layers: got {c.num_aux_layers} layers, expected 3"
    if {0, last} & set(c.aux_layers or ()) and not deepseek:
        # SGLang captures `hidden_states + residual` at the entry of a block: block 0 has no residual yet, and the last
        # block is followed by no entry.
        limits = f"1 to {last - 1 if isinstance(last, int) else 'n - 1'}"
        neither = f"SGLang captures neither 0 (the embeddings) nor {last} (the last block)"
        yield "aux layer 0 or n", f"target.aux_layers: got {c.aux_layers}, expected boundaries {limits}: {neither}"
    if deepseek and 0 in (c.aux_layers or ()):
        first = "neither SGLang nor vLLM captures 0 (the embeddings) of DeepSeek"
        yield "aux layer 0 of DeepSeek", f"target.aux_layers: got {c.aux_layers}, expected boundaries from 1: {first}"
    if deepseek and last in (c.aux_layers or ()):
        row = "aux layer n of DeepSeek" + "-V3.2" * indexed
        yield row, f"target.aux_layers: got {c.aux_layers}, expected boundaries below {last}"
    for flag in ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc", "qk_norm"):
        if getattr(c, flag):
            yield f"`{flag}`", f"{flag}: got True, expected False"
    if c.sliding_window is not None:
        yield "`sliding_window`", f"sliding_window: got {c.sliding_window}, expected none"
    if form == SPECULATORS.name and (c.fc_norm or c.norm_output):
        flags = f"fc_norm, norm_output: got {c.fc_norm}, {c.norm_output}, expected False"
        yield "either in the form `speculators`", flags
    for name, scaling in SCALINGS.items():
        if isinstance(c.rope_scaling, scaling):
            yield f"RoPE `{name}`", f"rope_scaling: got {name!r}, expected none"
    if isinstance(c.rope_scaling, LinearScaling) and c.rope_theta != THETA:
        base = f"rope_theta: got {c.rope_theta}, expected {THETA} where it is scaled"
        yield "RoPE `linear`, `rope_theta` not 10000", base
    if isinstance(c.rope_scaling, YarnScaling):
        if not c.rope_scaling.truncate:
            yield "RoPE `yarn`, `truncate` false", "rope_scaling.truncate: got False, expected True"
        if (got := c.rope_scaling.attention_factor) is not None:
            yield "RoPE `yarn`, `attention_factor`", f"rope_scaling.attention_factor: got {got}, expected none"
    if c.head_dim * c.num_attention_heads != c.hidden_size:
        plain = f"hidden_size / num_attention_heads = {c.hidden_size} / {c.num_attention_heads}"
        yield "`head_dim` of its own", f"head_dim: got {c.head_dim}, expected {plain}"
    if c.hidden_size != c.target_hidden_size:
        yield "not as wide as the target", f"hidden_size: got {c.hidden_size}, expected {c.target_hidden_size}"
    whole = c.draft_vocab_size == c.vocab_size
    if whole:
        yield "whole vocabulary", f"draft_vocab_size: got {c.draft_vocab_size}, expected less than vocab_size"
    if head.tied:
        yield "the target's LM head", "lm_head.weight: missing, expected the head's own"
    if head.tied and not whole:
        way = "load the head with its target, and save it"
        yield "rows of the target's LM head", f"lm_head.weight: missing, expected {c.draft_vocab_size} rows ({way})"


def _described(
    folder: pathlib.Path, values: dict[str, Any], tensors: Tensors, problems: list[str]
) -> dict[str, Any] | None:
    form = form_of(values)
    values = form.flatten(values)
    config = fields.read(form, values, problems)
    # Some heads of tied targets set it and have an LM head of their own nevertheless (AngelSlim/Qwen3-4B_eagle3).
    if values.get("tie_word_embeddings") and LM_HEAD not in tensors:
        problems.append(f"tie_word_embeddings: got True, expected False, or a tensor {LM_HEAD}")
    known = ("bos_token_id", "eos_token_id", "verifier")
    return None if config is None else {"config": config, **{name: values.get(name) for name in known}}


def _on_disk(config: DraftHeadConfig, target: ModelConfig) -> DraftHeadConfig:
    """Leaves out the default aux layers, which no form writes down."""
    default = config.aux_layers == default_aux_layers(target.num_hidden_layers)
    return dataclasses.replace(config, aux_layers=None) if default else config


READERS = {form.name: form.engines for form in FORMS.values() if form is not EAGLE3_JAX}
EAGLE3 = StoredKind(
    name="eagle3",
    label="EAGLE-3",
    network=DraftHead,
    method="eagle3",
    algorithm="EAGLE3",
    is_mine=lambda folder, values: True,  # what no other kind recognises; the reader names what is wrong with it
    shape=DraftHeadConfig.for_target,
    own_layers=False,  # the target is observed at the layers of the config before the head is loaded
    described=_described,
    table=draft_table,
    values=lambda head, form: FORMS[form].write(head),
    engines=Engines(ENGINES, SINCE, READERS, used, BY_TARGET, engines.EAGLE3, WITHOUT),
    canonical=canonical,
    spelled=lambda name, form: name.replace(LAYER, FORMS[form].layer),
    on_disk=_on_disk,
    shares_lm_head=False,
)
