"""Names and sizes that SGLang and vLLM take for a head, read from its config.json."""

from __future__ import annotations

import dataclasses
import pathlib

from eagle3_jax.formats import files, mtp
from eagle3_jax.formats.blocks import config as block_config
from eagle3_jax.formats.blocks.kinds import kind_of
from eagle3_jax.formats.stored import DraftFormatError


@dataclasses.dataclass(frozen=True)
class Serving:
    """A head's name, and the flags of the engines for it.

    Attributes:
        label: the method's name. method: vLLM's `method`. algorithm: SGLang's `--speculative-algorithm`.
        drafts: tokens that a block drafts: vLLM's `num_speculative_tokens`, one less than SGLang's
            `--speculative-num-draft-tokens`. None for EAGLE-3 and MTP, whose drafts are chosen.
    """

    label: str = "EAGLE-3"
    method: str = "eagle3"
    algorithm: str = "EAGLE3"
    drafts: int | None = None


def serving(folder: pathlib.Path) -> Serving:
    """Reads the flags of a head. Raises DraftFormatError for a block head whose config.json is refused."""
    values, problems = files.read_config(folder), []
    kind = kind_of(values)
    if kind is None:
        return Serving("MTP", mtp.MTP, "NEXTN") if mtp.is_layer(folder) else Serving()
    config = block_config.read(kind, values, problems)
    if config is None:
        raise DraftFormatError(f"{folder} does not describe a {kind.label} head:\n  " + "\n  ".join(problems))
    return Serving(kind.label, kind.method, kind.algorithm, config.block_size - kind.network.first_row)
