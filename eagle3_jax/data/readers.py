"""Reads records ahead in worker processes or threads, each copied once, into buffers that are used again.

A record is read by the worker that its shard belongs to, so that a shard is opened by one worker, and stays open there.
A worker process knows neither JAX nor the program that started it. Batches lie in memory that all of them share.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import mmap
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, SupportsIndex, runtime_checkable

import ml_dtypes  # noqa: F401  (names of dtypes)
import numpy as np

# Concurrent reads of a worker: a bucket's first byte takes a while.
_THREADS = 16
_ALIGNMENT = 64
# Arrays of a batch beside the fields of its records.
LAID_OUT = frozenset({"segment_ids", "positions"})


@runtime_checkable
class RecordSource(Protocol):
    """Random access to feature records (see `features.FeatureSource`)."""

    lengths: np.ndarray

    def __getitem__(self, index: SupportsIndex) -> dict[str, np.ndarray]: ...

    def name(self, index: int) -> str: ...

    def shard(self, index: int) -> int:
        """Returns the number of the record's shard."""
        ...


class Read(NamedTuple):
    """A record, and its place in a batch: row, first token, end."""

    record: int
    row: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """The arrays of a batch, one behind the other in memory.

    Attributes:
        fields: name -> (shape, dtype).
    """

    fields: Mapping[str, tuple[tuple[int, ...], str]]

    @property
    def nbytes(self) -> int:
        return sum(self._size(name) for name in self.fields)

    def views(self, memory: Any, number: int) -> dict[str, np.ndarray]:
        """Views batch buffer `number` as arrays."""
        arrays, start = {}, number * self.nbytes
        for name, (shape, dtype) in self.fields.items():
            arrays[name] = np.frombuffer(memory, dtype, math.prod(shape), start).reshape(shape)
            start += self._size(name)
        return arrays

    def _size(self, name: str) -> int:
        shape, dtype = self.fields[name]
        return -(-math.prod(shape) * np.dtype(dtype).itemsize // _ALIGNMENT) * _ALIGNMENT


def fill(source: RecordSource, arrays: Mapping[str, np.ndarray], read: Read) -> None:
    """Copies a record into its place. Raises ValueError: a record of another form than the batch."""
    record = source[read.record]
    for name in arrays.keys() - LAID_OUT:
        array, values = arrays[name], record.get(name)
        if values is None or (values.dtype != array.dtype and values.dtype.kind not in "iu"):
            got = "none" if values is None else values.dtype
            raise ValueError(
                f"{source.name(read.record)}: {name}: got {got}, expected {array.dtype} as in the first record"
            )
        array[read.row, read.start : read.end] = values[: read.end - read.start]


class Readers:
    """Buffers of batches, and the workers that read records into them.

    Args:
        buffers: the number of batches in memory.
        workers: processes; 0 reads by threads of this process.

    Attributes:
        views: the arrays of each buffer.
    """

    def __init__(self, source: RecordSource, layout: Layout, buffers: int, workers: int) -> None:
        self._source, self._file = source, _shared_file(buffers * layout.nbytes)
        memory = mmap.mmap(self._file, buffers * layout.nbytes)
        self.views = [layout.views(memory, number) for number in range(buffers)]
        job = _Job(source, layout, buffers, self._file)
        self._workers = [_Process(job) for _ in range(workers)] or [_Threads(source, self.views)]

    def read(self, buffer: int, reads: Sequence[Read]) -> list[concurrent.futures.Future[None]]:
        """Begins to read records into a buffer; the futures end once all are read, or with the error."""
        parts: list[list[Read]] = [[] for _ in self._workers]
        for read in reads:
            parts[self._source.shard(read.record) % len(parts)].append(read)
        return [
            future
            for worker, part in zip(self._workers, parts, strict=True)
            if part
            for future in worker.read(buffer, part)
        ]

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        os.close(self._file)


class _Threads:
    """Reads in this process."""

    def __init__(self, source: RecordSource, views: Sequence[Mapping[str, np.ndarray]]) -> None:
        self._source, self._views = source, views
        self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS, "eagle3_jax reads")

    def read(self, buffer: int, reads: Sequence[Read]) -> list[concurrent.futures.Future[None]]:
        return [self._pool.submit(fill, self._source, self._views[buffer], read) for read in reads]

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


@dataclasses.dataclass(frozen=True)
class _Job:
    """The first message to a worker process."""

    source: RecordSource
    layout: Layout
    buffers: int
    file: int


class _Process:
    """Reads in a process of its own."""

    def __init__(self, job: _Job) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", __name__, str(theirs.fileno())]
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            command, env=os.environ | paths, pass_fds=(theirs.fileno(), job.file), stdin=subprocess.DEVNULL
        )
        theirs.close()
        self._connection = multiprocessing.connection.Connection(ours.detach())
        self._connection.send(job)
        self._waiting: dict[int, concurrent.futures.Future[None]] = {}
        self._ended, self._asked = False, 0
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, name="eagle3_jax reads", daemon=True).start()

    def read(self, buffer: int, reads: Sequence[Read]) -> list[concurrent.futures.Future[None]]:
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        with self._lock:
            self._asked += 1
            self._waiting[self._asked] = future
            if self._ended:
                future.set_exception(self._gone())
                return [future]
        try:
            self._connection.send((self._asked, buffer, [tuple(read) for read in reads]))
        except OSError:  # `_listen` finds the end too
            pass
        return [future]

    def _listen(self) -> None:
        try:
            while True:
                number, error = self._connection.recv()
                with self._lock:
                    future = self._waiting.pop(number)
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)
        except (EOFError, OSError):
            with self._lock:
                self._ended = True
                left, self._waiting = list(self._waiting.values()), {}
            for future in left:
                future.set_exception(self._gone())

    def _gone(self) -> OSError:
        return OSError(f"features: a reading process ended with status {self._process.wait()}, expected it to work")

    def close(self) -> None:
        self._process.kill()  # it holds no state
        self._process.wait()


def _serve(connection: multiprocessing.connection.Connection) -> None:
    """Runs a worker process, until the other end is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all processes of a group; the first one decides
        signal.signal(number, signal.SIG_IGN)
    job: _Job = connection.recv()
    memory = mmap.mmap(job.file, job.buffers * job.layout.nbytes)
    threads = _Threads(job.source, [job.layout.views(memory, number) for number in range(job.buffers)])
    lock = threading.Lock()

    def answer(number: int, running: list[concurrent.futures.Future[None]]) -> None:
        done = concurrent.futures.wait(running).done
        error = next((failed for future in done if (failed := future.exception()) is not None), None)
        with lock:
            connection.send((number, error))

    with concurrent.futures.ThreadPoolExecutor() as answers:
        while True:
            number, buffer, reads = connection.recv()
            answers.submit(answer, number, threads.read(buffer, [Read(*read) for read in reads]))


def _shared_file(size: int) -> int:
    """Makes a file in memory without a name, which ends with its last process."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("eagle3_jax")
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.ftruncate(file, size)
    return file


if __name__ == "__main__":
    from eagle3_jax.data import readers  # its classes are pickled under this name

    try:
        readers._serve(multiprocessing.connection.Connection(int(sys.argv[1])))
    except EOFError:
        os._exit(0)
