"""What the target's hidden states are for conversations: batched by length, one forward pass a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from eagle3_jax.data.conversation import Conversation
from eagle3_jax.data.features import Record
from eagle3_jax.mesh import fetch
from eagle3_jax.models.states import target_states
from eagle3_jax.models.target import TargetModel

# Lengths are padded to multiples of this; each distinct length is one compiled program.
_LENGTH_STEP = 64


@dataclasses.dataclass(frozen=True)
class PaddedBatch:
    """Conversations that pass together: their indices, and the shape they are padded to (surplus rows are padding)."""

    indices: list[int]
    rows: int
    length: int


def plan_batches(lengths: Sequence[int], batch_tokens: int, multiple: int = 1, seed: int = 0) -> list[PaddedBatch]:
    """Groups conversations of similar length.

    The shape of a batch depends on its longest conversation alone, so that there are at most max_length / 64 programs
    to compile. The batches come in random order: whoever reads the first records of a shard sees all lengths.

    Args:
        multiple: the number of rows is a multiple of this (the data axis of the mesh).

    Returns:
        Batches of at most `batch_tokens` tokens, padding included (more where a single row a device exceeds it).
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batches, start = [], 0
    while start < len(order):
        length = -(-lengths[order[start]] // _LENGTH_STEP) * _LENGTH_STEP
        rows = max(1, batch_tokens // length // multiple) * multiple
        batches.append(PaddedBatch(order[start : start + rows], rows, length))
        start += rows
    return [batches[i] for i in np.random.default_rng(seed).permutation(len(batches))]


def compute_records(
    conversations: Sequence[Conversation],
    batches: Iterable[PaddedBatch],
    model: TargetModel,
    place: Callable[[np.ndarray], Any] = jnp.asarray,
) -> Iterator[tuple[Conversation, Record | None]]:
    """Runs the batches and yields each conversation with its record, or with None when it holds a NaN or infinity.

    A batch is dispatched before the one before it is fetched, so that the devices work while records are written.

    Args:
        place: puts a batch of tokens, int32 [rows, length], where the model expects it.
    """
    running: list[tuple[list[int], Any]] = []
    for batch in batches:
        tokens = np.zeros((batch.rows, batch.length), np.int32)
        for row, index in enumerate(batch.indices):
            ids = conversations[index].token_ids
            tokens[row, : len(ids)] = ids
        running.append((batch.indices, target_states(model, place(tokens))))
        if len(running) == 2:
            yield from _fetch(conversations, *running.pop(0))
    for last in running:
        yield from _fetch(conversations, *last)


def _fetch(
    conversations: Sequence[Conversation], indices: list[int], outputs: Any
) -> Iterator[tuple[Conversation, Record | None]]:
    aux, hidden, predicted, finite = fetch(outputs)
    for row, index in enumerate(indices):
        conversation = conversations[index]
        length = len(conversation.token_ids)
        if not finite[row, :length].all():
            yield conversation, None
            continue
        record = {
            "token_ids": conversation.token_ids,
            "loss_mask": conversation.loss_mask,
            "aux": aux[row, :length],
            "last_hidden": hidden[row, :length],
            "argmax": predicted[row, :length],
        }
        yield conversation, record
