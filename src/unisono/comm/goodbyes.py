"""Goodbyes that wait to be sent together: of groups that were closed here with nothing left to do on them.

In a correct program no operation waits for a member of such a group: all members close it at about the same
time. So goodbyes wait for a few milliseconds, those of many groups travel in one message, and none is sent to
a member whose own goodbye has come meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar

__all__ = ["DELAY_S", "UnsentGoodbyes"]

# How long a goodbye waits. In a wrong program, a rank that waits for this one learns of its end that much
# later. A program that makes and closes groups in a loop closes some hundred in this time.
DELAY_S: Final = 0.005


C = TypeVar("C")


class UnsentGoodbyes(Generic[C]):
    """By context: the world ranks that get the goodbye, and what lists the last calls. Hold a lock."""

    def __init__(self) -> None:
        self._ranks: dict[int, tuple[int, ...]] = {}
        self._calls: dict[int, Callable[[], C]] = {}

    def __len__(self) -> int:
        return len(self._ranks)

    def add(self, context: int, ranks: tuple[int, ...], calls: Callable[[], C] | None) -> None:
        """A group of these ranks was closed; `calls` is None if no rank can need its last calls."""
        self._ranks[context] = ranks
        if calls is not None:
            self._calls[context] = calls

    def remove(self, context: int, rank: int) -> None:
        """A rank has closed the group itself."""
        if (ranks := self._ranks.get(context)) is not None:
            self._ranks[context] = tuple([other for other in ranks if other != rank])

    def take(self) -> tuple[dict[int, list[int]], dict[int, Callable[[], C]]]:
        """Remove all: the contexts by rank, and what makes the last calls by context."""
        by_rank: dict[int, list[int]] = {}
        for context, ranks in self._ranks.items():
            for rank in ranks:
                by_rank.setdefault(rank, []).append(context)
        calls = self._calls
        self._ranks, self._calls = {}, {}
        return by_rank, calls
