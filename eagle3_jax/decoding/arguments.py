"""Checks an engine's arguments before work begins: a wrong type would fail far from its cause."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np

from eagle3_jax.config import FewBits
from eagle3_jax.config.checks import require
from eagle3_jax.decoding.params import MAX_STOP_IDS, SamplingParams, is_number, is_whole

KVDtype = Literal["float32", "bfloat16", "float8_e4m3fn"]


def check_truths(**given: Any) -> None:
    """Checks values by name. Raises ValueError: neither True nor False."""
    for field, value in given.items():
        require(isinstance(value, bool | np.bool_), field, value, "True or False")


def check_sizes(
    batch_size: Any, max_length: Any, page_size: Any, kv_tokens: Any, memory_fraction: Any, queue_limit: Any, most: int
) -> None:
    """Checks the sizes of an engine, see `Engine`; the target has `most` positions.

    Raises ValueError: a size of another type or out of range.
    """
    require(is_whole(batch_size) and batch_size >= 1, "batch_size", batch_size, "a whole number, at least 1")
    fits = is_whole(max_length) and 2 <= max_length <= most
    require(fits, "max_length", max_length, f"a whole number, 2 to the target's {most}")
    of_rows = is_whole(page_size) and 16 <= page_size <= 256 and page_size % 16 == 0
    require(of_rows, "page_size", page_size, "a multiple of 16 from 16 to 256")
    require(kv_tokens is None or is_whole(kv_tokens), "kv_tokens", kv_tokens, "a whole number, or None")
    is_share = memory_fraction is None or (is_number(memory_fraction) and 0 < memory_fraction < 1)
    require(is_share, "memory_fraction", memory_fraction, "a number between 0 and 1, or None")
    both = kv_tokens, memory_fraction
    require(None in both, "kv_tokens, memory_fraction", both, "one of them")
    is_limit = queue_limit is None or (is_whole(queue_limit) and queue_limit >= 1)
    require(is_limit, "queue_limit", queue_limit, "a whole number, at least 1, or None")


def check_draft_weights(draft_weights: Any, *, drafts: bool) -> None:
    """Checks `draft_weights` of an engine. Raises ValueError: another kind, or one where no head or model `drafts`."""
    kinds = get_args(FewBits)
    require(draft_weights in (None, *kinds), "draft_weights", draft_weights, f"{', '.join(map(repr, kinds))}, or None")
    expected = "None where no head or model drafts"
    require(drafts or draft_weights is None, "draft_weights", draft_weights, expected)


def check_request(
    name: str, ids: Sequence[int], params: SamplingParams, max_length: int, vocab_size: int, end_ids: frozenset[int]
) -> None:
    """Checks a prompt, by its name in errors, and its parameters.

    Raises ValueError: a prompt without room for an answer, tokens that the target does not have, or with `end_ids`,
    which end every answer, too many stop tokens.
    """
    if not 1 <= len(ids) < max_length:
        raise ValueError(f"{name}: got {len(ids)} tokens, expected 1 to {max_length - 1} (max_length - 1)")
    check_ids(name, ids, vocab_size)
    for field, tokens in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        if beyond := [token for token in tokens if token >= vocab_size]:
            raise ValueError(f"{field}: got token id {beyond[0]}, expected 0 to {vocab_size - 1}")
    few, own = len({*params.stop_token_ids} | end_ids) <= MAX_STOP_IDS, f"the model's own {len(end_ids)}"
    require(few, "stop_token_ids", len(params.stop_token_ids), f"{MAX_STOP_IDS} at most, {own} included")


def check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Checks token ids, by their name in errors. Raises ValueError: some that the target does not have."""
    if len(ids) and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ValueError(f"{name}: got token ids {min(ids)} to {max(ids)}, expected 0 to {vocab_size - 1}")


def stored_dtype(kv_dtype: Any) -> Any:
    """Returns the dtype of keys and values, from its name or as it is; None stays None.

    Raises ValueError: another dtype. Keys and values are stored without scales, so integers are refused.
    """
    if kv_dtype is None:
        return None
    try:
        dtype = jnp.dtype(kv_dtype)
    except TypeError:
        dtype = None
    names = get_args(KVDtype)
    held = dtype is not None and dtype.name in names
    require(held, "kv_dtype", kv_dtype, f"{', '.join(map(repr, names))}, or None")
    return dtype


def check_submitted(
    params: Any, *, timeout: Any = None, sample: Any = 0, drafts: Any = True, adapt: Any = True
) -> None:
    """Checks a submission but for its prompt: what fails in the scheduler's turn ends the requests of others too.

    Raises ValueError: not `SamplingParams` of one answer, a timeout that is not positive, or a value of another type.
    """
    check_params(params)
    require(params.n == 1, "n", params.n, "1: submit each answer, with its `sample`")
    in_time = timeout is None or (is_number(timeout) and timeout > 0)
    require(in_time, "timeout", timeout, "more than 0 seconds, or None")
    require(is_whole(sample), "sample", sample, "a whole number")
    check_truths(drafts=drafts, adapt=adapt)


def check_params(params: Any, field: str = "params") -> None:
    """Checks the parameters' type. Raises ValueError: not `SamplingParams`."""
    if not isinstance(params, SamplingParams):
        raise ValueError(f"{field}: got {type(params).__name__}, expected SamplingParams")


def one_for_each(params: Any, prompts: Any) -> Sequence[SamplingParams]:
    """Returns the parameters of each prompt. Raises ValueError: no list of prompts, or neither one nor as many."""
    if isinstance(prompts, str):
        raise ValueError(f"prompts: got the string {prompts[:40]!r}, expected a list of prompts")
    if isinstance(prompts, Mapping) or not hasattr(prompts, "__len__"):
        raise ValueError(f"prompts: got {type(prompts).__name__}, expected a list of prompts")
    if isinstance(params, Mapping) or not isinstance(params, Iterable):
        check_params(params)
        return [params] * len(prompts)
    each = list(params)
    for index, one in enumerate(each):
        check_params(one, f"params[{index}]")
    require(len(each) == len(prompts), "params", len(each), f"one for all or {len(prompts)}, one for each prompt")
    return each
