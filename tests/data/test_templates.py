"""The published chat templates of every family: the same prompts, and masks on what the assistant says of them.

What they render, with where each was found, is in golden/templates.json (tools/golden_templates.py). The templates here
are none of theirs: written for these conversations, as short as these allow.
"""

import json
import pathlib

import numpy as np
import pytest
import tiny
import transformers

from eagle3_jax.data import chat
from eagle3_jax.models import chat_template

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden/templates.json").read_text())
CONVERSATIONS, FAMILIES = GOLDEN["conversations"], GOLDEN["families"]

SYSTEM = "messages[0].role == 'system'"


def turns(one: str, opening: str) -> str:
    """`one` for each message `m`; `opening` before an answer."""
    return f"{{% for m in messages %}}{one}{{% endfor %}}{{% if add_generation_prompt %}}{opening}{{% endif %}}"


def chatml(system: str) -> str:
    one = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    default = f"{{% if not {SYSTEM} %}}<|im_start|>system\n{system}<|im_end|>\n{{% endif %}}"
    return default + turns(one, "<|im_start|>assistant\n")


LLAMA3 = (
    "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\n"
    "Cutting Knowledge Date: December 2023\nToday Date: DATE\n\n"
    f"{{{{ messages[0].content if {SYSTEM} }}}}<|eot_id|>"
    + turns(
        "{% if m.role != 'system' %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endif %}",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    )
)
TEMPLATES = {
    "llama2": turns(
        "{% if m.role == 'user' %}{{ bos_token }}[INST] "
        f"{{% if {SYSTEM} and loop.index == 2 %}}<<SYS>>\n{{{{ messages[0].content }}}}\n<</SYS>>\n\n{{% endif %}}"
        "{{ m.content | trim }} [/INST]"
        "{% elif m.role == 'assistant' %} {{ m.content | trim }} {{ eos_token }}{% endif %}",
        "",
    ),
    "llama31": LLAMA3.replace("DATE", "{{ date_string }}"),
    "llama32": LLAMA3.replace("DATE", "{{ strftime_now('%d %b %Y') }}"),
    "llama4": "{{ bos_token }}"
    + turns(
        "<|header_start|>{{ m.role }}<|header_end|>\n\n{{ m.content | trim }}<|eot|>",
        "<|header_start|>assistant<|header_end|>\n\n",
    ),
    "qwen25": chatml("You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
    "qwen3": turns(
        "<|im_start|>{{ m.role }}\n{% set parts = m.content.split('</think>') %}"
        "{% if m.role == 'assistant' and loop.last %}"
        "<think>\n{{ parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 }}\n</think>\n\n{% endif %}"
        "{{ parts[-1].lstrip('\n') }}<|im_end|>\n",
        "<|im_start|>assistant\n",
    ),
    "gemma3": "{{ bos_token }}"
    + turns(
        "{% if m.role != 'system' %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        f"{{% if {SYSTEM} and loop.index == 2 %}}{{{{ messages[0].content }}}}\n\n{{% endif %}}"
        "{{ m.content | trim }}<end_of_turn>\n{% endif %}",
        "<start_of_turn>model\n",
    ),
    "gpt_oss": "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
    "Knowledge cutoff: 2024-06\nCurrent date: {{ strftime_now('%Y-%m-%d') }}\n\nReasoning: medium\n\n"
    "# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>"
    + turns(
        "{% if m.role == 'system' %}<|start|>developer<|message|># Instructions\n\n{{ m.content }}\n\n<|end|>"
        "{% elif m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>"
        "{% else %}{% if loop.last and m.thinking %}"
        "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
        "<|start|>assistant<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}"
        "{% endif %}",
        "<|start|>assistant",
    ),
    "mimo": chatml("You are MiMo, an AI assistant developed by Xiaomi."),
}
CASES = [(family, name) for family, values in FAMILIES.items() for name in values["rendered"]]


def tokenizer_of(family: str) -> transformers.PreTrainedTokenizerFast:
    special = dict(FAMILIES[family]["special"])
    return tiny.make_byte_tokenizer(
        TEMPLATES[family], additional_special_tokens=special.pop("additional", []), **special
    )


@pytest.mark.parametrize(("family", "name"), CASES)
def test_prompts_are_those_of_the_published_template(family: str, name: str) -> None:
    tokenizer, messages, golden = tokenizer_of(family), CONVERSATIONS[name], FAMILIES[family]["rendered"][name]
    assert chat_template.render(tokenizer, messages, generation_prompt=False) == golden["text"]
    assert chat_template.render(tokenizer, messages[:-1], generation_prompt=True) == golden["prompt"]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_masks_are_on_what_the_assistant_says(family: str, name: str) -> None:
    tokenizer, messages, golden = tokenizer_of(family), CONVERSATIONS[name], FAMILIES[family]["rendered"][name]
    ids, mask = chat.encode(tokenizer, messages)
    assert tokenizer.decode(ids) == golden["text"]
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]]))).reshape(-1, 2)
    assert [tokenizer.decode(ids[start:end]) for start, end in edges] == golden["said"]
    # An answer begins where the prompt of its turn ends, in training as in serving.
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    for turn, (start, _) in zip(turns, edges, strict=True):
        assert ids[:start].tolist() == chat_template.prompt_ids(tokenizer, messages[:turn])
