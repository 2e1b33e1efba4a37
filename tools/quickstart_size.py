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
from typing import Any, NamedTuple

import yaml
from tpu.first_run.sizes import training_step

from eagle3_jax import Engine, SamplingParams
from eagle3_jax.config import RunConfig, run_file
from eagle3_jax.data import sources
from eagle3_jax.mesh import make_mesh
from eagle3_jax.models import chat_template
from eagle3_jax.models.checkpoint.fetch import load_target
from eagle3_jax.runs import command, disk, timing

# Seconds for all stages, installation included, and the planned share of them; the rest is reserve.
LIMIT, PLANNED = 20 * 60, 0.9
LEAST = 10  # percent of the prompts: a head trained on fewer shows nothing
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


def cut(config: RunConfig, percent: int) -> RunConfig:
    """Makes the config with this share of the prompts; epochs and sizes are the quickstart's."""
    values = run_file.to_dict(config)
    packaged, written = values["prepare"]["sources"]
    measured = values["evaluate"], "limit", LEAST_MEASURED
    for section, field, least in (packaged, "limit", 1), (written, "count", 1), measured:
        section[field] = max(min(least, section[field]), round(percent / 100 * section[field]))
    return run_file.from_dict(values)


def seconds(config: RunConfig, rates: Rates) -> float:
    """Estimates the seconds of all stages."""
    source: Any
    (packaged, source), answer, train = config.prepare.sources, config.regenerate.max_tokens, config.train
    prompts = packaged.limit + source.count
    tokens = prompts * (rates.prompt_tokens + answer)
    rows = math.ceil(tokens * (1 - config.prepare.held_out) * _PADDING / train.row_length)
    answered = _TRIED * source.count * source.max_tokens + prompts * answer  # by `prepare` and `regenerate`
    answered += EVALUATIONS * 2 * config.evaluate.limit * config.evaluate.max_tokens * _ALONE
    read = prompts * rates.prompt_tokens + _EXTRACTING * tokens
    steps = _STARTING + math.ceil(train.epochs * rows / train.batch_size)
    return read / rates.reading + answered / rates.answering + steps * rates.step


def choose(rates: Rates, config: RunConfig, spent: float) -> int:
    """Chooses the largest share that fits into the planned time, or the least. Args: spent: seconds so far."""
    shares = range(100, LEAST, -1)
    return next((x for x in shares if spent + seconds(cut(config, x), rates) <= PLANNED * LIMIT), LEAST)


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
    counts = [getattr(x, "limit" if x.kind == "packaged" else "count", None) for x in config.prepare.sources]
    if len(counts) != 2 or None in (*counts, config.evaluate.limit):
        raise ValueError(f"prepare.sources, evaluate.limit: got {counts}, expected the limits of the quickstart")
    folder = pathlib.Path(config.run_dir)
    kept = folder / "work.json"
    if kept.exists():
        percent, summary = disk.read_json(kept)["percent"], f"as chosen before ({kept})"
    else:
        rates = measure(config)
        spent += time.monotonic() - began
        percent = choose(rates, config, spent)
        whole, chosen = (round((spent + seconds(cut(config, x), rates)) / 60) for x in (100, percent))
        folder.mkdir(parents=True, exist_ok=True)
        disk.write_json(kept, {"rates": rates._asdict(), "percent": percent})
        summary = f"all of the work would take about {whole} minutes in all, what is chosen {chosen}"
    with disk.atomic(folder / "config.yaml") as temporary:
        temporary.write_text(yaml.safe_dump(run_file.to_dict(cut(config, percent)), sort_keys=False))
    return f"{summary}.\nThe work: {percent} % of the prompts, packaged, written by the target and measured."


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=pathlib.Path, help="the YAML to cut")
    parser.add_argument("--spent", type=float, default=0.0, help="seconds that were spent already")
    arguments = parser.parse_args()
    with command.run("quickstart_size"):
        print(prepare(arguments.config, arguments.spent))


if __name__ == "__main__":
    main()
