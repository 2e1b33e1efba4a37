"""Requests in, tokens out: continuous batching over a fixed number of slots.

The host prefills a request, inserts it into a free slot, and lets the device run rounds until a slot is free again or
all are done. Shapes depend on the prompt's bucket and the number of cache slots alone, so programs are soon all
compiled.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import pathlib
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from eagle3_jax.config import DraftTree, MeshConfig, TargetConfig
from eagle3_jax.decoding import rounds
from eagle3_jax.decoding.detokenizer import Detokenizer
from eagle3_jax.decoding.prompt import Prompt, encode
from eagle3_jax.decoding.sampling import Sampling, SamplingParams
from eagle3_jax.decoding.tree import scratch_slots
from eagle3_jax.formats.sglang import load_draft
from eagle3_jax.mesh import constrain, decoding_mesh, mesh_of, put, replicated, shardings
from eagle3_jax.models.draft import Draft
from eagle3_jax.models.layers import SHARDING_RULES
from eagle3_jax.models.llama import Llama
from eagle3_jax.models.registry import Target, load_target

# Rounds between two looks of the host, at most; the device comes back earlier when it has nothing to do.
_ROUNDS = 64

GREEDY = SamplingParams()

prefill = jax.jit(rounds.prefill, static_argnames=("slots", "max_output", "tree", "greedy"))
decode = jax.jit(rounds.decode, static_argnames=("tree", "greedy"), donate_argnames="state")
_insert = jax.jit(rounds.insert, donate_argnames="state")


@jax.jit
def _key(seed: jax.Array, prompt: jax.Array) -> jax.Array:
    """A random key [1], replicated on the mesh that is set."""
    return constrain(jax.random.fold_in(jax.random.key(seed), prompt)[None], ())


@functools.partial(jax.jit, static_argnames="batch")
def _vacant(sequence: rounds.State, batch: int) -> rounds.State:
    """A batch of free slots, shaped like one sequence."""
    state = jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape[1:])), sequence)
    return constrain(dataclasses.replace(state, done=jnp.ones(batch, bool)), rounds.STATE_SHARDING_RULES)


@dataclasses.dataclass(frozen=True)
class Stats:
    """How well drafting did for one request.

    Attributes:
        rounds: target passes after prefill.
        accepted_per_position: in how many of them the draft at depth 1, 2, ... was accepted.
    """

    rounds: int
    accepted_per_position: list[int]

    @property
    def acceptance_length(self) -> float:
        """Tokens a round, the bonus included: 1 without a draft."""
        return 1 + sum(self.accepted_per_position) / max(self.rounds, 1)


@dataclasses.dataclass(frozen=True)
class Output:
    """One answer.

    Attributes:
        token_ids: without the prompt; the end-of-sequence token is the last one when `finish_reason` is "stop".
        text: without special tokens.
        finish_reason: "stop": end of sequence; "length": `max_tokens`, or the engine's `max_length`.
    """

    token_ids: list[int]
    text: str
    finish_reason: Literal["stop", "length"]
    stats: Stats


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a streamed answer; the last one has the finish reason. Text never ends inside a character."""

    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length"] | None


@dataclasses.dataclass(frozen=True)
class _Request:
    ids: list[int]
    params: SamplingParams
    limit: int  # params.max_tokens, or what max_length leaves


