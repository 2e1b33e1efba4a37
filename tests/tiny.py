"""Tiny targets; one in a folder, as a hub would have it, a run on it, and the verbs as a user starts them.

The target in the folder has something to say: its weights are made, not trained. Each of its words has a few words that
may follow it, and what came before decides between them. A head learns that within seconds, but not all of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import ml_dtypes
import numpy as np
import yaml
from flax import nnx
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from eagle3_jax.models.cache import Pass
from eagle3_jax.models.checkpoint.fetch import Target
from eagle3_jax.models.families.llama import Llama, LlamaConfig

REPOSITORY = pathlib.Path(__file__).parents[1]

WORDS = (
    "apple bird cloud door egg fish garden house iron juice king lamp moon night orange paper queen river snow tree "
    "under valley water yellow zebra blue cat dog eagle fire green hill island jump kite leaf mountain north old pink"
).split()
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# 4 KV heads divide over a model axis of up to 4 devices. More rows in the vocabulary than tokens, as many models have.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 448,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE in which each of WORDS is one token, with its space or without."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"] - 8,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([" " + word for word in WORDS] * 2, trainer)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_byte_tokenizer(chat_template: Any, **special: Any) -> PreTrainedTokenizerFast:
    """A token a byte, and the special tokens that are given as transformers names them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.chat_template = chat_template
    return tokenizer


def llama_config(**changes: Any) -> LlamaConfig:
    """A target's architecture with grouped queries, small where nothing else is asked for."""
    values: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
        "max_position_embeddings": 128,
        "eos_token_ids": (),
        "aux_layers": (0, 1, 3),
    }
    return LlamaConfig(**values | changes)


@contextlib.contextmanager
def no_type_checks() -> Iterator[None]:
    """As users run the package: what is annotated is not checked."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


def identity(aux_layers: Sequence[int]) -> dict[str, Any]:
    """Of a target that is not a folder's."""
    names = {"weights": "w", "tokenizer": "t", "chat_template": "c"}
    return names | {
        "name": "tiny",
        "architecture": "LlamaForCausalLM",
        "aux_layers": list(aux_layers),
        "dtype": "float32",
    }


def make_target(config: LlamaConfig, tokenizer: Any = None) -> Target:
    """With random weights, in no folder."""
    return Target(Llama(config, rngs=nnx.Rngs(0)), tokenizer, identity(config.aux_layers), pathlib.Path())


