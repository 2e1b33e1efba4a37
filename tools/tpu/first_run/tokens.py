"""Greedy answers of a real model with drafts against those without, in each dtype, on one chip and on several."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.config import DraftConfig, DraftTree, MeshConfig, TargetConfig
from eagle3_jax.decoding.engine import Engine, SamplingParams
from eagle3_jax.decoding.load import load_models
from eagle3_jax.decoding.measure.compare import Tally, compare, total
from eagle3_jax.decoding.measure.near_tie import near_tie
from eagle3_jax.decoding.prompt import encode
from eagle3_jax.formats.packaged import AUTO, LOOKUP, packaged_head
from eagle3_jax.mesh import make_mesh
from eagle3_jax.models.checkpoint.fetch import load_target
from eagle3_jax.models.drafts.eagle3 import DraftHeadConfig
from eagle3_jax.runs import processes
from tpu.first_run import sizes
from tpu.first_run.lines import OK, WRONG, Line, attempt

# Two edits, of text and of code, whose answers quote the prompt, and one question.
PROMPTS = {
    "edit": "Repeat this text word for word, but write Lisbon instead of Porto:\n\nOn Monday the train to Porto leaves "
    "at nine. The ride to Porto takes three hours, and the seats by the window are the best ones. Bring your own bread "
    "and cheese, because nothing is sold on the train to Porto.",
    "code": "Rename the variable `total` to `price` in this function, and print the whole function:\n\n```python\n"
    "def bill(items, tax):\n    total = 0\n    for item in items:\n        total = total + item.cost\n"
    "    total = total * (1 + tax)\n    return total\n```",
    "chat": "Why is the sky blue? Answer in three sentences.",
}
# Steps, choices and nodes, and those at toy sizes.
TREES = {"chain": ((3, 1, 4), (2, 1, 3)), "tree": ((5, 4, 16), (2, 2, 5)), LOOKUP: ((8, 1, 9), (3, 1, 4))}
Dtype = Literal["float32", "bfloat16"]
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
# Tokens a round of the packaged head on these prompts, as CPUs count them in float32. A head that drafts worse on a
# chip changes no token.
TAU = {"chain": 2.09, "tree": 2.88, LOOKUP: 1.56}
MOST_WORSE = 0.1  # share of tau
MAX_TOKENS, MAX_LENGTH = 64, 512


def tokens(arguments: Any, *_: Any) -> Iterator[Line]:
    """Every host compares on chips of its own."""
    target, small = arguments.target, arguments.small
    with processes.among((processes.index(),)):
        for dtype in DTYPES:
            yield from attempt(f"tokens in {dtype}", functools.partial(_real, dtype, target, small=small))
            if jax.local_device_count() > 1:
                check = functools.partial(_split, dtype, small=small)
                yield from attempt(f"tokens in {dtype} on all devices", check)


def _real(dtype: Dtype, name: str, *, small: bool) -> Iterator[Line]:
    """A real model on one device, with its packaged head; without one, a head of random weights, always wrong."""
    target = load_target(TargetConfig(name=name, dtype=dtype))
    packaged = packaged_head(target) is not None
    shape = DraftHeadConfig.for_target(DraftConfig(vocab_size=128), target.model.config)
    alone = make_mesh(MeshConfig(data=1), jax.local_devices()[:1])
    draft = AUTO if packaged else sizes.random_draft(shape, jnp.dtype(dtype), alone)
    options = dict.fromkeys(("dtype", "weights", "mesh", "token_map"))
    model, tokenizer, head, _ = load_models(target, draft, **options)
    prompts = {key: encode(tokenizer, text) for key, text in PROMPTS.items()}
    yield from _compared(f"{dtype}, 1 device", (model, tokenizer, head), prompts, packaged, small=small)


def _split(dtype: Dtype, *, small: bool) -> Iterator[Line]:
    """Two layers of an 8B target over all chips of a host, whose KV heads they divide; weights are random."""
    devices = jax.local_devices()
    run = sizes.sized(make_mesh(MeshConfig(data=1, model=len(devices)), devices), small=small)
    shape = dataclasses.replace(run.shape, num_hidden_layers=2, aux_layers=(0, 1, 2))
    config = dataclasses.replace(run.config, target=dataclasses.replace(run.config.target, dtype=dtype))
    run = dataclasses.replace(run, shape=shape, config=config)
    rng = np.random.default_rng(0)
    prompts = {key: rng.integers(0, shape.vocab_size, 40).tolist() for key in PROMPTS}
    models = run.target, sizes.NoTokenizer(), run.draft
    yield from _compared(f"{dtype}, {len(devices)} devices", models, prompts, packaged=False, small=small)


def _compared(
    where: str, models: Any, prompts: Mapping[str, list[int]], packaged: bool, *, small: bool
) -> Iterator[Line]:
    model, tokenizer, head = models
    size = {"batch_size": len(prompts), "max_length": MAX_LENGTH, "prefix_cache": False}
    params = SamplingParams(max_tokens=MAX_TOKENS // 4 if small else MAX_TOKENS)
    asked = [{"id": key, "category": "all", "prompt": ids} for key, ids in prompts.items()]
    vanilla, judge = Engine(model, tokenizer, None, **size), functools.partial(near_tie, model)
    for draft, trees in TREES.items():
        steps, topk, nodes = trees[small]
        tree = DraftTree(num_steps=steps, topk=topk, num_draft_tokens=nodes)
        engine = Engine(model, tokenizer, LOOKUP if draft == LOOKUP else head, tree, **size)
        tallies = compare(vanilla, engine, asked, params, len(prompts), judge, progress=False)
        yield judged(f"{where}, {draft}", total(list(tallies.values())), TAU[draft] if packaged and not small else None)


def judged(name: str, tally: Tally, tau: float | None) -> Line:
    """Makes the line of answers that must be vanilla decoding's, up to near-ties, in `tau` tokens a round."""
    report = tally.report(exact=True)
    ties, mismatches = report["ties"], report["mismatches"]
    got = f"{report['identical']} of {report['prompts']}, {len(ties)} near-ties, tau {report['tau']:.2f}"
    where = ", ".join(f"{at['id']} differs from token {at['position']} on" for at in mismatches)
    worse = tau is not None and report["tau"] < (1 - MOST_WORSE) * tau
    expected = "vanilla decoding's tokens" + (f", tau {tau:.2f}" if tau is not None else "")
    return Line(name, f"{got}; {where}" if where else got, expected, WRONG if mismatches or worse else OK, report)
