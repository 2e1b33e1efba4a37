"""A terminal's answers: drafts in colours there, the text alone in a pipe, and a conversation line by line."""

import io
import re
import sys

import pytest
import tiny

from eagle3_jax import chat
from eagle3_jax.runs import progress

TOKENIZER = tiny.make_tokenizer()
SPEED = r"\[(\d+) tokens, [\d.]+ tokens/s, [\d.]+ tokens a round, \d+% drafted\]"


def test_brackets_stand_around_what_each_round_accepted():
    ids = TOKENIZER(" apple bird cloud door egg fish", add_special_tokens=False)["input_ids"]
    mark = chat.Marker(TOKENIZER, colours=False).mark
    assert mark(ids[:4], [0, 1, 2, 0], last=False) == " apple[ bird cloud] door"
    assert mark(ids[4:], [1, 1], last=True) == "[ egg][ fish]"


def test_colours_tell_depths_apart_and_leave_the_text_as_it_is():
    ids = TOKENIZER(" apple bird cloud door", add_special_tokens=False)["input_ids"]
    text = chat.Marker(TOKENIZER, colours=True).mark(ids, [0, 1, 2, 11], last=True)
    assert re.sub(r"\033\[[0-9;]*m", "", text) == " apple bird cloud door"
    coloured = dict(re.findall(r"\033\[38;5;(\d+)m([^\033]*)\033\[0m", text))
    assert list(coloured.values()) == [" bird", " cloud", " door"]


@pytest.mark.slow
def test_prompts_are_answered_alone_and_lines_are_a_conversation(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "_PATIENCE", 600.0)
    asked, answer = [], chat.answer

    def note(engine, prompt, params):
        asked.append(list(prompt) if isinstance(prompt, list) else prompt)
        return answer(engine, prompt, params)

    monkeypatch.setattr(chat, "answer", note)
    words = ["--target", str(tiny.write_target(tmp_path)), "--draft", "lookup", "--max-tokens", "12"]
    chat.main(["apple bird", "cloud", *words, "--temperature", "0"])
    generated = capsys.readouterr()
    assert asked == ["apple bird", "cloud"] and len(re.findall(SPEED, generated.err)) == 2
    asked.clear()
    monkeypatch.setattr(sys, "stdin", io.StringIO("apple bird\n\ncloud\n" + "apple " * 600))
    chat.main([*words, "--temperature", "0"])
    chatted = capsys.readouterr()
    first = generated.out.split("\n")[0]
    assert asked[0] == asked[1][:1] == [{"role": "user", "content": "apple bird"}]
    assert asked[1][1:] == [{"role": "assistant", "content": first}, {"role": "user", "content": "cloud"}]
    assert chatted.out.startswith(f"{first}\n") and "\033" not in chatted.out + generated.out
    assert re.search(r"prompt: got \d+ tokens.*; the conversation begins anew", chatted.err)
