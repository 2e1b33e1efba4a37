"""`python -m eagle3_jax.export`: the best or newest checkpoint -> a draft head that SGLang and vLLM serve.

The folder appears once the head was read back and compared bit by bit. Its `manifest.json` lies beside `config.json`
and `model.safetensors`; engines ignore it. Other uses:

- `--from DIR --to FORM DIR` converts a head of any form, without a target.
- `--check ENGINE --prompts FILE` runs the exported head; `--expect REPORT` compares with an earlier check.
- `--write-target DIR` writes the target for engines that cannot read its own form.
- `--push-to-hub USER/NAME` uploads the head with a model card.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
import typing
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from eagle3_jax.config import ExportConfig, RunConfig, run_file
from eagle3_jax.config.kinds import in_target
from eagle3_jax.data import vocab
from eagle3_jax.export import check, publish
from eagle3_jax.export.write_target import write_target
from eagle3_jax.formats import heads, kinds
from eagle3_jax.formats.forms import FORMS, SPECULATORS
from eagle3_jax.formats.kinds import StoredHead
from eagle3_jax.formats.stored import verifier
from eagle3_jax.models.checkpoint.fetch import Target, fetch, load_target, packaged_model, read_config
from eagle3_jax.models.checkpoint.identity import check_same_target
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.runs import command, command_line, disk, manifest, processes


def run(config: RunConfig, target: Target | None = None) -> None:
    """Exports the head of `config`'s run into its export folder.

    Raises ManifestError: no checkpoints, checkpoints for another target, or another export in the folder.
    CheckpointError: no checkpoint, or a head whose shape is not the config's. DraftFormatError: the form cannot
    represent the head, or the files read back differ.
    """
    from eagle3_jax.training.checkpoint import load_head  # needs the extra `train`, which the other uses do not
    from eagle3_jax.training.kinds.kind import kind_of

    folder, checkpoints = config.folder("export"), config.folder("train")
    trained, step, checksums, token_ids = _chosen(checkpoints)
    target = target or load_target(config.target, only=())
    check_same_target(checkpoints, trained["identity"].get("target"), target.identity)
    identity = {
        "verb": "export",
        "export": run_file.to_dict(config.export),
        "training": manifest.fingerprint({"identity": trained["identity"], "files": None, "results": None}),
        "step": step,
        "head": checksums,
        "vocabulary": disk.digest(checkpoints / vocab.NAME),
        "target": target.identity,
    }
    other = f"run_dir; for this head in another form: --from {folder} --to FORM DIR"
    with disk.lock(folder):
        if not processes.agree(lambda: disk.is_whole(folder)):
            shape = target.model.config
            head = load_head(checkpoints, kind_of(config, shape).abstract(), step)

            def write() -> None:
                draft, name = Draft(head, jnp.asarray(token_ids)), target.identity["name"]
                own = kinds.of_head(head).stored(draft, shape, config.export.dtype, name)
                _write(own, config.export.format, folder, identity)
                if (share := getattr(shape, "partial_rotary_factor", 1)) < 1 and not in_target(own.kind.name):
                    base = f"by base {own.config.rope_theta:g}; the target rotates {share:g} of each of its own"
                    print(f"{folder}: the draft rotates whole heads, {base}", file=sys.stderr)

            processes.agree(write)
        elif processes.agree(lambda: (folder / manifest.NAME).exists() and manifest.begin(folder, identity, other)):
            processes.say(f"{folder}: already finished, nothing to do")
        else:
            raise manifest.ManifestError(f"{folder}: got something else than an export; remove it")


def convert(
    source: str | disk.Path,
    form: str,
    folder: str | disk.Path,
    dtype: str | None = None,
    target: str | None = None,
) -> None:
    """Converts the head in `source`; what it leaves to the target stays there: default aux layers, LM head, embeddings.

    `dtype` as `export.dtype`, None leaves the head's. `target` names the target where the form asks for it
    (speculators, llama.cpp), None is that of the training. Raises DraftFormatError: the head is not usable, or the form
    cannot represent it. FileExistsError: `folder` exists. ManifestError: `source` is a damaged export.
    """
    source, folder = disk.local(disk.path_of(source)), disk.path_of(folder)
    if folder.exists():
        raise FileExistsError(f"{folder}: exists already, expected a new folder: remove it, or name another one")
    head = heads.read(source)
    identity = None
    if (source / manifest.NAME).exists():  # copied, so that the head stays bound to its target
        identity = manifest.read(source, "export")["identity"] | {"converted_to": form}
        trained_with = identity["target"]
        of_target = verifier(trained_with["name"], trained_with["architecture"])
        head = dataclasses.replace(head, verifier=head.verifier or of_target)
    if target is not None:
        architecture = read_config(fetch(target, whole=False)).architecture
        head = dataclasses.replace(head, verifier=verifier(target, architecture))
    _write(head if dtype is None else head.in_dtype(dtype), form, folder, identity)


def _write(head: StoredHead, form: str, folder: disk.Path, identity: dict[str, Any] | None) -> None:
    parameters = sum(tensor.size for tensor in head.tensors.values())
    with disk.atomic(folder) as partial:
        head.kind.write(partial, head, form)
        if identity is not None:
            written = [path.name for path in partial.iterdir()]
            manifest.begin(partial, identity)
            manifest.finish(partial, files=written, parameters=parameters)
    size = sum(disk.size(path) for path in folder.iterdir()) / 2**20
    notes = [
        f"{parameters / 1e6:.1f} M parameters, {size:.0f} MiB, read back bit by bit",
        head.kind.served_by(head, form),
    ]
    if warning := head.kind.warning(head, form):
        notes.append(f"warning: {warning}")
    name = (head.verifier or {}).get("name_or_path")
    if form == SPECULATORS.name and name and packaged_model(name):
        needs = "the target's folder (`--write-target DIR` writes it) and the head in --speculative-config"
        unknown = f"it names its target {name!r}, which vLLM cannot find: `vllm serve` needs"
        notes.append(f"warning: {unknown} {needs}, as tools/serve_vllm.sh prints it")
    for note in filter(None, notes):
        print(f"{folder}: {note}", file=sys.stderr)


def _chosen(folder: disk.Path) -> tuple[dict[str, Any], int, dict[str, int], Int32[np.ndarray, " dv"]]:
    """Chooses the largest acceptance length in the engine, else the newest: manifest, step, checksums, vocabulary."""
    from eagle3_jax.training.checkpoint import CheckpointError, Checkpoints  # needs the extra `train`

    path, expected = folder / manifest.NAME, "expected the output of `python -m eagle3_jax.train`"
    if not path.exists():
        raise manifest.ManifestError(f"{path}: not found, {expected}")
    trained = manifest.load(path)
    with Checkpoints(folder) as checkpoints:
        best, step = checkpoints.best, checkpoints.latest
        if step is None:
            raise CheckpointError(f"{folder}: no checkpoint yet, {expected}")
        if trained["finished"]:
            manifest.read(folder, made_by="train")  # compares digests
        else:
            processes.say(f"{folder}: the training has not finished, its last checkpoint is of step {step}")
        if best is not None:
            step, tau = best
            processes.say(f"{folder}: exporting step {step}, acceptance length {tau:.2f} in the engine")
        own = checkpoints.token_ids(step)
        return trained, step, checkpoints.head_checksums(step), vocab.load(folder) if own is None else own


def arguments_to_convert(argv: Sequence[str]) -> dict[str, Any]:
    """Parses `--from DIR --to FORM DIR` into the arguments of `convert`. Exits with status 2 if they are wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m eagle3_jax.export", description="A draft head of any form -> another form.", allow_abbrev=False
    )
    parser.add_argument("--from", required=True, metavar="DIR", dest="source", help="folder or GGUF file of the head")
    parser.add_argument("--to", required=True, nargs=2, metavar=("FORM", "DIR"), help=" | ".join(FORMS))
    dtypes = typing.get_args(typing.get_type_hints(ExportConfig)["dtype"])
    parser.add_argument("--dtype", choices=dtypes, help="of the weights; q8_0 and q4_0 are llama.cpp's")
    parser.add_argument("--target", metavar="NAME", help="the target, where the head does not name it")
    given = parser.parse_args(argv)
    form, folder = given.to
    if form not in FORMS:
        parser.error(f"--to: got {form!r}, expected one of {', '.join(FORMS)}")
    return {"source": given.source, "form": form, "folder": folder, "dtype": given.dtype, "target": given.target}


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if any(word.partition("=")[0] == "--from" for word in argv):
        conversion = arguments_to_convert(argv)
        with command.run("export"):
            return convert(**conversion)
    config, asked = command_line.read("export", argv)
    given = [flag.replace("_", "-") for flag, value in vars(asked).items() if value]
    ways = [flag for flag in given if flag in _INSTEAD]
    if not ways:
        command.require("train")
    with command.run("export"):
        for flag in given:
            if _NEEDS.get(flag, flag) not in given:
                raise ValueError(f"--{flag}: got it without --{_NEEDS[flag]}, expected both")
        if len(ways) > 1:
            raise ValueError(f"--{ways[1]}: got it with --{ways[0]}, expected one of them")
        if ways:
            _INSTEAD[ways[0]](config, asked)
        else:
            run(config)


