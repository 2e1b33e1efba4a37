"""A live head: training steps on what verification computed, judged on held-back requests before they draft."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from eagle3_jax.acceptance import AcceptanceCounts
from eagle3_jax.config import AdaptConfig, MeshConfig, TrainConfig
from eagle3_jax.data import vocab
from eagle3_jax.decoding.adapt import vocabulary
from eagle3_jax.decoding.adapt.api import AdaptStats
from eagle3_jax.decoding.adapt.ring import Ring
from eagle3_jax.decoding.rounds.observed import Observed
from eagle3_jax.formats import kinds
from eagle3_jax.kernels.linear.api import xla_is_faster
from eagle3_jax.kernels.linear.layouts import dense
from eagle3_jax.mesh import make_mesh, mesh_of, replicated
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.target import TargetModel
from eagle3_jax.runs import disk, manifest
from eagle3_jax.training.batch import Teacher
from eagle3_jax.training.checkpoint import CheckpointError, Checkpoints
from eagle3_jax.training.kinds.kind import named
from eagle3_jax.training.state import TrainState, init_state, make_eval_step, make_optimizer, make_train_step

_log = logging.getLogger(__name__)

# One of so many requests, and of the ring's rows, is held back.
_HELD = 8
# Seconds after which time counts half: the share is one of the last minutes.
_HALF_LIFE = 300.0
# Share of the time without requests. A request that comes meanwhile waits for the end of a step.
_IDLE_SHARE = 0.1
# Times that a token is learnt from: more would learn it by heart.
_EPOCHS = 2
# A judgement without a better head quarters both shares, at most so often; a better head restores them.
_QUARTERS = 2
# Gain of a judgement, as a share of tau, that is worth four times the share between dispatches: what is learnt early
# serves longest.
_WORTH = 0.01
# Share of the answers' tokens that must get a place in the draft vocabulary by another one.
_MISSING = 0.01
# Steps of the optimizer's schedule, whose rate stays at its peak: a server has no last step.
_FOREVER = 1 << 40


@dataclasses.dataclass(frozen=True)
class _Judged:  # a head, on the held-back requests
    cross_entropy: float  # mean
    tau: float  # tokens of a round, replayed
    # Drafts of a chain accepted at temperature 1, over all positions. Chance moves it far less than tau, which counts
    # the few rounds. Block heads have no such figure, and tau's drafts instead.
    accepted: float


class HeadLearner:
    """Learns from ended requests, between dispatches, on the devices of the engine's target, all of this process.

    `identity` is the target's, for the manifest of `config.folder`. Raises ValueError: a kind of draft that does not
    learn, or a folder without an identity. LockError, ManifestError: another process has the folder, or other work.
    """

    def __init__(
        self, config: AdaptConfig, target: TargetModel, draft: Draft, identity: Mapping[str, Any] | None
    ) -> None:
        head: Any = draft.head
        kind = named(kinds.of_head(head).name)
        if kind is None or not kind.lives:
            able = [x.label for x in kinds.every() if (trained := named(x.name)) and trained.lives]
            expected = f"a head of {', '.join(able[:-1])} or {able[-1]}"
            raise ValueError(f"adapt: got a draft of {type(head).__name__}, expected {expected}")
        if config.folder is not None and identity is None:
            expected = "`Engine.load`, or the target's identity"
            raise ValueError(f"adapt.folder: got {config.folder} for an unnamed target, expected {expected}")
        run = training(config)
        self.stats, self._config = AdaptStats(), config
        self._kind, self._dtype = kind(head.config, run), head.dtype
        embed = target.embed[...]
        mesh = mesh_of(embed) or make_mesh(MeshConfig(data=1, model=1), list(embed.sharding.device_set))
        head, self._token_ids = jax.device_put((head, draft.token_ids), replicated(mesh))
        optimizer = make_optimizer(run, _FOREVER)
        head = jax.tree.map(lambda x: jnp.array(x, jnp.float32), head)  # a copy: steps donate it
        if not hasattr(self._kind.abstract(), "lm_head"):  # the target's, see `TrainingKind.draft`
            del head.lm_head
        self._state = init_state(lambda x: x, head, optimizer, mesh)
        self._train_step = make_train_step(self._kind, optimizer, mesh)
        self._eval_step = make_eval_step(self._kind, mesh)
        self._move = vocabulary.make_move(head.vocabulary_rows, mesh)
        self._compiled: tuple[Any, Any, Any] | None = None
        self._known: dict[bytes, Any] = {}  # see `_judged`, of the head that drafts
        rows, c = config.ring_tokens // config.row_length, self._kind.shape
        held = max(1, rows // _HELD)
        sizes = config.row_length, c.num_aux_layers * c.target_hidden_size, target.config.hidden_size
        self._ring, self._held = (Ring(count, *sizes, replicated(mesh)) for count in (rows - held, held))
        self._rng, self._unjudged, self._in_vain = np.random.default_rng(0), 0, -1
        self._ends, self._cap, self._renews_at = target.config.eos_token_ids, target.config.logit_cap, 0
        self._busy = self._idle = self._spent = 0.0
        self._checkpoints: Checkpoints | None = None
        if config.folder is not None and identity is not None:
            self._open(config.folder, identity)
        self.teach(target.embed[...], target.lm_head[...] if hasattr(target, "lm_head") else None)
        self._served = _copied(self._state)

    def _open(self, folder: str, identity: Mapping[str, Any]) -> None:
        """Goes on where the folder's last process was, and keeps others out until this one ends."""
        place, ids = disk.path_of(folder), np.asarray(self._token_ids)
        held = contextlib.ExitStack()
        held.enter_context(disk.lock(place))
        self._close = weakref.finalize(self, held.close)
        shape = dataclasses.asdict(self._kind.shape)
        vocabulary = hashlib.sha256(ids.tobytes()).hexdigest()
        made = {"verb": "serve", "target": dict(identity), "head": shape, "vocabulary": vocabulary}
        manifest.begin(place, made, place="adapt.folder")
        vocab.save(place, ids)
        self._checkpoints = held.enter_context(Checkpoints(place, keep=2))
        if (step := self._checkpoints.latest) is not None:
            self._state = self._checkpoints.restore(self._state)
            if (ids := self._checkpoints.token_ids(step)) is not None:
                self._token_ids = jax.device_put(ids, self._token_ids.sharding)

    @property
    def draft(self) -> Draft:
        """The head that drafts now."""
        head = self._kind.draft(self._served.head, self._output_rows, self._token_ids).head
        return Draft(jax.tree.map(lambda x: x.astype(self._dtype), head), self._token_ids)

    def teach(self, embed: Any, lm_head: Any) -> None:
        """Learns from another target; its LM head, None where the embeddings are, may be donated afterwards."""
        embed = dense(embed)
        self._known, self._output_rows = {}, embed if lm_head is None else jnp.copy(dense(lm_head))
        self._teacher = self._teacher_of(embed.astype(_dtype(embed.dtype)), self._token_ids)

    def _teacher_of(self, embed: Any, token_ids: Any) -> Teacher:
        teacher = Teacher.of(embed, self._output_rows, token_ids)
        return dataclasses.replace(teacher, rows=teacher.rows.astype(embed.dtype), cap=self._cap)

    def compile(self) -> None:
        """Compiles its programs ahead of requests."""
        if self._compiled is None:
            batch = self._ring.batch([-1] * self._config.batch_size)
            train = self._train_step.lower(self._state, self._teacher, batch).compile()
            evaluate = self._eval_step.lower(self._state.head, self._teacher, batch).compile()
            move, places = None, jnp.zeros(len(self._token_ids), jnp.int32)
            if len(places) < self._kind.shape.vocab_size:
                move = self._move.lower(self._state, places, self._teacher.rows, self._teacher.rows).compile()
            self._compiled = train, evaluate, move

    def keep(self, observed: Observed, slot: int, token_ids: Sequence[int], first: int, answer: int) -> None:
        """Takes an ended request's states, see `Ring.keep`: the last ones, a row. Every eighth request is held back."""
        ring = self._held if self.stats.requests % _HELD == 0 else self._ring
        ring.keep(observed, slot, token_ids, max(first, len(token_ids) - self._config.row_length), answer)
        self.stats.requests += 1
        self.stats.tokens = self._ring.tokens + self._held.tokens

    @property
    def learns_on(self) -> bool:
        """True while its requests are worth steps. A head that knew few by heart would be judged by fewer yet."""
        config, filled = self._config, len(self._ring.filled)
        enough = min(config.batch_size * config.judge_every, config.ring_tokens // config.row_length // 2)
        drawn = self.stats.steps * config.batch_size * config.row_length
        return filled >= enough and len(self._held.filled) > 0 and drawn < _EPOCHS * self._ring.written

    def learn(self, busy: float, idle: float, wait: Callable[[], None]) -> Draft | None:
        """Takes a step, if the time allows it. Returns a better head, to draft from now on.

        `busy`, `idle`: seconds of the engine's work since the last call, and without any. `wait` waits for the device.
        """
        stats, config = self.stats, self._config
        faded = 0.5 ** ((busy + idle) / _HALF_LIFE)
        self._busy, self._idle = self._busy * faded + busy, self._idle * faded + idle
        self._spent *= faded
        worked = self._busy + self._spent
        stats.share = self._spent / max(worked + self._idle, 1e-9)
        allowed = config.share * worked / 4**self._in_vain + _IDLE_SHARE * self._idle / 4 ** max(self._in_vain, 0)
        if self._spent > allowed or not self.learns_on:
            return None
        self.compile()
        asked = time.monotonic()
        wait()
        start = time.monotonic()
        self._busy += start - asked
        if (renewed := self._wanted()) is not None:
            better = self._renew(renewed)
        else:
            rows = self._ring.filled
            better = self._step(self._rng.choice(rows, config.batch_size, replace=False).tolist())
        seconds = time.monotonic() - start
        stats.seconds, self._spent = stats.seconds + seconds, self._spent + seconds
        return self.draft if better else None

    def _wanted(self) -> Int32[np.ndarray, " dv"] | None:
        """Returns the draft vocabulary that the ring asks for; None if that is little better."""
        if self._ring.written < self._renews_at:
            return None
        ids, counts = np.asarray(self._token_ids), self._ring.counts(self._kind.shape.vocab_size)
        new = vocabulary.renewed(ids, counts, self._ends)
        return new if vocab.coverage(counts, new) > vocab.coverage(counts, ids) + _MISSING else None

    def _renew(self, token_ids: Int32[np.ndarray, " dv"]) -> bool:
        """Moves the head to another draft vocabulary, unless fewer of the held-back requests' drafts are accepted."""
        assert self._compiled is not None
        move, old, stats = self._compiled[2], self._token_ids, self.stats
        places = vocabulary.places(np.asarray(old), token_ids)
        ids = jax.device_put(token_ids, old.sharding)
        teacher = self._teacher_of(self._teacher.embed, ids)

        def moved(state: TrainState) -> TrainState:
            return move(state, jnp.asarray(places), self._teacher.rows, teacher.rows)

        served, self._renews_at = moved(self._served), self._ring.written + self._config.ring_tokens // 2
        before = self._judged(self._served.head, self._teacher, self._known).tau
        after = self._judged(served.head, teacher, known := {}).tau
        stats.tau_before, stats.tau_after = before, max(before, after)
        if after < before:
            return False
        self._state = moved(self._state)
        self._served, self._known, self._teacher, self._token_ids = served, known, teacher, ids
        stats.new_tokens += int((places < 0).sum())
        self._save()
        return True

    def _step(self, rows: Sequence[int]) -> bool:
        """Takes a step on these rows. Returns whether a better head drafts from now on."""
        assert self._compiled is not None
        stats, (train_step, *_) = self.stats, self._compiled
        self._state, sums = train_step(self._state, self._teacher, self._ring.batch(rows))
        stats.steps, stats.loss, self._unjudged = stats.steps + 1, float(sums["loss"]), self._unjudged + 1
        finite = np.isfinite([stats.loss, float(sums["gradient_norm"])]).all()
        if finite and self._unjudged < self._config.judge_every:
            return False
        self._unjudged = 0
        better, gain = self._is_better() if finite else (False, 0.0)
        if better:
            self._in_vain = -1 if gain >= _WORTH else 0
            self._served = _copied(self._state)
            stats.heads += 1
            self._save()
            return True
        self._in_vain = min(max(self._in_vain, 0) + 1, _QUARTERS)
        if better is False:
            self._state = _copied(self._served)
            stats.rollbacks += 1
        return False

    def _is_better(self) -> tuple[bool | None, float]:
        """Compares the head with the one that drafts: is its cross entropy lower, and are as many drafts accepted?

        None where fewer are yet, so that it goes on learning. And the gain, as a share of a round's tokens.
        """
        before = self._judged(self._served.head, self._teacher, self._known)
        after = self._judged(self._state.head, self._teacher, known := {})
        better: bool | None = False
        if after.cross_entropy < before.cross_entropy:
            better = None if after.accepted < before.accepted else True
        if better:
            self._known = known
        self.stats.tau_before, self.stats.tau_after = before.tau, after.tau if better else before.tau
        return better, (after.accepted - before.accepted) / (1 + before.accepted)

    def _judged(self, head: Any, teacher: Teacher, known: dict[bytes, Any]) -> _Judged:
        """Judges a head on all held-back rows. `known` has its sums of the rows before; those of the rows now, then."""
        assert self._compiled is not None
        size, rows = self._config.batch_size, self._held.filled.tolist()
        rows += [-1] * (-len(rows) % size)
        sums = {}
        for some in (rows[at : at + size] for at in range(0, len(rows), size)):
            key = self._held.documents(some).tobytes()
            sums[key] = known.get(key) or self._compiled[1](head, teacher, self._held.batch(some))
        known.clear()
        known.update(jax.device_get(sums))
        each = list(known.values())
        total = {name: np.sum([one[name] for one in each], axis=0) for name in each[0]}
        tau = AcceptanceCounts(int(total["rounds"]), total["accepted"].tolist()).tau
        compared, accepted = np.maximum(total["compared"], 1), tau - 1
        if "acceptance" in total:
            accepted = float(np.cumprod(total["acceptance"] / compared).sum())
        return _Judged(float(total["cross_entropy"].sum() / compared.sum()), tau, accepted)

    def _save(self) -> None:
        if self._checkpoints is not None:
            try:
                self._checkpoints.save(self._served, token_ids=np.asarray(self._token_ids))
            except CheckpointError as error:  # such as a full disk: the next head may be written
                _log.warning("%s", error)


def training(config: AdaptConfig) -> TrainConfig:
    shared = {name: getattr(config, name) for name in ("ttt_steps", "batch_size", "row_length", "learning_rate")}
    block = math.gcd(config.row_length, 128)
    return TrainConfig(**shared, loss_block=block, loss_reduction="mask", warmup_ratio=0.0)


def _dtype(of_target: Any) -> Any:
    """Returns the dtype to compute steps in: bfloat16, as the ring's states are, but where a CPU is slower at it."""
    return of_target if jax.default_backend() == "cpu" and not xla_is_faster(jnp.bfloat16) else jnp.bfloat16


def _copied(state: TrainState) -> TrainState:
    return jax.tree.map(jnp.copy, state)
