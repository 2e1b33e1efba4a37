"""GRPO on a small model: rollouts with speculative decoding, by a draft head that learns from them.

    .venv/bin/python examples/grpo.py --steps 40

Each step asks the policy a few questions, several answers each, rewards them by a rule, and takes one step of GRPO
(arXiv 2402.03300) by optax. The engine goes on with the new policy, and with a head that has learnt the rollouts from
the hidden states of the same pass. A table compares the rollouts' tokens a second: without drafts, with the head as it
was, and with the live one. Needs `pip install -e ".[train]"`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eagle3_jax import DraftTree, Engine, MeshConfig, Output, SamplingParams, load_target
from eagle3_jax.acceptance import AcceptanceCounts
from eagle3_jax.config import TrainConfig
from eagle3_jax.formats.packaged import load_packaged
from eagle3_jax.kernels.linear.layouts import dense
from eagle3_jax.mesh import fetch, make_mesh
from eagle3_jax.models.checkpoint.fetch import Target
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.target import TargetModel
from eagle3_jax.training.batch import Batch, Teacher
from eagle3_jax.training.kinds.eagle3 import Eagle3
from eagle3_jax.training.state import init_state, make_optimizer, make_train_step

CHAIN = DraftTree(num_steps=3, topk=1, num_draft_tokens=4)
CLIP = 0.2


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes of a run."""

    steps: int = 40
    questions: int = 4
    answers: int = 8  # to each question: a group, whose mean reward is the baseline
    max_tokens: int = 64
    learning_rate: float = 1e-5
    head_rate: float = 1e-4
    batch_size: int = 4
    length: int = 128  # tokens of a question with its answer
    every: int = 10  # steps between two rows of the table


# ------------------------------------------------------------------------------------------------------------- the task


def count_up(rng: np.random.Generator) -> tuple[str, str]:
    """Asks for a list of numbers. Returns the question and the right answer."""
    first = int(rng.integers(1, 40))
    last = first + int(rng.integers(8, 13))
    numbers = ", ".join(map(str, range(first, last + 1)))
    return f"Count from {first} to {last}. Write the numbers only, with commas between them.", numbers


def shared_beginning(answer: str, right: str) -> float:
    """Rewards the characters up to the first wrong one, out of those of the longer text."""
    same = next(
        (i for i, (x, y) in enumerate(zip(answer, right, strict=False)) if x != y), min(map(len, (answer, right)))
    )
    return same / max(len(answer), len(right))


# ----------------------------------------------------------------------------------------------------------- the policy


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rollouts:
    """Answers to learn from, padded on the right: [b, t], and the advantage of each [b].

    Attributes:
        tokens: prompt and answer.
        real: 1 where there is a token.
        drawn: 1 where the next token was drawn by the policy.
        logprobs: its log-probability then, as the engine says.
    """

    tokens: jax.Array
    real: jax.Array
    drawn: jax.Array
    logprobs: jax.Array
    advantages: jax.Array


