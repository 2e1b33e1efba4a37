"""Gemma 4's assistant in training: its states are those of rounds, and it learns to draft for its target."""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_families
from flax import nnx
from test_family_runs import TEXTS, prepared

from eagle3_jax import evaluate
from eagle3_jax.config import MeshConfig, RunConfig
from eagle3_jax.export import __main__ as export
from eagle3_jax.extract import __main__ as extract
from eagle3_jax.formats import heads
from eagle3_jax.formats.gemma4_assistant import read_shape
from eagle3_jax.mesh import batch_sharding, make_mesh, shardings
from eagle3_jax.models.cache import Pass
from eagle3_jax.models.checkpoint.fetch import Target
from eagle3_jax.models.drafts.gemma4_assistant import Gemma4Assistant
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.families import FAMILIES
from eagle3_jax.models.layers import SHARDING_RULES
from eagle3_jax.train import __main__ as train
from eagle3_jax.training.batch import TEACHER_SHARDING_RULES, Batch, Teacher
from eagle3_jax.training.fsdp import TRAINED_SHARDING_RULES
from eagle3_jax.training.kinds.assistant import Assistant, assistant_states
from eagle3_jax.training.kinds.kind import kind_of

FAMILY = next(x for x in FAMILIES if x.config.architecture == "Gemma4ForCausalLM")


def with_assistant(folder: pathlib.Path, clusters: int = 0) -> tuple[Target, RunConfig]:
    """A random target and its random assistant in folders, and a config that trains the latter."""
    target = tiny_families.write(folder / "target", FAMILY, max_position_embeddings=128)
    c = target.model.config
    own: dict[str, Any] = c.to_hf() | {"num_hidden_layers": 3, "layer_types": c.to_hf()["layer_types"][-3:]}
    own |= {"hidden_size": 24, "enable_moe_block": False, "hidden_size_per_layer_input": 0}
    values = {"text_config": own, "backbone_hidden_size": c.hidden_size}
    values |= {"use_ordered_embeddings": clusters > 0, "num_centroids": clusters, "centroid_intermediate_top_k": 2}
    head = Gemma4Assistant(read_shape(values, c), rngs=nnx.Rngs(1))
    ids = np.random.default_rng(0).permutation(c.vocab_size) if clusters else np.arange(c.vocab_size)
    heads.save_draft(
        folder / "assistant", Draft(head, jnp.asarray(ids, jnp.int32)), target=c, dtype="float32", form="vllm"
    )
    config = prepared(folder, target.identity, "vllm", kind="assistant")
    run: dict[str, Any] = {
        "features": "online",
        "warm_start": str(folder / "assistant"),
        "ttt_steps": 3,
        "max_steps": 48,
    }
    extracted = dataclasses.replace(config.extract, states="none")
    return target, dataclasses.replace(config, extract=extracted, train=dataclasses.replace(config.train, **run))


LENGTH, BEGIN = 24, 5


def inputs(target: Target, config: RunConfig, rows: int) -> tuple[Assistant, Any, Teacher, Batch]:
    """Rows of two documents, of which the second begins at BEGIN."""
    kind, model = kind_of(config, target.model.config), target.model
    assert isinstance(kind, Assistant) and config.train.warm_start is not None
    tokens = np.random.default_rng(1).integers(0, model.config.vocab_size, (rows, LENGTH))
    at = np.tile(np.arange(LENGTH), (rows, 1))
    segments, positions = np.where(at < BEGIN, 1, 2), np.where(at < BEGIN, at, at - BEGIN)
    this = Pass(
        jnp.asarray(positions),
        jnp.zeros(rows, jnp.int32),
        starts=jnp.asarray(at - positions),
        counts=jnp.full(rows, LENGTH),
    )
    observed = model.observed_at(kind.aux_layers)  # `target_states` rounds them
    hidden, aux, _ = observed(jnp.asarray(tokens), this, model.empty_cache(rows, LENGTH))
    best = jnp.argmax(model.logits(hidden), axis=-1)
    integers = map(jnp.asarray, (segments * 0 + 1, segments, positions))
    rows_of: Any = model.output_rows
    teacher = Teacher.of(model.embed[...], rows_of, jnp.arange(model.config.vocab_size))
    teacher = dataclasses.replace(teacher, blocks=kind.blocks(model), cap=model.config.logit_cap)
    head = kind.warm(config.train.warm_start, target).head
    return kind, head, teacher, Batch(jnp.asarray(tokens), aux, hidden, best, *integers)


