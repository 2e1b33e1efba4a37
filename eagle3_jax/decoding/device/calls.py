"""The calls of an engine's programs: what the host sends in each. The defaults are for no request, to compile with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from eagle3_jax.decoding.device.shapes import Sizes
from eagle3_jax.decoding.rounds.sampling import Rows, entry
from eagle3_jax.decoding.rounds.state import TRASH, RequestRows
from eagle3_jax.decoding.structured.pool import CHUNK
from eagle3_jax.decoding.tier import RoundPlan, Tier
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.target import TargetModel


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Models:
    """Target and draft as a flat list of arrays, which JAX flattens ten times as fast as modules, in every call."""

    leaves: Sequence[Any]
    structure: Any

    @classmethod
    def of(cls, target: TargetModel, draft: Draft | None) -> Models:
        return cls(*jax.tree.flatten((target, draft)))

    def modules(self) -> tuple[TargetModel, Draft | None]:
        return jax.tree.unflatten(self.structure, self.leaves)

    def tree_flatten(self) -> tuple[Sequence[Any], Any]:
        return self.leaves, self.structure

    @classmethod
    def tree_unflatten(cls, structure: Any, leaves: Sequence[Any]) -> Models:
        return cls(leaves, structure)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """A program's arguments from the host, arrays of bool or of 32 bits in any pytree, as one array: one transfer."""

    bits: Int[Rows, " n"]
    # The pytree, and each array's shape and dtype.
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptChunk:
    """A stretch of a prompt in each of r rows, and the settings of its request.

    A row may continue the one before it with the next stretch of the same prompt.
    """

    slots: Int[Rows, " r"]  # of each request; the batch's size for no request
    tokens: Int[Rows, "r t"]  # the stretch, padded on the right, and one more column: the token after each
    starts: Int[Rows, " r"]  # first position
    counts: Int[Rows, " r"]  # tokens of the stretch
    ends: Bool[Rows, " r"]  # whether the prompt ends with it; only then the request joins the state
    page_table: Int[Rows, "r pages"]  # pages of each request; `TRASH` after its pages
    requests: RequestRows

    @classmethod
    def stretch(
        cls,
        sizes: Sizes,
        length: int,
        slot: int,
        prompt: Sequence[int],
        start: int,
        pages: Sequence[int],
        request: RequestRows,
        stop: int | None = None,
    ) -> PromptChunk:
        """Makes one row, on the host: `length` tokens of a prompt from `start` on, fewer before `stop` or its end."""
        end = min(start + length, len(prompt) if stop is None else stop)
        part = prompt[start : start + length + 1]
        return cls(
            slots=entry(slot, np.int32),
            tokens=entry([*part, *[0] * (length + 1 - len(part))], np.int32),
            starts=entry(start, np.int32),
            counts=entry(end - start, np.int32),
            ends=entry(0 < len(prompt) <= end, bool),
            page_table=entry([*pages, *[TRASH] * (sizes.columns - len(pages))], np.int32),
            requests=request,
        )

    @classmethod
    def of(cls, stretches: Sequence[PromptChunk], rows: int, length: int, sizes: Sizes) -> PromptChunk:
        """Joins stretches of up to `length` tokens, and fills up with rows of no request."""
        nobody = RequestRows.nobody(constrains=sizes.tables > 0)
        blank = cls.stretch(sizes, length, slot=sizes.batch, prompt=(), start=0, pages=(), request=nobody)
        padded = [*stretches, *[blank] * (rows - len(stretches))]
        return jax.tree.map(lambda *parts: np.concatenate(parts), *padded)


class Call(NamedTuple):
    """A call of one of the programs."""

    name: str  # the program's, in `programs`, and that of the function here which makes the call
    form: dict[str, Any]  # the arguments of this function that make it a program of its own
    sent: Packed  # the program's arguments behind models and state

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


def write_table(sizes: Sizes, place: int = 0, words: Sequence[int] | np.ndarray = ()) -> Call:
    """Writes a chunk of a constraint's table at a place of the tables' words."""
    chunk = np.zeros(CHUNK, np.int32)
    chunk[: len(words)] = words
    return Call("write_table", {}, Packed.of(np.int32(place), chunk))


def rehearse(length: int) -> Call:
    """Makes all slots busy, with sequences of so many meaningless tokens; for measurements only."""
    return Call("rehearse", {}, Packed.of(np.int32(length)))


def _rows(
    sizes: Sizes, cancelled: Collection[int], slots: Sequence[int], width: int
) -> tuple[np.ndarray, np.ndarray | None]:
    ended = np.zeros(sizes.batch, bool)
    ended[list(cancelled)] = True
    if width == sizes.batch:
        return ended, None
    rows = np.full(width, sizes.batch, np.int32)
    rows[: len(slots)] = slots
    return ended, rows
