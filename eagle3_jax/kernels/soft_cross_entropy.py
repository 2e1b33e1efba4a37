"""Cross entropy of several students against one teacher over a large vocabulary, block by block.

Logits of teacher and students are held for one block of positions at a time. The gradient of a soft cross entropy with
respect to the logits is w * (q - p) in closed form. So the forward pass computes the gradients along with the loss, and
the backward pass recomputes nothing.

The LK loss (arXiv 2602.23881) uses the same blocks. It is s * CE + (1 - s) * (1 - a), where a = sum_v min(p_v, q_v) is
the share of drafts that speculative sampling accepts. The weight s = exp(-decay * a), without gradient, leaves cross
entropy to positions where the student is still far off. The gradient of a is q_v * (u_v - sum_w q_w u_w), with u_v = 1
where q_v < p_v and 0 elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.kernels.contraction import summed
from eagle3_jax.kernels.vocabulary.api import capped

Static = tuple[int, float | None]  # positions of each row in a block, and `cap`
Compared = tuple[Array, Array, Array, Array]  # the fields of `Comparison`

_HIGHEST = jax.lax.Precision.HIGHEST


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Comparison:
    """Students against teacher at each position; zero (False) in blocks that were skipped.

    Attributes:
        cross_entropy: float32 [K, B, T], -sum_v p_v log q_v.
        entropy: float32 [B, T], the teacher's own; cross_entropy - entropy is the KL divergence.
        hits: bool [K, B, T], whether the student's most probable token is the label.
        acceptance: float32 [K, B, T], sum_v min(p_v, q_v): the probability that a draft drawn from the student is
            accepted, at temperature 1 and on the students' vocabulary.
    """

    cross_entropy: Float[Array, "k b t"]
    entropy: Float[Array, "b t"]
    hits: Bool[Array, "k b t"]
    acceptance: Float[Array, "k b t"]


def soft_cross_entropy(
    hidden: Float[Array, "k b t h"],
    rows: Float[Array, "v h"],
    teacher_hidden: Float[Array, "b t wide"],
    teacher_rows: Float[Array, "v wide"],
    labels: Int[Array, "b t"],
    weights: Float[Array, "k b t"],
    block: int,
    lk_decay: Float[Array, ""] | None = None,
    cap: float | None = None,
) -> tuple[Float[Array, ""], Comparison]:
    """Sums weights * CE(softmax(teacher logits), softmax(student logits)), or weights * LK loss, over k, b, t.

    Args:
        hidden: LM-head inputs of K students; gradients flow to `hidden` and `rows` only.
        rows: the students' LM head. Matmul operands have the dtype of `hidden`; logits and softmax are float32.
        labels: the token in [0, v) that counts as a hit; -1 for none.
        weights: blocks whose weights are all zero are skipped, so the other positions should be close together.
        block: positions per block over all B rows; memory is a few times block * v floats.
        lk_decay: decay of the LK loss; 0 is cross entropy. None is cross entropy too, compiled without the LK loss.
        cap: of the teacher's logits, see `capped`.

    Returns:
        The loss, and the comparison (without gradient).
    """
    b, t = teacher_hidden.shape[:2]
    length = min(t, max(1, block // b))  # positions of each row in a block
    pad = -t % length
    outputs: Any = _blocked(
        (length, cap),
        jnp.pad(hidden, ((0, 0), (0, 0), (0, pad), (0, 0))),
        rows,
        teacher_rows,
        jnp.pad(teacher_hidden, ((0, 0), (0, pad), (0, 0))),
        jnp.pad(labels, ((0, 0), (0, pad)), constant_values=-1),
        jnp.pad(weights, ((0, 0), (0, 0), (0, pad))),
        lk_decay,
    )
    loss, compared = outputs
    return loss, Comparison(*(jax.lax.stop_gradient(x[..., :t]) for x in compared))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked(static: Static, *operands: Array | None) -> tuple[Array, Compared]:
    return _scan(static, *operands, gradients=False)[0]


def _forward(static: Static, *operands: Array | None) -> tuple[tuple[Array, Compared], tuple[Array, Array]]:
    return _scan(static, *operands, gradients=True)


def _backward(static: Static, gradients: tuple[Array, Array], cotangents: Any) -> tuple[Array | None, ...]:
    d_hidden, d_rows = gradients
    g = cotangents[0]
    return (d_hidden * g.astype(d_hidden.dtype), d_rows * g.astype(d_rows.dtype), *(None,) * 5)


_blocked.defvjp(_forward, _backward)


def _scan(static: Static, *operands: Any, gradients: bool) -> tuple[tuple[Array, Compared], Any]:
    """Scans blocks of `length` positions of every row, and joins the outputs of `_block`."""
    hidden, rows, teacher_rows, teacher_hidden, labels, weights, lk_decay = operands
    (k, b, _, h), (length, cap) = hidden.shape, static
    own_rows, own_teacher_rows = rows.astype(hidden.dtype), teacher_rows.astype(hidden.dtype)

    def cut(x: Array, axis: int) -> Array:
        return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, length, *x.shape[axis + 1 :]), axis, 0)

    def join(x: Array, axis: int) -> Array:
        x = jnp.moveaxis(x, 0, axis)
        return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

    def body(carry: tuple[Array, Array], block: tuple[Array, ...]) -> tuple[tuple[Array, Array], Any]:
        def skip(carry: Any) -> tuple[Any, Any]:
            d_hidden = jnp.zeros_like(block[0]) if gradients else ()
            each = (k, b, length)
            compared = (jnp.zeros(each), jnp.zeros((b, length)), jnp.zeros(each, jnp.bool), jnp.zeros(each))
            return carry, (compared, d_hidden)

        run = functools.partial(_block, own_rows, own_teacher_rows, lk_decay, cap, gradients=gradients)
        return jax.lax.cond(jnp.any(block[-1] != 0), lambda c: run(carry=c, block=block), skip, carry)

    blocks = (cut(hidden, 2), cut(teacher_hidden.astype(hidden.dtype), 1), cut(labels, 1), cut(weights, 2))
    start = (jnp.zeros(()), jnp.zeros((h, rows.shape[0]) if gradients else ()))
    (loss, d_rows), ((ce, entropy, hits, acceptance), d_hidden) = jax.lax.scan(body, start, blocks)
    compared = (join(ce, 2), join(entropy, 1), join(hits, 2), join(acceptance, 2))
    return (loss, compared), (join(d_hidden, 2), d_rows.T.astype(rows.dtype)) if gradients else None


def _block(
    rows: Array,
    teacher_rows: Array,
    lk_decay: Array | None,
    cap: float | None,
    carry: tuple[Array, Array],
    block: tuple[Array, ...],
    gradients: bool,
) -> tuple[tuple[Array, Array], Any]:
    """Computes one block: hidden [K, B, n, H], teacher_hidden [B, n, H], labels [B, n], weights [K, B, n]."""
    hidden, teacher_hidden, labels, weights = block
    teacher_logits = capped(_product(teacher_hidden, teacher_rows, 1), cap)
    p = jax.nn.softmax(teacher_logits, axis=-1)
    entropy = jax.nn.logsumexp(teacher_logits, axis=-1) - jnp.sum(p * teacher_logits, axis=-1)

    def student(carry: tuple[Array, Array], step: tuple[Array, Array]) -> tuple[tuple[Array, Array], Any]:
        (loss, d_rows), (x, w) = carry, step
        logits = _product(x, rows, 1)
        top = jnp.max(logits, axis=-1, keepdims=True)
        unnormed = jnp.exp(logits - top)
        total = jnp.sum(unnormed, axis=-1, keepdims=True)
        q = unnormed / total
        ce = (top + jnp.log(total))[..., 0] - jnp.sum(p * logits, axis=-1)
        acceptance = jnp.sum(jnp.minimum(p, q), axis=-1)
        # An argmax is a slow reduction on a CPU; comparing the label's logit with the maximum gives the same.
        labelled = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], axis=-1)
        hits = (labelled >= top)[..., 0] & (labels >= 0)
        share = None if lk_decay is None else jnp.exp(-lk_decay * acceptance)
        loss += jnp.sum(w * (ce if share is None else share * ce + (1 - share) * (1 - acceptance)))
        if not gradients:
            return (loss, d_rows), (ce, hits, acceptance, ())
        d_logits = q - p
        if share is not None:
            under = jnp.where(q < p, q, 0.0)
            d_acceptance = under - q * jnp.sum(under, axis=-1, keepdims=True)
            d_logits = share[..., None] * d_logits - (1 - share)[..., None] * d_acceptance
        d_logits = (d_logits * w[..., None]).astype(x.dtype)
        d_hidden = _product(d_logits, rows, 0, x.dtype)
        # Accumulated as [H, V]: the contraction that is faster on a CPU.
        d_rows += jax.lax.dot_general(
            x, d_logits, (((0, 1), (0, 1)), ((), ())), precision=_HIGHEST, preferred_element_type=jnp.float32
        )
        return (loss, d_rows), (ce, hits, acceptance, d_hidden)

    carry, (ce, hits, acceptance, d_hidden) = jax.lax.scan(student, carry, (hidden, weights))
    return carry, ((ce, entropy, hits, acceptance), d_hidden)


def _product(x: Array, rows: Array, axis: int, dtype: Any = jnp.float32) -> Array:
    """Contracts x's last axis with axis `axis` of the rows, see `kernels.contraction`."""
    return summed(functools.partial(jax.lax.dot_general, x, rows, (((x.ndim - 1,), (axis,)), ((), ()))), dtype)
