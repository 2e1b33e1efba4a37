"""Medusa's training: each layer learns the target's distribution of one of the tokens behind the next one."""

from __future__ import annotations

import jax.numpy as jnp

from eagle3_jax.training.kinds.kind import TrainingKind
from eagle3_jax.training.losses import states_loss
from eagle3_jax.training.replay import replay_rounds


class MedusaTraining(TrainingKind):
    name = "medusa"
    aux_layers = ()

    def loss(self, head, teacher, batch, step, divisors=None):
        states = jnp.stack(head.states(batch.last_hidden))
        return states_loss(None, states, teacher, batch, self.train, None, divisors)

    def evaluate(self, head, teacher, batch):
        loss, sums = self.loss(head, teacher, batch, 0)
        states = jnp.stack(head.states(batch.last_hidden))
        return sums | {"loss": loss} | replay_rounds(None, states, teacher, batch, self.train.loss_block)
