"""The kinds of heads that can be trained, by their names in `draft.kind`."""

from __future__ import annotations

from eagle3_jax.config import RunConfig
from eagle3_jax.models.target import ModelConfig
from eagle3_jax.training.kinds.block import DFlash2Kind, DFlashKind, DSparkKind
from eagle3_jax.training.kinds.eagle3 import Eagle3
from eagle3_jax.training.kinds.kind import Kind
from eagle3_jax.training.kinds.mtp import Mtp

KINDS: dict[str, type[Kind]] = {kind.name: kind for kind in (Eagle3, Mtp, DFlashKind, DSparkKind, DFlash2Kind)}


def kind_of(config: RunConfig, target: ModelConfig) -> Kind:
    """Makes the kind of head that `config.draft` names. Raises ValueError: the target does not fit it."""
    return KINDS[config.draft.kind].of(config, target)
