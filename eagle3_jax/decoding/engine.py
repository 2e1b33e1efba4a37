"""The engine: prompts in, tokens out. It checks requests, queues them, and owns the parts that answer them.

The parts are the model runner (models and state on the device), the scheduler (which requests run when), and the engine
loop (which thread runs the scheduler's turns).
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import pathlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

from eagle3_jax.config import AdaptConfig, DraftTree, FewBits, MeshConfig, TargetConfig, Weights
from eagle3_jax.config.checks import require
from eagle3_jax.decoding import arguments
from eagle3_jax.decoding.adapt.api import Learner
from eagle3_jax.decoding.arguments import KVDtype
from eagle3_jax.decoding.choice.tiers import TierChoice, choice_for
from eagle3_jax.decoding.device.memory import tokens_that_fit
from eagle3_jax.decoding.device.runner import ModelRunner, Runner
from eagle3_jax.decoding.device.shapes import Sizes
from eagle3_jax.decoding.load import load_models
from eagle3_jax.decoding.loop import EngineLoop
from eagle3_jax.decoding.measure import profile
from eagle3_jax.decoding.measure.profile import Round
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.decoding.prompt import Prompt, encode
from eagle3_jax.decoding.request import Name, Output, Piece, Request, report_ended
from eagle3_jax.decoding.scheduler import EngineStats, Scheduler
from eagle3_jax.decoding.structured.compile import Compiler, Table
from eagle3_jax.decoding.structured.pool import TablePool
from eagle3_jax.decoding.text import end_ids
from eagle3_jax.decoding.tier import VANILLA, Tier
from eagle3_jax.decoding.warm_up import WarmUp
from eagle3_jax.formats.packaged import AUTO
from eagle3_jax.models.checkpoint import trees
from eagle3_jax.models.checkpoint.fetch import Target
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.quantisation import quantised_as
from eagle3_jax.models.target import TargetModel
from eagle3_jax.runs import machine, processes
from eagle3_jax.runs.progress import Progress

PAGE_SIZE = 128
GREEDY = SamplingParams()

Asked = tuple[Name, Prompt, SamplingParams]


class Engine:
    """Answers prompts with a target model, faster with a draft; the tokens' distribution is the target's own."""

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
        structured_mib: int = 0,
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
            prefix_cache: keeps the pages of ended requests for prompts with the same beginning. Where the target
                has recurrent layers, copies of their states too, as many as `batch_size`.
            queue_limit: most requests that wait; one more is refused. None is no limit.
            structured_mib: MiB of the device's memory for the tables of structured outputs, all requests' together; 0
                refuses them. Equal shapes share a table.
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
        is_size = isinstance(structured_mib, int) and 0 <= structured_mib <= 4096
        require(is_size, "structured_mib", structured_mib, "a whole number from 0 to 4096")
        arguments.check_draft_weights(draft_weights, drafts=isinstance(draft, Draft))
        tiers = choice_for(target.config, draft, tree, simulated_acceptance, sample_drafts=sample_drafts)
        if isinstance(draft, str):
            draft = None
        elif draft is not None and max_length > draft.head.config.max_position_embeddings:
            declared = draft.head.config.max_position_embeddings
            got = f"max_length: got {max_length}, more than the {declared} positions that the draft declares"
            tells = "behind them fewer drafts may be accepted, the tokens stay the target's"
            warnings.warn(f"{got}; {tells}", stacklevel=2)
        every, learner, learned = tiers.tiers, None, 0
        require(adapt is None or isinstance(adapt, AdaptConfig), "adapt", adapt, "AdaptConfig, or None")
        if adapt is not None:
            learner, draft = _learner(adapt, target, draft, simulated_acceptance, identity)
            learned = adapt.row_length
        kept = (batch_size if prefix_cache else 0) if target.config.recurrent else None
        of_state = learned, kept, structured_mib * 2**18
        sizes = Sizes.plan(batch_size, max_length, page_size, every, None, *of_state)
        if memory_fraction is not None:
            kv_tokens = tokens_that_fit(target, draft, memory_fraction, sizes, every, stored)
        if kv_tokens is not None:
            sizes = Sizes.plan(batch_size, max_length, page_size, every, kv_tokens, *of_state)
        runner = ModelRunner(target, draft, every, sizes, stored, draft_weights)
        self._start(tokenizer, runner, tiers, prefix_cache, queue_limit, learner)

    def _start(self, tokenizer: Any, runner: Runner, tiers: TierChoice, *limits: Any) -> None:
        self.tokenizer, self.tiers = tokenizer, tiers
        self.batch_size, self.max_length = runner.sizes.batch, runner.sizes.max_length
        self._runner, self._limits = runner, limits
        self._learner: Learner | None = limits[-1]
        self._end_ids = end_ids(runner.target.config, tokenizer)
        self._compiler = Compiler(tokenizer, runner.target.config.vocab_size, self._end_ids)
        self._scheduler = Scheduler(runner, tiers, self._end_ids, *limits)
        self._loop, self._warm_up = EngineLoop(self._scheduler), None

    def on(self, runner: Runner) -> Engine:
        """Makes an engine as this one, with what `warm_up` measured, on another runner of the same models and sizes."""
        engine = Engine.__new__(Engine)
        engine._start(self.tokenizer, runner, copy.deepcopy(self.tiers), *self._limits)
        return engine

    @classmethod
    def load(
        cls,
        target: TargetConfig | str | pathlib.Path | Target,
        draft: str | pathlib.Path | Draft | None = AUTO,
        tree: DraftTree | Sequence[DraftTree] | Literal["auto"] = "auto",
        batch_size: int = 1,
        max_length: int = 2048,
        *,
        dtype: Literal["float32", "bfloat16"] | None = None,
        weights: Weights | None = None,
        quantization: Weights | None = None,
        mesh: MeshConfig | None = None,
        token_map: str | pathlib.Path | None = None,
        **options: Any,
    ) -> Engine:
        """Loads the models and makes an engine of them.

        Args:
            target: a name, a hub id, a folder, a GGUF file, or a loaded target.
            draft: "auto", the default, is the head packaged for this target, else vanilla decoding. "lookup" copies
                drafts from the text. "mtp" is the MTP layer in the target's own checkpoint (SGLang's NEXTN). None is
                vanilla decoding. Otherwise a loaded head; the folder of a head, from `export` or in another engine's
                form (see `load_draft`); or the folder or name of a smaller model with the target's vocabulary (SGLang's
                STANDALONE).
            tree, batch_size, max_length, **options: see `__init__`.
            dtype: dtype of weights and activations; None is the TargetConfig's, float32 for a name.
            weights: quantises the target's matrices at load, see `TargetConfig`; None is the TargetConfig's.
            quantization: `weights` by the name of vLLM and SGLang.
            mesh: shards the models over its model axis; None is one device.
            token_map: draft vocabulary of an EAGLE-2 head given by its folder (FR-Spec), see `load_draft`.

        Returns:
            An engine that answers at once, and compiles each program at its first use; see `warm_up`.

        Raises:
            ValueError: arguments that do not go together, or do not fit the target.
            ManifestError, DraftFormatError: see `load_draft`.
        """
        require(None in (weights, quantization), "weights, quantization", (weights, quantization), "one of them")
        model, tokenizer, head, identity = load_models(
            target, draft, dtype=dtype, weights=weights or quantization, mesh=mesh, token_map=token_map
        )
        options |= {"batch_size": batch_size, "max_length": max_length, "identity": identity}
        return cls(model, tokenizer, head, tree, **options)

    @property
    def target(self) -> TargetModel:
        """The target, packed and placed for decoding."""
        return self._runner.target

    @property
    def draft(self) -> Draft | None:
        """The draft head or model, packed and placed for decoding; None for "lookup" and vanilla decoding."""
        return self._runner.draft

    @property
    def own_runner(self) -> ModelRunner:
        """The model runner. Raises RuntimeError: the engine is on several hosts, see `hosts.api.lead`."""
        if isinstance(self._runner, ModelRunner):
            return self._runner
        expected = "`warm_up` and the like before `lead`; for other weights start all processes again"
        raise RuntimeError(f"got an engine on several hosts, expected {expected}")

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        on_output: Callable[[int, Output], object] | None = None,
    ) -> list[Output]:
        """Answers prompts, in their order; the n answers to one prompt follow each other.

        Args:
            prompts: each as for `encode`; messages alone are one chat.
            params: for all, or one for each prompt. The default is greedy, 128 tokens at most.
            on_output: called with the index and the answer of each finished request at once. If it raises, answers
                that ended together are still reported; then its first exception is raised and the rest is aborted.

        Returns:
            An answer for each prompt, and for each of its `n`.

        Raises:
            ValueError: a prompt that is too long, empty or of another kind; before any work begins.
            Exception: the failure of the device that ended one of these requests.
        """
        if isinstance(prompts, list | tuple) and prompts and all(isinstance(one, Mapping) for one in prompts):
            prompts = [cast(Prompt, prompts)]
        each = arguments.one_for_each(params, prompts)
        requests = [
            self._request(f"prompts[{i}]", prompt, each[i], sample)
            for i, prompt in enumerate(prompts)
            for sample in range(each[i].n)
        ]
        waiting = enumerate(requests)
        self._answer(lambda: next(waiting, None), on_output)
        return [request.output for request in requests if request.output is not None]

    def converse(self, asked: Iterator[Asked[Name]], on_output: Callable[[Name, Output], Asked[Name] | None]) -> None:
        """Answers a stream of prompts and what follows their answers; the batch stays full until the stream ends.

        On several processes every process calls this with the same prompts.

        Args:
            asked: a name, a prompt and the parameters of one answer (`n` 1), read when there is room for it.
            on_output: as of `generate`, with the name. It returns the next prompt of that conversation, which is
                answered before others, or None.

        Raises: see `generate`.
        """
        following: collections.deque[Asked[Name]] = collections.deque()

        def take() -> tuple[Name, Request] | None:
            if (item := following.popleft() if following else next(asked, None)) is None:
                return None
            name, prompt, params = item
            arguments.check_submitted(params)
            return name, self._request("prompt", prompt, params, 0)

        def report(name: Name, output: Output) -> None:
            if (item := on_output(name, output)) is not None:
                following.append(item)

        self._answer(take, report)

    def stream(self, prompt: Prompt, params: SamplingParams = GREEDY) -> Iterator[Piece]:
        """Answers one prompt piece by piece; the last has a finish reason. Closing the iterator aborts the request.

        Raises as `submit` does, and the failure of the device that ended the request.
        """
        request = self.submit(prompt, params)
        try:
            yield from request
        finally:
            request.abort()
        if request.failure is not None:
            raise request.failure

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
            prompt: as for `encode`; of 1 to `max_length` - 1 tokens.
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
        if self.tiers.tiers[-1].simulated is not None:
            raise RuntimeError("submit: got an engine with simulated_acceptance, which is for benchmarks alone")
        if self._runner.lockstep:
            raise RuntimeError("submit: got a mesh of several processes, expected one; there use `generate`")
        if not drafts and VANILLA not in self.tiers.tiers:
            raise ValueError("drafts: got False, expected an engine with a choice: this one drafts always")
        request = self._request("prompt", prompt, params, sample, drafts=drafts, adapt=adapt, timeout=timeout)
        self._scheduler.add([request], limited=True)
        return request

    def abort(self, *requests: Request) -> None:
        """Ends requests of this engine with the tokens that they have; a finished request stays as it is."""
        self._loop.abort(*requests)

    def encode(
        self,
        prompt: Prompt,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Encodes a prompt as `generate` does: token ids, for a string or messages with the answer's opening behind.

        Args:
            prompt: a string (one user turn), messages (both through the chat template), or token ids.
            chat_template_kwargs: variables of the chat template, such as `enable_thinking` of Qwen 3's; as in vLLM.
            tools: definitions of tools, in OpenAI's form, for the chat template.

        Raises:
            ValueError: another kind of prompt, messages that the template refuses, or variables that it does not take.
        """
        return encode(self.tokenizer, prompt, chat_template_kwargs=chat_template_kwargs, tools=tools)

    def stats(self) -> EngineStats:
        """Returns a copy of the counters since the engine was made, and of its state now."""
        stats, warm_up = self._scheduler.stats(), self._warm_up
        ready, planned = (0, 0) if warm_up is None else (warm_up.ready, warm_up.planned)
        return dataclasses.replace(stats, stalled=self._loop.stalled(), ready_programs=ready, planned_programs=planned)

    def left(self, prompt: Sequence[int] = ()) -> int:
        """Counts the tokens to read and write until all requests are answered.

        Of one more prompt, by its token ids, those count that no page of the caches holds. Raises ValueError: token ids
        that the target does not have.
        """
        arguments.check_ids("prompt", prompt, self.target.config.vocab_size)
        return self._scheduler.left(prompt)

    def finish(self) -> None:
        """Answers all requests that were submitted so far, and waits for that."""
        self._loop.drive(lambda: not self._scheduler.has_work)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fail(self, error: Exception) -> None:
        """Ends all requests by this error, and refuses further ones: the device is lost. Any thread may call."""
        self._scheduler.fail(error)

    def close(self) -> None:
        """Ends all requests with the tokens that they have ("abort"), refuses further ones, and frees the caches.

        A `with` block closes its engine. The weights are freed with the last reference to the engine.
        """
        self.abort(*self._scheduler.requests)
        self.finish()
        self.fail(RuntimeError("engine: got a request, expected none after `close`"))
        self._runner.reset()

    def warm_up(
        self,
        cache: str | pathlib.Path | None = None,
        *,
        progress: Progress = True,
        greedy_alone: bool = False,
        background: bool = False,
    ) -> None:
        """Compiles all programs ahead of requests, and measures the costs of rounds (`tree="auto"`).

        From then on rounds are as wide as the traffic. On a GPU products of few rows are padded to the number of rows
        that is measured to cost least. The caches are emptied.

        Args:
            cache: a folder that makes the next start fast: the measured costs, and what is compiled from now on,
                unless JAX's own setting names a folder. None measures; programs stay where `load_target` keeps them.
            progress: True shows bars on a terminal and lines elsewhere, False nothing; a function gets the lines, at
                most one every 15 seconds of a stage.
            greedy_alone: leaves out the costs of requests with a temperature or other sampling parameters.
            background: returns as soon as requests are answered without a compilation, by rounds of the whole batch. A
                thread of low priority compiles the rest, and measures while no request runs. `stats` tells how many
                programs are ready. Several processes, which must compile and measure alike, return when all is done.

        Raises:
            RuntimeError: requests run, or an earlier warm-up does.
        """
        if self._warm_up is not None and self._warm_up.running:
            raise RuntimeError("warm_up: got one that still runs, expected none")
        runner, folder = self.own_runner, None if cache is None else pathlib.Path(cache).expanduser()
        background = background and processes.count() == 1
        with self._loop.exclusive("warm_up"):
            if folder is not None:
                machine.keep_programs(folder)
            runner.pad(profile.cheapest_rows(runner))
            self._scheduler.forget_device()
            self._warm_up = WarmUp(runner, self.tiers, folder, progress, greedy_alone)
            self._warm_up.first()
            if self._learner is not None:
                self._learner.compile()
            if background:
                self._warm_up.rest_in_background(self._loop.lend)  # which waits for the end of this block
            else:
                self._warm_up.rest(lambda _: contextlib.nullcontext(lambda: None))
                self._scheduler.forget_device()

    def profile(self, tier: Tier) -> Round:
        """Measures a greedy round in one of `engine.tiers.tiers`, and its stages, all slots busy; empties the caches.

        Raises RuntimeError: requests run.
        """
        with self._loop.exclusive("profile"):
            measured = profile.measure(self.own_runner, tier)
            self._scheduler.forget_device()
            return measured

    def replace_draft(self, draft: Draft) -> None:
        """Drafts with another head, such as the next training step's, without compiling again; empties the caches.

        On a CPU a matrix is rounded to bfloat16 where the first head's was stored so, since bfloat16 held its numbers.

        Raises:
            ValueError: a head of another shape or dtype, an engine without one, or one with `adapt`.
            RuntimeError: requests run.
        """
        require(isinstance(draft, Draft), "draft", draft, "a loaded head, see `load_draft`")
        before = None if self.draft is None else (self.draft.head.config, self.draft.head.dtype)
        if (got := (draft.head.config, draft.head.dtype)) != before:
            raise ValueError(f"draft: got a head of {got}, expected one of {before}")
        if self._learner is not None:
            raise ValueError("draft: got another head, expected none: this engine's own head learns")
        runner = self.own_runner
        with self._loop.exclusive("replace_draft"):
            runner.replace_draft(draft)
            self.tiers.renew()
            self._scheduler.forget_device()

    def replace_target(self, weights: Any) -> None:
        """Goes on with other weights of the target, such as the next step's of a policy, without compiling again.

        Running requests go on between two dispatches (vLLM's pause mode "keep", SGLang's "in_place"): their tokens
        stay, and the caches keep what the weights before have read of them. No later request reuses that. Each token's
        log-probabilities are those of the weights that chose it. The engine keeps copies in its own dtype, few bits and
        layout: the caller may donate the arrays.

        On a CPU, matrices that bfloat16 holds are stored so. The first weights that it does not hold widen them, and
        each program is compiled once more. So it is with scales of groups (`int4`) and float16.

        Args:
            weights: a `TargetModel` of this architecture, or its parameters by Hugging Face's names, or a Tunix or
                MaxText model's, see `trees.target_of`; floats of any dtype. On a mesh of several processes each calls
                this, between calls of `generate`.

        Raises:
            WeightsError: a ValueError with every missing, surplus or misshapen array, and those that are not finite, by
                name; the engine goes on with the weights before.
            ValueError: an engine whose checkpoint's own few bits no floats are rounded to ("stored").
            RuntimeError: an engine on several hosts, see `hosts.api.lead`.
        """
        runner, dtype = self.own_runner, self.target.embed[...].dtype
        target = quantised_as(runner.few_bits, trees.target_of(weights, self.target.config, dtype, runner.mesh))
        packed = runner.packed_target(target)
        if self._learner is not None:
            self._learner.teach(packed.embed[...], target.lm_head[...] if hasattr(target, "lm_head") else None)
        self._scheduler.replace_target(packed)
        self._loop.drive(lambda: self._scheduler.target is None)

    def _request(self, name: str, prompt: Prompt, params: SamplingParams, sample: int, **options: Any) -> Request:
        ids = encode(self.tokenizer, prompt, name)
        arguments.check_request(name, ids, params, self.max_length, self.target.config.vocab_size, self._end_ids)
        limit, table = min(params.max_tokens, self.max_length - len(ids)), self._table(params)
        return Request(self._loop, self.tokenizer, ids, params, limit, sample, table=table, **options)

    def _table(self, params: SamplingParams) -> Table | None:
        """Returns the table of a request's shape. Raises ValueError: there is none, or it never fits."""
        if params.structured is None:
            return None
        words = self._runner.sizes.tables
        require(words > 0, "structured", params.structured, "None: this engine has structured_mib 0")
        table = self._compiler.table(params.structured)
        most, size = TablePool(words, self.target.config.vocab_size).most, table.words.size
        fits = f"{max(most, 0) / 2**18:.1f} MiB at most, see structured_mib"
        require(size <= most, "structured", f"a table of {size / 2**18:.1f} MiB", fits)
        return table

    def _answer(
        self, take: Callable[[], tuple[Name, Request] | None], on_output: Callable[[Name, Output], object] | None
    ) -> None:
        """Answers named requests; one of them waits while the batch is full, so that a dispatch ends at a free slot.

        `take` gives the next request, None if there is none now; it is asked again after an answer.
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
    adapt: AdaptConfig, target: TargetModel, draft: Draft | None, simulated: float | None, identity: Any
) -> tuple[Learner, Draft]:
    """Makes the learner of an engine. Returns it and the head to begin with."""
    here = target.embed[...].sharding.is_fully_addressable
    if draft is None or simulated is not None or not here:
        got = "no draft head" if draft is None else "simulated_acceptance"
        got = got if here else "a target on devices of several processes"
        raise ValueError(f"adapt: got it with {got}, expected a draft head that learns in one process")
    from eagle3_jax.decoding.adapt.learner import HeadLearner  # optimizers and checkpoints: seconds of imports

    learner = HeadLearner(adapt, target, draft, identity)
    return learner, learner.draft
