"""Makes a head that llama.cpp runs of an EAGLE-3.1 one, and trains it on.

    .venv/bin/python tools/llama_cpp_head.py fold HEAD FEATURES FOLDED
    .venv/bin/python tools/llama_cpp_head.py train --config FILE --train.warm-start FOLDED

EAGLE-3.1 norms each aux feature, and its normed output recurs. llama.cpp has neither norm, but `norm_before_residual`:
the residual is the normed feature, or the normed output of the step before. `fold` gives that norm the output's
weights, so that every step but the first computes the same, up to one scale for each token, and fits `fc` to the fused
features of HEAD (`auto`, or a folder) by least squares, over the states in FEATURES (`extract`'s folder).

`train` is the verb with the LM head held, and norms at a fifth of the learning rate: batches of a short training on a
few cores are small, and AdamW at Muon's rate moves the LM head further than they justify.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax import nnx

from eagle3_jax.config import TrainConfig
from eagle3_jax.data.features import FeatureSource
from eagle3_jax.data.loader import PackedRows
from eagle3_jax.formats.heads import load_draft, save_draft
from eagle3_jax.formats.packaged import chosen_draft
from eagle3_jax.mesh import parameter_path
from eagle3_jax.models import fp8
from eagle3_jax.models.checkpoint.fetch import load_target
from eagle3_jax.models.drafts.eagle3 import DraftHead
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.train import __main__ as verb
from eagle3_jax.training import state

TARGET = "smollm2-135m-instruct"
ROWS = 48  # of 512 tokens, that `fc` is fitted to
# Size of the residual, relative to that of EAGLE-3.1's later steps. Its first step has 6.5; of 1, 1.5 to 2.5 and 5 the
# middle gave the longest acceptance before any training.
RESIDUAL = 1.5
RIDGE = 1e-3


def fold(source: str, features: pathlib.Path, folder: pathlib.Path) -> None:
    target = load_target(TARGET)
    _, path = chosen_draft(source, pathlib.Path(), target)
    assert path is not None, "a folder"
    draft = load_draft(path, target=target, dtype=jnp.float32, exact=True)
    old: Any = draft.head
    config = dataclasses.replace(old.config, fc_norm=False, norm_output=False, norm_before_residual=True)
    new = DraftHead(config, rngs=nnx.Rngs(0))
    kept = {name: nnx.state(getattr(old, name)) for name in ("attention", "mlp")}
    for name, part in kept.items():
        nnx.update(getattr(new, name), jax.tree.map(jnp.copy, part))
    for name in ("input_norm", "post_norm", "norm", "lm_head"):
        getattr(new, name)[...] = getattr(old, name)[...]
    norm, hidden = np.asarray(old.norm[...]), np.asarray(old.hidden_norm[...])
    new.hidden_norm[...] = jnp.asarray(RESIDUAL * norm)
    rows = np.array(old.attention.qkv[...])
    rows[len(norm) :] *= (hidden / (RESIDUAL * np.sqrt((norm**2).mean())))[:, None]
    new.attention.qkv[...] = jnp.asarray(rows)
    new.fc[...] = jnp.asarray(fitted(old, states(features)) / norm, jnp.float32)
    save_draft(folder, Draft(new, draft.token_ids), target=target.model.config, dtype="float32", form="vllm")


def states(features: pathlib.Path) -> np.ndarray:
    """Aux features of tokens [n, 3 H], but of each conversation's first two: their norms are a hundred times larger."""
    rows = PackedRows(FeatureSource(features / "train"), 512, multiple=1, max_rows=ROWS)
    found = []
    for i in range(len(rows)):
        row = fp8.decoded(fp8.paired(dict(rows[i])))
        found.append(np.asarray(row["aux"], np.float64)[(row["segment_ids"] > 0) & (row["positions"] > 1)])
    return np.concatenate(found)


def fitted(head: DraftHead, aux: np.ndarray) -> np.ndarray:
    """Returns the `fc` whose products with features point where `head`'s fused ones do."""
    fused = np.asarray(head.fuse(jnp.asarray(aux[None], jnp.float32)))[0].astype(np.float64)
    chunks = aux.reshape(len(aux), head.config.num_aux_layers, -1)
    scales = np.repeat((1 / np.sqrt((chunks**2).mean(-1))).mean(0), chunks.shape[-1])
    weights = np.concatenate([np.asarray(norm[...], np.float64) for norm in head.fc_norm])
    start = np.asarray(head.fc[...], np.float64) * (weights * scales)[:, None]
    size = np.sqrt(((aux @ start) ** 2).mean(-1, keepdims=True))  # each token's own: the next norm drops it
    inputs, wanted = aux / size, fused / np.sqrt((fused**2).mean(-1, keepdims=True))
    gram = inputs.T @ inputs
    gram[np.diag_indices(len(gram))] += RIDGE * np.trace(gram) / len(gram)
    return start + np.linalg.solve(gram, inputs.T @ (wanted - inputs @ start))


def make_optimizer(config: TrainConfig, total_steps: int) -> optax.GradientTransformation:
    rate = state.learning_rate(config, total_steps)

    def groups(params: Any) -> Any:
        def group(path: tuple[Any, ...], x: jax.Array) -> str:
            return "held" if parameter_path(path).endswith("lm_head") else "muon" if x.ndim == 2 else "norms"

        return jax.tree_util.tree_map_with_path(group, params)

    def held(params: Any) -> Any:
        return jax.tree.map(lambda group: group == "held", groups(params))

    muon = state._exact(optax.contrib.muon(rate, consistent_rms=0.2))
    norms = optax.adam(lambda step: rate(step) / 5, 0.9, 0.95)
    parts = optax.partition({"muon": muon, "norms": norms, "held": optax.set_to_zero()}, groups)
    return optax.chain(optax.masked(optax.set_to_zero(), held), optax.clip_by_global_norm(0.5), parts)


def main() -> None:
    if sys.argv[1:2] == ["train"]:
        verb.make_optimizer = make_optimizer
        return verb.main(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("fold", "train"))
    parser.add_argument("head")
    for name in ("features", "folded"):
        parser.add_argument(name, type=pathlib.Path)
    arguments = parser.parse_args()
    fold(arguments.head, arguments.features, arguments.folded)


if __name__ == "__main__":
    main()
