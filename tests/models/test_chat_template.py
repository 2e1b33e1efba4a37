"""One rendering of a chat template: the same prompt whoever asks and whenever, and a digest of all that decides it."""

import copy
import datetime

import pytest
import tiny
import transformers

from eagle3_jax.data import chat
from eagle3_jax.decoding import prompt
from eagle3_jax.models import chat_template

DATED = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{{ bos_token }}Today is {{ strftime_now('%Y-%m-%d') }}, {{ date_string }}.\n"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "So."},
]


def byte_tokenizer(template: object = DATED) -> transformers.PreTrainedTokenizerFast:
    return tiny.make_byte_tokenizer(template, bos_token="<s>", eos_token="</s>")


@pytest.fixture
def tomorrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock that transformers gives to templates, on another day than the fixed one."""

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> "Clock":
            return cls(2031, 1, 2)

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)


def test_the_served_prompt_is_the_one_trained_on(tomorrow):
    """Also where the template reads the clock: a request of any day has the prompt of the training."""
    tokenizer = byte_tokenizer()
    ids, mask = chat.encode(tokenizer, TALK)
    for turn in (1, 3):
        served = prompt.encode(tokenizer, TALK[:turn])
        assert served == chat_template.prompt_ids(tokenizer, TALK[:turn])
        assert ids[: len(served)].tolist() == served
        assert mask[len(served)] == 1
    assert prompt.encode(tokenizer, "Hi") == chat_template.prompt_ids(tokenizer, TALK[:1])
    text = str(tokenizer.decode(ids))
    assert text.startswith("<s>Today is 2024-07-26, 26 Jul 2024.\n") and "2031" not in text
    assert "2031-01-02" in str(tokenizer.apply_chat_template(TALK, tokenize=False))  # the clock would have been read


def test_a_request_sets_variables_of_the_template():
    tokenizer = byte_tokenizer(DATED + "{{ 'think' if enable_thinking else 'answer' }}")
    ids = prompt.encode(tokenizer, "Hi", chat_template_kwargs={"date_string": "1 Jan 2030", "enable_thinking": True})
    assert str(tokenizer.decode(ids)).startswith("<s>Today is 2024-07-26, 1 Jan 2030.\n")
    assert str(tokenizer.decode(ids)).endswith("think")
    assert str(tokenizer.decode(prompt.encode(tokenizer, "Hi"))).endswith("answer")
    for reserved in ("messages", "conversation", "chat_template", "tokenize"):
        with pytest.raises(ValueError, match=f"chat_template_kwargs: got '{reserved}', expected variables"):
            prompt.encode(tokenizer, "Hi", chat_template_kwargs={reserved: True})


@pytest.mark.parametrize("opening", ["\n", "   {% if true %}x{% endif %}", "{%- if true %} x{% endif %}", "{{ '' }}\n"])
def test_the_fixed_clock_changes_nothing_else(opening):
    """Not the white space that a template's first line keeps or drops either."""
    tokenizer = byte_tokenizer(opening + "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    expected = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert chat_template.render(tokenizer, TALK, generation_prompt=False) == expected


def test_of_several_templates_the_default_is_rendered_and_digested():
    one = byte_tokenizer()
    several = byte_tokenizer({"default": DATED, "tool_use": "tools"})
    assert chat_template.prompt_ids(several, TALK[:1]) == chat_template.prompt_ids(one, TALK[:1])
    assert chat_template.digest(several) != chat_template.digest(one), "tools are rendered by another template"
    unread = byte_tokenizer({"default": DATED, "rag": "documents"})
    assert chat_template.digest(unread) == chat_template.digest(one)
    with pytest.raises(ValueError, match="got no chat_template, expected one"):
        chat_template.render(byte_tokenizer({"tool_use": "tools"}), TALK, generation_prompt=True)


def test_the_digest_covers_all_that_is_rendered(monkeypatch):
    tokenizer = byte_tokenizer()
    digests = {chat_template.digest(tokenizer), chat_template.digest(byte_tokenizer(DATED + " "))}
    digests.add(chat_template.digest(byte_tokenizer(None)))
    for name in ("bos_token", "eos_token"):
        other = copy.deepcopy(tokenizer)
        setattr(other, name, "<other>")
        digests.add(chat_template.digest(other))
    monkeypatch.setattr(chat_template, "_DATE", "27 Jul 2024")
    digests.add(chat_template.digest(tokenizer))
    assert len(digests) == 6


def test_a_developer_is_a_system_to_templates_that_do_not_know_one():
    """Templates that branch by role would leave its turn out."""
    branches = (
        "{% for m in messages %}{% if m.role == 'ROLE' or m.role == 'user' %}{{ m.role }}: {{ m.content }}\n"
        "{% endif %}{% endfor %}"
    )
    asked = [{"role": "developer", "content": "Be brief."}, *TALK[:1]]
    for role in ("system", "developer"):
        tokenizer = byte_tokenizer(branches.replace("ROLE", role))
        text = chat_template.render(tokenizer, asked, generation_prompt=False)
        assert text == f"{role}: Be brief.\nuser: Hi\n"


def test_what_the_template_refuses_is_reported_with_the_roles():
    picky = byte_tokenizer("{{ raise_exception('No tools!') }}")
    with pytest.raises(ValueError, match=r"chat template: refuses messages of roles \[user\]: No tools!"):
        chat_template.prompt_ids(picky, TALK[:1])
    with pytest.raises(ValueError, match=r"chat template: refuses messages of roles \[user\]"):
        chat_template.prompt_ids(byte_tokenizer("{{ messages[0]['content'] + 1 }}"), TALK[:1])


def test_an_image_is_refused_in_a_sentence():
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(ValueError, match=r"messages\[0\]\.content: got a part 'image_url', expected 'text'"):
        chat_template.prompt_ids(byte_tokenizer(), [{"role": "user", "content": parts}])
