"""prompts -> clean, de-duplicated prompts in `prompts/{train,held_out,rejects}.jsonl`, with a manifest of counts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tqdm

from eagle3_jax.config import RunConfig, SelfSource, TfdsSource, run_file
from eagle3_jax.data import sources
from eagle3_jax.data.duplicates import Duplicates, signature
from eagle3_jax.data.split import StratifiedSplit, by_category
from eagle3_jax.prepare import cleaning, self_prompting
from eagle3_jax.prepare.cleaning import FINDINGS, HELD_OUT, REJECTS, TRAIN, WORK, Cleaned, Cleaner, Result
from eagle3_jax.prepare.self_prompting import Written
from eagle3_jax.runs import command, command_line, disk, manifest, processes


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the verb from its command line."""
    config, _ = command_line.read("prepare", argv)
    section = config.prepare
    extras = {"beam": section.runner == "beam", "report": section.personal_data_engine == "cloud_dlp"}
    unused = [] if any(isinstance(source, TfdsSource) for source in section.sources) else ["tensorflow_datasets"]
    command.require("prepare", *(extra for extra, needed in extras.items() if needed), unused=unused)
    with command.run("prepare"):
        prepare(config)


def prepare(config: RunConfig) -> None:
    """Prepares a run's prompts, unless they are finished. Raises ValueError: other work, or no two prompts; OSError."""
    folder = config.folder("prepare")
    with manifest.claim(folder, _identity(config)) as finished:
        if finished:
            processes.say(f"prepare: {folder} is finished already")
        else:
            written = {
                number: self_prompting.write(config, source, folder / f"self_{number}.jsonl")
                for number, source in enumerate(config.prepare.sources)
                if isinstance(source, SelfSource)
            }
            processes.agree(lambda: _prepare(config, folder, written))
        processes.agree(lambda: _remove_work(folder))


def _prepare(config: RunConfig, folder: disk.Path, written: Written) -> None:
    run = _in_process
    if config.prepare.runner == "beam":
        from eagle3_jax.prepare.beam import run  # late: the extra `beam`
    if config.prepare.personal_data_engine == "cloud_dlp":
        from eagle3_jax.prepare import cloud_dlp  # late: the extra `report`

        processes.say(f"prepare: {cloud_dlp.foretold(config.prepare)}")
    found = run(config, folder, written)
    manifest.finish(folder, files=found.files, **found.for_manifest())
    train, held_out, rejects = (found.counts[name] for name in (TRAIN, HELD_OUT, REJECTS))
    print(f"prepare: {train} to train, {held_out} held out, {rejects} rejected (why: {REJECTS}) -> {folder}")


def _in_process(config: RunConfig, folder: disk.Path, written: Written) -> Result:
    """Runs the filters in one pass, for a few hundred thousand prompts: those kept stay in memory."""
    section = config.prepare
    cleaner, duplicates = Cleaner(section, folder / FINDINGS), Duplicates(section.near_duplicate)
    found: list[Cleaned] = []
    records = (
        (sources.label(source), record)
        for number, source in enumerate(section.sources)
        for record in sources.read(source, written.get(number, ()))
    )
    for cleaned in tqdm.tqdm(cleaner.clean(records), desc="prepare", unit=" prompts", mininterval=1.0):
        command.stop_point()
        if cleaned.reason is None:
            sign = functools.partial(signature, cleaned.asked, section.near_duplicate)
            reason = duplicates.check(cleaned.identity, sign)
            cleaned = cleaned.rejected(reason) if reason else cleaned
        found.append(cleaned)
    split = StratifiedSplit(by_category(prompt.place for prompt in found if prompt.reason is None), section.held_out)
    whole = cleaning.write({name: folder / name for name in (TRAIN, HELD_OUT, REJECTS)}, found, split)
    for reason in cleaner.benchmarks.reasons:  # one with no match is counted as 0
        whole.rejected[reason] += 0
    return whole


def _identity(config: RunConfig) -> dict[str, Any]:
    section = config.prepare
    # The forms make the same: one goes on where the other has finished.
    what = {name: value for name, value in run_file.to_dict(section).items() if name not in ("runner", "beam_options")}
    service = what.pop("cloud_dlp")
    if section.personal_data_engine == "cloud_dlp":
        what["cloud_dlp"] = {name: service[name] for name in ("location", "info_types", "min_likelihood")}
    identity: dict[str, Any] = {"verb": "prepare", "prepare": what, "seed": config.seed}
    identity["inputs"] = {}
    files = [source.path for source in section.sources if isinstance(source, sources.FileSource)]
    for name, paths in (("sources: path", files), ("benchmarks", section.benchmarks)):
        for path in paths:
            try:
                identity["inputs"][path] = disk.digest(path)
            except OSError as error:
                raise ValueError(f"prepare.{name}: got {path!r} ({error.strerror})") from error
    if any(isinstance(source, SelfSource) for source in section.sources):
        identity["target"] = run_file.to_dict(config.target)
    return identity


def _remove_work(folder: disk.Path) -> None:
    """Removes the logs, with the personal data that the target invented in self-prompting, and Beam's files."""
    for path in (*folder.glob("self_*.jsonl"), *folder.glob(FINDINGS), folder / WORK):
        disk.remove(path)


if __name__ == "__main__":
    main()
