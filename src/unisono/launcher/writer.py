"""The thread that prints the output of a launcher.

A reader that does not read blocks this thread only; the launcher still handles signals and ends ranks.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from unisono.core.clock import RealRuntime

__all__ = ["OutputWriter"]

# 1 MiB is buffered for a slow reader; beyond that the ranks wait for it, as they would without a launcher.
_BUFFERED_BYTES_MAX: Final = 1 << 20


class OutputWriter:
    """One thread that writes to descriptors in the order of `put`, and calls `on_progress` after each."""

    def __init__(self, on_progress: Callable[[], None]) -> None:
        self._on_progress = on_progress
        self._changed = threading.Condition()
        self._queue: deque[tuple[int, bytes]] = deque()
        self._buffered_bytes = 0
        self.error: OSError | None = None

    @property
    def is_full(self) -> bool:
        """Whether the caller should wait before the next `put`."""
        return self._buffered_bytes > _BUFFERED_BYTES_MAX

    @property
    def is_empty(self) -> bool:
        """Whether everything is written."""
        return not self._buffered_bytes

    def start(self) -> None:
        """Start the thread. Fork before: a child must not inherit a held lock."""
        RealRuntime().start_thread(self._run, "unisono-print")

    def put(self, descriptor: int, data: bytes) -> None:
        """Queue data to write; after an error nothing more is written."""
        with self._changed:
            if data and self.error is None:
                self._queue.append((descriptor, data))
                self._buffered_bytes += len(data)
                self._changed.notify()

    def _run(self) -> None:
        while self.error is None:
            with self._changed:
                while not self._queue:
                    self._changed.wait()
                descriptor, data = self._queue.popleft()
            try:
                _write(descriptor, data)
            except OSError as error:
                with self._changed:
                    self.error = error
                    self._queue.clear()
                    self._buffered_bytes = 0
            else:
                with self._changed:
                    self._buffered_bytes -= len(data)
            self._on_progress()


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # another process that shares it made it non-blocking
            select.select([], [descriptor], [])
