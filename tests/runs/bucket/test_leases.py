"""Leases: renewed while held, and lost only to another holder."""

import time

import emulator
import pytest

from eagle3_jax.runs import disk
from eagle3_jax.runs.bucket import leases, objects


@pytest.fixture
def folder(monkeypatch):
    """A run's folder in a bucket."""
    monkeypatch.setenv(leases.LEASE_SECONDS, "3")
    return disk.path_of(f"{emulator.new_bucket()}/run")


def test_a_lease_is_renewed_and_its_loss_ends_the_run(folder, monkeypatch):
    lost = []
    monkeypatch.setattr(disk, "_end", lost.append)
    lease = folder.parent / ".run.lock"
    with disk.lock(folder):
        first = objects.generation(lease)
        until = time.monotonic() + 20
        while objects.generation(lease) == first and time.monotonic() < until:
            time.sleep(0.1)
        objects.put(lease, b'{"owner": "a thief"}', objects.generation(lease))
        while not lost and time.monotonic() < until:
            time.sleep(0.1)
    assert lost == [f"{lease}: the lease was taken by a thief, this run ends"]
    assert leases.holder(lease) == "a thief"  # which keeps it


def test_a_renewal_whose_answer_was_lost_is_no_loss(folder, monkeypatch):
    lost, put, failed = [], objects.put, []

    def deaf(path, content, expected, **options):
        found = put(path, content, expected, **options)
        if b'"renewal": 1}' in content and not failed:
            failed.append(path)
            raise objects.BucketError("no answer")
        return found

    monkeypatch.setattr(objects, "put", deaf)
    monkeypatch.setattr(disk, "_end", lost.append)
    lease = folder.parent / ".run.lock"
    with disk.lock(folder):
        until = time.monotonic() + 20
        while b'"renewal": 4}' not in objects.read(lease) and time.monotonic() < until:
            time.sleep(0.1)
    assert failed and not lost and leases.holder(lease) == ""
