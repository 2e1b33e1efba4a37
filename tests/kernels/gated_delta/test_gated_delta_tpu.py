"""The kernel compiled for TPUs without a TPU: it compiles, and no array of nodes by nodes of each head reaches HBM."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eagle3_jax.kernels.gated_delta import api
from eagle3_jax.kernels.gated_delta.solve import Tokens

pytest.importorskip("libtpu")

CHIPS = {"v5e": "v5e:1x1", "v5p": "v5p:1x1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}
# Key heads and value heads of 128 numbers on one device.
MODELS = {"qwen3.5-4b, qwen3-next": (16, 32), "qwen3.5-27b": (16, 48), "qwen3.5-27b over 16": (1, 3)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chip", "model", "read", "tokens"),
    [
        pytest.param(
            chip,
            model,
            read,
            tokens,
            marks=pytest.mark.smoke if (chip, heads) == ("v6e", (16, 32)) and tokens in (16, 200) else pytest.mark.long,
        )
        for chip in CHIPS
        for model, heads in MODELS.items()
        for read, tokens in ((api.tree, 16), (api.tree, 1), (api.tree, 60), (api.chain, 200))
    ],
)
def test_compiles(chip, model, read, tokens):
    (key_heads, value_heads), batch, d = MODELS[model], 2, 128
    devices = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip]).devices
    mesh = Mesh(np.array(devices[:1]), ("model",))

    def argument(*shape: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    queries, keys, values = (argument(batch, tokens, count, d) for count in (key_heads, key_heads, value_heads))
    gates, states = argument(batch, tokens, value_heads), argument(batch, value_heads, d, d)
    shapes = [(batch, tokens, tokens)] if read is api.tree else [(batch, tokens), (batch,)]
    rest = [argument(*shape, dtype=jnp.bool_) for shape in shapes]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(read).lower(Tokens(queries, keys, values, gates, gates), states, None, *rest)
    assert lowered.as_text().count("tpu_custom_call") == 1
    memory: Any = lowered.compile().memory_analysis()
    rows = 4 * batch * (-(-tokens // 64) * 64) * d * (2 * key_heads + 3 * value_heads)  # the operands in its layout
    assert memory.temp_size_in_bytes < rows + (1 << 20)
