"""The table of compatibility of block heads: properties of a head, and the version of each engine that runs them.

Read from SGLang 0.5.23 (models/dflash.py, dspark.py, speculative/dflash_utils.py, dspark_components/dspark_config.py)
and vLLM 0.32.0 (models/qwen3_{dflash,dflash2,dspark}.py, configs/speculators/algos.py, config/vllm.py). Older versions
were not read. vLLM's CPU build has the first model runner alone: no DSpark, no selector, one type of attention. It
norms the context's keys of every layer by the first layer's weights (see `export.engine_process`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from eagle3_jax.formats import engines
from eagle3_jax.formats.compatibility import FAILS, SILENT, Engines
from eagle3_jax.formats.kinds import StoredHead
from eagle3_jax.models.drafts.dflash import FULL, SLIDING

CPU: Final = "vLLM on a CPU"
VERSIONS = {"SGLang": "0.5.23", "vLLM": "0.32.0", CPU: "0.32.0", **engines.VERSIONS}
# Form -> its engines; the first one decides which heads the form can hold.
READERS = {
    "sglang": ("SGLang", "vLLM", CPU, engines.SGLANG_JAX),
    "vllm": ("vLLM", CPU, "SGLang", engines.TPU_INFERENCE),
    "speculators": ("vLLM", CPU),
    "llama.cpp": (engines.LLAMA_CPP,),
}
ROPE: Final = "RoPE, as config.json has it"
# Property of a head -> for each engine the first version known to run it, or the engine's behaviour instead.
SINCE = {
    # block head: SGLang, vLLM, vLLM on a CPU
    "DFlash": ("0.5.23", "0.32.0", "0.32.0"),
    "DSpark": ("0.5.23", "0.32.0", FAILS),
    "DFlash2": ("0.5.23", "0.32.0", FAILS),
    "several layers": ("0.5.23", "0.32.0", SILENT),
    "draft vocabulary": (SILENT, "0.32.0", "0.32.0"),
    "draft vocabulary, no LM head": (SILENT, SILENT, SILENT),
    "draft vocabulary of DFlash2": (FAILS, FAILS, FAILS),
    "`hidden_size` below k (k + 1), k = `selector_top_k`": ("0.5.23", "0.32.0", "0.32.0"),
    "full and sliding layers": ("0.5.23", "0.32.0", FAILS),
    "sliding layers": ("0.5.23", "0.32.0", "0.32.0"),
    "causal full layers": ("0.5.23", "0.32.0", "0.32.0"),
    "causal and bidirectional layers": ("0.5.23", "0.32.0", "0.32.0"),
    "both in the form `speculators`": (FAILS, SILENT, FAILS),
    "causal full layers in the form `speculators`": (FAILS, SILENT, SILENT),
    "`head_dim` not 64 or a multiple of 128": ("0.5.23", "0.32.0", "0.32.0"),
    ROPE: ("0.5.23", "0.32.0", "0.32.0"),
    "RoPE `llama3`, `linear` or `yarn`": ("0.5.23", "0.32.0", "0.32.0"),
    "RoPE `yarn`, `attention_factor`": (SILENT, "0.32.0", "0.32.0"),
}

WITHOUT = {
    "draft vocabulary of DFlash2": "--draft.vocab-size of the target",
    "causal and bidirectional layers": "--draft.no-is-causal",
}


def used(head: StoredHead, form: str) -> Iterator[tuple[str, str]]:
    """Yields the rows of the table that apply to a head in a form, each with its reason, see `Engines`."""
    c = head.config
    mixed, causal = len(set(c.layer_types)) > 1, [c.causal(i) for i in range(len(c.layer_types))]
    yield head.kind.label, "" if head.kind.name == "dflash" else f"head: got {head.kind.label}, expected DFlash"
    if len(c.layer_types) > 1:
        yield "several layers", ""  # they run, and `export --check vllm` sets their keys right
    if c.draft_vocab_size < c.vocab_size:
        sizes = f"draft_vocab_size: got {c.draft_vocab_size}, expected vocab_size = {c.vocab_size}"
        yield "draft vocabulary", f"{sizes}, as no d2t is read"
        if head.kind.name == "dflash2":
            yield "draft vocabulary of DFlash2", f"{sizes}, as the selector has no d2t"
        if head.tied:
            rows = f"{c.draft_vocab_size} rows (load the head with its target, and save it)"
            yield "draft vocabulary, no LM head", f"lm_head.weight: missing, expected {rows}"
    types = f"layer_types: got {list(c.layer_types)}"
    lattice = c.selector_top_k * (c.selector_top_k + 1)
    if head.kind.name == "dflash2" and c.hidden_size < lattice:
        narrow = f"selector_top_k: got {c.selector_top_k}, expected k (k + 1) up to hidden_size = {c.hidden_size}"
        yield "`hidden_size` below k (k + 1), k = `selector_top_k`", narrow
    if SLIDING in c.layer_types:
        yield "sliding layers", ""
    if any(one and kind == FULL for one, kind in zip(causal, c.layer_types, strict=True)):
        yield "causal full layers", ""
    if c.head_dim != 64 and c.head_dim % 128:
        yield "`head_dim` not 64 or a multiple of 128", ""
    yield ROPE, ""
    if len(set(causal)) > 1:
        yield "causal and bidirectional layers", f"{types} without is_causal, expected one causality"
    if mixed:
        yield "full and sliding layers", f"{types}, expected all of one type"
    if form == "speculators":
        if mixed and len(set(causal)) > 1:
            one = "expected one type: the form has one causality for all layers"
            yield "both in the form `speculators`", f"{types} without is_causal, {one}"
        if any(one and kind == FULL for one, kind in zip(causal, c.layer_types, strict=True)):
            wanted = "expected bidirectional full layers, as speculators has them"
            yield "causal full layers in the form `speculators`", f"is_causal: got True, {wanted}"
    if c.rope_scaling is not None:
        yield "RoPE `llama3`, `linear` or `yarn`", "rope_scaling: got a scaling, expected none"
    if (got := getattr(c.rope_scaling, "attention_factor", None)) is not None:
        yield "RoPE `yarn`, `attention_factor`", f"rope_scaling.attention_factor: got {got}, expected none"


ENGINES = Engines(VERSIONS, SINCE, READERS, used, columns=engines.BLOCKS, without=WITHOUT)
