"""The verb prepare: counts, files, resumption, and no personal data in anything it writes."""

import functools
import gzip
import importlib.util
import json
import pathlib
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from eagle3_jax.config import RunConfig, run_file
from eagle3_jax.data import chat
from eagle3_jax.decoding import data_parallel
from eagle3_jax.decoding.engine import Engine, SamplingParams
from eagle3_jax.decoding.request import Output, Stats
from eagle3_jax.models import chat_template
from eagle3_jax.models.checkpoint import fetch
from eagle3_jax.prepare import __main__ as prepare
from eagle3_jax.prepare import self_prompting
from eagle3_jax.runs import disk, manifest

QUESTIONS = [f"What is {a} plus {b}?" for a in range(2, 6) for b in range(10, 15)]


def run_config(tmp_path: pathlib.Path, *given: dict[str, Any], **section: Any) -> RunConfig:
    values = {"run_dir": str(tmp_path / "run"), "mesh": {"data": 1}, "prepare": {"sources": list(given), **section}}
    return run_file.from_dict(values)


def jsonl(tmp_path: pathlib.Path, *lines: Any, name: str = "in.jsonl") -> dict[str, Any]:
    path = tmp_path / name
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return {"kind": "jsonl", "path": str(path), "category": "mine"}


def read(config: RunConfig, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.folder("prepare") / name).read_text().splitlines()]


def prompts(config: RunConfig) -> list[dict[str, Any]]:
    return read(config, prepare.TRAIN) + read(config, prepare.HELD_OUT)


def results(config: RunConfig) -> dict[str, Any]:
    return manifest.read(config.folder("prepare"), "prepare")["results"]


def test_counts_files_and_reasons(tmp_path):
    source = jsonl(
        tmp_path,
        *({"prompt": question} for question in QUESTIONS),
        '{"prompt": "broken, from bob@example.org',
        {"prompt": QUESTIONS[0].upper()},
        {"prompt": "x" * 3000},
        {"prompt": "Write to bob@example.org and eve@example.org about 4111 1111 1111 1111"},
        {"conversations": [{"from": "human", "value": "And you?"}, {"from": "gpt", "value": "Fine."}]},
    )
    config = run_config(tmp_path, source, held_out=0.3, max_chars=2000)
    prepare.prepare(config)
    found = results(config)
    assert found["sources"] == {"jsonl:in.jsonl": 25}
    assert found["rejected"] == {"not valid JSON": 1, "exact duplicate": 1, "longer than 2000 characters": 1}
    assert found["personal_data"] == {"EMAIL_ADDRESS": 2, "CREDIT_CARD": 1}
    assert found["prompts"]["train"] + found["prompts"]["held_out"] == 22 and found["prompts"]["rejects"] == 3
    assert found["prompts"]["held_out"] > 0
    assert sum(found["categories"]["train"].values()) == found["prompts"]["train"]
    assert manifest.read(config.folder("prepare"), "prepare")["files"] == {
        name: disk.digest(config.folder("prepare") / name) for name in (prepare.TRAIN, prepare.HELD_OUT)
    }
    rejects = read(config, prepare.REJECTS)
    assert [(reject["line"], reject["reason"]) for reject in rejects] == [
        (21, "not valid JSON"),
        (22, "exact duplicate"),
        (23, "longer than 2000 characters"),
    ]
    kept = prompts(config)
    assert {"Write to <EMAIL_ADDRESS> and <EMAIL_ADDRESS> about <CREDIT_CARD>", "And you?"} < {
        prompt["messages"][0]["content"] for prompt in kept
    }
    assert len({prompt["id"] for prompt in kept}) == 22
    assert {tuple(prompt) for prompt in kept} == {("id", "category", "source", "messages")}
    for path in config.folder("prepare").iterdir():
        assert "example.org" not in path.read_text() and "4111" not in path.read_text()


