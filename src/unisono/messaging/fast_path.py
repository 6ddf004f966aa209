"""Two optional fast paths of a backend: a library's blocking collectives, and a mailbox for short messages.

The arguments of a call have been read, and its class has been decided, by the same parser and table that the
engine's calls have (native/python/call.hpp).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType
from typing import Any, Protocol

from unisono.core.dtypes import DType
from unisono.core.ops import ReduceOp

__all__ = ["Adopter", "LibraryCall", "LibraryCalls", "Mailbox"]


class Mailbox(Protocol):
    """Short messages of one context and tag in both directions, without a request for each.

    A thread that reads drives the engine's progress. A *front* reader waits for a reply of its own; the other
    readers serve in the background, one at a time, and yield to any thread that waits for an operation.
    """

    def post(
        self,
        dst: int,
        data: bytes,
        unsent_bytes_max: int,
        is_more: bool = False,
        lent: Sequence[tuple[int, Any, int]] = (),
    ) -> bool:
        """Send in the control lane, in order. A message to a rank that is gone is dropped; see Backend.watch.

        `lent` are long payloads that travel beside the message: for each a tag, a buffer and a number. They
        are not copied, and must stay unchanged while `is_lent(number)`.

        Returns False, and sends nothing, if more than `unsent_bytes_max` bytes wait for a peer that does not
        receive them. With `is_more` a socket may keep the message for up to a millisecond, because others
        follow: one system call sends them all.
        """

    def take(self, timeout: float, is_front: bool) -> list[tuple[int, Any]]:
        """Wait for messages and take them, with their sources; empty after `interrupt_wait` or the timeout.

        A message is bytes; the end of an expected one is (its number, its outcome, its length). A
        background reader also returns empty when it takes over from a leader that has been busy for more than
        1 ms.
        """

    def drain(self) -> list[tuple[int, Any]]:
        """Take the messages that have arrived, without waiting."""

    def batches(self) -> int:
        """How often `take` has returned messages: a change shows that a thread is handling some."""

    def is_lent(self, number: int) -> bool:
        """Whether the receiver may still read the data."""

    def expect(self, src: int, tag: int, into: Any, number: int) -> tuple[int, int] | None:
        """Receive a long message straight into a buffer.

        Returns its outcome and length if it is here already; else `take` reports its end.
        """

    def withdraw(self, number: int) -> None:
        """Withdraw a message that was lent or expected, unless its transfer has begun."""

    def interrupt_wait(self, is_front: bool) -> None:
        """Make the front reader, or one background reader, return."""

    def close(self) -> None:
        """Make every reader return at once, now and later. Messages are no longer received."""


class Adopter(Protocol):
    """What carries on a call that a library's thread cannot wait for any longer."""

    def take_over(
        self,
        operation: str,
        sequence: int,
        fingerprint: bytes,
        started_at: float,
        timeout: float | None,
        handle: int,
        memory: tuple[Any, ...],
        interruption: BaseException | None,
    ) -> None:
        """Wait for an operation that was started (Backend.adopt has its handle); raises what the verb raises.

        With an `interruption` it is cancelled, and the interruption is raised.
        """


class LibraryCall(Protocol):
    """How a library makes the calls of one class: a collective with its type, operation and root."""

    def __call__(
        self,
        adopter: Adopter,
        count: int,
        fingerprint: bytes,
        operand: Any,
        result: Any,
        code: CodeType | None,
        instruction: int,
        timeout: float | None,
    ) -> bool:
        """Number, log and make a call, on this thread; False if it was not begun, and plans make it.

        Args:
            adopter: what takes the call over if it fails or does not end soon.
            count: the items of one rank.
            fingerprint: what members compare.
            operand: the operand as a NumPy array; None for verbs in place.
            result: the array for the result, with the operand of verbs in place; None where there is none.
            code: the caller's code; with `instruction`, where the program makes the call.
            timeout: seconds; None for no limit.
        """


class LibraryCalls(Protocol):
    """Blocking collectives of one communicator that a library makes."""

    def decide(self, problem: Any, dtype: DType, op: ReduceOp | None) -> LibraryCall:
        """How the calls of a class are made: those of a plans.Problem, with any counts."""
