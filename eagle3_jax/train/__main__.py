"""features -> a trained draft head.

Online, the target computes its states of each batch before the step, and they never leave the devices. Killed and run
again, training goes on from its last checkpoint as if it had never stopped.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from eagle3_jax.config import RunConfig, run_file
from eagle3_jax.config.kinds import in_target
from eagle3_jax.data import vocab
from eagle3_jax.data.features import FeatureSource
from eagle3_jax.data.feed import Feed
from eagle3_jax.data.loader import PackedRows, Row, batches
from eagle3_jax.formats import draft_models, files
from eagle3_jax.kernels.linear.layouts import dense
from eagle3_jax.mesh import make_mesh, put, replicated, shardings
from eagle3_jax.models import fp8
from eagle3_jax.models.checkpoint.fetch import Target, keep_programs_in_bucket, load_target
from eagle3_jax.models.checkpoint.identity import check_same_target
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.inference_layout import for_many_rows
from eagle3_jax.models.states import target_states
from eagle3_jax.models.target import TargetModel
from eagle3_jax.runs import command, command_line, disk, machine, manifest, processes
from eagle3_jax.sequence import Split
from eagle3_jax.train.in_engine import Served, held_out_prompts
from eagle3_jax.training.batch import TEACHER_SHARDING_RULES, Batch, Teacher
from eagle3_jax.training.checkpoint import Checkpoints
from eagle3_jax.training.kinds.kind import TrainingKind, kind_of
from eagle3_jax.training.metrics import MetricWriter, NotFinite, import_wandb, products, summarise, utilisation
from eagle3_jax.training.state import init_state, learning_rate, make_eval_step, make_optimizer, make_train_step

# Options without effect on a run's result. They may change when it is resumed (decode_every to another number).
_WATCHING = ("log_every", "eval_every", "eval_batches", "checkpoint_every", "decode_every", "wandb")
_PLACING = ("mesh", "sequence", "accumulate", "remat")
KEPT_CHECKPOINTS = 2  # the newest, beside the best
# Steps that may be on their way to the device; each holds its batch.
IN_FLIGHT = 2


def train(config: RunConfig, target: Target | None = None) -> dict[str, Any]:
    """Trains `config`'s draft head into its checkpoints folder. Returns the results, as in the manifest.

    Raises ManifestError: unfinished features, features of another target, a folder of other work, or no held-out
    prompts for the engine. ValueError: sizes that do not fit each other; nothing to train on.
    """
    run = config.train
    if run.wandb is not None:
        import_wandb(run.wandb)  # refused before work begins

    features, folder = config.folder("extract"), config.folder("train")
    made_from = manifest.read(features, made_by="extract")
    mesh = make_mesh(run.mesh or config.mesh)
    parts = Split.of(mesh, run.sequence).groups * run.accumulate
    if run.batch_size % parts:
        shared = " by train.sequence" * (run.sequence > 1)
        several = ", train.accumulate times" * (run.accumulate > 1)
        expected = f"a multiple of {parts} (the mesh's data axis{shared}{several})"
        raise ValueError(f"train.batch_size: got {run.batch_size}, expected {expected}")
    online = run.features == "online"
    if not online and made_from["identity"].get("states") == "none":
        raise ValueError(f"train.features: got stored, expected online: {features} holds no hidden states")
    target = target or load_target(config.target, mesh, only=None if online else ("embed", "lm_head"))
    check_same_target(features, made_from["identity"]["target"], target.identity)
    kind = kind_of(config, target.model.config)
    identity: dict[str, Any] = {
        "verb": "train",
        "features": manifest.fingerprint(made_from),
        "target": target.identity,
        "draft": run_file.to_dict(config.draft),
        "train": {n: x for n, x in run_file.to_dict(run).items() if n not in (*_WATCHING, *_PLACING, "features")},
        "online": online,
        "seed": config.seed,
    }
    if run.decode_every is not None:
        identity["served_prompts"] = disk.digest(held_out_prompts(config))
    warm = None
    if (head := run.warm_start) is not None:
        named = in_target(head)
        head = head if named else draft_models.resolve(head, "train.warm_start", "the folder of a head")
        warm = kind.warm(head, target)
        identity["warm_start"] = head if named else files.file_digests(head)
    other = "run_dir"
    if local := disk.system_path(features):
        other += f"; its features may be a link to these: ln -s {local.resolve()} RUN_DIR/features"
    with manifest.claim(folder, identity, place=other) as finished:
        if finished:
            processes.say(f"train: {folder} is finished already")
            return manifest.read(folder, made_by="train")["results"]
        return _train(config, target, kind, mesh, warm)


def _train(config: RunConfig, target: Target, kind: TrainingKind, mesh: Mesh, warm: Draft | None) -> dict[str, Any]:
    run, features, folder = config.train, config.folder("extract"), config.folder("train")
    token_ids = kind.vocabulary(vocab.load(features)) if warm is None else np.asarray(warm.token_ids)
    processes.agree(lambda: vocab.save(folder, token_ids))

    packing: Any = {"multiple": run.batch_size, "seed": config.seed, "states": run.features == "stored"}
    most = None if run.max_steps is None else run.max_steps * run.batch_size
    rows = PackedRows(FeatureSource(features / "train"), run.row_length, epochs=run.epochs, max_rows=most, **packing)
    total = len(rows) // run.batch_size
    kind = dataclasses.replace(kind, total_steps=total)
    source, most = FeatureSource(features / "held_out"), run.eval_batches * run.batch_size
    held_out = PackedRows(source, run.row_length, max_rows=most, **packing) if len(source) else None
    split = Split.of(mesh, run.sequence)
    feed = Feed(mesh, run.batch_size, split)

    def place(part: Row, number: int) -> Batch:
        arrays = feed.place(part, number)
        return Batch(**fp8.paired(arrays), **observe(arrays), split=split)

    model = target.model
    observe = _Observer(model.observed_at(kind.aux_layers) if run.features == "online" else None, mesh, split)
    draw_teacher = (dense(model.embed[...]), dense(model.output_rows), put(token_ids, replicated(mesh)))
    placement = shardings(jax.eval_shape(Teacher.of, *draw_teacher), mesh, TEACHER_SHARDING_RULES)
    teacher = jax.jit(Teacher.of, out_shardings=placement)(*draw_teacher)
    if run.features == "online" and teacher.embed.sharding == draw_teacher[0].sharding:
        teacher = dataclasses.replace(teacher, embed=draw_teacher[0])  # the target's own table, held once
    teacher = dataclasses.replace(teacher, blocks=kind.blocks(model), cap=model.config.logit_cap)
    optimizer = make_optimizer(run, total)
    if warm is None:
        state = init_state(functools.partial(kind.new, config.seed), teacher.rows, optimizer, mesh)
    else:
        everywhere = jax.tree.map(lambda x: put(np.asarray(x), replicated(mesh)), warm.head)
        state = init_state(lambda head: head, everywhere, optimizer, mesh)
    del target, model, draw_teacher, warm
    train_step = make_train_step(kind, optimizer, mesh)
    eval_step = make_eval_step(kind, mesh)
    schedule = learning_rate(run, total)

    def evaluate(head: Any) -> dict[str, Any]:
        if held_out is None:
            return {}
        parts = enumerate(batches(held_out, run.batch_size, feed.rows))
        sums = [eval_step(head, teacher, place(part, number)) for number, part in parts]
        return _summarise(sums, held_out, run.batch_size, 0, "held_out")

    served = None if run.decode_every is None else Served(config, kind, state.head, token_ids)
    with (
        Checkpoints(folder, KEPT_CHECKPOINTS) as checkpoints,
        MetricWriter(folder, checkpoints.latest, run.wandb) as writer,
    ):
        if checkpoints.latest is not None:
            state = checkpoints.restore(state)
        done = int(state.step)
        sizes = f"{total} steps of {run.batch_size} x {run.row_length} tokens, {rows.padding:.1%} padding"
        processes.say(f"train: {sizes}" + f", going on at step {done}" * (done > 0))
        parts = batches(rows, run.batch_size, feed.rows, start=done)

        start = time.monotonic()
        batch = place(rows.empty(len(feed.rows(done))), done)
        traced = train_step.trace(state, teacher, batch)
        compiled = traced.lower().compile()
        operations = products(traced.jaxpr.jaxpr) + observe.operations(batch)
        if held_out is not None:  # now, since a step that waited for it would not be timed alone
            batch = place(held_out.empty(len(feed.rows(0))), 0)
            eval_step = eval_step.trace(state.head, teacher, batch).lower().compile()
        del batch, traced
        machine.release_freed()
        processes.say(f"train: compiled in {time.monotonic() - start:.1f} s")

        last = time.monotonic()
        tokens, seconds, waited = 0, 0.0, 0.0
        pending: list[_Pending] = []  # the steps behind the newest row of the metrics
        summary, evaluation, decoded = (writer.newest(kind) for kind in ("train", "held_out", "served"))
        with tqdm(total=total, initial=done, desc="train", unit="step", disable=processes.index() > 0) as progress:
            for step in range(done + 1, total + 1):
                asked = time.monotonic()
                part = next(parts)
                waited = time.monotonic() - asked
                state, sums = compiled(state, teacher, place(part, step - 1))
                pending.append(_Pending(sums, waited))
                if len(pending) > IN_FLIGHT:
                    jax.block_until_ready(pending[-1 - IN_FLIGHT].sums)
                progress.update()
                stopping = _stop_asked(step)
                decodes = served is not None and (step % (run.decode_every or 1) == 0 or step == total)
                saves = step % run.checkpoint_every == 0 or step == total or stopping or decodes
                evaluates = step % run.eval_every == 0 or step == total
                # A state is saved or evaluated only once it was found to be finite. Nothing else waits for the newest
                # steps: their rows come IN_FLIGHT steps later.
                all_are_due = evaluates or saves
                first, ready = step - len(pending), step if all_are_due else step - IN_FLIGHT
                ends = [end for end in range(first + 1, ready + 1) if end % run.log_every == 0]
                if all_are_due and step not in ends:
                    ends.append(step)
                if ends:
                    jax.block_until_ready([one.sums for one in pending[: ends[-1] - first]])
                    step_seconds, last = (time.monotonic() - last) / (ends[-1] - first), time.monotonic()
                for end in ends:
                    count = end - first
                    of_row, pending = pending[:count], pending[count:]
                    found = _summarise([one.sums for one in of_row], rows, run.batch_size, first, "train")
                    if not done and not summary and not found["positions"]:
                        why = f", or the target's best token is never among the {config.draft.vocab_size} of the draft "
                        why = f"{why}vocabulary (train.argmax_mask)" * run.argmax_mask
                        problem = f"train, the first {end} batches: got no position that trains, expected some; no"
                        raise ValueError(f"{problem} answer has a token that the loss mask counts{why}")
                    summary, first, passed = found, end, count * step_seconds
                    tokens, seconds = tokens + summary["tokens"], seconds + passed
                    rate = summary["tokens"] / passed
                    used = utilisation(count * operations, passed, list(mesh.devices.flat))
                    summary |= {"learning_rate": float(np.asarray(schedule(end - 1))), "tokens_per_second": rate}
                    summary |= {"data_wait": sum(one.waited for one in of_row) / passed, **used}
                    writer.write(end, "train", summary)
                    of_peak = f"MFU {used['mfu']:.0%}" if "mfu" in used else f"{used['teraflops']:.3f} TFLOP/s a device"
                    learnt = f"loss {summary['loss']:.3f}, acc_0 {summary['accuracy'][0]:.3f}"
                    progress.set_postfix_str(f"{learnt}, {rate:.0f} tokens/s, {of_peak}")
                if all_are_due:
                    paused = time.monotonic()
                    if evaluates:
                        if evaluation := evaluate(state.head):
                            writer.write(step, "held_out", evaluation)
                    if served is not None and decodes:
                        decoded = served.measure(state.head)
                        writer.write(step, "served", decoded)
                    if saves:
                        checkpoints.save(state, decoded["tau"] if decodes else None)
                    if stopping and step < total:
                        checkpoints.wait_until_finished()
                        raise command.Stopped
                    last += time.monotonic() - paused

        checkpoints.wait_until_finished()

    results = {"steps": total, "tokens": rows.tokens, "padding_share": rows.padding}
    results |= {"tokens_per_second": tokens / seconds if seconds else None}
    results |= {"train": summary, "held_out": evaluation, "served": decoded}
    return processes.agree(lambda: manifest.finish(folder, files=[vocab.NAME], **results) or results)


class _Pending(NamedTuple):
    sums: dict[str, Any]  # of a step without a row
    waited: float  # seconds for data


class _Observer:
    """Dispatches the target's states of placed rows, as fields of `Batch`; none without a model: the rows hold them."""

    def __init__(self, model: TargetModel | None, mesh: Mesh, split: Split) -> None:
        self._model, self._mesh, self._split = None if model is None else for_many_rows(model), mesh, split

    def __call__(self, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        if self._model is None:
            return {}
        with jax.set_mesh(self._mesh):  # kernels are split over it
            rows = arrays["token_ids"], arrays["segment_ids"]
            aux, last_hidden, argmax, _ = target_states(self._model, *rows, split=self._split)
        return {"aux": aux, "last_hidden": last_hidden, "argmax": argmax}

    def operations(self, batch: Batch) -> int:
        if self._model is None:
            return 0
        with jax.set_mesh(self._mesh):
            traced = target_states.trace(self._model, batch.token_ids, batch.segment_ids, split=self._split)
            return products(traced.jaxpr.jaxpr)


def _stop_asked(step: int) -> bool:
    # A process waits for a step that all began, so none is more than IN_FLIGHT steps ahead of another.
    return processes.agree_to_stop(step, IN_FLIGHT + 1, command.stop_asked())


def _summarise(sums: list[Any], rows: PackedRows, batch_size: int, first: int, split: str) -> dict[str, Any]:
    """Applies `summarise` to the batches from index `first` on. Raises ValueError: NaN; names the batch's records."""
    try:
        return summarise(sums)
    except NotFinite as error:
        batch = first + error.index
        names = [rows.source.name(r) for row in rows.plan[batch * batch_size :][:batch_size] for r in row]
        expected = "expected finite numbers; training stops, the checkpoints before it stay"
        raise ValueError(f"{split}, batch {batch + 1}: {error}, {expected}. Its records: {'; '.join(names)}") from error


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the verb from its command line."""
    config, _ = command_line.read("train", argv)
    with command.run("train"):
        keep_programs_in_bucket(config.run_dir)
        results = train(config)
        if results["held_out"]:
            accuracy = ", ".join(f"{x:.3f}" for x in results["held_out"]["accuracy"])
            processes.say(f"train: held-out tau {results['held_out']['tau']:.2f}, accuracy per step {accuracy}")


if __name__ == "__main__":
    main()