def test_conversations_come_in_with_their_answers(tmp_path):
    """Filtered and split by what the users say; answers are searched for personal data and markers."""

    def talk(question: str, answer: str, **more: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]} | more

    source = jsonl(
        tmp_path,
        *(talk(question, f"{question} That is easy.") for question in QUESTIONS),
        talk(QUESTIONS[0], "Another answer to the same question."),
        talk("A long one?", "word " * 2000),
        talk("Whose address?", "bob@example.org"),
        talk("What ends a turn?", "<|im_end|>"),
        {"messages": [{"role": "user", "content": "Hello?"}]},
        talk("Cut?", "It was c", finish_reason="length"),
    )
    config = run_config(tmp_path, source | {"kind": "conversations"}, held_out=0.3, max_chars=2000)
    prepare.prepare(config)
    found = results(config)
    reasons = {"exact duplicate": 1, "holds a chat-template marker": 1, "no assistant message": 1}
    assert found["rejected"] == reasons and found["sources"] == {"conversations:in.jsonl": 26}
    kept = {prompt["messages"][0]["content"]: prompt for prompt in prompts(config)}
    assert len(kept) == 23 and min(map(len, (read(config, name) for name in (prepare.TRAIN, prepare.HELD_OUT)))) > 0
    assert {tuple(prompt) for prompt in kept.values()} == {("id", "category", "source", "messages", "truncated")}
    assert kept["A long one?"]["messages"][1]["content"] == "word " * 2000
    assert kept["Whose address?"]["messages"][1]["content"] == "<EMAIL_ADDRESS>"
    assert [question for question, prompt in kept.items() if prompt["truncated"]] == ["Cut?"]
    path = str(tmp_path / "in.jsonl")
    assert manifest.read(config.folder("prepare"), "prepare")["identity"]["inputs"] == {path: disk.digest(path)}

    # A prompt has the side and the name that it has without the answer and among others: no side sees the other's.
    (tmp_path / "asked").mkdir()
    others = jsonl(tmp_path, *({"prompt": f"What is {a} times {a}?"} for a in range(20)), name="others.jsonl")
    asked = run_config(tmp_path / "asked", others, source | {"kind": "jsonl"}, held_out=0.3, max_chars=2000)
    prepare.prepare(asked)
    for name in (prepare.TRAIN, prepare.HELD_OUT):
        ids = {prompt["id"] for prompt in read(asked, name)}
        assert {prompt["id"] for prompt in read(config, name)} <= ids


def test_personal_data_may_be_dropped_and_sources_limited(tmp_path):
    source = jsonl(tmp_path, {"prompt": "Ask bob@example.org"}, *({"prompt": question} for question in QUESTIONS))
    config = run_config(tmp_path, {"kind": "packaged", "limit": 30}, source | {"limit": 8}, personal_data="drop")
    prepare.prepare(config)
    assert results(config)["sources"] == {"packaged": 30, "jsonl:in.jsonl": 8}
    assert results(config)["rejected"] == {"personal data": 1}
    assert results(config)["personal_data"] == {"EMAIL_ADDRESS": 1}
    assert read(config, prepare.REJECTS)[0]["text"] == "Ask <EMAIL_ADDRESS>"
    assert len({prompt["category"] for prompt in prompts(config)}) == 6


def test_finished_work_is_left_alone_and_other_work_refused(tmp_path, capsys):
    source = jsonl(tmp_path, *({"prompt": question} for question in QUESTIONS))
    config = run_config(tmp_path, source)
    prepare.prepare(config)
    before = {path: path.stat().st_mtime_ns for path in config.folder("prepare").iterdir()}
    leftover = config.folder("prepare") / "self_0.jsonl"  # killed just before its end
    leftover.write_text("[]\n")
    prepare.prepare(config)
    assert "finished already" in capsys.readouterr().err
    assert not leftover.exists()
    assert before == {path: path.stat().st_mtime_ns for path in config.folder("prepare").iterdir()}
    jsonl(tmp_path, *({"prompt": question} for question in QUESTIONS[1:]))
    with pytest.raises(manifest.ManifestError, match="inputs"):
        prepare.prepare(config)


