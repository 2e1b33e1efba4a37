"""`python -m eagle3_jax.export`: the best or newest checkpoint -> a draft head that SGLang and vLLM serve.

The folder appears only after it was read back and every bit of it compared. Its `manifest.json` stands beside
`config.json` and `model.safetensors`, where engines do not look.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax import command, manifest, processes
from eagle3_jax import config as configuration
from eagle3_jax.config import RunConfig
from eagle3_jax.data import vocab
from eagle3_jax.formats import sglang
from eagle3_jax.formats.sglang_config import served_by
from eagle3_jax.models.draft import Draft, DraftHeadConfig
from eagle3_jax.models.identity import check_same_target
from eagle3_jax.models.llama import LlamaConfig
from eagle3_jax.models.registry import Target, load_target
from eagle3_jax.training.checkpoint import CheckpointError, Checkpoints, load_head


def run(config: RunConfig, target: Target | None = None) -> None:
    """Exports the head of `config`'s run into its export folder.

    Args:
        target: an already loaded target; None loads `config.target`, but none of its parameters.

    Raises:
        ManifestError: checkpoints are missing, or were trained for another target, or the folder holds another export.
        CheckpointError: no checkpoint, or of a head of another shape than the config's.
        DraftFormatError: the head cannot be written in this form, or does not come back as it was.
    """
    folder = config.folder("export")
    checkpoints = config.folder("train")
    trained, step = _chosen(checkpoints)
    token_ids = vocab.load(checkpoints)
    target = target or load_target(config.target, only=())
    check_same_target(checkpoints, trained["identity"].get("target"), target.identity)
    identity = {
        "verb": "export",
        "export": configuration.to_dict(config.export),
        "training": manifest.fingerprint({"identity": trained["identity"], "files": None, "results": None}),
        "step": step,
        "vocabulary": manifest.digest(checkpoints / vocab.NAME),
        "target": target.identity,
    }
    with manifest.lock(folder):
        if not processes.agree(folder.exists):
            head = load_head(checkpoints, DraftHeadConfig.for_target(config.draft, target.model.config), step)
            draft = Draft(head, jnp.asarray(token_ids))
            processes.agree(lambda: _write(config, identity, draft, folder, target.model.config))
        elif processes.agree(lambda: (folder / manifest.NAME).exists() and manifest.begin(folder, identity)):
            processes.say(f"{folder}: already finished, nothing to do")
        else:
            raise manifest.ManifestError(f"{folder}: got something else than an export; remove it")


def _write(
    config: RunConfig,
    identity: dict[str, Any],
    draft: Draft,
    folder: pathlib.Path,
    target: LlamaConfig,
) -> None:
    with manifest.atomic(folder) as partial:
        sglang.write_draft(partial, draft, target=target, dtype=config.export.dtype)
        _verify(partial, draft, target, config.export.dtype)
        manifest.begin(partial, identity)
        parameters = sum(leaf.size for leaf in jax.tree.leaves(draft.head))
        manifest.finish(partial, files=(sglang.CONFIG, sglang.WEIGHTS), parameters=parameters)
    size = (folder / sglang.WEIGHTS).stat().st_size / 2**20
    print(f"{folder}: {parameters / 1e6:.1f} M parameters, {size:.0f} MiB, read back bit by bit", file=sys.stderr)
    print(f"{folder}: {served_by(draft.head.config, target)}", file=sys.stderr)


def _chosen(folder: pathlib.Path) -> tuple[dict[str, Any], int]:
    """Manifest of the training, and the step of the checkpoint that the engine accepted most of, or the newest.

    A training that was stopped early will do.

    Raises:
        ManifestError, CheckpointError: there is none.
    """
    path = folder / manifest.NAME
    if not path.exists():
        raise manifest.ManifestError(f"{path}: not found, expected the output of `python -m eagle3_jax.train`")
    trained = manifest.load(path)
    with Checkpoints(folder) as checkpoints:
        best, step = checkpoints.best, checkpoints.latest
    if step is None:
        raise CheckpointError(f"{folder}: no checkpoint yet, expected the output of `python -m eagle3_jax.train`")
    if trained["finished"]:
        manifest.read(folder, made_by="train")  # compares digests
    else:
        processes.say(f"{folder}: the training has not finished, its last checkpoint is of step {step}")
    if best is not None:
        step, tau = best
        processes.say(f"{folder}: exporting step {step}, acceptance length {tau:.2f} in the engine")
    return trained, step


def _verify(folder: pathlib.Path, draft: Draft, target: LlamaConfig, dtype: str) -> None:
    """Reads the folder back and compares. Raises DraftFormatError."""
    again = sglang.load_draft(folder, target=target, dtype=jnp.dtype(dtype))
    expected = jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(dtype)), draft.head)
    pairs = zip(
        jax.tree.leaves((again.head, again.token_ids)), jax.tree.leaves((expected, draft.token_ids)), strict=True
    )
    if again.head.config != draft.head.config or not all(np.array_equal(got, wanted) for got, wanted in pairs):
        raise sglang.DraftFormatError(f"{folder}: what was written does not read back the same; is the disk full?")


def main(argv: Sequence[str] | None = None) -> None:
    config, _ = configuration.from_command_line("export", (__doc__ or "").splitlines()[0], argv)
    with command.run("export"):
        run(config)


if __name__ == "__main__":
    main()
