"""The published chat templates of every family: the same prompts, and masks on what the assistant says of them.

What they render, with where each was found, is in golden/templates.json, made by the file beside it. The templates here
are none of theirs: written for these conversations, as short as these allow.
"""

import json
import pathlib

import numpy as np
import pytest
import tiny
import transformers

from eagle3_jax.config import run_file
from eagle3_jax.data import chat, features, sources
from eagle3_jax.extract import __main__ as extract
from eagle3_jax.models import chat_template
from eagle3_jax.prepare import __main__ as prepare
from eagle3_jax.regenerate import __main__ as regenerate
from eagle3_jax.runs import manifest

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden/templates.json").read_text())
CONVERSATIONS, TOOLS, FAMILIES = GOLDEN["conversations"], GOLDEN["tools"], GOLDEN["families"]

SYSTEM = "messages[0].role == 'system'"


def turns(one: str, opening: str) -> str:
    """`one` for each message `m`; `opening` before an answer."""
    return f"{{% for m in messages %}}{one}{{% endfor %}}{{% if add_generation_prompt %}}{opening}{{% endif %}}"


def chatml(system: str) -> str:
    one = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    default = f"{{% if not {SYSTEM} %}}<|im_start|>system\n{system}<|im_end|>\n{{% endif %}}"
    return default + turns(one, "<|im_start|>assistant\n")


# What Qwen 3 tells the target about tools, in front of their definitions and behind them.
_DEFINITIONS = "\n".join(map(json.dumps, TOOLS["calls"]))
BEFORE, AFTER = FAMILIES["qwen3"]["rendered"]["calls"]["text"].partition("<|im_end|>")[0].split(_DEFINITIONS)
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


def default(family: str, before: str, after: str) -> str:
    """An expression: the system prompt, or the one that the published template writes without it."""
    text = FAMILIES[family]["rendered"]["talk"]["text"].partition(before)[2].partition(after)[0]
    return f"{{{{ messages[0].content if {SYSTEM} else {json.dumps(text)} }}}}"


def phi(line_break: str) -> str:
    one = f"<|{{{{ m.role }}}}|>{line_break}{{{{ m.content }}}}<|end|>{line_break}"
    return turns(one, f"<|assistant|>{line_break}") + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"


def granite(family: str) -> str:
    opening, end = "<|start_of_role|>{}<|end_of_role|>", "<|end_of_text|>\n"
    system = opening.format("system")
    one = f"{{% if m.role != 'system' %}}{opening.format('{{ m.role }}')}{{{{ m.content }}}}{end}{{% endif %}}"
    return f"{system}{default(family, system, end)}{end}{turns(one, opening.format('assistant'))}"


