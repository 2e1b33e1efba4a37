"""Logs of a bucket: segments are sealed while the log is written."""

import time

import emulator

from eagle3_jax.runs import disk
from eagle3_jax.runs.bucket import logs


def test_a_log_is_sealed_while_it_is_written(monkeypatch):
    folder = disk.path_of(f"{emulator.new_bucket()}/run")
    monkeypatch.setattr(logs, "SEGMENT_SECONDS", 0.2)
    with disk.Log(folder / "log") as log:
        log.append("early")
        until = time.monotonic() + 20
        while disk.read_log(folder / "log") != ["early"] and time.monotonic() < until:
            time.sleep(0.1)
        assert disk.read_log(folder / "log") == ["early"]
        log.append("late")
    assert disk.read_log(folder / "log") == ["early", "late"]
