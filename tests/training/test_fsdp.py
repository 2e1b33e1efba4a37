"""Weights are gathered once before the loop over steps; parts of a batch add up to it."""

import dataclasses
import functools
import math
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from eagle3_jax.config import MeshConfig, TrainConfig
from eagle3_jax.mesh import batch_sharding, make_mesh, shardings
from eagle3_jax.training.batch import TEACHER_SHARDING_RULES
from eagle3_jax.training.kinds.eagle3 import Eagle3
from eagle3_jax.training.optimizer import make_optimizer
from eagle3_jax.training.state import _gradients, init_state

CONFIG = TrainConfig(ttt_steps=3, batch_size=8, row_length=16, loss_block=16)
ROWS = [[6, 9], [16], [4, 4, 4], [12], [3, 9], [15], [5], [7, 8]]


@pytest.fixture(scope="module")
def gradients(head_config, teacher, make_batch):
    batch = make_batch(ROWS, 16)

    def compute(data: int, model: int, **changes):
        kind = Eagle3(head_config, dataclasses.replace(CONFIG, **changes))
        mesh = make_mesh(MeshConfig(data=data, model=model))
        placed = jax.device_put(teacher, shardings(teacher, mesh, TEACHER_SHARDING_RULES))
        on_mesh = jax.device_put(batch, batch_sharding(mesh))
        state = init_state(functools.partial(kind.new, 0), placed.rows, make_optimizer(CONFIG, 10), mesh)
        run = jax.jit(functools.partial(_gradients, kind))
        with jax.set_mesh(mesh):
            return jax.device_get(run(state, placed, on_mesh))

    return compute


@pytest.mark.slow
@pytest.mark.parametrize("reduction", [pytest.param("all", marks=pytest.mark.long), "mask"])
def test_four_parts_are_the_batch(gradients, reduction):
    """In float32; on a mesh too, where the weights of each part are gathered once."""
    sums, whole = gradients(1, 1, loss_reduction=reduction)
    for data, model in [(1, 1), (2, 2)]:
        in_parts, added = gradients(data, model, loss_reduction=reduction, accumulate=4)
        for name, value in sums.items():
            np.testing.assert_allclose(in_parts[name], value, rtol=2e-5, err_msg=name)
        for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(added), strict=True):
            np.testing.assert_allclose(other, one, atol=2e-6)


_PROGRAM = """
import sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from eagle3_jax.config import MeshConfig, TrainConfig
from eagle3_jax.mesh import batch_sharding, make_mesh, shardings
from eagle3_jax.models.drafts.eagle3 import DraftHeadConfig
from eagle3_jax.sequence import Split
from eagle3_jax.training.batch import Batch, Teacher, TEACHER_SHARDING_RULES
from eagle3_jax.training.fsdp import STATE_SHARDING_RULES
from eagle3_jax.training.kinds.eagle3 import Eagle3
from eagle3_jax.training.optimizer import make_optimizer
from eagle3_jax.training.state import TrainState, make_train_step

devices = topologies.get_topology_desc(platform="tpu", topology_name="v6e:8x8").devices
data, model, sequence = map(int, sys.argv[1:])
mesh = make_mesh(MeshConfig(data=data, model=model), devices)
B, T, H, V, DV = data, 256, 1024, 5120, 2560
split = Split.of(mesh, sequence)
shape = DraftHeadConfig(
    vocab_size=V, draft_vocab_size=DV, hidden_size=H, target_hidden_size=H, intermediate_size=2048,
    num_attention_heads=8, num_key_value_heads=4, head_dim=128, rms_norm_eps=1e-5, rope_theta=1e4,
    max_position_embeddings=2048, aux_layers=(2, 4, 5))
config = TrainConfig(
    ttt_steps=4, batch_size=B // sequence, row_length=T * sequence, sequence=sequence, loss_block=256, remat=True)
kind, optimizer = Eagle3(shape, config), make_optimizer(config, 100)

def placed(tree, rules):
    where = shardings(tree, mesh, rules)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, where)

def build(rows):
    head = kind.new(0, rows)
    return TrainState(jnp.zeros((), jnp.int32), head, optimizer.init(head))

array = jax.ShapeDtypeStruct
state = placed(jax.eval_shape(build, array((DV, H), jnp.bfloat16)), STATE_SHARDING_RULES)
teacher = Teacher(array((V, H), jnp.bfloat16), array((DV, H), jnp.bfloat16), array((V,), jnp.int32))
teacher = placed(teacher, TEACHER_SHARDING_RULES)
integers = array((B, T), jnp.int32, sharding=batch_sharding(mesh))
hidden = lambda width: array((B, T, width), jnp.bfloat16, sharding=batch_sharding(mesh))
batch = Batch(integers, hidden(3 * H), hidden(H), *[integers] * 4, split=split)
print(make_train_step(kind, optimizer, mesh).lower(state, teacher, batch).compile().as_text())
"""


@pytest.mark.long
@pytest.mark.parametrize(("data", "model", "sequence"), [(64, 1, 1), (16, 4, 1), (64, 1, 32), (16, 4, 16)])
def test_a_loop_over_steps_gathers_no_weight_on_64_chips(data, model, sequence):
    """Nor sums any gradient: what travels in the loop are activations between the chips of one model axis.

    Of a row over several chips, a chip holds its keys and values, and no state.
    """
    command = [sys.executable, "-c", _PROGRAM, str(data), str(model), str(sequence)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert "HloModule" in result.stdout, result.stderr[-4000:]
    found = re.findall(
        r"= (.*?) (all-gather|all-reduce|reduce-scatter)(?:-start)?\(.*?replica_groups=(\S+?),? .*op_name=\"([^\"]*)\"",
        result.stdout,
    )
    print("\n".join(str(x)[:250] for x in found))
    looped = [x for x in found if "shard_map/while/body" in x[3]]
    own = f"[{data},{model}]<=[64]"  # groups of one model axis each
    assert {groups for _, _, groups, _ in looped} == ({own} if model > 1 else set())
    fc = f"bf16[3072,{1024 // model}]"
    assert sum(shapes.count(fc) for shapes, _, groups, _ in found if groups != own) == 1  # XLA may gather by a sum
    if sequence > 1:
        row = 256 * sequence
        arrays = {tuple(map(int, x.split(","))) for x in re.findall(r"\b(?:bf16|f32)\[([\d,]+)\]", result.stdout)}
        whole = {math.prod(dims) // row for dims in arrays if row in dims}
        assert max(whole) == 4 // model * 128, "the keys of the KV heads"
