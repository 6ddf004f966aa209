"""Gloo's process groups: how they are made without torch.distributed's global state, and broken."""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from unisono.backends.registry import decoded_card
from unisono.errors import RendezvousError

__all__ = ["GroupMaker", "break_links", "first_line"]

# A wait that expires closes every link of its process group: ours never expire.
_NEVER: Final = datetime.timedelta(days=3650)
# A receive on a tag that no rank sends on, and whose wait expires after this time.
_UNUSED_TAG: Final = 3
_EXPIRE_AT_ONCE: Final = datetime.timedelta(milliseconds=1)


class GroupMaker:
    """Makes one process group, on a thread of its own because Gloo blocks in the store meanwhile."""

    def __init__(self, device: Any, rank: int, size: int) -> None:
        self._store = _store()
        self._device = device
        self._rank, self._size = rank, size
        self._made: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._make, name="unisono-gloo-maker", daemon=True)
        self._thread.start()

    def card(self) -> bytes:
        """What Gloo has put into the store for the other ranks."""
        return msgspec.msgpack.encode(self._store.offered())

    def fill(self, cards: Sequence[bytes]) -> None:
        """Put the cards of all ranks into the store."""
        known = [decoded_card(card, dict[str, bytes]) for card in cards]
        self._store.fill({key: value for each in known for key, value in each.items()})

    def finish(self, cards: list[bytes]) -> Any:
        """Wait for the group, given the cards of all ranks."""
        self.fill(cards)
        return self.group()

    def close(self) -> None:
        """Give up."""
        self._store.give_up()

    def group(self) -> Any:
        """Wait for the group."""
        self._thread.join()
        if self._error is not None:
            raise RendezvousError(
                "gloo could not connect",
                cause=first_line(self._error),
                next_step="open the ports between the ranks' addresses",
            )
        return self._made

    def _make(self) -> None:
        try:
            from torch.distributed import ProcessGroupGloo

            options = ProcessGroupGloo._Options()
            options._devices = [self._device]
            options._timeout = _NEVER
            options._threads = 1  # collectives run in the order in which they were started
            self._made = ProcessGroupGloo(self._store, self._rank, self._size, options)
        except BaseException as error:
            self._error = error
            self._store.give_up()


def _store() -> Any:
    """A store for one process group: Gloo's `set` makes this rank's card, its `get` reads those of others."""
    from torch.distributed import Store

    class SeedStore(Store):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._changed = threading.Condition()
            self._own: dict[str, bytes] = {}
            self._known: dict[str, bytes] = {}
            self._is_over = False

        def set(self, key: str, value: bytes) -> None:
            with self._changed:
                self._own[key] = bytes(value)
                self._changed.notify_all()

        def get(self, key: str) -> bytes:
            self.wait([key])
            return self._known[key]

        def wait(self, keys: list[str], timeout: object = None) -> None:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over or all(key in self._known for key in keys))
                if self._is_over:
                    raise ConnectionAbortedError("the world was not formed")

        def offered(self) -> dict[str, bytes]:
            with self._changed:
                self._changed.wait_for(lambda: self._own or self._is_over)
                return self._own

        def fill(self, known: dict[str, bytes]) -> None:
            with self._changed:
                self._known = known
                self._changed.notify_all()

        def give_up(self) -> None:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    return SeedStore()


def break_links(group: Any, others: tuple[int, ...]) -> None:
    """End every wait in a process group: a wait that expires breaks all its links."""
    import torch

    for peer in others:
        with contextlib.suppress(RuntimeError):
            group.recv([torch.empty(1, dtype=torch.uint8)], peer, _UNUSED_TAG).wait(_EXPIRE_AT_ONCE)


def first_line(error: BaseException) -> str:
    """Gloo's reason, without what torch adds."""
    text = (str(error).splitlines() or [""])[0]
    return text.partition(". This may be due to")[0].removeprefix("Application timeout caused pair closure")
