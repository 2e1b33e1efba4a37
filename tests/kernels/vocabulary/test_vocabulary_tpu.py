"""The kernel compiled for TPUs without a TPU: it compiles, and its logits never reach HBM."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eagle3_jax.kernels.vocabulary.api import vocabulary_top_k

pytest.importorskip("libtpu")

CHIPS = {"v5e": "v5e:2x4", "v5p": "v5p:2x2x2", "v6e": "v6e:2x4", "tpu7x": "tpu7x:2x2x1"}
# (hidden size, draft vocabulary, devices that share its rows)
HEADS = {"llama31-8b, qwen3-8b": (4096, 32000, 1), "llama33-70b over 8": (8192, 32000, 8)}


def compiled(chip, head, *, queries=16, k=4, dtype=jnp.bfloat16, rows_dtype=None) -> Any:
    """Compiles a draft step's top-k for the devices of a head."""
    hidden, vocabulary, ways = head
    devices = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip]).devices
    mesh = Mesh(np.array(devices[:ways]), ("model",))

    def argument(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    whole = vocabulary % ways
    rows = argument((vocabulary, hidden), rows_dtype or dtype, None if whole else "model")
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        function = jax.jit(lambda x, rows: vocabulary_top_k(x, rows, k))
        lowered = function.lower(argument((queries, hidden), dtype), rows)
    assert "tpu_custom_call" in lowered.as_text()
    return lowered.compile().memory_analysis()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chip", "head"),
    [
        pytest.param(
            chip,
            head,
            marks=pytest.mark.smoke if chip == "v6e" and head[2] == 8 else pytest.mark.long,
            id=f"{chip}, {model}",
        )
        for chip in CHIPS
        for model, head in HEADS.items()
    ],
)
def test_compiles(chip, head):
    # Neither logits (1 MB of float32 on each of eight devices) nor rows of other devices.
    assert compiled(chip, head, queries=64).temp_size_in_bytes < 500 << 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"queries": 1, "k": 1},
        {"dtype": jnp.float32, "rows_dtype": jnp.bfloat16, "queries": 128},
        {"head": (32, 22, 1)},
        {"head": (4096, 32001, 8)},  # does not divide: whole on every device
        *(
            pytest.param(options, marks=pytest.mark.long)
            for options in (
                {"queries": 600, "k": 8},
                {"k": 32, "queries": 256},
                {"dtype": jnp.float32},
                {"head": (8192, 128256, 1), "dtype": jnp.float32, "rows_dtype": jnp.bfloat16, "queries": 256, "k": 32},
                {"head": (576, 49152, 1)},
            )
        ),
    ],
    ids=str,
)
def test_compiles_in_every_form(options):
    compiled("v6e", **{"head": (4096, 32000, 1)} | options)
