"""The kinds of block heads, and their names in SGLang, vLLM and speculators."""

from __future__ import annotations

import dataclasses
from typing import Any

from eagle3_jax.formats.fields import architecture
from eagle3_jax.models.drafts.dflash import DFlash
from eagle3_jax.models.drafts.dflash2 import DFlash2
from eagle3_jax.models.drafts.dspark import DSpark


@dataclasses.dataclass(frozen=True)
class BlockKind:
    """A kind of block head.

    Attributes:
        name: `speculators_model_type`.
        label: the method's name in tables and errors.
        architectures: names in config.json; the first is written.
        method: vLLM's `method`. algorithm: SGLang's `--speculative-algorithm`.
    """

    name: str
    label: str
    network: type[DFlash]
    architectures: tuple[str, ...]
    method: str
    algorithm: str


DFLASH = BlockKind("dflash", "DFlash", DFlash, ("DFlashDraftModel",), "dflash", "DFLASH")
# SpecForge's raw export has the second name.
DSPARK = BlockKind("dspark", "DSpark", DSpark, ("Qwen3DSparkModel", "DSparkDraftModel"), "dspark", "DSPARK")
# vLLM and SGLang tell DFlash2 from DFlash by the architecture alone.
DFLASH2 = BlockKind("dflash2", "DFlash2", DFlash2, ("DFlash2DraftModel",), "dflash", "DFLASH")
KINDS = (DFLASH, DSPARK, DFLASH2)
SPECULATORS_TYPE = "speculators_model_type"


def kind_of(values: dict[str, Any]) -> BlockKind | None:
    """Tells the kind of a block head from its config.json; None for every other draft."""
    if SPECULATORS_TYPE in values:
        return next((kind for kind in KINDS if kind.name == values[SPECULATORS_TYPE]), None)
    return next((kind for kind in KINDS if architecture(values) in kind.architectures), None)


def kind_of_head(head: DFlash) -> BlockKind:
    return next(kind for kind in KINDS if type(head) is kind.network)
