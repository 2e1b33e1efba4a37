"""Medusa's heads on disk, in this package's own form alone."""

from __future__ import annotations

import dataclasses

from medusa_network import Medusa, MedusaConfig

from eagle3_jax.formats import fields
from eagle3_jax.formats.compatibility import Engines
from eagle3_jax.formats.stored import StoredKind
from eagle3_jax.models.checkpoint.table import kernel

ARCHITECTURE = "MedusaModel"


class MedusaKind(StoredKind):
    def misfits(self, config, target):
        got, expected = ((x.vocab_size, x.hidden_size) for x in (config, target))
        return [] if got == expected else [f"vocab_size, hidden_size: got {got}, expected {expected}, the target's"]


def described(folder, values, tensors, problems):
    return {"config": MedusaConfig(**{field.name: values[field.name] for field in dataclasses.fields(MedusaConfig)})}


MEDUSA = MedusaKind(
    name="medusa",
    label="Medusa",
    network=Medusa,
    method="medusa",
    algorithm="MEDUSA",
    is_mine=lambda folder, values: fields.architecture(values) == ARCHITECTURE,
    shape=lambda draft, target: MedusaConfig(
        target.vocab_size,
        target.hidden_size,
        target.num_hidden_layers,
        draft.num_layers,
        target.max_position_embeddings,
    ),
    described=described,
    table=lambda c: {
        f"layers/{i}": kernel(f"layers.{i}.weight", c.hidden_size, c.hidden_size) for i in range(c.num_heads)
    },
    values=lambda head, form: {"architectures": [ARCHITECTURE], **dataclasses.asdict(head.config)},
    engines=Engines({}, {}, {}, lambda head, form: iter(())),
    drafts=lambda config: config.num_heads,
)
