"""Makes golden prompts of the published chat templates: the rendered text, and the assistant's parts of it.

    python tests/golden/templates.py FOLDER tests/golden/templates.json

FOLDER holds the templates as FAMILY.jinja; SOURCES has their origins and digests. The templates have their own licences
and are not part of this repository, which keeps only their renderings of a few conversations. No code of eagle3_jax is
used. Templates are rendered as by transformers, on the fixed date; the assistant's parts, markers included, are
written by hand.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import pathlib
import sys
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

_LLAMA_CPP = ("github.com/Raudbjorn/ggml-llama.cpp", "ae1a0b1c71a8b3a86ede8cb5892ed9ce967d00b2")
_LLAMA_CPP = (*_LLAMA_CPP, "models/templates/{}.jinja")
_OPENVINO = ("github.com/openvinotoolkit/openvino.genai", "da1db864d2bc1a265e9a036f5b57ef13f0e86c2c")
_OPENVINO = (*_OPENVINO, "tests/python_tests/data/tokenizer_configs.py, {}")
_HUGGINGFACE = ("github.com/huggingface/huggingface.js", "fe42e68017ffc76d09922ea8f9b38a6964345710")
_HUGGINGFACE = (*_HUGGINGFACE, "packages/ollama-utils/src/chat-template-automap.ts, {}")
_GORILLA = ("github.com/ShishirPatil/gorilla", "da7f73a806b4f0bdc8f5f6641616fc10e271007a")
_GORILLA = (*_GORILLA, "berkeley-function-call-leaderboard/bfcl_eval/model_handler/local_inference/exaone4.py, {}")
_OPEN_INSTRUCT = ("github.com/allenai/open-instruct", "e6c3044aa6201c8bfa4573c1b03142af599e730d")
_OPEN_INSTRUCT = (*_OPEN_INSTRUCT, "open_instruct/dataset_transformation.py, {}")
_TRANSFORMERS = ("github.com/huggingface/transformers", "0bbbf64fb93addfd4d24af8d4c8fd20aa5881091")
_TRANSFORMERS = (*_TRANSFORMERS, "src/transformers/models/ernie4_5/convert_ernie4_5_tokenizer.py, {}")
# family -> origin of a copy of its template, its name there, and its sha256. Llama 3.3 has 3.1's. OLMo 3's is that of
# its thinkers, SmolLM3's a copy that Unsloth edited, EXAONE 4's without its indentation.
SOURCES = {
    "llama2": (
        _OPENVINO,
        "meta-llama/Llama-2-7b-chat-hf",
        "e8d5b5a546d3f19df16a5320c614fab05bdc4edd50e850f1afd947b503ea41cf",
    ),
    "llama31": (
        _LLAMA_CPP,
        "meta-llama-Llama-3.1-8B-Instruct",
        "e10ca381b1ccc5cf9db52e371f3b6651576caee0a630b452e2816b2d404d4b65",
    ),
    "llama32": (
        _LLAMA_CPP,
        "meta-llama-Llama-3.2-3B-Instruct",
        "5816fce10444e03c2e9ee1ef8a4a1ea61ae7e69e438613f3b17b69d0426223a4",
    ),
    "llama4": (
        _HUGGINGFACE,
        "library/llama4:latest",
        "01a91bfb2e84c8055bf7b635898fef3cae0b69e42ac5634c212d308e0e9091bd",
    ),
    "qwen25": (
        _LLAMA_CPP,
        "Qwen-Qwen2.5-7B-Instruct",
        "cd8e9439f0570856fd70470bf8889ebd8b5d1107207f67a5efb46e342330527f",
    ),
    "qwen3": (_LLAMA_CPP, "Qwen-Qwen3-0.6B", "87a2728cb8dc9fe424d624542f6060ec05a1d285ebbec578bb078900e33396b5"),
    "gemma3": (_OPENVINO, "google/gemma-3-1b-it", "7de1c58e208eda46e9c7f86397df37ec49883aeece39fb961e0a6b24088dd3c4"),
    "gpt_oss": (_LLAMA_CPP, "openai-gpt-oss-120b", "a4c9919cbbd4acdd51ccffe22da049264b1b73e59055fa58811a99efbd7c8146"),
    "mimo": (_LLAMA_CPP, "MiMo-VL", "10490379c20af484107413cc5fd93f6e587d0cb4364a183a89ab68849406b80d"),
    "mistral_nemo": (
        _LLAMA_CPP,
        "mistralai-Mistral-Nemo-Instruct-2407",
        "e4676cb56dffea7782fd3e2b577cfaf1e123537e6ef49b3ec7caa6c095c62272",
    ),
    "ministral3": (
        _LLAMA_CPP,
        "mistralai-Ministral-3-14B-Reasoning-2512",
        "39f03c383413f531fd302c06c7e982ad98c83f0657a8339ae25478ccb81fdcda",
    ),
    "phi35": (
        _LLAMA_CPP,
        "microsoft-Phi-3.5-mini-instruct",
        "78d976a442bcde2f0be15aafbb8e3050e1104f86732266f68403251b89982a90",
    ),
    "phi4": (
        _HUGGINGFACE,
        "library/phi4:14b",
        "a41fb8727c4f1e722e53cb1ea935038a1177b8bdf09387f3b048f9da5255ef3e",
    ),
    "phi4_mini": (
        _HUGGINGFACE,
        "library/phi4-mini:3.8b",
        "febf589225c9728ab791f52e8897d7607a823d45368f0a4c92fa68997b40cce9",
    ),
    "smollm3": (
        _LLAMA_CPP,
        "HuggingFaceTB-SmolLM3-3B",
        "19eacf64569032f07644ea92c8e2a87af06ee7008147557302c31e474912ca97",
    ),
    "olmo2": (
        _HUGGINGFACE,
        "library/olmo2:7b",
        "fe689ffbd6a4e2d0532d7480696b065b10e0e1eff3f9b9fc4bea415761e4bf4a",
    ),
    "olmo3": (
        _OPEN_INSTRUCT,
        "olmo_thinker",
        "eba6e269f669706e5c788e370160dad953137f3fa7014fa69d03c7b3ad9f0e72",
    ),
    "granite33": (
        _LLAMA_CPP,
        "ibm-granite-granite-3.3-2B-Instruct",
        "3c71df5f659987462c882bf9e295b597dc19902467a7312ea382c5896681bc02",
    ),
    "granite4": (
        _LLAMA_CPP,
        "ibm-granite-granite-4.0",
        "9524df67b77a7b25a2dfee898f75b316a157eb9d855b51e32aeac79d7c8a83ce",
    ),
    "seed_oss": (
        _LLAMA_CPP,
        "ByteDance-Seed-OSS",
        "3f9e0dc4adeb8032287d0129dc75b6298fee8698a52ab41e863dbc89929330d3",
    ),
    "exaone4": (
        _GORILLA,
        "chat_template",
        "ecb3e4e73c6b64a69a08498d17989088726b4caac628025ebc9448d40112d5d3",
    ),
    "ernie45": (
        _TRANSFORMERS,
        "DEFAULT_CHAT_TEMPLATE",
        "471fb571976770318fe6f27749e37940be8d29c0a7770558140f141f5906f2a2",
    ),
    "glm45": (
        _LLAMA_CPP,
        "GLM-4.6",
        "8804f445c761b9f259e3c1126a579d481a22ca09b2a3d32bcc4eb91bc36e0301",
    ),
    "gemma4": (
        _LLAMA_CPP,
        "google-gemma-4-31B-it",
        "85a08664d16d8f3be4416c92427b3ac10df1024ac566cc0b4bc3bab409393f98",
    ),
}

_HEADERS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
_CHATML = {"eos_token": "<|im_end|>", "additional": ["<|im_start|>"]}
_MISTRAL = {"bos_token": "<s>", "eos_token": "</s>", "additional": ["[INST]", "[/INST]"]}
_PHI = {"eos_token": "<|endoftext|>", "additional": ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]}
_GRANITE = {"eos_token": "<|end_of_text|>", "additional": ["<|start_of_role|>", "<|end_of_role|>"]}
SPECIAL: dict[str, dict[str, Any]] = {
    "llama2": {"bos_token": "<s>", "eos_token": "</s>"},
    "llama31": _HEADERS | {"additional": ["<|start_header_id|>", "<|end_header_id|>"]},
    "llama32": _HEADERS | {"additional": ["<|start_header_id|>", "<|end_header_id|>"]},
    "llama4": _HEADERS | {"eos_token": "<|eot|>", "additional": ["<|header_start|>", "<|header_end|>"]},
    "qwen25": _CHATML,
    "qwen3": _CHATML,
    "gemma3": {"bos_token": "<bos>", "eos_token": "<eos>", "additional": ["<start_of_turn>", "<end_of_turn>"]},
    "gpt_oss": {
        "bos_token": "<|startoftext|>",
        "eos_token": "<|return|>",
        "additional": ["<|start|>", "<|end|>", "<|message|>", "<|channel|>"],
    },
    "mimo": _CHATML,
    "mistral_nemo": _MISTRAL,
    "ministral3": _MISTRAL | {"additional": ["[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]},
    "phi35": _PHI | {"bos_token": "<s>"},
    "phi4": _CHATML | {"additional": ["<|im_start|>", "<|im_sep|>"]},
    "phi4_mini": _PHI,
    "smollm3": _CHATML,
    "olmo2": {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    "olmo3": {"eos_token": "<|endoftext|>", "additional": ["<|im_start|>", "<|im_end|>"]},
    "granite33": _GRANITE,
    "granite4": _GRANITE,
    "seed_oss": {"bos_token": "<seed:bos>", "eos_token": "<seed:eos>"},
    "exaone4": {"eos_token": "[|endofturn|]", "additional": ["[|system|]", "[|user|]", "[|assistant|]"]},
    "ernie45": {"eos_token": "</s>", "cls_token": "<|begin_of_sentence|>", "sep_token": "<|end_of_sentence|>"},
    "glm45": {
        "eos_token": "<|endoftext|>",
        "additional": ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"],
    },
    "gemma4": {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "additional": ["<|turn>", "<turn|>", "<|channel>", "<channel|>"],
    },
}

_FIRST, _SECOND = "Air scatters blue light most.", "The light's way is longer, so red is left."
_THOUGHTS = "Rayleigh, of course.", "Longer path.\nRed stays."
TALK = [
    {"role": "user", "content": "Why is the sky blue?"},
    {"role": "assistant", "content": _FIRST},
    {"role": "user", "content": "And at dusk?\n\nBriefly."},
    {"role": "assistant", "content": _SECOND},
]
SYSTEM = [{"role": "system", "content": "Answer in one sentence."}, *TALK]
THOUGHT = [
    turn | ({"content": f"<think>\n{_THOUGHTS[i // 2]}\n</think>\n\n{turn['content']}"} if i % 2 else {})
    for i, turn in enumerate(TALK)
]
CHANNELS = [turn | ({"thinking": _THOUGHTS[i // 2]} if i % 2 else {}) for i, turn in enumerate(TALK)]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Sum of two numbers, <10 digits each.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]
_CALL = {"name": "add", "arguments": '{"a": 2, "b": 3}'}  # OpenAI's form: arguments are text
CALLS = [
    {"role": "user", "content": "What is 2 + 3?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "A sum.",
        "tool_calls": [{"id": "call_1", "type": "function", "function": _CALL}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "5"},
    {"role": "assistant", "content": "It is 5.", "reasoning_content": "As the tool says."},
]

# family -> the assistant's parts in each conversation: its words, and the generated markers around them.
_FINAL, _ANALYSIS = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"


def _plain(before: str, after: str) -> list[str]:
    return [f"{before}{words}{after}" for words in (_FIRST, _SECOND)]


_QWEN3 = [f"{_FIRST}<|im_end|>", f"<think>\n\n</think>\n\n{_SECOND}<|im_end|>"]
_QWEN3_CALLS = [
    '<think>\nA sum.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>',
    "<think>\nAs the tool says.\n</think>\n\nIt is 5.<|im_end|>",
]
_GPT_OSS = [f"{_FINAL}{_FIRST}<|end|>", f"{_FINAL}{_SECOND}<|return|>"]
_WITH_CHANNEL = f"{_ANALYSIS}{_THOUGHTS[1]}<|end|><|start|>assistant{_GPT_OSS[1]}"
_WITH_THOUGHT = [f"{turn['content']}<|im_end|>" for turn in THOUGHT[1::2]]
_NO_THOUGHT = "\n<think></think>\n"
_GLM = [f"{_NO_THOUGHT}{_FIRST}<|user|>", f"{_NO_THOUGHT}{_SECOND}"]  # the next turn's opening ends an answer
_OLMO3 = [f"{_FIRST}<|im_end|>", f"{_SECOND}<|endoftext|>"]
ANSWERS: dict[str, dict[str, list[str]]] = {
    "llama2": dict.fromkeys(("system", "talk"), _plain(" ", " </s>")),
    "llama31": dict.fromkeys(("system", "talk"), _plain("", "<|eot_id|>")),
    "llama32": dict.fromkeys(("system", "talk"), _plain("", "<|eot_id|>")),
    "llama4": dict.fromkeys(("system", "talk"), _plain("", "<|eot|>")),
    "qwen25": dict.fromkeys(("system", "talk"), _plain("", "<|im_end|>")),
    # Only the last answer has thoughts, empty ones if it had none.
    "qwen3": {"system": _QWEN3, "talk": _QWEN3, "thought": [_QWEN3[0], _WITH_THOUGHT[1]], "calls": _QWEN3_CALLS},
    "gemma3": dict.fromkeys(("system", "talk"), _plain("", "<end_of_turn>")),
    "gpt_oss": {"system": _GPT_OSS, "talk": _GPT_OSS, "channels": [_GPT_OSS[0], _WITH_CHANNEL]},
    "mimo": dict.fromkeys(("system", "talk"), _plain("", "<|im_end|>")) | {"thought": _WITH_THOUGHT},
    "mistral_nemo": dict.fromkeys(("system", "talk"), _plain("", "</s>")),
    "ministral3": dict.fromkeys(("system", "talk"), _plain("", "</s>")),
    "phi35": dict.fromkeys(("system", "talk"), _plain("", "<|end|>")),
    "phi4": dict.fromkeys(("system", "talk"), _plain("", "<|im_end|>")),
    "phi4_mini": dict.fromkeys(("system", "talk"), _plain("", "<|end|>")),
    "smollm3": dict.fromkeys(("system", "talk"), _plain("", "<|im_end|>")) | {"thought": _WITH_THOUGHT},
    "olmo2": dict.fromkeys(("system", "talk"), _plain("", "<|endoftext|>")),
    # Its prompts open the thoughts.
    "olmo3": {
        "system": _OLMO3,
        "talk": _OLMO3,
        "thought": [
            _WITH_THOUGHT[0].removeprefix("<think>"),
            _WITH_THOUGHT[1].removeprefix("<think>").replace("<|im_end|>", "<|endoftext|>"),
        ],
    },
    "granite33": dict.fromkeys(("system", "talk"), _plain("", "<|end_of_text|>")),
    "granite4": dict.fromkeys(("system", "talk"), _plain("", "<|end_of_text|>")),
    "seed_oss": dict.fromkeys(("system", "talk"), _plain("", "<seed:eos>")),
    # Its prompts have empty thoughts, and so has every answer before.
    "exaone4": dict.fromkeys(("system", "talk", "thought"), _plain("", "[|endofturn|]")),
    "ernie45": dict.fromkeys(("system", "talk"), _plain("", "<|end_of_sentence|>")),
    "glm45": {
        "system": _GLM,
        "talk": _GLM,
        "thought": [_GLM[0], f"\n<think>{_THOUGHTS[1]}</think>\n{_SECOND}"],
    },
    "gemma4": dict.fromkeys(("system", "talk"), _plain("", "<turn|>")),
}
CONVERSATIONS = {"system": SYSTEM, "talk": TALK, "thought": THOUGHT, "channels": CHANNELS, "calls": CALLS}
# Conversations whose target may call tools.
TOOLS_OF = {"calls": TOOLS}


def raise_exception(message: str) -> None:
    raise ValueError(message)


def golden(family: str, text: str) -> dict[str, Any]:
    (repository, revision, path), name, digest = SOURCES[family]
    found = hashlib.sha256(text.encode()).hexdigest()
    if found != digest:
        raise ValueError(f"{family}.jinja: got sha256 {found}, expected {digest}")
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    known: dict[str, Any] = {
        "strftime_now": datetime.datetime(2024, 7, 26).strftime,
        "raise_exception": raise_exception,
    }
    environment.globals.update(known)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)  # jinja2's escapes HTML
    template = environment.from_string(text)
    special = SPECIAL[family]
    given = {name: token for name, token in special.items() if name != "additional"} | {"date_string": "26 Jul 2024"}
    rendered = {}
    for name_of, answers in ANSWERS[family].items():
        messages, tools = CONVERSATIONS[name_of], TOOLS_OF.get(name_of)
        whole = template.render(messages=messages, tools=tools, add_generation_prompt=False, **given)
        prompt = template.render(messages=messages[:-1], tools=tools, add_generation_prompt=True, **given)
        rest = whole
        for words in answers:  # each once, in this order
            _, there, rest = rest.partition(words)
            if not there:
                raise ValueError(f"{family}, {name_of}: expected {words!r} in {whole!r}")
        rendered[name_of] = {"text": whole, "prompt": prompt, "said": answers}
    source = {"repository": repository, "revision": revision, "path": path.format(name), "sha256": digest}
    return {"source": source, "special": special, "rendered": rendered}


def main() -> None:
    folder, output = map(pathlib.Path, sys.argv[1:])
    families = {family: golden(family, (folder / f"{family}.jinja").read_bytes().decode()) for family in SOURCES}
    values = {"conversations": CONVERSATIONS, "tools": TOOLS_OF, "families": families}
    output.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
