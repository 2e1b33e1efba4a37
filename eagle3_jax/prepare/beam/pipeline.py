"""Runs the filters on Apache Beam, for millions of prompts: the same functions and output, no list of all prompts.

Two pipelines, which meet in files. The first reads the sources in blocks, cleans each record, and groups signatures by
identity and by band: whatever workers find to be duplicates is written as relations, by block. `keeping` decides in
order. The second writes what is kept, a sorted shard for each block. No text is grouped: a worker holds a line of a
block, or the signatures of one band. A block that is written is not made again, so an interrupted run goes on.
"""
# The extra `beam` is not in the tests' environment: it holds back versions of other packages.

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import itertools
import shlex
import shutil
from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.metrics.metric import Metrics
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.pvalue import AsSingleton, TaggedOutput

from eagle3_jax.config import PrepareConfig, RunConfig
from eagle3_jax.data import duplicates
from eagle3_jax.data.split import Bounds, StratifiedSplit, by_category, joined
from eagle3_jax.prepare import reading
from eagle3_jax.prepare.beam import blocks as blocks_of
from eagle3_jax.prepare.beam import keeping
from eagle3_jax.prepare.beam.blocks import Block
from eagle3_jax.prepare.beam.keeping import Fate, Relation
from eagle3_jax.prepare.cleaning import Cleaned, Cleaner
from eagle3_jax.prepare.result import HELD_OUT, REJECTS, TRAIN, WORK, Result, line
from eagle3_jax.prepare.self_prompting import Written
from eagle3_jax.runs import command, disk, processes

# A record's place in the order of all: its block, and its number there. Signatures travel as bytes.
_WITHIN = 32
_Signed = tuple[bytes, int, bytes, bytes]  # identity, place, hash of the shingles, bands
_Node = tuple[int, bytes]  # place, shingles
_Related = tuple[int, tuple[int, list[int], int]]  # block, (place, smaller places, Relation)


@dataclasses.dataclass(frozen=True)
class _Job:
    """What every worker knows.

    Attributes:
        folder: of the output.
        blocks: how many there are.
    """

    section: PrepareConfig
    folder: str
    blocks: int

    def work(self, kind: str, number: int) -> disk.Path:
        """A file of a block, gone when all is done."""
        return disk.path_of(self.folder) / WORK / kind / f"{number:05d}"

    def share(self, key: bytes) -> int:
        """Which of as many workers as there are blocks groups a key: each has as many prompts as a block."""
        return int.from_bytes(key[:8], "little") % self.blocks

    def shard(self, name: str, number: int) -> str:
        """The name of a block's share of an output file."""
        stem = name.removesuffix(".jsonl")
        return name if self.blocks == 1 else f"{stem}-{number:05d}-of-{self.blocks:05d}.jsonl"

    @contextlib.contextmanager
    def explained(self, block: Block) -> Iterator[None]:
        """Notes what a user can mend, since each runner says it in its own way."""
        try:
            yield
        except (OSError, ValueError) as error:
            with contextlib.suppress(OSError):
                disk.write_json(_ready(self.work("failures", block.number)), {"error": command.sentence(error)})
            raise


def run(config: RunConfig, folder: disk.Path, written: dict[int, list[Written]]) -> Result:
    """Writes the prompts; TRAIN and REJECTS in shards.

    Args:
        written: index of a source of kind `self` -> what the target wrote for it.

    Raises:
        ValueError: fewer than two usable prompts, an unreadable source, options that Beam refuses, a failed pipeline.
    """
    section = config.prepare
    _options(section)
    reasons = Cleaner(section).benchmarks.reasons
    blocks = blocks_of.plan(config, written, folder / WORK)
    job = _Job(section, str(folder), len(blocks))
    processes.say(f"prepare: {len(blocks)} blocks of the sources")
    if not (done := folder / WORK / "related.json").exists():
        _run(job, blocks, _relate)
        disk.write_json(done, {})
    _decide(job, blocks)
    _run(job, blocks, _write)
    return _finish(job, blocks, reasons)


def _options(section: PrepareConfig) -> PipelineOptions:
    """Raises ValueError: Beam refuses them."""
    said = io.StringIO()  # argparse says there what is wrong, and exits
    try:
        with contextlib.redirect_stderr(said):
            options = PipelineOptions(shlex.split(section.beam_options))
            options.get_all_options()
        beam.Pipeline(options=options)  # knows the runners
    except (ValueError, ImportError, SystemExit) as error:
        reason = (said.getvalue() or str(error)).strip().splitlines()[-1]
        expected = "options of Apache Beam"
        raise ValueError(
            f"prepare.beam_options: got {section.beam_options!r} ({reason}), expected {expected}"
        ) from error
    return options


