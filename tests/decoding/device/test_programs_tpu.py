"""The engine's programs compiled for TPUs without a TPU: nothing needs the host, no cache is copied."""

import dataclasses
import itertools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eagle3_jax.config import DraftConfig, DraftTree
from eagle3_jax.decoding.device import programs
from eagle3_jax.decoding.device.calls import Models, PromptChunk
from eagle3_jax.decoding.device.memory import empty_state
from eagle3_jax.decoding.device.shapes import ALONE, PACKED, Sizes
from eagle3_jax.decoding.rounds.state import STATE_SHARDING_RULES, TokenLogprobs, put_logprobs
from eagle3_jax.decoding.tier import RoundPlan, Tier
from eagle3_jax.mesh import parameter_path, shardings
from eagle3_jax.models.drafts.dflash import SLIDING, BlockHeadConfig, DFlash
from eagle3_jax.models.drafts.dflash2 import DFlash2
from eagle3_jax.models.drafts.dspark import DSpark
from eagle3_jax.models.drafts.eagle3 import DraftHead, DraftHeadConfig
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.families import family_of, read_shape
from eagle3_jax.models.families.llama import LlamaConfig
from eagle3_jax.models.inference_layout import tpu_formats
from eagle3_jax.models.layers import SHARDING_RULES
from eagle3_jax.models.target_config import ModelConfig

pytest.importorskip("libtpu")

# Llama-3.1-8B's shape with one layer.
SHAPE: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "aux_layers": (0, 1),
}
CONFIG = LlamaConfig(num_hidden_layers=1, tie_word_embeddings=False, eos_token_ids=(128001, 128009), **SHAPE)
BLOCK = BlockHeadConfig(
    draft_vocab_size=32000,
    target_hidden_size=4096,
    block_size=8,
    mask_token_id=128255,
    layer_types=("full_attention", SLIDING),
    sliding_window=2048,
    is_causal=False,
    **SHAPE,
)
TARGETS = pathlib.Path(__file__).parents[3] / "configs/targets"
# A target of configs/ -> what of it makes one layer of each kind.
FEW_LAYERS = {
    "gpt_oss_20b": {"num_hidden_layers": 2},  # a window, sinks, experts
    "deepseek_v3": {"num_hidden_layers": 2, "first_k_dense_replace": 1},  # latent attention, grouped experts
    # An indexer, and a layer that shares its choice.
    "glm_5": {
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "index_topk": 1024,
        "indexer_types": ["full", "shared"],
    },
}
VANILLA = None
CHAIN = DraftTree(num_steps=4, topk=1, num_draft_tokens=5)
TREE = DraftTree(num_steps=4, topk=4, num_draft_tokens=16)
LOOKUP = DraftTree(num_steps=8, num_draft_tokens=9, lookup_tokens=8)  # without a head
GRAFTED = dataclasses.replace(TREE, lookup_tokens=7)
TARGET_ONLY = dataclasses.replace(TREE, sample_drafts=False)
SIZES = Sizes.plan(4, 2048, 128, [Tier(TREE, head=True)], kv_tokens=262144)


RESTING = "resting"  # a head that could draft a chain, in rounds without it


def tiers_of(tree: Any) -> list[Tier]:
    """The tiers of an engine; the first is compiled."""
    if tree == RESTING:
        return [Tier(None, head=False), Tier(CHAIN, head=True)]
    return [Tier(tree, head=tree not in (VANILLA, LOOKUP))]


def few_layers(name: str) -> ModelConfig:
    values = json.loads((TARGETS / name / "config.json").read_text())
    values |= values.pop("text_config", {})
    return read_shape(values | FEW_LAYERS[name], (0, 1))


