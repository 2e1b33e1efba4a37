"""Times a training step on a CPU against SpecForge's, in turns, with the same head and batch.

    .venv/bin/pip install --no-deps --require-hashes --requirement tools/peers.txt --target runs/peers
    .venv/bin/python tools/peers_training.py runs/peers

Figures are tokens a second (forward, backward, clipping, AdamW), and a process's peak memory, packages included. The
batch has two rows of 512 tokens; 7 steps of the training-time test, float32, a head's sizes for SmolLM2-135M, random
weights and features. All positions are trained, or the last quarter only (an answer after a long prompt). Each turn is
a separate process, warmed up by one step; JAX loads programs of earlier turns from its cache. `--loss-block 256
--remat` are the settings of `train` with the least memory.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np

from eagle3_jax.models.drafts.eagle3 import DraftHeadConfig

ROWS, LENGTH, STEPS = 2, 512, 7
CONFIG = DraftHeadConfig(
    vocab_size=49152,
    draft_vocab_size=12288,
    hidden_size=576,
    target_hidden_size=576,
    intermediate_size=1536,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=100000.0,
    max_position_embeddings=2048,
    aux_layers=(2, 15, 27),
)
RATE, CLIP = 1e-4, 0.5  # ours clips there too
Arrays = dict[str, np.ndarray]


def random_arrays(share: float) -> Arrays:
    """Makes the inputs of both: the target's embeddings, the draft vocabulary, a batch that trains `share` of a row."""
    c, rng = CONFIG, np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    mask = np.zeros((ROWS, LENGTH), np.int32)
    mask[:, round(LENGTH * (1 - share)) : -1] = 1
    return {
        "token_ids": rng.integers(0, c.vocab_size, (ROWS, LENGTH)).astype(np.int32),
        "aux": normal(ROWS, LENGTH, 3 * c.hidden_size),
        "last_hidden": normal(ROWS, LENGTH, c.hidden_size),
        "loss_mask": mask,
        "embed": 0.1 * normal(c.vocab_size, c.hidden_size),
        "draft_tokens": np.sort(rng.permutation(c.vocab_size)[: c.draft_vocab_size]).astype(np.int32),
    }


def ours(arrays: Arrays, settings: argparse.Namespace) -> Callable[[], float]:
    """Makes a function that takes a step and returns its loss."""
    import jax
    import jax.numpy as jnp

    from eagle3_jax.config import MeshConfig, TrainConfig
    from eagle3_jax.mesh import make_mesh
    from eagle3_jax.runs import machine
    from eagle3_jax.sequence import WHOLE
    from eagle3_jax.training.batch import Batch, Teacher
    from eagle3_jax.training.kinds.eagle3 import Eagle3
    from eagle3_jax.training.optimizer import make_optimizer
    from eagle3_jax.training.state import init_state, make_train_step

    config = TrainConfig(
        ttt_steps=STEPS,
        batch_size=ROWS,
        row_length=LENGTH,
        argmax_mask=False,
        learning_rate=RATE,
        loss_block=settings.loss_block,
        remat=settings.remat,
    )
    one = np.ones((ROWS, LENGTH), np.int32)
    given = {name: jnp.asarray(arrays[name]) for name in ("token_ids", "aux", "last_hidden", "loss_mask")}
    batch = Batch(
        **given,
        split=WHOLE,
        argmax=jnp.asarray(arrays["token_ids"]),
        segment_ids=jnp.asarray(one),
        positions=jnp.asarray(np.cumsum(one, axis=1) - 1),
    )
    embed = jnp.asarray(arrays.pop("embed"))
    teacher = Teacher.of(embed, embed, jnp.asarray(arrays["draft_tokens"]))
    mesh, optimizer = make_mesh(MeshConfig()), make_optimizer(config, 1000)
    kind = Eagle3(CONFIG, config)
    state = init_state(lambda rows: kind.new(0, rows), teacher.rows, optimizer, mesh)
    # As in `train`.
    train_step = make_train_step(kind, optimizer, mesh).lower(state, teacher, batch).compile()
    machine.release_freed()

    def step() -> float:
        nonlocal state
        state, metrics = train_step(state, teacher, batch)
        return float(jax.block_until_ready((state, metrics["loss"]))[1])

    return step