@pytest.mark.slow
@pytest.mark.parametrize("clusters", [0, 6])
def test_states_in_training_are_those_of_rounds(tmp_path: pathlib.Path, clusters: int) -> None:
    """In both documents of a row, behind a window's end too; clusters of the vocabulary are dropped."""
    target, config = with_assistant(tmp_path, clusters)
    (_, head, teacher, batch), model = inputs(target, config, rows=1), target.model
    length, begin, steps, tokens = LENGTH, BEGIN, config.train.ttt_steps, np.asarray(batch.token_ids)
    found = assistant_states(head, teacher, batch, steps, True)
    for start, at in ((0, 2), (begin, begin), (begin, begin + 6), (begin, length - 1 - steps)):
        read = jnp.asarray(tokens[:, start : at + 1])
        count = read.shape[1]
        cache, where = model.empty_cache(1, 32), jnp.arange(count)[None]
        last, _, cache = model(read, Pass(where, jnp.zeros(1, jnp.int32), counts=jnp.full(1, count)), cache)
        state, this = last[:, -1:], Pass(where, jnp.full(1, count, jnp.int32))
        for step in range(steps):
            asked = jnp.asarray(tokens[:, at + 1 + step, None])
            state, cache = head.run(model.embed[...], asked, state, this, cache)
            np.testing.assert_allclose(
                found[step, 0, at], head.output_hidden(state)[0, 0], atol=1e-4, rtol=1e-4, err_msg=f"{at}, {step}"
            )


@pytest.mark.slow
def test_an_assistant_learns_and_is_exported(tmp_path: pathlib.Path) -> None:
    target, config = with_assistant(tmp_path)
    extract.extract(config, target)
    results = train.train(config, target)
    lines = map(json.loads, (config.folder("train") / "metrics.jsonl").read_text().splitlines())
    first, *_, last = [line for line in lines if line["kind"] == "held_out"]
    assert last["loss"] < first["loss"] and last["tau"] > first["tau"] + 0.1
    assert results["held_out"]["tau"] == last["tau"]
    export.run(config, target)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": asked, "category": "chat"}) + "\n" for asked, _ in TEXTS))
    report = evaluate.run(config, prompts, tmp_path / "report.json", target)
    assert report["identical"] == report["prompts"] == len(TEXTS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": "stored"}, "train.features: got 'stored', expected 'online' for draft.kind 'assistant'"),
        ({"sequence": 2}, "train.sequence: got 2, expected 1"),
        ({"warm_start": None}, "train.warm_start: got None, expected the name or folder of an assistant"),
    ],
)
def test_what_it_cannot_train_on_is_refused(tmp_path: pathlib.Path, changes: dict[str, Any], message: str) -> None:
    config = prepared(tmp_path, {"name": "none"}, "vllm", kind="assistant")
    run: dict[str, Any] = {"features": "online", "warm_start": "a/folder"} | changes
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, **run))
    with pytest.raises(ValueError, match=message):
        kind_of(config, tiny_families.config_of(FAMILY))


@pytest.mark.slow
@pytest.mark.parametrize(("data", "model"), [(4, 1), (2, 2)])
def test_a_mesh_changes_neither_losses_nor_gradients(tmp_path: pathlib.Path, data: int, model: int) -> None:
    target, config = with_assistant(tmp_path)
    kind, *given = inputs(target, config, rows=4)

    def run(head: Any, teacher: Teacher, batch: Batch) -> Any:
        loss = jax.value_and_grad(kind.loss, has_aux=True)
        return loss(head, teacher, batch, jnp.int32(0)), kind.evaluate(head, teacher, batch)

    expected = jax.device_get(jax.jit(run)(*given))
    mesh = make_mesh(MeshConfig(data=data, model=model), jax.devices()[: data * model])
    with jax.set_mesh(mesh):
        head, teacher, batch = given
        assert isinstance(teacher, Teacher)
        teacher = dataclasses.replace(
            jax.device_put(teacher, shardings(teacher, mesh, TEACHER_SHARDING_RULES)),
            blocks=jax.device_put(teacher.blocks, shardings(teacher.blocks, mesh, SHARDING_RULES)),
        )
        head = jax.device_put(head, shardings(head, mesh, TRAINED_SHARDING_RULES))
        found = jax.device_get(jax.jit(run)(head, teacher, jax.device_put(batch, batch_sharding(mesh))))
    jax.tree.map(lambda want, got: np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6), expected, found)