def test_clear_errors(tmp_path):
    config = run_config(tmp_path, {"kind": "jsonl", "path": str(tmp_path / "none.jsonl")})
    with pytest.raises(ValueError, match=r"prepare.sources: path: got '.*none.jsonl' \(No such file"):
        prepare.prepare(config)
    config = run_config(tmp_path, jsonl(tmp_path, {"prompt": "Only one?"}, "{"))
    with pytest.raises(ValueError, match="got 1 usable prompts, expected at least 2"):
        prepare.prepare(config)


def test_only_a_source_of_tfds_needs_its_package(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorflow_datasets" else find(name))
    file, asked = tmp_path / "run.yaml", []
    monkeypatch.setattr(prepare, "prepare", asked.append)
    for source in ({"kind": "packaged"}, {"kind": "tfds", "name": "x", "field": "y"}):
        file.write_text(json.dumps({"run_dir": str(tmp_path / "run"), "prepare": {"sources": [source]}}))
        if source["kind"] == "packaged":
            prepare.main(["--config", str(file)])
        else:
            with pytest.raises((ImportError, SystemExit), match="got no tensorflow_datasets, expected the extra `prep"):
                prepare.main(["--config", str(file)])
    assert len(asked) == 1


class FakeEngine(Engine):
    """Stands for the engine: `reply` says text and end for a place in a chunk, a prompt, and its sampling."""

    chunks, dies_at = 0, None
    rows: list[int]  # of the mesh, of each run
    asked: list[list[int]]
    reply: Callable[[int, list[int], SamplingParams], tuple[str, Any]]

    def __init__(self) -> None:
        pass

    @classmethod
    def load(cls, *_: Any, batch_size: int, max_length: int) -> "FakeEngine":  # pyrefly: ignore
        assert batch_size == 2
        return cls()

    def converse(self, asked: Any, on_output: Any) -> None:
        if self.chunks == self.dies_at:
            raise KeyboardInterrupt
        type(self).chunks += 1
        for place, (name, prompt, one) in enumerate(asked):
            self.asked.append(prompt)
            text, reason = type(self).reply(place, prompt, one)
            on_output(name, Output([], text, reason, Stats(1, [])))


def ids(messages: Sequence[dict[str, str]], end: str) -> list[int]:
    return list(map(ord, "".join(f"{message['role']}:{message['content']};" for message in messages) + end))


@pytest.fixture
def engine(monkeypatch):
    fake: Any = type("Fresh", (FakeEngine,), {"rows": [], "asked": []})

    def targets(target, replica):
        fake.rows.append(len(replica.rows))
        return [target] * len(replica.rows)

    monkeypatch.setattr("eagle3_jax.decoding.engine.Engine", fake)
    monkeypatch.setattr(fetch, "load_target", lambda *_: None)
    monkeypatch.setattr(fetch, "load_tokenizer", lambda name: None)
    monkeypatch.setattr(data_parallel, "targets", targets)
    monkeypatch.setattr(chat, "user_opening_ids", lambda _, messages, opening="": ids(messages, f"user:{opening}"))
    monkeypatch.setattr(chat_template, "prompt_ids", lambda _, messages: ids(messages, "assistant:"))
    monkeypatch.setattr(self_prompting, "_CHUNK", 4)
    return fake


def test_self_prompting_goes_on_where_it_was_killed_and_ends_even_if_the_target_does_not(tmp_path, engine):
    def run(name: str) -> RunConfig:
        source = {"kind": "self", "count": 20}
        values = {"run_dir": str(tmp_path / name), "mesh": {"data": 1}}
        config = run_file.from_dict(values | {"prepare": {"sources": [source], "batch_size": 2, "near_duplicate": 1.0}})
        prepare.prepare(config)
        return config

    def reply(place: int, _: list[int], one: SamplingParams, never_ends: bool = False) -> tuple[str, str]:
        """Every fourth is cut off."""
        text = f"Tell me about the {one.seed} of bob{place}@example.org, at {one.temperature} and {one.max_tokens}."
        return text, "length" if place % 4 == 3 or never_ends else "stop"

    engine.reply = reply
    whole = run("whole")
    assert engine.chunks == 4  # 8, 8, 8 and 2 tries, of which 6, 6, 6 and 2 end
    found = results(whole)
    assert found["rejected"] == {"the target did not end its prompt": 6}
    assert found["sources"]["self"] == 26 and found["personal_data"]["EMAIL_ADDRESS"] == 20
    assert {prompt["category"] for prompt in prompts(whole)} == {"self"}
    names = {"held_out.jsonl", "manifest.json", "rejects.jsonl", "train.jsonl"}
    assert {path.name for path in whole.folder("prepare").iterdir()} == names
    assert manifest.read(whole.folder("prepare"), "prepare")["identity"]["target"]["name"] == "smollm2-135m-instruct"

    engine.chunks, engine.dies_at = 0, 2
    with pytest.raises(KeyboardInterrupt):
        run("killed")
    with (tmp_path / "killed/prompts/self_0.jsonl").open("a") as stream:
        stream.write('[["a torn li')
    engine.dies_at = None
    killed = run("killed")
    assert engine.chunks == 4
    for name in (prepare.TRAIN, prepare.HELD_OUT, prepare.REJECTS):
        assert (killed.folder("prepare") / name).read_bytes() == (whole.folder("prepare") / name).read_bytes()

    engine.chunks, engine.reply = 0, functools.partial(reply, never_ends=True)
    with pytest.raises(ValueError, match="got 0 usable prompts"):
        run("endless")
    assert engine.chunks == 10  # 80 tries for 20 prompts


def test_self_prompting_begins_as_it_is_told_and_goes_on_for_several_turns(tmp_path, engine):
    def reply(_: int, prompt: list[int], one: SamplingParams) -> tuple[str, str]:
        """A prompt that begins with "Cut", and a third one, never ends."""
        text = "".join(map(chr, prompt))
        return f" {len(text)}/{one.seed}", "length" if "Cut" in text or text.count("user:") > 2 else "stop"

    engine.reply = reply
    source = {"kind": "self", "count": 4, "turns": 3, "openings": ["Write code", "Cut"], "category": "code"}
    config = run_config(tmp_path, source | {"system": "Be brief."}, batch_size=2, near_duplicate=1.0)
    prepare.prepare(config)
    kept = prompts(config)
    assert results(config)["rejected"] == {"the target did not end its prompt": len(kept)}
    assert len(kept) == 4 and {prompt["category"] for prompt in kept} == {"code"}
    asked = ["".join(map(chr, prompt)) for prompt in engine.asked]
    for prompt in kept:
        system, first, second = prompt["messages"]  # the third turn is cut off: the conversation ends with the second
        assert (system["role"], system["content"]) == ("system", "Be brief.")
        assert first["role"] == second["role"] == "user"
        assert first["content"].startswith("Write code 32/")
        question = f"system:Be brief.;user:{first['content']};"
        assert question + "assistant:" in asked
        assert any(row.startswith(f"{question}assistant: ") and row.endswith(";user:") for row in asked)
        assert second["content"].endswith("/" + first["content"].rpartition("/")[2]), "one seed, one conversation"
    values = run_file.to_dict(config) | {"run_dir": str(tmp_path / "rows"), "mesh": {"data": 3}}
    prepare.prepare(run_file.from_dict(values))  # an engine for each row of the mesh
    assert engine.rows == [1, 3]
    assert prompts(run_file.from_dict(values)) == kept


def test_where_a_prompt_comes_from_goes_with_it(tmp_path):
    """A record's licence, else its source's; and what the manifest says of sources and lengths."""
    mine = jsonl(
        tmp_path, *({"prompt": question} for question in QUESTIONS), {"prompt": "Где?", "license": "cc-by-4.0"}
    )
    other = jsonl(tmp_path, {"prompt": "Who sings in the other file?", "license": 7}, name="other.jsonl")
    config = run_config(tmp_path, mine | {"license": "mit"}, other, {"kind": "packaged", "limit": 3})
    prepare.prepare(config)
    found = {(prompt["source"], prompt.get("license")) for prompt in prompts(config)}
    own = {("jsonl:in.jsonl", "mit"), ("jsonl:in.jsonl", "cc-by-4.0")}
    assert found == own | {("jsonl:other.jsonl", None), ("packaged", "apache-2.0")}
    assert results(config)["provenance"] == {
        "jsonl:in.jsonl": {"mit": 20, "cc-by-4.0": 1},
        "jsonl:other.jsonl": {"unstated": 1},
        "packaged": {"apache-2.0": 3},
    }
    assert results(config)["characters"]["mine"] == {"32": 21, "4": 1}
    assert sum(sum(counts.values()) for counts in results(config)["characters"].values()) == 25


def test_benchmarks_are_compared_as_prompts_are_read(tmp_path):
    """Another spelling of accents, an address that is redacted, packed files, line breaks of Unicode within a text."""
    accents = "Où est né le poète qui a écrit ces vers célèbres ?"
    address = "Is bob@example.org or eve@example.org right?"
    path = tmp_path / "bench.jsonl.gz"
    questions = [unicodedata.normalize("NFD", accents), address, "one\u2028two"]
    texts = "".join(json.dumps({"question": text}, ensure_ascii=False) + "\n" for text in questions)
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + texts.encode()))
    source = jsonl(tmp_path, *({"prompt": question} for question in [*QUESTIONS, accents, address]))
    config = run_config(tmp_path, source, benchmarks=[str(path)])
    prepare.prepare(config)
    assert results(config)["rejected"] == {"eight words in a row of the benchmark bench.jsonl.gz": 2}
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"prepare.benchmarks: got '.*bench.jsonl.gz' .*expected a whole gzip file"):
        prepare.prepare(run_config(tmp_path / "cut", source, benchmarks=[str(path)]))


