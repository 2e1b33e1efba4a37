"""Sums over batches -> numbers that people read, and where they are written."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import jax
import numpy as np
from tensorboardX import SummaryWriter

from eagle3_jax.runs import manifest, processes


class NotFinite(ValueError):
    """A batch whose loss or gradient is NaN or infinite; `index` is its place among those that were summed."""

    def __init__(self, index: int, values: dict[str, float]) -> None:
        super().__init__(", ".join(f"{name} {value}" for name, value in values.items()))
        self.index = index


def summarise(batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over the sums that a train or eval step returns (still on the device; this waits for them).

    Returns:
        `loss` (mean over batches); per step `accuracy` (the draft's first choice is the target's, over all positions
        that the mask counts), `cross_entropy`, `divergence` (KL) and `acceptance` (the share of drafts that would be
        accepted at temperature 1) over the positions that train; `positions`, how many of the first step do; `tokens`.
        Of train steps `gradient_norm`. Of eval steps what `evaluate` would say of a chain as long as there are steps:
        `rounds`, `tau` (tokens per round, bonus token included) and `alpha` per position (see `replay_rounds`).

    Raises:
        NotFinite: the first batch with NaN or infinity in it.
    """
    host: list[dict[str, np.ndarray]] = jax.device_get(list(batches))
    for index, batch in enumerate(host):
        watched = {name: float(batch[name]) for name in ("loss", "gradient_norm") if name in batch}
        if not np.isfinite(list(watched.values())).all():
            raise NotFinite(index, watched)
    total = {name: np.sum([batch[name] for batch in host], axis=0, dtype=np.float64) for name in host[0]}
    accuracy = total["hits"] / np.maximum(total["counted"], 1)
    compared = np.maximum(total["compared"], 1)
    summary = {
        "loss": float(total["loss"]) / len(host),
        "accuracy": accuracy.tolist(),
        "cross_entropy": (total["cross_entropy"] / compared).tolist(),
        "divergence": (total["divergence"] / compared).tolist(),
        "acceptance": (total["acceptance"] / compared).tolist(),
        "positions": int(np.asarray(total["compared"])[0]),
        "tokens": int(total["tokens"]),
    }
    if "rounds" in total:
        rounds, accepted = int(total["rounds"]), np.asarray(total["accepted"])
        summary["rounds"], summary["tau"] = rounds, float(1 + accepted.sum() / max(rounds, 1))
        summary["alpha"] = (accepted / np.maximum([rounds, *accepted[:-1]], 1)).tolist()
    if "gradient_norm" in total:
        summary["gradient_norm"] = float(total["gradient_norm"]) / len(host)
    return summary


class MetricWriter:
    """Appends to `metrics.jsonl` and to TensorBoard files in a folder; only process 0 writes. A context manager.

    Args:
        done: the step at which a killed run goes on: what was written of later ones is dropped, as they come again.
    """

    def __init__(self, folder: str | pathlib.Path, done: int | None) -> None:
        self._active = processes.index() == 0
        self._newest: dict[str, dict[str, Any]] = {}
        folder = pathlib.Path(folder)
        if self._active:
            path = folder / "metrics.jsonl"
            manifest.cut_torn_line(path)
            lines = manifest.read_jsonl(path) if path.exists() else ()
            kept = [line for line in lines if line["step"] <= (done or 0)]
            with manifest.atomic(path) as temporary:
                temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
            for line in kept:
                self._newest[line["kind"]] = {name: line[name] for name in line if name not in ("step", "kind")}
            self._lines = path.open("a", encoding="utf-8")
            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=(done or 0) + 1)

    def newest(self, kind: str) -> dict[str, Any]:
        """The values that stood last in `metrics.jsonl` when it was opened; empty where there are none."""
        return self._newest.get(kind, {})

    def write(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """One line, and one TensorBoard curve per number; element i of a list is the curve `name_i`.

        Args:
            kind: "train", "held_out" or "served".
        """
        if not self._active:
            return
        self._lines.write(json.dumps({"step": step, "kind": kind} | values) + "\n")
        self._lines.flush()
        for name, value in values.items():
            several = isinstance(value, list)
            for i, number in enumerate(value if several else [value]):
                self._board.add_scalar(f"{kind}/{name}_{i}" if several else f"{kind}/{name}", number, step)

    def __enter__(self) -> MetricWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._active:
            self._lines.close()
            self._board.close()
