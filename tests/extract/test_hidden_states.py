"""Batches of conversations, and the size of what their forward pass holds."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from examples import examples
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eagle3_jax.extract import hidden_states
from eagle3_jax.models import states
from eagle3_jax.models.families import llama


@examples(50)
@given(
    lengths=st.lists(st.integers(1, 500), max_size=60), budget=st.integers(512, 4096), multiple=st.sampled_from([1, 2])
)
def test_batches_hold_every_conversation_once_within_their_bounds(lengths, budget, multiple):
    padded = hidden_states.choose_lengths(lengths[:20], 500)
    assert list(padded) == sorted(set(padded)) and padded[-1] == 512 and all(length % 64 == 0 for length in padded)
    assert len(padded) <= hidden_states.MAX_LENGTHS  # few are compiled, and those of the sample if they are few
    needed = {-(-length // 64) * 64 for length in lengths[:20]}
    assert len(needed | {512}) > hidden_states.MAX_LENGTHS or needed <= set(padded)
    batches = hidden_states.plan_batches(lengths, padded, budget, multiple)
    assert sorted(i for batch in batches for i in batch.indices) == list(range(len(lengths)))
    shapes = {(batch.rows, batch.length) for batch in batches}
    assert len(shapes) == len({length for _, length in shapes})  # one program a length
    for batch in batches:
        assert 0 < len(batch.indices) <= batch.rows
        assert batch.rows % multiple == 0
        assert batch.rows == multiple or batch.rows * batch.length <= budget
        longest = max(lengths[i] for i in batch.indices)
        assert batch.length == min(length for length in padded if length >= longest)


def test_the_whole_vocabulary_is_never_there_for_all_positions():
    """No intermediate of the forward pass is as large as [batch, length, vocabulary]."""
    tokens = jnp.zeros((4, 256), jnp.int32)

    def sizes(jaxpr):
        for equation in jaxpr.eqns:
            yield from (np.prod(out.aval.shape, dtype=int) for out in equation.outvars)
            for sub in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                sub = getattr(sub, "jaxpr", sub)
                if hasattr(sub, "eqns"):
                    yield from sizes(sub)

    config = tiny.llama_config(vocab_size=50_000, tie_word_embeddings=False)
    model = nnx.eval_shape(lambda: llama.Llama(config, rngs=nnx.Rngs(0)))
    whole = tokens.size * config.vocab_size
    largest = max(sizes(jax.make_jaxpr(states.target_states)(model, tokens).jaxpr))
    assert 256 * config.vocab_size <= largest < whole


@pytest.mark.slow
@pytest.mark.smoke
def test_the_forward_pass_compiles_for_a_tpu():
    """Conversations over the data axis, KV heads over the model axis, a length that is no multiple of the kernel's."""
    pytest.importorskip("libtpu")
    sizes = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    config = tiny.llama_config(**sizes, num_hidden_layers=2, aux_layers=(0, 1, 2))
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    mesh = Mesh(np.array(devices).reshape(2, 2), ("data", "model"))
    structure: Any = None

    def build():
        nonlocal structure
        model = llama.Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        parts, structure = jax.tree.flatten(model)
        return parts

    def argument(x, *axes):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    leaves = [argument(x) for x in jax.eval_shape(build)]
    tokens = argument(jax.ShapeDtypeStruct((4, 64), jnp.int32), "data")
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        forward = jax.jit(lambda leaves, tokens: states.target_states(structure.unflatten(leaves), tokens))
        assert "tpu_custom_call" in (forward.lower(leaves, tokens).compile().as_text() or "")
