"""Requests to a running SGLang server, the reading of its counters, and the servers that are refused."""

from __future__ import annotations

from typing import Any

import fake_sglang
import pytest

from eagle3_jax.export import sglang_server

PROMPTS = [[5, 6], [7]]
REQUEST = {
    "prompts": PROMPTS,
    "algorithm": "EAGLE3",
    "num_speculative_tokens": 3,
    "max_tokens": 4,
    "ignore_eos": True,
    "batch_size": 2,
    "dtype": "float32",
}
ANSWERS = [
    {"output_ids": [1, 2, 3, 4], "meta_info": fake_sglang.meta([0, 2])},
    {"output_ids": [5, 6, 7, 8], "meta_info": fake_sglang.meta([3])},
]


def test_rounds_and_positions_are_those_of_the_second_turn():
    with fake_sglang.serve(ANSWERS, PROMPTS) as (url, asked):
        answer = sglang_server.answer(url + "/", REQUEST)
    assert answer["answers"] == [[1, 2, 3, 4], [5, 6, 7, 8]] and answer["version"] == "0.5.23"
    assert (answer["rounds"], answer["accepted"]) == (3, [2, 2, 1])
    params = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    turn = [("/generate", {"input_ids": ids, "sampling_params": params}) for ids in PROMPTS]
    assert [path for path, _ in asked][:2] == ["/server_info", "/flush_cache"]
    for start in (2, 5):  # two at a time, in any order
        assert sorted(asked[start : start + 2], key=str) == sorted(turn, key=str)


def test_the_older_name_of_the_histogram_is_read_and_no_server_is_one_sentence():
    old = [x | {"meta_info": {"spec_verify_ct": 1, "spec_accept_histogram": [0, 1]}} for x in ANSWERS]
    with fake_sglang.serve(old, PROMPTS) as (url, _):
        assert sglang_server.answer(url, REQUEST)["accepted"] == [2, 0, 0]
    for url in ("http://127.0.0.1:9", "localhost:30000"):
        with pytest.raises(sglang_server.ServerError, match="expected a running SGLang server"):
            sglang_server.answer(url, REQUEST)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculative_algorithm": "EAGLE"}, "speculative_algorithm: got 'EAGLE', expected 'EAGLE3'"),
        ({"speculative_eagle_topk": 4}, "speculative_eagle_topk: got 4, expected 1"),
        ({"speculative_num_draft_tokens": 8}, "speculative_num_draft_tokens: got 8, expected 4"),
    ],
)
def test_a_server_with_other_settings_is_refused_before_it_works(settings: dict[str, Any], message: str):
    with fake_sglang.serve(ANSWERS, PROMPTS, **settings) as (url, asked):
        with pytest.raises(sglang_server.ServerError, match=message):
            sglang_server.answer(url, REQUEST)
    assert [path for path, _ in asked] == ["/server_info"]


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"completion_tokens": 4}, "meta_info: got completion_tokens, expected spec_verify_ct and spec_correct_drafts"),
        ({"spec_verify_ct": 3, "spec_correct_drafts_histogram": [1, 1]}, r"got spec_verify_ct 3 and \[1, 1\]"),
        ({"spec_verify_ct": 1, "spec_correct_drafts_histogram": [0, 0, 0, 0, 1]}, "of 0 to 3 drafts"),
    ],
)
def test_counters_that_are_missing_or_do_not_add_up_are_refused(meta: dict[str, Any], message: str):
    with fake_sglang.serve([x | {"meta_info": meta} for x in ANSWERS], PROMPTS) as (url, _):
        with pytest.raises(sglang_server.ServerError, match=message):
            sglang_server.answer(url, REQUEST)