def _check(config: RunConfig, asked: argparse.Namespace) -> None:
    where = None
    if asked.check in _ENVIRONMENTS:
        flag, script = _ENVIRONMENTS[asked.check]
        where = getattr(asked, flag.replace("-", "_")) or f".venv-{flag}/bin/python"
        if not pathlib.Path(where).exists():
            raise FileNotFoundError(f"--{flag} {where}: not found; `bash tools/{script}` makes it")
    if asked.check == "sglang":
        where = asked.sglang
        if asked.sglang is None:
            raise ValueError("--sglang: got none, expected the URL of a running server, such as http://127.0.0.1:30000")
        command.require("report")
    print(check.table(check.run(config, asked.prompts, asked.check, where, expect=asked.expect)))


def _push(config: RunConfig, asked: argparse.Namespace) -> None:
    if in_target(config.draft.kind):
        expected = "a head of its own, not a part of its target's checkpoint"
        raise ValueError(f"--push-to-hub: got draft.kind {config.draft.kind!r}, expected {expected}")
    print(publish.push(config, asked.push_to_hub, upload=asked.upload))


# Engine -> the flag that names the Python of its environment, and what makes `.venv-FLAG`.
_ENVIRONMENTS = {"vllm": ("vllm", "install_vllm_cpu.sh"), "llama.cpp": ("llama-cpp", "install_llama_cpp.sh")}
# Flag -> the flag that it needs.
_NEEDS = {"check": "prompts", **dict.fromkeys(("prompts", "vllm", "llama-cpp", "sglang", "expect"), "check")}
_NEEDS |= {"upload": "push-to-hub", "to": "from"}
# Flag -> the work done instead of exporting.
_INSTEAD: dict[str, Callable[[RunConfig, argparse.Namespace], None]] = {
    "check": _check,
    "write-target": lambda config, asked: write_target(load_target(config.target), asked.write_target),
    "push-to-hub": _push,
}


if __name__ == "__main__":
    main()
