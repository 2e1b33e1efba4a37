"""Checks an engine's arguments before work begins: a wrong type would fail far from its cause."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np

from eagle3_jax.config import FewBits
from eagle3_jax.decoding.params import MAX_STOP_IDS, SamplingParams, is_number

KVDtype = Literal["float32", "bfloat16", "float8_e4m3fn"]


def check_whole_numbers(**given: Any) -> None:
    """Checks values by name. Raises ValueError: neither a whole number nor None."""
    for field, value in given.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | np.integer)):
            raise ValueError(f"{field}: got {value!r} ({type(value).__name__}), expected a whole number")


def check_truths(**given: Any) -> None:
    """Checks values by name. Raises ValueError: neither True nor False."""
    for field, value in given.items():
        if not isinstance(value, bool | np.bool_):
            raise ValueError(f"{field}: got {value!r}, expected True or False")


def check_sizes(
    batch_size: Any,
    max_length: Any,
    page_size: Any,
    kv_tokens: Any,
    memory_fraction: Any,
    queue_limit: Any,
    longest: int,
) -> None:
    """Checks the sizes of an engine (see `Engine`). Raises ValueError: a size of another type or out of range.

    Args:
        longest: positions of the target.
    """
    check_whole_numbers(batch_size=batch_size, max_length=max_length, page_size=page_size)
    check_whole_numbers(kv_tokens=kv_tokens, queue_limit=queue_limit)
    if batch_size < 1:
        raise ValueError(f"batch_size: got {batch_size}, expected at least 1")
    if not 2 <= max_length <= longest:
        raise ValueError(f"max_length: got {max_length}, expected 2 to the target's {longest}")
    if not 16 <= page_size <= 256 or page_size % 16:
        raise ValueError(f"page_size: got {page_size}, expected a multiple of 16 from 16 to 256")
    if memory_fraction is not None and not (is_number(memory_fraction) and 0 < memory_fraction < 1):
        raise ValueError(f"memory_fraction: got {memory_fraction!r}, expected a number between 0 and 1, or None")
    if kv_tokens is not None and memory_fraction is not None:
        raise ValueError(f"kv_tokens, memory_fraction: got {kv_tokens} and {memory_fraction}, expected one of them")
    if queue_limit is not None and queue_limit < 1:
        raise ValueError(f"queue_limit: got {queue_limit}, expected at least 1, or None")


def check_draft_weights(draft_weights: Any, *, drafts: bool) -> None:
    """Checks `draft_weights` of an engine. Raises ValueError: another kind, or a kind without a draft model.

    Args:
        drafts: whether a head or model drafts.
    """
    if draft_weights is not None and draft_weights not in get_args(FewBits):
        kinds = ", ".join(map(repr, get_args(FewBits)))
        raise ValueError(f"draft_weights: got {draft_weights!r}, expected {kinds}, or None")
    if draft_weights is not None and not drafts:
        raise ValueError(f"draft_weights: got {draft_weights!r}, expected None where no head or model drafts")


def check_request(
    name: str, ids: Sequence[int], params: SamplingParams, max_length: int, vocab_size: int, end_ids: frozenset[int]
) -> None:
    """Checks a prompt and its parameters.

    Args:
        name: the prompt's name in errors.
        end_ids: the tokens that end every answer.

    Raises:
        ValueError: a prompt without room for an answer, or tokens that the target does not have.
    """
    if not 1 <= len(ids) < max_length:
        raise ValueError(f"{name}: got {len(ids)} tokens, expected 1 to {max_length - 1} (max_length - 1)")
    check_ids(name, ids, vocab_size)
    for field, tokens in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        if beyond := [token for token in tokens if token >= vocab_size]:
            raise ValueError(f"{field}: got token id {beyond[0]}, expected 0 to {vocab_size - 1}")
    if len({*params.stop_token_ids} | end_ids) > MAX_STOP_IDS:
        raise ValueError(
            f"stop_token_ids: got {len(params.stop_token_ids)}, expected {MAX_STOP_IDS} at most, "
            f"the model's own {len(end_ids)} included"
        )


def check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Checks token ids. Raises ValueError: some that the target does not have.

    Args:
        name: their name in errors.
    """
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
    if dtype is None or dtype.name not in get_args(KVDtype):
        raise ValueError(f"kv_dtype: got {kv_dtype!r}, expected {', '.join(map(repr, get_args(KVDtype)))}, or None")
    return dtype


def check_submitted(
    params: Any, *, timeout: Any = None, sample: Any = 0, drafts: Any = True, adapt: Any = True
) -> None:
    """Checks a submission but for its prompt: what fails in the scheduler's turn ends the requests of others too.

    Raises ValueError: not `SamplingParams` of one answer, a timeout that is not positive, or a value of another type.
    """
    check_params(params)
    if params.n != 1:
        raise ValueError(f"n: got {params.n}, expected 1: submit each answer, with its `sample`")
    if timeout is not None and not (is_number(timeout) and timeout > 0):
        raise ValueError(f"timeout: got {timeout!r}, expected more than 0 seconds, or None")
    check_whole_numbers(sample=sample)
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
    if isinstance(params, SamplingParams):
        return [params] * len(prompts)
    if isinstance(params, Mapping) or not isinstance(params, Iterable):
        raise ValueError(
            f"params: got {type(params).__name__}, expected SamplingParams, for all or one for each prompt"
        )
    each = list(params)
    for index, one in enumerate(each):
        check_params(one, f"params[{index}]")
    if len(each) != len(prompts):
        raise ValueError(f"params: got {len(each)}, expected one for all or {len(prompts)}, one for each prompt")
    return each
