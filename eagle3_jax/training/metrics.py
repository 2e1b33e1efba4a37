"""Training metrics: means from sums over batches, written to JSONL and TensorBoard; and the use of the devices."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params

from eagle3_jax.acceptance import AcceptanceCounts
from eagle3_jax.runs import disk, processes
from eagle3_jax.runs.machine import TERAFLOPS

_STORE_SECONDS = 60


def _summary_writer() -> type[Any]:
    """Imports tensorboardX without PyTorch, which it loads where that is installed: half of a training's start."""
    absent = sys.modules.setdefault("torch", None) is None  # pyrefly: ignore
    try:
        from tensorboardX import SummaryWriter
    finally:
        if absent:
            del sys.modules["torch"]
    return SummaryWriter


SummaryWriter = _summary_writer()


class NotFinite(ValueError):
    """A batch with a loss or gradient of NaN or infinity; `index` is its index among the summed batches."""

    def __init__(self, index: int, values: dict[str, float]) -> None:
        super().__init__(", ".join(f"{name} {value}" for name, value in values.items()))
        self.index = index


def summarise(batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Computes means from the sums of train or eval steps; waits for the device.

    Returns `loss` (mean over batches); `tokens`; per step `accuracy` (the draft's first choice is the target's) over
    all positions in the mask; per step `cross_entropy` and, where the loss has them, `divergence` (KL) and `acceptance`
    (share of drafts accepted at temperature 1) over trained positions; `positions`, those of the first step;
    `gradient_norm` of train steps; and a chain's `rounds`, `tau` and `alpha` of eval steps (see `replay.replay`).

    Raises NotFinite: the first batch with NaN or infinity in it.
    """
    host: list[dict[str, np.ndarray]] = jax.device_get(list(batches))
    for index, batch in enumerate(host):
        watched = {name: float(batch[name]) for name in ("loss", "gradient_norm") if name in batch}
        if not np.isfinite(list(watched.values())).all():
            raise NotFinite(index, watched)
    total = {name: np.sum([batch[name] for batch in host], axis=0, dtype=np.float64) for name in host[0]}
    accuracy = total["hits"] / np.maximum(total.get("counted", total["compared"]), 1)
    compared = np.maximum(total["compared"], 1)
    means = [name for name in ("cross_entropy", "divergence", "acceptance") if name in total]
    summary = {
        "loss": float(total["loss"]) / len(host),
        "accuracy": accuracy.tolist(),
        **{name: (total[name] / compared).tolist() for name in means},
        "positions": int(np.asarray(total["compared"])[0]),
        "tokens": int(total["tokens"]),
    }
    if "rounds" in total:
        counts = AcceptanceCounts(int(total["rounds"]), [int(n) for n in np.asarray(total["accepted"])])
        summary["rounds"], summary["tau"] = counts.rounds, counts.tau
        summary["alpha"] = [share or 0.0 for share in counts.alpha]
    if "gradient_norm" in total:
        summary["gradient_norm"] = float(total["gradient_norm"]) / len(host)
    return summary


class MetricWriter(contextlib.AbstractContextManager["MetricWriter"]):
    """Appends to `metrics.jsonl` and to TensorBoard files in a folder; only process 0 writes. A context manager.

    Entries behind step `done`, from which a killed run resumes, are dropped. A `project` of Weights & Biases gets the
    same numbers.
    """

    def __init__(self, folder: str | disk.Path, done: int | None, project: str | None = None) -> None:
        self._active = processes.index() == 0
        self._newest: dict[str, dict[str, Any]] = {}
        self._wandb, folder = None, disk.path_of(folder)
        if self._active and project is not None:  # begins the folder's run, or goes on with it
            place = disk.system_path(folder)
            whole = str(place.resolve() if place else folder)
            options = {"id": hashlib.sha256(whole.encode()).hexdigest()[:16], "dir": place and whole, "resume": "allow"}
            self._wandb = import_wandb(project).init(project=project, name=folder.parent.name, **options)
            self._wandb.define_metric("*", step_metric="step")
        if self._active:
            path = folder / "metrics.jsonl"
            with disk.open_log(path) as log:
                kept = [line for line in map(json.loads, log) if line["step"] <= (done or 0)]
            disk.rewrite_log(path, "".join(json.dumps(line) + "\n" for line in kept).encode())
            for line in kept:
                self._newest[line["kind"]] = {name: line[name] for name in line if name not in ("step", "kind")}
            self._lines = disk.Log(path)
            curves, self._store_curves = disk.outbox(folder / "tensorboard")
            self._board, self._stored = SummaryWriter(str(curves), purge_step=(done or 0) + 1), time.monotonic()

    def newest(self, kind: str) -> dict[str, Any]:
        """Returns the last values of this kind in `metrics.jsonl` at opening; empty if there are none."""
        return self._newest.get(kind, {})

    def write(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """Writes a line of a kind ("train", "held_out", "served"), and a TensorBoard curve per number.

        Element i of a list is the curve `name_i`.
        """
        if not self._active:
            return
        self._lines.write(json.dumps({"step": step, "kind": kind} | values) + "\n")
        curves = {}
        for name, value in values.items():
            numbers = {f"_{i}": x for i, x in enumerate(value)} if isinstance(value, list) else {"": value}
            curves |= {f"{kind}/{name}{ending}": number for ending, number in numbers.items()}
        for name, number in curves.items():
            self._board.add_scalar(name, number, step)
        if time.monotonic() - self._stored > _STORE_SECONDS:
            self._stored = time.monotonic()
            self._board.flush()
            self._store_curves()
        if self._wandb is not None:
            self._wandb.log(curves | {"step": step})

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._active:
            self._lines.close()
            self._board.close()
            self._store_curves()
            if self._wandb is not None:
                self._wandb.finish(exit_code=0 if kind is None else 1)


def import_wandb(project: str) -> Any:
    """Imports Weights & Biases, to which `train.wandb: project` sends. Raises ValueError if it is not installed."""
    try:
        import wandb
    except ImportError as error:
        raise ValueError(f"train.wandb: got {project!r}, expected the package: pip install wandb") from error
    return wandb


def products(jaxpr: Any) -> int:
    """Counts operations of matrix products outside Pallas kernels, over all devices; a multiply-add is two.

    Loops count once per iteration, conditionals by their largest branch, and loops of unknown length not at all:
    those over a mixture's experts, off TPUs.
    """
    total = 0
    for equation in jaxpr.eqns:
        kind, parameters = equation.primitive.name, equation.params
        if kind == "dot_general":
            (contracted, _), _ = parameters["dimension_numbers"]
            inner = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * inner * math.prod(equation.outvars[0].aval.shape)
        elif kind not in ("pallas_call", "while"):
            parts = [products(part) for part in jaxprs_in_params(parameters)]
            times = parameters["length"] if kind == "scan" else 1
            if kind == "shard_map":
                times *= math.prod(parameters["mesh"].shape[axis] for axis in parameters["manual_axes"])
            total += times * (max(parts) if kind == "cond" else sum(parts))
    return total


def utilisation(operations: int, seconds: float, devices: list[Any]) -> dict[str, float]:
    """Computes a run's use of its devices by so many operations (see `products`) on all of them together.

    `teraflops`: 1e12 operations a second and device; `mfu`: of known chips, the share of the published bfloat16 rate.
    """
    found = {"teraflops": operations / seconds / len(devices) / 1e12}
    if (peak := TERAFLOPS.get(devices[0].device_kind)) is not None:
        found["mfu"] = found["teraflops"] / peak
    return found
