"""tools/tpu/rounds.py: what is counted of a program, and that a block's pass is read once whatever the tree."""

import importlib
import json
import pathlib

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from eagle3_jax.config import DraftTree, run_file
from eagle3_jax.kernels.linear.quantised import product, quantise

ROOT = pathlib.Path(__file__).parents[1]
HIDDEN, VOCAB, DRAFT_VOCAB = 64, 512, 128


@pytest.fixture
def rounds(monkeypatch):
    """The tool. Shapes stand for arrays in it, which checked annotations refuse."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    monkeypatch.setenv("EAGLE3_CPU_KERNELS", "0")
    jaxtyping.config.update("jaxtyping_disable", True)
    yield importlib.import_module("tpu.rounds")
    jaxtyping.config.update("jaxtyping_disable", False)


def test_products_are_counted_with_their_operands(rounds):
    x, w = jnp.zeros((2, 8), jnp.bfloat16), jnp.zeros((8, 4), jnp.bfloat16)

    def program(x, w, b):
        return jax.lax.cond(b, lambda: x @ w @ w.T, lambda: x @ w @ w.T + x) @ w

    once, twice = rounds.Work(2 * (16 + 32), 2 * 2 * 8 * 4), rounds.Work(2 * (8 + 32), 2 * 2 * 4 * 8)
    assert rounds.work(jax.make_jaxpr(program)(x, w, True).jaxpr) == once + twice + once
    loop = jax.make_jaxpr(lambda x, w: jax.lax.fori_loop(0, 3, lambda _, x: x @ w @ w.T, x))(x, w)
    with pytest.raises(ValueError, match="(scan|while): got a product in a loop, expected none"):
        rounds.work(loop.jaxpr)


def test_an_operand_counts_in_the_bits_that_memory_holds(rounds):
    x, w = jnp.zeros((2, 8), jnp.bfloat16), jnp.zeros((8, 4), jnp.int8)
    program = jax.make_jaxpr(lambda x, w: jax.jit(lambda w: x @ w.astype(jnp.float32).astype(x.dtype))(w))(x, w)
    assert rounds.work(program.jaxpr) == rounds.Work(2 * 16 + 32, 2 * 2 * 8 * 4)


def test_a_matrix_in_groups_counts_as_its_kernel_reads_it(rounds):
    matrix = quantise(jnp.zeros((256, 128), jnp.bfloat16), "int4", group=32)
    x = jnp.zeros((8, 256), jnp.bfloat16)
    program = jax.make_jaxpr(lambda x, w: product(x, w, jnp.matmul, implementation="pallas"))(x, matrix)
    sums, scales, index = 4 * 8 * 8, 2 * 4 * 8 * 128, 4  # of each group's x, and scales with offsets
    held = 2 * x.size + sums + 256 * 128 // 2 + scales + index
    assert rounds.work(program.jaxpr) == rounds.Work(held, 2 * 8 * 256 * 128)


@pytest.mark.slow
def test_a_block_is_read_once_and_a_chain_s_layer_once_a_draft(rounds, tmp_path):
    values = json.loads((ROOT / "configs/targets/llama31_8b/config.json").read_text())
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 128, "num_hidden_layers": 4}
    values |= sizes | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(values))

    def drafts(tree: DraftTree, **draft: object) -> int:
        run = {"run_dir": "unused", "target": {"name": str(tmp_path), "aux_layers": [1, 2, 3], "dtype": "bfloat16"}}
        config = run_file.from_dict(run | {"draft": {"vocab_size": DRAFT_VOCAB, **draft}})
        read, whole = rounds.counted(config, tree, 128)
        assert whole.bytes > read.bytes
        return read.bytes

    block = {"kind": "dflash", "num_layers": 2, "block_size": 5, "mask_token_id": 1}
    chain, tree = (DraftTree(num_steps=4, topk=k, num_draft_tokens=n) for k, n in ((1, 5), (4, 16)))
    assert drafts(tree, **block) == drafts(chain, **block)
    three, four = (drafts(DraftTree(num_steps=k, num_draft_tokens=k + 1)) for k in (3, 4))
    matrices = HIDDEN * (2 * 128 + 64) + 3 * HIDDEN * 128 + DRAFT_VOCAB * HIDDEN  # attention, MLP, LM head
    assert 2 * matrices < four - three < 4 * matrices  # in bfloat16, and the cache
