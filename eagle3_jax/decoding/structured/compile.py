"""Constraints as tables: a regular expression becomes an automaton over bytes, then one over a target's tokens.

Tokens that lead every state to the same state are one class, so a table has states x classes entries. State 0 lies
outside of the shape: everything is allowed there, and it is never left.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import outlines_core
from jaxtyping import Int

from eagle3_jax.config.checks import require
from eagle3_jax.decoding.structured import schema
from eagle3_jax.decoding.structured.params import StructuredOutputsParams

_BYTES = outlines_core.Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})
_FORCED = 64  # bytes with one way on in which a token is searched
_MOST = 2**16  # states, and classes: their numbers have 16 bits


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """An automaton over tokens, in words of 32 bits.

    Its parts follow each other: `records` (of each state the number of its mask, and its forced token: the longest
    along the only way on, or -1), the class of each token, the state behind each state and class, and the masks. Bit
    t // w of word t % w of a mask, w words long, tells whether token t is allowed. Classes and states have 16 bits.

    Attributes:
        start: the first state.
        columns: number of classes.
        parts: where the classes, the transitions and the masks begin.
    """

    words: Int[np.ndarray, " words"]
    start: int
    columns: int
    parts: tuple[int, int, int]


class _Tokens(NamedTuple):
    """The tokens with bytes, the longest first: ids, lengths, the first byte's place in `joined`; and ids by bytes."""

    ids: np.ndarray
    lengths: np.ndarray
    places: np.ndarray
    joined: np.ndarray
    by_text: dict[bytes, int]


class Compiler:
    """Makes the tables of a target's vocabulary: `size` tokens, of which `end_ids` end an answer."""

    def __init__(self, tokenizer: Any, size: int, end_ids: Collection[int]) -> None:
        self._tokenizer, self._size, self._end_ids = tokenizer, size, sorted(end_ids)
        self.table = functools.lru_cache(maxsize=64)(self._table)

    @functools.cached_property
    def _tokens(self) -> _Tokens:
        every = enumerate(_texts(self._tokenizer, self._size))
        held = [(text, token) for token, text in every if text and token not in self._end_ids]
        held.sort(key=lambda item: -len(item[0]))
        lengths = np.array([len(text) for text, _ in held], np.int64)
        joined = np.frombuffer(b"".join(text for text, _ in held), np.uint8)
        by_text = {text: token for text, token in reversed(held)}
        return _Tokens(
            np.array([token for _, token in held], np.int64), lengths, lengths.cumsum() - lengths, joined, by_text
        )

    def _table(self, params: StructuredOutputsParams) -> Table:
        """Makes a shape's table. Raises ValueError: no tokens spell an answer of it, or it is too large."""
        moves, ends = bytes_automaton(params.pattern)
        states, tokens = len(moves), self._tokens
        _check("states", states)
        functions, of_token = _functions(moves, tokens)
        classes = np.zeros(self._size, np.int64)  # class 0 leads nowhere
        classes[tokens.ids] = of_token
        used, classes = np.unique([0, *classes], return_inverse=True)
        classes, transitions = classes[1:], functions[used].T.copy()
        alive = ends.copy()  # states from which tokens reach an end
        while (more := alive | alive[transitions].any(axis=1)).sum() > alive.sum():
            alive = more
        require(bool(alive[1]), "structured", params.pattern[:80], "a shape that the target's tokens can spell")
        transitions[~alive[transitions]] = 0
        forced = [_forced(state, moves, ends, tokens.by_text) for state in range(states)]
        start = 1
        if params.after is not None:
            before = self._tokenizer(params.after, add_special_tokens=False)["input_ids"]
            classes, transitions = _behind(before, classes, transitions)
            start, forced = states, forced + [-1] * len(before)
        _check("classes of tokens", transitions.shape[1])
        allowed = transitions > 0
        allowed[0], allowed[states:] = True, True
        ends = np.pad(ends, (0, len(transitions) - states))
        return self._packed(classes, transitions, allowed, ends, np.array(forced), start)

    def _packed(self, classes: Any, transitions: Any, allowed: Any, ends: Any, forced: Any, start: int) -> Table:
        each, mask_of = np.unique(np.column_stack([allowed, ends]), axis=0, return_inverse=True)
        width = mask_words(self._size)
        masks = np.zeros((len(each), 32, width), np.uint8)
        for row, bits in zip(each, masks, strict=True):
            of_tokens = row[:-1][classes]
            of_tokens[self._end_ids] |= row[-1]
            bits.reshape(-1)[: self._size] = of_tokens
        packed = np.packbits(masks, axis=1, bitorder="little").transpose(0, 2, 1)
        records = np.column_stack([mask_of.reshape(-1), forced]).astype(np.int32)
        parts = [
            records,
            _halves(classes),
            _halves(transitions),
            np.ascontiguousarray(packed).view("<u4").view(np.int32),
        ]
        sizes = np.cumsum([part.size for part in parts])
        words = np.concatenate([part.reshape(-1) for part in parts])
        return Table(words, start, transitions.shape[1], (int(sizes[0]), int(sizes[1]), int(sizes[2])))


