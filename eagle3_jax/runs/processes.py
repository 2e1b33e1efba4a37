"""Several processes as one run: they join, process 0 writes, all agree, and none outlives another.

On a slice of several TPU hosts every host runs the same command. What must be done or decided once is done by process
0, which tells the others the result, or the refusal. A process that fails tells the others why, and one that was killed
is missed within `HEARTBEAT_SECONDS`: all of them end with a sentence instead of waiting for it in a collective. Where
process 0 was killed, which holds JAX's coordination service, JAX mostly aborts the others first, with a stack trace;
a watchdog beside each process adds the sentence then.
With a single process all of this is free, and JAX is not even imported.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

# A process that was not heard of for so long is gone.
HEARTBEAT_SECONDS = 15
# Where a Cloud TPU VM tells its workers about each other.
_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/worker-network-endpoints"
# Keys in the coordination service: why a process ended before its work was done; the step behind which all stop.
_END, _STOP = "eagle3_jax/end", "eagle3_jax/stop"
_POLL = 1000  # milliseconds
_FOREVER = 2**31 - 1  # milliseconds: 24 days
_AGAIN = "run the same command on all hosts again, it goes on where it was"
# Says its argument when the process that holds the other end of its stdin ends without a word.
_WATCHDOG = "import sys; sys.stdin.read() or print(sys.argv[1], file=sys.stderr)"


class Refused(ValueError):
    """What process 0 could not do or would not accept; raised on every process."""


@dataclasses.dataclass
class _Run:
    """This process among several.

    Attributes:
        client: of JAX's coordination service, which process 0 holds: keys with values, barriers, heartbeats.
        members: the processes that `agree` and wait for each other now (see `among`); the first one decides.
        numbers: how many such calls there were; all members make the same ones in the same order.
        over: set when the work of all is done.
        watcher: the thread that misses other processes.
        watchdog: a process that misses this one.
    """

    client: Any
    index: int
    count: int
    members: tuple[int, ...]
    numbers: collections.Counter[tuple[int, ...]] = dataclasses.field(default_factory=collections.Counter)
    over: threading.Event = dataclasses.field(default_factory=threading.Event)
    watcher: threading.Thread | None = None
    watchdog: subprocess.Popen[str] | None = None

    def next_key(self, kind: str) -> str:
        """A key that no other call of a member has, and the same call of the other members does."""
        self.numbers[self.members] += 1
        return f"eagle3_jax/{'-'.join(map(str, self.members))}/{self.numbers[self.members]}/{kind}"


_run: _Run | None = None


def index() -> int:
    """This process's number, from 0."""
    return 0 if _run is None else _run.index


def count() -> int:
    """The number of processes."""
    return 1 if _run is None else _run.count


def say(text: str) -> None:
    """Prints to stderr, once for all processes."""
    if index() == 0:
        print(text, file=sys.stderr)


def agree(compute: Callable[[], Any]) -> Any:
    """What process 0 computes, on every process; `compute` runs there alone. The others wait, however long it takes.

    All processes must make the same calls of `agree` and `barrier` in the same order.

    Returns:
        JSON-ready values: where there are several processes, tuples come back as lists.

    Raises:
        Refused: `compute` raised a ValueError or an OSError. (Its own error on process 0.)
    """
    if _run is None:
        return compute()
    key = _run.next_key("agreed")
    if _run.index == _run.members[0]:
        try:
            said = json.dumps({"value": compute()})
        except (ValueError, OSError) as error:
            _run.client.key_value_set(key, json.dumps({"refused": str(error)}))
            raise
        _run.client.key_value_set(key, said)
    else:
        said = _get(_run.client, key)
    answer = json.loads(said)
    if "refused" in answer:
        raise Refused(answer["refused"])
    return answer["value"]


def barrier() -> None:
    """Waits until all processes are here; what each of them wrote before is on the shared disk then."""
    if _run is not None:
        _run.client.wait_at_barrier(_run.next_key("barrier"), _FOREVER, list(_run.members))


def gather(value: Any) -> list[Any]:
    """What each process has to say, JSON-ready and at most some MiB, in the processes' order; on all of them."""
    if _run is None:
        return [value]
    key = _run.next_key("gathered")
    _run.client.key_value_set(f"{key}/{_run.index}", json.dumps(value))
    return [json.loads(_get(_run.client, f"{key}/{member}")) for member in _run.members]


def total(own: dict[str, float]) -> dict[str, float]:
    """Of each name the sum over all processes, on all of them."""
    sums: collections.Counter[str] = collections.Counter()
    for values in gather(own):
        sums.update(values)
    return dict(sums)


def share(items: Sequence[Any]) -> Sequence[Any]:
    """This process's part of work that is divided among those that `gather` its results."""
    if _run is None:
        return items
    return items[_run.members.index(_run.index) :: len(_run.members)]


@contextlib.contextmanager
def among(members: Sequence[int]) -> Iterator[None]:
    """A block in which only these processes, this one among them, agree and wait for each other."""
    if _run is None:
        yield
        return
    everyone, _run.members = _run.members, tuple(members)
    yield
    _run.members = everyone


