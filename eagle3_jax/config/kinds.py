"""The kinds of drafts, one row each; the modules that a row names lie in higher layers and are imported on demand."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class KindRow:
    """Where a kind of draft is written down, as "module:name"."""

    record: str  # its `formats.kinds.DraftKind`
    training: str | None = None  # its `training.kinds.kind.TrainingKind`; None: it is not trained
    in_target: bool = False  # whether a target's own checkpoint may hold it: its name is then a draft, as a folder is


_BLOCKS, _TRAINING = "eagle3_jax.formats.blocks.kinds", "eagle3_jax.training.kinds"
# Name -> row. A folder is of the last kind that recognises it; the first one takes what no other does.
KINDS = {
    "eagle3": KindRow("eagle3_jax.formats.eagle3:EAGLE3", f"{_TRAINING}.eagle3:Eagle3"),
    "mtp": KindRow("eagle3_jax.formats.mtp:MTP", f"{_TRAINING}.mtp:Mtp", in_target=True),
    "dflash": KindRow(f"{_BLOCKS}:DFLASH", f"{_TRAINING}.block:DFlashKind"),
    "dspark": KindRow(f"{_BLOCKS}:DSPARK", f"{_TRAINING}.block:DSparkKind"),
    "dflash2": KindRow(f"{_BLOCKS}:DFLASH2", f"{_TRAINING}.block:DFlash2Kind"),
    "assistant": KindRow("eagle3_jax.formats.gemma4_assistant:ASSISTANT", f"{_TRAINING}.assistant:Assistant"),
    "eagle2": KindRow("eagle3_jax.formats.eagle2.heads:EAGLE2"),
    "model": KindRow("eagle3_jax.formats.draft_models:MODEL"),
}


def trained() -> list[str]:
    """Lists the kinds that can be trained: the values of `draft.kind`."""
    return [name for name, row in KINDS.items() if row.training is not None]


def in_target(draft: object) -> bool:
    """Tells whether a draft is named as a part of the target's own checkpoint ("mtp")."""
    return isinstance(draft, str) and draft in KINDS and KINDS[draft].in_target
