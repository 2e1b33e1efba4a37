"""The kernels compiled for TPUs without a TPU: they compile, and hold O(T) memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eagle3_jax.kernels.ttt_attention.api import ttt_attention

pytest.importorskip("libtpu")

CHIPS = {"v5e": "v5e:1x1", "v5p": "v5p:1x1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}
# (query heads, KV heads) on one device.
MODELS = {"llama31-8b, qwen3-8b": (32, 8), "llama33-70b over 8": (8, 1)}


def compiled(chip, heads, *, length=2048, batch=1, steps=7, head_dim=128, dtype=jnp.bfloat16):
    """Forward and backward pass, compiled for one chip."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip]).devices
    mesh = Mesh(np.array(devices[:1]), ("model",))

    def argument(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    queries = argument((batch, length, heads[0], head_dim), dtype)
    keys = argument((steps, batch, length, heads[1], head_dim), dtype)
    integers = argument((batch, length), jnp.int32), argument((), jnp.int32)

    def gradients(q, k, v, segments, newest, cotangent):
        attended, pull = jax.vjp(lambda q, k, v: ttt_attention(q, k, v, segments, newest), q, k, v)
        return attended, pull(cotangent)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(gradients).lower(queries, keys, keys, *integers, queries).compile()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chip", "heads"),
    [
        pytest.param(
            chip,
            heads,
            marks=pytest.mark.smoke if (chip, heads) == ("v6e", (32, 8)) else pytest.mark.long,
            id=f"{chip}, {model}",
        )
        for chip in CHIPS
        for model, heads in MODELS.items()
    ],
)
def test_compiles(chip, heads):
    assert (compiled(chip, heads).as_text() or "").count("tpu_custom_call") >= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"dtype": jnp.float32}, marks=pytest.mark.long),
        {"head_dim": 80},
        pytest.param({"head_dim": 64}, marks=pytest.mark.long),
        pytest.param({"steps": 1}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_compiles_in_every_form(options):
    assert (compiled("v6e", (8, 2), **options).as_text() or "").count("tpu_custom_call") >= 2


@pytest.mark.long
def test_memory_grows_with_the_length_and_no_faster():
    """7 steps at 8k tokens: no [T, T] array, and none of [T, lanes] beside the operands' own size."""
    temporary = {}
    for length in (4096, 8192):
        memory: Any = compiled("v6e", (32, 8), length=length).memory_analysis()
        temporary[length] = memory.temp_size_in_bytes
    assert temporary[8192] < 2.5 * temporary[4096]
    keys = 7 * 8192 * 8 * 128 * 2
    assert temporary[8192] < 8 * keys
