"""The training step of block heads compiled for TPUs without a TPU: in place, and in blocks of the vocabulary."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh
from tiny_blocks import block_config

from eagle3_jax.config import TrainConfig
from eagle3_jax.mesh import batch_sharding, shardings
from eagle3_jax.training.batch import TEACHER_SHARDING_RULES, Batch, Teacher
from eagle3_jax.training.fsdp import STATE_SHARDING_RULES
from eagle3_jax.training.kinds.block import BlockHead, DFlash2Kind, DFlashKind, DSparkKind
from eagle3_jax.training.optimizer import make_optimizer
from eagle3_jax.training.state import TrainState, make_train_step

pytest.importorskip("libtpu")

ROWS, LENGTH, ANCHORS, HIDDEN, VOCAB = 2, 512, 256, 256, 8192
SHAPE = block_config(
    vocab_size=VOCAB,
    draft_vocab_size=VOCAB,
    hidden_size=HIDDEN,
    target_hidden_size=HIDDEN,
    intermediate_size=512,
    head_dim=64,
    conv_group=16,
    layer_types=("full_attention",),
)


@pytest.fixture
def unchecked():
    """Shapes stand for arrays, which checked annotations refuse."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "topology", "data"),
    [
        (DFlashKind, "v6e:1x1", 1),
        pytest.param(DFlashKind, "v5e:2x2", 2, marks=pytest.mark.long),
        pytest.param(DSparkKind, "v5p:2x2x1", 4, marks=pytest.mark.long),
        pytest.param(DFlash2Kind, "tpu7x:1x1x1", 1, marks=pytest.mark.long),
    ],
)
def test_the_step_compiles_for_a_tpu(kind: type[BlockHead], topology: str, data: int, unchecked) -> None:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices[: 1 if data == 1 else None]).reshape(data, -1), ("data", "model"))
    config = TrainConfig(batch_size=ROWS, row_length=LENGTH, anchors=ANCHORS)
    rows = max(ROWS, data)
    made, optimizer = kind(SHAPE, config), make_optimizer(config, 100)

    def placed(tree: Any, rules: Any) -> Any:
        where = shardings(tree, mesh, rules)
        return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), tree, where)

    def build(matrix: jax.Array) -> TrainState:
        head = made.new(0, matrix)
        return TrainState(jnp.zeros((), jnp.int32), head, optimizer.init(head))

    shape = jax.ShapeDtypeStruct
    matrix = shape((VOCAB, HIDDEN), jnp.bfloat16)
    state = placed(jax.eval_shape(build, matrix), STATE_SHARDING_RULES)
    teacher = placed(Teacher(matrix, matrix, shape((VOCAB,), jnp.int32)), TEACHER_SHARDING_RULES)
    integers = shape((rows, LENGTH), jnp.int32, sharding=batch_sharding(mesh))
    hidden = [shape((rows, LENGTH, n * HIDDEN), jnp.bfloat16, sharding=batch_sharding(mesh)) for n in (3, 1)]
    batch = Batch(integers, *hidden, *[integers] * 4)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = make_train_step(made, optimizer, mesh).lower(state, teacher, batch).compile()
    memory: Any = compiled.memory_analysis()
    held = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert memory.alias_size_in_bytes >= held, "weights and moments are written in place"
    # Logits of a share of the blocks are held at a time, never of all.
    drafts = rows // data * ANCHORS * made.num_drafts
    sizes = [
        math.prod(map(int, x.split(","))) for x in re.findall(r"(?:f32|bf16)\[([\d,]+)\]", compiled.as_text() or "")
    ]
    assert max(sizes) <= drafts * VOCAB // mesh.shape["model"] // 2
