"""Runs llama.cpp in a process of its own: `PYTHON llama_cpp.py < request.json`; the last line of its output is
JSON.

PYTHON belongs to an environment with xllamacpp (`pip install xllamacpp`), without this package.

Request: `gguf`, a file; `prompts`, token ids; `max_tokens`, `max_model_len` of one sequence, `batch_size`, `threads`;
`turns`, repetitions after the warm-up. Greedy, and the end of sequence is ignored.
Answer: `version`; `answers`, token ids; `seconds` of each turn.
"""

from __future__ import annotations

import concurrent.futures
import json
import sys
import time
import urllib.request
from typing import Any

_JSON = {"Content-Type": "application/json"}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path = request["gguf"]
    options.n_ctx = request["max_model_len"] * request["batch_size"]
    options.n_parallel = request["batch_size"]
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = request["threads"]
    server = xllamacpp.Server(options)
    wanted = {"n_predict": request["max_tokens"], "temperature": 0.0, "ignore_eos": True, "return_tokens": True}

    def complete(prompt: list[int]) -> list[int]:
        body = json.dumps(wanted | {"prompt": prompt, "cache_prompt": False}).encode()
        # Its own API, not OpenAI's, returns token ids.
        asked = urllib.request.Request(f"{server.listening_address}/completion", body, _JSON)
        with urllib.request.urlopen(asked) as response:
            return json.load(response)["tokens"]

    seconds, found = [], []
    with concurrent.futures.ThreadPoolExecutor(request["batch_size"]) as clients:
        for _ in range(1 + request["turns"]):
            start = time.perf_counter()
            found = list(clients.map(complete, request["prompts"]))
            seconds.append(time.perf_counter() - start)
    return {"version": xllamacpp.__version__, "answers": found, "seconds": seconds[1:]}


if __name__ == "__main__":
    print(json.dumps(answer(json.load(sys.stdin))))
