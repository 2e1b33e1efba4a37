"""Tau of heads trained on hidden states in 8 bits against bfloat16, several seeds each, by the decoder itself.

    .venv/bin/python tools/states_tau.py --config configs/quickstart.yaml --made runs/quickstart --folder runs/states

Takes the prompts and conversations of a finished run, extracts them in both forms, and trains a head for each form and
seed. The engine answers held-out prompts with each head. Prints a line a head and the ratio of the means. A killed run
goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
from collections.abc import Sequence

from eagle3_jax.config import RunConfig, run_file
from eagle3_jax.extract.__main__ import extract
from eagle3_jax.runs import command
from eagle3_jax.train.__main__ import train

FORMS = ("bfloat16", "fp8")


def measure(config: RunConfig, made: pathlib.Path, folder: pathlib.Path, form: str, seed: int) -> float:
    """Measures tau of one head.

    Args:
        made: a run folder with prompts and conversations.
        folder: folder of the trainings, a run folder for each form and seed.
    """
    features, run = folder / form, folder / f"{form}-{seed}"
    extracting = dataclasses.replace(config.extract, states=form)  # pyrefly: ignore
    training = dataclasses.replace(config.train, features="stored", decode_every=2**30)  # behind the last step
    for name in ("prompts", "conversations"):
        _link(made / name, features / name)
        _link(made / name, run / name)
    extract(dataclasses.replace(config, run_dir=str(features), extract=extracting))
    _link(features / "features", run / "features")
    trained = dataclasses.replace(config, run_dir=str(run), extract=extracting, train=training, seed=seed)
    return train(trained)["served"]["tau"]


def _link(there: pathlib.Path, here: pathlib.Path) -> None:
    here.parent.mkdir(parents=True, exist_ok=True)
    if not here.exists():
        here.symlink_to(there.resolve())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, type=pathlib.Path)
    parser.add_argument("--made", required=True, type=pathlib.Path, help="run folder with prompts and conversations")
    parser.add_argument("--folder", required=True, type=pathlib.Path, help="for the trainings")
    parser.add_argument("--seeds", default=3, type=int)
    parser.add_argument("--steps", default=None, type=int, help="last step of each training")
    given = parser.parse_args(argv)
    config = run_file.load(given.config)
    if given.steps is not None:
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, max_steps=given.steps))
    with command.run("states_tau"):
        means = []
        for form in FORMS:
            found = []
            for seed in range(given.seeds):
                found.append(measure(config, given.made, given.folder, form, seed))
                print(f"{form}, seed {seed}: tau {found[-1]:.3f}", flush=True)
            means.append(statistics.mean(found))
        print(f"fp8 / bfloat16: {means[1] / means[0]:.4f}")


if __name__ == "__main__":
    main()