def _run(job: _Job, blocks: list[Block], build: Any) -> None:
    """Runs a pipeline to its end. Raises ValueError: what a worker noted, or the last that Beam said."""
    failures = disk.path_of(job.folder) / WORK / "failures"
    disk.remove_folder(failures)
    said, cause = "", None
    try:
        pipeline = beam.Pipeline(options=_options(job.section))
        build(job, pipeline | "blocks" >> beam.Create(blocks) | beam.Reshuffle())
        state = pipeline.run().wait_until_finish()
        if str(state) != "DONE":
            said = f"state {state}"
    except Exception as error:  # of any kind: each runner has its own
        said, cause = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__, error
    if said:
        noted = [job.work("failures", block.number) for block in blocks]
        noted = [path for path in noted if path.exists()]
        if noted:
            raise ValueError(disk.read_json(noted[0])["error"]) from cause
        raise ValueError(f"prepare.runner: beam did not finish: {said}") from cause


# ------------------------------------------------------------------------------------------------ what is a duplicate
def _relate(job: _Job, blocks: Any) -> None:
    """Cleans all records, and writes for each block how its prompts are related to smaller ones."""
    signed = blocks | beam.FlatMap(_clean, job) | beam.FlatMap(_sign, job)
    firsts = (
        signed | "by identity" >> beam.GroupByKey() | beam.FlatMap(_firsts, job).with_outputs("related", main="bands")
    )
    near = (
        firsts.bands
        | "by band" >> beam.GroupByKey()
        | "in company" >> beam.FlatMap(_in_company)
        | "of a block" >> beam.GroupByKey()
        | "nodes" >> beam.FlatMap(_nodes, job)
        | "by company" >> beam.GroupByKey()
        | "near" >> beam.FlatMap(_near, job.section.near_duplicate)
    )
    _ = (
        (firsts.related, near)
        | beam.Flatten()
        | "by block" >> beam.GroupByKey()
        | "relations" >> beam.Map(_write_relations, job)
    )


_cleaner = functools.lru_cache(1)(Cleaner)  # one for each worker


def _clean(block: Block, job: _Job) -> Iterator[Block]:
    """Block -> block, whose cleaned records are in a file: a line each, in order."""
    with job.explained(block):
        path = job.work("cleaned", block.number)
        if not path.with_suffix(".json").exists():
            _write_cleaned(block, job, path)
        yield block


def _write_cleaned(block: Block, job: _Job, path: disk.Path) -> None:
    label, count = reading.label(job.section.sources[block.source]), 0
    with disk.atomic(_ready(path)) as temporary, temporary.open("w", encoding="utf-8") as stream:
        records = ((label, record) for record in blocks_of.read(job.section, block))
        for cleaned in _cleaner(job.section).clean(records):
            stream.write(line(dataclasses.asdict(cleaned)))
            count += 1
            _count(f"read: {label}")
            for kind, found in cleaned.personal.items():
                _count(f"personal data: {kind}", found)
            if cleaned.reason is not None:
                _count(f"rejected: {cleaned.reason}")
    disk.write_json(path.with_suffix(".json"), {"records": count})


def _sign(block: Block, job: _Job) -> Iterator[tuple[int, list[_Signed]]]:
    """Block -> (share, signed) of the prompts that were not rejected, by their identities."""
    shares: dict[int, list[_Signed]] = {}
    for place, cleaned in _places(job, block.number):
        if cleaned.reason is None:
            signature, identity = _signature(job, cleaned), bytes.fromhex(cleaned.identity)
            same = hashlib.blake2b(signature.shingles.tobytes(), digest_size=16).digest()
            shares.setdefault(job.share(identity), []).append((identity, place, same, signature.bands.tobytes()))
    yield from shares.items()


