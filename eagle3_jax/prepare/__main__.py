"""prompts -> clean, de-duplicated prompts in train.jsonl and held_out.jsonl.

`python -m eagle3_jax.prepare --config configs/quickstart.yaml` reads the sources of the section `prepare`, normalises
and filters their prompts, and writes `prompts/{train,held_out,rejects}.jsonl` with a manifest of the counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eagle3_jax import config as configs
from eagle3_jax.prepare import self_prompting
from eagle3_jax.prepare.result import HELD_OUT, REJECTS, TRAIN, WORK
from eagle3_jax.prepare.self_prompting import Written
from eagle3_jax.runs import command, command_line, disk, manifest, processes

_LATER = ("weights", "quantise_vocabulary")  # options of a target of later versions


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the verb from its command line."""
    config, _ = command_line.read("prepare", argv)
    command.require("prepare", *(["beam"] if config.prepare.runner == "beam" else []))
    with command.run("prepare"):
        prepare(config)


def prepare(config: configs.RunConfig) -> None:
    """Prepares the prompts of a run; does nothing when they are finished.

    Raises:
        ValueError: fewer than two usable prompts, or other work in the folder (ManifestError).
        OSError: an unreadable source file.
    """
    folder = config.folder("prepare")
    with manifest.claim(folder, _identity(config)) as finished:
        if finished:
            processes.say(f"prepare: {folder} is finished already")
        else:
            written = {
                number: self_prompting.write(config, source, folder / f"self_{number}.jsonl")
                for number, source in enumerate(config.prepare.sources)
                if isinstance(source, configs.SelfSource)
            }
            processes.agree(lambda: _prepare(config, folder, written))
        processes.agree(lambda: _remove_work(folder))


def _prepare(config: configs.RunConfig, folder: disk.Path, written: dict[int, list[Written]]) -> None:
    """Filters and writes the prompts. `written`: index of a source of kind `self` -> what the target wrote for it."""
    if config.prepare.runner == "beam":
        from eagle3_jax.prepare import on_beam as form  # late: the extra `beam`
    else:
        from eagle3_jax.prepare import in_process as form
    result = form.run(config, folder, written)
    manifest.finish(folder, files=result.files, **result.for_manifest())
    train, held_out, rejects = (result.counts[name] for name in (TRAIN, HELD_OUT, REJECTS))
    print(f"prepare: {train} to train, {held_out} held out, {rejects} rejected (why: {REJECTS}) -> {folder}")


def _identity(config: configs.RunConfig) -> dict[str, Any]:
    section = config.prepare
    # The forms make the same: one goes on where the other has finished.
    what = {name: value for name, value in configs.to_dict(section).items() if name not in ("runner", "beam_options")}
    identity: dict[str, Any] = {"verb": "prepare", "prepare": what, "seed": config.seed}
    identity["inputs"] = {}
    files = [s.path for s in section.sources if isinstance(s, configs.JsonlSource | configs.ConversationsSource)]
    for name, paths in (("sources: path", files), ("benchmarks", section.benchmarks)):
        for path in paths:
            try:
                identity["inputs"][path] = disk.digest(path)
            except OSError as error:
                raise ValueError(f"prepare.{name}: got {path!r} ({error.strerror})") from error
    if any(isinstance(source, configs.SelfSource) for source in section.sources):
        target = configs.to_dict(config.target)
        # Manifests of earlier versions do not name what was not there.
        identity["target"] = {name: x for name, x in target.items() if x or name not in _LATER}
    return identity


def _remove_work(folder: disk.Path) -> None:
    """Removes the logs of self-prompting, with the personal data that the target invented, and Beam's files."""
    for path in folder.glob("self_*.jsonl"):
        disk.remove_log(path)
    disk.remove_folder(folder / WORK)


if __name__ == "__main__":
    main()
