"""Fits the quickstart to the machine: measures its speed and takes as many prompts as fit into 20 minutes.

    .venv/bin/python tools/quickstart_size.py configs/quickstart.yaml --spent 70

The package's own code measures three rates: the target reads prompts, the target answers a full batch, the head takes
training steps. The time of each stage follows from its amount of work. `work.json` in the run's folder keeps the
measurement and the choice, so that a rerun continues with the same work; `config.yaml` next to it is the config with
that choice, for all later verbs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import pathlib
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import yaml

from eagle3_jax import Engine, SamplingParams
from eagle3_jax.config import PackagedSource, RunConfig, SelfSource, run_file
from eagle3_jax.data import sources
from eagle3_jax.mesh import make_mesh
from eagle3_jax.models import chat_template
from eagle3_jax.models.checkpoint.fetch import Target, load_target
from eagle3_jax.runs import command, disk, timing
from eagle3_jax.training.batch import Batch, Teacher
from eagle3_jax.training.kinds.eagle3 import Eagle3
from eagle3_jax.training.optimizer import make_optimizer
from eagle3_jax.training.state import init_state, make_train_step

# Seconds for all stages, installation included, and the planned share of them; the rest is reserve.
LIMIT, PLANNED = 20 * 60, 0.9
# Smallest share of the prompts: a head trained on fewer shows nothing.
LEAST = 0.1
# Evaluations in tools/quickstart.sh, and the fewest prompts of each: one per category.
EVALUATIONS, LEAST_MEASURED = 3, 6
# Factors beside the rates. `extract` takes this many times the time of reading a token (it also computes the argmax and
# writes); a single sequence is this many times slower than a full batch; the target starts this many prompts for each
# finished one; rows have this padding; loading and compiling of all stages take as long as this many steps.
_EXTRACTING, _ALONE, _TRIED, _PADDING, _STARTING = 1.3, 5.0, 1.5, 1.05, 380
# The measurement's tokens of each prompt and of each answer.
_PROMPT, _ANSWER = 64, 17


@dataclasses.dataclass(frozen=True)
class Rates:
    """A machine's tokens a second of the target, at the batch size of `regenerate`; seconds of a training step; and the
    mean tokens of a prompt in its chat template."""

    reading: float
    answering: float
    step: float
    prompt_tokens: float


class Work(NamedTuple):
    """Numbers of packaged prompts, of prompts that the target writes, and of prompts to measure with."""

    packaged: int
    self_written: int
    measured: int


def full(config: RunConfig) -> Work:
    """Reads the config's work. Raises ValueError: no limits, or not one packaged and one self-written source."""
    packaged = [source.limit for source in config.prepare.sources if isinstance(source, PackagedSource)]
    written = [source.count for source in config.prepare.sources if isinstance(source, SelfSource)]
    counts = [*packaged, *written, config.evaluate.limit]
    if (len(packaged), len(written)) != (1, 1) or None in counts:
        raise ValueError(f"prepare.sources, evaluate.limit: got {counts}, expected the limits of the quickstart")
    return Work(*[count for count in counts if count is not None])


def seconds(work: Work, rates: Rates, config: RunConfig) -> dict[str, float]:
    """Estimates the seconds of each stage."""
    prompts, regenerate, train = work.packaged + work.self_written, config.regenerate, config.train
    tokens = prompts * (rates.prompt_tokens + regenerate.max_tokens)
    rows = math.ceil(tokens * (1 - config.prepare.held_out) * _PADDING / train.row_length)
    longest = next(source.max_tokens for source in config.prepare.sources if isinstance(source, SelfSource))
    measured = EVALUATIONS * 2 * work.measured * config.evaluate.max_tokens
    return {
        "starting": _STARTING * rates.step,
        "prepare": _TRIED * work.self_written * longest / rates.answering,
        "regenerate": prompts * (rates.prompt_tokens / rates.reading + regenerate.max_tokens / rates.answering),
        "extract": _EXTRACTING * tokens / rates.reading,
        "train": math.ceil(train.epochs * rows / train.batch_size) * rates.step,
        "evaluate": measured * _ALONE / rates.answering,
    }


def choose(rates: Rates, config: RunConfig, spent: float) -> Work:
    """Chooses the largest work that fits into the planned time, or the least. Args: spent: seconds so far."""
    whole = work = full(config)
    for percent in range(100, round(100 * LEAST) - 1, -1):
        packaged, written, measured = (round(percent / 100 * count) for count in whole)
        work = Work(max(1, packaged), max(1, written), max(min(LEAST_MEASURED, whole.measured), measured))
        if spent + sum(seconds(work, rates, config).values()) <= PLANNED * LIMIT:
            break
    return work


