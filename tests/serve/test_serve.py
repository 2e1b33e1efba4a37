"""The verb: flags and refusals, and a process that starts, answers, and ends at SIGTERM with what it began."""

import concurrent.futures
import contextlib
import functools
import json
import pathlib
import re
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
import tiny

from eagle3_jax.config import AdaptConfig, ConfigError, DraftTree, RunConfig, ServeConfig, from_dict
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.models.checkpoint.fetch import Target
from eagle3_jax.runs import command, machine
from eagle3_jax.serve import __main__ as serve
from eagle3_jax.serve import flags as flags_of

TREE = "--speculative-num-steps 2 --speculative-eagle-topk 1"
# The programs that are asked for are compiled when they are.
COLD = """
import sys
from eagle3_jax.serve import __main__ as serve
from eagle3_jax.decoding.engine import Engine
Engine.warm_up = lambda *_, **__: None
flags = "--target target --target.aux-layers 1 2 3 --draft none --port 0 --serve.batch-size 2 --serve.max-length 512"
serve.main([*flags.split(), *sys.argv[1:]])
"""
FAST: Any = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
# A compilation beside requests takes longer than anyone waits.
SLOW = """
import sys, threading, time
from eagle3_jax.decoding.device.runner import ModelRunner
from eagle3_jax.serve import __main__ as serve
compile_one = ModelRunner.compile
def slowly(runner, call):
    if threading.current_thread().name == "eagle3_jax warm-up":
        time.sleep(300)
    compile_one(runner, call)
ModelRunner.compile = slowly
serve.main(sys.argv[1:])
"""


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("run_dir: runs/x\ntarget: {name: a/b}\nserve: {port: 9000, batch_size: 2}\n")
    return str(path)


def test_the_head_learns_where_it_is_asked_to():
    assert serve.configure(["--target", "a"]).serve.adapt is None
    assert serve.configure(["--target", "a", "--adapt"]).serve.adapt == AdaptConfig()
    words = ["--target", "a", "--serve.adapt.share", "0.2"]
    assert (
        serve.configure(words).serve.adapt == serve.configure([*words, "--adapt"]).serve.adapt == AdaptConfig(share=0.2)
    )


def test_sglang_s_flags_are_understood(run_file):
    flags = "--speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 8"
    flags += " --mem-fraction-static 0.8 --max-running-requests 16 --serve.queue-limit 7"
    flags += " --draft heads/eagle2 --speculative-token-map frequent.json"
    config = serve.configure(["--config", run_file, *flags.split()])
    assert config.serve == ServeConfig(
        port=9000,
        batch_size=16,
        queue_limit=7,
        memory_fraction=0.8,
        draft="heads/eagle2",
        token_map="frequent.json",
        trees=(DraftTree(num_steps=3, topk=4, num_draft_tokens=8),),
    )
    chain = serve.configure(["--config", run_file, "--speculative-num-steps", "2", "--port", "1"]).serve
    assert (chain.trees, chain.port) == ((DraftTree(num_steps=2, topk=1, num_draft_tokens=3),), 1)


def test_the_commands_of_sglang_s_pages_are_understood():
    words = "--speculative-draft-model-path some/head --speculative-num-steps 5 --speculative-eagle-topk 8"
    words += " --speculative-num-draft-tokens 32 --mem-fraction 0.6 --dtype bfloat16"
    words += " --speculative-draft-model-quantization int8"
    config = serve.configure(["--model", "org/model", "--speculative-algorithm", "EAGLE3", *words.split()])
    assert (config.target.name, config.target.dtype) == ("org/model", "bfloat16")
    assert (config.serve.draft, config.serve.draft_weights, config.serve.memory_fraction) == ("some/head", "int8", 0.6)
    assert config.serve.trees == (DraftTree(num_steps=5, topk=8, num_draft_tokens=32),)


def test_vllm_s_flags_are_understood():
    words = "--model org/model --served-model-name small --max-model-len 512 --tensor-parallel-size 4"
    words += (
        " --data-parallel-size 2 --gpu-memory-utilization 0.9 --max-num-seqs 16 --quantization fp8 --dtype bfloat16"
    )
    config = serve.configure(words.split())
    assert (config.mesh.model, config.mesh.data, config.target.weights) == (4, 2, "fp8")
    assert config.serve == ServeConfig(
        draft="auto", model_name="small", max_length=512, memory_fraction=0.9, batch_size=16
    )


