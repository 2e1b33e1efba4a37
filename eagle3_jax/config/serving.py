"""Config sections of the verbs that use a trained head: export, evaluate, benchmark, serve."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from eagle3_jax.config.checks import Count, Positive, Proper, Temperature, require, section
from eagle3_jax.config.kinds import in_target
from eagle3_jax.config.models import DraftTree, FewBits, TreeOrAuto

CallForm = Literal[
    "openai", "glm45", "qwen3_coder", "hermes", "mistral", "deepseek_v3", "deepseek_v31", "llama3_json"
]  # `serve.tools` has them
_MAX_CLIENT_TIMEOUT = (2**31 - 1) // 1000  # seconds: the socket takes milliseconds as a C int


@section("export")
class ExportConfig:
    """checkpoint -> serving checkpoint.

    Attributes:
        format: `sglang` is for SGLang, SpecForge and vLLM; `vllm` is vLLM's own, `speculators` names the target too,
            `eagle` is SafeAILab's, `llama.cpp` one GGUF file. `export` prints the versions that read it. `eagle3_jax`
            takes a head that no other engine runs.
        dtype: dtype of the weights in the file; `q8_0` and `q4_0`, matrices in blocks of 8 and 4 bits, are llama.cpp's.
    """

    format: Literal["sglang", "vllm", "speculators", "eagle", "eagle3_jax", "llama.cpp"] = "sglang"
    dtype: Literal["float32", "float16", "bfloat16", "q8_0", "q4_0"] = "bfloat16"


def _check_token_map(draft: str | None, token_map: str | None) -> None:
    """Refuses a token map beside drafts without a folder, or beside the run's own head, which has a vocabulary."""
    folder = draft not in (None, "auto", "lookup", "none") and not in_target(draft)
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


@section("adapt")
class AdaptConfig:
    """Learning while serving: the head takes training steps on what verification computed of ended requests.

    Attributes:
        folder: folder of the head's checkpoints, from which the next start goes on; None keeps them in memory alone.
        share: share of the engine's time for learning, beside a tenth of the time without requests; four times as
            large as long as judgements gain a hundredth of tau. Both shrink with judgements in vain.
        ring_tokens: tokens to learn from, the newest ones; an eighth is held back.
        row_length: tokens of a row; of a longer request the last ones are learnt from.
        batch_size: rows of a training step.
        ttt_steps: steps of the training-time test.
        learning_rate: rate of AdamW, without a schedule.
        judge_every: steps after which held-back requests decide whether the head drafts or is rolled back.
    """

    folder: str | None = None
    share: Proper = 0.03
    ring_tokens: Count = 16384
    row_length: Count = 256
    batch_size: Count = 2
    ttt_steps: Count = 3
    learning_rate: Positive = 5e-4
    judge_every: Count = 8

    def __post_init__(self) -> None:
        rows = self.batch_size + max(1, self.ring_tokens // self.row_length // 8)
        expected = f"at least {rows * self.row_length}: adapt.batch_size rows of adapt.row_length, and one held back"
        require(self.ring_tokens >= rows * self.row_length, "ring_tokens", self.ring_tokens, expected)


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
        draft_weights: quantises the draft at load; None leaves it as it is, but for 8 bits beside a quantised target.
            Fewer drafts may be accepted, the tokens stay the target's.
        token_map: as `evaluate.token_map`.
        trees: sizes of the draft. With several the engine chooses for every dispatch among them and vanilla decoding,
            with none among its own.
        batch_size: requests that each replica answers together.
        adapt: learns while it serves (`--adapt`); None serves the head as it is.
        queue_limit: most requests that wait for a slot, of all replicas.
        max_length: longest prompt and answer together, in tokens.
        generation_config: sampling parameters of requests that leave them out: "auto" takes the target's
            generation_config.json, a folder its own; "vllm" takes none (vLLM's word), so that temperature is 1. Its
            `max_new_tokens` limits every answer.
        tool_call_parser: the form in which the target calls tools, by vLLM's names; None is what its template tells.
        memory_fraction: share of the device's memory for weights and caches; None makes room for the whole batch at
            `max_length`.
        structured_mib: MiB of the device's memory for the tables of structured outputs; 0 refuses them.
        warm_up_folder: folder of compiled programs and measured costs, which make the next start fast; None is a folder
            of this package's cache ($EAGLE3_JAX_CACHE, else ~/.cache/eagle3_jax), "none" keeps nothing. Programs go
            where JAX's own setting says, where it is set.
        api_key_variable: environment variable with the API key, which is never shown. If neither it nor `api_key_file`
            is set, authentication is off.
        api_key_file: a file with one API key a line.
        allowed_origins: web pages whose scripts may ask (CORS), such as "https://example.org"; "*" is all.
        access_log: write a line for every request and one for its answer's speed, without the body and the key.
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
    draft_weights: FewBits | None = None
    token_map: str | None = None
    trees: tuple[DraftTree, ...] = ()
    batch_size: Count = 8
    adapt: AdaptConfig | None = None
    queue_limit: Count = 256
    max_length: Annotated[int, Field(ge=2)] = 2048
    generation_config: str = "auto"
    tool_call_parser: CallForm | None = None
    memory_fraction: Proper | None = None
    structured_mib: Annotated[int, Field(ge=0, le=4096)] = 64
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
    """Fields of the model card that only the user knows.

    Attributes:
        license: licence of the head, by its name on the hub, such as "apache-2.0".
        prompts: a line for each source of prompts: its origin and its licence.
    """

    license: str | None = None
    prompts: tuple[str, ...] = ()
