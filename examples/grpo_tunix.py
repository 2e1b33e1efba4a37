"""GRPO by Tunix's learner on a small model: rollouts by this package's engine, with drafts and without.

    python examples/grpo_tunix.py --steps 20

Two runs begin with the same policy and see the same questions, those of `examples/grpo.py`. Each prints a line a step:
reward, tokens, rounds (passes of the policy after the prompts), and tokens a second. Needs
`pip install -e ".[train]" google-tunix==0.1.7`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import grpo
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tunix.models.llama3 import model as llama3
from tunix.models.llama3.params import create_model_from_safe_tensors
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig, RolloutOutput

from eagle3_jax import Engine, load_target
from eagle3_jax.export.write_target import write_target
from eagle3_jax.formats.packaged import load_packaged
from eagle3_jax.models.checkpoint.fetch import Target
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.tunix import EngineRollout


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes of a run."""

    steps: int = 20
    questions: int = 4
    answers: int = 8  # to each question: a group, whose mean reward is the baseline
    prompt: int = 64  # tokens of the longest question
    max_tokens: int = 64
    learning_rate: float = 1e-5
    batch_size: int = 4


class Counted(EngineRollout):
    """Counts tokens, rounds and seconds of each step."""

    rows: list[dict[str, float]]

    def generate(self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any) -> RolloutOutput:
        before, start = self._engine.stats(), time.monotonic()
        output = super().generate(prompts, rollout_config, **kwargs)
        after, tokens = self._engine.stats(), sum(map(len, output.tokens))
        row = {"tokens": tokens, "rounds": after.rounds - before.rounds}
        row |= {"dispatches": after.dispatches - before.dispatches, "rate": tokens / (time.monotonic() - start)}
        self.rows.append(row)
        return output


def actor_of(target: Target, mesh: jax.sharding.Mesh) -> llama3.Llama3:
    """Makes Tunix's model of a Llama."""
    c = target.model.config
    sizes: dict[str, Any] = dict(num_layers=c.num_hidden_layers, vocab_size=c.vocab_size, embed_dim=c.hidden_size)
    sizes |= dict(hidden_dim=c.intermediate_size, num_heads=c.num_attention_heads, head_dim=c.head_dim)
    sizes |= dict(num_kv_heads=c.num_key_value_heads, rope_theta=c.rope_theta, norm_eps=c.rms_norm_eps)
    config = llama3.ModelConfig(**sizes, weight_tying=c.tie_word_embeddings)
    # Tunix 0.1.7 rotates with its default, 1e6.
    llama3.apply_rope = functools.partial(llama3.apply_rope, rope_theta=c.rope_theta)
    with tempfile.TemporaryDirectory() as folder:
        write_target(target, path := pathlib.Path(folder) / "target")
        return create_model_from_safe_tensors(str(path), config, mesh, jnp.float32)


def train(
    target: Target,
    head: Draft | Literal["lookup"] | None,
    settings: Settings,
    question: Callable[[np.random.Generator], tuple[str, str]] = grpo.count_up,
    reward: Callable[[str, str], float] = grpo.shared_beginning,
) -> list[dict[str, float]]:
    """Trains the target's model. Prints and returns a row for each step."""
    rows: list[dict[str, float]] = []
    tokenizer = target.tokenizer
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)  # of its own: Tunix's learner leaves padding out
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=auto, devices=jax.devices()[:1])

    def batches() -> Iterator[dict[str, Any]]:
        rng = np.random.default_rng(0)
        for _ in range(settings.steps):
            asked = [question(rng) for _ in range(settings.questions)]
            chats = [[{"role": "user", "content": text}] for text, _ in asked]
            prompts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
            yield {"prompts": np.array(prompts), "right": np.array([right for _, right in asked])}

    def rewarded(prompts: list[str], completions: list[str], right: Any, **_: Any) -> list[float]:
        found = [reward(text, str(answer)) for text, answer in zip(completions, right, strict=True)]
        rows[-1]["reward"] = float(np.mean(found))
        print("  ".join(f"{name} {value:.5g}" for name, value in rows[-1].items()), flush=True)
        return found

    length = settings.prompt + settings.max_tokens
    engine = Engine.load(
        target, head, "auto" if head is None else grpo.CHAIN, batch_size=settings.batch_size, max_length=length
    )
    Counted.rows = rows
    cluster = RLCluster(
        actor=actor_of(target, mesh),
        tokenizer=tokenizer,
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
            rollout_engine=functools.partial(Counted, engine=engine),
            rollout_config=RolloutConfig(
                max_prompt_length=settings.prompt, max_tokens_to_generate=settings.max_tokens, temperature=1.0
            ),
            training_config=RLTrainingConfig(
                actor_optimizer=optax.adam(settings.learning_rate, b2=0.99),
                max_steps=settings.steps,
                eval_every_n_steps=settings.steps + 1,
                mini_batch_size=settings.questions,
                train_micro_batch_size=1,
                rollout_micro_batch_size=settings.questions,
            ),
        ),
    )
    algorithm = GRPOConfig(num_generations=settings.answers, beta=0.0)
    GRPOLearner(rl_cluster=cluster, algo_config=algorithm, reward_fns=[rewarded]).train(batches())
    return rows


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
    for draft in (head, None):
        print("with drafts" if draft else "without drafts")
        train(target, draft, Settings(**given))


if __name__ == "__main__":
    main()
