"""Bodies that /v1/chat/completions and /v1/completions refuse: every field with values that it cannot have."""

import json
from typing import Any

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "apple"}], "max_tokens": 2, "temperature": 0}
COMPLETION: dict[str, Any] = {"prompt": "apple", "max_tokens": 2, "temperature": 0}
WHOLE_NUMBERS = ("1", 1.5, True, [1], {}, -2, 10**30)
NUMBERS = ("1", True, [1.0], {}, -200.0, float("nan"), float("inf"), 1e300)
TEXTS = (1, True, ["a"], {})
FLAGS = ("true", 1, 0.0, [True], {})
BOTH = {
    "model": TEXTS,
    "stream": FLAGS,
    "stream_options": (1, "a", [], {"include_usage": "yes"}, {"include_usage": True}),
    "n": (*WHOLE_NUMBERS, 0),
    "max_tokens": (*WHOLE_NUMBERS[:-1], 0),
    "min_tokens": (*WHOLE_NUMBERS, 3),
    "temperature": NUMBERS,
    "top_p": (*NUMBERS, 0, 1.01, 1e-45),
    "top_k": WHOLE_NUMBERS,
    "min_p": (*NUMBERS, 1.01),
    "presence_penalty": (*NUMBERS, 2.5),
    "frequency_penalty": (*NUMBERS, -2.5),
    "repetition_penalty": (*NUMBERS, 0, 1e-300),
    "seed": ("1", 1.5, True, [], 2**63, 10**30),
    "stop": (1, True, {}, "", [""], ["a", 1], [["a"]], ["a"] * 17, "a" * 257),
    "stop_token_ids": (1, "1", {}, ["1"], [1.5], [True], [-1], [448], [10**30], [*range(3, 19)], [*range(17)]),
    "logit_bias": (
        *(1, "a", [], [1], {"a": 1}, {"1.5": 1}, {"-1": 1}, {"448": 1}, {str(10**30): 1}, {"5": "1"}),
        *({"5": 101}, {"5": None}, {"5": float("nan")}, {str(i): 1 for i in range(65)}),
    ),
    "ignore_eos": FLAGS,
    "best_of": (2, "2"),
    "use_beam_search": (True,),
    "structured_outputs": (
        *(1, "a", {"lark": "a"}, {"json": {}, "regex": "a"}, {"json": "{"}, {"json": {"type": "a"}}, {"regex": ""}),
        *({"choice": []}, {"choice": [1]}, {"choice": "a"}, {"grammar": "a"}, {"regex": "("}, {"json_object": 1}),
    ),
    "guided_json": (1, "{", {"type": "a"}, {"type": "array", "uniqueItems": True}),
    "guided_regex": (1, "", "(", "(?=a)"),
    "guided_choice": (1, [], "a", [""]),
    "guided_grammar": ("a",),
    "prompt_logprobs": (1,),
    "truncate_prompt_tokens": (5,),
    "allowed_token_ids": ([1],),
    "bad_words": (["a"],),
    "response_format": (
        *("json", {}, {"type": "a"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}),
        *({"type": "json_schema", "json_schema": {"schema": schema}} for schema in (1, {"type": "a"}, {"not": {}})),
    ),
    "json_schema": ("{",),
    "regex": ("(",),
    "ebnf": ('root ::= "a"',),
    "structural_tag": ("{}",),
    "stop_regex": ("a+", ["a+"]),
    "no_stop_trim": (True,),
    "lora_path": ("a/lora", ["a/lora"]),
    "custom_logit_processor": ("a",),
    "return_hidden_states": (True,),
    "prompt_embeds": ("AAAA", ["AAAA"]),
    "length_penalty": (0.8, 2),
    "documents": ([{"text": "a"}],),
    "reasoning_effort": ("none", "low", "high"),
    "verbosity": ("low", "high"),
    "skip_special_tokens": FLAGS,
    "spaces_between_special_tokens": (False,),
    "include_stop_str_in_output": (True,),
}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
OF_CHAT = {
    "messages": (
        *(None, 1, "apple", {}, [], [1], ["apple"], [{}], [{"role": "user"}], [{"content": "a"}], [[]]),
        *([{"role": role, "content": "a"}] for role in (1, None, "function", "User", "")),
        *([{"role": "user", "content": content}] for content in (None, 1, {}, ["a"], [IMAGE], [{"type": "text"}])),
        *([{"role": "user", "content": content}] for content in ([{"type": "text", "text": 1}], [{}], [1], [[]])),
        [{"role": "user", "content": "apple " * 300}],
        *([CHAT["messages"][0] | {"role": "assistant", "tool_calls": calls}] for calls in (1, "a", {}, ["a"], [{}])),
        [CHAT["messages"][0] | {"role": "assistant", "tool_calls": [{"id": "a", "type": "function"}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}],
        [{"role": "assistant", "content": None, "tool_calls": []}],
        [{"role": "user", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
        [CHAT["messages"][0] | {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}],
    ),
    "max_completion_tokens": (*WHOLE_NUMBERS[:-1], 0),
    "logprobs": (*FLAGS, 5),
    "top_logprobs": (*WHOLE_NUMBERS, 21, 2),
    "tools": ([{"type": "function"}], "a", {"a": 1}, [1], [{"type": "function", "function": {"name": "a"}}]),
    "tool_choice": ("required", {"type": "function"}, {"type": "function", "function": {"name": "a"}}, 1),
    "parallel_tool_calls": FLAGS,
    "functions": ([{"name": "f"}],),
    "function_call": ({"name": "f"},),
    "modalities": (["text", "audio"],),
    "audio": ({"voice": "a"},),
    "web_search_options": ({"a": 1},),
    "chat_template": ("{{ messages }}",),
    "chat_template_kwargs": (1, "a", [], True, {"tokenize": False}, {"chat_template": "a"}),
    "add_special_tokens": (True, "no"),
    "add_generation_prompt": (False,),
    "continue_final_message": (True,),
}
OF_COMPLETION = {
    "prompt": (
        *(None, 1, True, {}, [], "", [""], [[]], ["a", 1], [1, "a"], [[1], "a", 5], [1.5], [True], [None], [[[1]]]),
        *([-1], [448], [10**30], [[5, -1]], ["a", ""], "apple " * 300, [5] * 256),
        *([wrong] + [5] * 150 for wrong in (-1, 448, 2**32, 10**30)),  # more than a page
        ["a"] * 65,  # more than may wait
    ),
    "add_special_tokens": FLAGS,
    "chat_template_kwargs": ({"a": 1},),
    "logprobs": (*WHOLE_NUMBERS, 21),
    "echo": (True, "yes"),
    "suffix": ("b",),
}
TEXT = (
    b"",
    b"{",
    b"[]",
    b'"a"',
    b"null",
    b"1",
    b"\xff\xfe",
    b'{"prompt": "\\ud800"}',
    b"[" * 100_000,
    b'{"prompt":' * 500,
)
# Path, body, the wrong field, its value.
CASES: list[tuple[str, dict[str, Any], str, Any]] = [
    *(("/v1/chat/completions", CHAT, field, value) for field, values in (BOTH | OF_CHAT).items() for value in values),
    *(
        ("/v1/completions", COMPLETION, field, value)
        for field, values in (BOTH | OF_COMPLETION).items()
        for value in values
    ),
]


def written(body: dict[str, Any], field: str, value: Any) -> bytes:
    return json.dumps(body | {field: value}).encode()


# Path and text of every one of them, each once.
BODIES = list(
    dict.fromkeys(
        [*((path, written(body, field, value)) for path, body, field, value in CASES)]
        + [(path, text) for path in ("/v1/chat/completions", "/v1/completions") for text in TEXT]
    )
)