def shapes(
    mesh: Mesh, tree: Any, stretches: tuple[int, int], config: ModelConfig, block: type[DFlash] | None
) -> tuple[Any, Any, Any, Any]:
    """Target, draft, state and stretches of prompts, as they lie on the devices."""

    def make_target():
        return family_of(config).model(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))

    def make_head():
        if block is not None:
            return block(BLOCK, dtype=jnp.bfloat16, rngs=nnx.Rngs(1))
        own = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
        sizes: dict[str, Any] = own if config.latent_cache else {}  # which gives a head none
        head = DraftHeadConfig.for_target(DraftConfig(vocab_size=32000, **sizes), config)
        return DraftHead(head, dtype=jnp.bfloat16, rngs=nnx.Rngs(1))

    def formats(prefix, make):
        module = nnx.eval_shape(make)
        lying = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            module,
            shardings(module, mesh, SHARDING_RULES),
        )
        named = jax.tree_util.tree_leaves_with_path(tpu_formats(lying))
        return {f"{prefix}/{parameter_path(path)}": place for path, place in named}

    def build():
        target, draft = make_target(), Draft(make_head(), jnp.arange(32000))
        draft = None if tree in (VANILLA, LOOKUP) else draft
        state = empty_state(Models.of(target, draft), SIZES, tiers_of(tree), None)
        chunk = jax.tree.map(jnp.asarray, PromptChunk.of((), *stretches, SIZES))
        leaves, structures[:] = zip(*map(jax.tree.flatten, (target, draft, state, chunk)), strict=True)
        named = jax.tree_util.tree_leaves_with_path((target, draft, state, chunk))
        names[:] = [parameter_path(path) for path, _ in named]
        return leaves

    # Shapes travel as leaves: the checked dataclasses that hold them want arrays.
    structures: list[Any] = []
    names: list[str] = []
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        leaves = jax.eval_shape(build)
    places = shardings(
        dict(zip(names, itertools.chain(*leaves), strict=True)), mesh, (*STATE_SHARDING_RULES, *SHARDING_RULES)
    )
    places |= formats("0", make_target) | formats("1/head", make_head)
    rest = iter(names)
    return tuple(  # pyrefly: ignore
        (
            structure,
            [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=places[next(rest)]) for x in part],
        )
        for part, structure in zip(leaves, structures, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:1x1", "tpu7x:1x1x1"])
def test_log_probabilities_sort_no_vocabulary(topology):
    """With a sort, each program with log-probabilities would compile for more than twice as long."""
    place = jax.sharding.SingleDeviceSharding(topologies.get_topology_desc(topology, "tpu").devices[0])

    def argument(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    @jax.jit
    def put(rows, tokens, best, *new):
        return put_logprobs(TokenLogprobs(rows, rows, tokens, best), *new)

    at = argument(jnp.int32, 4)
    kept = argument(jnp.float32, 4, 8), argument(jnp.int32, 4, 8, 20), argument(jnp.float32, 4, 8, 20)
    logits, chosen = argument(jnp.float32, 4, 5, CONFIG.vocab_size), argument(jnp.int32, 4, 5)
    processed = argument(jnp.float32, 4, 5)
    text = put.lower(*kept, logits, chosen, processed, at).compile().as_text() or ""
    assert "TopK" in text and " sort(" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "tree", "greedy", "topology"),
    [
        pytest.param("decode", VANILLA, True, "v5p:1x1x1", marks=pytest.mark.smoke),
        pytest.param("decode", TREE, True, "v6e:1x1", marks=pytest.mark.long),
        pytest.param("decode", CHAIN, True, "v5e:2x2", marks=pytest.mark.long),
        pytest.param("decode narrow", CHAIN, True, "v5e:2x2", marks=pytest.mark.long),
        pytest.param("decode narrow", TREE, False, "tpu7x:1x1x1", marks=pytest.mark.long),
        pytest.param("prefill packed", CHAIN, False, "v5e:2x2", marks=pytest.mark.long),
        pytest.param("prefill packed", CHAIN, False, "v6e:1x1", marks=pytest.mark.long),
        pytest.param("decode", TREE, False, "v5e:1x1", marks=pytest.mark.long),
        pytest.param("decode", TARGET_ONLY, False, "v5p:1x1x1", marks=pytest.mark.long),
        pytest.param("decode", CHAIN, False, "tpu7x:1x1x1", marks=pytest.mark.long),
        pytest.param("decode", LOOKUP, True, "v5e:1x1", marks=pytest.mark.long),
        pytest.param("decode", LOOKUP, False, "v6e:1x1", marks=pytest.mark.long),
        pytest.param("decode", GRAFTED, True, "v5p:1x1x1", marks=pytest.mark.long),
        pytest.param("decode", GRAFTED, False, "v5e:1x1", marks=pytest.mark.long),
        pytest.param("decode", RESTING, True, "v5e:1x1", marks=pytest.mark.long),
        pytest.param("catch_up narrow", RESTING, True, "v5e:2x2", marks=pytest.mark.long),
        pytest.param("catch_up narrow", RESTING, True, "tpu7x:1x1x1", marks=pytest.mark.long),
        pytest.param("prefill", VANILLA, False, "v6e:1x1", marks=pytest.mark.long),
        pytest.param("prefill", CHAIN, False, "v5p:1x1x1", marks=pytest.mark.long),
        pytest.param("prefill", CHAIN, False, "tpu7x:1x1x1", marks=pytest.mark.long),
    ],
)
def test_programs_compile_for_a_tpu(program, tree, greedy, topology):
    check(program, tree, greedy, topology, CONFIG, limit=64 if greedy else 256)


