"""Counts the operations of a traced program, and the share of the devices' peak that they use."""

from __future__ import annotations

import math
from typing import Any

from jax.extend.core import jaxprs_in_params

from eagle3_jax.runs.machine import TERAFLOPS


def products(jaxpr: Any) -> int:
    """Counts operations of all matrix products, over all devices; a multiply-add is two.

    Loops count once per iteration, conditionals by their largest branch. Pallas kernels are excluded, and loops of
    unknown length: those over a mixture's experts, off TPUs.
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

    Returns:
        `teraflops`: 1e12 operations a second and device; `mfu`: the same as a share of the published bfloat16 rate, of
        known chips (`runs.machine`).
    """
    found = {"teraflops": operations / seconds / len(devices) / 1e12}
    if (peak := TERAFLOPS.get(devices[0].device_kind)) is not None:
        found["mfu"] = found["teraflops"] / peak
    return found
