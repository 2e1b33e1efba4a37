"""One section per verb, and the models and the devices that the verbs share. `--help` prints these docstrings."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from eagle3_jax.config.checks import Count, Fraction, Positive, Proper, Temperature, require, section
from eagle3_jax.runs import disk
from eagle3_jax.runs.bucket import addresses

Dtype = Literal["float32", "bfloat16"]
Weights = Literal["int8", "fp8", "int4", "stored"]

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

_MAX_CLIENT_TIMEOUT = (2**31 - 1) // 1000  # seconds: the socket takes milliseconds as a C int


@section()
class DraftTree:
    """Size of the draft, in SGLang's terms.

    Attributes:
        num_steps: depth of the tree; at most this many drafted tokens can be accepted in one round.
        topk: children kept per expanded node; 1 is a chain.
        num_draft_tokens: nodes verified per round, the root included.
        sample_drafts: draws the drafts of requests with a temperature from the head's distribution, and verifies them
            by multi-candidate rejection sampling. Otherwise these requests get the head's best tokens, each accepted
            with the target's probability of it, and a seed gives vanilla decoding's answer. The answers' distribution
            is the target's either way.
        lookup_tokens: tokens copied from the text so far that compete with the head's candidates; 0 is none.
    """

    num_steps: Count = 4
    topk: Count = 1
    num_draft_tokens: int = 5
    sample_drafts: bool = True
    lookup_tokens: Annotated[int, Field(ge=0)] = 0

    def __post_init__(self) -> None:
        s, k, n, copied = self.num_steps, self.topk, self.num_draft_tokens, self.lookup_tokens
        if k == 1 and not copied:
            require(n == s + 1, "num_draft_tokens", n, f"num_steps + 1 = {s + 1} for a chain (topk=1)")
        pool = k + (s - 1) * k * k + copied
        require(s < n <= pool + 1, "num_draft_tokens", n, f"num_steps + 1 = {s + 1} to {pool + 1} (root + candidates)")

    @property
    def depth(self) -> int:
        """Most drafts that one round accepts."""
        return max(self.num_steps, self.lookup_tokens)


# "auto": the engine chooses the size of every dispatch, vanilla decoding included.
TreeOrAuto = Annotated[
    Annotated[DraftTree, Tag("DraftTree")] | Annotated[Literal["auto"], Tag("auto")],
    Discriminator(lambda value: "auto" if isinstance(value, str) else "DraftTree"),
]


@section("target")
class TargetConfig:
    """The model that is made faster.

    Attributes:
        name: a registered name ("smollm2-135m-instruct": 4-bit weights from a Python package), a hub id ("org/model",
            "org/model@revision"), or a Hugging Face folder.
        dtype: dtype of weights and activations; float32 is the exact mode.
        aux_layers: boundaries b (the residual stream entering block b) whose states feed the draft head;
            None is (2, n // 2, n - 3).
        weights: quantises the matrices at load, experts' included; activations keep `dtype`. `int8` and `fp8` (e4m3)
            have a scale for each output channel, `int4` a scale and an offset for each 32 inputs of one. `stored` keeps
            the few bits of a checkpoint that comes quantised. None is `dtype`.
        quantise_vocabulary: quantises embeddings and LM head too, row by row; in 8 bits where `weights` is `int4`.
    """

    name: str = "smollm2-135m-instruct"
    dtype: Dtype = "float32"
    aux_layers: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    weights: Weights | None = None
    quantise_vocabulary: bool = False

    def __post_init__(self) -> None:
        named = self.weights is not None or not self.quantise_vocabulary
        require(named, "weights", self.weights, "a kind of weights, as target.quantise_vocabulary is true")
        layers = self.aux_layers
        ascending = layers is None or (len(layers) > 0 and sorted(set(layers)) == list(layers))
        require(ascending, "aux_layers", layers, "ascending, distinct boundaries")


@section("draft")
class DraftConfig:
    """Kind and shape of the draft head; None takes the target's value.

    Attributes:
        kind: `eagle3`; `mtp`, the target's own layer for a further token (MiMo, DeepSeek-V3), whose sizes and
            vocabulary are the target's; or a head that drafts a block at once: `dflash`, `dspark`, `dflash2`.
        vocab_size: size of the draft vocabulary, the most frequent tokens of the training conversations.
        intermediate_size: width of the MLP.
        num_attention_heads: heads of queries.
        num_key_value_heads: heads of keys and values.
        head_dim: size of one head.
        rope_theta: RoPE base of the head (its own: not inherited from the target).
        max_position_embeddings: longest context that the head declares. An engine with a longer context needs an
            override to serve it (SGLang), so choose less than the target's only where drafting must end there.
        fc_norm: norm each hidden state before `fc`; with `norm_output` the head is EAGLE-3.1 (as vLLM and SGLang name
            it).
        norm_output: the normed output recurs, not the raw one; with `fc_norm` the head is EAGLE-3.1.
        num_layers: decoder layers of a block head.
        block_size: rows of a block head's block; DFlash and DFlash2 draft one token fewer.
        mask_token_id: the target's token, one without another use, at the positions that a block head drafts.
        layer_types: attention of each layer of a block head; None is `full_attention` in all.
        sliding_window: window of its `sliding_attention` layers, in tokens.
        is_causal: whether all its layers are causal within a block; None: the sliding ones alone.
    """

    kind: Literal["eagle3", "mtp", "dflash", "dspark", "dflash2"] = "eagle3"
    vocab_size: Count = 32000
    intermediate_size: Count | None = None
    num_attention_heads: Count | None = None
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    rope_theta: Positive = 10000.0
    max_position_embeddings: Count | None = None
    fc_norm: bool = False
    norm_output: bool = False
    num_layers: Count = 5
    block_size: Annotated[int, Field(ge=2)] = 8
    mask_token_id: Annotated[int, Field(ge=0)] | None = None
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None
    sliding_window: Count | None = None
    is_causal: bool | None = None

    def __post_init__(self) -> None:
        types, window = self.layer_types, self.sliding_window
        fits = types is None or len(types) == self.num_layers
        require(fits, "layer_types", types, f"draft.num_layers = {self.num_layers} of them")
        sliding = types is not None and "sliding_attention" in types
        expected = "the window of the sliding layers" if sliding else "null: draft.layer_types has no sliding_attention"
        require((window is not None) == sliding, "sliding_window", window, expected)


@section("mesh")
class MeshConfig:
    """Devices as data x model axes.

    Attributes:
        data: replicas, among which the batch is divided; 0 takes every device that `model` leaves over.
        model: devices over which each replica's weights are split (tensor parallelism).
    """

    data: Annotated[int, Field(ge=0)] = 0
    model: Count = 1


@section()
class PackagedSource:
    """The prompts that come with this package (five categories)."""

    kind: Literal["packaged"]
    limit: Count | None = None


@section()
class JsonlSource:
    """A JSONL file: OpenAI `messages`, ShareGPT `conversations`, or plain `prompt` (see data.sources)."""

    kind: Literal["jsonl"]
    path: str
    category: str = "jsonl"
    license: str | None = None
    limit: Count | None = None


@section()
class ConversationsSource:
    """A JSONL file of conversations that another engine (SGLang, vLLM) let the target have.

    OpenAI `messages` or ShareGPT `conversations`, with the assistant's answers (see data.sources.conversations).
    Filters and the split work as on prompts, by the users' turns; of several conversations on (nearly) the same prompt
    the first stays. Filters for `prepare.personal_data` and template markers read the answers too. `regenerate` passes
    the conversations on as they are and records the file as their author. Nothing checks that the author was this
    target at these settings: a head learns what it is given.
    """

    kind: Literal["conversations"]
    path: str
    category: str = "conversations"
    license: str | None = None
    limit: Count | None = None


@section()
class TfdsSource:
    """A `tfds.data_source`; `field` names the text feature that holds the prompt. Needs tensorflow-datasets."""

    kind: Literal["tfds"]
    name: str
    field: str
    split: str = "train"
    category: str = "tfds"
    license: str | None = None
    limit: Count | None = None


@section()
class SelfSource:
    """Prompts that the target writes itself, given only the opening of its template's user turn.

    Attributes:
        max_tokens: length of a user's turn, and of the answers between two of them.
        turns: most turns of the user. The target's answers between them are dropped: `regenerate` answers anew.
        openings: beginnings of the first turn, used in rotation ("Write a Python function").
        system: the system prompt; None is the template's own.
    """

    kind: Literal["self"]
    count: Count
    category: str = "self"
    temperature: Temperature = 1.0
    max_tokens: Count = 128
    turns: Count = 1
    openings: tuple[str, ...] = ()
    system: str | None = None
    license: str | None = None


Source = Annotated[
    PackagedSource | JsonlSource | ConversationsSource | TfdsSource | SelfSource, Field(discriminator="kind")
]


@section()
class CloudDlpConfig:
    """Google Cloud DLP (Sensitive Data Protection), which is sent every prompt and is paid by the gigabyte.

    Attributes:
        project: the project that pays.
        location: where the service works: "global", or a region such as "europe-west1".
        info_types: kinds of personal data that it looks for, by its own names.
        min_likelihood: how sure it must be.
        token_variable: environment variable with an access token; None takes the credentials that
            EAGLE3_JAX_CREDENTIALS names.
        url: address of the service, or of a region's endpoint.
    """

    project: str | None = None
    location: str = "global"
    info_types: Annotated[tuple[str, ...], Field(min_length=1)] = (
        "EMAIL_ADDRESS",
        "PHONE_NUMBER",
        "PERSON_NAME",
        "STREET_ADDRESS",
        "CREDIT_CARD_NUMBER",
        "IBAN_CODE",
        "IP_ADDRESS",
        "GOVERNMENT_ID",
        "SECURITY_DATA",
    )
    min_likelihood: Literal["POSSIBLE", "LIKELY", "VERY_LIKELY"] = "LIKELY"
    token_variable: str | None = None
    url: str = "https://dlp.googleapis.com"

    def __post_init__(self) -> None:
        for name, value in (("project", self.project), ("location", self.location)):
            expected = "letters, digits, dots, colons and dashes"
            require(value is None or bool(re.fullmatch(r"[a-z0-9][a-z0-9.:-]*", value)), name, value, expected)
        safe = re.fullmatch(r"https://[^\s/?#@]+|http://(127\.0\.0\.1|localhost)(:\d+)?", self.url)
        require(safe is not None, "url", self.url, "an address that begins with https://")


@section("prepare")
class PrepareConfig:
    """prompts -> clean, de-duplicated, split prompts.

    Attributes:
        sources: where prompts come from, read in this order. `license` is the licence of those that name none.
        near_duplicate: Jaccard similarity of MinHash shingles from which a prompt counts as a duplicate.
        personal_data: replace each finding by its kind ("<EMAIL_ADDRESS>"), or drop the prompt.
        personal_data_engine: what finds it: `presidio`, patterns of this process, or `cloud_dlp`, Google's service.
        cloud_dlp: see `personal_data_engine`.
        held_out: share of prompts kept for measurement, chosen by content hash.
        max_chars: longest prompt that is read, a guard against broken lines. What is learned from is limited in tokens,
            by `regenerate.max_length` and `extract.max_length`.
        batch_size: batch of the engine that lets the target write prompts (source `self`).
        benchmarks: JSONL files of benchmarks; a prompt that shares eight words in a row with one is rejected.
        runner: `in_process`, or `beam` for millions of prompts: Apache Beam's workers, wherever they run. Both make the
            same prompts.
        beam_options: handed to Beam as they are, such as "--runner=FlinkRunner --flink_master=HOST:PORT".
    """

    sources: tuple[Source, ...] = (PackagedSource(kind="packaged"),)
    near_duplicate: Annotated[float, Field(gt=0, le=1)] = 0.8
    personal_data: Literal["redact", "drop"] = "redact"
    personal_data_engine: Literal["presidio", "cloud_dlp"] = "presidio"
    cloud_dlp: CloudDlpConfig = CloudDlpConfig()
    held_out: Proper = 0.1
    max_chars: Count = 1_000_000
    batch_size: Count = 32
    benchmarks: tuple[str, ...] = ()
    runner: Literal["in_process", "beam"] = "in_process"
    beam_options: str = ""

    def __post_init__(self) -> None:
        require(len(self.sources) > 0, "sources", self.sources, "at least one source")
        unused = bool(self.beam_options) and self.runner != "beam"
        require(not unused, "beam_options", self.beam_options, "nothing without runner: beam")
        project, needed = self.cloud_dlp.project, self.personal_data_engine == "cloud_dlp"
        expected = "the project that pays" if needed else "null without personal_data_engine: cloud_dlp"
        require((project is not None) == needed, "cloud_dlp.project", project, expected)


def _by_url(value: object) -> object:
    return {"url": value} if isinstance(value, str) else value


OneOrSeveral = Annotated[
    Annotated[Temperature, Tag("one")] | Annotated[tuple[Temperature, ...], Field(min_length=1), Tag("several")],
    Discriminator(lambda value: "several" if isinstance(value, list | tuple) else "one"),
]


@section()
class FleetServer:
    """A server of OpenAI's API (vLLM, SGLang, this package's `serve`) that holds the target.

    Attributes:
        url: with the version: "http://10.0.0.1:8000/v1".
        model: the target's name there; None is `target.name`.
        concurrency: requests that are on their way to it.
        api_key_variable: environment variable with its API key, which is written nowhere.
    """

    url: str
    model: str | None = None
    concurrency: Count = 64
    api_key_variable: str | None = None

    def __post_init__(self) -> None:
        known = re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", self.url)
        require(known is not None, "url", self.url, "an address with the version, such as http://127.0.0.1:8000/v1")


@section("regenerate")
class RegenerateConfig:
    """prompts -> conversations answered by the target itself. Those of a source `conversations` are passed on.

    Attributes:
        servers: servers that answer, by their URLs or as sections with `url`, `model`, `concurrency`,
            `api_key_variable`; without any, engines of this process answer.
        deadline: seconds that a server has for an answer.
        patience: seconds to wait for servers while none of them is well.
        temperature: the answers' temperature; of several, each prompt gets one, chosen by its id.
        max_tokens: longest answer.
        max_length: longest conversation, in tokens; it ends before a turn that does not fit.
        batch_size: conversations that an engine answers together; each row of the mesh has an engine.
        memory_fraction: as `serve.memory_fraction`; what does not fit waits.
        draft: with which drafts an engine answers faster: "auto" (the head packaged for this target, if there is one),
            an exported folder, a smaller model's name or folder, "lookup", "mtp", or "none". The engine chooses how
            much it drafts; the answers are the same.
    """

    servers: tuple[Annotated[FleetServer, BeforeValidator(_by_url)], ...] = ()
    deadline: Positive = 600.0
    patience: Positive = 600.0
    temperature: OneOrSeveral = 0.7
    max_tokens: Count = 256
    max_length: int = 1024
    batch_size: Count = 32
    memory_fraction: Proper | None = None
    draft: str = "none"

    def __post_init__(self) -> None:
        urls = [server.url.rstrip("/") for server in self.servers]
        require(len(set(urls)) == len(urls), "servers", urls, "each server once")
        expected = f"more than regenerate.max_tokens = {self.max_tokens}"
        require(self.max_length > self.max_tokens, "max_length", self.max_length, expected)

    @property
    def temperatures(self) -> tuple[float, ...]:
        return self.temperature if isinstance(self.temperature, tuple) else (self.temperature,)


SharesOrFile = Annotated[
    Annotated[dict[str, Positive], Tag("shares")] | Annotated[str, Tag("file")],
    Discriminator(lambda value: "file" if isinstance(value, str) else "shares"),
]


@section("extract")
class ExtractConfig:
    """conversations -> features.

    Attributes:
        states: form of the hidden states that are kept. `fp8` is float8 (e4m3) with a scale for each state of a token,
            half the size of `bfloat16`. `none` keeps token ids and loss mask alone, for `train.features: online`.
        max_length: longer conversations are truncated to this many tokens.
        batch_tokens: tokens per forward pass, padding included.
        shard_records: conversations per ArrayRecord shard; the unit of resumption.
        mix: share of each category among the answers' tokens; or a JSONL file of requests, each with a `category` and,
            if it stands for several, a `count`, whose shares the conversations then have. As many are kept as the mix
            allows. None keeps all.
    """

    states: Literal["fp8", "bfloat16", "none"] = "fp8"
    max_length: Annotated[int, Field(ge=8)] = 2048
    batch_tokens: int = 4096
    shard_records: Count = 256
    mix: SharesOrFile | None = None

    def __post_init__(self) -> None:
        if isinstance(self.mix, dict):
            total = sum(self.mix.values())
            require(abs(total - 1) < 1e-6, "mix", self.mix, f"shares that add up to 1 (they add up to {total:g})")
        expected = f"at least extract.max_length = {self.max_length}"
        require(self.batch_tokens >= self.max_length, "batch_tokens", self.batch_tokens, expected)


@section("train")
class TrainConfig:
    """features -> draft head (EAGLE-3, arXiv 2503.01840, section 3.2).

    Attributes:
        warm_start: exported head whose weights and draft vocabulary training begins with, as for a new domain; `mtp` is
            the layer in the target's checkpoint, for `draft.kind: mtp`. A training that was interrupted goes on without
            it.
        features: `stored` reads the states that `extract` wrote; `online` has the target compute them before each step.
        ttt_steps: steps of the training-time test.
        step_decay: weighs step i by step_decay ** i.
        loss: `lk` maximises the share of accepted drafts (arXiv 2602.23881), with cross entropy where that is small.
        lk_from: share of all steps with cross entropy before `lk` begins.
        mesh: devices of the training, where they are not `mesh`'s.
        batch_size: packed rows per step.
        accumulate: parts of a batch whose gradients are computed in turn and summed.
        row_length: tokens per row.
        sequence: devices over which a row is split along its length, for rows too long for one; a divisor of the mesh's
            data axis, which is then divided by it for `batch_size`.
        anchors: blocks per row, for block heads.
        block_weights: weights of the drafts in a block: `d-pace` (arXiv 2605.18810; `dpace` of SpecForge and
            speculators), or `decay`, exp(-(d - 1) / loss_decay_gamma) for draft d (SpecForge's `dflash`, speculators'
            `fixed-exp-decay`).
        loss_decay_gamma: see `block_weights`. DFlash's authors take 7, 5 and 4 for blocks of 16, 10 and 8 rows.
        dpace_alpha: a draft of probability q counts as (1 - dpace_alpha) q + dpace_alpha for those behind it.
        epochs: passes over the features.
        max_steps: last step, where `epochs` has more; None is no limit.
        optimizer: `muon` updates matrices by Muon, the LM head and the norms by AdamW, all at `learning_rate`.
        learning_rate: peak rate, after the warm-up.
        warmup_ratio: share of all steps in which the learning rate rises to its peak.
        mask_offset: the loss mask that counts for the prediction of token t+2 is mask[t + mask_offset].
        loss_reduction: divide by all positions ("all", the paper's code) or by those that count ("mask").
        argmax_mask: drop positions whose teacher argmax is outside the draft vocabulary.
        loss_block: positions per block of the vocabulary-wide part of the loss.
        remat: keep matrix products and attention of each step, and recompute the rest in the backward pass.
        wandb: project of Weights & Biases that gets the metrics too; needs the package `wandb` and its login.
        log_every: steps between two lines of metrics.
        eval_every: steps between two evaluations on the held-out features.
        eval_batches: most batches of an evaluation.
        checkpoint_every: steps between two checkpoints.
        decode_every: steps between two measurements in which the engine answers `decode_prompts` held-out prompts with
            the head, in a chain of `ttt_steps`; `export` then takes the checkpoint with the longest acceptance. None
            measures never.
        decode_prompts: see `decode_every`.
    """

    warm_start: str | None = None
    features: Literal["stored", "online"] = "stored"
    ttt_steps: Count = 7
    step_decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    loss: Literal["cross_entropy", "lk"] = "cross_entropy"
    lk_from: Fraction = 0.8
    mesh: MeshConfig | None = None
    batch_size: Count = 4
    accumulate: Count = 1
    row_length: Count = 2048
    sequence: Count = 1
    anchors: Count = 256
    block_weights: Literal["d-pace", "decay"] = "d-pace"
    loss_decay_gamma: Positive = 4.0
    dpace_alpha: Fraction = 0.5
    epochs: Positive = 1.0
    max_steps: Count | None = None
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: Positive = 1e-4
    warmup_ratio: Fraction = 0.015
    mask_offset: Literal[0, 1, 2] = 0
    loss_reduction: Literal["all", "mask"] = "all"
    argmax_mask: bool = True
    loss_block: Count = 512
    remat: bool = False
    wandb: str | None = None
    log_every: Count = 10
    eval_every: Count = 200
    eval_batches: Count = 16
    checkpoint_every: Count = 500
    decode_every: Count | None = None
    decode_prompts: Count = 32

    def __post_init__(self) -> None:
        row, pieces, steps = self.row_length, self.sequence, self.ttt_steps
        piece, of = row // pieces, " / train.sequence" * (pieces > 1)
        fits = pieces == 1 or (row % pieces == 0 and piece > steps)
        expected = f"a divisor of train.row_length = {row}, with more than train.ttt_steps = {steps} tokens for each"
        require(fits, "sequence", pieces, expected)
        divides = piece % min(self.loss_block, piece) == 0
        require(divides, "loss_block", self.loss_block, f"a divisor of train.row_length{of} = {piece}")


@section("export")
class ExportConfig:
    """checkpoint -> serving checkpoint.

    Attributes:
        format: `sglang` is for SGLang, SpecForge and vLLM; `vllm` is vLLM's own, `speculators` names the target too,
            `eagle` is SafeAILab's. `export` prints the versions that read it.
        dtype: dtype of the weights in the file.
    """

    format: Literal["sglang", "vllm", "speculators", "eagle"] = "sglang"
    dtype: Dtype = "bfloat16"


def _check_token_map(draft: str | None, token_map: str | None) -> None:
    """Refuses a token map beside drafts without a folder, or beside the run's own head, which has a vocabulary."""
    folder = draft not in (None, "auto", "lookup", "mtp", "none")
    expected = f"null, or the folder of a head of EAGLE-2 as `draft` (got {draft!r})"
    require(token_map is None or folder, "token_map", token_map, expected)


@section("evaluate")
class EvaluateConfig:
    """export -> acceptance, losslessness and speed against vanilla decoding of the same engine.

    Attributes:
        tree: "auto" lets the engine choose for every dispatch, vanilla decoding included.
        draft: exported folder or smaller model to measure, "lookup", or "auto": the head that comes with this package;
            None is the run's own `export` folder, and "auto" where it has none.
        token_map: tokens that a head of EAGLE-2 drafts (FR-Spec): a file, local or on a hub; None is all tokens.
            `draft` is the head's folder then.
        temperature: temperature of all requests; 0 is greedy.
        max_tokens: longest answer.
        batch_size: requests that are answered together.
        limit: most prompts, spread evenly over the categories.
    """

    tree: TreeOrAuto = DraftTree()
    draft: str | None = None
    token_map: str | None = None
    temperature: Temperature = 0.0
    max_tokens: Count = 128
    batch_size: Count = 1
    limit: Count | None = None

    def __post_init__(self) -> None:
        _check_token_map(self.draft, self.token_map)


@section("benchmark")
class BenchmarkConfig:
    """export -> speed of every draft size at every batch size.

    Attributes:
        draft: as `evaluate.draft`.
        token_map: as `evaluate.token_map`.
        batch_sizes: requests that are answered together; each size is measured.
        trees: sizes to measure beside vanilla decoding. "auto" then chooses among those of `decode`. None given: those
            that "auto" has by itself, or for `tune` a usual dozen.
        temperature: temperature of all requests; 0 is greedy.
        max_tokens: longest answer.
        requests: least requests of each turn; a larger batch takes as many as it has room for.
        turns: times that each way answers the requests, all ways in turn.
        tune_turns: most turns of `benchmark tune`, each with the next prompts.
        simulated_acceptance: probability with which drafts are accepted, whatever the target says: times without a
            trained head. Answers mean nothing then. None decodes.
    """

    draft: str | None = None
    token_map: str | None = None
    batch_sizes: Annotated[tuple[Count, ...], Field(min_length=1)] = (1, 2, 4, 8, 16)
    trees: tuple[DraftTree, ...] = ()
    temperature: Temperature = 0.0
    max_tokens: Count = 64
    requests: Count = 16
    turns: Count = 3
    tune_turns: Count = 12
    simulated_acceptance: Annotated[float, Field(ge=0, le=1)] | None = None

    def __post_init__(self) -> None:
        _check_token_map(self.draft, self.token_map)


@section("traffic")
class TrafficConfig:
    """a server -> its latency and throughput under traffic (`benchmark serve`).

    Attributes:
        concurrency: clients at once, each of which sends its next request when it has its answer.
        rates: mean requests per second, which arrive at random (Poisson) whether or not others are answered.
        requests: least requests of each level; twice the clients where that is more.
        max_tokens: longest answer.
        temperature: temperature of all requests; 0 is greedy.
    """

    concurrency: tuple[Count, ...] = (1, 2, 4, 8, 16, 32, 64)
    rates: tuple[Positive, ...] = ()
    requests: Count = 16
    max_tokens: Count = 64
    temperature: Temperature = 0.0

    def __post_init__(self) -> None:
        levels = self.concurrency or self.rates
        require(len(levels) > 0, "concurrency", self.concurrency, "at least one level, here or in traffic.rates")


@section("serve")
class ServeConfig:
    """export -> a server of OpenAI's API.

    Attributes:
        host: address to listen on. Another one than this machine's own needs keys.
        port: 0 is a free one.
        model_name: the model's name for clients; None is `target.name`.
        draft: exported folder, a smaller model's name or folder, "lookup", "auto" (the head packaged for this target,
            if there is one), "mtp" (the target's own layer), or "none" for vanilla decoding. None is the run's `export`
            folder, and "auto" where it has none.
        token_map: as `evaluate.token_map`.
        trees: sizes of the draft. With several the engine chooses for every dispatch among them and vanilla decoding,
            with none among its own.
        batch_size: requests that each replica answers together.
        queue_limit: most requests that wait for a slot, of all replicas.
        max_length: longest prompt and answer together, in tokens.
        memory_fraction: share of the device's memory for weights and caches; None makes room for the whole batch at
            `max_length`.
        warm_up_folder: folder of compiled programs and measured costs, which make the next start fast; None is a folder
            of this package's cache ($EAGLE3_JAX_CACHE, else ~/.cache/eagle3_jax), "none" keeps nothing.
        api_key_variable: environment variable with the API key, which is never shown. If neither it nor `api_key_file`
            is set, authentication is off.
        api_key_file: a file with one API key a line.
        allowed_origins: web pages whose scripts may ask (CORS), such as "https://example.org"; "*" is all.
        access_log: write a line for every request, without its body and its key.
        requests_per_minute: limit of a key; without keys, of an address.
        max_body_bytes: limit of a request's body.
        request_timeout: seconds for a whole answer, waiting included.
        client_timeout: seconds in which a client has to send its body, and to take what it is sent.
        stall_timeout: seconds without a result of the device after which /health is false.
        drain_timeout: seconds that running requests have after SIGTERM.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, lt=65536)] = 8000
    model_name: str | None = None
    draft: str | None = None
    token_map: str | None = None
    trees: tuple[DraftTree, ...] = ()
    batch_size: Count = 8
    queue_limit: Count = 256
    max_length: Annotated[int, Field(ge=2)] = 2048
    memory_fraction: Proper | None = None
    warm_up_folder: str | None = None
    api_key_variable: str | None = None
    api_key_file: str | None = None
    allowed_origins: tuple[str, ...] = ()
    access_log: bool = False
    requests_per_minute: Count | None = None
    max_body_bytes: Count = 1 << 20
    request_timeout: Positive = 600.0
    client_timeout: Annotated[float, Field(gt=0, le=_MAX_CLIENT_TIMEOUT)] = 30.0
    stall_timeout: Positive = 60.0
    drain_timeout: Annotated[int, Field(ge=0)] = 30

    def __post_init__(self) -> None:
        _check_token_map(self.draft, self.token_map)
        for origin in self.allowed_origins:
            expected = 'origins such as "https://example.org:8080", without a path, or "*"'
            require(bool(re.fullmatch(r"\*|\w+://[^/*]+", origin)), "allowed_origins", origin, expected)


@section("card")
class CardConfig:
    """Fields of the model card that no verb knows.

    Attributes:
        license: licence of the head, by its name on the hub, such as "apache-2.0".
        prompts: a line for each source of prompts: its origin and its licence.
    """

    license: str | None = None
    prompts: tuple[str, ...] = ()


@section()
class RunConfig:
    """One run: its models, and one section per verb.

    Attributes:
        run_dir: folder of the run, with one folder for each verb's output; or gs://BUCKET/FOLDER.
        seed: seed of all random draws.
    """

    run_dir: str
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
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
        known = "://" not in self.run_dir or addresses.is_address(self.run_dir)
        require(known, "run_dir", self.run_dir, "a folder, or a bucket's gs://BUCKET/FOLDER")

    @property
    def run_folder(self) -> disk.Path:
        """The run's folder."""
        return disk.path_of(self.run_dir)

    def folder(self, verb: str) -> disk.Path:
        """Returns the output folder of a verb, e.g. `runs/quickstart/features`."""
        return self.run_folder / FOLDERS[verb]
