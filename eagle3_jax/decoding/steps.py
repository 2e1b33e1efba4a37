"""Reports the progress of a warm-up, and ends a stopped verb between two of its steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from eagle3_jax.runs.command import stop_point
from eagle3_jax.runs.progress import Progress, T, shown


def steps(items: Sequence[T], name: str, unit: str, progress: Progress) -> Iterator[T]:
    """Yields the items and shows how many are done; a verb that was asked to stop ends between two."""
    for item in shown(items, name, unit, progress):
        stop_point()
        yield item
