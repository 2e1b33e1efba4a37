"""Fits the quickstart to the machine: measures its speed and takes as many prompts as fit into 20 minutes.

    .venv/bin/python tools/quickstart_size.py configs/quickstart.yaml --spent 70

The package's own code measures three rates: the target reads prompts, the target answers a full batch, the head takes
training steps. The time of the stages follows from their work. `work.json` in the run's folder keeps the share of the
prompts, so that a rerun continues with the same work; `config.yaml` next to it is the cut config, for all later verbs.
"""

from __future__ import annotations

import argparse
import functools
import math
import pathlib
import statistics
import time
from typing import NamedTuple

import yaml
from tpu.first_run.sizes import training_step

from eagle3_jax import Engine, SamplingParams
from eagle3_jax.config import PackagedSource, RunConfig, SelfSource, run_file
from eagle3_jax.data import sources
from eagle3_jax.mesh import make_mesh
from eagle3_jax.models import chat_template
from eagle3_jax.models.checkpoint.fetch import load_target
from eagle3_jax.runs import command, disk, timing

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


class Rates(NamedTuple):
    """Tokens a second of the target, at `regenerate`'s batch; seconds of a training step; mean tokens of a prompt."""

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


def seconds(work: Work, rates: Rates, config: RunConfig) -> float:
    """Estimates the seconds of all stages."""
    prompts, answer, train = work.packaged + work.self_written, config.regenerate.max_tokens, config.train
    tokens = prompts * (rates.prompt_tokens + answer)
    rows = math.ceil(tokens * (1 - config.prepare.held_out) * _PADDING / train.row_length)
    longest = next(source.max_tokens for source in config.prepare.sources if isinstance(source, SelfSource))
    answered = _TRIED * work.self_written * longest + prompts * answer  # by `prepare` and `regenerate`
    answered += EVALUATIONS * 2 * work.measured * config.evaluate.max_tokens * _ALONE
    read = prompts * rates.prompt_tokens + _EXTRACTING * tokens
    steps = _STARTING + math.ceil(train.epochs * rows / train.batch_size)
    return read / rates.reading + answered / rates.answering + steps * rates.step


def choose(rates: Rates, config: RunConfig, spent: float) -> Work:
    """Chooses the largest work that fits into the planned time, or the least. Args: spent: seconds so far."""
    whole = work = full(config)
    for percent in range(100, round(100 * LEAST) - 1, -1):
        packaged, written, measured = (round(percent / 100 * count) for count in whole)
        work = Work(max(1, packaged), max(1, written), max(min(LEAST_MEASURED, whole.measured), measured))
        if spent + seconds(work, rates, config) <= PLANNED * LIMIT:
            break
    return work


def cut(config: RunConfig, work: Work) -> RunConfig:
    """Makes the config with this work. Only the prompts change: epochs and sizes are the quickstart's."""
    values = run_file.to_dict(config)
    for source in values["prepare"]["sources"]:
        source |= {"packaged": {"limit": work.packaged}, "self": {"count": work.self_written}}[source["kind"]]
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
    step, _ = training_step(config, target.model.config, make_mesh(config.mesh))
    return Rates(
        reading=sum(map(len, batch)) / reading,
        answering=len(batch) * (_ANSWER - 1) / max(whole - reading, 0.01 * whole),
        step=timing.in_turns([step], lambda: None)[0],
        prompt_tokens=statistics.fmean(map(len, prompts)),
    )


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
        ends = [round((spent + seconds(x, rates, config)) / 60) for x in (whole, work)]
        folder.mkdir(parents=True, exist_ok=True)
        disk.write_json(kept, {"rates": rates._asdict(), "work": work._asdict()})
        summary = f"all of the work would take about {ends[0]} minutes in all, what is chosen {ends[1]}"
    with disk.atomic(folder / "config.yaml") as temporary:
        temporary.write_text(yaml.safe_dump(run_file.to_dict(cut(config, work)), sort_keys=False))
    return (
        f"{summary}.\nThe work, {'all of it' if work == whole else 'cut to the machine'}: {work.packaged} of "
        f"{whole.packaged} packaged prompts, {work.self_written} of {whole.self_written} that the target writes, "
        f"{work.measured} of {whole.measured} to measure with."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=pathlib.Path, help="the YAML to cut")
    parser.add_argument("--spent", type=float, default=0.0, help="seconds that were spent already")
    arguments = parser.parse_args()
    with command.run("quickstart_size"):
        print(prepare(arguments.config, arguments.spent))


if __name__ == "__main__":
    main()