def _firsts(element: tuple[int, Iterable[list[_Signed]]], job: _Job) -> Iterator[tuple[int, bytes] | TaggedOutput]:
    """A share of the identities -> the bands of the first with each set of shingles; the others are its copies."""
    places: dict[bytes, dict[tuple[bytes, bytes], list[int]]] = {}
    for identity, place, same, bands in itertools.chain.from_iterable(element[1]):
        places.setdefault(identity, {}).setdefault((same, bands), []).append(place)
    shares: dict[int, list[bytes]] = {}
    for of_identity in places.values():
        firsts = {min(copies): signed for signed, copies in of_identity.items()}
        for first, (_, bands) in firsts.items():
            for start in range(0, len(bands), 8):
                band = bands[start : start + 8]
                shares.setdefault(job.share(band), []).append(band + first.to_bytes(8, "little"))
        for signed, copies in of_identity.items():
            for place, (first, other) in itertools.product(copies, firsts.items()):
                if first < place:
                    relation = Relation.COPY if signed == other else Relation.SAME
                    yield TaggedOutput("related", _related(place, [first], relation))
    for share, rows in shares.items():
        yield share, b"".join(rows)


def _related(place: int, smaller: list[int], relation: Relation) -> _Related:
    return place >> _WITHIN, (place, smaller, int(relation))


def _in_company(element: tuple[int, Iterable[bytes]]) -> Iterator[tuple[int, bytes]]:
    """A share of the bands -> the rows (company, place) of those that several prompts have, by block.

    A company is a set of prompts, as a hash: most bands of near duplicates have the same one, which is compared once.
    """
    rows = np.frombuffer(b"".join(element[1]), "<u8").reshape(-1, 2)
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    starts = np.flatnonzero(np.diff(rows[:, 0], prepend=~rows[:1, 0]))
    ends = np.append(starts[1:], len(rows))
    several = ends - starts > 1
    blocks: dict[int, set[bytes]] = {}
    for start, end in zip(starts[several].tolist(), ends[several].tolist(), strict=True):
        places = rows[start:end, 1]
        company = hashlib.blake2b(places.tobytes(), digest_size=8).digest()
        for place in places.tolist():
            blocks.setdefault(place >> _WITHIN, set()).add(company + place.to_bytes(8, "little"))
    for block, found in blocks.items():
        yield block, b"".join(sorted(found))


def _nodes(element: tuple[int, Iterable[bytes]], job: _Job) -> Iterator[tuple[bytes, _Node]]:
    """The prompts of a block that have company -> (company, node), for each of these. Few have, so few travel."""
    number, found = element
    rows, wanted = b"".join(found), dict[int, set[bytes]]()
    for start in range(0, len(rows), 16):
        wanted.setdefault(int.from_bytes(rows[start + 8 : start + 16], "little"), set()).add(rows[start : start + 8])
    for place, cleaned in _places(job, number):
        if place in wanted:
            shingles = _signature(job, cleaned).shingles.tobytes()
            for company in sorted(wanted[place]):
                yield company, (place, shingles)


def _near(element: tuple[bytes, Iterable[_Node]], threshold: float) -> Iterator[_Related]:
    """A company -> those that are near a smaller one."""
    nodes = [(place, np.frombuffer(shingles, "<u8")) for place, shingles in sorted(element[1])]
    for index, (place, shingles) in enumerate(nodes):
        near = [other for other, its in nodes[:index] if duplicates.jaccard(shingles, its) >= threshold]
        if near:
            yield _related(place, near, Relation.NEAR)


def _write_relations(element: tuple[int, Iterable[tuple[int, list[int], int]]], job: _Job) -> None:
    number, found = element
    rows = {(place, other, relation) for place, smaller, relation in found for other in smaller}
    relations = np.array(sorted(rows), np.int64)
    with disk.atomic(_ready(job.work("relations", number))) as temporary, temporary.open("wb") as stream:
        np.save(stream, relations, allow_pickle=False)


# --------------------------------------------------------------------------------------------------- who of them stays
def _decide(job: _Job, blocks: list[Block]) -> None:
    """Decides the fate of all prompts, block by block in order, and writes it."""
    paths = [job.work("cleaned", block.number).with_suffix(".json") for block in blocks]
    sizes = [found["records"] for found in disk.each(disk.read_json, paths)]
    starts = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
    kept = np.ones(int(starts[-1]), bool)
    for block in blocks:
        start, stop = starts[block.number : block.number + 2].tolist()
        relations = np.zeros((0, 3), np.int64)
        if (path := job.work("relations", block.number)).exists():
            relations = np.load(io.BytesIO(disk.read_bytes(path)), allow_pickle=False)
        for column in (0, 1):  # from places to numbers of records
            places = relations[:, column]
            relations[:, column] = starts[places >> _WITHIN] + (places & ((1 << _WITHIN) - 1))
        fates = keeping.decide(relations, kept, start, stop)
        with disk.atomic(_ready(job.work("fates", block.number))) as temporary:
            temporary.write_bytes(fates.tobytes())


