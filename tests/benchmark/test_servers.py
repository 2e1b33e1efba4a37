"""The benchmark of servers: measured once, refused where it cannot be; and (long) with servers that it starts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import tiny
import yaml

from eagle3_jax.benchmark import __main__ as benchmark
from eagle3_jax.benchmark import servers
from eagle3_jax.benchmark.traffic import Endpoint
from eagle3_jax.config import ConfigError, RunConfig, TrafficConfig, run_file
from eagle3_jax.runs import command, machine

TOKENS = 6


class _Handler(BaseHTTPRequestHandler):
    """Answers every prompt with its own words: in chunks of two tokens, or with a key in one, with usage behind it."""

    protocol_version = "HTTP/1.1"
    asked: list[dict[str, Any]]
    key: str | None

    def do_GET(self) -> None:
        self._send("application/json", json.dumps({"data": [{"id": "a-model"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        choices = [{"delta": {"content": body["messages"][-1]["content"].split()[0]}}]
        usages = [{"prompt_tokens": 3, "completion_tokens": count} for count in range(2, TOKENS + 1, 2)]
        events = [{"choices": choices, "usage": usage} for usage in usages]
        if self.key is not None:
            events = [{"choices": choices, "usage": None}, {"choices": [], "usage": usages[-1]}]
        self._send("text/event-stream", b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events))

    def _send(self, kind: str, body: bytes) -> None:
        self.send_response(200 if self.key is None or self.headers["Authorization"] == f"Bearer {self.key}" else 401)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...  # pyrefly: ignore


@contextlib.contextmanager
def _answering(key: str | None = None) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    handler: Any = type("Handler", (_Handler,), {"asked": [], "key": key})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", handler.asked
        server.shutdown()
        thread.join(10)


@pytest.fixture
def parrot() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Its URL, and what it was asked."""
    with _answering() as found:
        yield found


@pytest.fixture
def traffic_config(config: RunConfig, tmp_path: pathlib.Path) -> RunConfig:
    traffic = TrafficConfig(concurrency=(1, 3), rates=(200.0,), requests=4, max_tokens=TOKENS)
    return dataclasses.replace(config, run_dir=str(tmp_path / "run"), traffic=traffic)


@pytest.mark.long
def test_every_server_is_measured_once_at_every_level(traffic_config, prompts, parrot, monkeypatch):
    url, asked = parrot
    started = []

    @contextlib.contextmanager
    def start(values: dict[str, Any], path: pathlib.Path) -> Iterator[Endpoint]:
        started.append((path.name, values["serve"]["draft"], values["serve"]["trees"]))
        yield Endpoint(url, path.stem)

    monkeypatch.setattr(servers, "_started", start)
    report = servers.run(traffic_config, prompts, {"vLLM": f"{url}/"})
    assert [name for name, *_ in started] == ["serve_vanilla.yaml", "serve_speculative.yaml"]
    assert started[0][1:] == ("none", []) and started[1][1] is None
    assert list(report["ways"]) == ["vanilla", "speculative", "vLLM"]
    for way in report["ways"].values():
        assert [level["requests"] for level in way["levels"]] == [4, 6, 4]
        assert all(level["identical"] == level["requests"] and level["failed"] == 0 for level in way["levels"])
        assert all(level["tokens"] == TOKENS * level["requests"] for level in way["levels"])
    assert len(asked) == 3 * (1 + 4 + 6 + 4) and asked[0]["max_tokens"] == TOKENS
    assert len({str(body["messages"]) for body in asked}) == 4, "not every prompt was asked"
    turns = [body["model"] for body in asked[3:]]  # behind one prompt each that warms them
    order = ["serve_vanilla", "serve_speculative", "a-model"]
    assert turns == [
        name for n, names in ((4, order), (6, order[::-1]), (4, order)) for name in names for _ in range(n)
    ]
    servers.run(traffic_config, prompts, {"vLLM": f"{url}/"})
    assert len(asked) == 45, "measured again"
    slower = dataclasses.replace(traffic_config, traffic=dataclasses.replace(traffic_config.traffic, requests=5))
    servers.run(slower, prompts)
    assert len(asked) == 45 + 2 * (1 + 5 + 6 + 5)


