"""The splits of one communicator: every rank sends a row, and the groups follow from the rows of all.

split.py says what a row holds and which group follows from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from unisono.comm.dispatch import CollectiveCall
from unisono.comm.group import Group
from unisono.comm.split import (
    ATTEMPTS_MAX,
    ROW_BYTES,
    ROW_OPERAND,
    Row,
    check_request,
    identity_of,
    members_of,
)
from unisono.core.call import Call, Steps
from unisono.core.dtypes import DTYPES
from unisono.core.work import Work, wait_or_cancel
from unisono.errors import ProtocolError
from unisono.plans.steps import Buf

__all__ = ["Parent", "Splitter"]

C = TypeVar("C", covariant=True)
_UINT8 = DTYPES["uint8"]


class Parent(Protocol[C]):
    """The communicator that is split."""

    def _child(
        self, members: tuple[int, ...], context: int, descriptor: bytes, name: str, *, is_introduced: bool
    ) -> C:
        """Make the communicator of these ranks."""


class Splitter(Generic[C]):
    """Makes the splits of one communicator.

    The engine gathers the rows of a first attempt (`row`, then `made` or `finish`). `steps` does the same
    through Python, for backends without an engine and for further attempts.
    """

    def __init__(self, group: Group, parent: Callable[[], Parent[C] | None]) -> None:
        self._group = group
        self._parent = parent

    def row(self, color: int | None, key: int) -> bytes:
        """What this rank contributes to a split that the engine is about to begin."""
        check_request(color, key)
        return self._row(self._group.next_sequence, 0, color, key).pack()

    def made(
        self,
        sequence: int,
        mine: bytes,
        everyone: np.ndarray[Any, Any],
        timeout: float | None,
        is_started: bool,
    ) -> C | Work[C | None] | None:
        """The communicator, from the rows that the engine has gathered.

        For a started split that needs another attempt: the work that makes it.
        """
        color = Row.unpack(mine).asked
        if (members := members_of(everyone, color)) is not None:
            return self._part(members, sequence, 0, color)
        runtime = self._group.backend.runtime

        def steps(call: Call) -> Steps[C | None]:
            return self.finish(call, mine, everyone)

        with runtime.defer_signals():
            again = self._group.resume(
                *("split", sequence, runtime.now(), runtime.deadline(timeout), steps),
                timers=is_started,
                is_send=False,
            )
            return again if is_started else wait_or_cancel(again)

    def finish(self, call: Call, mine: bytes, everyone: np.ndarray[Any, Any]) -> Steps[C | None]:
        """Make the communicator from the rows, or try again if its context id is in use on some rank."""
        own = Row.unpack(mine)
        if (members := members_of(everyone, own.asked)) is not None:
            assert call.sequence is not None
            return self._part(members, call.sequence, 0, own.asked)
        one = CollectiveCall(self._group, call, first_stage=1)
        return (yield from self.steps(one, own.asked, own.key, first_attempt=1))

    def steps(
        self, one: CollectiveCall, color: int | None, key: int, first_attempt: int = 0
    ) -> Steps[C | None]:
        """Gather the rows and make the communicator, with a further attempt for each context id in use."""
        size = self._group.backend.size
        for attempt in range(first_attempt, ATTEMPTS_MAX):
            mine = np.frombuffer(self._row(one.sequence, attempt, color, key).pack(), np.uint8)
            everyone = np.empty(ROW_BYTES * size, np.uint8)
            memory = {Buf.IN: mine, Buf.OUT: everyone}
            yield from one.run("all_gather", (ROW_BYTES,) * size, _UINT8, memory, given=ROW_OPERAND)
            if (members := members_of(everyone, color)) is not None:
                return self._part(members, one.sequence, attempt, color)
        raise ProtocolError(f"no free context id in {ATTEMPTS_MAX} attempts")

    def _row(self, sequence: int, attempt: int, color: int | None, key: int) -> Row:
        if color is None:
            return Row(0, 0, int(key), False)
        group = self._group
        context, _ = identity_of(group.descriptor, group.state.epoch, sequence, attempt, color)
        return Row(1, int(color), int(key), group.control.has_context(context))

    def _part(self, members: tuple[int, ...], sequence: int, attempt: int, color: int | None) -> C | None:
        """The communicator of the ranks with this color."""
        if color is None:
            return None
        group, parent = self._group, self._parent()
        assert parent is not None, "its method is being called"
        context, descriptor = identity_of(group.descriptor, group.state.epoch, sequence, attempt, color)
        name = f"{group.state.name}.split#{sequence}({color})"
        return parent._child(members, context, descriptor, name, is_introduced=True)
