"""The kernel for real chips, where there are none: it compiles, and moves no more than it must."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eagle3_jax.kernels.tree_attention import BLOCKS, plan, tree_attention
from eagle3_jax.kernels.tree_attention_pages import bytes_moved

pytest.importorskip("libtpu")

CHIPS = {"v5e": "v5e:1x1", "v5p": "v5p:1x1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}
# (query heads, KV heads) on one device.
MODELS = {"llama31-8b, qwen3-8b": (32, 8), "llama33-70b over 8": (8, 1)}
SLOTS = 4096


def one(chip):
    """A mesh of one device."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip]).devices
    return Mesh(np.array(devices[:1]), ("model",))


def compiled(chip, heads, *, batch=4, nodes=64, page_size=256, causal=False, dtype=jnp.bfloat16, head_dim=128):
    """HLO of what the engine calls, compiled for one chip."""
    mesh, pages = one(chip), SLOTS // page_size

    def argument(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    cache = argument((batch * pages, heads[1], page_size, head_dim), dtype)
    mask = None if causal else argument((batch, nodes, nodes), jnp.bool_)
    compute = jnp.float32 if dtype == jnp.float32 else jnp.bfloat16
    new = argument((batch, nodes, heads[1], head_dim), compute)
    arguments = (
        argument((batch, nodes, heads[0], head_dim), compute),
        new,
        new,
        cache,
        cache,
        argument((batch,), jnp.int32),
        mask,
        argument((batch, pages), jnp.int32),
    )

    def attend(q, new_k, new_v, k, v, lengths, mask, table):
        return tree_attention(q, new_k, new_v, k, v, lengths, mask, page_table=table)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        program = jax.jit(attend, donate_argnums=(3, 4)).lower(*arguments).compile()
    if nodes <= 64 and head_dim % 128 == 0:  # narrower heads XLA keeps in another layout outside of a loop
        # Written in place: room for the other operands' layouts, and none for a copy of a cache.
        memory: Any = program.memory_analysis()
        assert memory.alias_size_in_bytes >= 2 * cache.size * cache.dtype.itemsize
        assert memory.temp_size_in_bytes < cache.size * cache.dtype.itemsize // 2
    return program.as_text() or ""


@pytest.mark.parametrize(
    ("chip", "heads"),
    [
        pytest.param(
            chip, heads, marks=[] if (chip, heads) == ("v5e", (8, 1)) else pytest.mark.slow, id=f"{chip}, {model}"
        )
        for chip in CHIPS
        for model, heads in MODELS.items()
    ],
)
def test_compiles(chip, heads):
    assert "tpu_custom_call" in compiled(chip, heads)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"nodes": 1},
        {"nodes": 300, "causal": True},
        {"dtype": jnp.float32},
        {"dtype": jnp.int8},
        {"dtype": jnp.float8_e4m3fn},
        {"head_dim": 64},
        {"head_dim": 80},
        {"head_dim": 96},
        {"head_dim": 256},
        {"page_size": 128},
        {"page_size": 16},
    ],
    ids=str,
)
def test_compiles_in_every_form(options):
    assert "tpu_custom_call" in compiled("v6e", (8, 2), **options)


@pytest.mark.parametrize("chip", CHIPS)
def test_each_chip_has_block_sizes_that_fit(chip):
    """Its own row of the table, which is kept; what it makes of these shapes, `plan` would refuse beyond VMEM."""
    mesh = one(chip)
    row = BLOCKS[mesh.devices.flat[0].device_kind]
    assert row.keys() == BLOCKS["default"].keys() == {"keys_per_step", "keys_per_head", "scores_per_item", "rows"}
    for (n, k), nodes, dtype in itertools.product(MODELS.values(), (16, 64), (jnp.bfloat16, jnp.float32)):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            shape = plan((4, nodes, n, 128), (64, k, 256, 128), (dtype, dtype), tail=nodes, pages=16)
        assert shape.block <= min(row["keys_per_head"], row["keys_per_step"] // k)
        assert shape.rows <= row["rows"]
        assert shape.width <= max(512, row["scores_per_item"] // shape.rows)


@pytest.mark.parametrize("heads", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("lengths", [[4032] * 4, [3000, 10, 0, 2500], [100, 4000, 700, 1]], ids=str)
def test_moves_hardly_more_than_it_must(heads, lengths):
    bf16 = (jnp.bfloat16, jnp.bfloat16)
    shape = plan((4, 64, heads[0], 128), (64, heads[1], 256, 128), bf16, tail=64, pages=16)
    moved, least = bytes_moved(shape, np.asarray(lengths), query_bytes=2, key_bytes=2)
    assert least <= moved <= 1.02 * least
