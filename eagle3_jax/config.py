"""Run configuration: one YAML file per run, one frozen dataclass per verb, every check of a value.

`load` reads the YAML, applies dotted command-line overrides, and validates the whole before any verb begins work.
Unknown keys, wrong types and impossible combinations are refused by field name.
"""

from __future__ import annotations

import dataclasses
import difflib
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, get_args

import pydantic
import tyro
import yaml

Dtype = Literal["float32", "bfloat16"]  # of weights and activations

_STRICT = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False)


def _require(condition: bool, field: str, got: object, expected: str) -> None:
    if not condition:
        raise ValueError(f"{field}: got {got!r}, expected {expected}")


def _check_token_map(section: str, draft: str | None, token_map: str | None) -> None:
    """Beside drafts that have no folder, or the run's own, which has a vocabulary, it would do nothing."""
    folder = draft not in (None, "auto", "lookup", "mtp", "none")
    expected = f"null, or the folder of a head of EAGLE-2 as {section}.draft (got {draft!r})"
    _require(token_map is None or folder, f"{section}.token_map", token_map, expected)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftTree:
    """Size of the draft, in SGLang's terms.

    Attributes:
        num_steps: depth of the tree; at most this many drafted tokens can be accepted in one round.
        topk: children kept per expanded node; 1 is a chain.
        num_draft_tokens: nodes verified per round, the root included.
        sample_drafts: requests with a temperature get drafts that are drawn from the head's distribution, and
            multi-candidate rejection sampling; otherwise they too get the head's best tokens, and SGLang's target-only
            rule. The answers' distribution is the target's in both.
        lookup_tokens: tokens copied from the text so far that compete with the head's candidates; 0 is none.
    """

    __pydantic_config__ = _STRICT

    num_steps: int = 4
    topk: int = 1
    num_draft_tokens: int = 5
    sample_drafts: bool = True
    lookup_tokens: int = 0

    def __post_init__(self) -> None:
        s, k, n, copied = self.num_steps, self.topk, self.num_draft_tokens, self.lookup_tokens
        _require(s >= 1, "num_steps", s, "at least 1")
        _require(k >= 1, "topk", k, "at least 1")
        _require(copied >= 0, "lookup_tokens", copied, "at least 0")
        if k == 1 and not copied:
            _require(n == s + 1, "num_draft_tokens", n, f"num_steps + 1 = {s + 1} for a chain (topk=1)")
        pool = k + (s - 1) * k * k + copied
        _require(s < n <= pool + 1, "num_draft_tokens", n, f"num_steps + 1 = {s + 1} to {pool + 1} (root + candidates)")

    @property
    def depth(self) -> int:
        """Most drafts that one round accepts."""
        return max(self.num_steps, self.lookup_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """The model that is made faster.

    Attributes:
        name: a registered name ("smollm2-135m-instruct": 4-bit weights from a Python package), a hub id ("org/model",
            "org/model@revision"), or a Hugging Face folder.
        dtype: dtype of weights and activations; float32 is the exact mode.
        aux_layers: boundaries b (the residual stream entering block b) whose states feed the draft head;
            None is (2, n // 2, n - 3).
    """

    __pydantic_config__ = _STRICT

    name: str = "smollm2-135m-instruct"
    dtype: Dtype = "float32"
    aux_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        layers = self.aux_layers
        _require(self.dtype in get_args(Dtype), "target.dtype", self.dtype, " or ".join(map(repr, get_args(Dtype))))
        ascending = layers is None or (len(layers) > 0 and layers[0] >= 0 and sorted(set(layers)) == list(layers))
        _require(ascending, "target.aux_layers", layers, "ascending, distinct boundaries, none below 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Shape of the draft head; None takes the target's value.

    Attributes:
        vocab_size: draft vocabulary, the most frequent tokens of the training conversations.
        intermediate_size: of the MLP.
        num_attention_heads: of queries.
        num_key_value_heads: of keys and values.
        head_dim: numbers of one head.
        rope_theta: RoPE base of the head (its own: not inherited from the target).
        max_position_embeddings: longest context that the head declares. An engine whose context is longer than that
            needs an override to serve it (SGLang), so less than the target's only where drafting must end there.
        fc_norm: a norm for each hidden state in front of `fc`; with `norm_output` the head is EAGLE-3.1 (as vLLM and
            SGLang name it).
        norm_output: the normed output recurs, not the raw one; with `fc_norm` the head is EAGLE-3.1.
    """

    __pydantic_config__ = _STRICT

    vocab_size: int = 32000
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float = 10000.0
    max_position_embeddings: int | None = None
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        for field in (*sizes, "max_position_embeddings"):
            value = getattr(self, field)
            _require(value is None or value >= 1, f"draft.{field}", value, "at least 1")
        _require(self.rope_theta > 0, "draft.rope_theta", self.rope_theta, "more than 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices as data x model axes.

    Attributes:
        data: replicas, among which the batch is divided; 0 takes every device that `model` leaves over.
        model: devices over which each replica's weights are split (tensor parallelism).
    """

    __pydantic_config__ = _STRICT

    data: int = 0
    model: int = 1

    def __post_init__(self) -> None:
        _require(self.data >= 0, "mesh.data", self.data, "0 (all that is left over) or more")
        _require(self.model >= 1, "mesh.model", self.model, "at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackagedSource:
    """The prompts that come with this package (five categories)."""

    __pydantic_config__ = _STRICT
    kind: Literal["packaged"]
    limit: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonlSource:
    """A JSONL file: OpenAI `messages`, ShareGPT `conversations`, or plain `prompt` (see data.sources)."""

    __pydantic_config__ = _STRICT
    kind: Literal["jsonl"]
    path: str
    category: str = "jsonl"
    limit: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConversationsSource:
    """A JSONL file of conversations that another engine (SGLang, vLLM) let the target have.

    OpenAI `messages` or ShareGPT `conversations`, with the assistant's answers (see data.sources.conversations). They
    are filtered and split like prompts, by what the users say: of several conversations on (nearly) the same prompt the
    first stays. `prepare.personal_data` and template markers are looked for in the answers too. `regenerate` passes
    them on as they are, and names the file as who answered; nothing can check that it was this target, at these
    settings: a head learns what it is given.
    """

    __pydantic_config__ = _STRICT
    kind: Literal["conversations"]
    path: str
    category: str = "conversations"
    limit: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TfdsSource:
    """A `tfds.data_source`; `field` names the text feature that holds the prompt."""

    __pydantic_config__ = _STRICT
    kind: Literal["tfds"]
    name: str
    field: str
    split: str = "train"
    category: str = "tfds"
    limit: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfSource:
    """Prompts that the target writes itself, given only the opening of its template's user turn.

    Attributes:
        max_tokens: of a user's turn, and of the answers between two of them.
        turns: of the user, at most. What the target answers in between is not kept: `regenerate` lets it answer again.
        openings: how the first turn begins, of one prompt after the other ("Write a Python function").
        system: the system prompt; None is the template's own.
    """

    __pydantic_config__ = _STRICT
    kind: Literal["self"]
    count: int
    category: str = "self"
    temperature: float = 1.0
    max_tokens: int = 128
    turns: int = 1
    openings: tuple[str, ...] = ()
    system: str | None = None


Source = Annotated[
    PackagedSource | JsonlSource | ConversationsSource | TfdsSource | SelfSource, pydantic.Field(discriminator="kind")
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """prompts -> clean, de-duplicated, split prompts.

    Attributes:
        near_duplicate: Jaccard similarity of MinHash shingles from which a prompt counts as a duplicate.
        personal_data: replace what the recognisers find by its kind ("<EMAIL_ADDRESS>"), or drop the prompt.
        sources: where prompts come from, read in this order.
        held_out: share of prompts kept for measurement, chosen by content hash.
        max_chars: longer prompts are rejected (the answers of `conversations` may be as long as they are).
        batch_size: of the engine that lets the target write prompts (source `self`).
        benchmarks: JSONL files of benchmarks; a prompt that shares eight words in a row with one is rejected.
    """

    __pydantic_config__ = _STRICT
    sources: tyro.conf.Fixed[tuple[Source, ...]] = (PackagedSource(kind="packaged"),)
    near_duplicate: float = 0.8
    personal_data: Literal["redact", "drop"] = "redact"
    held_out: float = 0.1
    max_chars: int = 8000
    batch_size: int = 32
    benchmarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require(len(self.sources) > 0, "prepare.sources", self.sources, "at least one source")
        _require(0 < self.near_duplicate <= 1, "prepare.near_duplicate", self.near_duplicate, "in (0, 1]")
        _require(0 < self.held_out < 1, "prepare.held_out", self.held_out, "in (0, 1)")
        _require(self.batch_size >= 1, "prepare.batch_size", self.batch_size, "at least 1")
        _require(self.max_chars >= 1, "prepare.max_chars", self.max_chars, "at least 1")
        for number, source in enumerate(self.sources):
            counts = ("count", "max_tokens", "turns") if isinstance(source, SelfSource) else ("limit",)
            for field in counts:
                value = getattr(source, field)
                _require(value is None or value >= 1, f"prepare.sources.{number}.{field}", value, "at least 1")
            if isinstance(source, SelfSource):
                name = f"prepare.sources.{number}.temperature"
                _require(source.temperature >= 0, name, source.temperature, "0 (greedy) or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegenerateConfig:
    """prompts -> conversations answered by the target itself. Those of a source `conversations` are passed on.

    Attributes:
        temperature: of several, each prompt has one, chosen by its id.
        max_tokens: of one answer.
        max_length: of a conversation, in tokens; it ends in front of a turn that does not fit.
        batch_size: conversations that are answered together.
    """

    __pydantic_config__ = _STRICT
    temperature: float | tuple[float, ...] = 0.7
    max_tokens: int = 256
    max_length: int = 1024
    batch_size: int = 32

    def __post_init__(self) -> None:
        least = min(self.temperatures, default=-1.0)
        _require(least >= 0, "regenerate.temperature", self.temperature, "0 (greedy) or more")
        _require(self.max_tokens >= 1, "regenerate.max_tokens", self.max_tokens, "at least 1")
        _require(
            self.max_length > self.max_tokens,
            "regenerate.max_length",
            self.max_length,
            f"more than regenerate.max_tokens = {self.max_tokens}",
        )
        _require(self.batch_size >= 1, "regenerate.batch_size", self.batch_size, "at least 1")

    @property
    def temperatures(self) -> tuple[float, ...]:
        return self.temperature if isinstance(self.temperature, tuple) else (self.temperature,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtractConfig:
    """conversations -> features.

    Attributes:
        max_length: longer conversations are truncated to this many tokens.
        batch_tokens: tokens per forward pass, padding included.
        shard_records: conversations per ArrayRecord shard; the unit of resumption.
    """

    __pydantic_config__ = _STRICT
    max_length: int = 2048
    batch_tokens: int = 4096
    shard_records: int = 256

    def __post_init__(self) -> None:
        _require(self.max_length >= 8, "extract.max_length", self.max_length, "at least 8")
        _require(
            self.batch_tokens >= self.max_length,
            "extract.batch_tokens",
            self.batch_tokens,
            f"at least extract.max_length = {self.max_length}",
        )
        _require(self.shard_records >= 1, "extract.shard_records", self.shard_records, "at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """features -> draft head (EAGLE-3, arXiv 2503.01840, section 3.2).

    Attributes:
        warm_start: exported head that training begins with, weights and draft vocabulary, as for a new domain. That is
            another thing than going on after an interruption, which needs no word.
        ttt_steps: steps of the training-time test.
        step_decay: weighs step i by step_decay ** i.
        loss: `lk` maximises the share of accepted drafts (arXiv 2602.23881), cross entropy where that is small still.
        lk_from: the share of all steps with cross entropy before `lk` begins.
        batch_size: packed rows per step.
        row_length: tokens per row.
        optimizer: `muon` updates matrices by Muon, the LM head and the norms by AdamW, all at `learning_rate`.
        learning_rate: the highest, behind the warm-up.
        warmup_ratio: the share of all steps in which the learning rate rises to it.
        b1: decay of AdamW's first moment.
        b2: decay of AdamW's second moment.
        weight_decay: of AdamW; 0 is none.
        clip_norm: longer gradients are scaled to this norm.
        epochs: passes over the features.
        max_steps: stops earlier than `epochs` where it is not None.
        mask_offset: the loss mask that counts for the prediction of token t+2 is mask[t + mask_offset].
        loss_reduction: divide by all positions ("all", the paper's code) or by those that count ("mask").
        argmax_mask: drop positions whose teacher argmax is outside the draft vocabulary.
        loss_block: positions per block of the vocabulary-wide part of the loss.
        remat: of each step keep matrix products and attention, and compute the rest again in the backward pass.
        log_every: steps between two lines of metrics.
        eval_every: steps between two evaluations on what was held out.
        eval_batches: of an evaluation, at most.
        checkpoint_every: steps between two checkpoints.
        keep_checkpoints: that stay on disk.
        decode_every: so often the engine itself answers `decode_prompts` held-out prompts with the head, in a chain of
            `ttt_steps`; `export` then takes the checkpoint that it accepted most of. None is never.
        decode_prompts: see `decode_every`.
    """

    __pydantic_config__ = _STRICT
    warm_start: Annotated[str | None, tyro.conf.arg(aliases=("--warm-start",))] = None
    ttt_steps: int = 7
    step_decay: float = 0.8
    loss: Literal["cross_entropy", "lk"] = "cross_entropy"
    lk_from: float = 0.8
    batch_size: int = 4
    row_length: int = 2048
    epochs: float = 1.0
    max_steps: int | None = None
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 1e-4
    warmup_ratio: float = 0.015
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.0
    clip_norm: float = 0.5
    mask_offset: Literal[0, 1, 2] = 0
    loss_reduction: Literal["all", "mask"] = "all"
    argmax_mask: bool = True
    loss_block: int = 512
    remat: bool = False
    log_every: int = 10
    eval_every: int = 200
    eval_batches: int = 16
    checkpoint_every: int = 500
    keep_checkpoints: int = 2
    decode_every: int | None = None
    decode_prompts: int = 32

    def __post_init__(self) -> None:
        counts = ("ttt_steps", "batch_size", "row_length", "loss_block", "log_every", "eval_every", "eval_batches")
        for field in (*counts, "checkpoint_every", "keep_checkpoints", "decode_prompts"):
            _require(getattr(self, field) >= 1, f"train.{field}", getattr(self, field), "at least 1")
        for field in ("max_steps", "decode_every"):
            value = getattr(self, field)
            _require(value is None or value >= 1, f"train.{field}", value, "at least 1, or None")
        for field in ("b1", "b2"):
            _require(0 <= getattr(self, field) < 1, f"train.{field}", getattr(self, field), "in [0, 1)")
        _require(self.weight_decay >= 0, "train.weight_decay", self.weight_decay, "0 or more")
        _require(self.clip_norm > 0, "train.clip_norm", self.clip_norm, "more than 0")
        _require(0 < self.step_decay <= 1, "train.step_decay", self.step_decay, "in (0, 1]")
        _require(self.learning_rate > 0, "train.learning_rate", self.learning_rate, "more than 0")
        _require(self.epochs > 0, "train.epochs", self.epochs, "more than 0")
        for field in ("warmup_ratio", "lk_from"):
            _require(0 <= getattr(self, field) < 1, f"train.{field}", getattr(self, field), "in [0, 1)")
        _require(
            self.row_length % min(self.loss_block, self.row_length) == 0,
            "train.loss_block",
            self.loss_block,
            f"a divisor of train.row_length = {self.row_length}",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """checkpoint -> serving checkpoint.

    Attributes:
        format: `sglang` is for SGLang, SpecForge and vLLM; `vllm` is vLLM's own, `speculators` names the target too,
            `eagle` is SafeAILab's. `export` says which versions.
        dtype: of the weights in the file.
    """

    __pydantic_config__ = _STRICT
    format: Literal["sglang", "vllm", "speculators", "eagle"] = "sglang"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """export -> acceptance, losslessness and speed against vanilla decoding of the same engine.

    Attributes:
        tree: "auto" lets the engine choose for every dispatch, vanilla decoding included.
        draft: exported folder or smaller model to measure, "lookup", or "auto": the head that comes with this package;
            None is the run's own `export` folder, and "auto" where it has none.
        token_map: of a head of EAGLE-2, whose folder is `draft`: a file, local or on a hub, with the tokens that it
            drafts (FR-Spec); None is all of them.
        temperature: of all requests; 0 is greedy.
        max_tokens: of an answer.
        batch_size: requests that are answered together.
        limit: at most this many prompts, spread evenly over the categories.
    """

    __pydantic_config__ = _STRICT
    tree: DraftTree | Literal["auto"] = DraftTree()
    draft: str | None = None
    token_map: str | None = None
    temperature: float = 0.0
    max_tokens: int = 128
    batch_size: int = 1
    limit: int | None = None

    def __post_init__(self) -> None:
        _check_token_map("evaluate", self.draft, self.token_map)
        _require(self.temperature >= 0, "evaluate.temperature", self.temperature, "0 (greedy) or more")
        _require(self.max_tokens >= 1, "evaluate.max_tokens", self.max_tokens, "at least 1")
        _require(self.batch_size >= 1, "evaluate.batch_size", self.batch_size, "at least 1")
        _require(self.limit is None or self.limit >= 1, "evaluate.limit", self.limit, "at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchmarkConfig:
    """export -> speed of every draft size at every batch size.

    Attributes:
        draft: as `evaluate.draft`.
        token_map: of a head of EAGLE-2, whose folder is `draft`: a file, local or on a hub, with the tokens that it
            drafts (FR-Spec); None is all of them.
        batch_sizes: requests that are answered together; each is measured.
        temperature: of all requests; 0 is greedy.
        max_tokens: of an answer.
        trees: sizes to measure beside vanilla decoding; of `decode` also what "auto" then chooses from; none are those
            that "auto" has by itself, or of `tune` a usual dozen.
        requests: of each turn, at least; where the batch is larger, as many as that.
        turns: each way answers them so many times, all ways in turn.
        tune_turns: turns of `benchmark tune` at most, each with the next prompts.
        simulated_acceptance: drafts are accepted with this probability, whatever the target says of them: times without
            a trained head. Answers mean nothing then. None decodes.
    """

    __pydantic_config__ = _STRICT
    draft: str | None = None
    token_map: str | None = None
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    trees: tyro.conf.Fixed[tuple[DraftTree, ...]] = ()
    temperature: float = 0.0
    max_tokens: int = 64
    requests: int = 16
    turns: int = 3
    tune_turns: int = 12
    simulated_acceptance: float | None = None

    def __post_init__(self) -> None:
        _check_token_map("benchmark", self.draft, self.token_map)
        sizes, rate = self.batch_sizes, self.simulated_acceptance
        _require(len(sizes) > 0 and min(sizes) >= 1, "benchmark.batch_sizes", sizes, "sizes of at least 1")
        _require(self.temperature >= 0, "benchmark.temperature", self.temperature, "0 (greedy) or more")
        for field in ("max_tokens", "requests", "turns", "tune_turns"):
            _require(getattr(self, field) >= 1, f"benchmark.{field}", getattr(self, field), "at least 1")
        _require(rate is None or 0 <= rate <= 1, "benchmark.simulated_acceptance", rate, "0 to 1, or null")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrafficConfig:
    """a server -> its latency and throughput under traffic (`benchmark serve`).

    Attributes:
        concurrency: clients at once, each of which sends its next request when it has its answer.
        rates: requests a second on average that arrive at random (Poisson), whether or not others are answered.
        requests: of each level, at least; twice the clients where that is more.
        max_tokens: of an answer.
        temperature: of all requests; 0 is greedy.
    """

    __pydantic_config__ = _STRICT
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    rates: tuple[float, ...] = ()
    requests: int = 16
    max_tokens: int = 64
    temperature: float = 0.0

    def __post_init__(self) -> None:
        levels = (*self.concurrency, *self.rates)
        _require(
            len(levels) > 0, "traffic.concurrency", self.concurrency, "at least one level, here or in traffic.rates"
        )
        _require(min(self.concurrency, default=1) >= 1, "traffic.concurrency", self.concurrency, "at least 1 client")
        _require(min(self.rates, default=1) > 0, "traffic.rates", self.rates, "more than 0 a second")
        for field in ("requests", "max_tokens"):
            _require(getattr(self, field) >= 1, f"traffic.{field}", getattr(self, field), "at least 1")
        _require(self.temperature >= 0, "traffic.temperature", self.temperature, "0 (greedy) or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """export -> a server of OpenAI's API.

    Attributes:
        host: where it listens. Another one than this machine's own address needs keys.
        port: 0 is a free one.
        model_name: what clients call the model; None is `target.name`.
        draft: exported folder, a smaller model's name or folder, "lookup", "auto" (the head that comes with this
            package for this target, if one does), "mtp" (the target's own layer for it), or "none" for vanilla
            decoding; None is the run's `export` folder, and "auto" where it has none.
        token_map: of a head of EAGLE-2, whose folder is `draft`: a file, local or on a hub, with the tokens that it
            drafts (FR-Spec); None is all of them.
        trees: one is the draft's size always; of several the engine chooses for every dispatch among them and vanilla
            decoding, of none among those that it has by itself.
        batch_size: requests that are answered together.
        queue_limit: requests that wait for a place, at most.
        max_length: longest prompt and answer together, in tokens.
        memory_fraction: weights and caches take this share of the device's memory; None makes room for the whole batch
            at `max_length`.
        warm_up_folder: keeps compiled programs and measured costs, which makes the next start fast; None is a folder of
            this package's cache ($EAGLE3_JAX_CACHE, else ~/.cache/eagle3_jax), "none" keeps nothing.
        api_key_variable: environment variable with the API key, which is never shown. Without one, and without
            `api_key_file`, everybody is let in.
        api_key_file: a file with one API key a line.
        allowed_origins: of other web pages whose scripts may ask (CORS), such as "https://example.org"; "*" is all.
        access_log: writes a line for every request, without its body and its key.
        requests_per_minute: of a key; without keys of an address.
        max_body_bytes: of a request.
        request_timeout: seconds for a whole answer, waiting included.
        client_timeout: seconds in which a client has to send its body, and to take what it is sent.
        stall_timeout: seconds without an answer of the device behind which /health is false.
        drain_timeout: seconds that what was begun has at SIGTERM.
    """

    __pydantic_config__ = _STRICT
    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str | None = None
    draft: str | None = None
    token_map: str | None = None
    trees: tyro.conf.Fixed[tuple[DraftTree, ...]] = ()
    batch_size: int = 8
    queue_limit: int = 256
    max_length: int = 2048
    memory_fraction: float | None = None
    warm_up_folder: str | None = None
    api_key_variable: str | None = None
    api_key_file: str | None = None
    allowed_origins: tuple[str, ...] = ()
    access_log: bool = False
    requests_per_minute: int | None = None
    max_body_bytes: int = 1 << 20
    request_timeout: float = 600.0
    client_timeout: float = 30.0
    stall_timeout: float = 60.0
    drain_timeout: int = 30

    def __post_init__(self) -> None:
        _check_token_map("serve", self.draft, self.token_map)
        _require(0 <= self.port < 65536, "serve.port", self.port, "0 (a free one) to 65535")
        for field in ("batch_size", "queue_limit", "max_body_bytes"):
            _require(getattr(self, field) >= 1, f"serve.{field}", getattr(self, field), "at least 1")
        _require(self.max_length >= 2, "serve.max_length", self.max_length, "at least 2")
        rate, share = self.requests_per_minute, self.memory_fraction
        _require(rate is None or rate >= 1, "serve.requests_per_minute", rate, "at least 1, or null")
        _require(share is None or 0 < share < 1, "serve.memory_fraction", share, "between 0 and 1, or null")
        for field in ("request_timeout", "client_timeout", "stall_timeout"):
            _require(getattr(self, field) > 0, f"serve.{field}", getattr(self, field), "more than 0 seconds")
        for origin in self.allowed_origins:
            expected = 'origins such as "https://example.org:8080", without a path, or "*"'
            _require(bool(re.fullmatch(r"\*|\w+://[^/*]+", origin)), "serve.allowed_origins", origin, expected)
        most = (2**31 - 1) // 1000  # the socket takes it in milliseconds, as an int of C
        _require(self.client_timeout <= most, "serve.client_timeout", self.client_timeout, f"at most {most} seconds")
        _require(self.drain_timeout >= 0, "serve.drain_timeout", self.drain_timeout, "0 seconds or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CardConfig:
    """What a model card says that no verb knows.

    Attributes:
        license: of the head, by the name that the hub has for it, such as "apache-2.0".
        prompts: a line for each source of prompts: whence it is, under which licence.
    """

    __pydantic_config__ = _STRICT
    license: str | None = None
    prompts: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run: its models, and one section per verb.

    Attributes:
        run_dir: folder of the run, with one folder for each verb's output.
        seed: of all that is drawn.
    """

    __pydantic_config__ = _STRICT
    run_dir: str
    seed: int = 0
    target: TargetConfig = TargetConfig()
    draft: DraftConfig = DraftConfig()
    mesh: MeshConfig = MeshConfig()
    prepare: PrepareConfig = PrepareConfig()
    regenerate: RegenerateConfig = RegenerateConfig()
    extract: ExtractConfig = ExtractConfig()
    train: TrainConfig = TrainConfig()
    export: ExportConfig = ExportConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    benchmark: BenchmarkConfig = BenchmarkConfig()
    traffic: TrafficConfig = TrafficConfig()
    serve: ServeConfig = ServeConfig()
    card: CardConfig = CardConfig()

    def __post_init__(self) -> None:
        _require(0 <= self.seed < 2**32, "seed", self.seed, "0 to 2**32 - 1")
        _require("://" not in self.run_dir, "run_dir", self.run_dir, "a folder; a bucket's is where it is mounted")

    def folder(self, verb: str) -> pathlib.Path:
        """Output folder of a verb, e.g. `runs/quickstart/features`."""
        return pathlib.Path(self.run_dir) / FOLDERS[verb]


# verb -> its output folder inside run_dir; one verb's output is the next one's input.
FOLDERS = {
    "prepare": "prompts",
    "regenerate": "conversations",
    "extract": "features",
    "train": "checkpoints",
    "export": "export",
    "evaluate": "evaluation",
    "benchmark": "benchmark",
}

# The parts of a run's data: what the head learns from, and what it is measured on.
SPLITS = ("train", "held_out")


class ConfigError(ValueError):
    """A configuration that cannot be run; the message lists field, got, expected."""


def from_dict(values: dict[str, Any]) -> RunConfig:
    """Validates nested values (as read from YAML) into a RunConfig. Raises ConfigError."""
    try:
        config = pydantic.TypeAdapter(RunConfig).validate_python(values)
    except pydantic.ValidationError as error:
        lines = []
        for item in error.errors():
            place = ".".join(str(part) for part in item["loc"]) or "config"
            meant = _meant(place) if item["type"] == "unexpected_keyword_argument" else ""
            lines.append(f"  {place}: {item['msg']}{meant} (got {item['input']!r})")
        raise ConfigError("invalid configuration:\n" + "\n".join(lines)) from error
    if lines := list(_mistaken(values, config, ())):
        raise ConfigError("invalid configuration:\n" + "\n".join(lines))
    return config


def _mistaken(given: Any, read: Any, place: tuple[str, ...]) -> Iterator[str]:
    """Where a truth value was read as a number (to pydantic `yes` is 1), or something else as a truth value."""
    if isinstance(given, dict):
        for name, value in given.items():
            yield from _mistaken(value, getattr(read, name), (*place, name))
    elif isinstance(given, list | tuple):
        for number, (value, part) in enumerate(zip(given, read, strict=True)):
            yield from _mistaken(value, part, (*place, str(number)))
    elif isinstance(given, bool) != isinstance(read, bool):
        expected = "true or false" if isinstance(read, bool) else "a number"
        yield f"  {'.'.join(place)}: got {given!r}, expected {expected}"


def _meant(name: str) -> str:
    """ ", did you mean ...?" where a field of the configuration has nearly this name."""
    near = difflib.get_close_matches(name, _names(RunConfig, ""), 1, 0.8)
    return f", did you mean {near[0]}?" if near else ""


def _names(section: Any, prefix: str) -> Iterator[str]:
    """Dotted names of all fields, and of the sections themselves."""
    for field in dataclasses.fields(section):
        yield f"{prefix}{field.name}"
        if dataclasses.is_dataclass(field.default):
            yield from _names(field.default, f"{prefix}{field.name}.")


def to_dict(config: Any) -> dict[str, Any]:
    """The plain nested form of a config dataclass (JSON- and YAML-ready)."""
    return pydantic.TypeAdapter(type(config)).dump_python(config, mode="json")


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping, of which YAML keeps the last in silence."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Not when it is constructed: what `<<` merges into it may stand in it too, which takes precedence.
        node = super().compose_mapping_node(anchor)
        keys = [(key.tag, key.value) for key, _ in node.value]
        for place, key in enumerate(keys):
            if key in keys[:place]:
                mark = node.value[place][0].start_mark
                raise yaml.constructor.ConstructorError(None, None, f"{key[1]!r} stands twice", mark)
        return node


def load(path: str | pathlib.Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a YAML run file and applies dotted overrides such as `--train.learning_rate 3e-4`.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type, value out of range.
        SystemExit: an override without a value, or with one that its field does not take (tyro prints which).
    """
    path = pathlib.Path(path)
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path}: not UTF-8: {error}") from error
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: got {type(values).__name__}, expected a mapping of sections")
    return with_overrides(values, overrides, f"--config {path}")


def with_overrides(values: dict[str, Any], overrides: Sequence[str], source: str) -> RunConfig:
    """Nested values and dotted overrides, as a RunConfig. Raises ConfigError, SystemExit: see `load`.

    Args:
        source: of the values, for what tyro says.
    """
    tree = "--evaluate.tree"
    rest = [part for word in overrides for part in (word.split("=", 1) if word.startswith(f"{tree}=") else [word])]
    evaluate = values.get("evaluate", {})
    if isinstance(evaluate, dict):
        # "auto" in place of a tree, and a tree in place of "auto": tyro takes what its default is alone.
        if tree in rest[:-1]:
            place = rest.index(tree)
            evaluate = evaluate | {"tree": rest[place + 1]}
            del rest[place : place + 2]
        if evaluate.get("tree") == "auto" and any(word.startswith(f"{tree}.") for word in rest):
            evaluate = {field: value for field, value in evaluate.items() if field != "tree"}
        values = values | {"evaluate": evaluate}
    config = from_dict(values)
    if rest:
        config, unknown = tyro.cli(
            RunConfig,
            default=config,
            args=rest,
            prog=source,
            config=(tyro.conf.AvoidSubcommands,),  # the sources are a union; they come from the file alone
            return_unknown_args=True,
        )
        if unknown:
            name = unknown[0].partition("=")[0].lstrip("-").replace("-", "_")
            expected = f"expected --section.field VALUE{_meant(name)}"
            raise ConfigError(f"{unknown[0]}: not a field of the configuration, {expected}")
        config = from_dict(to_dict(config))
    return config
