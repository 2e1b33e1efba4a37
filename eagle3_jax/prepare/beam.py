"""Runs the filters on Apache Beam, for millions of prompts: the same functions and output, no list of all prompts.

The sources are split into blocks, in the order of all records. Two pipelines meet in files. The first cleans each
block's records and writes their signatures. The launching process decides in order which duplicates go, as one process
does. The second writes what is kept, a shard for each block. A block that is written is not made again.
"""
# The extra `beam` is not in the tests' environment: it holds back versions of other packages.

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import shlex
import shutil
from collections.abc import Iterator
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.metrics.metric import Metrics
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.pvalue import AsSingleton

from eagle3_jax.config import PrepareConfig, RunConfig
from eagle3_jax.data import lines, sources
from eagle3_jax.data.duplicates import EXACT, NEAR, Duplicates, Signature, signature
from eagle3_jax.data.split import Bounds, StratifiedSplit, by_category, joined
from eagle3_jax.prepare import cleaning
from eagle3_jax.prepare.cleaning import HELD_OUT, REJECTS, TRAIN, WORK, Cleaned, Cleaner, Result
from eagle3_jax.prepare.self_prompting import Written
from eagle3_jax.runs import command, disk, processes

# Of a block: bytes of a file, or records of another source.
_BYTES, _RECORDS = 4 << 20, 8192


@dataclasses.dataclass(frozen=True)
class Block:
    """A part of a source, by its index; one without `part` and `copy` is a whole file."""

    number: int
    source: int
    part: lines.Part | None = None
    before: int | None = None  # number of the line at which the source's limit ends the part
    copy: str | None = None  # file with records of a source that no other process reads


@dataclasses.dataclass(frozen=True)
class _Job:
    """What every worker knows: the settings, the output's folder, and the number of blocks."""

    section: PrepareConfig
    folder: str
    blocks: int

    def work(self, kind: str, number: int) -> disk.Path:
        """Returns the path of a block's file; it goes when all is done."""
        return disk.path_of(self.folder) / WORK / kind / f"{number:05d}"

    def shard(self, name: str, number: int) -> str:
        stem = name.removesuffix(".jsonl")
        return name if self.blocks == 1 else f"{stem}-{number:05d}-of-{self.blocks:05d}.jsonl"

    @contextlib.contextmanager
    def explained(self, block: Block) -> Iterator[None]:
        """Notes what a user can mend, since each runner says it in its own way."""
        try:
            yield
        except (OSError, ValueError) as error:
            with contextlib.suppress(OSError):
                disk.write_json(self.work("failures", block.number), {"error": command.sentence(error)})
            raise


def run(config: RunConfig, folder: disk.Path, written: Written) -> Result:
    """Writes the prompts, TRAIN and REJECTS in shards. Raises ValueError: an unreadable source, or Beam refuses."""
    section = config.prepare
    _options(section)
    reasons = Cleaner(section).benchmarks.reasons
    blocks = plan(config, written, folder / WORK)
    job = _Job(section, str(folder), len(blocks))
    processes.say(f"prepare: {len(blocks)} blocks of the sources")
    _run(job, blocks, lambda blocks: blocks | "clean" >> beam.Map(_clean, job))
    _decide(job, blocks)
    _run(job, blocks, lambda blocks: _write(job, blocks))
    return _finish(job, blocks, reasons)


def plan(config: RunConfig, written: Written, work: disk.Path) -> list[Block]:
    """Divides the sources, once: an interrupted run goes on with the same blocks, and their copies, in `work`."""
    path = work / "blocks.json"
    if path.exists():
        found = disk.read_json(path)["blocks"]
        return [Block(**values | {"part": values["part"] and lines.Part(**values["part"])}) for values in found]
    blocks: list[Block] = []
    for index, source in enumerate(config.prepare.sources):
        if not isinstance(source, sources.FileSource):
            records = sources.read(source, written.get(index, ()))
            while batch := list(itertools.islice(records, _RECORDS)):
                copy = work / "copies" / f"{len(blocks):05d}.jsonl"
                with lines.written(copy) as add:
                    for record in batch:
                        is_reject = isinstance(record, sources.Reject)
                        add({"reject": dataclasses.asdict(record)} if is_reject else {"prompt": record})
                blocks.append(Block(len(blocks), index, copy=str(copy)))
        elif source.path.endswith(".gz"):
            blocks.append(Block(len(blocks), index))
        else:
            before = _line_beyond(source)
            for part in lines.parts(source.path, _BYTES):
                if before is not None and part.first >= before:
                    break
                blocks.append(Block(len(blocks), index, part, before))
    disk.write_json(path, {"blocks": [dataclasses.asdict(block) for block in blocks]})
    return blocks


