"""What an engine does with any target, with one that has recurrent states: a Qwen 3.5, a head, two slots of state."""

import dataclasses
import pathlib
import random
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import tiny
import tiny_families
from flax import nnx
from test_family_rounds import LENGTH, VOCABULARY, plain
from tiny_blocks import make_block_head
from toy import NO_TEXT

from eagle3_jax.config import AdaptConfig, DraftConfig, DraftTree, MeshConfig
from eagle3_jax.decoding import data_parallel
from eagle3_jax.decoding.engine import Engine, SamplingParams
from eagle3_jax.decoding.warm_up import WarmUp
from eagle3_jax.mesh import make_mesh, own_replica, shardings
from eagle3_jax.models.checkpoint.fetch import Target
from eagle3_jax.models.drafts.dflash import DFlash
from eagle3_jax.models.drafts.eagle3 import DraftHead, DraftHeadConfig
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.drafts.model import DraftModel
from eagle3_jax.models.families import FAMILIES
from eagle3_jax.models.layers import SHARDING_RULES
from eagle3_jax.models.quantisation import quantised_model
from eagle3_jax.models.target import TargetModel

FAMILY = next(family for family in FAMILIES if family.config.model_type == "qwen3_5_text")
TREE = DraftTree(num_steps=3, topk=2, num_draft_tokens=6)
SIZES: dict[str, Any] = {"batch_size": 2, "max_length": LENGTH, "page_size": 16}
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)  # as many as `plain` answers
DRAW = random.Random(0)
PROMPTS = [[DRAW.randrange(VOCABULARY) for _ in range(size)] for size in (3, 11, 24, 17)]


def head(model: TargetModel) -> Draft:
    """Right now and then: it has the target's own embeddings as its LM head."""
    config = DraftHeadConfig.for_target(DraftConfig(vocab_size=40), model.config)
    made = DraftHead(config, rngs=nnx.Rngs(1))
    made.lm_head[...] = model.output_rows[:40]
    return Draft(made, jnp.arange(40))


