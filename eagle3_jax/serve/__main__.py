"""`python -m eagle3_jax.serve`: a server of OpenAI's API over the engine.

It listens at once, and answers 503 until it has loaded and warmed up. SIGTERM and Ctrl-C end it once the running
requests are answered, and at once while it starts.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from eagle3_jax.config import RunConfig
from eagle3_jax.decoding import data_parallel
from eagle3_jax.decoding.defaults import sampling_defaults
from eagle3_jax.decoding.engine import Engine
from eagle3_jax.decoding.hosts.api import follow, lead
from eagle3_jax.decoding.pool import EnginePool
from eagle3_jax.formats.packaged import chosen_draft
from eagle3_jax.mesh import make_mesh, own_replica, row_processes
from eagle3_jax.models.checkpoint.fetch import keep_programs, load_target
from eagle3_jax.runs import command, machine, processes, progress
from eagle3_jax.serve.flags import configure
from eagle3_jax.serve.listen import address, api_keys, bind, check_hosts

_ENDING = 5.0  # seconds for the engine to end after the stop


def load(config: RunConfig, say: Callable[[str], Any] = lambda _: None) -> EnginePool:
    """Loads an engine for each row of the mesh and warms them up, in the background as soon as they can answer.

    `say` receives one line for each stage. Raises ValueError as `Engine.load` does.
    """
    start = time.monotonic()
    settings, trees = config.serve, config.serve.trees
    check_hosts(config)
    if settings.warm_up_folder is None:
        folder = keep_programs(small=True)
    else:
        folder = None if settings.warm_up_folder == "none" else pathlib.Path(settings.warm_up_folder).expanduser()
        machine.keep_programs(folder)  # those that load and pack weights too
    replica = own_replica(make_mesh(config.mesh))
    if settings.adapt is not None and (len(replica.rows) > 1 or processes.count() > 1):
        got = f"{len(replica.rows)} replicas in {processes.count()} processes"
        raise ValueError(f"serve.adapt: got it for {got}, expected one in one, such as --dp-size 1")
    mesh = replica.mesh if replica.mesh.size > 1 else None
    target = load_target(config.target, mesh, for_engine=True, progress=say)
    draft = settings.draft
    if draft is None:
        draft, _ = chosen_draft(None, config.folder("export"), target)
    sizes: Any = trees[0] if len(trees) == 1 else trees or "auto", settings.batch_size, settings.max_length
    how: Any = {
        name: getattr(settings, name)
        for name in ("token_map", "memory_fraction", "structured_mib", "draft_weights", "adapt")
    }
    draft = None if draft == "none" else draft
    engines = [Engine.load(row, draft, *sizes, **how) for row in data_parallel.targets(target, replica)]
    pool = EnginePool(engines, settings.queue_limit)
    say(f"loaded after {time.monotonic() - start:.0f} s")
    pool.warm_up(folder, progress=say, background=True)
    say(f"ready after {time.monotonic() - start:.0f} s")
    return pool


def run(config: RunConfig) -> None:
    """Serves until SIGTERM or Ctrl-C; of several processes the first one does."""
    if processes.index() > 0:
        follow(load(config).engines, row_processes(make_mesh(config.mesh)))
        return
    keys = api_keys(config.serve)
    with bind(config.serve) as place:
        _serve(config, keys, place)


def _serve(config: RunConfig, keys: Sequence[str], place: socket.socket) -> None:
    # These need the extra `serve`, which `--help` does not.
    from eagle3_jax.serve.app import make_app
    from eagle3_jax.serve.startup import HttpServer, Startup

    settings, url, pools = config.serve, address(place), []

    def say(stage: str) -> None:
        startup.stage = stage.partition(";")[0]
        print(f"eagle3_jax.serve: {stage}", file=sys.stderr, flush=True)

    def lose(error: Exception) -> None:
        startup.failure = error

    def make() -> Any:
        say(f"loading; {url}/health is 200 when it answers")
        with progress.told("starting"):
            pool = load(config, say)
        defaults = sampling_defaults(settings.generation_config, config.target.name)
        taken = ", ".join(f"{name} {value}" for name, value in defaults.items()) or "temperature 1"
        processes.say(f"eagle3_jax.serve: sampling, where a request leaves it open: {taken}; see --generation-config")
        if processes.count() > 1:
            rows = row_processes(make_mesh(config.mesh))
            engines = led.enter_context(lead(pool.engines, rows, lose))
            pool = EnginePool(engines, settings.queue_limit)
        pools.append(pool)
        return make_app(pool, settings.model_name or config.target.name, settings, keys, defaults)

    startup = Startup(make, lambda: print(f"{url}/v1 answers", flush=True))
    with contextlib.ExitStack() as led:  # ends the other processes
        HttpServer(startup, settings).run(sockets=[place])
        if startup.failure is not None:
            raise startup.failure
        if startup.app is None:
            raise command.Stopped
        (pool,) = pools
        end = time.monotonic() + _ENDING
        while pool.running and time.monotonic() < end:
            time.sleep(0.05)
        if pool.running:  # its thread would keep the process alive for ever
            command.write("eagle3_jax.serve: the device does not answer; what it was asked is lost")
            os._exit(1)
        if pool.compiling is not None:  # nobody waits for a compilation
            raise command.Stopped


def main(argv: Sequence[str] | None = None) -> None:
    config = configure(argv)
    command.require("serve")
    with command.run("serve", resumes=None, stopped=0):
        run(config)


if __name__ == "__main__":
    main()
