"""The core of an engine: it checks requests, queues them, and owns the parts that answer them.

The parts are the model runner (models and state on the device), the scheduler (which requests run when), and the engine
loop (which thread runs the scheduler's turns).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import jax

from eagle3_jax.config import AdaptConfig, DraftTree, FewBits
from eagle3_jax.decoding import arguments
from eagle3_jax.decoding.adapt.api import Learner
from eagle3_jax.decoding.arguments import KVDtype
from eagle3_jax.decoding.choice.tiers import choice_for
from eagle3_jax.decoding.device.memory import tokens_that_fit
from eagle3_jax.decoding.device.runner import ModelRunner
from eagle3_jax.decoding.device.shapes import Sizes
from eagle3_jax.decoding.loop import EngineLoop
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.decoding.prompt import Prompt, encode
from eagle3_jax.decoding.request import Name, Output, Request, report_ended
from eagle3_jax.decoding.scheduler import EngineStats, Scheduler
from eagle3_jax.decoding.text import end_ids
from eagle3_jax.decoding.tier import VANILLA
from eagle3_jax.decoding.warm_up import WarmUp
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.target import TargetModel

PAGE_SIZE = 128
GREEDY = SamplingParams()

_Core = TypeVar("_Core", bound="EngineCore")


class EngineCore:
    """Answers requests with a target model, faster with a draft."""

    def __init__(
        self,
        target: TargetModel,
        tokenizer: Any = None,
        draft: Draft | Literal["lookup"] | None = None,
        tree: DraftTree | Sequence[DraftTree] | Literal["auto"] = "auto",
        *,
        batch_size: int = 1,
        max_length: int = 2048,
        page_size: int = PAGE_SIZE,
        kv_tokens: int | None = None,
        memory_fraction: float | None = None,
        kv_dtype: KVDtype | None = None,
        draft_weights: FewBits | None = None,
        prefix_cache: bool = True,
        queue_limit: int | None = None,
        sample_drafts: bool = True,
        simulated_acceptance: float | None = None,
        adapt: AdaptConfig | None = None,
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        """Takes loaded models; `load` takes names and folders.

        Args:
            target: the target model, its weights in float32 or bfloat16, on one device or a mesh.
            tokenizer: a Hugging Face tokenizer.
            draft: a draft head or model; "lookup" copies drafts from the text so far; None is vanilla decoding.
            tree: shape of the draft; a chain for "lookup". "auto" chooses for every dispatch, vanilla decoding
                included, by measured costs and acceptance; until `warm_up` has measured, a chain of 3 (8 for "lookup").
                Several trees: the choice is among these and vanilla decoding.
            batch_size: sequences decoded together.
            max_length: most tokens of a prompt and its answer. Past the draft's `max_position_embeddings` drafting
                goes on, with a warning.
            page_size: tokens of a page, the unit of the caches and of prefix reuse; a multiple of 16 from 16 to 256.
            kv_tokens: capacity of the caches in tokens, shared by all requests; the default holds a full batch of
                `max_length` each.
            memory_fraction: instead of `kv_tokens`: share of the device's memory for weights and caches (SGLang's
                mem_fraction_static).
            kv_dtype: dtype of the target's keys and values; None is the weights' dtype. A narrower one may change
                tokens.
            draft_weights: quantises the draft's matrices and vocabulary; None leaves them as they are, but for 8 bits
                beside a quantised target. Fewer drafts may be accepted, the tokens stay the target's.
            prefix_cache: keeps the pages of ended requests for prompts with the same beginning.
            queue_limit: most requests that wait; one more is refused. None is no limit.
            sample_drafts: False: no tree draws its drafts (see `DraftTree`), so in float32 a seed gives vanilla
                decoding's answer, whatever is drafted.
            simulated_acceptance: for benchmarks: accepts each draft with this probability, whatever the target predicts
                (SGLang's SGLANG_SIMULATE_ACC_LEN). Answers are meaningless; `submit` and `stream` refuse.
            adapt: lets the head learn from the requests, beside them; None leaves it as it is.
            identity: the target's (`Target.identity`), for `adapt.folder`; `load` has it.

        Raises:
            ValueError: a tree or `draft_weights` without a draft, a draft of another target, a size out of range, or
                `adapt` with a draft that cannot learn.
            LockError, ManifestError: `adapt.folder` is in use, or holds other work.
        """
        if not isinstance(target, TargetModel):
            raise ValueError(f"target: got {target!r}, expected a loaded model; `Engine.load({target!r})` loads one")
        stored = arguments.stored_dtype(kv_dtype)
        longest = target.config.max_position_embeddings
        arguments.check_truths(prefix_cache=prefix_cache, sample_drafts=sample_drafts)
        arguments.check_sizes(batch_size, max_length, page_size, kv_tokens, memory_fraction, queue_limit, longest)
        arguments.check_draft_weights(draft_weights, drafts=isinstance(draft, Draft))
        self.tiers = choice_for(target.config, draft, tree, simulated_acceptance, sample_drafts=sample_drafts)
        if isinstance(draft, str):
            draft = None
        elif draft is not None and max_length > draft.head.config.max_position_embeddings:
            warnings.warn(
                f"max_length: got {max_length}, more than the {draft.head.config.max_position_embeddings} positions "
                "that the draft declares; behind them fewer drafts may be accepted, the tokens stay the target's",
                stacklevel=2,
            )
        every = self.tiers.tiers
        learner = None
        if not (adapt is None or isinstance(adapt, AdaptConfig)):
            raise ValueError(f"adapt: got {adapt!r}, expected AdaptConfig, or None")
        if adapt is not None:
            learner, target, draft = _learner(adapt, target, draft, simulated_acceptance, identity)
        learned = 0 if adapt is None else adapt.row_length
        sizes = Sizes.plan(batch_size, max_length, page_size, every, learned=learned)
        if memory_fraction is not None:
            kv_tokens = tokens_that_fit(target, draft, memory_fraction, sizes, every, stored)
        if kv_tokens is not None:
            sizes = Sizes.plan(batch_size, max_length, page_size, every, kv_tokens, learned)
        self.tokenizer, self.batch_size, self.max_length = tokenizer, batch_size, max_length
        self._end_ids = end_ids(target.config, tokenizer)
        self._learner, self._runner = learner, ModelRunner(target, draft, every, sizes, stored, draft_weights)
        self._schedule = functools.partial(
            Scheduler, eos=self._end_ids, prefix_cache=prefix_cache, queue_limit=queue_limit, learner=learner
        )
        self._scheduler = self._schedule(self._runner, self.tiers)
        self._loop = EngineLoop(self._scheduler)
        self._warm_up: WarmUp | None = None

    @property
    def target(self) -> TargetModel:
        """The target, packed and placed for decoding."""
        return self._runner.target

    @property
    def draft(self) -> Draft | None:
        """The draft head or model, packed and placed for decoding; None for "lookup" and vanilla decoding."""
        return self._runner.draft

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams = GREEDY,
        *,
        timeout: float | None = None,
        sample: int = 0,
        drafts: bool = True,
        adapt: bool = True,
    ) -> Request:
        """Queues a request, from any thread.

        Args:
            prompt: a string (one user turn), messages (both through the chat template), or token ids; of 1 to
                `max_length` - 1 tokens.
            params: parameters of one answer, `n` 1.
            timeout: seconds after which the answer ends with the tokens it has ("timeout"). None is no limit.
            sample: index among several answers to one prompt and seed.
            drafts: False, for comparisons, turns drafts off while all running requests ask for that; needs an engine
                that may choose vanilla decoding (`tree="auto"`, or several trees).
            adapt: False: no head learns from the request.

        Returns:
            The request, to wait for, iterate over or await.

        Raises:
            ValueError: an impossible request.
            QueueFullError: `queue_limit` requests wait already.
            RuntimeError: the engine simulates acceptance, or its mesh spans several processes.
        """
        arguments.check_submitted(params, timeout=timeout, sample=sample, drafts=drafts, adapt=adapt)
        if self.tiers.simulated is not None:
            raise RuntimeError("submit: got an engine with simulated_acceptance, which is for benchmarks alone")
        if self._runner.lockstep:
            raise RuntimeError("submit: got a mesh of several processes, expected one; there use `generate`")
        if not drafts and VANILLA not in self.tiers.tiers:
            raise ValueError("drafts: got False, expected an engine with a choice: this one drafts always")
        request = self._request("prompt", prompt, params, sample, drafts=drafts, adapt=adapt, timeout=timeout)
        self._scheduler.add([request], limited=True)
        return request

    def abort(self, *requests: Request) -> None:
        """Ends requests with the tokens that they have; a finished request stays as it is.

        Args:
            *requests: requests of this engine.
        """
        self._loop.abort(*requests)

    def on(self: _Core, runner: ModelRunner) -> _Core:
        """Makes an engine as this one, with what `warm_up` measured.

        Args:
            runner: another one, of the same models and sizes.
        """
        engine = copy.copy(self)
        engine.tiers, engine._runner = copy.deepcopy(self.tiers), runner
        engine._scheduler = self._schedule(runner, engine.tiers)
        engine._loop = EngineLoop(engine._scheduler)
        return engine

    def fail(self, error: Exception) -> None:
        """Ends all requests, and refuses further ones: the device is lost. Any thread may call.

        Args:
            error: what the requests raise.
        """
        self._scheduler.fail(error)

    def close(self) -> None:
        """Ends all requests with the tokens that they have ("abort"), refuses further ones, and frees the caches.

        A `with` block closes its engine. The weights are freed with the last reference to the engine.
        """
        self.abort(*self._scheduler.requests)
        self.finish()
        self.fail(RuntimeError("engine: got a request, expected none after `close`"))
        self._runner.reset()

    def __enter__(self: _Core) -> _Core:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def left(self, prompt: Sequence[int] = ()) -> int:
        """Counts the tokens to read and write until all requests are answered.

        Args:
            prompt: token ids of one more prompt, of which those count that no page of the caches holds.

        Raises:
            ValueError: token ids that the target does not have.
        """
        arguments.check_ids("prompt", prompt, self.target.config.vocab_size)
        return self._scheduler.left(prompt)

    def finish(self) -> None:
        """Answers all requests that were submitted so far, and waits for that."""
        self._loop.drive(lambda: not self._scheduler.has_work)

    def stats(self) -> EngineStats:
        """Returns a copy of the counters since the engine was made, and of its state now."""
        return dataclasses.replace(self._scheduler.stats(), stalled=self._loop.stalled())

    def encode(
        self,
        prompt: Prompt,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Encodes a prompt as `generate` does.

        Args:
            prompt: a string (one user turn), messages (both through the chat template), or token ids.
            chat_template_kwargs: variables of the chat template, such as `enable_thinking` of Qwen 3's; as in vLLM.
            tools: definitions of tools, in OpenAI's form, for the chat template.

        Returns:
            Token ids; for a string or messages with the answer's opening behind them.

        Raises:
            ValueError: a prompt of another kind, messages that the chat template refuses, or arguments of
                `apply_chat_template` among its variables.
        """
        return encode(self.tokenizer, prompt, chat_template_kwargs=chat_template_kwargs, tools=tools)

    def _request(self, name: str, prompt: Prompt, params: SamplingParams, sample: int, **options: Any) -> Request:
        ids = encode(self.tokenizer, prompt, name)
        arguments.check_request(name, ids, params, self.max_length, self.target.config.vocab_size, self._end_ids)
        limit = min(params.max_tokens, self.max_length - len(ids))
        return Request(self._loop, self.tokenizer, ids, params, limit, sample, **options)

    def _answer(
        self, take: Callable[[], tuple[Name, Request] | None], on_output: Callable[[Name, Output], object] | None
    ) -> None:
        """Answers named requests; one of them waits while the batch is full, so that a launch ends at a free slot.

        Args:
            take: the next request; None if there is none now. It is asked again after an answer.
        """
        left: dict[Request, Name] = {}
        try:
            while True:
                while len(left) <= self.batch_size and (item := take()) is not None:
                    name, request = item
                    left[request] = name
                    self._scheduler.add([request])
                if not left:
                    return
                try:
                    ended = self._scheduler.ended
                    if not any(request.done for request in left):
                        self._loop.drive(lambda ended=ended: self._scheduler.ended > ended)
                finally:
                    failure = report_ended(left, on_output)
                if failure is not None:
                    raise failure
        finally:
            self.abort(*left)


def _learner(
    adapt: AdaptConfig,
    target: TargetModel,
    draft: Draft | None,
    simulated: float | None,
    identity: Mapping[str, Any] | None,
) -> tuple[Learner, TargetModel, Draft]:
    """Makes the learner of an engine. Returns it, the target and the head to begin with, committed to their devices.

    A head is committed once it was trained. A program would be compiled once more for it if the first one were not.
    """
    if draft is None or simulated is not None:
        got = "no draft head" if draft is None else "simulated_acceptance"
        raise ValueError(f"adapt: got it with {got}, expected a draft head that learns")
    place = target.embed[...].sharding
    if not place.is_fully_addressable:
        raise ValueError("adapt: got a target on devices of several processes, expected one process")
    from eagle3_jax.decoding.adapt.learner import HeadLearner  # optimizers and checkpoints: seconds of imports

    learner = HeadLearner(adapt, target, draft, identity)
    if len(place.device_set) > 1:
        return learner, target, learner.draft  # the runner places the head
    return learner, *jax.device_put((target, learner.draft), place)
