"""Finds how each kind of head is trained (`config.kinds.KINDS`)."""

from __future__ import annotations

import pkgutil

from eagle3_jax.config import RunConfig
from eagle3_jax.config.kinds import KINDS
from eagle3_jax.models.target_config import ModelConfig
from eagle3_jax.training.kinds.kind import Kind


def named(name: str) -> type[Kind] | None:
    """Returns how heads of a kind are trained; None: they are not."""
    training = KINDS[name].training
    return None if training is None else pkgutil.resolve_name(training)


def kind_of(config: RunConfig, target: ModelConfig) -> Kind:
    """Makes the kind of head that `config.draft` names. Raises ValueError: the target does not fit it."""
    kind = named(config.draft.kind)
    assert kind is not None, "the config names a kind that is trained"
    return kind.of(config, target)