# ----------------------------------------------------------------------------------------------------------- what stays
def _write(job: _Job, blocks: Any) -> None:
    """Writes each block's share of the output."""
    whole = blocks | beam.Map(_bounds, job) | beam.CombineGlobally(joined).without_defaults()
    _ = blocks | beam.Map(_write_block, job, AsSingleton(whole, {}))


def _bounds(block: Block, job: _Job) -> dict[str, Bounds]:
    """The bounds of a block's kept prompts."""
    return by_category(cleaned.place for cleaned in _fated(job, block) if cleaned.reason is None)


def _write_block(block: Block, job: _Job, whole: dict[str, Bounds]) -> None:
    """Writes a block's shards, and a file with their counts."""
    with job.explained(block):
        summary = job.work("written", block.number).with_suffix(".json")
        if not summary.exists():
            _write_shards(block, job, StratifiedSplit(whole, job.section.held_out), summary)


def _write_shards(block: Block, job: _Job, split: StratifiedSplit, summary: disk.Path) -> None:
    part = Result()
    with contextlib.ExitStack() as stack:
        files = {}
        for name in (TRAIN, HELD_OUT, REJECTS):
            temporary = stack.enter_context(disk.atomic(_ready(_output(job, name, block.number))))
            files[name] = stack.enter_context(temporary.open("w", encoding="utf-8"))
        for cleaned in _fated(job, block):
            part.read[cleaned.label] += 1
            part.personal.update(cleaned.personal)
            if cleaned.reason is None:
                name = HELD_OUT if split.holds_out(*cleaned.place) else TRAIN
                part.keep(cleaned.prompt, name)
                files[name].write(line(cleaned.prompt))
                _count("kept")
            else:
                part.rejected[cleaned.reason] += 1
                files[REJECTS].write(line(cleaned.reject()))
                if cleaned.reason in (duplicates.EXACT, duplicates.NEAR):
                    _count(f"rejected: {cleaned.reason}")
    disk.write_json(_ready(summary), vars(part))


def _finish(job: _Job, blocks: list[Block], reasons: Iterable[str]) -> Result:
    """Adds up the counts, and joins the held-out prompts: `evaluate` and others read them as one file."""
    result = Result()
    result.rejected.update(dict.fromkeys(reasons, 0))
    summaries = [job.work("written", block.number).with_suffix(".json") for block in blocks]
    for part in disk.each(disk.read_json, summaries):
        result.add(part)
    folder = disk.path_of(job.folder)
    with disk.atomic(folder / HELD_OUT) as temporary, temporary.open("wb") as stream:
        for block in blocks:
            with disk.open_binary(_output(job, HELD_OUT, block.number)) as part:
                shutil.copyfileobj(part, stream)
    result.files = (*(job.shard(TRAIN, block.number) for block in blocks), HELD_OUT)
    return result


def _output(job: _Job, name: str, number: int) -> disk.Path:
    """Where a block's share of an output file is written."""
    return job.work("held_out", number) if name == HELD_OUT else disk.path_of(job.folder) / job.shard(name, number)


# ------------------------------------------------------------------------------------------------------------- ground
def _places(job: _Job, number: int) -> Iterator[tuple[int, Cleaned]]:
    """The records of a block, as `_Clean` wrote them, with their places."""
    records = disk.read_jsonl(job.work("cleaned", number))
    return ((number << _WITHIN | index, Cleaned(**values)) for index, values in enumerate(records))


def _signature(job: _Job, cleaned: Cleaned) -> duplicates.Signature:
    return duplicates.signature(cleaned.asked, job.section.near_duplicate)


def _fated(job: _Job, block: Block) -> Iterator[Cleaned]:
    """The records of a block; duplicates are rejected."""
    fates = disk.read_bytes(job.work("fates", block.number))
    for (_, cleaned), fate in zip(_places(job, block.number), fates, strict=True):
        if fate == Fate.KEPT:
            yield cleaned
        else:
            yield cleaned.rejected(duplicates.EXACT if fate == Fate.EXACT else duplicates.NEAR)


def _ready(path: disk.Path) -> disk.Path:
    """The path, in a folder that exists."""
    disk.make_folder(path.parent)
    return path


def _count(name: str, count: int = 1) -> None:
    """Adds to one of Beam's metrics. A bundle that is retried may count twice: the manifest adds up the files."""
    Metrics.counter("prepare", name).inc(count)
