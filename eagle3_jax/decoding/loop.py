"""The engine loop: the threads that wait for answers run the scheduler's turns themselves, one thread at a time.

Turns run only while a caller waits. Asynchronous callers cannot work while they wait: a thread of the loop runs turns
for them, lets a live head learn in the time between requests, and ends when neither is left.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

from eagle3_jax.decoding.request import Request
from eagle3_jax.decoding.scheduler import Scheduler

# Seconds without work after which the device counts as idle: a conversation goes on where its pages are.
_IDLE = 1.0
_POLL = 0.05

_log = logging.getLogger(__name__)


class EngineLoop:
    """Runs the turns of one scheduler; the `Driver` of its requests."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._changes = scheduler, scheduler.changes
        self._working = threading.Lock()  # held by the thread that runs turns
        self._started: float | None = None  # when that thread began; None while none works
        self._thread: threading.Thread | None = None

    def drive(self, ready: Callable[[], bool]) -> None:
        """Runs turns until `ready()`; while another thread runs them, waits for its deliveries.

        A failure of the device is raised by the requests it ended, not here: the working thread may wait for others.
        """
        while not ready():
            if self._working.acquire(blocking=False):
                self._started = time.monotonic()
                try:
                    while not ready():
                        self._scheduler.turn()
                finally:
                    self._started = None
                    self._let_go()
            else:
                with self._changes:
                    self._changes.wait_for(lambda: ready() or not self._working.locked(), timeout=1)

    def drive_in_background(self) -> None:
        """Leaves the turns to a thread, until there is no work."""
        with self._changes:
            self._changes.notify_all()  # it may wait in idle time
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="eagle3_jax engine")
                self._thread.start()

    def abort(self, *requests: Request) -> None:
        """Ends requests with the tokens that they have; a finished request stays as it is."""
        self._scheduler.mark_aborted(requests)
        self._end_aborted()

    @contextlib.contextmanager
    def exclusive(self, purpose: str) -> Iterator[None]:
        """Keeps turns off the device. Raises RuntimeError at once where requests are running."""
        while not self._working.acquire(timeout=0.05):  # the working thread may be about to end
            stats = self._scheduler.stats()
            if busy := stats.running + stats.waiting:  # waiting requests are admitted while a thread works
                raise RuntimeError(f"{purpose}: got {busy} running requests, expected none")
        try:
            if running := self._scheduler.stats().running:
                raise RuntimeError(f"{purpose}: got {running} running requests, expected none")
            yield
        finally:
            self._let_go()

    @contextlib.contextmanager
    def lend(self, stop_point: Callable[[], object]) -> Iterator[Callable[[], None]]:
        """Lends the device once it has been idle for a moment; its state is forgotten.

        Yields a function that lets requests go first, where there are any, and returns when the device is idle again.
        Both call `stop_point` now and then, which may raise.
        """

        def give_back() -> None:
            self._scheduler.forget_device()
            self._let_go()

        def borrow() -> None:
            while not self._borrowed():
                stop_point()
                time.sleep(_POLL)
            held.callback(give_back)

        def give_way() -> None:
            stop_point()
            if self._scheduler.has_requests:
                held.close()
                borrow()

        with contextlib.ExitStack() as held:
            borrow()
            yield give_way

    def _borrowed(self) -> bool:
        """Keeps turns off the device, where it is idle. A report may be unread: turns run only while a caller waits."""
        if self._scheduler.has_requests or time.monotonic() - self._scheduler.delivered < _IDLE:
            return False
        if not self._working.acquire(blocking=False):
            return False
        if self._scheduler.has_requests:
            self._let_go()
            return False
        return True

    def stalled(self) -> float:
        """Seconds since work last came back from the device, or since the working thread began; 0 while none works."""
        started = self._started
        return 0.0 if started is None else time.monotonic() - max(started, self._scheduler.delivered)

    def _work(self) -> None:
        while not self._is_idle():
            try:
                self.drive(lambda: not self._scheduler.has_work)
                self._learn_while_idle()
            except Exception:  # the next turn may succeed
                _log.exception("a turn failed")

    def _learn_while_idle(self) -> None:
        """Lets a live head learn until a request comes, which waits for the end of the step."""
        then = time.monotonic()
        while self._learns_on():
            with self._changes:
                if self._changes.wait_for(lambda: self._scheduler.has_work, timeout=_POLL):
                    return
            if self._borrowed():
                try:
                    now = time.monotonic()
                    self._scheduler.learn(idle=now - then)
                    then = time.monotonic()
                finally:
                    self._let_go()

    def _learns_on(self) -> bool:
        """Tells whether a live head has use for idle time. A process ends all the same."""
        return self._scheduler.learns_on and threading.main_thread().is_alive()

    def _is_idle(self) -> bool:
        with self._changes:
            if self._scheduler.has_work or self._learns_on():
                return False
            if self._thread is threading.current_thread():
                self._thread = None  # decided under the lock: a later caller starts another thread
            return True

    def _let_go(self) -> None:
        """Leaves the turns to the next thread that waits."""
        self._working.release()
        self._end_aborted()

    def _end_aborted(self) -> None:
        """Ends aborted requests while no thread works; a working thread does so in its next turn or in `_let_go`."""
        while self._scheduler.aborted and self._working.acquire(blocking=False):
            try:
                self._scheduler.sweep()
            finally:
                self._working.release()
        with self._changes:
            self._changes.notify_all()
