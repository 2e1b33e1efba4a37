"""SGLang's router before two servers: by cached prefix, and on while one of them is away."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import threading
import time
from typing import Any

import httpx2
import pytest
import tiny
from test_serve_hosts import COLD, QUICKLY

FLAGS = (
    "--target target --target.aux-layers 1 2 3 --draft none --max-running-requests 4 --serve.max-length 256 "
    "--serve.model-name tiny"
).split()
BEGINNINGS = [" ".join(tiny.WORDS[:24]), " ".join(tiny.WORDS[:15:-1])]


@pytest.fixture(scope="module")
def router() -> str:
    """The Python of the router's environment, which is made where it is not there yet."""
    script = tiny.REPOSITORY / "tools/install_router.sh"
    subprocess.run(["bash", str(script)], check=True, cwd=tiny.REPOSITORY, timeout=600)
    return str(tiny.REPOSITORY / ".venv-router/bin/python")


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        places = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [place.getsockname()[1] for place in places]


def wait_for(url: str, process: tiny.Started) -> None:
    until = time.monotonic() + 300
    while True:
        assert process.poll() is None and time.monotonic() < until, process.printed()
        with contextlib.suppress(httpx2.TransportError):
            if httpx2.get(f"{url}/health").status_code == 200:
                return
        time.sleep(0.1)


def served_by(url: str) -> float:
    """Requests that a server has answered."""
    text = httpx2.get(f"{url}/metrics").text
    return sum(map(float, re.findall(r"^eagle3_jax_requests_ended_total\{.*\} (\S+)", text, re.MULTILINE)))


def ask(url: str, prompt: str, tokens: int = 8) -> httpx2.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    return httpx2.post(f"{url}/v1/completions", json=body, timeout=300)


@pytest.mark.long
def test_requests_go_where_their_prefix_is_and_only_those_in_flight_are_lost(router, tmp_path):
    tiny.write_target(tmp_path / "target")
    *ports, port, metrics = free_ports(4)
    urls, url = [f"http://127.0.0.1:{number}" for number in ports], f"http://127.0.0.1:{port}"

    def start(number: int) -> tiny.Started:
        command = ["-c", COLD, *FLAGS, "--port", str(ports[number])]
        return tiny.start_processes(1, command, cwd=tmp_path, **QUICKLY)[0]

    with contextlib.ExitStack() as stack:

        def ends(process: tiny.Started) -> tiny.Started:
            stack.callback(lambda: (process.kill(), process.wait(30)))
            return process

        servers = [ends(start(number)) for number in (0, 1)]
        for server, own in zip(servers, urls, strict=True):
            wait_for(own, server)
            assert ask(own, "apple").status_code == 200  # compiled
        flags = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
        flags += ["--worker-urls", *urls, "--policy", "cache_aware", "--health-check-interval-secs", "1"]
        flags += ["--balance-abs-threshold", "0", "--balance-rel-threshold", "1.0"]  # new text goes where less runs
        flags += ["--cb-failure-threshold", "1", "--cb-timeout-duration-secs", "2"]  # one error, and it is left for 2 s
        command = [router, "-m", "sglang_router.launch_router", *flags]
        wait_for(url, ends(tiny.Started(command)))

        # The second beginning comes while the first one is answered; from then on each has its server.
        (tmp_path / "slow").touch()
        opening = threading.Thread(target=ask, args=(url, BEGINNINGS[0], 20))
        opening.start()
        time.sleep(1)
        (tmp_path / "slow").unlink()
        assert ask(url, BEGINNINGS[1]).status_code == 200
        opening.join(60)
        homes = []
        for beginning in BEGINNINGS:
            before = [served_by(own) for own in urls]
            assert all(ask(url, f"{beginning} {word}").status_code == 200 for word in tiny.WORDS[:5])
            homes.append([after - count for after, count in zip(map(served_by, urls), before, strict=True)])
        assert sorted(homes) == [[0, 5], [5, 0]], homes

        # One server is killed while both answer.
        home = homes[0].index(5)
        (tmp_path / "slow").touch()
        answers: list[Any] = [None, None]

        def ask_long(number: int) -> None:
            with contextlib.suppress(httpx2.TransportError):
                answers[number] = ask(url, BEGINNINGS[number], 60).status_code

        asking = [threading.Thread(target=ask_long, args=(number,)) for number in (0, 1)]
        for thread in asking:
            thread.start()
        time.sleep(2)
        servers[home].kill()
        (tmp_path / "slow").unlink()
        for thread in asking:
            thread.join(60)
        print("in flight:", answers)
        assert answers[1] == 200

        # All others are answered, by the other one.
        later = [ask(url, f"{beginning} {word}").status_code for word in tiny.WORDS[:8] for beginning in BEGINNINGS]
        print("later:", later)
        assert set(later) == {200}

        # It comes back: of two requests at once it answers one.
        wait_for(urls[home], ends(start(home)))
        before = served_by(urls[home])
        until = time.monotonic() + 60
        while served_by(urls[home]) == before:
            assert time.monotonic() < until
            pair = [threading.Thread(target=ask, args=(url, BEGINNINGS[0], 60)) for _ in range(2)]
            for thread in pair:
                thread.start()
            for thread in pair:
                thread.join(60)
