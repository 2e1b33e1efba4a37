"""The loop of rounds compiles for a TPU v5p, where there is none: nothing in it needs a host or a CPU."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eagle3_jax.config import DraftConfig, DraftTree
from eagle3_jax.decoding import rounds
from eagle3_jax.decoding.sampling import Sampling
from eagle3_jax.models.draft import Draft, DraftHead, DraftHeadConfig
from eagle3_jax.models.llama import Llama, LlamaConfig

pytest.importorskip("libtpu")

# Llama-3.1-8B's shape with one layer.
CONFIG = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=1,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    tie_word_embeddings=False,
    max_position_embeddings=8192,
    eos_token_ids=(128001, 128009),
    aux_layers=(0, 1),
)
BATCH, SLOTS = 4, 1024


@pytest.mark.parametrize(
    ("tree", "greedy"),
    [
        (None, True),
        pytest.param(DraftTree(num_steps=4, topk=4, num_draft_tokens=16), True, marks=pytest.mark.slow),
        pytest.param(DraftTree(num_steps=4, topk=4, num_draft_tokens=16), False, marks=pytest.mark.slow),
        pytest.param(DraftTree(num_steps=4, topk=1, num_draft_tokens=5), True, marks=pytest.mark.slow),
    ],
    ids=["vanilla", "tree", "tree-sampled", "chain"],
)
def test_rounds_compile_for_a_v5p(tree, greedy):
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5p:1x1x1").devices
    mesh = Mesh(np.array(devices[:1]), ("data",))
    place = NamedSharding(mesh, PartitionSpec())

    def build():
        head = DraftHeadConfig.for_target(DraftConfig(vocab_size=32000), CONFIG)
        target = Llama(CONFIG, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        draft = Draft(DraftHead(head, dtype=jnp.bfloat16, rngs=nnx.Rngs(1)), jnp.arange(32000))
        row = jnp.zeros(BATCH, jnp.int32)
        sampling = Sampling(jnp.ones(BATCH), row, jnp.ones(BATCH), jax.random.split(jax.random.key(0), BATCH))
        state = rounds.prefill(
            target,
            draft,
            jnp.zeros((BATCH, 128), jnp.int32),
            row + 100,
            sampling,
            row + 64,
            jnp.zeros(BATCH, bool),
            slots=SLOTS,
            max_output=64,
            tree=tree,
            greedy=greedy,
        )
        models, structures[0] = jax.tree.flatten((target, draft))
        state, structures[1] = jax.tree.flatten(state)
        return models, state

    def decode(models, state):
        target, draft = structures[0].unflatten(models)
        return rounds.decode(target, draft, structures[1].unflatten(state), 16, BATCH, tree=tree, greedy=greedy)

    # Shapes travel as leaves: the checked dataclasses that hold them want arrays.
    structures: dict[int, Any] = {}
    models, state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), jax.eval_shape(build)
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(decode, donate_argnums=1).lower(models, state)
    assert "callback" not in lowered.as_text()
    memory: Any = lowered.compile().memory_analysis()
    caches = sum(size(x) for x in state if x.ndim == 4)
    assert memory.alias_size_in_bytes >= caches  # written in place
    # The compiler keeps the weights of fused projections in a layout of its own, once for all rounds. Beside that and
    # the logits there is nothing large.
    relaid = sum(size(x) for x in models if x.ndim > 2)
    assert memory.temp_size_in_bytes < relaid + (256 << 20)


def size(x: jax.ShapeDtypeStruct) -> int:
    return x.size * x.dtype.itemsize