def specforge(arrays: Arrays, _: argparse.Namespace) -> Callable[[], float]:
    """Measures SpecForge's model in the same way, with torch's AdamW."""
    import torch
    from flax import nnx
    from parity_eagle3 import specforge_loss, specforge_model, tensors
    from peers import torch_weights

    from eagle3_jax.models.drafts.eagle3 import DraftHead

    embed, draft_tokens = arrays.pop("embed"), arrays.pop("draft_tokens")
    weights = torch_weights(tensors(DraftHead(CONFIG, rngs=nnx.Rngs(0))), embed, draft_tokens)
    model = specforge_model(CONFIG, weights)
    del weights
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    token_ids, aux, last_hidden, mask = (
        torch.from_numpy(arrays[name]) for name in ("token_ids", "aux", "last_hidden", "loss_mask")
    )
    rows = torch.from_numpy(embed)

    def step() -> float:
        loss, _ = specforge_loss(model, token_ids, aux, last_hidden, rows, mask, STEPS)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


TRAINERS = {"eagle3_jax": ours, "specforge": specforge}


def child(settings: argparse.Namespace) -> None:
    """Measures one trainer in this process; prints a line of JSON."""
    step = TRAINERS[settings.trainer](random_arrays(settings.share), settings)
    step()
    start = time.perf_counter()
    for _ in range(settings.steps):
        step()
    rate = settings.steps * ROWS * LENGTH / (time.perf_counter() - start)
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"tokens_per_second": rate, "gib": gib}))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, help="where the peers are installed")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--loss-block", type=int, default=512)
    parser.add_argument("--remat", action="store_true")
    parser.add_argument("--trainer", choices=TRAINERS, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=float, default=1.0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not (arguments.folder / "specforge").is_dir():
        parser.error(f"folder: got {arguments.folder}, expected one that holds the package specforge")
    if arguments.trainer:
        if arguments.trainer == "specforge":
            from peers import make_importable

            make_importable(arguments.folder)
        child(arguments)
        return

    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }

        def measure(trainer: str, share: float) -> dict[str, float]:
            command = [sys.executable, __file__, str(arguments.folder), "--trainer", trainer]
            command += ["--share", str(share), "--steps", str(arguments.steps)]
            command += ["--loss-block", str(arguments.loss_block), *(["--remat"] if arguments.remat else [])]
            run = subprocess.run(command, env=environment, capture_output=True, text=True)
            if run.returncode:
                raise SystemExit(f"{trainer}: status {run.returncode}\n{run.stderr[-2000:]}")
            return json.loads(run.stdout.splitlines()[-1])

        print(f"{'trains':10}{'':12}{'tokens/s':>10}{'GiB':>8}")
        for share in (1.0, 0.25):
            measure("eagle3_jax", share)  # compiles
            turns = [{trainer: measure(trainer, share) for trainer in TRAINERS} for _ in range(arguments.turns)]
            for trainer in TRAINERS:
                rate = statistics.median(turn[trainer]["tokens_per_second"] for turn in turns)
                gib = max(turn[trainer]["gib"] for turn in turns)
                print(f"{share:<10.0%}{trainer:12}{rate:10.0f}{gib:8.2f}", flush=True)
            ratio = [turn["eagle3_jax"]["tokens_per_second"] / turn["specforge"]["tokens_per_second"] for turn in turns]
            print(f"{'':22}{statistics.median(ratio):9.2f}x  ({min(ratio):.2f} to {max(ratio):.2f})", flush=True)


if __name__ == "__main__":
    main()
