"""The engine: prompts in, tokens out. The public face of decoding; `EngineCore` does the work."""

from __future__ import annotations

import collections
import contextlib
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

from eagle3_jax.config import DraftTree, MeshConfig, TargetConfig, Weights
from eagle3_jax.decoding import arguments
from eagle3_jax.decoding.core import GREEDY, EngineCore
from eagle3_jax.decoding.load import load_models
from eagle3_jax.decoding.measure import profile
from eagle3_jax.decoding.measure.profile import Round
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.decoding.prompt import Prompt
from eagle3_jax.decoding.request import Name, Output, Piece, Request
from eagle3_jax.decoding.tier import Tier
from eagle3_jax.decoding.warm_up import WarmUp
from eagle3_jax.formats.packaged import AUTO
from eagle3_jax.models.checkpoint import trees
from eagle3_jax.models.checkpoint.fetch import Target
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.runs import machine, processes
from eagle3_jax.runs.progress import Progress

Asked = tuple[Name, Prompt, SamplingParams]


class Engine(EngineCore):
    """Answers prompts with a target model, faster with a draft; the tokens' distribution is the target's own."""

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
            target: a name, a hub id, a folder, or a loaded target.
            draft: "auto", the default, is the head packaged for this target, else vanilla decoding. "lookup" copies
                drafts from the text. "mtp" is the MTP layer in the target's own checkpoint (MiMo, DeepSeek-V3; SGLang's
                NEXTN). None is vanilla decoding. Otherwise a loaded head; the folder of a head, from `export` or in
                another engine's form (see `load_draft`); or the folder or name of a smaller model with the target's
                vocabulary (SGLang's STANDALONE).
            tree: shape of the draft, see `__init__`. "auto", the default, chooses for every dispatch.
            batch_size: sequences decoded together.
            max_length: most tokens of a prompt and its answer, at most the target's positions.
            dtype: dtype of weights and activations; None is the TargetConfig's, float32 for a name.
            weights: quantises the target's matrices at load, see `TargetConfig`; None is the TargetConfig's.
            quantization: `weights` by the name of vLLM and SGLang.
            mesh: shards the models over its model axis; None is one device.
            token_map: draft vocabulary of an EAGLE-2 head given by its folder (FR-Spec), see `load_draft`.
            **options: the keyword arguments of `__init__`.

        Returns:
            An engine that answers at once, and compiles each program at its first use; see `warm_up`.

        Raises:
            ValueError: arguments that do not go together, or do not fit the target.
            ManifestError, DraftFormatError: see `load_draft`.
        """
        if weights is not None and quantization is not None:
            raise ValueError(f"weights, quantization: got {weights!r} and {quantization!r}, expected one of them")
        model, tokenizer, head, identity = load_models(
            target, draft, dtype=dtype, weights=weights or quantization, mesh=mesh, token_map=token_map
        )
        sizes = {"batch_size": batch_size, "max_length": max_length}
        return cls(model, tokenizer, head, tree, **sizes, identity=identity, **options)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        on_output: Callable[[int, Output], object] | None = None,
    ) -> list[Output]:
        """Answers prompts, in their order; the n answers to one prompt follow each other.

        Args:
            prompts: each a string (one user turn), messages (both through the chat template), or token ids; messages
                alone are one chat.
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
            on_output: called with the name and the answer of each finished request at once. It returns the next prompt
                of that conversation, which is answered before others, or None. If it raises, see `generate`.

        Raises:
            ValueError: a prompt that is too long, empty or of another kind.
            Exception: the failure of the device that ended one of these requests.
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
        """Answers one prompt piece by piece; closing the iterator aborts the request.

        Args:
            prompt: a string (one user turn), messages (both through the chat template), or token ids.
            params: parameters of one answer, `n` 1.

        Yields:
            Pieces of the answer; the last one has a finish reason.

        Raises:
            ValueError, QueueFullError: see `submit`.
            Exception: the failure of the device that ended the request.
        """
        request = self.submit(prompt, params)
        try:
            yield from request
        finally:
            request.abort()
        if request.failure is not None:
            raise request.failure

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
            background: returns as soon as requests are answered without a compilation, by rounds of the whole batch,
                without drafts or with the default ones. A thread of low priority compiles the rest. It measures while
                no request runs, and gives way to one within a dispatch. `stats` tells how many programs are ready.
                Where there are several processes, which must compile and measure alike, it returns when all is done.

        Raises:
            RuntimeError: requests run, or an earlier warm-up does.
        """
        if self._warm_up is not None and self._warm_up.running:
            raise RuntimeError("warm_up: got one that still runs, expected none")
        folder = None if cache is None else pathlib.Path(cache).expanduser()
        background = background and processes.count() == 1
        with self._loop.exclusive("warm_up"):
            if folder is not None:
                machine.keep_programs(folder)
            self._runner.pad_products()
            self._scheduler.forget_device()
            self._warm_up = WarmUp(self._runner, self.tiers, folder, greedy_alone=greedy_alone, progress=progress)
            self._warm_up.first()
            if self._learner is not None:
                self._learner.compile()
            if not background:
                self._warm_up.rest(lambda _: contextlib.nullcontext(lambda: None))
                self._scheduler.forget_device()
        if background:
            self._warm_up.rest_in_background(self._loop.lend)

    def profile(self, tier: Tier) -> Round:
        """Measures a greedy round with all slots busy, and its stages; empties the caches.

        Args:
            tier: one of `engine.tiers.tiers`.

        Returns:
            Seconds of the round and of each stage, and the bytes that the round must read.

        Raises:
            RuntimeError: requests run.
        """
        with self._loop.exclusive("profile"):
            measured = profile.measure(self._runner, tier)
            self._scheduler.forget_device()
            return measured

    def replace_draft(self, draft: Draft) -> None:
        """Drafts with another head of the same shape, such as the next training step's, without compiling again.

        On a CPU a matrix is rounded to bfloat16 where the first head's was stored so, since bfloat16 held its numbers.
        The caches are emptied.

        Args:
            draft: a head with the config and dtype of the engine's own.

        Raises:
            ValueError: a head of another shape or dtype, an engine without one, or one with `adapt`.
            RuntimeError: requests run.
        """
        if not isinstance(draft, Draft):
            raise ValueError(f"draft: got {draft!r}, expected a loaded head, see `load_draft`")
        before = None if self.draft is None else (self.draft.head.config, self.draft.head.dtype)
        if (got := (draft.head.config, draft.head.dtype)) != before:
            raise ValueError(f"draft: got a head of {got}, expected one of {before}")
        if self._learner is not None:
            raise ValueError("draft: got another head, expected none: this engine's own head learns")
        with self._loop.exclusive("replace_draft"):
            self._runner.replace_draft(draft)
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
            RuntimeError: an engine on several hosts, see `hosts.lead`.
        """
        dtype, mesh = self.target.embed[...].dtype, self._runner.mesh
        target = self._runner.quantised_target(trees.target_of(weights, self.target.config, dtype, mesh))
        packed = self._runner.packed_target(target)
        if self._learner is not None:
            self._learner.teach(packed.embed[...], target.lm_head[...] if hasattr(target, "lm_head") else None)
        self._scheduler.replace_target(packed)
        self._loop.drive(lambda: not self._scheduler.target_waits)
