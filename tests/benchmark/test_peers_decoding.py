"""tools/peers_decoding.py: what it asks of another engine, what it makes of the answers, and what it refuses."""

import argparse
import importlib
import json
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def peers(monkeypatch):
    """The tool as a module."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("peers_decoding")


def test_the_fastest_turn_counts_and_equal_answers_are_counted(peers):
    mine = [{"answers": [[1, 2], [3, 4]], "seconds": seconds} for seconds in ([2.0, 1.0], [4.0, 3.0])]
    other = [{"answers": [[1, 2], [3, 5]], "seconds": seconds} for seconds in ([8.0, 9.0], [2.0, 6.0])]
    said = peers.row("none", 8, [list(turn) for turn in zip(mine, other, strict=True)])
    assert said == "| none | 8 | 4.0 | 2.0 | 2.00 | 1/2 |"


def test_both_engines_are_asked_for_the_same(peers, tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\nimport json, sys\nrequest = json.load(sys.stdin)\nprint('a line of its log')\n"
        "print(json.dumps({'asked': request, 'by': sys.argv[1]}))\n"
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    arguments = argparse.Namespace(
        draft="auto", weights="stored", dtype="float32", llama_cpp=str(python), gguf="x.gguf"
    )
    theirs, mine = (ask(arguments, peers.CHAIN, 8) for ask in (peers.in_llama_cpp, peers.ours))
    assert theirs["by"].endswith("peers/llama_cpp.py") and mine["by"].endswith("peers_decoding.py")
    assert theirs["asked"]["prompts"] == mine["asked"]["prompts"] == peers.golden_prompts(8)
    assert (theirs["asked"]["gguf"], theirs["asked"]["max_tokens"], theirs["asked"]["batch_size"]) == ("x.gguf", 64, 8)
    assert (mine["asked"]["target"], mine["asked"]["draft"], mine["asked"]["chain"]) == (peers.TARGET, "auto", True)
    python.write_text("#!/bin/sh\necho no such model >&2; exit 3\n")
    with pytest.raises(SystemExit, match=r"status 3\nno such model"):
        peers.in_llama_cpp(arguments, peers.NONE, 1)


def test_the_process_asks_llama_cpp_s_own_api_for_token_ids(monkeypatch, tmp_path):
    """A server in xllamacpp's place, which answers as llama.cpp's /completion does."""
    import http.server
    import threading
    import types

    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body))
            said = json.dumps({"content": "", "tokens": [7] * body["n_predict"]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, format, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    made = []

    def start(options):
        made.append(options)
        return types.SimpleNamespace(listening_address=f"http://127.0.0.1:{server.server_port}")

    empty = types.SimpleNamespace
    options = lambda: empty(model=empty(), cpuparams=empty(), cpuparams_batch=empty())  # noqa: E731
    monkeypatch.setitem(sys.modules, "xllamacpp", empty(CommonParams=options, Server=start, __version__="0"))
    monkeypatch.syspath_prepend(ROOT / "tools")
    process = importlib.import_module("peers.llama_cpp")
    sizes = {"max_tokens": 3, "max_model_len": 64, "batch_size": 2, "threads": 1, "turns": 1}
    try:
        found = process.answer({"gguf": "a.gguf", "prompts": [[1, 2], [3]], **sizes})
    finally:
        server.shutdown()
        server.server_close()
    assert found["answers"] == [[7, 7, 7]] * 2 and len(found["seconds"]) == 1
    assert (made[0].model.path, made[0].n_ctx, made[0].n_parallel) == ("a.gguf", 128, 2)
    assert sorted(body["prompt"] for _, body in asked) == [[1, 2], [1, 2], [3], [3]]
    path, body = asked[0]
    assert path == "/completion" and body["return_tokens"] and body["ignore_eos"] and body["temperature"] == 0