@pytest.mark.long
def test_a_window_sinks_and_experts_compile_for_a_tpu():
    """Heads of 64 numbers, two of them side by side in the cache; a hidden size that fills no registers."""
    check("decode", TREE, True, "v6e:1x1", few_layers("gpt_oss_20b"), limit=64)


@pytest.mark.long
def test_latent_attention_and_grouped_experts_compile_for_a_tpu():
    check("decode", TREE, True, "v5p:1x1x1", few_layers("deepseek_v3"), limit=64)


@pytest.mark.long
@pytest.mark.parametrize("program", ["decode", "prefill"])
def test_attention_to_chosen_slots_compiles_for_a_tpu(program):
    """Beside the usual, as many gathered rows and scores as are held at a time, twice."""
    check(program, TREE, True, "v6e:1x1", few_layers("glm_5"), limit=320)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "program", "tree", "greedy", "topology"),
    [
        (DFlash, "decode", CHAIN, True, "v6e:1x1"),
        (DFlash, "decode", CHAIN, True, "v5e:2x2"),
        (DFlash, "prefill packed", CHAIN, False, "v6e:1x1"),
        (DFlash2, "decode", TREE, True, "v6e:1x1"),
        (DFlash2, "decode", GRAFTED, False, "tpu7x:1x1x1"),
        (DSpark, "decode", TREE, False, "v5p:1x1x1"),
        (DSpark, "catch_up narrow", RESTING, True, "v5e:2x2"),
    ],
)
def test_rounds_of_block_heads_compile_for_a_tpu(kind, program, tree, greedy, topology):
    check(program, tree, greedy, topology, CONFIG, limit=64 if greedy else 256, block=kind)


def check(
    program: str,
    tree: Any,
    greedy: bool,
    topology: str,
    config: ModelConfig,
    limit: int,
    block: type[DFlash] | None = None,
) -> None:
    """Compiles with `limit` MiB beside arguments and results.

    Args:
        greedy: rounds of greedy requests alone, a branch of the program; else all of it.
    """
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices).reshape(1, -1), ("data", "model"))
    name, _, form = program.partition(" ")
    parts = shapes(mesh, tree, PACKED[-1] if form == "packed" else ALONE[0], config, block)
    structures = [structure for structure, _ in parts]
    rows = jnp.zeros(SIZES.batch, bool), jnp.array([2]) if form == "narrow" else None
    jitted: Any = getattr(programs, name)

    def run(*leaves, all_greedy):
        target, draft, state, chunk = (s.unflatten(x) for s, x in zip(structures, leaves, strict=True))
        models = Models.of(target, draft)
        if name == "prefill":
            return jax.tree.leaves(jitted.__wrapped__(models, state, chunk))
        if name == "catch_up":
            return jax.tree.leaves(jitted.__wrapped__(models, state, *rows))
        plan = RoundPlan(tiers_of(tree)[0], jnp.bool_(True) if greedy else all_greedy)
        return jax.tree.leaves(jitted.__wrapped__(models, state, *rows, jnp.int32(4), jnp.int32(1), plan))

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        either = jax.ShapeDtypeStruct((), bool, sharding=NamedSharding(mesh, PartitionSpec()))
        lowered = jax.jit(run, donate_argnums=2).lower(*(leaves for _, leaves in parts), all_greedy=either)
    text = lowered.as_text()
    assert "callback" not in text
    if name != "catch_up" or block is None:  # a block head's context is written without attention
        assert "tpu_custom_call" in text  # attention is the Pallas kernel
    memory: Any = lowered.compile().memory_analysis()
    caches = [x for x in parts[2][1] if x.ndim == 4]
    assert memory.alias_size_in_bytes >= sum(map(size, caches)) // len(devices)  # written in place
    # Beside the logits there is nothing large: no copy of a cache (512 MiB each), no weights in another layout, none
    # gathered from other devices.
    if topology.startswith("tpu7x") and name == "decode":
        # There the loop wants matrices in tiles of 16 rows: the LM head (docs/tpu-plans.md), and of a drawn block the
        # head's LM head and MLPs, some of them at a time (the compiler's dump).
        limit += 1024 + (256 if block is not None and not greedy else 0)
    assert memory.temp_size_in_bytes < limit << 20


def size(x: jax.ShapeDtypeStruct) -> int:
    return x.size * x.dtype.itemsize
