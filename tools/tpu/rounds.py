"""Counts what a round of drafts reads and computes, from its traced program; nothing is compiled.

Bytes are those of the operands of its matrix products, each read once a product, in the bits that memory holds
(`--target.weights int8`, or int4 as its Pallas kernel reads it): weights, and the context in the caches. Operations are
those of the same products. Collectives, other operations and waits take time too: what is counted is a floor.
"""

from __future__ import annotations

import math
import os
from typing import Any, NamedTuple
from unittest import mock

import tpu_fit  # sets the environment of JAX

from tpu.topology import Chip

os.environ["EAGLE3_CPU_KERNELS"] = "0"  # products are XLA's operations, which can be read

import jax
import jax.numpy as jnp
from jax.extend.core import Var, jaxprs_in_params

from eagle3_jax.config import DraftTree, RunConfig
from eagle3_jax.decoding.device.memory import empty_state
from eagle3_jax.decoding.device.models import Models
from eagle3_jax.decoding.device.shapes import Sizes
from eagle3_jax.decoding.engine import PAGE_SIZE
from eagle3_jax.decoding.rounds.round import advance, draft_tree
from eagle3_jax.decoding.tier import RoundPlan, Tier
from eagle3_jax.kernels.linear import quantised
from eagle3_jax.kernels.linear.layouts import bytes_of
from eagle3_jax.models.checkpoint.fetch import fetch, read_config
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.families import family_of
from eagle3_jax.models.inference_layout import weights_beside
from eagle3_jax.models.quantisation import quantised_model
from eagle3_jax.models.shapes import shapes_of


class Work(NamedTuple):
    """Bytes of the operands of matrix products, and their operations; a multiply-add is two."""

    bytes: int = 0
    operations: int = 0

    def seconds(self, chip: Chip) -> float:
        """Returns the least time of one device: the larger of bytes over bandwidth and operations over the peak."""
        return max(self.bytes / (chip.gigabytes * 1e9), self.operations / (chip.teraflops * 1e12))


def work(jaxpr: Any) -> Work:
    """Sums the products of a program without loops around them; a conditional counts by its largest branch.

    An operand that is converted first counts as it lies in memory: the product converts it on its way.
    """
    found: list[Work] = []
    held: dict[Any, Any] = {}  # a converted variable -> the one that memory holds
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        operands: list[Any] = [x for x in equation.invars if isinstance(x, Var)]
        if name == "convert_element_type" and operands:
            held[equation.outvars[0]] = held.get(operands[0], operands[0])
        if name == "pallas_call":  # a grouped product, see `counted`
            values = next(x.aval for x in operands if x.aval.ndim == 3)
            read = sum(bytes_of(x.aval) for x in operands)
            found.append(Work(read, 2 * values.shape[1] * equation.outvars[0].aval.size))
        elif name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            inner = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            read = sum(bytes_of(held.get(x, x).aval) for x in operands)
            found.append(Work(read, 2 * inner * equation.outvars[0].aval.size))
        else:
            parts = [work(part) for part in jaxprs_in_params(equation.params)]
            found += [max(parts, default=Work())] if name == "cond" else parts
    return Work(sum(x.bytes for x in found), sum(x.operations for x in found))


def counted(config: RunConfig, tree: DraftTree | None, context: int, batch: int = 1) -> tuple[Work, Work]:
    """Counts the draft's passes before a verification, and the whole round, of `batch` requests.

    Args:
        tree: None is vanilla decoding.
    """
    shape = read_config(fetch(config.target.name, whole=False), config.target.aux_layers)
    dtype, draft = jnp.dtype(config.target.dtype), None
    target = shapes_of(lambda rngs: family_of(shape).model(shape, dtype=dtype, rngs=rngs))
    head = tpu_fit.drafting_head(config, shape) if tree else None
    target = target.observed_at(head.config.aux_layers) if head else target
    target = tpu_fit.in_few_bits(config, target)
    if head:
        head = quantised_model(head, config.serve.draft_weights or weights_beside(target), vocabulary=True)
        token_ids: Any = jax.ShapeDtypeStruct((head.config.draft_vocab_size,), jnp.int32)
        draft = Draft(head, token_ids)
    tier = Tier(tree, head=draft is not None)
    sizes, plan = Sizes.plan(batch, context, PAGE_SIZE, [tier]), RoundPlan(tier, greedy=True)
    state = jax.eval_shape(lambda models: empty_state(models, sizes, [tier], None), Models.of(target, draft))
    # A TPU multiplies groups by a Pallas kernel; XLA's operations for them read more.
    with mock.patch.object(quantised, "choose", lambda _, *, pallas: "pallas" if pallas else "xla"):
        drafting = jax.make_jaxpr(lambda *x: draft_tree(x[0], x[1], x[2], plan)[1].draft_cache)(target, draft, state)
        whole = jax.make_jaxpr(lambda *x: advance(x[0], x[1], x[2], plan))(target, draft, state)
    return work(drafting.jaxpr), work(whole.jaxpr)