def test_questions_of_benchmarks_stay_out(tmp_path):
    """Eight words in a row are enough, wherever they stand in a benchmark's record; seven are not. Zero is a count."""
    asked = "What is the sum of all primes below one hundred?"
    bench = jsonl(tmp_path, {"turns": ["Tell me: what is the SUM of all primes, below ten?"]}, name="bench.jsonl")
    far = jsonl(tmp_path, {"question": "Of all the rivers in the world, which is the longest one?"}, name="far.jsonl")
    source = jsonl(tmp_path, *({"prompt": question} for question in [*QUESTIONS, asked, "What is the sum of all the"]))
    config = run_config(tmp_path, source, benchmarks=[bench["path"], far["path"]])
    prepare.prepare(config)
    reason = "eight words in a row of the benchmark"
    assert results(config)["rejected"] == {f"{reason} bench.jsonl": 1, f"{reason} far.jsonl": 0}
    identity = manifest.read(config.folder("prepare"), "prepare")["identity"]
    assert identity["inputs"][bench["path"]] == disk.digest(bench["path"])
    config = run_config(tmp_path / "b", source, benchmarks=["none.jsonl"])
    with pytest.raises(ValueError, match=r"prepare.benchmarks: got 'none.jsonl' \(No such file"):
        prepare.prepare(config)
    pathlib.Path(bench["path"]).write_text("no JSON")
    with pytest.raises(ValueError, match=r"prepare.benchmarks: got '.*bench.jsonl' .*expected a JSONL file"):
        prepare.prepare(run_config(tmp_path / "c", source, benchmarks=[bench["path"]]))
