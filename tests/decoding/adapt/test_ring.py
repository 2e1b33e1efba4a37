"""The ring's rows: packed documents, the newest ones, with the states that belong to them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.decoding.adapt.ring import Ring
from eagle3_jax.decoding.rounds.observed import Observed, bits


def observed(start: int, stop: int, length: int = 12) -> Observed:
    """The state of position t, of the newest up to `stop`, is start + t; in slot 1 of 2."""
    position = np.zeros(length)
    for t in range(stop):
        position[t % length] = start + t
    states = np.zeros((2, length, 1)) + position[:, None] * np.array([0, 1])[:, None, None]
    aux = bits(jnp.asarray(states))
    return Observed(aux, aux, jnp.asarray(states[..., 0], jnp.int32))


def test_rows_hold_packed_documents_and_the_oldest_are_overwritten():
    ring = Ring(2, 8, 1, 1, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    assert not len(ring.filled)
    ring.keep(observed(0, 5), 1, list(range(5)), 0, 2)
    ring.keep(observed(100, 20), 1, list(range(100, 120)), 14, 14)  # the last six of twenty tokens
    batch = ring.batch([0, 1, -1])
    assert batch.token_ids[0].tolist() == [0, 1, 2, 3, 4, 114, 115, 116]
    assert batch.segment_ids.tolist() == [[1] * 5 + [2] * 3, [1] * 3 + [0] * 5, [0] * 8]
    assert batch.positions[0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert batch.loss_mask[0].tolist() == [0, 0, 1, 1, 1, 0, 1, 1], "an answer opens in its row, though it was cut"
    assert batch.argmax[0].tolist() == batch.aux[0, :, 0].tolist() == batch.token_ids[0].tolist()
    assert batch.last_hidden[1, :3, 0].tolist() == batch.token_ids[1, :3].tolist() == [117, 118, 119]
    assert (ring.filled.tolist(), ring.tokens) == ([0, 1], 11)
    ring.keep(observed(50, 7), 1, list(range(50, 57)), 0, 7)  # five places are left: it begins anew
    batch = ring.batch([0, 1])
    assert batch.token_ids[0, :7].tolist() == list(range(50, 57))
    assert batch.segment_ids[0].tolist() == [1] * 7 + [0]
    assert ring.filled.tolist() == [1], "a row without an answer teaches nothing"


def test_only_what_is_taken_is_written():
    held = Observed.empty(3, 4, 1, 1)
    states = jnp.arange(6, dtype=jnp.float32).reshape(2, 3, 1) + 1
    taken = jnp.asarray([[True, True, False], [True, True, True]])
    positions = jnp.asarray([[3, 4, 5], [0, 1, 2]])
    asked = jnp.asarray([2, 3]), positions, taken, states, states, jnp.zeros((2, 3), jnp.int32)
    found = held.put(*asked).aux[..., 0].view(jnp.bfloat16)
    assert found.tolist() == [[0] * 4, [0] * 4, [2, 0, 0, 1]], "position 4 wraps; slot 3 is none"
    put = jax.jit(lambda aux: dataclasses.replace(held, aux=aux).put(*asked).aux, donate_argnums=0)
    assert "f32[3,4,1]" not in str(put.lower(held.aux).compile().as_text()), "a buffer is written in place"
