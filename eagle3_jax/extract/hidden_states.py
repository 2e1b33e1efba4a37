"""Hidden states of conversations: batched by length, one forward pass a batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from eagle3_jax.data.conversation import Conversation
from eagle3_jax.data.features import Record, States
from eagle3_jax.mesh import fetch
from eagle3_jax.models.fp8 import Fp8
from eagle3_jax.models.states import target_states
from eagle3_jax.models.target import TargetModel

# Lengths are padded to multiples of this.
_LENGTH_STEP = 64
# Each length is a compiled program.
MAX_LENGTHS = 8


@dataclasses.dataclass(frozen=True)
class PaddedBatch:
    """Conversations that pass together: their indices, and the shape they are padded to (surplus rows are padding)."""

    indices: list[int]
    rows: int
    length: int


def choose_lengths(sample: Sequence[int], longest: int) -> tuple[int, ...]:
    """Chooses at most MAX_LENGTHS lengths to pad to, up to `longest`, with the least padding for a sample of them."""
    steps = -(-longest // _LENGTH_STEP)
    needed = [min(steps, -(-length // _LENGTH_STEP)) for length in sample]
    below = np.cumsum(np.bincount(needed, minlength=steps + 1))
    # last -> (padded steps of all sequences up to `last`, the lengths), with one length more in each turn.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    found = []
    for _ in range(MAX_LENGTHS):
        best = {
            last: min(
                (padding + last * int(below[last] - below[first]), (*chosen, last))
                for first, (padding, chosen) in best.items()
                if first < last
            )
            for last in sorted({*needed, steps})
            if last > min(best, default=steps)
        }
        found += [best[steps]] if steps in best else []
    return tuple(last * _LENGTH_STEP for last in min(found)[1])


def plan_batches(
    lengths: Sequence[int], padded: Sequence[int], batch_tokens: int, multiple: int = 1, seed: int = 0
) -> list[PaddedBatch]:
    """Groups conversations of similar length, in random order: the first records of a shard have all lengths.

    The shape of a batch depends on its padded length alone, one of the ascending `padded`: a program a length. It has
    a `multiple` of rows (the mesh's data axis), and at most `batch_tokens` tokens unless a row a device has more.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batches, start = [], 0
    while start < len(order):
        length = next(length for length in padded if length >= lengths[order[start]])
        rows = max(1, batch_tokens // length // multiple) * multiple
        batches.append(PaddedBatch(order[start : start + rows], rows, length))
        start += rows
    return [batches[i] for i in np.random.default_rng(seed).permutation(len(batches))]


def forward(
    conversations: Sequence[Conversation],
    batch: PaddedBatch,
    model: TargetModel,
    states: States,
    place: Callable[[np.ndarray], Any],
) -> Any:
    """Dispatches a batch; `records` waits for it. `place` puts tokens, int32 [rows, length], on the devices."""
    tokens = np.zeros((batch.rows, batch.length), np.int32)
    for row, index in enumerate(batch.indices):
        ids = conversations[index].token_ids
        tokens[row, : len(ids)] = ids
    outputs = target_states(model, place(tokens))
    return _in_8_bits(outputs, len(model.config.aux_layers)) if states == "fp8" else outputs


@functools.partial(jax.jit, static_argnums=1)
def _in_8_bits(outputs: tuple[jax.Array, ...], aux_layers: int) -> tuple[Any, ...]:
    aux, hidden, *rest = outputs
    return Fp8.of(aux, aux_layers), Fp8.of(hidden, 1), *rest


def records(
    conversations: Sequence[Conversation], batch: PaddedBatch, outputs: Any
) -> Iterator[tuple[Conversation, Record | None]]:
    """Yields each conversation with its record, of `forward`'s outputs if any; None: a state is NaN or infinite."""
    aux, hidden, predicted, finite = fetch(outputs) if outputs is not None else [None] * 4
    for row, index in enumerate(batch.indices):
        conversation = conversations[index]
        record = {"token_ids": conversation.token_ids, "loss_mask": conversation.loss_mask}
        own = row, slice(len(conversation.token_ids))
        if outputs is not None:
            for name, state in (("aux", aux), ("last_hidden", hidden)):
                if isinstance(state, Fp8):
                    record |= {name: state.values[own], f"{name}_scale": state.scale[own]}
                else:
                    record[name] = state[own]
            record["argmax"] = predicted[own]
        yield conversation, record if finite is None or finite[own].all() else None