def _line_beyond(source: sources.FileSource) -> int | None:
    """Returns the number of the line behind the source's limit of prompts; None where all are within it."""
    if source.limit is None:
        return None
    prompts = (record["line"] for record in sources.read_part(source) if isinstance(record, dict))
    return next(itertools.islice(prompts, source.limit, None), None)


def _read(section: PrepareConfig, block: Block) -> Iterator[sources.Record]:
    source = section.sources[block.source]
    if block.copy is not None:
        for values in disk.read_jsonl(block.copy):
            yield sources.Reject(**values["reject"]) if "reject" in values else values["prompt"]
    elif block.part is None:
        yield from sources.read(source)
    else:
        assert isinstance(source, sources.FileSource)
        for record in sources.read_part(source, block.part):
            number = record.line if isinstance(record, sources.Reject) else record["line"]
            if block.before is None or number < block.before:
                yield record


def _options(section: PrepareConfig) -> PipelineOptions:
    printed = io.StringIO()  # argparse says there what is wrong, and exits
    try:
        with contextlib.redirect_stderr(printed):
            options = PipelineOptions(shlex.split(section.beam_options))
            options.get_all_options()
        beam.Pipeline(options=options)  # knows the runners
    except (ValueError, ImportError, SystemExit) as error:
        got = f"{section.beam_options!r} ({(printed.getvalue() or str(error)).strip().splitlines()[-1]})"
        raise ValueError(f"prepare.beam_options: got {got}, expected options of Apache Beam") from error
    return options


def _run(job: _Job, blocks: list[Block], build: Any) -> None:
    """Runs a pipeline to its end. Raises ValueError: what a worker noted, or the last line of Beam's error."""
    failures = disk.path_of(job.folder) / WORK / "failures"
    disk.remove(failures)
    reason, cause = "", None
    try:
        pipeline = beam.Pipeline(options=_options(job.section))
        build(pipeline | "blocks" >> beam.Create(blocks) | beam.Reshuffle())
        state = pipeline.run().wait_until_finish()
        if str(state) != "DONE":
            reason = f"state {state}"
    except Exception as error:  # of any kind: each runner has its own
        reason, cause = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__, error
    if reason:
        noted = [path for block in blocks if (path := job.work("failures", block.number)).exists()]
        if noted:
            raise ValueError(disk.read_json(noted[0])["error"]) from cause
        raise ValueError(f"prepare.runner: beam did not finish: {reason}") from cause


_cleaner = functools.lru_cache(1)(Cleaner)  # one for each worker


def _clean(block: Block, job: _Job) -> None:
    """Writes a block's cleaned records, a line each, and the signatures of its prompts."""
    with job.explained(block):
        if not job.work("signed", block.number).exists():
            _write_cleaned(block, job)


def _write_cleaned(block: Block, job: _Job) -> None:
    label, signed = sources.label(job.section.sources[block.source]), list[tuple[int, bytes, Signature]]()
    with lines.written(job.work("cleaned", block.number)) as add:
        records = ((label, record) for record in _read(job.section, block))
        for number, cleaned in enumerate(_cleaner(job.section).clean(records)):
            add(dataclasses.asdict(cleaned))
            _count(f"read: {label}")
            for kind, found in cleaned.personal.items():
                _count(f"personal data: {kind}", found)
            if cleaned.reason is not None:
                _count(f"rejected: {cleaned.reason}")
                continue
            of_prompt = signature(cleaned.asked, job.section.near_duplicate)
            signed.append((number, bytes.fromhex(cleaned.identity), of_prompt))
    numbers, identities, signatures = zip(*signed, strict=True) if signed else ((), (), ())
    with disk.atomic(job.work("signed", block.number)) as temporary, temporary.open("wb") as stream:
        np.savez(
            stream,
            numbers=np.array(numbers, np.int64),
            identities=np.frombuffer(b"".join(identities), "<u8").reshape(-1, 4),
            bands=np.array([found.bands for found in signatures], "<u8"),
            ends=np.cumsum([len(found.shingles) for found in signatures], dtype=np.int64),
            shingles=np.concatenate([np.zeros(0, "<u8"), *(found.shingles for found in signatures)]),
        )


