"""The kernel compiled for TPUs without a TPU: it compiles, and copies no cache."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eagle3_jax.kernels.cache.api import commit

pytest.importorskip("libtpu")

CHIPS = {"v5e": "v5e:1x1", "v5p": "v5p:1x1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}
# (layers, KV heads) on one device.
MODELS = {"llama31-8b": (32, 8), "qwen3-8b": (36, 8), "llama33-70b over 8": (80, 1)}
BATCH, SLOTS = 4, 4096


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chip", "model", "page_size"),
    [
        pytest.param(
            chip,
            model,
            page_size,
            marks=pytest.mark.smoke if (chip, model) == ("v6e", "llama31-8b") else pytest.mark.long,
        )
        for chip in CHIPS
        for model in MODELS
        for page_size in (None, 256)
        if page_size is None or model == "llama31-8b"
    ],
)
def test_compiles_in_place(chip, model, page_size):
    layers, kv_heads = MODELS[model]
    devices = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip]).devices
    mesh = Mesh(np.array(devices[:1]), ("model",))

    def argument(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    rows, size = (BATCH, SLOTS) if page_size is None else (BATCH * SLOTS // page_size, page_size)
    caches = [argument((rows, kv_heads, size, 128), jnp.bfloat16)] * 2 * layers
    lengths, path = argument((BATCH,), jnp.int32), argument((BATCH, 8), jnp.int32)
    table = None if page_size is None else argument((BATCH, SLOTS // page_size), jnp.int32)

    def move(caches, lengths, path, table):
        return commit(caches, lengths, path, page_table=table)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(move, donate_argnums=0).lower(caches, lengths, path, table)
    assert "tpu_custom_call" in lowered.as_text()
    memory: Any = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes == sum(2 * np.prod(cache.shape) for cache in caches)
    assert memory.temp_size_in_bytes < 1 << 20