@pytest.mark.long
def test_what_was_measured_before_a_stop_is_kept(traffic_config, prompts, parrot, monkeypatch):
    url, asked = parrot
    monkeypatch.setattr(servers, "_started", lambda _, path: contextlib.nullcontext(Endpoint(url, path.stem)))
    points = iter(range(2 + 3))  # one before each server, one before each level of each: the second level's second
    monkeypatch.setattr(command, "_asked", None)

    def stop_point() -> None:
        if next(points, None) is None:
            raise command.Stopped

    with monkeypatch.context() as stopping, pytest.raises(command.Stopped):
        stopping.setattr(command, "stop_point", stop_point)
        servers.run(traffic_config, prompts)
    assert len(asked) == 2 + 4 + 4 + 6
    servers.run(traffic_config, prompts)
    behind = [body["model"] for body in asked[2 + 4 + 4 + 6 + 2 :]]
    assert behind == ["serve_vanilla"] * (6 + 4) + ["serve_speculative"] * 4


@pytest.mark.slow
def test_an_accelerator_has_one_server_at_a_time(traffic_config, prompts, parrot, monkeypatch):
    url, asked = parrot
    running: list[str] = []

    @contextlib.contextmanager
    def start(_: dict[str, Any], path: pathlib.Path) -> Iterator[Endpoint]:
        running.append(path.stem)
        assert len(running) == 1
        yield Endpoint(url, path.stem)
        running.remove(path.stem)

    found = machine.hardware() | {"accelerator": "TPU v5 lite"}
    monkeypatch.setattr(servers, "_hardware", lambda: found)
    monkeypatch.setattr(servers, "_started", start)
    report = servers.run(traffic_config, prompts)
    assert [level["identical"] for level in report["ways"]["speculative"]["levels"]] == [4, 6, 4]
    assert len(asked) == 2 * (1 + 4 + 6 + 4)


@pytest.mark.long
def test_who_measures_leaves_the_accelerator_to_the_servers(traffic_config, prompts, parrot, tmp_path):
    """A TPU is one process's: that which asked JAX first."""
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(run_file.to_dict(traffic_config)))
    code = """
import contextlib, sys
from jax._src import xla_bridge
from eagle3_jax.benchmark import __main__ as benchmark
from eagle3_jax.benchmark import servers
servers._started = lambda *_: contextlib.nullcontext(servers.found_at(sys.argv[1]))
benchmark.main(["serve", *sys.argv[2:]])
assert not xla_bridge.backends_are_initialized()
"""
    words = [sys.executable, "-c", code, parrot[0], "--config", str(config), "--prompts", str(prompts)]
    subprocess.run(words, env=tiny.environment(), check=True, timeout=300)
    report = json.loads(pathlib.Path(traffic_config.run_dir, "benchmark/serve.json").read_text())
    assert report["hardware"]["devices"] >= 1


@pytest.mark.long
def test_a_server_with_a_key_that_counts_at_the_end(traffic_config, prompts, parrot, monkeypatch, tmp_path, capsys):
    """As OpenAI's own: it shows its models to who has a key."""
    monkeypatch.setattr(servers, "_started", lambda *_: contextlib.nullcontext(Endpoint(parrot[0], "a-model")))
    monkeypatch.setenv("THEIR_KEY", "s3cret")
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run_file.to_dict(traffic_config)))
    with _answering("s3cret") as (url, asked):
        words = ["--compare", f"strict={url}", "--config", str(path), "--prompts", str(prompts)]
        benchmark.main(["serve", "--compare-key", "strict=THEIR_KEY", *words])
        assert len(asked) == 1 + 4 + 6 + 4
        with pytest.raises(SystemExit, match="expected a server of OpenAI's API"):
            benchmark.main(["serve", *words, "--traffic.requests", "5"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("strict")]
    assert [row[4:] for row in rows] == [["-", "-", "-", "-", f"0/{n}", "0"] for n in (4, 6, 4)]
    folder = pathlib.Path(traffic_config.run_dir, "benchmark")
    levels = json.loads((folder / "serve.json").read_text())["ways"]["strict"]["levels"]
    assert [level["tokens"] for level in levels] == [TOKENS * n for n in (4, 6, 4)]
    assert not [file for file in folder.iterdir() if "s3cret" in file.read_text()]
    for key, message in (
        ("other=THEIR_KEY", "--compare-key: got the name other, expected one of --compare"),
        ("strict=NO_KEY", "--compare-key: got no NO_KEY in the environment"),
        ("strict", "--compare-key: got strict, expected NAME=VARIABLE"),
    ):
        with pytest.raises(SystemExit, match=message):
            benchmark.main(["serve", "--compare-key", key, *words])


@pytest.mark.slow
def test_what_cannot_be_measured_is_refused(traffic_config, prompts, tmp_path, capsys):
    for traffic in ({"concurrency": []}, {"concurrency": [0]}, {"rates": [0.0]}, {"requests": 0}):
        with pytest.raises(ConfigError, match="traffic.(concurrency|rates|requests)(.0)?: got"):
            run_file.from_dict({"run_dir": "x", "traffic": traffic})
    with pytest.raises(ValueError, match="--compare: got the name vanilla"):
        servers.run(traffic_config, prompts, {"vanilla": "http://127.0.0.1:1/v1"})
    with pytest.raises(ValueError, match="expected a server of OpenAI's API"):
        servers.found_at("http://127.0.0.1:1/v1")
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run_file.to_dict(traffic_config)))
    with pytest.raises(SystemExit, match=r"--compare: got vllm, expected NAME=http"):
        benchmark.main(["serve", "--compare", "vllm", "--config", str(path), "--prompts", str(prompts)])