def make_weights(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> dict[str, np.ndarray]:
    """Hugging Face tensors, bfloat16. The LM head holds which word follows which; the blocks add what came before."""
    rng = np.random.default_rng(seed)
    h, f, vocabulary = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    heads, kv = (CONFIG[name] * CONFIG["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))

    def ids(texts: Sequence[str]) -> list[int]:
        encoded = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        assert all(len(tokens) == 1 for tokens in encoded), "each word is a token"
        return [tokens[0] for tokens in encoded]

    words, (newline, end) = ids([" " + word for word in WORDS]), ids(["\n", "<|im_end|>"])
    embed = rng.normal(size=(vocabulary, h))
    embed[[*words, newline, end]] = np.linalg.qr(rng.normal(size=(h, h)))[0][: len(words) + 2]
    embed /= np.linalg.norm(embed, axis=1, keepdims=True)
    lm_head = np.zeros((vocabulary, h))
    for place, word in enumerate(words):
        following = [words[(place + 1) % len(words)], *rng.choice(words, 2, replace=False)]
        for token, strength in zip(following, (1.0, 0.9, 0.8), strict=True):
            lm_head[token] += strength * embed[word]
    lm_head[end] += 0.95 * embed[rng.choice(words, 3, replace=False)].sum(axis=0)
    lm_head[words] += rng.uniform(0.6, 1.0, (len(words), 1)) * embed[newline]

    def matrix(rows: int, columns: int, scale: float) -> np.ndarray:
        return scale * rng.normal(size=(rows, columns)) / np.sqrt(columns)

    tensors = {"model.embed_tokens.weight": embed, "lm_head.weight": 2.0 * lm_head, "model.norm.weight": np.ones(h)}
    for layer in range(CONFIG["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        tensors |= {
            f"{name}.input_layernorm.weight": np.ones(h),
            f"{name}.post_attention_layernorm.weight": np.ones(h),
            f"{name}.self_attn.q_proj.weight": matrix(heads, h, 1.5),
            f"{name}.self_attn.k_proj.weight": matrix(kv, h, 1.5),
            f"{name}.self_attn.v_proj.weight": matrix(kv, h, 1.0),
            f"{name}.self_attn.o_proj.weight": matrix(h, heads, 0.1),
            f"{name}.mlp.gate_proj.weight": matrix(f, h, 1.0),
            f"{name}.mlp.up_proj.weight": matrix(f, h, 1.0),
            f"{name}.mlp.down_proj.weight": matrix(h, f, 0.1),
        }
    return {name: np.ascontiguousarray(value.astype(ml_dtypes.bfloat16)) for name, value in tensors.items()}


def write_target(folder: pathlib.Path, seed: int = 0) -> pathlib.Path:
    """Writes the target as a Hugging Face folder: safetensors in bfloat16, configs, tokenizer, chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    save_file(make_weights(tokenizer, seed), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}) + "\n")
    tokenizer.save_pretrained(folder)
    return folder


def write_prompts(path: pathlib.Path, count: int, seed: int = 0) -> pathlib.Path:
    """A JSONL file of as many prompts of the target's words, in two categories."""
    rng = np.random.default_rng(seed)
    lines = [
        {"prompt": " ".join(rng.choice(WORDS, rng.integers(6, 14))), "category": "odd" if i % 2 else "even"}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_run(folder: pathlib.Path, prompts: int = 64, **sections: Mapping[str, Any]) -> pathlib.Path:
    """Writes a target, its prompts and a YAML run of seconds a verb into a folder; the path of the YAML.

    The paths in it are relative to the folder, where its verbs are started: a copy of the folder is a run of its own.

    Args:
        prompts: how many there are.
        sections: fields that replace or join the ones here, e.g. train={"max_steps": 3}.
    """
    write_target(folder / "target")
    write_prompts(folder / "prompts.jsonl", prompts)
    values: dict[str, Any] = {
        "run_dir": "run",
        "seed": 0,
        "target": {"name": "target", "aux_layers": [1, 2, 3]},
        "draft": {"vocab_size": 48},
        "mesh": {"data": 1, "model": 1},
        "prepare": {
            "sources": [{"kind": "jsonl", "path": "prompts.jsonl"}],
            "held_out": 0.2,
        },
        "regenerate": {"temperature": 0.5, "max_tokens": 32, "max_length": 128, "batch_size": 8},
        # 8 bits would move a draft here and there: what the trainer and the decoder count is compared to the round.
        "extract": {"states": "bfloat16", "max_length": 128, "batch_tokens": 1024, "shard_records": 16},
        "train": {
            "ttt_steps": 3,
            "batch_size": 4,
            "row_length": 128,
            "loss_block": 128,
            "epochs": 8,
            "learning_rate": 1e-2,
            "log_every": 5,
            "eval_every": 20,
            "eval_batches": 8,
            "checkpoint_every": 20,
        },
        "export": {"dtype": "float32"},
        "evaluate": {"max_tokens": 32, "tree": {"num_steps": 3, "topk": 1, "num_draft_tokens": 4}},
    }
    for name, section in sections.items():
        values[name] = values[name] | dict(section)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def environment(**more: str) -> dict[str, str]:
    """Of a process that a test starts: JAX on CPUs, no hub, no PyTorch, and this package from whatever folder.

    XLA's flags and log level are a user's: a verb runs what it compiles for longer than it compiles. What one process
    compiled the next one finds.
    """
    tests = REPOSITORY / "tests"
    paths = [str(tests / "started"), str(tests), str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    common = {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    if cache := getattr(jax.config, "jax_compilation_cache_dir"):  # noqa: B009
        common |= {"JAX_COMPILATION_CACHE_DIR": f"{cache}-started", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    of_tests = ("XLA_FLAGS", "TF_CPP_MIN_LOG_LEVEL")
    return {name: value for name, value in os.environ.items() if name not in of_tests} | common | more


def run_verb(
    verb: str, config: pathlib.Path, *arguments: str, timeout: float = 300, **more: str
) -> subprocess.CompletedProcess[str]:
    """`python -m eagle3_jax.<verb> --config ...` in a process of its own, on one CPU device unless told otherwise."""
    return subprocess.run(
        [sys.executable, "-m", f"eagle3_jax.{verb}", "--config", str(config), *arguments],
        cwd=config.parent,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def verb_in(config: pathlib.Path, verb: str, *arguments: str, timeout: float = 300) -> None:
    """`run_verb`, which must succeed."""
    ended = run_verb(verb, config, *arguments, timeout=timeout)
    assert ended.returncode == 0, f"{verb}: {ended.stdout}\n{ended.stderr}"


VERBS = ("prepare", "regenerate", "extract", "train", "export", "evaluate", "report")


def arguments_of(verb: str, run: str = "run") -> list[str]:
    """What a verb wants beside its YAML, in a run's folder."""
    if verb != "evaluate":
        return []
    return ["--prompts", f"{run}/prompts/held_out.jsonl", "--output", f"{run}/evaluation/chain.json"]


@dataclasses.dataclass(frozen=True)
class Run:
    """A run in which every verb has been.

    Attributes:
        config: its YAML. Beside it are the target, the prompts, and `run`, what the verbs wrote.
        stderr: verb -> what it printed there.
        seconds: verb -> how long it took.
    """

    config: pathlib.Path
    stderr: dict[str, str]
    seconds: dict[str, float]

    @property
    def folder(self) -> pathlib.Path:
        return self.config.parent / "run"

    def copy(self, folder: pathlib.Path) -> Run:
        """A run of its own, for those who change something."""
        shutil.copytree(self.config.parent, folder)
        return dataclasses.replace(self, config=folder / self.config.name)


def make_run(folder: pathlib.Path) -> Run:
    """Starts every verb as a user does, each on what the one before wrote; or finds that done.

    Greedy answers: the held-out conversations are then what decoding says, so that what the trainer counts on them and
    what `evaluate` counts are the same rounds.
    """
    done = folder / "done.json"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        config = write_run(
            folder,
            prompts=96,
            regenerate={"temperature": 0.0, "max_tokens": 96, "max_length": 192},
            extract={"max_length": 192},
            train={"row_length": 256, "eval_batches": 100, "eval_every": 20, "checkpoint_every": 10},
            evaluate={"max_tokens": 96},
        )
        stderr, seconds = {}, {}
        for verb in VERBS:
            start = time.monotonic()
            ended = run_verb(verb, config, *arguments_of(verb))
            assert ended.returncode == 0, f"{verb}: {ended.stdout}\n{ended.stderr}"
            stderr[verb], seconds[verb] = ended.stderr, time.monotonic() - start
        done.write_text(json.dumps({"stderr": stderr, "seconds": seconds}))
    return Run(folder / "run.yaml", **json.loads(done.read_text()))


class Started(subprocess.Popen[str]):
    """A process that prints into a file: a pipe that nobody reads fills up, and then its process stands still."""

    def __init__(self, command: Sequence[str], **where: Any) -> None:
        self._file = tempfile.NamedTemporaryFile()
        super().__init__(command, stdout=self._file, stderr=subprocess.STDOUT, text=True, **where)

    def printed(self) -> str:
        """What it has printed so far."""
        return pathlib.Path(self._file.name).read_text()

    def ended(self, timeout: float = 300) -> tuple[int, str]:
        """(exit status, output), once. It is killed where it does not end in so many seconds."""
        with self._file:
            try:
                return self.wait(timeout), self.printed()
            finally:
                self.kill()


def start_processes(
    count: int, arguments: Sequence[str], devices: int = 1, cwd: pathlib.Path = REPOSITORY, **more: str
) -> list[Started]:
    """`python ARGUMENTS` as `count` processes of one run, on so many CPU devices each; one needs no coordinator."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    common = {"JAX_NUM_CPU_DEVICES": str(devices)}
    if count > 1:
        common |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count)}
        common |= {"EAGLE3_JAX_HEARTBEAT_SECONDS": "15"}
    return [
        Started(
            [sys.executable, *arguments],
            cwd=cwd,
            env=environment(**common | more, JAX_PROCESS_ID=str(index)),
        )
        for index in range(count)
    ]


def end_processes(processes: Sequence[Started], timeout: float = 280) -> list[tuple[int, str]]:
    """(exit status, output) of each; none is left behind when one does not end in time."""
    end = time.monotonic() + timeout
    try:
        return [process.ended(max(end - time.monotonic(), 0)) for process in processes]
    finally:
        for process in processes:
            process.kill()


def start_verb(
    count: int, verb: str, config: pathlib.Path, *arguments: str, devices: int = 1, **more: str
) -> list[Started]:
    """A verb as the processes of one run."""
    command = ["-m", f"eagle3_jax.{verb}", "--config", str(config), *arguments]
    return start_processes(count, command, devices, config.parent, **more)


def saved_steps(folder: pathlib.Path) -> list[int]:
    """The steps whose checkpoints are complete in a checkpoints folder, ascending."""
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def saved(folder: pathlib.Path, step: int) -> dict[str, bytes]:
    """All bytes of a step's checkpoint, weights and moments, by leaf."""
    from orbax.checkpoint import v1 as ocp  # late: slow to import, and few tests read checkpoints

    def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
        where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    with ocp.training.Checkpointer(str(folder)) as checkpoints:
        held = checkpoints.checkpointables_metadata(step).metadata
        like = {part: jax.tree.map(shape_of, held[part]) for part in ("head", "optimizer")}
        parts = checkpoints.load_checkpointables(step, like)
    return {f"{part}/{name}": np.asarray(x).tobytes() for part, leaves in parts.items() for name, x in leaves.items()}


def assert_second_token_is_the_targets(target: Any, prompt: np.ndarray, got: np.ndarray, temperature: float) -> None:
    """Second tokens of answers to one prompt against their exact distribution, by chi-square.

    Args:
        target: the model; got: [samples], token ids.
    """
    size, length = target.config.vocab_size, len(prompt) + 1
    first = np.arange(size, dtype=np.int32)[:, None]
    tokens = np.concatenate([np.tile(prompt, (size, 1)), first], axis=1)
    positions = jnp.broadcast_to(jnp.arange(length), (size, length))
    cache, lengths = target.empty_cache(size, length), jnp.zeros(size, jnp.int32)
    hidden, _, _ = target(jnp.asarray(tokens), Pass(positions, lengths), cache)
    probs = np.asarray(jax.nn.softmax(target.logits(hidden[:, -2:]) / temperature, axis=-1), np.float64)
    expected = len(got) * probs[0, 0] @ probs[:, 1]
    common = expected >= 5
    chi_square = ((np.bincount(got, minlength=size) - expected) ** 2 / expected)[common].sum()
    freedom = int(common.sum()) - 1
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)
