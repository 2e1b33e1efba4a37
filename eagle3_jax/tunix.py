"""Rollouts of Tunix (github.com/google/tunix) by an engine: the first ones there that draft.

Imported where Tunix is installed, and by nothing here. `RLCluster` makes the engine's rollout of a partial:

    ClusterConfig(rollout_engine=functools.partial(EngineRollout, engine=engine), ...)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from tunix.rl.common import compute_per_token_logps
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.params import SamplingParams
from eagle3_jax.mesh import mesh_of, mesh_set, replicated
from eagle3_jax.models.cache import Pass
from eagle3_jax.models.target import TargetModel

# Of a learner and a target alike, in nats, of half of the tokens: bfloat16 rounds less, another RoPE changes more.
_ALIKE = 0.1

_Result = TypeVar("_Result")


class EngineRollout(BaseRollout):
    """Answers Tunix's prompts with an `Engine`: the same distribution, faster with its draft.

    Log-probabilities are those that Tunix's learners compute: of logits over the temperature, or at temperature 0 of
    the logits. Where `RolloutConfig.top_p` or `top_k` leave tokens out, answers come with those of the remaining
    distribution, as from Tunix's vLLM engine.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        rollout_config: RolloutConfig,
        mesh: Any = None,
    ) -> None:
        """Takes the weights of the actor, Tunix's model without LoRA, over. `RLCluster` gives all but the engine.

        The engine's target has the actor's architecture: Llama, Qwen 2 or Qwen 3. Raises ValueError: weights that do
        not fit (see `Engine.replace_target`), or an actor that computes something else than the engine's target does.
        """
        self._engine, self._tokenizer, self._seeds = engine, tokenizer, np.random.default_rng(0)
        self._temperature = rollout_config.temperature or 1.0
        self.update_params(nnx.state(rollout_actor, nnx.Param))
        if not engine.own_runner.few_bits:
            self._check(rollout_actor)

    def generate(self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any) -> RolloutOutput:
        """Answers each prompt, encoded as Tunix's samplers do, without a chat template.

        Without `rollout_config.seed` each call draws other numbers, the same ones in each run. `kwargs` are further
        fields of `SamplingParams`. Text comes without special tokens; tokens and log-probabilities without padding,
        with the end-of-sequence token. Raises ValueError: a prompt that leaves less than `max_tokens_to_generate` of
        the engine's `max_length`, or that holds the padding token, which learners leave out.
        """
        config, pad = rollout_config, self.pad_id()
        encoded = [self._encode(prompt) for prompt in prompts]
        longest = max(map(len, encoded))
        if (length := longest + config.max_tokens_to_generate) > self._engine.max_length:
            raise ValueError(f"prompts: got {length} tokens with an answer, expected {self._engine.max_length} at most")
        if any(pad in ids for ids in encoded):
            raise ValueError(f"prompts: got the padding token, {pad}, expected a `pad_token` that no prompt has")
        random, seed = self._seeds, config.seed
        if seed is not None:
            random = np.random.default_rng(np.ravel(jax.random.key_data(seed) if isinstance(seed, jax.Array) else seed))
        asked: dict[str, Any] = dict(
            temperature=config.temperature,
            top_p=1.0 if config.top_p is None else config.top_p,
            top_k=max(config.top_k or 0, 0),
            max_tokens=config.max_tokens_to_generate,
            ignore_eos=True,  # these alone end an answer
            stop_token_ids=tuple(config.eos_tokens or [self.eos_id()]),
            logprobs=0 if config.return_logprobs else None,
        )
        seeds = random.integers(2**32, size=len(prompts))
        params = [SamplingParams(**asked | {"seed": seed} | kwargs) for seed in seeds]
        outputs = _apart(self._engine.generate, encoded, params)
        width = config.max_prompt_length if longest <= config.max_prompt_length else 1 << (longest - 1).bit_length()
        return RolloutOutput(
            text=[output.text for output in outputs],
            logits=None,
            tokens=[np.array(output.token_ids, np.int32) for output in outputs],
            left_padded_prompt_tokens=np.array([[pad] * (width - len(ids)) + ids for ids in encoded], np.int32),
            logprobs=[
                np.array([x.processed if config.temperature else x.logprob for x in output.logprobs], np.float32)
                for output in outputs
                if output.logprobs is not None
            ]
            or None,
        )

    def get_per_token_logps(self, prompt_tokens: Any, completion_tokens: Any) -> Float[Array, "b c"]:
        """Computes log-probabilities under the engine's policy now, at the temperature of the training.

        Prompts, int [b, p], are padded on the left; completions, int [b, c], on the right, where they mean nothing.
        """
        return _apart(self._logprobs, prompt_tokens, completion_tokens, self._temperature)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Goes on with another policy, see `Engine.replace_target`; the trainer may donate Tunix's `params`.

        Raises WeightsError: a ValueError with every array that does not fit, LoRA's among them.
        """
        embed = self._engine.target.embed[...]
        if jax.tree.leaves(params)[0].devices() != embed.devices():
            mesh = mesh_of(embed)
            params = jax.device_put(params, embed.sharding if mesh is None else replicated(mesh))
        _apart(self._engine.replace_target, params)

    def pad_id(self) -> int:
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        return self._tokenizer.eos_id()

    def model(self) -> None:
        """Returns None: the engine shares no weights with the trainer, and they stay on its devices."""

    def _encode(self, prompt: str) -> list[int]:
        first = [bos] if (bos := self._tokenizer.bos_id()) else []
        return self._tokenizer.dedup_bos_ids(first + self._tokenizer.encode(prompt))

    def _logprobs(self, prompts: Any, completions: Any, temperature: float) -> Float[Array, "b c"]:
        prompts, completions = np.asarray(prompts), np.asarray(completions)
        padding = np.argmax(prompts != self.pad_id(), axis=1)
        rows = zip(np.concatenate([prompts, completions], axis=1), padding, strict=True)
        tokens = np.stack([np.roll(row, -count) for row, count in rows]).astype(np.int32)
        with mesh_set(mesh_of(self._engine.target.embed[...])):
            starts = (prompts.shape[1] - padding).astype(np.int32)
            return _next_logprobs(self._engine.target, tokens, starts, completions.shape[1], temperature)

    def _check(self, actor: nnx.Module) -> None:
        vocabulary = self._engine.target.config.vocab_size
        tokens = np.random.default_rng(0).integers(vocabulary, size=(1, 128), dtype=np.int32)
        tokens[tokens == self.pad_id()] = (self.pad_id() + 1) % vocabulary
        prompt, completion = np.split(tokens, 2, axis=1)
        learner = compute_per_token_logps(*nnx.split(actor), prompt, completion, self.pad_id(), self.eos_id())
        difference = np.median(np.abs(np.asarray(learner) - np.asarray(self._logprobs(prompt, completion, 1.0))))
        if not difference < _ALIKE:
            raise ValueError(
                f"rollout_actor: got log-probabilities that differ by {difference:.2g} from the engine's, "
                "expected rounding: Tunix's Llama 3 rotates by `rope_theta` 1e6, whatever its config says"
            )


@functools.partial(jax.jit, static_argnames=("count", "temperature"))
def _next_logprobs(
    target: TargetModel, tokens: Int[Array, "b t"], starts: Int[Array, " b"], count: int, temperature: float
) -> Float[Array, "b count"]:
    """Computes the log-probabilities of `count` tokens of each row, from `starts` on, row by row for memory."""
    b, t = tokens.shape
    whole = Pass(jnp.broadcast_to(jnp.arange(t), (b, t)), jnp.zeros(b, jnp.int32), counts=jnp.full(b, t, jnp.int32))
    hidden, _, _ = target(tokens, whole, target.empty_cache(b, t))

    def of_row(row: tuple[Array, Array, Array]) -> Array:
        states, ids, start = row
        logits = target.logits(jax.lax.dynamic_slice_in_dim(states, start - 1, count)[None])[0].astype(jnp.float32)
        chosen = jax.lax.dynamic_slice_in_dim(ids, start, count)
        return jnp.take_along_axis(jax.nn.log_softmax(logits / temperature), chosen[:, None], axis=1)[:, 0]

    return jax.lax.map(of_row, (hidden, tokens, starts))


def _apart(work: Callable[..., _Result], *arguments: Any) -> _Result:
    """Works in a thread of its own, outside the caller's mesh (programs compile once) and transfer guards."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work, *arguments).result()
