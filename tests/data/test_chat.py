"""Masks over several templates and tokenizers: what the assistant says is 1, the end of its turn too, nothing else."""

from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from eagle3_jax.data import chat
from eagle3_jax.models import chat_template

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{% for message in messages %}{% if loop.first %}<|bos|>{% endif %}"
    "<|start_header|>{{ message['role'] }}<|end_header|>\n\n{{ message['content'] | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header|>assistant<|end_header|>\n\n{% endif %}"
)
LLAMA2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}<s>[INST] {{ message['content'] | trim }} [/INST]"
    "{% elif message['role'] == 'assistant' %} {{ message['content'] | trim }} </s>"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
# Drops the thoughts of every turn but the last, and closes the conversation with an extra token.
THINKING = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' and not loop.last %}{{ message['content'].split('</think>')[-1] }}"
    "{% else %}{{ message['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|end|>{% endif %}"
)
PLAIN = (
    "{% for message in messages %}### {{ message['role'] }}:\n{{ message['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}"
)
# template, and what follows the content of an assistant turn and belongs to it
TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>"),
    "chatml_marked": (CHATML_MARKED, "<|im_end|>"),
    "llama3": (LLAMA3, "<|eot|>"),
    "llama2": (LLAMA2, " </s>"),
    "thinking": (THINKING, "<|im_end|>"),
    "plain": (PLAIN, ""),
    "no_generation_prompt": (CHATML.split("{% if add_generation_prompt %}")[0], "<|im_end|>"),
}
SPECIAL = [f"<|{name}|>" for name in ("im_start", "im_end", "bos", "start_header", "end_header", "eot", "end")]
SPECIAL += ["<s>", "</s>"]
TEXTS = [
    "Why is the sky blue?",
    "The sky is blue.\n\nIt  scatters light.",
    "Danke schön 👩‍💻\n\n- eins\n- zwei",
    "### user:\n\n[INST]",
]
SINGLE = [{"role": "user", "content": TEXTS[0]}, {"role": "assistant", "content": TEXTS[1]}]
MULTI = [*SINGLE, {"role": "user", "content": TEXTS[2]}, {"role": "assistant", "content": TEXTS[3]}]


def byte_level() -> transformers.PreTrainedTokenizerFast:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    # As GPT-2's, SmolLM2's and Llama 3's: offsets lose their white space.
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 8, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, additional_special_tokens=SPECIAL)


def metaspace() -> transformers.PreTrainedTokenizerFast:
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    alphabet = sorted({char for text in [*TEXTS, PLAIN] for char in text})
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", *SPECIAL], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS * 8, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", additional_special_tokens=SPECIAL
    )


class Slow:
    """A tokenizer without offsets."""

    is_fast = False

    def __init__(self, fast: transformers.PreTrainedTokenizerFast) -> None:
        self._fast = fast

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fast, name)

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": self._fast(text, add_special_tokens=add_special_tokens)["input_ids"]}


TOKENIZERS = {"byte_level": byte_level(), "metaspace": metaspace()}


def tokenizer_with(template: str, kind: str = "byte_level"):
    tokenizer = TOKENIZERS[kind]
    tokenizer.chat_template = template
    return tokenizer


