"""The calls of an engine's programs: what the host sends in each. The defaults are for no request, to compile with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int

from eagle3_jax.decoding.device.prompt_chunk import PromptChunk
from eagle3_jax.decoding.device.shapes import Sizes
from eagle3_jax.decoding.rounds.sampling import Rows
from eagle3_jax.decoding.tier import RoundPlan, Tier


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """A program's arguments from the host, arrays of bool or of 32 bits in any pytree: one array, and so one transfer.

    `bits` are those of all arrays; `form` is the pytree, and each array's shape and dtype.
    """

    bits: Int[Rows, " n"]
    form: tuple[Any, tuple[tuple[tuple[int, ...], np.dtype], ...]] = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, *arguments: Any) -> Packed:
        """Packs the arguments, on the host."""
        leaves, tree = jax.tree.flatten(arguments)
        each = [(np.int32(x) if x.dtype.kind == "b" else x.view(np.int32)).reshape(-1) for x in leaves]
        bits: Any = np.concatenate(each)
        return cls(bits, (tree, tuple((x.shape, x.dtype) for x in leaves)))

    def arguments(self) -> tuple[Any, ...]:
        """Unpacks them, in a program."""
        (tree, forms), start, leaves = self.form, 0, list[Array]()
        for shape, dtype in forms:
            part = self.bits[start : start + math.prod(shape)].reshape(shape)
            leaves.append(part != 0 if dtype.kind == "b" else jax.lax.bitcast_convert_type(part, dtype))
            start += math.prod(shape)
        return jax.tree.unflatten(tree, leaves)


class Call(NamedTuple):
    """A call of one of the programs.

    Attributes:
        name: the program's, in `programs`, and that of the function here which makes the call.
        form: the arguments of this function that make it a program of its own.
        sent: the program's arguments behind models and state.
    """

    name: str
    form: dict[str, Any]
    sent: Packed

    @property
    def key(self) -> tuple[Any, ...]:
        """Identifies the program."""
        return self.name, *self.form.values()


def prefill(sizes: Sizes, chunks: Sequence[PromptChunk] = (), *, rows: int, length: int) -> Call:
    """Reads stretches of prompts, up to `length` tokens of each."""
    return Call("prefill", {"rows": rows, "length": length}, Packed.of(PromptChunk.of(chunks, rows, length, sizes)))


def decode(
    sizes: Sizes,
    cancelled: Collection[int] = (),
    slots: Sequence[int] = (),
    max_rounds: int = 0,
    enough: int = 0,
    *,
    width: int,
    tier: Tier,
    greedy: bool = True,
) -> Call:
    """Runs rounds of the requests at some slots, in `width` rows: see `programs.decode`."""
    plan = RoundPlan(tier, np.bool_(greedy))
    sent = Packed.of(*_rows(sizes, cancelled, slots, width), np.int32(max_rounds), np.int32(enough), plan)
    return Call("decode", {"width": width, "tier": tier}, sent)


def catch_up(sizes: Sizes, cancelled: Collection[int] = (), slot: int = 0) -> Call:
    """Lets a head that rested read what it missed of the request at a slot; the tokens of one are many rows already."""
    return Call("catch_up", {}, Packed.of(*_rows(sizes, cancelled, [slot], 1)))


def note_prompt(sizes: Sizes, slot: int = 0, ids: Sequence[int] = ()) -> Call:
    """Notes a prompt's tokens, for penalties and for lookup."""
    tokens = np.full(sizes.max_length, -1, np.int32)
    tokens[: len(ids)] = ids
    return Call("note_prompt", {}, Packed.of(np.int32(slot), tokens))


def copy_state(sizes: Sizes, source: int = 0, target: int = 0) -> Call:
    """Copies a recurrent state from slot to slot; those behind the batch's are kept for other prompts."""
    return Call("copy_state", {}, Packed.of(np.int32(source), np.int32(target)))


def rehearse(length: int) -> Call:
    """Makes all slots busy, with sequences of so many meaningless tokens; for measurements only."""
    return Call("rehearse", {}, Packed.of(np.int32(length)))


def _rows(
    sizes: Sizes, cancelled: Collection[int], slots: Sequence[int], width: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """Makes `cancelled` and `slots` of `programs.decode`."""
    ended = np.zeros(sizes.batch, bool)
    ended[list(cancelled)] = True
    if width == sizes.batch:
        return ended, None
    rows = np.full(width, sizes.batch, np.int32)
    rows[: len(slots)] = slots
    return ended, rows