class Engine:
    """Answers prompts with a target model, faster with a draft; the tokens' distribution is the target's own."""

    def __init__(
        self,
        target: Llama,
        tokenizer: Any,
        draft: Draft | None = None,
        tree: DraftTree | None = None,
        *,
        batch_size: int = 1,
        max_length: int = 2048,
    ) -> None:
        """Takes loaded models; `load` takes names and folders.

        Args:
            tokenizer: a Hugging Face tokenizer.
            draft: None decodes without one (vanilla decoding).
            tree: shape of the draft; None is `DraftTree()`, a chain of 4, where a draft is given.
            batch_size: sequences decoded together.
            max_length: longest prompt and answer together, in tokens. Beyond what the draft head declares
                (`max_position_embeddings`) drafting goes on, with a warning.

        Raises:
            ValueError: a tree without a draft, a draft of another target, or a size out of range.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size: got {batch_size}, expected at least 1")
        if not 2 <= max_length <= target.config.max_position_embeddings:
            raise ValueError(
                f"max_length: got {max_length}, expected 2 to the target's {target.config.max_position_embeddings}"
            )
        if tree is not None and draft is None:
            raise ValueError(f"draft: got None, expected a draft head for {tree}")
        if draft is not None:
            tree = tree or DraftTree()
            _check_draft(draft, target, tree, max_length)
        self.target, self.tokenizer, self.tree, self.draft = target, tokenizer, tree, draft
        self.batch_size, self.max_length = batch_size, max_length
        self._mesh = mesh_of(target.embed[...])
        if self.draft is not None and self._mesh is not None:
            self.draft = _spread(self.draft, self._mesh)

    @classmethod
    def load(
        cls,
        target: TargetConfig | str | Target,
        draft: str | pathlib.Path | Draft | None = None,
        tree: DraftTree | None = None,
        batch_size: int = 1,
        max_length: int = 2048,
        *,
        dtype: Literal["float32", "bfloat16"] | None = None,
        mesh: MeshConfig | None = None,
    ) -> Engine:
        """Loads the models.

        Args:
            dtype: of weights and activations; None is the TargetConfig's, float32 for a name.
            mesh: spreads the models over its model axis; None is one device.
            draft: a loaded head, or its folder: that `export` wrote, or another that engines serve (see `load_draft`).

        Raises:
            ManifestError: the folder says that its head was trained with another target.
            DraftFormatError, ValueError: see `load_draft`, `__init__`.
        """
        if isinstance(target, Target):
            if dtype is not None or mesh is not None:
                raise ValueError(f"dtype, mesh: got {dtype}, {mesh}, expected None for a target that is loaded already")
            loaded = target
        else:
            config = TargetConfig(name=target) if isinstance(target, str) else target
            config = config if dtype is None else dataclasses.replace(config, dtype=dtype)
            loaded = load_target(config, None if mesh is None else decoding_mesh(mesh))
        if isinstance(draft, str | pathlib.Path):
            draft = load_draft(draft, target=loaded, dtype=loaded.model.embed[...].dtype)
        return cls(loaded.model, loaded.tokenizer, draft, tree, batch_size=batch_size, max_length=max_length)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        on_output: Callable[[int, Output], object] | None = None,
    ) -> list[Output]:
        """Answers prompts, in their order.

        Args:
            prompts: each a string (one user turn), messages (both through the chat template), or token ids.
            params: for all, or one for each prompt.
            on_output: called with a prompt's index and its answer as soon as it is finished.

        Raises:
            ValueError: a prompt that is too long, empty or of another kind; before any work begins.
        """
        if isinstance(prompts, str):
            raise ValueError(f"prompts: got the string {prompts[:40]!r}, expected a list of prompts")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"params: got {len(each)}, expected one for all or {len(prompts)}, one for each prompt")
        requests = [self._request(f"prompts[{i}]", p, each[i]) for i, p in enumerate(prompts)]
        outputs: dict[int, Output] = {}
        for index, output in self._run(requests):
            outputs[index] = output
            if on_output is not None:
                on_output(index, output)
        return [outputs[i] for i in range(len(requests))]

    def stream(self, prompt: Prompt, params: SamplingParams = GREEDY) -> Iterator[Piece]:
        """Answers one prompt piece by piece, one round at a time. Raises ValueError like `generate`."""
        request = self._request("prompt", prompt, params)
        greedy, slots = params.temperature == 0, self._slots([request])
        state = self._start(request, slots, greedy)
        sent, pending = 0, Detokenizer(self.tokenizer)
        while True:
            output = self._output(request, *_fetch(state, 0)) if np.asarray(state.done)[0] else None
            ids = np.asarray(state.output)[0, : np.asarray(state.num_output)[0]].tolist()
            text = pending.add(ids[sent:], last=output is not None)
            if output is not None:
                yield Piece(text, ids[sent:], output.finish_reason)
                return
            yield Piece(text, ids[sent:], None)
            sent = len(ids)
            state = self._decode(state, 1, 1, greedy)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt (see `decoding.prompt.encode`)."""
        return encode(self.tokenizer, prompt)

    def _request(self, name: str, prompt: Prompt, params: SamplingParams) -> _Request:
        ids = encode(self.tokenizer, prompt, name)
        if not 1 <= len(ids) < self.max_length:
            raise ValueError(f"{name}: got {len(ids)} tokens, expected 1 to {self.max_length - 1} (max_length - 1)")
        vocabulary = self.target.config.vocab_size
        if not 0 <= min(ids) <= max(ids) < vocabulary:
            raise ValueError(f"{name}: got token ids {min(ids)} to {max(ids)}, expected 0 to {vocabulary - 1}")
        return _Request(ids, params, min(params.max_tokens, self.max_length - len(ids)))

    def _slots(self, requests: list[_Request]) -> int:
        return cache_slots([(len(request.ids), request.limit) for request in requests], self.tree)

    def _start(self, request: _Request, slots: int, greedy: bool) -> rounds.State:
        """Prefills one request."""
        ids, params = request.ids, request.params
        tokens = np.zeros((1, bucket(len(ids))), np.int32)
        tokens[0, : len(ids)] = ids
        digest = zlib.crc32(np.asarray(ids, np.int32).tobytes())
        with self._devices():
            # Different prompts under one seed get different random numbers, the same prompt always the same.
            key = _key(np.uint32(params.seed), np.uint32(digest))
            sampling = Sampling(
                self._place([params.temperature], np.float32),
                self._place([params.top_k], np.int32),
                self._place([params.top_p], np.float32),
                key,
            )
            return prefill(
                self.target,
                self.draft,
                self._place(tokens, np.int32),
                self._place([len(ids)], np.int32),
                sampling,
                self._place([request.limit], np.int32),
                self._place([params.ignore_eos], bool),
                slots=slots,
                max_output=slots,
                tree=self.tree,
                greedy=greedy,
            )

    def _decode(self, state: rounds.State, max_rounds: int, stop_at: int, greedy: bool) -> rounds.State:
        with self._devices():
            return decode(self.target, self.draft, state, max_rounds, stop_at, tree=self.tree, greedy=greedy)

    def _place(self, value: Any, dtype: Any) -> jax.Array:
        """What the host says, on all devices; it says the same on every process that decodes on this mesh."""
        value = np.asarray(value, dtype)
        return jnp.asarray(value) if self._mesh is None else put(value, replicated(self._mesh))

    def _devices(self) -> contextlib.AbstractContextManager[object]:
        """Sets the target's mesh: kernels are split over the devices of the mesh that is set."""
        return contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)

    def _run(self, requests: list[_Request]) -> Iterator[tuple[int, Output]]:
        """Yields (index, answer) as they finish."""
        waiting = collections.deque(enumerate(requests))
        running: dict[int, int] = {}  # slot -> request
        slots, greedy = self._slots(requests), all(r.params.temperature == 0 for r in requests)
        batch = min(self.batch_size, len(requests))
        state = None
        while waiting or running:
            for slot in [slot for slot in range(batch) if slot not in running]:
                if waiting:
                    running[slot], request = waiting.popleft()
                    sequence = self._start(request, slots, greedy)
                    if batch > 1:
                        with self._devices():
                            sequence = _insert(_vacant(sequence, batch) if state is None else state, slot, sequence)
                    state = sequence
            assert state is not None
            stop_at = 1 if waiting else batch
            state = self._decode(state, _ROUNDS, stop_at, greedy)
            done = np.asarray(state.done)
            for slot in [slot for slot in running if done[slot]]:
                index = running.pop(slot)
                yield index, self._output(requests[index], *_fetch(state, slot))

    def _output(self, request: _Request, ids: list[int], rounds_: int, accepted: list[int]) -> Output:
        stopped = not request.params.ignore_eos and ids[-1] in self.target.config.eos_token_ids
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return Output(ids, text, "stop" if stopped else "length", Stats(rounds_, accepted))