MISTRAL = turns(
    "{% if m.role == 'user' %}[INST]SYSTEM{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}{% endif %}",
    "",
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
    "qwen3": f"{{% if tools %}}{BEFORE}{{{{ tools | map('tojson') | join('\n') }}}}{AFTER}<|im_end|>\n{{% endif %}}"
    + turns(
        "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
        "{% else %}<|im_start|>{{ m.role }}\n{% set parts = m.content.split('</think>') %}"
        "{% if m.role == 'assistant' and (loop.last or m.reasoning_content) %}"
        "<think>\n{{ m.reasoning_content or (parts[0].split('<think>')[-1].strip('\n') if parts | length > 1) }}"
        "\n</think>\n\n{% endif %}{{ parts[-1].lstrip('\n') }}"
        "{% for call in m.tool_calls or [] %}"
        '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
        "</tool_call>{% endfor %}<|im_end|>\n{% endif %}",
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
    "mistral_nemo": "{{ bos_token }}"
    + MISTRAL.replace("SYSTEM", f"{{{{ messages[0].content + '\n\n' if loop.last and {SYSTEM} }}}}"),
    "ministral3": "{{ bos_token }}[SYSTEM_PROMPT]"
    + default("ministral3", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
    + "[/SYSTEM_PROMPT]"
    + MISTRAL.replace("SYSTEM", ""),
    "phi35": phi("\n"),
    "phi4": turns(
        "{% if m.role != 'assistant' %}<|im_start|>{{ m.role }}<|im_sep|>{% endif %}{{ m.content }}<|im_end|>"
        "{% if m.role == 'user' %}<|im_start|>assistant<|im_sep|>{% endif %}",
        "",
    ),
    "phi4_mini": phi(""),
    "smollm3": "<|im_start|>system\n## Metadata\n\nKnowledge Cutoff Date: June 2025\nReasoning Mode: /think\n\n"
    "## Custom Instructions\n\n"
    + default("smollm3", "## Custom Instructions\n\n", "\n\n<|im_end|>")
    + "\n\n<|im_end|>\n"
    + turns(
        "{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}",
        "<|im_start|>assistant\n",
    ),
    "olmo2": "{{ bos_token }}"
    + turns(
        "<|{{ m.role }}|>\n{{ m.content }}{{ eos_token if m.role == 'assistant' }}"
        "{{ '\n' if m.role != 'assistant' or not loop.last }}",
        "<|assistant|>\n",
    ),
    "olmo3": f"{{% if not {SYSTEM} %}}<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n{{% endif %}}"
    + turns(
        "<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{{ ' You do not currently have access to any functions. <functions></functions>' if m.role == 'system' }}"
        "{{ eos_token if loop.last and m.role == 'assistant' else '<|im_end|>\n' }}",
        "<|im_start|>assistant\n<think>",
    ),
    "granite33": granite("granite33"),
    "granite4": granite("granite4"),
    "seed_oss": turns("{{ bos_token }}{{ m.role }}\n{{ m.content }}{{ eos_token }}", "{{ bos_token }}assistant\n"),
    "exaone4": turns(
        "[|{{ m.role }}|]\n{{ '<think>\n\n</think>\n\n' if m.role == 'assistant' }}"
        "{{ m.content.split('</think>')[-1].strip() }}[|endofturn|]\n",
        "[|assistant|]\n<think>\n\n</think>\n\n",
    ),
    "ernie45": "{{ cls_token }}"
    + turns(
        "{{ {'user': 'User: ', 'assistant': 'Assistant: '}.get(m.role) or '' }}{{ m.content }}"
        "{{ sep_token if m.role == 'assistant' else '\n' }}",
        "Assistant: ",
    ),
    "glm45": "[gMASK]<sop>"
    + turns(
        "<|{{ m.role }}|>\n{% if m.role == 'assistant' %}{% set parts = m.content.split('</think>') %}"
        "<think>{{ parts[0].split('<think>')[-1].strip() if loop.last and parts | length > 1 }}</think>\n"
        "{{ parts[-1].strip() }}{% else %}{{ m.content }}{% endif %}",
        "<|assistant|>",
    ),
    "gemma4": "{{ bos_token }}"
    + turns(
        "<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<turn|>\n",
        "<|turn>model\n<|channel>thought\n<channel|>",
    ),
}
# What prompts have and conversations lack: thoughts that a prompt opens, and a system prompt in the last user turn.
PROMPT_ONLY = {("mistral_nemo", "system"): "Answer in one sentence.\n\n"}
for name in ("system", "talk"):
    PROMPT_ONLY |= {("olmo3", name): "<think>", ("gemma4", name): "<|channel>thought\n<channel|>"}
CASES = [(family, name) for family, values in FAMILIES.items() for name in values["rendered"]]


def tokenizer_of(family: str) -> transformers.PreTrainedTokenizerFast:
    special = dict(FAMILIES[family]["special"])
    return tiny.make_byte_tokenizer(
        TEMPLATES[family], additional_special_tokens=special.pop("additional", []), **special
    )


@pytest.mark.parametrize(("family", "name"), CASES)
def test_prompts_are_those_of_the_published_template(family: str, name: str) -> None:
    tokenizer, messages, golden = tokenizer_of(family), CONVERSATIONS[name], FAMILIES[family]["rendered"][name]
    tools = TOOLS.get(name)
    assert chat_template.render(tokenizer, messages, generation_prompt=False, tools=tools) == golden["text"]
    assert chat_template.render(tokenizer, messages[:-1], generation_prompt=True, tools=tools) == golden["prompt"]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_masks_are_on_what_the_assistant_says(family: str, name: str) -> None:
    tokenizer, messages, golden = tokenizer_of(family), CONVERSATIONS[name], FAMILIES[family]["rendered"][name]
    ids, mask = chat.encode(tokenizer, messages, TOOLS.get(name))
    assert tokenizer.decode(ids) == golden["text"]
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]]))).reshape(-1, 2)
    assert [tokenizer.decode(ids[start:end]) for start, end in edges] == golden["said"]
    # An answer begins where the prompt of its turn ends, in training as in serving.
    only = PROMPT_ONLY.get((family, name), "")
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    for turn, (start, _) in zip(turns, edges, strict=True):
        prompt = str(tokenizer.decode(chat_template.prompt_ids(tokenizer, messages[:turn], TOOLS.get(name))))
        assert ids[:start].tolist() == chat_template.tokenize(tokenizer, prompt.replace(only, ""))


