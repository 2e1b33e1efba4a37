"""Runs llama.cpp's server in a process of its own: `PYTHON llama_cpp_process.py < request.json`; the last line of its
output is JSON.

PYTHON belongs to an environment with xllamacpp (tools/install_llama_cpp.sh makes one), without this package.

Request: as of `vllm_process`, with GGUF files as `target` and `draft`; `threads`; `exact`: whether keys, values and
products of attention stay in float32, which llama.cpp rounds to 16 bits by itself.
Answer: as there, but for no turn to warm up; `drafts`: for each answer of the last turn how many drafts were verified,
and how many accepted.
"""

from __future__ import annotations

import concurrent.futures
import json
import re
import sys
import time
import urllib.request
from typing import Any

_ROUNDS = "llamacpp:spec_decode_num_drafts_total"
_PER_POSITION = r'llamacpp:spec_decode_num_accepted_tokens_per_pos_total\{[^}]*"(\d+)"[^}]*\}'


def counters(metrics: str, steps: int) -> tuple[int, list[int]]:
    """Reads rounds and accepted drafts by position since the server began, from its `/metrics`."""
    rounds = re.findall(rf"^{_ROUNDS} (\S+)", metrics, re.MULTILINE)[0]
    accepted = dict(re.findall(rf"{_PER_POSITION} (\S+)", metrics))
    return int(float(rounds)), [int(float(accepted.get(str(place), 0))) for place in range(steps)]


def options(request: dict[str, Any]) -> Any:
    """Makes the server's settings."""
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


def answer(request: dict[str, Any]) -> dict[str, Any]:
    import xllamacpp

    server = xllamacpp.Server(options(request))
    wanted = {"n_predict": request["max_tokens"], "temperature": 0.0, "ignore_eos": request["ignore_eos"]}
    wanted |= {"return_tokens": True, "cache_prompt": False}

    def ask(path: str, body: dict[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(f"{server.listening_address}/{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked) as response:
            return response.read()

    def complete(prompt: list[int]) -> dict[str, Any]:
        return json.loads(ask("completion", wanted | {"prompt": prompt}))  # OpenAI's API returns no token ids

    steps = request["num_speculative_tokens"]
    seconds, found, before, after = [], [], (0, [0] * steps), (0, [0] * steps)
    with concurrent.futures.ThreadPoolExecutor(request["batch_size"]) as clients:
        for _ in range(request["turns"]):  # the server has warmed itself up
            before, start = counters(ask("metrics").decode(), steps), time.perf_counter()
            found = list(clients.map(complete, request["prompts"]))
            seconds.append(time.perf_counter() - start)
            after = counters(ask("metrics").decode(), steps)
    timings = [reply["timings"] for reply in found]
    return {
        "version": xllamacpp.__version__,
        "answers": [reply["tokens"] for reply in found],
        "seconds": seconds,
        "rounds": after[0] - before[0],
        "accepted": [b - a for a, b in zip(before[1], after[1], strict=True)],
        "drafts": [[times.get("draft_n", 0), times.get("draft_n_accepted", 0)] for times in timings],
    }


if __name__ == "__main__":
    print(json.dumps(answer(json.load(sys.stdin))))