def _check_draft(draft: Draft, target: Llama, tree: DraftTree, max_length: int) -> None:
    head = draft.head.config
    for field in ("vocab_size", "aux_layers"):
        got, expected = getattr(head, field), getattr(target.config, field)
        if got != expected:
            raise ValueError(f"draft.{field}: got {got}, expected the target's {expected}")
    if head.hidden_size != target.config.hidden_size:  # it reads the target's embeddings
        raise ValueError(f"draft.hidden_size: got {head.hidden_size}, expected {target.config.hidden_size}")
    if tree.topk > head.draft_vocab_size:
        raise ValueError(f"tree.topk: got {tree.topk}, expected at most the draft vocabulary, {head.draft_vocab_size}")
    if max_length > head.max_position_embeddings:
        warnings.warn(
            f"max_length: got {max_length}, more than the {head.max_position_embeddings} positions that the draft head "
            "declares; behind them fewer drafts may be accepted, the tokens stay the target's own",
            stacklevel=3,
        )


def _spread(draft: Draft, mesh: Mesh) -> Draft:
    """The draft on the target's devices: from elsewhere it would be sent there in every call."""
    head = jax.tree.map(
        lambda x, where: put(np.asarray(x), where), draft.head, shardings(draft.head, mesh, SHARDING_RULES)
    )
    return Draft(head, put(np.asarray(draft.token_ids), replicated(mesh)))


def _fetch(state: rounds.State, slot: int) -> tuple[list[int], int, list[int]]:
    """Tokens, rounds and accepted drafts per position of one slot."""
    output, count, taken, accepted = jax.device_get((state.output, state.num_output, state.rounds, state.accepted))
    return output[slot, : count[slot]].tolist(), int(taken[slot]), accepted[slot].tolist()


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def cache_slots(sizes: Sequence[tuple[int, int]], tree: DraftTree | None) -> int:
    """Slots that are enough for each (prompt, answer) of so many tokens, in steps that keep the programs few."""
    need = max((max(bucket(prompt), prompt + answer) for prompt, answer in sizes), default=0)
    return _round_up(need + scratch_slots(tree), 256)


def bucket(length: int) -> int:
    """Padded length of a prompt: multiples of an eighth of the next power of two, and of 64."""
    return _round_up(length, max(64, (1 << (length - 1).bit_length()) // 8))
