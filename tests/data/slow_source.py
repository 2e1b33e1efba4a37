"""Sources whose reads are slow or counted, in a module that worker processes can import."""

import os
import pathlib
import threading
import time

import numpy as np

from eagle3_jax.data.features import FeatureSource


class SlowSource:
    """Each read takes `latency` seconds, and all reads of a process together at most `rate` bytes a second."""

    width = 64
    token_bytes = 4 * width

    def __init__(self, lengths: np.ndarray, latency: float, rate: float) -> None:
        self.lengths, self.latency, self.rate = lengths, latency, rate

    def __getitem__(self, index):
        at = index.__index__()
        length = int(self.lengths[at])
        values = np.full((length, self.width), at % 251, np.float32)
        time.sleep(self.latency)
        self._wait_for_turn(values.nbytes)
        ids = np.arange(length, dtype=np.int32)
        return {"token_ids": ids, "loss_mask": np.ones(length, np.uint8), "argmax": ids, "aux": values}

    def _wait_for_turn(self, count: int) -> None:
        with _TURN:
            _FREE[0] = max(_FREE[0], time.monotonic()) + count / self.rate
            until = _FREE[0]
        time.sleep(max(0.0, until - time.monotonic()))

    def name(self, index: int) -> str:
        return f"record {index}"

    def shard(self, index: int) -> int:
        return index // 16


_TURN, _FREE = threading.Lock(), [0.0]


class CountedSource(FeatureSource):
    """Logs each read into a file of its process: the record, and the shards that were opened so far."""

    def __init__(self, folder, log) -> None:
        super().__init__(folder)
        self.log = pathlib.Path(log)

    def __getitem__(self, index):
        record = super().__getitem__(index)
        with _TURN, (self.log / f"{os.getpid()}.log").open("a") as stream:
            stream.write(f"{index.__index__()} {self._open.cache_info().misses}\n")
        return record


def read_log(folder: pathlib.Path) -> tuple[list[int], int]:
    """The records that were read, by all processes, and how often a shard was opened."""
    records, opens = [], 0
    for path in folder.glob("*.log"):
        lines = [line.split() for line in path.read_text().splitlines()]
        records += [int(record) for record, _ in lines]
        opens += max(int(count) for _, count in lines)
    return records, opens
