"""Config sections of the verbs that make training data: prepare, regenerate, extract."""

from __future__ import annotations

import re
import urllib.parse
from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from eagle3_jax.config.checks import Count, Positive, Proper, Temperature, require, section


@section()
class PackagedSource:
    """The prompts that come with this package (five categories)."""

    kind: Literal["packaged"]
    limit: Count | None = None


@section()
class JsonlSource:
    """A JSONL file: OpenAI `messages`, ShareGPT `conversations`, or plain `prompt` (see data.sources).

    Of a .txt file each line is a prompt.
    """

    kind: Literal["jsonl"]
    path: str
    category: str = "jsonl"
    license: str | None = None
    limit: Count | None = None


@section()
class ConversationsSource:
    """A JSONL file of conversations that another engine (SGLang, vLLM) let the target have.

    OpenAI `messages` or ShareGPT `conversations`, with the assistant's answers (see data.sources.conversations).
    Filters and the split work as on prompts, by the users' turns. `regenerate` passes the conversations on as they are.
    Nothing checks that the author was this target at these settings: a head learns what it is given.
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
        *("EMAIL_ADDRESS", "PHONE_NUMBER", "PERSON_NAME", "STREET_ADDRESS", "CREDIT_CARD_NUMBER"),
        *("IBAN_CODE", "IP_ADDRESS", "GOVERNMENT_ID", "SECURITY_DATA"),
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


OneOrSeveral = Annotated[
    Annotated[Temperature, Tag("one")] | Annotated[tuple[Temperature, ...], Field(min_length=1), Tag("several")],
    Discriminator(lambda value: "several" if isinstance(value, list | tuple) else "one"),
]


def _is_address(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        named = parts.port != 0 and (parts.hostname or "").encode("idna")
    except ValueError:  # a bracket that is not closed, a port above 65535, an empty label
        return False
    return bool(named) and re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", url) is not None


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
        require(_is_address(self.url), "url", self.url, "an address with the version, such as http://127.0.0.1:8000/v1")


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

    servers: tuple[Annotated[FleetServer, BeforeValidator(lambda x: {"url": x} if isinstance(x, str) else x)], ...] = ()
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
