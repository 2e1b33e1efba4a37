"""Runs vLLM in a process of its own: `PYTHON vllm_process.py < request.json`; the last line of its output is JSON.

PYTHON belongs to an environment with vLLM (tools/install_vllm_cpu.sh makes one), without this package.

Request: `target` and `draft`, folders (null without a draft); `method` and `num_speculative_tokens`; `refused_on_cpu`,
the reasons why a CPU build cannot run the head; `prompts`, token ids; `max_tokens`, `ignore_eos`, `max_model_len`,
`batch_size`, `dtype`; `turns`, repetitions after the warm-up.
Answer: `version`; `answers`, token ids; `seconds` of each turn; for the last turn `rounds`, and `accepted`, the rounds
that accepted the draft at position 1, 2, ...; `repaired`, what this process alone sets right in vLLM, or null.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def counters(engine: Any) -> tuple[int, list[int]]:
    """Reads rounds and accepted drafts by position since the engine began (vllm/v1/spec_decode/metrics.py, 0.32.0)."""
    rounds, accepted = 0, []
    for metric in engine.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            rounds = metric.value
        if metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            accepted = metric.values
    return rounds, list(accepted)


KEYS_BY_LAYER = (
    "qwen3_dflash.py, DFlashQwen3Model._normalize_context_k: a CPU's rms_norm takes the first layer's k_norm for every "
    "layer's context keys; here each layer takes its own, as on GPUs"
)


def norm_keys_by_layer() -> str:
    """Gives a DFlash head's context keys the norm of their own layer. Returns what this repairs.

    vLLM 0.32.0 passes the stacked weights [layers, head_dim] to `rms_norm`, of which a CPU build reads the first row
    alone: a head of several layers loses drafts there.
    """
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normed(model: Any, keys: Any) -> Any:  # [layers, tokens, heads, head_dim]
        for layer, own in zip(model.layers, keys, strict=True):
            own[:] = layer.self_attn.k_norm(own)
        return keys

    DFlashQwen3Model._normalize_context_k = normed
    return KEYS_BY_LAYER


def answer(request: dict[str, Any]) -> dict[str, Any]:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
    import vllm

    speculative, repaired = None, None
    if request["draft"] is not None:
        from vllm.platforms import current_platform

        on_cpu = current_platform.is_cpu()
        if request["refused_on_cpu"] and on_cpu:
            sys.exit("\n  ".join(["vLLM's CPU build cannot run this head:", *request["refused_on_cpu"]]))
        if request["method"] == "dflash" and on_cpu:
            repaired = norm_keys_by_layer()
        drafts = request["num_speculative_tokens"]
        speculative = {"method": request["method"], "model": request["draft"], "num_speculative_tokens": drafts}
    engine = vllm.LLM(
        request["target"],
        dtype=request["dtype"],
        max_model_len=request["max_model_len"],
        max_num_seqs=request["batch_size"],
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=speculative,
    )
    params = vllm.SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=request["ignore_eos"])
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    seconds, found, before, after = [], [], (0, []), (0, [])
    for _ in range(1 + request["turns"]):
        before, start = counters(engine), time.perf_counter()
        found = engine.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        after = counters(engine)
    return {
        "version": vllm.__version__,
        "answers": [list(output.outputs[0].token_ids) for output in found],
        "seconds": seconds[1:],
        "rounds": after[0] - before[0],
        "accepted": [b - a for a, b in zip(before[1] or [0] * len(after[1]), after[1], strict=True)],
        "repaired": repaired,
    }


if __name__ == "__main__":
    print(json.dumps(answer(json.load(sys.stdin))))
