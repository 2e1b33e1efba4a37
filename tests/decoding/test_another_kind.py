"""A kind of head that the package does not know, from three modules and one row: trained, written, read, drafting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from medusa_record import MEDUSA
from test_block_rounds import MAX_TOKENS, answered, conversations

from eagle3_jax.config import ConfigError, DraftConfig, DraftTree, MeshConfig, RunConfig, TrainConfig
from eagle3_jax.config.kinds import KINDS, KindRow
from eagle3_jax.decoding.choice.tiers import choice_for
from eagle3_jax.formats import kinds
from eagle3_jax.formats.files import DraftFormatError
from eagle3_jax.formats.heads import load_draft, save_draft
from eagle3_jax.mesh import make_mesh
from eagle3_jax.models.checkpoint.fetch import Target
from eagle3_jax.training.batch import Teacher
from eagle3_jax.training.kinds.kind import kind_of
from eagle3_jax.training.metrics import summarise
from eagle3_jax.training.state import init_state, make_eval_step, make_optimizer, make_train_step

pytestmark = pytest.mark.slow
STEPS, DRAFTS = 40, 3


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(KINDS, "medusa", KindRow("medusa_record:MEDUSA", "medusa_training:MedusaTraining"))


def test_three_modules_and_a_row_are_a_kind_of_head(toy, tmp_path):
    shape, ids = toy.target.config, jnp.arange(toy.target.config.vocab_size, dtype=jnp.int32)
    run = TrainConfig(ttt_steps=DRAFTS, batch_size=8, row_length=33, loss_block=33, learning_rate=1e-2)
    kind = kind_of(RunConfig(run_dir="run", draft=DraftConfig(kind="medusa", num_layers=DRAFTS), train=run), shape)
    batch = jax.jit(conversations)(toy.target)
    teacher = Teacher.of(toy.target.embed[...], toy.target.output_rows, ids)
    optimizer, mesh = make_optimizer(run, STEPS), make_mesh(MeshConfig(data=1, model=1), jax.devices()[:1])
    state = init_state(lambda rows: kind.new(0, rows), teacher.rows, optimizer, mesh)
    step, evaluate = make_train_step(kind, optimizer, mesh), make_eval_step(kind, mesh)
    before = summarise([evaluate(state.head, teacher, batch)])
    for _ in range(STEPS):
        state, _ = step(state, teacher, batch)
    after = summarise([evaluate(state.head, teacher, batch)])
    assert after["loss"] < before["loss"] and after["tau"] > before["tau"]

    draft = kind.draft(state.head, toy.target.output_rows, ids)
    save_draft(tmp_path / "head", draft, target=shape, dtype="float32", form="eagle3_jax")
    assert kinds.of_folder(tmp_path / "head") is MEDUSA
    loaded = load_draft(tmp_path / "head", target=Target(toy.target, None, {}, tmp_path))
    jax.tree.map(np.testing.assert_array_equal, loaded.head, draft.head)
    for form, engine in (("sglang", "SGLang"), ("vllm", "vLLM")):
        refused = rf"head: got a Medusa head, .*; {engine} has no Medusa heads\n.*expected eagle3_jax"
        with pytest.raises(DraftFormatError, match=refused):
            save_draft(tmp_path / form, draft, target=shape, dtype="float32", form=form)

    target = toy.target.observed_at(loaded.head.config.aux_layers)
    vanilla = answered(target)
    for tree in (DraftTree(num_steps=3, num_draft_tokens=4), DraftTree(num_steps=3, topk=3, num_draft_tokens=12)):
        drafted = answered(target, loaded, tree)
        np.testing.assert_array_equal(drafted.output[:, :MAX_TOKENS], vanilla.output[:, :MAX_TOKENS])
        assert int(drafted.accepted.sum()) > 20  # it is of use
    assert [tier.name for tier in choice_for(target.config, loaded, "auto").tiers][2:4] == ["chain 2", "chain 3"]
    with pytest.raises(ValueError, match=r"tree.num_steps: got 4, expected at most the head's 3"):
        choice_for(target.config, loaded, DraftTree(num_steps=4, num_draft_tokens=5))


def test_a_kind_without_a_row_is_refused_by_the_config(monkeypatch):
    monkeypatch.delitem(KINDS, "medusa")
    expected = "'eagle3', 'mtp', 'dflash', 'dspark', 'dflash2' or 'assistant'"
    for name in ("medusa", "eagle2"):
        with pytest.raises(ConfigError, match=f"draft.kind: got '{name}', expected {expected}$"):
            DraftConfig(kind=name)
