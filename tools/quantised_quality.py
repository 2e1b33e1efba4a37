"""Measures what quantised weights cost: perplexity, agreement and tau, against the float32 target.

    .venv/bin/python tools/quantised_quality.py --prompts runs/smollm2_135m_conversations/prompts/held_out.jsonl

The float32 target answers the prompts greedily. Each kind of weights then reads these answers: the perplexity of their
tokens, and the share of positions whose best token is the same. Tau is tokens for each pass of the target, with the
packaged head, on the kind's own answers.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.config import DraftTree, TargetConfig
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.models.cache import Pass
from eagle3_jax.models.checkpoint.fetch import load_target
from eagle3_jax.runs import disk

CHAIN = DraftTree(num_steps=4, topk=1, num_draft_tokens=5)


@jax.jit
def scores(model: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns log-probabilities of tokens[:, 1:], and the best tokens at their places."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _, _ = model(tokens, Pass(positions, jnp.zeros(len(tokens), jnp.int32)), model.empty_cache(*tokens.shape))
    logits = jax.nn.log_softmax(model.logits(hidden[:, :-1]))
    return jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0], jnp.argmax(logits, axis=-1)


def read(model: Any, texts: Sequence[tuple[list[int], list[int]]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns log-probabilities and best tokens of all answers' tokens, given (prompt, answer)."""
    found = []
    for prompt, answer in texts:
        size = len(prompt) + len(answer)
        padded = np.zeros((1, -(-size // 64) * 64), np.int32)
        padded[0, :size] = prompt + answer
        found.append([np.asarray(x)[0, len(prompt) - 1 : size - 1] for x in scores(model, jnp.asarray(padded))])
    scored, best = (np.concatenate(part) for part in zip(*found, strict=True))
    return scored, best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--prompts", type=pathlib.Path, required=True, help="JSONL, as `prepare` writes it")
    parser.add_argument("--weights", default="int8,int8+,fp8+,int4+", help="kinds; +: embeddings and LM head too")
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=8)
    arguments = parser.parse_args()
    lines = [line for _, line in zip(range(arguments.limit), disk.read_jsonl(arguments.prompts), strict=False)]
    texts: list[tuple[list[int], list[int]]] = []
    best = np.zeros(0)
    print("| weights | tau | perplexity | agreement |\n|---|---|---|---|", flush=True)
    for named in ("", *arguments.weights.split(",")):
        weights: Any = named.rstrip("+") or None
        target = load_target(
            TargetConfig(name=arguments.target, weights=weights, quantise_vocabulary=named.endswith("+"))
        )
        engine = Engine.load(target, tree=CHAIN, batch_size=arguments.batch_size, max_length=1024)
        prompts = [engine.encode(line["messages"]) for line in lines]
        outputs = engine.generate(prompts, SamplingParams(max_tokens=arguments.max_tokens))
        tau = sum(len(out.token_ids) for out in outputs) / sum(out.stats.rounds for out in outputs)
        texts = texts or [(list(p), list(out.token_ids)) for p, out in zip(prompts, outputs, strict=True)]
        logprobs, tokens = read(target.model, texts)
        best = tokens if weights is None else best
        perplexity, agreement = np.exp(-logprobs.mean()), (tokens == best).mean()
        print(f"| {named or 'float32'} | {tau:.2f} | {perplexity:.4f} | {agreement:.4f} |", flush=True)


if __name__ == "__main__":
    main()