def mask_words(size: int) -> int:
    """Returns the words of a mask over `size` tokens."""
    return -(-size // 32)


def bytes_automaton(pattern: str) -> tuple[np.ndarray, np.ndarray]:
    """Makes the least automaton of a regular expression over bytes, in which `schema.ANY` is any JSON value.

    Returns the states behind each state and byte [states, 256], 0 where the text cannot go on, and which states may
    end. The first state is 1. Raises ValueError: another syntax, or no text.
    """
    found = _regular(pattern)
    return _filled(found, _value(schema.DEPTH)) if schema.ANY in pattern else found


@functools.cache
def _value(depth: int) -> tuple[np.ndarray, np.ndarray]:
    """Makes the automaton of JSON values with so many containers inside each other."""
    return _filled(_regular(schema.VALUE), _value(depth - 1)) if depth else _regular(schema.SCALAR)


def _regular(pattern: str) -> tuple[np.ndarray, np.ndarray]:
    # The library prefers the first of several matches, and drops the others where it ends; and it looks for a beginning
    # at every place, which takes exponential time. So each text stands between bytes 0, which texts do not have.
    try:
        index = outlines_core.Index(rf"\x00(?:{pattern})\x00", _BYTES)
    except ValueError as error:
        got = f"the regular expression {pattern[:200]!r}"
        raise ValueError(f"structured: got {got}, expected one that Rust's syntax has: {error}") from error
    found = index.get_transitions()
    first = found[index.get_initial_state()][0]
    number = {state: i for i, state in enumerate(dict.fromkeys([first, *found]), 1)}
    moves = np.zeros((len(number) + 1, 257), np.int64)
    for state, ways in found.items():
        moves[number[state], list(ways)] = [number[behind] for behind in ways.values()]
    ends, moves = np.isin(moves[:, 0], [number[state] for state in index.get_final_states()]), moves[:, :256]
    moves[:, 0] = 0
    require(bool(ends.any()), "structured", pattern[:200], "the regular expression of a text")
    return _least(moves, ends)


def _filled(
    outer: tuple[np.ndarray, np.ndarray], inner: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Puts an automaton in the place of each byte `schema.ANY`; what may follow it never goes on in it."""
    (moves, ends), (own, own_ends) = outer, inner
    moves, behind = moves.copy(), moves[:, ord(schema.ANY)]
    moves[:, ord(schema.ANY)] = 0
    parts, size = [moves], len(own) - 1
    start = {target: len(moves) + i * size for i, target in enumerate(np.unique(behind[behind > 0]))}  # of its state 1
    for state in np.flatnonzero(behind):
        moves[state] = np.where(own[1] > 0, own[1] - 1 + start[behind[state]], moves[state])
    for target, first in start.items():
        follows = np.where(own_ends[1:, None], moves[target], 0)
        parts.append(np.where(own[1:] > 0, own[1:] - 1 + first, follows))
        ends = np.concatenate([ends, own_ends[1:] & ends[target]])
    return _least(np.concatenate(parts), ends)


def _least(moves: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    columns, of_byte = np.unique(moves, axis=1, return_inverse=True)
    distance = np.where(ends, 0, len(moves))  # to an end: a first division, and a fine one
    while (nearer := np.minimum(distance, distance[columns].min(axis=1) + 1)).sum() < distance.sum():
        distance = nearer
    block, count = np.unique(distance, return_inverse=True)[1].reshape(-1), -1
    while block.max() > count:  # states with equal ways into equal blocks are one
        count = block.max()
        block = np.unique(np.column_stack([block, block[columns]]), axis=0, return_inverse=True)[1].reshape(-1)
    order = [block[0], block[1], *sorted({*range(count + 1)} - {block[0], block[1]})]
    block = np.argsort(order)[block]
    first = np.unique(block, return_index=True)[1]
    return block[columns[first]][:, of_byte.reshape(-1)], ends[first]


def _check(what: str, count: int) -> None:
    require(count < _MOST, "structured", count, f"a shape of fewer than {_MOST} {what}")


def _functions(moves: np.ndarray, tokens: _Tokens) -> tuple[np.ndarray, np.ndarray]:
    """Composes what tokens do. Returns functions of a state [functions, states], the first leads nowhere, and each
    token's: tokens that begin alike share the work, whatever their bytes.
    """
    columns, of_byte = np.unique(moves, axis=1, return_inverse=True)
    of_byte = of_byte.reshape(-1)
    functions = [np.zeros(len(moves), np.int64), np.arange(len(moves))]
    known = {function.tobytes(): number for number, function in enumerate(functions)}
    of_token = np.ones(len(tokens.ids), np.int64)
    for place in range(int(tokens.lengths[0])):
        count = np.searchsorted(-tokens.lengths, -place)  # tokens that are longer
        byte = of_byte[tokens.joined[tokens.places[:count] + place]]
        pairs, which = np.unique(of_token[:count] * 256 + byte, return_inverse=True)
        new = []
        for pair in pairs:
            function = columns[functions[pair // 256], pair % 256]
            new.append(known.setdefault(function.tobytes(), len(functions)))
            if new[-1] == len(functions):
                functions.append(function)
        of_token[:count] = np.array(new)[which.reshape(-1)]
    return np.stack(functions), of_token


def _forced(state: int, moves: np.ndarray, ends: np.ndarray, by_text: dict[bytes, int]) -> int:
    """Returns the longest token along the only way on from a state, or -1."""
    way = b""
    while len(way) < _FORCED and not ends[state] and np.count_nonzero(moves[state]) == 1:
        byte = int(np.argmax(moves[state]))
        way, state = way + bytes([byte]), moves[state, byte]
    return next((by_text[way[:end]] for end in range(len(way), 0, -1) if way[:end] in by_text), -1)


def _behind(before: Sequence[int], classes: np.ndarray, transitions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Puts states in front that wait for the tokens `before`; they count how many of these the text ends with."""
    states, columns = transitions.shape
    own = {token: columns + i for i, token in enumerate(dict.fromkeys(before))}
    transitions = np.column_stack([transitions, transitions[:, classes[list(own)]]])
    classes = classes.copy()
    classes[list(own)] = list(own.values())
    waiting = np.full((len(before), transitions.shape[1]), states)
    for held in range(len(before)):
        for token, column in own.items():
            text = [*before[:held], token]
            ends = next(n for n in range(held + 1, -1, -1) if text[len(text) - n :] == [*before[:n]])
            waiting[held, column] = 1 if ends == len(before) else states + ends
    return classes, np.concatenate([transitions, waiting])


def _halves(numbers: np.ndarray) -> np.ndarray:
    """Packs numbers of 16 bits, two in a word, the first in the low half."""
    flat = numbers.reshape(-1).astype("<u2")
    return np.pad(flat, (0, flat.size % 2)).view(np.int32)


def _texts(tokenizer: Any, size: int) -> list[bytes]:
    """Returns the bytes of each token; none of special ones, and of ids without a token.

    Raises ValueError: a tokenizer whose tokens have no bytes of their own.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    require(backend is not None, "structured", type(tokenizer).__name__, "an engine with a fast tokenizer")
    assert backend is not None
    described = json.loads(backend.to_str())
    decoder, added = json.dumps(described["decoder"]), {one["id"]: one for one in described["added_tokens"]}
    by_bytes, pieces = '"ByteLevel"' in decoder, any(name in decoder for name in ("ByteFallback", "Metaspace", "▁"))
    require(by_bytes or pieces, "structured", decoder, "a tokenizer of bytes (ByteLevel), or of sentencepiece")
    byte_of = {letter: byte for byte, letter in enumerate(_byte_letters())}

    def text(token: int) -> bytes:
        if token in added:  # the tags of calls (Qwen's <tool_call>) are text, and no special tokens
            return b"" if added[token]["special"] else added[token]["content"].encode()
        name = tokenizer.convert_ids_to_tokens(token)
        if name is None:
            return b""
        if by_bytes:
            return bytes(byte_of[letter] for letter in name) if byte_of.keys() >= {*name} else b""
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes([int(name[3:5], 16)])
        return name.replace("▁", " ").encode()

    return [text(token) for token in range(min(size, len(tokenizer)))] + [b""] * (size - len(tokenizer))


def _byte_letters() -> list[str]:
    """Returns the letter that stands for each byte in a vocabulary of bytes (GPT-2's)."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte if byte in shown else next(hidden)) for byte in range(256)]
