"""Prometheus metrics: the engine's state at the time of a scrape, and counts and times of requests."""

from __future__ import annotations

import operator
import types
from collections.abc import Iterator, Sequence
from typing import Any

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.request import Output

_OF_OPENAI = ("/v1/chat/completions", "/v1/completions", "/v1/models")
ENDPOINTS = ("/", *_OF_OPENAI, "/tokenize", "/detokenize", "/version", "/health", "/metrics")
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
_TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)
_LENGTHS = (1.0, 1.1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 5, 6, 8)

# Metric -> field of `EngineStats` or of `EngineState._read`, and its text.
_GAUGES = {
    "batch_size": ("batch_size", "Requests that fit in the batch."),
    "kv_cache_usage": ("usage", "Share of the pages that running requests hold."),
    "requests_running": ("running", "Requests in the batch."),
    "requests_waiting": ("waiting", "Requests in the queue."),
    "pages": ("pages", "Pages of the caches."),
    "free_pages": ("free_pages", "Pages that a new request may have."),
    "ready_programs": ("ready_programs", "Programs compiled for requests so far."),
    "planned_programs": ("planned_programs", "Programs that the warm-up will have compiled, at most."),
    "stalled_seconds": ("stalled", "Seconds since work last came back from the device; 0 while idle."),
    "adapt_tokens": ("adapt.tokens", "Tokens that the head learns from."),
    "adapt_loss": ("adapt.loss", "Loss of the latest training step."),
    "adapt_tau_before": ("adapt.tau_before", "Tokens a round on held-back requests, before the latest judgement."),
    "adapt_tau_after": ("adapt.tau_after", "The same of the head that drafts since."),
    "adapt_share": ("adapt.share", "Share of the engine's time for learning."),
}
_COUNTERS = {
    "dispatches": ("dispatches", "Programs given to the device."),
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts."),
    "cached_tokens": ("cached_tokens", "Of these, read by an earlier request (prefix reuse)."),
    "compiled_programs": ("programs", "Programs compiled; it stays as it is once the warm-up is complete."),
    "adapt_requests": ("adapt.requests", "Requests that the head may learn from."),
    "adapt_steps": ("adapt.steps", "Training steps."),
    "adapt_heads": ("adapt.heads", "Heads that were judged better, and drafted."),
    "adapt_rollbacks": ("adapt.rollbacks", "Heads that were not."),
    "adapt_new_tokens": ("adapt.new_tokens", "Tokens that took a place in the draft vocabulary."),
    "adapt_seconds": ("adapt.seconds", "Time of learning."),
}


class EngineState(Collector):
    """Exports each replica's `Engine.stats` at a scrape, with its number as the label `replica`."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        stats = [self._read(engine) for engine in self._engines]
        for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, (field, text) in table.items():
                if not field.startswith("adapt.") or all(one.adapt is not None for one in stats):
                    family = kind(f"eagle3_jax_{name}", text, labels=["replica"])
                    for number, one in enumerate(stats):
                        family.add_metric([str(number)], operator.attrgetter(field)(one))
                    yield family
        labels = ["replica", "tier"]
        tiers = CounterMetricFamily("eagle3_jax_tier_dispatches", "Dispatches of rounds in a tier.", labels=labels)
        in_use = GaugeMetricFamily("eagle3_jax_tier_in_use", "1: the latest rounds ran in it.", labels=labels)
        for number, one in enumerate(stats):
            for tier, count in one.tiers.items():
                tiers.add_metric([str(number), tier], count)
                in_use.add_metric([str(number), tier], float(tier == one.tier))
        yield tiers
        yield in_use

    @staticmethod
    def _read(engine: Engine) -> Any:
        stats = engine.stats()
        usage = 1 - stats.free_pages / stats.pages
        return types.SimpleNamespace(**vars(stats), batch_size=engine.batch_size, usage=usage)


class Metrics:
    """The metrics of one server, in `registry`; its engines are the replicas."""

    def __init__(self, *engines: Engine) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        self.registry.register(EngineState(engines))
        in_registry = {"registry": self.registry, "namespace": "eagle3_jax"}
        counter, histogram = prometheus_client.Counter, prometheus_client.Histogram
        self._responses = counter("responses", "HTTP responses.", ["endpoint", "status"], **in_registry)
        self._tokens = counter("generated_tokens", "Tokens of answers; rate() of it is tokens/s.", **in_registry)
        self._ended = counter("requests_ended", "Requests by finish reason.", ["reason"], **in_registry)
        self._rounds = counter("rounds", "Rounds of requests that have ended.", **in_registry)
        text = "Rounds (of `rounds`) that accepted the draft at a position."
        self._accepted = counter("drafts_accepted", text, ["position"], **in_registry)
        text = "From a request's arrival."
        self._first = histogram("time_to_first_token_seconds", text, buckets=_SECONDS, **in_registry)
        text = "Time between two deliveries, over the tokens of the later one; each token counts."
        self._between = histogram("inter_token_seconds", text, buckets=_TOKEN_SECONDS, **in_registry)
        text = "Tokens a round of each request, the bonus included."
        self._lengths = histogram("acceptance_length", text, buckets=_LENGTHS, **in_registry)

    def responded(self, path: str, status: int) -> None:
        """Counts an HTTP response; unknown paths share one label."""
        self._responses.labels(path if path in ENDPOINTS else "other", str(status)).inc()

    def began(self, seconds: float) -> None:
        """Records the time from a request's arrival to its answer's first tokens."""
        self._first.observe(seconds)

    def delivered(self, tokens: int, seconds: float | None) -> None:
        """Counts a piece of an answer; `seconds` since the previous one, None for the first."""
        self._tokens.inc(tokens)
        if seconds is not None:
            for _ in range(tokens):
                self._between.observe(seconds / tokens)

    def ended(self, output: Output) -> None:
        """Counts a finished answer."""
        stats = output.stats
        self._ended.labels(output.finish_reason).inc()
        if stats.rounds:
            self._rounds.inc(stats.rounds)
            self._lengths.observe(stats.acceptance_length)
        for position, count in enumerate(stats.accepted_per_position, 1):
            self._accepted.labels(str(position)).inc(count)

    def text(self) -> bytes:
        """Returns the metrics in Prometheus' text format."""
        return prometheus_client.generate_latest(self.registry)
