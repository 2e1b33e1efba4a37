"""Work that takes long is shown: on a terminal, in a log, and to who asks for lines."""

import re
import time

from eagle3_jax.runs import progress


def clock(monkeypatch, *times: float) -> None:
    now = iter(times)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))


def test_a_function_is_told_at_the_beginning_and_now_and_then(monkeypatch):
    clock(monkeypatch, 0.0, 0.0, 9.0, 16.0, 16.0, 20.0)
    messages = []
    assert list(progress.shown("abcd", "compile", "program", messages.append)) == ["a", "b", "c", "d"]
    assert messages == ["compile: 0 of 4 programs", "compile: 2 of 4 programs"]


def test_a_log_is_told_what_takes_long_and_no_more(monkeypatch, capsys):
    clock(monkeypatch, 0.0, 0.0, 9.0, 16.0, 16.0, 20.0)
    assert list(progress.shown("abcd", "load", "tensor", True)) == ["a", "b", "c", "d"]
    assert capsys.readouterr().err == "load: 2 of 4 tensors\n"
    assert list(progress.shown("abcd", "load", "tensor", False)) == ["a", "b", "c", "d"]
    assert capsys.readouterr().err == ""


def test_a_terminal_has_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True)
    assert list(progress.shown("abcd", "load", "tensor", True)) == ["a", "b", "c", "d"]
    assert "load: 100%" in capsys.readouterr().err


def test_what_takes_long_is_told_now_and_then_and_what_does_not_is_not(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_PATIENCE", 60.0)
    with progress.told("compiling"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    monkeypatch.setattr(progress, "_SECONDS", 0.0)
    printed = ""
    with progress.told("compiling"):
        while printed.count("so far") < 2:
            time.sleep(0.01)
            printed += capsys.readouterr().err
    printed += capsys.readouterr().err
    assert re.fullmatch(r"(eagle3_jax: compiling \.\.\. 0 s so far\n){2,}eagle3_jax: compiling: 0 s\n", printed)
