"""Pallas kernels in JAX's interpreter of a TPU's memory, which finds races.

Accesses that may overtake each other are reported, and memory that was never written is NaN. A copy takes place when it
is started (`eager`) or when it is waited for (`on_wait`); on a chip it may be any time between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter  # the verdicts are only there
from jax.experimental.pallas import tpu as pltpu

MODES = ("eager", "on_wait")


def cases(every: Iterable[tuple[Any, ...]], daily: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Marks all cases but the daily ones as `long`."""
    return [pytest.param(*case, marks=() if case in daily else pytest.mark.long) for case in every]


@contextlib.contextmanager
def no_races(mode: Any, cores: int = 1) -> Iterator[pltpu.InterpretParams]:
    """Yields a kernel's `interpret`, and fails if one of the calls within has a race. Each call has its own verdict."""
    verdicts = []

    def kept(**sizes: Any) -> Any:
        verdicts.append(made(**sizes))
        return verdicts[-1]

    made = interpreter.RaceDetectionState
    with mock.patch.object(interpreter, "RaceDetectionState", kept):
        try:
            yield pltpu.InterpretParams(
                dma_execution_mode=mode, detect_races=True, uninitialized_memory="nan", num_cores_or_threads=cores
            )
            jax.effects_barrier()
        except Exception:
            pltpu.reset_tpu_interpret_mode_state()
            raise
    assert verdicts
    assert not any(verdict.races_found for verdict in verdicts)
