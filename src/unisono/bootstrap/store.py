"""A ticket in a key-value store of torch: how ranks meet under torchrun, or in a group of torch.distributed.

Every process that can reach the store can read it, so the ticket is as safe there as torch's job itself.
torch is imported only for the store of torchrun, since under torchrun it is installed.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Protocol

from unisono.bootstrap.ticket import Ticket, TicketSource
from unisono.errors import RendezvousError

__all__ = ["KeyValueStore", "StoreSource"]

# The store runs in torchrun's agent, which is started before any rank.
_CONNECT_S: Final = 20.0


class KeyValueStore(Protocol):
    """What is used of torch.distributed.Store. Its methods raise RuntimeError if it does not answer."""

    def set(self, key: str, value: str) -> None:
        """Store a value."""

    def get(self, key: str) -> bytes:
        """The value; waits for it."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys have values."""

    def delete_key(self, key: str) -> bool:
        """Remove a value."""


@dataclass(frozen=True, slots=True)
class StoreSource(TicketSource):
    """The ticket under one key of a store. `given` says which store it is, for errors."""

    key: str = ""
    connect: Callable[[], KeyValueStore] = field(kw_only=True, repr=False)
    if_silent: str = ""
    """The next step when the store does not answer."""

    @classmethod
    def of_job(cls, store: str, job: str, *, insecure: bool) -> StoreSource:
        """The source of a job's ticket in torchrun's store at host:port."""
        return cls(
            f"torchrun's store at {store}",
            insecure=insecure,
            is_keyed=True,
            known_by="run id",
            key=f"unisono/{job}",
            connect=lambda: _client(store),
            if_silent="set UNISONO_JOIN to a file that all ranks can read",
        )

    @property
    def path(self) -> None:
        """None: it is not a file."""
        return None

    @property
    def may_be_old(self) -> bool:
        """Always: after a restart of the workers the key may still hold the ticket of the round before."""
        return True

    def __str__(self) -> str:
        return self.given

    def read(self) -> Ticket:
        """Get the ticket.

        Raises:
            FileNotFoundError: it is not there yet.
            UsageError: the value is not a ticket.
            RendezvousError: the store does not answer.
        """
        try:
            store = self.connect()
            if not store.check([self.key]):
                raise FileNotFoundError(self.key)
            text = store.get(self.key)
        except RuntimeError as error:
            raise self._silent(error) from error
        return Ticket.parse(text.decode("utf-8", "replace"), insecure=self.insecure)

    def write(self, ticket: Ticket) -> Callable[[], None]:
        """Store the ticket; returns the function that removes it."""
        try:
            store = self.connect()
            store.set(self.key, ticket.text())
        except RuntimeError as error:
            raise self._silent(error) from error

        def remove() -> None:
            with contextlib.suppress(RuntimeError):  # the store may have ended before us
                store.delete_key(self.key)

        return remove

    def claim(self, ticket: Ticket) -> Callable[[], None]:
        """The same as `write`: the store belongs to one job, so no other uses it."""
        return self.write(ticket)

    def _silent(self, error: Exception) -> RendezvousError:
        return RendezvousError(
            f"{self} does not answer",
            cause=str(error).splitlines()[0],
            next_step=self.if_silent,
        )


@lru_cache(maxsize=1)
def _client(address: str) -> KeyValueStore:
    """The connection to torchrun's store, one per process."""
    from torch.distributed import TCPStore  # takes a second or two, but only under torchrun on several hosts

    host, _, port = address.rpartition(":")
    store: KeyValueStore = TCPStore(
        host.strip("[]"),
        int(port),
        is_master=False,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=_CONNECT_S),
    )
    return store
