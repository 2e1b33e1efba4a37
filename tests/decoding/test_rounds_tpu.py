"""The loop of rounds compiles for TPUs, where there are none: nothing in it needs a host or a CPU."""

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
from eagle3_jax.mesh import shardings
from eagle3_jax.models.draft import Draft, DraftHead, DraftHeadConfig
from eagle3_jax.models.layers import SHARDING_RULES
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
    ("tree", "greedy", "topology"),
    [
        (None, True, "v5p:1x1x1"),
        pytest.param(DraftTree(num_steps=4, topk=4, num_draft_tokens=16), True, "v5p:1x1x1", marks=pytest.mark.slow),
        pytest.param(DraftTree(num_steps=4, topk=4, num_draft_tokens=16), False, "v5p:1x1x1", marks=pytest.mark.slow),
        pytest.param(DraftTree(num_steps=4, topk=1, num_draft_tokens=5), True, "v5p:1x1x1", marks=pytest.mark.slow),
        pytest.param(DraftTree(num_steps=4, topk=1, num_draft_tokens=5), True, "v5e:2x2", marks=pytest.mark.slow),
    ],
    ids=["vanilla", "tree", "tree-sampled", "chain", "chain-sharded"],
)
def test_rounds_compile_for_a_tpu(tree, greedy, topology):
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices).reshape(1, -1), ("data", "model"))

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
        named = jax.tree_util.tree_leaves_with_path((target, draft))
        names[:] = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in named]
        models, structures[0] = jax.tree.flatten((target, draft))
        state, structures[1] = jax.tree.flatten(state)
        return models, state

    def decode(models, state):
        target, draft = structures[0].unflatten(models)
        return rounds.decode(target, draft, structures[1].unflatten(state), 16, BATCH, tree=tree, greedy=greedy)

    # Shapes travel as leaves: the checked dataclasses that hold them want arrays.
    structures: dict[int, Any] = {}
    names: list[str] = []
    models, state = jax.eval_shape(build)
    places = shardings(dict(zip(names, models, strict=True)), mesh, SHARDING_RULES)
    models = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=places[name]) for name, x in zip(names, models, strict=True)
    ]
    split, whole = NamedSharding(mesh, PartitionSpec(None, "model")), NamedSharding(mesh, PartitionSpec())
    state = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split if x.ndim == 4 else whole) for x in state]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(decode, donate_argnums=1).lower(models, state)
    program = lowered.as_text()
    assert "callback" not in program
    assert "tpu_custom_call" in program  # attention is the Pallas kernel
    memory: Any = lowered.compile().memory_analysis()
    caches = sum(size(x) for x in state if x.ndim == 4) // len(devices)
    assert memory.alias_size_in_bytes >= caches  # written in place
    # Beside the logits, and where it samples their distributions, there is nothing large: no weights in another layout,
    # none gathered from other devices.
    assert memory.temp_size_in_bytes < (64 if greedy else 256) << 20


def size(x: jax.ShapeDtypeStruct) -> int:
    return x.size * x.dtype.itemsize