@pytest.mark.slow
def test_tools_go_the_whole_way(tmp_path, monkeypatch):
    """Conversations with tools, from a file to token ids: what is learned is what the published template renders.

    Their definitions count as tokens of the conversation. The same question with other tools is another prompt.
    """
    target = tiny.make_target(tiny.llama_config(vocab_size=300, max_position_embeddings=2048), tokenizer_of("qwen3"))
    golden, talk, tools = FAMILIES["qwen3"]["rendered"]["calls"], CONVERSATIONS["calls"], TOOLS["calls"]
    others = [tools[0] | {"function": tools[0]["function"] | {"name": name}} for name in ("plus", "of bob@example.org")]
    lines = [{"messages": talk, "tools": [tool]} for tool in (*tools, *others)]
    lines += [{"messages": [talk[0] | {"content": f"What is {n} + {n}?"}, *talk[1:]]} for n in range(5)]
    lines += [{"messages": talk, "tools": {}}, {"messages": talk, "tools": "add"}, {"messages": talk, "tools": tools}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = {"kind": "conversations", "path": str(tmp_path / "in.jsonl")}
    longest = len(golden["text"])  # special tokens are fewer than their letters
    config = run_file.from_dict(
        {
            "run_dir": str(tmp_path / "run"),
            "target": {"aux_layers": [0, 1, 3]},
            "draft": {"vocab_size": 20},
            "mesh": {"data": 1},
            "prepare": {"sources": [source], "held_out": 0.3},
            "extract": {"max_length": longest, "batch_tokens": longest, "states": "none"},
        }
    )
    prepare.prepare(config)
    found = manifest.read(config.folder("prepare"), "prepare")["results"]
    assert found["rejected"] == {"tools: got str, expected a list of objects": 1, "exact duplicate": 1}
    assert found["personal_data"] == {"EMAIL_ADDRESS": 1}
    monkeypatch.setattr(regenerate, "load_target", lambda *_, **__: target)
    regenerate.regenerate(config)
    extract.extract(config, target)
    texts = [
        target.tokenizer.decode(record["token_ids"])
        for split in ("train", "held_out")
        for record in features.FeatureSource(config.folder("extract") / split)
    ]
    assert len(texts) == 9 and golden["text"] in texts
    assert sum(BEFORE in text for text in texts) == 3
    assert sum("of <EMAIL_ADDRESS>" in text for text in texts) == 1
    (tmp_path / "run/prompts/all.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:1]))
    (asked,) = sources.read_file(tmp_path / "run/prompts/all.jsonl")[0]
    (encoded,), _ = sources.encode([asked], target.tokenizer, longest, "all.jsonl")
    assert golden["text"].startswith(target.tokenizer.decode(encoded["prompt"]))
    with pytest.raises(ValueError, match="1 are longer"):
        sources.encode([asked], target.tokenizer, len(encoded["prompt"]) - 1, "all.jsonl")
