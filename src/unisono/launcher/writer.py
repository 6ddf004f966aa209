"""Where a launcher prints: whoever prints never waits for whoever reads.

Knows descriptors and bytes. Does not know what they mean. A reader that does not read holds up one thread,
and `is_full` asks for no more; the launcher itself goes on hearing signals and ending ranks.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from unisono.core.clock import RealRuntime

__all__ = ["Sink"]

# So much is kept for a reader that is slow; then ranks wait for it, as they would without a launcher.
_KEPT_BYTES_MAX: Final = 1 << 20


class Sink:
    """One thread that writes to descriptors in the order of `put`; `told` is called when it got on."""

    def __init__(self, told: Callable[[], None]) -> None:
        self._told = told
        self._changed = threading.Condition()
        self._queue: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self.error: OSError | None = None

    @property
    def is_full(self) -> bool:
        """Whether whoever prints should wait."""
        return self._kept_bytes > _KEPT_BYTES_MAX

    @property
    def is_empty(self) -> bool:
        """Whether all is written."""
        return not self._kept_bytes

    def start(self) -> None:
        """Begin to write. After the last fork: a child must not inherit a lock that is held."""
        RealRuntime().start_thread(self._run, "unisono-print")

    def put(self, descriptor: int, data: bytes) -> None:
        """Write it when its turn comes; after an error nothing more is written."""
        with self._changed:
            if data and self.error is None:
                self._queue.append((descriptor, data))
                self._kept_bytes += len(data)
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
                    self._kept_bytes = 0
            else:
                with self._changed:
                    self._kept_bytes -= len(data)
            self._told()


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # somebody who shares it made it so
            select.select([], [descriptor], [])
