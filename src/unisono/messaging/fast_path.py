"""Two optional short cuts of a backend: known collectives, and a mailbox for short messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    pass

__all__ = ["FastPath", "Mailbox"]


class Mailbox(Protocol):
    """Short messages of one context and tag in both directions, without a request for each.

    Who reads makes progress. A reader in front is one that waits for an answer; the others serve in the
    background, one at a time, and make way for any thread that waits for anything.
    """

    def post(self, dst: int, data: bytes, unsent_bytes_max: int) -> bool:
        """Send in the control lane, in order. What cannot arrive is dropped: a watch tells why.

        False, and nothing is sent, if more than `unsent_bytes_max` wait for a peer that does not take them.
        """

    def take(self, timeout: float, is_front: bool) -> list[tuple[int, Any]]:
        """Wait for messages and take them, with their sources; none after a interrupt_wait, or if time is up.

        A message is bytes, or for one that was expected (its number, its outcome, how many bytes came). In
        the background it also returns with none when who read last has been away for long.
        """

    def drain(self) -> list[tuple[int, Any]]:
        """Take what is here."""

    def batches(self) -> int:
        """How often a thread was given messages so far: each time it has them in hand for a while."""

    def lend(self, dst: int, tag: int, data: Any, number: int) -> bool:
        """Send a long message from where it lies, which has to stay until it is no longer lent."""

    def is_lent(self, number: int) -> bool:
        """Whether the other side may still read it."""

    def expect(self, src: int, tag: int, into: Any, number: int) -> None:
        """Receive a long message where it is to stay; `take` tells its end, and whether it came."""

    def withdraw(self, number: int) -> None:
        """Take back what was lent or expected and has not begun."""

    def interrupt_wait(self, is_front: bool) -> None:
        """Make the reader in front, or one in the background, return."""

    def close(self) -> None:
        """Let every reader return at once, now and later; what arrives is no longer taken."""


class FastPath(Protocol):
    """A short way for blocking collectives that were made before, from the same place with like arguments.

    What it begins and cannot end by itself, soon and well, it hands over.
    """

    @property
    def verbs(self) -> tuple[str, ...]:
        """The verbs that it has a short way for."""

    def verb(self, name: str, slow: Callable[..., Any], slow_path: Any) -> Callable[..., Any]:
        """Make what stands in front of `slow`, the verb itself.

        `slow_path.take_over` waits for what was begun, given (operation, sequence, header, start time,
        handle, memory, exception or None); `slow_path.check_unclaimed` compares a message that was not met
        (rank, sequence, header).
        """

    def unclaimed(self, sequence: int) -> Sequence[tuple[int, int, bytes]]:
        """Messages that wait for calls before this one, if calls may end before theirs are met."""

    def unconfirmed_ranks(self) -> Sequence[int]:
        """Ranks that have not shown yet that they have made all calls that ended here."""

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
        """Keep what `slow` decided in the midst of its call; False if there is nothing to keep."""
