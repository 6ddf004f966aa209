"""A barrier that names the ranks that do not arrive, by messages: a missing rank does not end the group.

Every rank sends rank 0 its arrival, and waits for its release. Rank 0 waits for each in turn. A rank that
gives up withdraws its arrival, so that a later barrier does not count it: all three carry the number of the
rank's attempt. The texts are those of Gloo.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from unisono.comm.communicator import Communicator
from unisono.core.runtime import Deadline
from unisono.errors import DeadlineExceeded, UnisonoError

__all__ = ["MonitoredBarrier"]

_ARRIVAL, _WITHDRAWAL, _RELEASE = range(3)  # tags


class MonitoredBarrier:
    """The barriers of one group, on a communicator of their own."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._lock = threading.Lock()
        self._attempt = 0

    def wait(self, timeout_s: float, wait_all_ranks: bool) -> None:
        """Wait for all ranks.

        Raises:
            RuntimeError: on rank 0, the ranks that did not come, or with `wait_all_ranks` False the first of
                them; on the others, that rank 0 has not released them.
        """
        deadline = self._comm.backend.runtime.deadline(timeout_s)
        with self._lock:
            if self._comm.rank == 0:
                self._gather(deadline, timeout_s, wait_all_ranks)
            else:
                self._arrive(deadline)

    def _gather(self, deadline: Deadline, timeout_s: float, wait_all_ranks: bool) -> None:
        arrived: dict[int, int] = {}
        failed: dict[int, UnisonoError] = {}
        within = f"{round(timeout_s * 1000)} ms"
        for rank in range(1, self._comm.size):
            if not wait_all_ranks and deadline.has_passed(self._comm.backend.runtime.now()):
                ranks = ", ".join(map(str, arrived))
                processed = f"Successfully processed ranks: {ranks}" if ranks else "No ranks processed"
                raise RuntimeError(f"Rank 0 timed out in monitoredBarrier after {within}. {processed}.")
            try:
                arrived[rank] = self._await_arrival(rank, deadline)
            except UnisonoError as error:
                failed[rank] = error
                if not wait_all_ranks:
                    break
        if failed:
            first = next(iter(failed.values()))
            raise RuntimeError(
                f"Rank{'s' if wait_all_ranks else ''} {', '.join(map(str, failed))} failed to pass "
                f"monitoredBarrier in {within}: {first}"
            ) from first
        for rank, attempt in arrived.items():
            self._comm.send(_number(attempt), rank, _RELEASE, timeout=self._left(deadline))

    def _await_arrival(self, rank: int, deadline: Deadline) -> int:
        while True:
            attempt = self._receive(rank, _ARRIVAL, self._left(deadline))
            is_withdrawn = False
            while self._comm.probe(rank, _WITHDRAWAL, timeout=0) is not None:
                is_withdrawn |= self._receive(rank, _WITHDRAWAL, None) == attempt
            if not is_withdrawn:
                return attempt

    def _arrive(self, deadline: Deadline) -> None:
        self._attempt += 1
        mine = _number(self._attempt)
        try:
            self._comm.send(mine, 0, _ARRIVAL, timeout=self._left(deadline))
            # The release of an attempt that was given up may come late.
            while self._receive(0, _RELEASE, self._left(deadline)) != self._attempt:
                pass
        except UnisonoError as error:
            if isinstance(error, DeadlineExceeded):
                self._comm.send(mine, 0, _WITHDRAWAL)
            raise RuntimeError(
                f"Rank {self._comm.rank} successfully reached monitoredBarrier, but received errors while "
                f"waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank.\n{error}"
            ) from error

    def _receive(self, rank: int, tag: int, timeout_s: float | None) -> int:
        number = _number(0)
        self._comm.recv(number, rank, tag, timeout=timeout_s)
        return int(number[0])

    def _left(self, deadline: Deadline) -> float:
        return deadline.remaining(self._comm.backend.runtime.now()) or 0.0


def _number(value: int) -> np.ndarray[Any, Any]:
    return np.array([value], np.int64)
