"""Fits the quickstart to the machine: measures its speed and takes as many prompts as fit into 20 minutes.

    .venv/bin/python tools/quickstart_size.py configs/quickstart.yaml --spent 70

The package's own code measures three rates: the target reads prompts, the target answers a full batch, the head takes
training steps. The time of the stages follows from their work. `work.json` in the run's folder keeps the share of the
prompts, so that a rerun continues with the same work; `config.yaml` next to it is the cut config, for all later verbs.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import time
from typing import NamedTuple

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
MEASURED = 6  # fewest prompts of an evaluation: one per category
# All prompts of the quickstart: tokens that the target reads (`extract` counts 1.3 times), tokens that it answers in a
# full batch (of `evaluate`, which has a single sequence, 5 times as many), and steps of the head. Loading and compiling
# of all stages take as long as so many steps more.
READ, ANSWERED, STEPS, STARTING = 211_000, 120_000, 680, 380
# The measurement's tokens of each prompt and of each answer.
_PROMPT, _ANSWER = 64, 17


class Rates(NamedTuple):
    """Tokens a second of the target, at `regenerate`'s batch, and seconds of a training step."""

    reading: float
    answering: float
    step: float


def seconds(percent: int, rates: Rates) -> float:
    """Estimates the seconds of all stages with this share of the prompts."""
    whole = READ / rates.reading + ANSWERED / rates.answering + STEPS * rates.step
    return percent / 100 * whole + STARTING * rates.step


def choose(rates: Rates, spent: float) -> int:
    """Chooses the largest share that fits into the planned time, or the least. Args: spent: seconds so far."""
    shares = range(100, LEAST, -1)
    return next((x for x in shares if spent + seconds(x, rates) <= PLANNED * LIMIT), LEAST)


def cut(config: RunConfig, percent: int) -> RunConfig:
    """Makes the config with this share of the prompts; epochs and sizes are the quickstart's."""
    values = run_file.to_dict(config)
    packaged, written = values["prepare"]["sources"]
    fields = (packaged, "limit", 1), (written, "count", 1), (values["evaluate"], "limit", MEASURED)
    for section, field, least in fields:
        section[field] = max(min(least, section[field]), round(percent / 100 * section[field]))
    return run_file.from_dict(values)


def measure(config: RunConfig) -> Rates:
    """Measures the machine's rates at this config's sizes, without compilation."""
    target, regenerate = load_target(config.target), config.regenerate
    packaged = [prompt for prompt in sources.packaged() if isinstance(prompt, dict)]
    chosen = sources.spread(packaged, regenerate.batch_size)
    batch = [chat_template.prompt_ids(target.tokenizer, prompt["messages"])[:_PROMPT] for prompt in chosen]
    length = max(regenerate.max_length, _PROMPT + _ANSWER)
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
        percent = choose(rates, spent)
        whole, chosen = (round((spent + seconds(x, rates)) / 60) for x in (100, percent))
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