def spans(tokenizer, ids, mask) -> list[str]:
    """The text of each run of marked tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    return [tokenizer.decode(ids[a:b], skip_special_tokens=False) for a, b in edges.reshape(-1, 2)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_marks_exactly_what_the_assistant_says(name):
    template, ending = TEMPLATES[name]
    tokenizer = tokenizer_with(template)
    ids, mask = chat.encode(tokenizer, MULTI)
    answers = [message["content"] for message in MULTI if message["role"] == "assistant"]
    lead = " " if name == "llama2" else ""
    found = spans(tokenizer, ids, mask)
    assert [text.removeprefix(lead) for text in found] == [answer + ending for answer in answers]
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.apply_chat_template(MULTI, tokenize=False)
    assert (ids.dtype, mask.dtype, set(mask.tolist())) == (np.int32, np.uint8, {0, 1})


def test_equals_the_marks_of_a_template_that_has_them():
    tokenizer = tokenizer_with(CHATML_MARKED)
    ids, mask = chat.encode(tokenizer, MULTI)
    marked: Any = tokenizer.apply_chat_template(MULTI, return_dict=True, return_assistant_tokens_mask=True)
    assert ids.tolist() == marked["input_ids"]
    assert mask.tolist() == marked["assistant_masks"]


@pytest.mark.parametrize("name", ["chatml", "llama3", "llama2"])
def test_metaspace_tokenizer(name):
    template, ending = TEMPLATES[name]
    tokenizer = tokenizer_with(template, "metaspace")
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "It scatters light."}] * 2
    ids, mask = chat.encode(tokenizer, messages)
    assert [text.replace(" ", "") for text in spans(tokenizer, ids, mask)] == ["Itscatterslight." + ending.strip()] * 2


@pytest.mark.parametrize("name", ["chatml", "llama3", "plain"])
def test_tokenizer_without_offsets(name):
    tokenizer = tokenizer_with(TEMPLATES[name][0])
    ids, mask = chat.encode(tokenizer, MULTI)
    slow_ids, slow_mask = chat.encode(Slow(tokenizer), MULTI)
    assert slow_ids.tolist() == ids.tolist()
    assert slow_mask.tolist() == mask.tolist()


@pytest.mark.slow
@examples(40)
@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip), min_size=2, max_size=6),
    st.sampled_from(["chatml", "llama3", "llama2", "plain"]),
)
def test_any_text(texts, name):
    tokenizer = tokenizer_with(TEMPLATES[name][0])
    texts = texts[: len(texts) // 2 * 2]
    messages = [{"role": ("user", "assistant")[i % 2], "content": text.strip()} for i, text in enumerate(texts)]
    ids, mask = chat.encode(tokenizer, messages)
    ending = TEMPLATES[name][1]
    lead = " " if name == "llama2" else ""
    answers = [lead + message["content"] + ending for message in messages if message["role"] == "assistant"]
    assert spans(tokenizer, ids, mask) == answers


@pytest.mark.parametrize(
    ("name", "opening"),
    [
        ("chatml", "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\n"),
        ("llama3", "<|bos|><|start_header|>user<|end_header|>\n\n"),
        ("llama2", "<s>[INST] "),
    ],
)
def test_user_opening(name, opening):
    tokenizer = tokenizer_with(TEMPLATES[name][0])
    ids = chat.user_opening_ids(tokenizer)
    assert tokenizer.decode(ids, skip_special_tokens=False) == opening
    begun = chat.user_opening_ids(tokenizer, opening="Write code")
    assert tokenizer.decode(begun, skip_special_tokens=False) == opening + "Write code"
    later = str(tokenizer.decode(chat.user_opening_ids(tokenizer, SINGLE), skip_special_tokens=False))
    assert later.startswith(chat_template.render(tokenizer, SINGLE, generation_prompt=False))


def test_errors():
    with pytest.raises(ValueError, match="got none of .* tokens as the assistant's"):
        chat.encode(tokenizer_with(CHATML), SINGLE[:1])
    bare = "{% for message in messages %}{{ message['content'] if message['role'] == 'assistant' }}{% endfor %}"
    with pytest.raises(ValueError, match="got all of .* tokens as the assistant's"):
        chat.encode(tokenizer_with(bare), SINGLE)
    with pytest.raises(ValueError, match="got an assistant turn first"):
        chat.encode(tokenizer_with(CHATML), SINGLE[1:])
    with pytest.raises(ValueError, match=r"refuses messages of roles \[system, user\]: Only user and assistant"):
        chat_template.prompt_ids(tokenizer_with(LLAMA2), [{"role": "system", "content": "x"}, *SINGLE[:1]])
    with pytest.raises(ValueError, match="rewrites assistant turn 1"):
        chat.encode(tokenizer_with(CHATML.replace("message['content'] }}", "message['content'] | upper }}")), SINGLE)
    with pytest.raises(ValueError, match="got no chat_template, expected one"):
        chat_template.prompt_ids(tokenizer_with(""), SINGLE)
    with pytest.raises(ValueError, match="got no user content"):
        chat.user_opening_ids(tokenizer_with("hello"))
