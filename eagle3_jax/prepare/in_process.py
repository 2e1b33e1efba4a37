"""Runs the filters in one pass of this process, for a few hundred thousand prompts: those kept stay in memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tqdm

from eagle3_jax.config import RunConfig
from eagle3_jax.data.duplicates import Duplicates
from eagle3_jax.data.split import StratifiedSplit, by_category
from eagle3_jax.prepare import reading
from eagle3_jax.prepare.cleaning import Cleaned, Cleaner
from eagle3_jax.prepare.result import FINDINGS, HELD_OUT, REJECTS, TRAIN, Result, line
from eagle3_jax.prepare.self_prompting import Written
from eagle3_jax.runs import command, disk


def run(config: RunConfig, folder: disk.Path, written: dict[int, list[Written]]) -> Result:
    """Writes the prompts.

    Args:
        written: index of a source of kind `self` -> what the target wrote for it.

    Raises:
        ValueError: fewer than two usable prompts. OSError: an unreadable source.
    """
    section = config.prepare
    cleaner, duplicates = Cleaner(section, folder / FINDINGS), Duplicates(section.near_duplicate)
    # A benchmark with no match is counted as 0.
    result, kept, rejects = Result(), list[Cleaned](), list[dict[str, Any]]()
    result.rejected.update(dict.fromkeys(cleaner.benchmarks.reasons, 0))
    records = (
        (reading.label(source), record)
        for number, source in enumerate(section.sources)
        for record in reading.read(source, written.get(number))
    )
    for cleaned in tqdm.tqdm(cleaner.clean(records), desc="prepare", unit=" prompts", mininterval=1.0):
        command.stop_point()
        result.read[cleaned.label] += 1
        result.personal.update(cleaned.personal)
        if cleaned.reason is None and (reason := duplicates.check(cleaned.asked)):
            cleaned = cleaned.rejected(reason)
        if cleaned.reason is None:
            kept.append(cleaned)
        else:
            result.rejected[cleaned.reason] += 1
            rejects.append(cleaned.reject())
    split = StratifiedSplit(by_category(prompt.place for prompt in kept), section.held_out)
    parts: dict[str, list[dict[str, Any]]] = {TRAIN: [], HELD_OUT: [], REJECTS: rejects}
    for prompt in kept:
        name = HELD_OUT if split.holds_out(*prompt.place) else TRAIN
        parts[name].append(prompt.prompt)
        result.keep(prompt.prompt, name)
    for name, found in parts.items():
        _write_jsonl(folder / name, found)
    return result


def _write_jsonl(path: disk.Path, records: Iterable[dict[str, Any]]) -> None:
    with disk.atomic(path) as temporary, temporary.open("w", encoding="utf-8") as stream:
        stream.writelines(map(line, records))