def cut(config: RunConfig, work: Work) -> RunConfig:
    """Makes the config with this work. Only the prompts change: epochs and sizes are the quickstart's."""
    values = run_file.to_dict(config)
    for source in values["prepare"]["sources"]:
        limited = {"packaged": {"limit": work.packaged}, "self": {"count": work.self_written}}
        source.update(limited.get(source["kind"], {}))
    values["evaluate"]["limit"] = work.measured
    return run_file.from_dict(values)


def measure(config: RunConfig) -> Rates:
    """Measures the machine's rates at this config's sizes, without compilation."""
    target, regenerate = load_target(config.target), config.regenerate
    packaged = [prompt for prompt in sources.packaged() if isinstance(prompt, dict)]
    chosen = sources.spread(packaged, regenerate.batch_size)
    prompts = [chat_template.prompt_ids(target.tokenizer, prompt["messages"]) for prompt in chosen]
    batch, length = [ids[:_PROMPT] for ids in prompts], max(regenerate.max_length, _PROMPT + _ANSWER)
    engine = Engine.load(target, None, "auto", len(batch), length, prefix_cache=False)

    def answer(tokens: int) -> None:
        temperature = regenerate.temperatures[0]
        engine.generate(batch, SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True))

    reading, whole = timing.in_turns([functools.partial(answer, tokens) for tokens in (1, _ANSWER)], lambda: None)
    del engine
    return Rates(
        reading=sum(map(len, batch)) / reading,
        answering=len(batch) * (_ANSWER - 1) / max(whole - reading, 0.01 * whole),
        step=_step_seconds(config, target),
        prompt_tokens=statistics.fmean(map(len, prompts)),
    )


def _step_seconds(config: RunConfig, target: Target) -> float:
    """Measures a training step on ones, which takes as long as one on features."""
    run, model, mesh = config.train, target.model, make_mesh(config.mesh)
    kind, optimizer = Eagle3.of(config, model.config), make_optimizer(run, 1000)
    head, size = kind.shape, (run.batch_size, run.row_length)
    token_ids = np.arange(head.draft_vocab_size, dtype=np.int32)
    teacher = jax.jit(Teacher.of)(model.embed[...], model.output_rows, token_ids)
    state = init_state(functools.partial(kind.new, config.seed), teacher.rows, optimizer, mesh)
    ones, widths = np.ones(size, np.int32), np.array([head.num_aux_layers, 1]) * head.target_hidden_size
    aux, last_hidden = (np.ones((*size, width), jnp.bfloat16) for width in widths)
    batch = Batch(ones, aux, last_hidden, ones, ones, ones, np.cumsum(ones, axis=1, dtype=np.int32) - 1)
    step = make_train_step(kind, optimizer, mesh)

    def work() -> None:
        nonlocal state
        state, sums = step(state, teacher, batch)
        jax.block_until_ready(sums)

    return timing.in_turns([work], lambda: None)[0]


def prepare(path: pathlib.Path, spent: float) -> str:
    """Writes `work.json`, unless it exists, and `config.yaml` into the run's folder. Returns a summary to print."""
    began, config = time.monotonic(), run_file.load(path)
    whole, folder = full(config), pathlib.Path(config.run_dir)
    kept = folder / "work.json"
    if kept.exists():
        work, summary = Work(**disk.read_json(kept)["work"]), f"as chosen before ({kept})"
    else:
        rates = measure(config)
        spent += time.monotonic() - began
        work = choose(rates, config, spent)
        ends = [round((spent + sum(seconds(x, rates, config).values())) / 60) for x in (whole, work)]
        folder.mkdir(parents=True, exist_ok=True)
        found = {"rates": dataclasses.asdict(rates), "work": work._asdict(), "seconds": seconds(work, rates, config)}
        disk.write_json(kept, found)
        summary = (
            f"this machine reads {rates.reading:.0f} tokens/s, answers {rates.answering:.0f} tokens/s "
            f"(batch {config.regenerate.batch_size}), takes a training step in {rates.step:.2f} s.\n"
            f"From the start, all of the work would take about {ends[0]} minutes, what is chosen {ends[1]}"
        )
    with disk.atomic(folder / "config.yaml") as temporary:
        temporary.write_text(yaml.safe_dump(run_file.to_dict(cut(config, work)), sort_keys=False))
    return (
        f"{summary}.\nThe work, {'all of it' if work == whole else 'cut to the machine'}: {work.packaged} of "
        f"{whole.packaged} packaged prompts, {work.self_written} of {whole.self_written} that the target writes, "
        f"{work.measured} of {whole.measured} to measure with."
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=pathlib.Path, help="the YAML to cut")
    parser.add_argument("--spent", type=float, default=0.0, help="seconds that were spent already")
    arguments = parser.parse_args(argv)
    with command.run("quickstart_size"):
        print(prepare(arguments.config, arguments.spent))


if __name__ == "__main__":
    main()