def _decide(job: _Job, blocks: list[Block]) -> None:
    """Decides in order which duplicates go, and writes the reasons for each block.

    Most prompts share neither identity nor band with another one: they stay, and their words are not held.
    """
    paths = [job.work("signed", block.number) for block in blocks]
    keys = disk.each(_keys, paths)
    meets = np.zeros(sum(map(len, keys)), bool)
    for column in np.concatenate([found for found in keys if len(found)] or [np.zeros((0, 1), "<u8")]).T:
        ordered = np.sort(column)
        meets |= np.isin(column, ordered[1:][ordered[1:] == ordered[:-1]])
    duplicates, starts = Duplicates(job.section.near_duplicate), np.cumsum([0, *map(len, keys)])
    del keys
    for block, path, start, stop in zip(blocks, paths, starts[:-1], starts[1:], strict=True):
        reasons: dict[str, str] = {}
        if rows := np.flatnonzero(meets[start:stop]).tolist():
            with _signed(path) as signed:
                numbers, identities, bands, ends, shingles = (signed[name] for name in signed.files)
            for row in rows:
                found = Signature(shingles[ends[row - 1] if row else 0 : ends[row]].copy(), bands[row])
                if reason := duplicates.check(identities[row].tobytes().hex(), lambda found=found: found):
                    reasons[str(numbers[row])] = reason
        disk.write_json(job.work("reasons", block.number), reasons)


def _signed(path: disk.Path) -> Any:
    return np.load(io.BytesIO(disk.read_bytes(path)), allow_pickle=False)


def _keys(path: disk.Path) -> np.ndarray:
    """Returns what prompts of a block may share with others: the beginning of their identity, and their bands."""
    with _signed(path) as signed:
        return np.column_stack((signed["identities"][:, 0], signed["bands"]))


def _write(job: _Job, blocks: Any) -> None:
    whole = blocks | beam.Map(_bounds, job) | beam.CombineGlobally(joined).without_defaults()
    _ = blocks | beam.Map(_write_block, job, AsSingleton(whole, {}))


def _bounds(block: Block, job: _Job) -> dict[str, Bounds]:
    return by_category(cleaned.place for cleaned in _decided(job, block) if cleaned.reason is None)


def _write_block(block: Block, job: _Job, whole: dict[str, Bounds]) -> None:
    with job.explained(block):
        summary = job.work("written", block.number)
        if not summary.exists():
            _write_shards(block, job, StratifiedSplit(whole, job.section.held_out), summary)


def _write_shards(block: Block, job: _Job, split: StratifiedSplit, summary: disk.Path) -> None:
    folder = disk.path_of(job.folder)
    paths = {name: folder / job.shard(name, block.number) for name in (TRAIN, REJECTS)}
    paths[HELD_OUT] = job.work("held_out", block.number)
    found = cleaning.write(paths, _decided(job, block), split)
    for reason in (EXACT, NEAR):
        if found.rejected[reason]:
            _count(f"rejected: {reason}", found.rejected[reason])
    _count("kept", found.counts[TRAIN] + found.counts[HELD_OUT])
    disk.write_json(summary, vars(found))


def _decided(job: _Job, block: Block) -> Iterator[Cleaned]:
    reasons = disk.read_json(job.work("reasons", block.number))
    for number, values in enumerate(disk.read_jsonl(job.work("cleaned", block.number))):
        cleaned = Cleaned(**values)
        yield cleaned.rejected(reasons[str(number)]) if str(number) in reasons else cleaned


def _finish(job: _Job, blocks: list[Block], reasons: tuple[str, ...]) -> Result:
    """Adds up the counts, and joins the held-out prompts: `evaluate` and others read them as one file."""
    whole = Result(files=(*(job.shard(TRAIN, block.number) for block in blocks), HELD_OUT))
    whole.rejected.update(dict.fromkeys(reasons, 0))
    for part in disk.each(disk.read_json, [job.work("written", block.number) for block in blocks]):
        whole.add(part)
    with disk.atomic(disk.path_of(job.folder) / HELD_OUT) as temporary, temporary.open("wb") as stream:
        for block in blocks:
            with disk.open_binary(job.work("held_out", block.number)) as part:
                shutil.copyfileobj(part, stream)
    return whole


def _count(name: str, count: int = 1) -> None:
    """Adds to one of Beam's metrics. A bundle that is retried may count twice: the manifest adds up the files."""
    Metrics.counter("prepare", name).inc(count)