@pytest.mark.parametrize(
    ("algorithm", "draft"), [("EAGLE3", "auto"), ("EAGLE", "mtp"), ("NEXTN", "mtp"), ("NGRAM", "lookup")]
)
def test_an_algorithm_says_what_drafts_where_nobody_else_does(algorithm, draft, run_file):
    assert serve.configure(["--model-path", "a", "--speculative-algorithm", algorithm]).serve.draft == draft
    with_config = ["--config", run_file, "--speculative-algorithm", algorithm]
    assert serve.configure(with_config).serve.draft == (None if algorithm == "EAGLE3" else draft)
    if algorithm.startswith("EAGLE"):
        assert serve.configure([*with_config, "--serve.draft", "a/head"]).serve.draft == "a/head"


@pytest.mark.parametrize("algorithm", ["DFLASH", "DSPARK"])
def test_a_block_head_s_flags_have_the_size_of_its_block(algorithm):
    words = f"--model-path a --speculative-algorithm {algorithm} --speculative-draft-model-path a/head"
    assert serve.configure(words.split()).serve.trees == ()
    config = serve.configure([*words.split(), "--speculative-num-draft-tokens", "16"]).serve
    assert (config.draft, config.trees) == ("a/head", (DraftTree(num_steps=15, topk=1, num_draft_tokens=16),))


def test_a_target_s_name_is_enough_and_takes_every_field_of_a_config():
    config = serve.configure(["--target", "smollm2-135m-instruct"])
    assert (config.target.name, config.serve.draft, config.serve.trees) == ("smollm2-135m-instruct", "auto", ())
    fields = "--target.aux-layers 1 2 3 --mesh.data 1 --serve.queue-limit 7 --tp-size 4"
    config = serve.configure(["--target", "a", *fields.split()])
    assert (config.target.name, config.target.aux_layers, config.serve.queue_limit) == ("a", (1, 2, 3), 7)
    assert (config.mesh.data, config.mesh.model, config.serve.draft) == (1, 4, "auto")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--target a --speculative-algorithm MEDUSA", "got MEDUSA, expected one of EAGLE3, NEXTN"),
        (
            "--target a --speculative-algorithm STANDALONE",
            "got no --speculative-draft-model-path, expected a",
        ),
        ("--target a --speculative-algorithm NGRAM --draft x", "NGRAM: got the draft x, expected none"),
        (
            "--target a --speculative-algorithm EAGLE3 --draft lookup",
            "got the draft lookup, expected the folder or",
        ),
        ("--target a --trust-remote-code", "--trust-remote-code: not a field of the configuration"),
        ("", "--config, --target: got neither"),
        ("some-model --port 1", "got 'some-model' without a flag, expected --target some-model"),
        (
            "--target a --prot 1",
            "--prot: not a field of the configuration, expected --section.field VALUE, did you mean",
        ),
        (
            "--target a --enable-auto-tool-choice",
            "--enable-auto-tool-choice: no flag of this server, expected none: re",
        ),
        ("--target a --api-key b", "--api-key: no flag of this server, expected --serve.api-key-variable, the"),
        ("--target a --max-running-requests 0", "serve.batch_size: got '0', expected at least 1"),
        ("--target a --speculative-num-steps 3 --speculative-eagle-topk 4", "got 2 of"),
        (f"--target a {TREE} --speculative-num-draft-tokens 4", "num_steps + 1 = 3"),
    ],
)
def test_flags_that_cannot_be_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        serve.configure(arguments.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "value", "got"),
    [
        ("port", 65536, "65536"),
        ("client_timeout", 2147484, "2147484"),  # the socket takes no more
        ("allowed_origins", ["*", "https://example.org/"], "'https://example.org/', expected origins such as"),
        ("allowed_origins", ["https://*.example.org"], "'https://"),
    ],
)
def test_values_that_cannot_be_are_refused(field, value, got):
    with pytest.raises(ConfigError, match=rf"serve\.{field}: got {got}"):
        from_dict({"run_dir": "x", "serve": {field: value}})