def states(policy: TargetModel, tokens: jax.Array, aux_layers: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Runs the policy over whole rows. Returns the last hidden state, and those at some boundaries side by side."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, **_: Any) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    rope = policy.rotary(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))
    run = jax.checkpoint(lambda block, x: block(x, rope, attend))
    boundaries = [policy.embedded(tokens)]
    for block in policy.blocks:
        boundaries.append(run(block, boundaries[-1]))
    return policy.final_norm(boundaries[-1]), jnp.concatenate([boundaries[i] for i in aux_layers], axis=-1)


def next_tokens(policy: TargetModel, hidden: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the log-probability of each row's next tokens, and the best tokens instead; row by row, for memory."""

    @jax.checkpoint
    def of_row(row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        logprobs = jax.nn.log_softmax(policy.logits(row[0]))
        return jnp.take_along_axis(logprobs, row[1][:, None], axis=1)[:, 0], jnp.argmax(logprobs, axis=1)

    return jax.lax.map(of_row, (hidden, jnp.roll(tokens, -1, axis=1)))


def grpo(
    policy: TargetModel, rollouts: Rollouts, aux_layers: tuple[int, ...]
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Computes the loss of GRPO with a clipped ratio, and what the head learns from."""
    hidden, aux = states(policy, rollouts.tokens, aux_layers)
    logprobs, best = next_tokens(policy, hidden, rollouts.tokens)
    drawn, advantages = rollouts.drawn.astype(jnp.float32), rollouts.advantages[:, None]
    change = (logprobs - rollouts.logprobs) * drawn
    ratio = jnp.exp(change)
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages)
    loss = -(gain * drawn).sum() / drawn.sum()
    return loss, {"mismatch": jnp.abs(change).max(), "hidden": hidden, "aux": aux, "argmax": best.astype(jnp.int32)}


@functools.partial(jax.jit, static_argnames=("optimizer", "aux_layers"), donate_argnames=("policy", "moments"))
def policy_step(
    policy: TargetModel, moments: Any, rollouts: Rollouts, *, optimizer: Any, aux_layers: tuple[int, ...]
) -> tuple[Any, Any, dict[str, jax.Array]]:
    """Takes one step. Returns the policy, the optimizer's moments, and the states before the step."""
    gradients, found = jax.grad(grpo, has_aux=True)(policy, rollouts, aux_layers)
    weights: Any = policy  # a pytree to optax
    with jax.numpy_dtype_promotion("standard"):
        updates, moments = optimizer.update(gradients, moments, weights)
    return optax.apply_updates(weights, updates), moments, found


class LiveHead:
    """A draft head that learns from the rollouts, by the loss of `eagle3_jax.train`."""

    def __init__(self, draft: Draft, settings: Settings) -> None:
        run = TrainConfig(ttt_steps=CHAIN.num_steps, learning_rate=settings.head_rate, loss_reduction="mask")
        self._kind, self._token_ids = Eagle3(draft.head.config, run), draft.token_ids
        optimizer, mesh = make_optimizer(run, settings.steps), make_mesh(MeshConfig(data=1, model=1), jax.devices()[:1])
        # A copy: each step donates the state, and the head is compared with it.
        self._state = init_state(lambda head: jax.tree.map(jnp.copy, head), draft.head, optimizer, mesh)
        self._step = make_train_step(self._kind, optimizer, mesh)

    def learn(self, policy: TargetModel, rollouts: Rollouts, found: dict[str, jax.Array]) -> None:
        teacher = Teacher.of(policy.embed[...], dense(policy.output_rows), self._token_ids)
        index = jnp.broadcast_to(jnp.arange(rollouts.tokens.shape[1]), rollouts.tokens.shape)
        # A row is a document; the policy is asked for its next token where it drew one.
        batch = Batch(
            rollouts.tokens, found["aux"], found["hidden"], found["argmax"], rollouts.drawn, rollouts.real, index
        )
        self._state, _ = self._step(self._state, teacher, batch)

    def draft(self, policy: TargetModel) -> Draft:
        return self._kind.draft(fetch(self._state.head), dense(policy.output_rows), self._token_ids)


# ------------------------------------------------------------------------------------------------------------- the loop


def rolled_out(engine: Engine, prompts: Sequence[str], settings: Settings, seed: int) -> tuple[list[Output], float]:
    """Draws the answers of a step. Returns them, and the tokens a second."""
    params = SamplingParams(temperature=1.0, max_tokens=settings.max_tokens, n=settings.answers, seed=seed, logprobs=0)
    start = time.monotonic()
    outputs = engine.generate(prompts, params)
    return outputs, sum(len(output.token_ids) for output in outputs) / (time.monotonic() - start)


def gathered(
    prompts: Sequence[list[int]], outputs: Sequence[Output], rewards: np.ndarray, settings: Settings
) -> Rollouts:
    """Lays rollouts out in rows; the advantage is the reward against the group's, over its spread."""
    shape = len(outputs), settings.length
    tokens, real, drawn = (np.zeros(shape, np.int32) for _ in range(3))
    logprobs = np.zeros(shape, np.float32)
    for row, output in enumerate(outputs):
        prompt = prompts[row // settings.answers]
        ids = (prompt + output.token_ids)[: settings.length]
        answer = slice(len(prompt) - 1, len(ids) - 1)  # the places from which its tokens were drawn
        tokens[row, : len(ids)], real[row, : len(ids)], drawn[row, answer] = ids, 1, 1
        assert output.logprobs is not None
        logprobs[row, answer] = [entry.processed for entry in output.logprobs][: answer.stop - answer.start]
    group = rewards.reshape(-1, settings.answers)
    advantages = (group - group.mean(1, keepdims=True)) / (group.std(1, keepdims=True) + 1e-4)
    return Rollouts(*map(jnp.asarray, (tokens, real, drawn, logprobs, advantages.reshape(-1).astype(np.float32))))


def train(
    target: Target,
    head: Draft,
    settings: Settings,
    question: Callable[[np.random.Generator], tuple[str, str]] = count_up,
    reward: Callable[[str, str], float] = shared_beginning,
) -> list[dict[str, float]]:
    """Trains the target's model, whose arrays are given up. Prints and returns a row for each step."""
    sizes: Any = {"batch_size": settings.batch_size, "max_length": settings.length}
    engine, vanilla = Engine.load(target, head, CHAIN, **sizes), Engine.load(target, None, **sizes)
    engine.replace_target(target.model)  # its own arrays: those of the policy are donated
    policy: Any = target.model
    optimizer = optax.adam(settings.learning_rate, b2=0.99)
    moments, live, rng, rows = optimizer.init(policy), LiveHead(head, settings), np.random.default_rng(0), []
    first = [question(rng)[0]] * settings.questions
    for each in (engine, vanilla):
        rolled_out(each, first, settings, seed=0)  # compiles
    for step in range(settings.steps):
        asked = [question(rng) for _ in range(settings.questions)]
        prompts, right = [x for x, _ in asked], [x for _, x in asked for _ in range(settings.answers)]
        outputs, speed = rolled_out(engine, prompts, settings, step)
        rewards = np.array([reward(output.text, answer) for output, answer in zip(outputs, right, strict=True)])
        row = {"step": step, "reward": float(rewards.mean()), "tau": tau_of(outputs), "live": speed}
        if step % settings.every == 0 or step == settings.steps - 1:
            newest = live.draft(policy)
            engine.replace_draft(head)
            engine.replace_target(policy)  # or its prompts were read already
            same, row["frozen"] = rolled_out(engine, prompts, settings, step)
            row["frozen_tau"] = tau_of(same)
            engine.replace_draft(newest)
            vanilla.replace_target(policy)
            _, row["none"] = rolled_out(vanilla, prompts, settings, step)
        rollouts = gathered([engine.encode(prompt) for prompt in prompts], outputs, rewards, settings)
        policy, moments, found = policy_step(
            policy, moments, rollouts, optimizer=optimizer, aux_layers=head.head.config.aux_layers
        )
        row["mismatch"] = float(found["mismatch"])
        live.learn(policy, rollouts, found)
        engine.replace_target(policy)
        engine.replace_draft(live.draft(policy))
        rows.append(row)
        print("  ".join(f"{name} {value:.5g}" for name, value in row.items()), flush=True)
    return rows


def tau_of(outputs: Sequence[Output]) -> float:
    """Returns the tokens a round."""
    return AcceptanceCounts.total(output.stats.counts for output in outputs).tau


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    for field in dataclasses.fields(Settings):
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, type=type(field.default), default=field.default, help=f"default {field.default}")
    given = vars(parser.parse_args())
    target = load_target(given.pop("target"))
    head = load_packaged(target, jnp.float32)
    if head is None:
        raise SystemExit("--target: got a model without a packaged head, expected smollm2-135m-instruct")
    train(target, head, Settings(**given))


if __name__ == "__main__":
    main()
