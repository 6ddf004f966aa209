"""Two optional fast paths of a backend: a library's own collectives, and a mailbox for short messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["FastPath", "Mailbox"]


class Mailbox(Protocol):
    """Short messages of one context and tag in both directions, without a request for each.

    A thread that reads drives the engine's progress. A *front* reader waits for a reply of its own; the other
    readers serve in the background, one at a time, and yield to any thread that waits for an operation.
    """

    def post(self, dst: int, data: bytes, unsent_bytes_max: int) -> bool:
        """Send in the control lane, in order. A message to a rank that is gone is dropped; see Backend.watch.

        Returns False, and sends nothing, if more than `unsent_bytes_max` bytes wait for a peer that does not
        receive them.
        """

    def take(self, timeout: float, is_front: bool) -> list[tuple[int, Any]]:
        """Wait for messages and take them, with their sources; empty after `interrupt_wait` or the timeout.

        A message is bytes; the end of an expected one is (its number, its outcome, the bytes received). A
        background reader also returns empty when it takes over from a leader that has been busy for more than
        1 ms.
        """

    def drain(self) -> list[tuple[int, Any]]:
        """Take the messages that have arrived, without waiting."""

    def batches(self) -> int:
        """How often `take` has returned messages: a change shows that a thread is handling some."""

    def lend(self, dst: int, tag: int, data: Any, number: int) -> bool:
        """Send a long message without copying it: `data` must stay unchanged while `is_lent(number)`."""

    def is_lent(self, number: int) -> bool:
        """Whether the receiver may still read the data."""

    def expect(self, src: int, tag: int, into: Any, number: int) -> None:
        """Receive a long message straight into a buffer; `take` reports its end and its outcome."""

    def withdraw(self, number: int) -> None:
        """Withdraw a message that was lent or expected, unless its transfer has begun."""

    def interrupt_wait(self, is_front: bool) -> None:
        """Make the front reader, or one background reader, return."""

    def close(self) -> None:
        """Make every reader return at once, now and later. Messages are no longer received."""


class FastPath(Protocol):
    """Runs blocking collectives that were decided before, without Python.

    An operation that it starts and that fails, or does not end soon, is handed over to Python.
    """

    @property
    def verbs(self) -> tuple[str, ...]:
        """The verbs that it covers."""

    def verb(self, name: str, slow: Callable[..., Any], take_over: Callable[..., None]) -> Callable[..., Any]:
        """A callable that tries the fast path and falls back to `slow`, the verb itself.

        `take_over` waits for an operation that was started, given (operation, sequence, header, start time,
        handle, memory, exception or None).
        """

    def cache_decision(
        self,
        sequence: int,
        operation: str,
        program: Any,
        dtype: int,
        op: int,
        memory_in: Any,
        memory_out: Any,
        header: bytes,
        divisor: int,
    ) -> bool:
        """Cache the decision of a call that `slow` runs now; False if there is nothing to cache."""
