"""Whatever was made with one target is refused with another: each field of an identity, in each verb and each loader.
Who decodes with a head takes another copy of its target, and says so.

The target is a folder; what the verbs before would have left is forged as far as the check reads it.
"""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from eagle3_jax import evaluate
from eagle3_jax.config import RunConfig, run_file
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.export import __main__ as export
from eagle3_jax.extract import __main__ as extract
from eagle3_jax.formats.files import CONFIG, WEIGHTS
from eagle3_jax.formats.heads import load_draft, save_draft
from eagle3_jax.formats.stored import DraftFormatError
from eagle3_jax.models.checkpoint.fetch import Target, load_target
from eagle3_jax.models.checkpoint.identity import FIELDS
from eagle3_jax.models.drafts.eagle3 import DraftHead, DraftHeadConfig
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.runs import disk, manifest
from eagle3_jax.train import __main__ as train
from eagle3_jax.training.checkpoint import Checkpoints
from eagle3_jax.training.kinds.kind import kind_of
from eagle3_jax.training.state import TrainState

OTHERS = {"weights": "0" * 64, "tokenizer": "1" * 64, "chat_template": "2" * 64, "aux_layers": [1, 2]}


class WorkBegan(Exception):
    """Stands for the work behind the check."""


@dataclasses.dataclass(frozen=True)
class Run:
    config: RunConfig
    target: Target
    prompts: pathlib.Path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run in which every verb has been, as far as the next one's check reads it; the tests are in its folder."""
    folder = tmp_path_factory.mktemp("run")
    path = tiny.write_run(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield forge(run_file.load(path))


def forge(config: RunConfig) -> Run:
    """What the verbs would have left, in so far."""
    target = load_target(config.target)
    without_layers = {field: value for field, value in target.identity.items() if field != "aux_layers"}
    token_ids = np.arange(config.draft.vocab_size, dtype=np.int32)
    for verb, identity in (("regenerate", without_layers), ("extract", target.identity), ("train", target.identity)):
        manifest.begin(config.folder(verb), {"verb": verb, "target": identity})
        np.savez(config.folder(verb) / "vocab.npz", token_ids=token_ids)
        manifest.finish(config.folder(verb), files=("vocab.npz",))
    head = DraftHead(DraftHeadConfig.for_target(config.draft, target.model.config), rngs=nnx.Rngs(0))
    with Checkpoints(config.folder("train"), keep=1) as checkpoints:
        state = TrainState(jnp.array(1, jnp.int32), head, {"count": jnp.zeros(())})
        checkpoints.save(state)
    draft = Draft(head, jnp.asarray(token_ids))
    save_draft(config.folder("export"), draft, target=target.model.config, dtype="float32")
    manifest.begin(config.folder("export"), {"verb": "export", "target": target.identity})
    manifest.finish(config.folder("export"))
    return Run(config, target, pathlib.Path("prompts.jsonl"))


# What was made -> what uses it, and the work that must not begin.
USERS: dict[str, tuple[Callable[[Run, Target], object], str]] = {
    "regenerate -> extract": (lambda run, target: extract.extract(run.config, target), "runs.disk.lock"),
    "extract -> train": (lambda run, target: train.train(run.config, target), "runs.disk.lock"),
    "train -> export": (lambda run, target: export.run(run.config, target), "runs.disk.lock"),
    "export -> evaluate": (
        lambda run, target: evaluate.run(run.config, run.prompts, "report.json", target),
        "formats.files.read_tensors",
    ),
    "export -> load_draft": (
        lambda run, target: load_draft(run.config.folder("export"), target=target),
        "formats.files.read_tensors",
    ),
    "export -> Engine.load": (
        lambda run, target: Engine.load(target, run.config.folder("export"), run.config.evaluate.tree),
        "formats.files.read_tensors",
    ),
    "export -> train --warm-start": (
        lambda run, target: kind_of(run.config, target.model.config).warm(run.config.folder("export"), target),
        "formats.files.read_tensors",
    ),
}
DECODERS = ("export -> evaluate", "export -> load_draft", "export -> Engine.load")
LENIENT = {*itertools.product(DECODERS, ("weights", "chat_template")), ("regenerate -> extract", "aux_layers")}


@pytest.fixture
def use(run: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets a user of what was made go as far as its check, with some fields of what was recorded replaced."""

    def use(name: str, recorded: dict[str, object]) -> None:
        function, work = USERS[name]
        path = run.config.folder(name.split()[0]) / manifest.NAME
        before = path.read_text()

        def began(*_: object, **__: object) -> None:
            raise WorkBegan

        monkeypatch.setattr(f"eagle3_jax.{work}", began)
        found = manifest.read(path.parent, name.split()[0])
        found["identity"]["target"] |= recorded
        disk.write_sealed(path, found)
        try:
            function(run, run.target)
        finally:
            path.write_text(before)

    return use


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "field"),
    [pair for pair in itertools.product(USERS, FIELDS) if pair not in LENIENT],
)
def test_another_target_is_refused_by_field(use, run, name, field):
    folder = run.config.folder(name.split()[0])
    expected = f"target.{field}: found {OTHERS[field]!r}, expected {run.target.identity[field]!r}"
    with pytest.raises(manifest.ManifestError) as error:
        use(name, {field: OTHERS[field]})
    assert str(error.value) == f"{folder}: made with another target:\n  {expected}"


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["weights"], "trained with other weights than those of target; fewer drafts may be accepted"),
        (["weights", "chat_template"], "trained with other weights and another chat template than those of target;"),
        ([], None),
    ],
)
def test_who_decodes_takes_a_copy_of_the_target_and_says_so_once(use, caplog, name, fields, message):
    with pytest.raises(WorkBegan):
        use(name, {field: OTHERS[field] for field in fields} | {"name": "org/original"})
    assert len(caplog.records) == (message is not None)
    assert all(message in record.getMessage() and "of org/original" in record.getMessage() for record in caplog.records)


@pytest.mark.slow
def test_a_copy_of_another_shape_is_refused_by_field(run):
    config = dataclasses.replace(run.target.model.config, hidden_size=128)
    identity = run.target.identity | {"weights": "0" * 64}
    wider = dataclasses.replace(run.target, model=tiny.make_target(config).model, identity=identity)
    with pytest.raises(DraftFormatError, match=r"hidden_size: got 64, expected 128, the target's"):
        Engine.load(wider, run.config.folder("export"))


@pytest.mark.parametrize("name", USERS)
def test_another_name_or_dtype_is_the_same_target(use, name):
    with pytest.raises(WorkBegan):
        use(name, {"name": "org/the-same-elsewhere", "dtype": "bfloat16"})


@pytest.mark.parametrize("name", USERS)
def test_a_field_that_was_never_recorded_is_refused(use, name):
    with pytest.raises(manifest.ManifestError, match=r"target\.tokenizer: found None, expected"):
        use(name, {"tokenizer": None})


def test_other_aux_layers_do_not_change_the_answers(use):
    with pytest.raises(WorkBegan):
        use("regenerate -> extract", {"aux_layers": [1, 2]})


def test_a_head_from_elsewhere_cannot_say_its_target(run, tmp_path):
    """Without a manifest only shapes can be compared; with an architecture alone too."""
    elsewhere = tmp_path / "head"
    elsewhere.mkdir()
    for name in (CONFIG, WEIGHTS):
        (elsewhere / name).write_bytes((run.config.folder("export") / name).read_bytes())
    other = dataclasses.replace(run.target, identity=run.target.identity | OTHERS)
    load = functools.partial(load_draft, elsewhere)
    assert load(target=other).token_ids.shape == load(target=run.target.model.config).token_ids.shape


def test_what_identifies_a_target_is_what_is_compared(run):
    """A field that is added to identities is compared, or named here as one that may differ."""
    assert set(run.target.identity) == {*FIELDS, "name", "commit", "architecture", "dtype"}
