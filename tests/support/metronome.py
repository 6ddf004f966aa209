"""Time limits on a busy machine: time in which the machine did not run the test does not count."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Metronome", "stopwatch"]


@contextmanager
def stopwatch() -> Iterator[Callable[[], float]]:
    """Yield a function: the seconds since the block began, less those in which this process did not run."""
    metronome, begun = Metronome(), time.monotonic()
    try:
        yield lambda: float(metronome.fair_s(begun, time.monotonic()))
    finally:
        metronome.is_over = True
        metronome.join()


class Metronome(threading.Thread):
    """Records the time every 10 ms; a late beat shows for how long the machine did not run this process."""

    PERIOD_S = 0.01

    def __init__(self):  # type: ignore[no-untyped-def] # its source goes into scripts
        super().__init__(name="metronome", daemon=True)
        self.beats = [time.monotonic()]
        self.is_over = False
        self.start()

    def run(self):  # type: ignore[no-untyped-def]
        while not self.is_over:
            time.sleep(self.PERIOD_S)
            self.beats.append(time.monotonic())

    def fair_s(self, begun, ended):  # type: ignore[no-untyped-def]
        """The seconds between two points in time, less those in which this process did not run."""
        while self.beats[-1] <= ended:
            time.sleep(self.PERIOD_S)
        beats = list(self.beats)
        pairs = [(t0, t1) for t0, t1 in itertools.pairwise(beats) if t1 > begun and t0 < ended]
        return ended - begun - sum(max(0.0, t1 - t0 - 2 * self.PERIOD_S) for t0, t1 in pairs)
