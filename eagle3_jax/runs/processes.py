"""Runs several processes as one: they join, process 0 writes and decides, all agree.

On a slice of several TPU hosts every host runs the same command. Process 0 does the work that is done once, and sends
the result, or the refusal, through JAX's coordination service: it works before the devices are initialised, and a wait
for a process that is gone ends (see `watchdog`). A single process pays nothing: JAX is not even imported.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from eagle3_jax.runs import machine

# Environment variable: seconds without a heartbeat after which a process counts as gone; and JAX's default.
HEARTBEAT, _HEARTBEAT_SECONDS = "EAGLE3_JAX_HEARTBEAT_SECONDS", 100
# Seconds for which the service outlives the last other process: it still polls for errors while it leaves.
_LEAVING = 0.5
_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/worker-network-endpoints"
# Key in the coordination service: the step after which all stop.
_STOP = "eagle3_jax/stop"
POLL = 1000  # milliseconds
_FOREVER = 2**31 - 1  # milliseconds: 24 days


class Refused(ValueError):
    """Work that process 0 could not do or would not accept; raised on every process."""


@dataclasses.dataclass
class Run:
    """This process among several."""

    client: Any  # of the coordination service on process 0: keys with values, barriers, heartbeats
    index: int
    count: int
    members: tuple[int, ...]  # `agree` and wait for each other now (see `among`); the first one decides
    # members -> their calls so far; all members make the same calls in the same order
    numbers: collections.Counter[tuple[int, ...]] = dataclasses.field(default_factory=collections.Counter)

    def next_key(self, kind: str) -> str:
        """Returns the next call's key, the same on all members and new to each."""
        self.numbers[self.members] += 1
        return f"eagle3_jax/{'-'.join(map(str, self.members))}/{self.numbers[self.members]}/{kind}"


_ALONE = Run(None, 0, 1, (0,))
_run = _ALONE


def several() -> Run | None:
    """Returns this process among several; None where it is alone."""
    return None if _run is _ALONE else _run


def index() -> int:
    """Returns this process's number, from 0."""
    return _run.index


def count() -> int:
    """Returns the number of processes."""
    return _run.count


def say(text: str) -> None:
    """Prints to stderr, once for all processes."""
    if index() == 0:
        print(text, file=sys.stderr)


def agree(compute: Callable[[], Any]) -> Any:
    """Runs `compute` on process 0 and returns its JSON-ready value on every process; of several, tuples as lists.

    All processes must make the same calls of `agree` and `barrier` in the same order. Raises Refused: `compute` raised
    a ValueError or an OSError, which process 0 raises itself.
    """
    if len(_run.members) == 1:
        return compute()
    key = _run.next_key("agreed")
    if _run.index == _run.members[0]:
        try:
            text = json.dumps({"value": compute()})
        except (ValueError, OSError) as error:
            _run.client.key_value_set(key, json.dumps({"refused": str(error)}))
            raise
        _run.client.key_value_set(key, text)
    else:
        text = _get(_run.client, key)
    answer = json.loads(text)
    if "refused" in answer:
        raise Refused(answer["refused"])
    return answer["value"]


def barrier() -> None:
    """Waits until all processes are here; files that any of them wrote before are on the shared disk then."""
    if _run is not _ALONE:
        _run.client.wait_at_barrier(_run.next_key("barrier"), _FOREVER, list(_run.members))


def gather(value: Any) -> list[Any]:
    """Collects a value of each process (JSON-ready, at most some MiB), in the processes' order, on all of them."""
    if len(_run.members) == 1:
        return [value]
    key = _run.next_key("gathered")
    _run.client.key_value_set(f"{key}/{_run.index}", json.dumps(value))
    return [json.loads(_get(_run.client, f"{key}/{member}")) for member in _run.members]


def check_alike(own: dict[str, Any]) -> None:
    """Checks that all processes have the JSON-ready values of process 0. Raises ValueError on all of them."""
    (leader, expected), *others = gather([socket.gethostname(), own])
    for number, (host, values) in enumerate(others, 1):
        for name in sorted({*expected, *values}):
            if (got := values.get(name)) != (wanted := expected.get(name)):
                where = f"on host {host} (process {number})"
                raise ValueError(f"{name}: got {got} {where}, expected {wanted} as on host {leader} (process 0)")


def coordinator() -> str:
    """Returns the name or address of process 0's host."""
    from jax._src import distributed

    return str(distributed.global_state.coordinator_address).rpartition(":")[0].strip("[]")


