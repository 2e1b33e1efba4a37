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
import queue
import signal
import socket
import subprocess
import sys
import tempfile
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
    """The arrays of a batch, one behind the other in memory. `fields`: name -> (shape, dtype)."""

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
            got = f"{source.name(read.record)}: {name}: got {'none' if values is None else values.dtype}"
            raise ValueError(f"{got}, expected {array.dtype} as in the first record")
        array[read.row, read.start : read.end] = values[: read.end - read.start]


class Readers:
    """Buffers of batches, whose arrays are `views`, and the processes that read into them; 0: threads of this one."""

    def __init__(self, source: RecordSource, layout: Layout, buffers: int, workers: int) -> None:
        self._source, self._file = source, _shared_file(buffers * layout.nbytes)
        self.views = _views(self._file, layout, buffers)
        self._processes = [_Process((source, layout, buffers, self._file)) for _ in range(workers)]
        self._fills = [process.fill for process in self._processes] or [self._fill]
        self._pools = [concurrent.futures.ThreadPoolExecutor(_THREADS, "eagle3_jax reads") for _ in self._fills]

    def read(self, buffer: int, reads: Sequence[Read]) -> list[concurrent.futures.Future[None]]:
        """Begins to read records into a buffer; the futures end once all are read, or with the error."""
        workers = ((self._source.shard(read.record) % len(self._pools), read) for read in reads)
        return [self._pools[worker].submit(self._fills[worker], buffer, read) for worker, read in workers]

    def _fill(self, buffer: int, read: Read) -> None:
        fill(self._source, self.views[buffer], read)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for pool in self._pools:
            pool.shutdown(wait=True, cancel_futures=True)
        os.close(self._file)


_Job = tuple[RecordSource, Layout, int, int]  # what a process is told first: with the number of buffers, and their file


class _Process:
    """Reads in a process of its own, which has a connection for each thread that asks it."""

    def __init__(self, job: _Job) -> None:
        pairs = [socket.socketpair() for _ in range(_THREADS)]
        theirs = [their.fileno() for _, their in pairs]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        words = [sys.executable, "-m", __name__, *map(str, theirs)]
        files = {"pass_fds": (*theirs, job[-1]), "stdin": subprocess.DEVNULL}
        self._process = subprocess.Popen(words, env=environment, **files)
        connections = [multiprocessing.connection.Connection(ours.detach()) for ours, _ in pairs]
        for _, their in pairs:
            their.close()
        connections[0].send(job)
        self._free: queue.SimpleQueue[multiprocessing.connection.Connection] = queue.SimpleQueue()
        for connection in connections:
            self._free.put(connection)

    def fill(self, buffer: int, read: Read) -> None:
        connection = self._free.get()
        try:
            connection.send((buffer, tuple(read)))
            error = connection.recv()
        except (EOFError, OSError):
            status = self._process.wait()
            raise OSError(f"features: a reading process ended with status {status}, expected it to work") from None
        finally:
            self._free.put(connection)
        if error is not None:
            raise error

    def kill(self) -> None:
        self._process.kill()  # it holds no state
        self._process.wait()


def _serve(connections: Sequence[multiprocessing.connection.Connection]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all processes of a group; the first one decides
        signal.signal(number, signal.SIG_IGN)
    source, layout, buffers, file = connections[0].recv()
    views = _views(file, layout, buffers)

    def answer(connection: multiprocessing.connection.Connection) -> None:
        while True:
            buffer, read = connection.recv()
            try:
                fill(source, views[buffer], Read(*read))
                connection.send(None)
            except Exception as error:
                connection.send(error)

    with concurrent.futures.ThreadPoolExecutor(len(connections)) as threads:
        for connection in connections:
            threads.submit(answer, connection)


def _shared_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("eagle3_jax")
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.ftruncate(file, size)
    return file


def _views(file: int, layout: Layout, buffers: int) -> list[dict[str, np.ndarray]]:
    memory = mmap.mmap(file, buffers * layout.nbytes)
    return [layout.views(memory, number) for number in range(buffers)]


if __name__ == "__main__":
    from eagle3_jax.data import readers  # its classes are pickled under this name

    readers._serve([multiprocessing.connection.Connection(int(file)) for file in sys.argv[1:]])
