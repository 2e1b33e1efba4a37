"""Three servers of this package as processes, one of them killed; and real vLLM: every answer is a server's, once."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
import tiny
import yaml
from fake_fleet import FakeServer

from eagle3_jax.config import SPLITS
from eagle3_jax.data.conversation import read_conversation
from eagle3_jax.models.checkpoint.fetch import load_tokenizer
from eagle3_jax.runs import disk, manifest

MODEL = "org/tiny"


def free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


@dataclasses.dataclass
class Served:
    """A server of this package over the tiny target, killed and started on one port."""

    folder: pathlib.Path
    port: int = dataclasses.field(default_factory=free_port)
    process: tiny.Started | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        words = ["--config", str(self.folder / "run.yaml"), "--draft", "none", "--serve.model-name", MODEL]
        words += ["--port", str(self.port), "--max-running-requests", "8", "--serve.max-length", "128"]
        words += ["--serve.warm-up-folder", str(self.folder / "programs")]
        self.process = tiny.Started(
            [sys.executable, "-m", "eagle3_jax.serve", *words], cwd=self.folder, env=tiny.environment()
        )

    def ready(self) -> None:
        self.until(lambda: httpx2.get(f"http://127.0.0.1:{self.port}/health").status_code == 200)

    def until(self, holds: Callable[[], bool], seconds: float = 300) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process is not None and self.process.poll() is None, self.process and self.process.printed()
            try:
                if holds():
                    return
            except httpx2.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError("not in time")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.ended()
            self.process = None


def write_run(folder: pathlib.Path, prompts: int, servers: list[Any], **settings: Any) -> pathlib.Path:
    """A run whose prompts are prepared."""
    path = tiny.write_run(folder, prompts, prepare={"near_duplicate": 1.0, "held_out": 0.02})
    values = yaml.safe_load(path.read_text())
    common = {"max_tokens": 12, "max_length": 96, "deadline": 60.0, "patience": 120.0}
    values["regenerate"] = values["regenerate"] | common | settings | {"servers": servers}
    path.write_text(yaml.safe_dump(values))
    tiny.verb_in(path, "prepare")
    return path


@pytest.fixture
def two(tmp_path: pathlib.Path) -> Iterator[list[Served]]:
    servers = [Served(tmp_path), Served(tmp_path)]
    try:
        yield servers
    finally:
        for server in servers:
            server.kill()


def answered(run: pathlib.Path) -> list[dict[str, Any]]:
    """Of the log that grows: its whole lines."""
    logs = (run / "conversations").glob("answers.*.jsonl.partial")
    lines = [line for log in logs for line in log.read_bytes().split(b"\n")[:-1]]
    return [json.loads(line.partition(b" ")[2]) for line in lines]


def lines_of(folder: pathlib.Path) -> list[dict[str, Any]]:
    return [line for split in SPLITS for line in disk.read_jsonl(folder / f"{split}.jsonl")]


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", [120, 2000])
def test_three_servers_of_which_one_fails_and_one_is_killed(two, tmp_path, count):
    """SIGKILL of a server, which comes back, and of `regenerate` itself; then every prompt is there, once."""
    with FakeServer(tiny.make_tokenizer(), model=MODEL, rule=lambda _: 500) as broken:
        listed = [{"url": server.url, "model": MODEL, "concurrency": 16} for server in (*two, broken)]
        path = write_run(tmp_path, count, listed)
        run, words = tmp_path / "run", [sys.executable, "-m", "eagle3_jax.regenerate", "--config", str(path)]
        two[0].start()  # it compiles for both
        two[0].ready()
        two[1].start()
        two[1].ready()
        first = tiny.Started(words, cwd=tmp_path, env=tiny.environment())
        two[0].until(lambda: len(answered(run)) > count // 8 or first.poll() is not None)
        two[1].kill()
        before = len(answered(run))
        two[0].until(lambda: len(answered(run)) > before + count // 8 or first.poll() is not None)
        first.kill()
        assert first.ended()[0] == -signal.SIGKILL
        kept = answered(run)
        two[1].start()
        two[1].ready()
        asked = len(broken.asked)
        again = tiny.Started(words, cwd=tmp_path, env=tiny.environment())
        status, output = again.ended(timeout=1500)
        assert status == 0, output
    conversations, prompts = lines_of(run / "conversations"), lines_of(run / "prompts")
    rejects = list(disk.read_jsonl(run / "conversations/rejects.jsonl"))
    names = [line["id"] for line in (*conversations, *rejects)]
    assert sorted(names) == sorted(line["id"] for line in prompts) and len(set(names)) == len(prompts) == count
    assert [line["reason"] for line in rejects if "status 500" in line["reason"]] == []
    found = manifest.read(run / "conversations", "regenerate")["results"]
    servers = found["train"]["servers"]
    print(f"{count} prompts: {servers}, {len(rejects)} rejects, {len(kept)} answers before the kill, {asked} at 500")
    assert set(servers) == {server.url for server in two}
    by_name = {line["id"]: line for line in conversations}
    for answer in kept:  # what was answered before the kill is what is kept
        if answer["text"].strip():
            assert by_name[answer["id"]]["answer_ids"] == [answer["token_ids"]]
    tokenizer = load_tokenizer(tmp_path / "target")
    for line in conversations[:50]:
        (sequence,) = read_conversation(json.dumps(line), tokenizer, 128)
        assert sequence.token_ids[sequence.loss_mask == 1].tolist() == line["answer_ids"][0]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_real_vllm_is_asked_and_the_ids_are_its_own(vllm, tmp_path, monkeypatch):
    """64 prompts. vLLM is asked for each answer again: greedy answers repeat."""
    monkeypatch.setitem(tiny.CONFIG, "head_dim", 32)  # vLLM's attention on a CPU takes no smaller ones
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1"
    path = write_run(tmp_path, 64, [{"url": url, "model": MODEL, "concurrency": 1}], temperature=0.0)
    environment = tiny.environment(VLLM_CPU_KVCACHE_SPACE="1", OMP_NUM_THREADS="1", VLLM_NO_USAGE_STATS="1")
    del environment["PYTHONPATH"]
    words = f"-m vllm.entrypoints.openai.api_server --served-model-name {MODEL} --host 127.0.0.1 --port {port}"
    words += " --dtype float32 --max-model-len 256 --enforce-eager --no-enable-prefix-caching --max-num-seqs 1 --model"
    started = tiny.Started(
        [str(vllm), *words.split(), str(tmp_path / "target")], cwd=tmp_path, env=environment, start_new_session=True
    )
    server = Served(tmp_path, port, started)
    try:
        server.until(lambda: httpx2.get(f"{url}/models").status_code == 200, 900)
        tiny.verb_in(path, "regenerate", timeout=1500)
        conversations = lines_of(tmp_path / "run/conversations")
        rejects = list(disk.read_jsonl(tmp_path / "run/conversations/rejects.jsonl"))
        assert len(conversations) + len(rejects) == 64 and len(conversations) > 32
        ends: collections.Counter[str] = collections.Counter()
        for line in conversations:
            body = {"model": MODEL, "messages": line["messages"][:1], "temperature": 0.0, "max_tokens": 12}
            reply = httpx2.post(f"{url}/chat/completions", json=body | {"return_token_ids": True}, timeout=60).json()
            assert line["answer_ids"] == [reply["choices"][0]["token_ids"]]
            assert line["messages"][1]["content"] == reply["choices"][0]["message"]["content"]
            ends[reply["choices"][0]["finish_reason"]] += 1
        print(f"vLLM: {len(conversations)} conversations, {len(rejects)} rejects, ends {dict(ends)}")
        assert ends["stop"]
    finally:
        os.killpg(started.pid, signal.SIGKILL)  # vLLM's engine is a process of its own
        started.ended()
