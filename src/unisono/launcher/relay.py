"""What the ranks of this host print: read from pipes, shown as whole lines with the rank before them.

A traceback is held back until it is clear whether its rank ends by it. Ranks are read only while the writer
has space, so a slow reader slows down the ranks, as it would without a launcher.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from typing import Final

from unisono.core.clock import RealRuntime
from unisono.launcher.output import ErrorStream, Prefixer, last_words
from unisono.launcher.summary import Ended, end_of
from unisono.launcher.supervisor import Supervisor, wake_pair
from unisono.launcher.writer import OutputWriter

__all__ = ["LocalRank", "OutputRelay", "release_at"]

# A traceback is held back this long; a rank that has not ended by then has survived it.
_HELD_S: Final = 5.0
# The same while a held traceback reports the end of another rank: both will end soon, within the grace time.
_HELD_WHILE_ENDING_S: Final = 10.0


class LocalRank:
    """A rank of this host. `code` is its exit code, None while it runs and if the launcher ended it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.errors = ErrorStream()
        self.code: int | None = None
        self._classified: tuple[float | None, int] = (None, 0)  # the held lines that `_is_victim` is about
        self._is_victim = False

    def is_victim(self) -> bool:
        """Whether a traceback that is held back reports the end of another rank."""
        held = self.errors.held
        state = (self.errors.held_since, len(held))
        if state != self._classified:
            self._classified = state
            self._is_victim = end_of(Ended(self.rank, None, last_words(held))).is_victim
        return self._is_victim


class OutputRelay:
    """Reads pipes in the supervisor's `serve` and passes their lines to a thread that writes them."""

    def __init__(self, supervisor: Supervisor, size: int, out: int, err: int, *, colour: bool) -> None:
        self.is_paused = False  # no pipe is read: the writer is full
        self._supervisor = supervisor
        self._size, self._out, self._err, self._colour = size, out, err, colour
        self._runtime = RealRuntime()
        self._readers: dict[int, Callable[[int], None]] = {}  # by descriptor of a pipe
        # The writing end is never closed: the writer's thread may use it as long as this process lives.
        self._wake_reader, self._wake_writer = wake_pair()
        supervisor.watch(self._wake_reader, lambda _: self._wake_reader.recv(4096))
        self._writer = OutputWriter(self.wake)

    @property
    def error(self) -> OSError | None:
        """Why nothing can be printed any more; None while it can."""
        return self._writer.error

    @property
    def is_read(self) -> bool:
        """Whether all pipes have been read to their end."""
        return not self._readers

    @property
    def is_written(self) -> bool:
        """Whether everything that was read is printed."""
        return self._writer.is_empty

    def start(self) -> None:
        """Begin to print. It starts a thread: fork before."""
        self._writer.start()

    def close(self) -> None:
        """Close the pipes; what was not read is lost."""
        for descriptor in self._readers:
            os.close(descriptor)
        self._wake_reader.close()

    def wake(self) -> None:
        """Called by the writer's thread when it has written: wake the supervisor."""
        with contextlib.suppress(OSError):  # full: it will wake anyway
            self._wake_writer.send(b"\0")

    def pipes(self, rank: LocalRank | None) -> tuple[int, int]:
        """Descriptors for standard output and error of a rank, or of a process that has none."""
        return self._pipe(rank, self._out, None), self._pipe(rank, self._err, rank.errors if rank else None)

    def show(self, rank: LocalRank, lines: Iterable[bytes]) -> None:
        """Print lines to standard error, as those of the rank."""
        self._writer.put(self._err, b"".join(map(self._prefixer(rank).show, lines)))

    def say(self, lines: Iterable[bytes]) -> None:
        """Print lines of the launcher itself to standard error."""
        self._writer.put(self._err, b"".join(line + b"\n" for line in lines))

    def pause_or_resume(self) -> None:
        """Read pipes only while the writer has space."""
        if self._writer.is_full != self.is_paused:
            self.is_paused = not self.is_paused
            for descriptor, read in self._readers.items():
                if self.is_paused:
                    self._supervisor.unwatch(descriptor)
                else:
                    self._supervisor.watch(descriptor, read)

    def _pipe(self, rank: LocalRank | None, target: int, errors: ErrorStream | None) -> int:
        """A descriptor to write to; whole lines of it are printed to `target`."""
        descriptor, write_end = os.pipe()
        prefixer = self._prefixer(rank)

        def read(_: int) -> None:
            data = os.read(descriptor, 65536)
            lines = prefixer.feed(data) if data else prefixer.finish()
            if not data:
                self._supervisor.unwatch(descriptor)
                del self._readers[descriptor]
                os.close(descriptor)
            if errors is not None:
                now = self._runtime.now()
                lines = [shown for line in lines for shown in errors.add(line, now)]
            self._writer.put(target, b"".join(map(prefixer.show, lines)))

        self._readers[descriptor] = read
        self._supervisor.watch(descriptor, read)
        return write_end

    def _prefixer(self, rank: LocalRank | None) -> Prefixer:
        return Prefixer(None if rank is None else rank.rank, self._size, colour=self._colour)


def release_at(ranks: Iterable[LocalRank]) -> float | None:
    """When held tracebacks are shown because their ranks live on; None if none is held."""
    holding = [rank for rank in ranks if rank.errors.held_since is not None]
    if not holding:
        return None
    since = min(rank.errors.held_since or 0.0 for rank in holding)
    is_ending = any(rank.is_victim() for rank in holding)
    return since + (_HELD_WHILE_ENDING_S if is_ending else _HELD_S)
