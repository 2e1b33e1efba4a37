"""Finds answers in logs by prompt and turn, and reads them on demand."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence

from eagle3_jax.regenerate.dialogue import Answer
from eagle3_jax.runs import disk


class Answers(Mapping[tuple[str, int], Answer]):
    """The answers in some logs, by prompt and turn. A million of them do not lie in memory: only their places do.

    A context manager, if none of the logs grows. An answer that stands twice counts as it stands last.

    Raises:
        JsonError: a whole line was altered.
    """

    def __init__(self, logs: Sequence[disk.Path]) -> None:
        self._open = contextlib.ExitStack()
        self._places: dict[tuple[str, int], tuple[io.BufferedIOBase, int]] = {}
        with contextlib.ExitStack() as opening:
            for log in logs:
                lines = opening.enter_context(disk.open_log(log))
                for place, value in disk.log_values(lines, log):
                    self._places[value["id"], value["turn"]] = lines, place
            self._open = opening.pop_all()

    def __getitem__(self, key: tuple[str, int]) -> Answer:
        lines, place = self._places[key]
        lines.seek(place)
        return Answer(**disk.log_value(lines.readline(), f"{key}"))

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