def start_distributed() -> bool:
    """Joins the other processes, where there are any; call it before anything touches a device.

    On TPU pods and slices JAX finds the hosts itself. Elsewhere set JAX_COORDINATOR_ADDRESS (host:port of process 0)
    with JAX_NUM_PROCESSES and JAX_PROCESS_ID, unless a scheduler that JAX knows (Slurm, MPI) supplies the latter two.

    Returns:
        True when this process is one of several.
    """
    global _run
    if _run is not None:
        return True
    if not _is_multi_host(os.environ):
        return False
    import jax
    from jax._src import distributed  # the only way to the coordination service: Orbax takes it too

    if not jax.distributed.is_initialized():
        jax.config.update("jax_enable_recoverability", True)  # `watch` ends this process, not JAX with a stack trace
        jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM away from `command`
        jax.distributed.initialize(
            num_processes=_number("JAX_NUM_PROCESSES"),
            process_id=_number("JAX_PROCESS_ID"),
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    state = distributed.global_state
    if state.num_processes == 1:
        return False
    _run = _Run(state.client, state.process_id, state.num_processes, tuple(range(state.num_processes)))
    barrier()
    return True


def watch(prefix: str) -> None:
    """Begins to watch the other processes: when one fails or is gone, this one ends with a sentence.

    Args:
        prefix: how the sentence begins.
    """
    if _run is not None:
        _run.watcher = threading.Thread(target=_watch, args=(_run, prefix), name="watches the processes", daemon=True)
        _run.watcher.start()
        killed = (
            f"{prefix}process {_run.index} of {_run.count} was killed, or JAX ended it as another one is gone; {_AGAIN}"
        )
        _run.watchdog = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WATCHDOG, killed],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process
        )


def leave() -> None:
    """Ends the watch and the connection, when the work of all is done. Process 0, which holds the service, is last."""
    global _run
    if _run is None:
        return
    import jax

    run = _run
    barrier()
    run.over.set()
    if run.watcher is not None:
        run.watcher.join()
    if run.watchdog is not None:
        run.watchdog.communicate("over")
    if run.index == 0:
        until = time.monotonic() + HEARTBEAT_SECONDS
        while len(run.client.get_live_nodes(list(range(run.count)))) > 1 and time.monotonic() < until:
            time.sleep(0.1)
    jax.distributed.shutdown()
    _run = None


def end_all(sentence: str, status: int, error: Exception | None = None) -> None:
    """Ends this process and all the others, at once. Does nothing where there is a single one.

    Args:
        sentence: for the user; the others print it too.
        error: why. An error that a collective raised is only the echo of another process's end, which is told instead.
    """
    if _run is None:
        return
    if error is not None and _from_runtime(error):
        time.sleep(HEARTBEAT_SECONDS + 5)  # until `_watch` knows what happened, and ends this process
    said = {"process": _run.index, "host": socket.gethostname(), "sentence": sentence, "status": status}
    with contextlib.suppress(Exception):  # there is one already, or nobody who hears it
        _run.client.key_value_set(_END, json.dumps(said))
    if _run.index == 0:
        time.sleep(3 * _POLL / 1000)  # with this process the service ends, from which the others must hear of it
    _exit(_run, sentence, status)


def agree_to_stop(step: int, margin: int, asked: bool) -> bool:
    """Whether all processes stop behind this step, because one of them was asked to.

    Args:
        step: counts up by one from call to call, the same way on all processes.
        margin: no process is further ahead of another than this.
    """
    if _run is None:
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


def _watch(run: _Run, prefix: str) -> None:
    """In a thread, as the main one may hang in a collective."""
    import jax

    again = f"it was killed, or its host is down; {_AGAIN}"
    everyone = list(range(run.count))
    at_first = run.client.get_live_nodes(everyone)  # with a number each that a process started later does not have
    while not run.over.is_set():
        try:
            said = json.loads(run.client.blocking_key_value_get(_END, _POLL))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                _exit(run, f"{prefix}process 0 of {run.count} is gone; {again}", 1)
                return
            now = run.client.get_live_nodes(everyone)
            if gone := [str(number) for number in everyone if now.get(number) != at_first[number]]:
                _exit(run, f"{prefix}process {', '.join(gone)} of {run.count} is gone; {again}", 1)
            continue
        if said["process"] != run.index:
            where = f"process {said['process']} of {run.count}, on host {said['host']}, ended:\n"
            _exit(run, f"{prefix}{where}{said['sentence']}", said["status"])
        return


def _from_runtime(error: Exception) -> bool:
    """Whether XLA or the coordination service raised it: their messages begin with a status."""
    return re.match(r"(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED): ", str(error)) is not None


def _exit(run: _Run, sentence: str, status: int) -> None:
    """Ends this process at once: Python's own exit would wait for the others at JAX's shutdown barrier."""
    if run.over.is_set():
        return
    print(sentence, file=sys.stderr, flush=True)
    sys.stdout.flush()
    if run.watchdog is not None:
        with contextlib.suppress(OSError, ValueError):  # gone, or told already
            run.watchdog.communicate("over")
    os._exit(status)


def _get(client: Any, key: str) -> str:
    """The value of a key, as soon as it is there. In short waits, so that signals are handled in between."""
    import jax

    while True:
        try:
            return client.blocking_key_value_get(key, _POLL)
        except jax.errors.JaxRuntimeError as error:
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
    workers = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES")
    if workers:
        return "," in workers
    if "TPU_SKIP_MDS_QUERY" in environment or not has_tpu():
        return False
    return "," in _worker_endpoints()


def has_tpu() -> bool:
    """Whether this machine has TPU chips; asks the file system, since asking JAX would start the backend."""
    return any(
        True for folder, name in (("/dev", "accel*"), ("/dev/vfio", "[0-9]*")) for _ in pathlib.Path(folder).glob(name)
    )


def _worker_endpoints() -> str:
    """The comma-separated workers of this TPU VM's slice; empty where no Cloud metadata server answers."""
    request = urllib.request.Request(_METADATA, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=3) as answer:
            return answer.read().decode()
    except (urllib.error.URLError, TimeoutError):
        return ""
