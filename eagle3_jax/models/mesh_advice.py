"""Advises on a mesh by arithmetic: what a model axis's devices compute against what their links carry."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import Mesh

from eagle3_jax.models.target_config import ModelConfig
from eagle3_jax.runs.machine import RING_GIGABYTES, TERAFLOPS

# Share of a device's memory that a target's weights may take beside activations, caches and a head's training.
_OF_MEMORY = 0.6


def uneven_heads(shape: ModelConfig, model: int) -> str | None:
    """Says that the model axis does not divide the KV heads; None where it does, or where a cache holds no heads."""
    heads = shape.num_key_value_heads
    if heads % model == 0 or shape.latent_cache:
        return None
    return (
        f"mesh.model: got {model}, which does not divide {heads} KV heads: each of the {model} devices computes and "
        f"keeps all of them; {math.gcd(heads, model)} divides them"
    )


def advice(target: Any, shape: ModelConfig, mesh: Mesh, field: str) -> str | None:
    """Says which model axis serves passes over many tokens better; None where this one is fine.

    Args:
        target: the weights that pass over the tokens, as arrays in a pytree on the mesh.
        field: the mesh's name in the config.
    """
    device, weights = mesh.local_devices[0], sum(x.nbytes for x in jax.tree.leaves(target))
    memory = (device.memory_stats() or {}).get("bytes_limit", 0)
    return better(shape, mesh.shape["model"], device.device_kind, weights, memory, field)


def better(shape: ModelConfig, model: int, kind: str, weights: int, memory: int, field: str) -> str | None:
    """Computes `advice` from numbers.

    A layer's sums travel 8 bytes for each token and hidden number around a ring, while a device computes 4 * columns /
    model operations on it. So beyond columns * bandwidth / operations a second, devices wait for their links ("How to
    Scale Your Model", Google DeepMind 2025, part 5).

    Args:
        kind: JAX's `device_kind`.
        weights, memory: bytes of the target, and of one device; 0 is unknown.
    """
    if kind not in RING_GIGABYTES or not memory:
        return None
    columns = getattr(shape, "num_experts_per_tok", 1) * getattr(
        shape, "moe_intermediate_size", shape.intermediate_size
    )
    most = columns * RING_GIGABYTES[kind] / (TERAFLOPS[kind] * 1e3)
    fits = next(x for x in range(1, model + 1) if model % x == 0 and (x == model or weights / x <= _OF_MEMORY * memory))
    if model <= most or fits == model:
        return None
    return (
        f"{field}.model: got {model}, but links of {kind} keep up with {most:.1f} devices at {columns} columns of an "
        f"MLP; the target's {weights / 2**30:.1f} GiB fit model: {fits}, which is faster"
    )
