"""Counting of the operations of a traced program's matrix products."""

from __future__ import annotations

import math
from typing import Any

from jax.extend.core import jaxprs_in_params


def products(jaxpr: Any) -> int:
    """Counts operations of all matrix products, over all devices; a multiply-add is two.

    Loops count once per iteration, conditionals by their largest branch; Pallas kernels are excluded.

    Raises:
        ValueError: a loop of unknown length with products in it.
    """
    total = 0
    for equation in jaxpr.eqns:
        kind, parameters = equation.primitive.name, equation.params
        if kind == "dot_general":
            (contracted, _), _ = parameters["dimension_numbers"]
            inner = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * inner * math.prod(equation.outvars[0].aval.shape)
        elif kind != "pallas_call":
            parts = [products(part) for part in jaxprs_in_params(parameters)]
            if kind == "while" and any(parts):
                raise ValueError("a loop of unknown length, expected one whose length is known")
            times = parameters["length"] if kind == "scan" else 1
            times *= parameters["mesh"].size if kind == "shard_map" else 1
            total += times * (max(parts) if kind == "cond" else sum(parts))
    return total