def total(own: dict[str, float]) -> dict[str, float]:
    """Sums the values of each name over all processes, on all of them."""
    sums: collections.Counter[str] = collections.Counter()
    for values in gather(own):
        sums.update(values)
    return dict(sums)


def share(items: Sequence[Any]) -> Sequence[Any]:
    """Returns this process's share of the items, dealt over those that `gather` the results."""
    return items[_run.members.index(_run.index) :: len(_run.members)]


@contextlib.contextmanager
def among(members: Sequence[int]) -> Iterator[None]:
    """Opens a block in which these processes alone, this one among them, agree and wait for each other."""
    everyone, _run.members = _run.members, tuple(members)
    yield
    _run.members = everyone


def start_distributed() -> None:
    """Joins the other processes, where there are any; call it before anything touches a device.

    On TPU pods and slices JAX finds the hosts itself. Elsewhere set JAX_COORDINATOR_ADDRESS (host:port of process 0)
    with JAX_NUM_PROCESSES and JAX_PROCESS_ID, unless a scheduler that JAX knows (Slurm, MPI) supplies the latter two.
    """
    global _run
    if _run is not _ALONE or not _is_multi_host(os.environ):
        return
    import jax
    from jax._src import distributed  # the only way to the coordination service: Orbax takes it too

    if not jax.distributed.is_initialized():
        jax.config.update("jax_enable_recoverability", True)  # `watchdog` ends this process, not JAX with a stack trace
        jax.config.update("jax_enable_preemption_service", False)  # the service would take SIGTERM from `command`
        jax.distributed.initialize(
            num_processes=_number("JAX_NUM_PROCESSES"),
            process_id=_number("JAX_PROCESS_ID"),
            heartbeat_timeout_seconds=heartbeat_seconds(),
        )
    state = distributed.global_state
    if state.num_processes > 1:
        _run = Run(state.client, state.process_id, state.num_processes, tuple(range(state.num_processes)))
        barrier()


def heartbeat_seconds() -> int:
    """Returns the seconds without a heartbeat after which a process is gone. Raises ValueError."""
    if (seconds := _number(HEARTBEAT)) == 0:
        raise ValueError(f"{HEARTBEAT}: got 0, expected at least 1")
    return _HEARTBEAT_SECONDS if seconds is None else seconds


def leave() -> None:
    """Ends the connection once all work is done; process 0, which holds the service, is last."""
    global _run
    if _run is _ALONE:
        return
    import jax

    if _run.index == 0:
        until = time.monotonic() + heartbeat_seconds()
        while len(_run.client.get_live_nodes(list(range(_run.count)))) > 1 and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(_LEAVING)
    jax.distributed.shutdown()
    _run = _ALONE


def agree_to_stop(step: int, margin: int, asked: bool) -> bool:
    """Decides whether all processes stop after this step, because one of them was asked to.

    `step` rises by one from call to call, alike on all; one process is at most `margin` steps ahead of another.
    """
    if _run is _ALONE:
        return asked
    if asked:
        with contextlib.suppress(Exception):  # another one was asked first
            _run.client.key_value_set(_STOP, str(step + margin))
    try:
        return step >= int(_run.client.key_value_try_get(_STOP))
    except Exception as error:
        if "NOT_FOUND" not in str(error):
            raise
        return False


def _get(client: Any, key: str) -> str:
    """Waits for the value of a key, in short waits, so that signals are handled in between."""
    while True:
        try:
            return client.blocking_key_value_get(key, POLL)
        except RuntimeError as error:  # JAX's
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def _number(variable: str) -> int | None:
    value = os.environ.get(variable)
    if value is not None and not value.isdecimal():
        raise ValueError(f"{variable}: got {value!r}, expected a number")
    return None if value is None else int(value)


def _is_multi_host(environment: Mapping[str, str]) -> bool:
    if environment.get("JAX_COORDINATOR_ADDRESS") or environment.get("MEGASCALE_COORDINATOR_ADDRESS"):
        return True
    if workers := environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES"):
        return "," in workers
    return "TPU_SKIP_MDS_QUERY" not in environment and machine.has_tpu() and "," in _worker_endpoints()


def _worker_endpoints() -> str:
    """Asks a Cloud TPU VM for its slice's comma-separated workers; empty where no metadata server answers."""
    request = urllib.request.Request(_METADATA, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=3) as answer:
            return answer.read().decode()
    except (urllib.error.URLError, TimeoutError):
        return ""