@pytest.mark.slow
def test_a_server_that_is_not_there_is_reported_before_any_is_measured(traffic_config, prompts, monkeypatch):
    class Begun(Exception): ...

    def begin(*_: Any) -> None:
        raise Begun

    monkeypatch.setattr(servers, "_hardware", machine.hardware)
    monkeypatch.setattr(servers, "_take_turns", begin)
    for url in ("http://127.0.0.1:1/v1", "http://127.0.0.1:PORT/v1"):
        with pytest.raises(ValueError, match=rf"{url}/models: got .*, expected a server of OpenAI's API"):
            servers.run(traffic_config, prompts, {"vLLM": url})
    measured = servers._Measured
    monkeypatch.setattr(servers, "_Measured", lambda *about: measured(*about, levels=[{}] * 3))
    with pytest.raises(Begun):  # one that is measured already need not be there
        servers.run(traffic_config, prompts, {"vLLM": "http://127.0.0.1:1/v1"})


@pytest.mark.slow
def test_a_device_that_another_holds_is_an_error(traffic_config, prompts, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "no_such_device")
    with pytest.raises(ValueError, match="hardware: got status 1 from JAX"):
        servers.run(traffic_config, prompts)


@pytest.mark.long
def test_a_server_that_does_not_start_is_an_error(traffic_config, prompts):
    target = dataclasses.replace(traffic_config.target, name="/no/such/folder")
    with pytest.raises(ValueError, match="serve_vanilla.yaml: got status 1 from the server"):
        servers.run(dataclasses.replace(traffic_config, target=target), prompts)


@pytest.mark.long
def test_real_servers_answer_alike(tmp_path):
    """With drafts and without, both started by the verb."""
    run = tiny.make_run(tmp_path / "run")
    values = yaml.safe_load(run.config.read_text())
    values["traffic"] = {"concurrency": [1, 4], "requests": 8, "max_tokens": 24}
    values["serve"] = {"batch_size": 4, "max_length": 128}
    run.config.write_text(yaml.safe_dump(values))
    words = ["eagle3_jax.benchmark", "serve", "--config", run.config.name, "--prompts", "run/prompts/held_out.jsonl"]
    where: dict[str, Any] = {"cwd": run.config.parent, "env": tiny.environment()}
    subprocess.run([sys.executable, "-m", *words], timeout=1800, check=True, **where)
    report = json.loads((run.config.parent / "run/benchmark/serve.json").read_text())
    for way in report["ways"].values():
        assert all(level["identical"] == level["requests"] == 8 for level in way["levels"])


def _level(tokens_per_second: float, tpot: float | None) -> dict[str, Any]:
    def spread(value: float) -> dict[str, float]:
        return {"mean": value, "p50": value, "p95": 2 * value, "p99": 3 * value}

    times = {"ttft": spread(0.25), "tpot": None if tpot is None else spread(tpot)}
    return times | {"tokens_per_second": tokens_per_second, "identical": 15, "requests": 16, "failed": 1}


def test_the_table_has_a_row_for_each_server_at_each_level():
    vanilla = {"levels": [_level(40.0, 0.0200), _level(150.0, 0.0400), _level(30.0, None)]}
    speculative = {"levels": [_level(60.0, 0.0125), _level(180.0, 0.0320), _level(33.0, None)]}
    ways = {"vanilla": vanilla, "speculative": speculative}
    report = {"traffic": {"concurrency": [1, 8], "rates": [0.5]}, "ways": ways}
    lines = servers.table(report).splitlines()
    rows = [line.split() for line in lines if line.startswith("speculative")]
    assert rows[1] == ["speculative", "180.0", "250", "500", "32.0", "64.0", "96.0", "1.25x", "15/16", "1"]
    assert rows[2] == ["speculative", "33.0", "250", "500", "-", "-", "-", "-", "15/16", "1"], "in one chunk"
    titles = [line.split("  ")[0] for line in lines if "TTFT" in line]
    assert titles == ["1 client", "8 clients", "0.5 requests a second"]
