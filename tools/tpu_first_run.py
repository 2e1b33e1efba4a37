"""The first run on a TPU: checks numbers, measures times beside their predictions, and writes one table and one JSON.

    .venv/bin/python tools/tpu_first_run.py --output first_run.json [--small]

Run it on every host of a slice at once (`tools/tpu_vm.sh first-run` does). Process 0 prints all, the others what is
WRONG or slow. The stages, each a process of its own, whose failure, crash or hang is a line of the table:

- device: versions, chips, and their memory against the chip's HBM.
- kernels: every Pallas kernel of tools/tpu/cases.py against XLA's operations; products in float32; equal scores.
- speeds: products of 1 to 16 rows, collectives over the chips of a host and over all.
- tokens: greedy answers of a packaged model with drafts against those without, in each dtype, on one chip and several.
- rounds: an 8B target's rounds by draft, with random weights, on all chips of a host.
- training: a training step at that size; the verb `train`, stopped by SIGTERM and started again.

Exit status 1: something is WRONG; 2: a wrong argument. A time above twice its prediction, a floor from the chip's
published figures, is "slow", which fails nothing. --small has toy sizes, on CPUs too, where kernels are interpreted.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import importlib
import json
import os
import pathlib
import subprocess
import sys

from eagle3_jax.runs import disk, environment, machine

# Each with the module of tools/tpu/first_run that has a function of this name, which yields the stage's lines.
STAGES = dict.fromkeys(("device", "kernels", "speeds"), "speeds") | {"tokens": "tokens"}
STAGES |= dict.fromkeys(("rounds", "training"), "sizes")
TARGET = "smollm2-135m-instruct"  # comes with the package, and so does its head
SECONDS = 1200  # for one stage
# For the causes of failures, which libtpu and the coordinator log.
_TPU_LOGS = {"TF_CPP_MIN_LOG_LEVEL": "1", "TPU_STDERR_LOG_LEVEL": "0"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs/first_run/first_run.json"))
    parser.add_argument("--stages", default=",".join(STAGES), help="some of " + ",".join(STAGES))
    parser.add_argument("--small", action="store_true", help="toy sizes")
    parser.add_argument("--target", default=TARGET, help="the model of `tokens` and of the verb `train`")
    parser.add_argument("--run-dir", help="where the verb `train` runs; several hosts need a folder that all see")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    stages = arguments.stages.split(",")
    if unknown := set(stages) - set(STAGES):
        parser.error(f"--stages: got {', '.join(sorted(unknown))}, expected some of {', '.join(STAGES)}")
    if arguments.output.suffix != ".json":
        parser.error(f"--output: got {arguments.output}, expected a file that ends with .json")
    environment.prepare()
    if arguments.stage:
        run_stage(arguments)
    else:
        sys.exit(run(arguments, stages))


def run(arguments: argparse.Namespace, stages: list[str]) -> int:
    """Runs the stages one after the other; returns the exit status."""
    from tpu.first_run import lines, sizes

    folder = arguments.output.resolve().parent
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "programs"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    if machine.has_tpu():
        os.environ.update(_TPU_LOGS)
    print(lines.HEAD, flush=True)
    found: list[lines.Line] = []
    for stage in stages:
        file = folder / f"{stage}.jsonl"
        file.unlink(missing_ok=True)
        failure = _child([sys.executable, __file__, *sys.argv[1:], "--stage", stage], folder / f"{stage}.log")
        found += [lines.Line(**json.loads(line)) for line in (file.read_text().splitlines() if file.exists() else ())]
        more = [] if failure is None else [lines.right(stage, failure, "no error")]
        if stage == "training" and (folder / "train.yaml").exists() and failure is None:
            more = lines.attempt("train", functools.partial(sizes.resumed, folder / "train.yaml"))
        for line in more:
            found.append(line)
            print(line, flush=True)
        disk.write_json(arguments.output, [dataclasses.asdict(line) for line in found])
    counts = collections.Counter(line.verdict for line in found)
    print(f"{', '.join(f'{count} {verdict}' for verdict, count in counts.items())}: {arguments.output}")
    return int(counts[lines.WRONG] > 0)


def _child(command: list[str], log: pathlib.Path) -> str | None:
    """Runs a stage; returns the last words of one that did not end well."""
    with open(log, "w") as file:
        try:
            done = subprocess.run(command, stderr=file, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return f"no end within {SECONDS} seconds, see {log}"
    written = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = written[-1][:200] if written else ""
    return f"exit status {done.returncode}: {last} (all of it: {log})" if done.returncode else None


def run_stage(arguments: argparse.Namespace) -> None:
    """Runs one stage, as one of the processes of the slice, and writes its lines beside the output."""
    from tpu.first_run import lines

    from eagle3_jax.runs import command, processes

    stage, folder = arguments.stage, arguments.output.resolve().parent
    with command.run(f"tpu_first_run, {stage}", resumes=False), open(folder / f"{stage}.jsonl", "w") as file:
        module = importlib.import_module(f"tpu.first_run.{STAGES[stage]}")  # that fails is the stage's failure
        for line in getattr(module, stage)(arguments, folder):
            print(json.dumps(dataclasses.asdict(line)), file=file, flush=True)
            if processes.index() == 0 or line.verdict in (lines.WRONG, lines.SLOW):
                print(line, flush=True)


if __name__ == "__main__":
    main()