def tokens(engine: Engine, params: SamplingParams = PARAMS, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [answer.token_ids for answer in engine.generate(prompts, params)]


@pytest.fixture(scope="module")
def model() -> TargetModel:
    return tiny_families.make(FAMILY, num_hidden_layers=3)


@pytest.fixture(scope="module")
def engine(model: TargetModel) -> Engine:
    return Engine(model, NO_TEXT, head(model), TREE, **SIZES)


@pytest.fixture(scope="module")
def expected(model: TargetModel) -> list[list[int]]:
    return [plain(model, prompt) for prompt in PROMPTS]


@pytest.mark.slow
def test_a_long_prompt_compiles_nothing_behind_the_first_programs(monkeypatch):
    """What keeps a state, and what brings it back, is among the programs that answer every request."""
    monkeypatch.setattr(WarmUp, "rest", lambda self, lend: None)
    sizes: dict[str, Any] = {"batch_size": 1, "max_length": 320, "page_size": 16}
    longer = tiny_families.make(FAMILY, num_hidden_layers=3, max_position_embeddings=512)
    engine = Engine(longer, NO_TEXT, None, **sizes)
    engine.warm_up()
    before = engine.stats().programs
    for _ in range(2):
        engine.generate([[7] * 290], SamplingParams(max_tokens=2, ignore_eos=True))
    assert engine.stats().cached_tokens == 256 and engine.stats().programs == before


@pytest.mark.slow
def test_another_policy_leaves_no_state_behind(engine, model, expected):
    policy = jax.tree.map(lambda x: x * 1.1, model)
    assert tokens(engine) == expected
    before = engine.stats().programs
    engine.replace_target(policy)
    assert tokens(engine) == [plain(policy, prompt) for prompt in PROMPTS] != expected
    engine.replace_target(model)
    assert tokens(engine) == expected
    assert engine.stats().programs == before


@pytest.mark.slow
def test_each_of_several_answers_has_a_state(engine):
    params = SamplingParams(max_tokens=12, temperature=2.0, seed=4, ignore_eos=True)
    several = tokens(engine, dataclasses.replace(params, n=3), PROMPTS[1:3])
    assert len({tuple(answer) for answer in several}) == 6
    assert several == tokens(engine, dataclasses.replace(params, n=3), PROMPTS[1:3])
    assert tokens(engine, params, PROMPTS[1:2]) == several[:1]


@pytest.mark.slow
def test_the_slot_of_an_aborted_request_is_the_next_one_s(engine, expected):
    requests = [engine.submit(prompt, dataclasses.replace(PARAMS, max_tokens=30)) for prompt in PROMPTS]
    next(iter(requests[0]))
    for request in requests:
        request.abort()
    assert [request.result().finish_reason for request in requests] == ["abort"] * 4
    assert tokens(engine) == expected


@pytest.mark.slow
def test_a_head_learns_while_it_drafts(model, expected):
    adapt = AdaptConfig(share=0.95, ring_tokens=256, row_length=64, batch_size=2, ttt_steps=2, judge_every=4)
    engine = Engine(model, NO_TEXT, head(model), TREE, adapt=adapt, **SIZES)
    for _ in range(6):
        assert tokens(engine) == expected
    stats = engine.stats().adapt
    assert stats is not None and stats.steps > 0


@pytest.mark.slow
def test_replicas_of_split_states_answer_as_one_engine(model, expected):
    """Two rows of a mesh, and of each two devices that share the value heads."""
    replica = own_replica(make_mesh(MeshConfig(data=2, model=2)))
    spread = jax.device_put(model, shardings(model, replica.mesh, SHARDING_RULES))
    target = Target(spread, NO_TEXT, tiny.identity((1, 2, 3)), pathlib.Path())
    engines = [Engine(row.model, NO_TEXT, head(model), TREE, **SIZES) for row in data_parallel.targets(target, replica)]
    found: dict[int, Any] = {}
    data_parallel.generate(engines, PROMPTS, [PARAMS] * len(PROMPTS), found.__setitem__)
    assert [found[index].token_ids for index in range(len(PROMPTS))] == expected
    for own in engines:
        state = own.own_runner._state
        assert state is not None
        states = state.cache.layers[0].states
        assert states.sharding.shard_shape(states.shape)[1] * 2 == states.shape[1]


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", pytest.param("int4", marks=pytest.mark.long)])
def test_drafts_change_no_token_of_few_bits(model, expected, weights):
    few = quantised_model(model, weights, vocabulary=True)
    without = tokens(Engine(few, NO_TEXT, None, **SIZES))
    assert tokens(Engine(few, NO_TEXT, head(model), TREE, **SIZES)) == without != expected


def block(model: TargetModel) -> Draft:
    """A DFlash whose drafts come from the first 40 tokens, with the target's own embeddings as its LM head."""
    sizes = {"hidden_size": 32, "target_hidden_size": 32, "aux_layers": model.config.aux_layers}
    made = make_block_head(DFlash, vocab_size=VOCABULARY, draft_vocab_size=40, **sizes)
    made.lm_head[...] = model.output_rows[:40]
    return Draft(made, jnp.arange(40))


def smaller(model: TargetModel) -> Draft:
    family = next(family for family in FAMILIES if family.config.model_type == "qwen3")
    return Draft(DraftModel(tiny_families.make(family, num_hidden_layers=3).observed_at(())), jnp.arange(VOCABULARY))


CHAIN = DraftTree(num_steps=3, num_draft_tokens=4)
SOURCES: dict[str, tuple[Any, DraftTree]] = {
    "tree": (head, TREE),
    "chain": (head, CHAIN),
    "copies": ("lookup", CHAIN),
    "tree and copies": (head, dataclasses.replace(TREE, lookup_tokens=3)),
    "block": (block, TREE),
    "draft model": (smaller, TREE),
}


@pytest.mark.long
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("source", SOURCES)
def test_no_source_of_drafts_changes_a_token(model, expected, source, batch):
    draft, tree = SOURCES[source]
    made: Any = draft if isinstance(draft, str) else draft(model)
    target = model.observed_at(() if draft is smaller else model.config.aux_layers)
    engine = Engine(target, NO_TEXT, made, tree, **SIZES | {"batch_size": batch})
    assert tokens(engine, prompts=PROMPTS * 4) == expected * 4
