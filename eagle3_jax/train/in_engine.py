"""Acceptance in the engine during training: held-out prompts, greedy, with a chain.

The replay of rounds on held-out answers (`training.replay`) costs less and predicts the same. This is the decoder
itself, with its caches and kernels, and its own answers.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from eagle3_jax.acceptance import AcceptanceCounts
from eagle3_jax.config import DraftTree, RunConfig
from eagle3_jax.data import sources
from eagle3_jax.decoding import data_parallel
from eagle3_jax.decoding.engine import Engine, SamplingParams
from eagle3_jax.kernels.linear.layouts import dense
from eagle3_jax.mesh import fetch, make_mesh, own_replica
from eagle3_jax.models.checkpoint.fetch import load_target
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.runs import disk, manifest, processes
from eagle3_jax.training.kinds.kind import TrainingKind

_BATCH = 16
_TOKENS = 96  # an answer's length; fixed, since acceptance lengths of one training are compared


def held_out_prompts(config: RunConfig) -> disk.Path:
    """Returns the file of held-out prompts. Raises ManifestError: it does not exist."""
    path = config.folder("prepare") / "held_out.jsonl"
    if not path.is_file():
        expected = "the output of `python -m eagle3_jax.prepare`, or train.decode_every null"
        raise manifest.ManifestError(f"{path}: not found, expected {expected}")
    return path


class Served:
    """Engines that draft with one head after the other; the rows of the mesh share the prompts, an engine each.

    They compile for `head`, and the draft vocabulary `token_ids`, int32 [Vd]. Raises ValueError: no prompt is short
    enough.
    """

    def __init__(self, config: RunConfig, kind: TrainingKind, head: Any, token_ids: np.ndarray) -> None:
        self._replica = own_replica(make_mesh(config.mesh))
        self._kind, self._token_ids = kind, jnp.asarray(token_ids)
        target, *others = data_parallel.targets(load_target(config.target, self._replica.mesh), self._replica)
        self._output_rows = fetch(dense(target.model.output_rows))
        room = min(config.extract.max_length, target.model.config.max_position_embeddings) - _TOKENS
        path = held_out_prompts(config)
        fitting, _ = sources.encode(sources.read_file(path)[0], target.tokenizer, room, f"train.decode_every: {path}")
        chosen = sources.spread(fitting, config.train.decode_prompts)
        self._prompts = [prompt["prompt"] for prompt in chosen][self._replica.index :: self._replica.count]
        self._params = SamplingParams(max_tokens=_TOKENS)
        steps = kind.num_drafts
        chain = DraftTree(num_steps=steps, topk=1, num_draft_tokens=steps + 1)
        sizes = {"batch_size": _BATCH, "max_length": max(map(len, self._prompts), default=1) + _TOKENS}
        draft, rows = self._draft(head), (target, *others)
        self._engines = [Engine(row.model, row.tokenizer, draft, chain, **sizes) for row in rows]

    def _draft(self, head: Any) -> Draft:
        return self._kind.draft(fetch(head), self._output_rows, self._token_ids)

    def measure(self, head: Any) -> dict[str, Any]:
        """Measures `tau`, `alpha` and `rounds` of the held-out prompts over all replicas (see `AcceptanceCounts`)."""
        draft = self._draft(head)
        for engine in self._engines:
            engine.replace_draft(draft)
        answers = data_parallel.answers(self._engines, self._prompts, [self._params] * len(self._prompts))
        own = AcceptanceCounts.total(answer.stats.counts for answer in answers)
        shares = processes.gather([self._replica.index, own.rounds, own.accepted])
        replicas = {index: AcceptanceCounts(rounds, accepted) for index, rounds, accepted in shares}
        counts = AcceptanceCounts.total(replicas.values())  # each replica once: its processes count the same rounds
        return {"tau": counts.tau, "alpha": [share or 0.0 for share in counts.alpha], "rounds": counts.rounds}