def test_the_help_begins_with_an_example_and_names_aliases_in_a_sentence(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        serve.configure(["--help"])
    flags, _, fields = capsys.readouterr().out.partition("The run's YAML")
    text = "".join(flags.split())
    assert "suchas--targetsmollm2-135m-instruct" in text and all(flag in text for flag in flags_of._FLAGS)
    assert set(re.findall(r"^  (--\S+) VALUE", flags, re.MULTILINE)) == set(flags_of._SHOWN)
    assert "--serve.queue-limit" in fields


def test_the_next_start_is_fast_unless_nothing_may_be_kept(tmp_path, monkeypatch):
    asked: list[Any] = []

    def keep(folder, *, small=True):
        asked.append(("keep", folder))
        return folder

    monkeypatch.setattr(machine, "keep_programs", keep)
    monkeypatch.setattr(serve, "keep_programs", functools.partial(keep, tmp_path / "programs"))
    monkeypatch.setattr(
        serve, "load_target", lambda *_, progress, for_engine: progress("read") or Target.__new__(Target)
    )
    monkeypatch.setattr(Engine, "load", lambda *_, **__: Engine.__new__(Engine))
    monkeypatch.setattr(Engine, "warm_up", lambda self, folder, **_: asked.append(("warm up", folder)))
    for more, folder in (([], tmp_path / "programs"), (["--serve.warm-up-folder", "here"], pathlib.Path("here"))):
        serve.load(serve.configure(["--target", "a", "--dp-size", "1", *more]), asked.append)
        assert [call for call in asked if "after" not in call] == [("keep", folder), "read", ("warm up", folder)]
        asked.clear()
    serve.load(serve.configure(["--target", "a", "--dp-size", "1", "--serve.warm-up-folder", "none"]))
    assert asked == [("keep", None), ("warm up", None)]


def test_keys_come_from_the_environment_and_from_a_file(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_bytes(b"\xef\xbb\xbfone\r\n\n two \n")
    monkeypatch.setenv("SOME_KEY", "three\n")
    settings = ServeConfig(host="0.0.0.0", api_key_variable="SOME_KEY", api_key_file=str(file))
    assert serve.api_keys(settings) == ["three", "one", "two"]
    assert serve.api_keys(ServeConfig()) == []
    file.write_text("\n")
    strange = tmp_path / "strange"
    strange.write_text("one\nschlüssel\n")
    monkeypatch.setenv("BLANK", " \n")
    monkeypatch.setenv("STRANGE", "tab\tkey")
    for refused, message in (
        (ServeConfig(api_key_variable="NO_KEY"), "serve.api_key_variable: got no NO_KEY"),
        (ServeConfig(api_key_variable="BLANK"), "serve.api_key_variable: got no BLANK"),
        (ServeConfig(api_key_variable="STRANGE"), "serve.api_key_variable: got other characters in line 1, expected"),
        (ServeConfig(api_key_file=str(strange)), "serve.api_key_file: got other characters in line 2, expected"),
        (ServeConfig(api_key_file=str(file)), "serve.api_key_file: got no key"),
        (ServeConfig(host="0.0.0.0"), "serve.host: got 0.0.0.0 without keys"),
    ):
        with pytest.raises(ValueError, match=message):
            serve.api_keys(refused)


def test_a_place_that_is_taken_is_reported_before_anything_is_loaded(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        config = RunConfig(run_dir="x", serve=ServeConfig(port=other.getsockname()[1], draft="none"))
        monkeypatch.setattr(Engine, "load", None)
        with pytest.raises(ValueError, match=r"serve\.host, serve\.port: got 127.*Address already in use"):
            serve.run(config)


def test_a_stop_while_it_loads_ends_well(run_file, monkeypatch):
    def load(config, say):
        raise command.Stopped

    monkeypatch.setattr(serve, "load", load)
    with pytest.raises(SystemExit) as ended:
        serve.main(["--config", run_file, "--port", "0", "--generation-config", "vllm"])  # reads no target
    assert ended.value.code == 0


@contextlib.contextmanager
def started(folder: pathlib.Path, words: list[str], until: str, **variables: Any) -> Iterator[tuple[tiny.Started, str]]:
    """A server's process beside a tiny target, and what it printed up to `until`."""
    tiny.write_target(folder / "target")
    (process,) = tiny.start_processes(1, words, cwd=folder, **variables)
    try:
        while until not in (printed := process.printed()):
            assert process.poll() is None, printed
            time.sleep(0.05)
        yield process, printed
    finally:
        process.kill()
        process.wait(timeout=30)


def end_well(process: tiny.Started, timeout: float) -> str:
    ((status, printed),) = tiny.end_processes([process], timeout=timeout)
    assert status == 0 and "Traceback" not in printed, printed
    return printed


def address_in(printed: str) -> str:
    return printed.split("/v1 answers")[0].split()[-1]


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.parametrize(
    "sent", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)], ids=lambda sent: sent.name
)
def test_a_start_in_a_log_says_its_stages_and_ends_at_a_signal(tmp_path, sent):
    flags = "--target target --target.aux-layers 1 2 3 --draft lookup --port 0 --serve.max-length 512"
    command_line = ["-m", "eagle3_jax.serve", *flags.split(), "--serve.warm-up-folder", "none"]
    with started(tmp_path, command_line, "compile: 0 of 4 programs") as (process, printed):
        url = printed.split("loading; ")[1].split("/health")[0]
        health, models = httpx2.get(f"{url}/health"), httpx2.get(f"{url}/v1/models")
        assert (health.status_code, models.status_code) == (503, 503)
        assert health.json() == {"healthy": False, "starting": "compile: 0 of 4 programs"}
        assert "(compile: 0 of 4 programs); /health" in models.json()["error"]["message"]
        time.sleep(1)  # in the middle of a compilation, by all odds
        process.send_signal(sent)
        name = "SIGTERM" if sent == signal.SIGTERM else "Ctrl-C"
        assert end_well(process, 5).endswith(f"eagle3_jax.serve: stopped by {name}\n")


@pytest.mark.long
def test_a_server_that_compiles_beside_its_answers_says_so_and_ends_at_once(tmp_path):
    flags = "--target target --target.aux-layers 1 2 3 --draft lookup --port 0 --serve.max-length 64"
    command_line = ["-c", SLOW, *flags.split(), "--serve.batch-size", "2", "--serve.warm-up-folder", "none"]
    with started(tmp_path, command_line, "/v1 answers", **FAST) as (process, printed):
        url = address_in(printed)
        state = httpx2.get(f"{url}/health")
        assert (state.status_code, state.json()["healthy"]) == (200, True)
        assert state.json()["compiling"] == "4 of 9 programs are ready"
        asked = {"prompt": "apple", "max_tokens": 4, "temperature": 0.5}
        assert httpx2.post(f"{url}/v1/completions", json=asked, timeout=60).status_code == 200
        metrics = httpx2.get(f"{url}/metrics").text
        assert (
            'eagle3_jax_ready_programs{replica="0"} 4.0' in metrics and 'planned_programs{replica="0"} 9.0' in metrics
        )
        process.send_signal(signal.SIGTERM)
        end_well(process, 5)


@pytest.mark.slow
def test_a_process_answers_and_ends_with_what_it_began(tmp_path):
    with started(tmp_path, ["-c", COLD, "--serve.model-name", "tiny"], "/v1 answers\n", **FAST) as (process, printed):
        with openai.OpenAI(base_url=f"{address_in(printed)}/v1", api_key="none", max_retries=0, timeout=60) as client:
            messages: Any = [{"role": "user", "content": "apple bird"}]
            ask: Any = {"model": "tiny", "messages": messages, "max_tokens": 200, "temperature": 0, "n": 8}
            more = {"ignore_eos": True}
            whole = client.chat.completions.create(**ask, extra_body=more)
            stream = client.chat.completions.create(**ask, extra_body=more, stream=True)
            next(iter(stream))
            process.send_signal(signal.SIGTERM)  # most of its eight answers wait for a place
            texts = [""] * 8
            for event in stream:
                texts[event.choices[0].index] += event.choices[0].delta.content or ""
            assert texts == [choice.message.content for choice in whole.choices]
            with pytest.raises(openai.APIConnectionError):
                client.with_options(timeout=5).models.list()
        end_well(process, 60)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sent", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)], ids=lambda sent: sent.name
)
def test_answers_that_outlast_the_drain_end_with_an_error_and_whole_bodies(tmp_path, sent):
    with started(tmp_path, ["-c", COLD, "--serve.drain-timeout", "1"], "/v1 answers", **FAST) as (process, printed):
        url = address_in(printed)
        asked: Any = {"prompt": "apple", "max_tokens": 480, "ignore_eos": True, "n": 100}
        with (
            httpx2.Client(base_url=url, timeout=60) as http,
            concurrent.futures.ThreadPoolExecutor(1) as pool,
            http.stream("POST", "/v1/completions", json=asked | {"stream": True}) as answer,
        ):
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            whole = pool.submit(http.post, "/v1/completions", json=asked)
            while "waiting 19" not in http.get("/metrics").text.replace('{replica="0"} ', " "):
                time.sleep(0.05)
            process.send_signal(sent)
            *_, error, last = filter(None, lines)  # raises if the chunked body is torn
            assert json.loads(error.removeprefix("data: "))["error"]["code"] == "aborted" and last == "data: [DONE]"
            refused = whole.result()
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "aborted")
        printed = end_well(process, 30)
        assert "eagle3_jax.serve: stops: waits up to 1 s for 2 answers; Ctrl-C again ends at once\n" in printed
        assert "on disk" not in printed and "run it again" not in printed
