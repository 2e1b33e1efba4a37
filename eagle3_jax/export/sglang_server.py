"""Asks a running SGLang server, over its own HTTP interface, for answers and draft counters.

Names are those of SGLang 0.5.23 (srt/entrypoints/http_server.py; srt/managers/tokenizer_manager.py, `meta_info`):
`spec_verify_ct` counts rounds; `spec_correct_drafts_histogram` counts the rounds that accepted 0, 1, ... drafts. Older
servers call it `spec_accept_histogram`.
"""

from __future__ import annotations

import concurrent.futures
import json
import time
from typing import Any

import httpx2

_HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")


class ServerError(ValueError):
    """A missing SGLang server, or one with other settings or without counters."""


def answer(url: str, request: dict[str, Any]) -> dict[str, Any]:
    """Sends a request in the form of `engine_process` to the server at `url`; returns its answer of one turn.

    Its radix cache is flushed before each turn, so that prompts are read anew. Raises ServerError: it was started with
    other settings than the request's, an error status, or no counters.
    """
    try:
        client = httpx2.Client(base_url=url, timeout=600)
    except httpx2.InvalidURL as error:
        raise ServerError(f"{url}: {error}; expected a URL such as http://127.0.0.1:30000") from error
    with client as server:
        version = _check_settings(_ask(server, "GET", "/server_info"), request)
        params = {"temperature": 0, "max_new_tokens": request["max_tokens"], "ignore_eos": request["ignore_eos"]}

        def generate(ids: list[int]) -> dict[str, Any]:
            return _ask(server, "POST", "/generate", {"input_ids": ids, "sampling_params": params})

        seconds, found = 0.0, []
        with concurrent.futures.ThreadPoolExecutor(request["batch_size"]) as clients:
            for _ in range(2):  # the first turn warms up
                _ask(server, "POST", "/flush_cache", json_expected=False)
                start = time.perf_counter()
                found = list(clients.map(generate, request["prompts"]))
                seconds = time.perf_counter() - start
    steps = request["num_speculative_tokens"]
    counted = [_counters(reply.get("meta_info", {}), steps) for reply in found]
    return {
        "version": version,
        "answers": [reply["output_ids"] for reply in found],
        "seconds": [seconds],
        "rounds": sum(rounds for rounds, _ in counted),
        "accepted": [sum(column) for column in zip(*(accepted for _, accepted in counted), strict=True)],
    }


def _check_settings(settings: dict[str, Any], request: dict[str, Any]) -> str:
    expected = {
        "speculative_algorithm": request["algorithm"],  # EAGLE would skip an EAGLE-3 head's fc silently
        "speculative_num_draft_tokens": request["num_speculative_tokens"] + 1,
        "dtype": request["dtype"],
    }
    if request["algorithm"] == "EAGLE3":  # SGLang overrides both for block heads
        expected |= {"speculative_num_steps": request["num_speculative_tokens"], "speculative_eagle_topk": 1}
    wrong = [(name, settings.get(name), wanted) for name, wanted in expected.items() if settings.get(name) != wanted]
    if problems := [f"{name}: got {got!r}, expected {wanted!r}" for name, got, wanted in wrong]:
        raise ServerError("the SGLang server was started with other settings:\n  " + "\n  ".join(problems))
    return str(settings.get("version"))


def _counters(meta: dict[str, Any], steps: int) -> tuple[int, list[int]]:
    """Reads the rounds of one answer, and those that accepted the draft at position 1, 2, ..."""
    rounds = meta.get("spec_verify_ct")
    histogram = next((meta[name] for name in _HISTOGRAMS if name in meta), None)
    if rounds is None or histogram is None:
        got = ", ".join(sorted(meta)) or "nothing"
        raise ServerError(f"meta_info: got {got}, expected spec_verify_ct and {_HISTOGRAMS[0]}")
    if sum(histogram) != rounds or len(histogram) > steps + 1:
        expected = f"a histogram of as many rounds, of 0 to {steps} drafts"
        raise ServerError(f"meta_info: got spec_verify_ct {rounds} and {histogram}, expected {expected}")
    return rounds, [sum(histogram[position:]) for position in range(1, steps + 1)]


def _ask(server: httpx2.Client, method: str, path: str, body: Any = None, json_expected: bool = True) -> dict[str, Any]:
    try:
        response = server.request(method, path, json=body)
        if response.is_error:
            raise ServerError(f"{response.url}: got status {response.status_code}, {response.text[:500]!r}")
        return response.json() if json_expected else {}
    except httpx2.HTTPError as error:
        url = str(server.base_url).rstrip("/")
        raise ServerError(f"{url}: no answer ({error}); expected a running SGLang server") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ServerError(f"{response.url}: got no JSON, expected SGLang's answer") from error
