"""Checks of what callers hand to an engine: Python itself would take any type, and fail far from the cause."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np

from eagle3_jax.decoding.params import SamplingParams

KVDtype = Literal["float32", "bfloat16", "float8_e4m3fn"]


def check_whole_numbers(**given: Any) -> None:
    """Raises ValueError: a field that is neither a whole number nor None."""
    for field, value in given.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | np.integer)):
            raise ValueError(f"{field}: got {value!r} ({type(value).__name__}), expected a whole number")


def stored_dtype(kv_dtype: Any) -> Any:
    """The dtype of `KVDtype`, by its name or as it is; None stays. Raises ValueError: of no use to the caches.

    Integers are of none: keys and values are stored without scales.
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


def check_params(params: Any, field: str = "params") -> None:
    """Raises ValueError: something else than `SamplingParams`."""
    if not isinstance(params, SamplingParams):
        raise ValueError(f"{field}: got {type(params).__name__}, expected SamplingParams")


def one_for_each(params: Any, prompts: Any) -> Sequence[SamplingParams]:
    """The parameters of each prompt. Raises ValueError: no list of prompts, or other parameters than one for each."""
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
