"""Names and sizes that SGLang and vLLM take for a head, read from its config.json."""

from __future__ import annotations

import dataclasses
import pathlib

from eagle3_jax.formats import files
from eagle3_jax.formats.blocks import config as block_config
from eagle3_jax.formats.blocks.kinds import kind_of
from eagle3_jax.formats.stored import DraftFormatError


@dataclasses.dataclass(frozen=True)
class Serving:
    """Flags of the engines for a head.

    Attributes:
        method: vLLM's `method`. algorithm: SGLang's `--speculative-algorithm`.
        drafts: tokens that a block drafts: vLLM's `num_speculative_tokens`, one less than SGLang's
            `--speculative-num-draft-tokens`. None for EAGLE-3, whose drafts are chosen.
    """

    method: str = "eagle3"
    algorithm: str = "EAGLE3"
    drafts: int | None = None


def serving(folder: pathlib.Path) -> Serving:
    """Reads the flags of a head. Raises DraftFormatError for a block head whose config.json is refused."""
    values, problems = files.read_config(folder), []
    kind = kind_of(values)
    if kind is None:
        return Serving()
    config = block_config.read(kind, values, problems)
    if config is None:
        raise DraftFormatError(f"{folder} does not describe a {kind.label} head:\n  " + "\n  ".join(problems))
    return Serving(kind.method, kind.algorithm, config.block_size - kind.network.first_row)
