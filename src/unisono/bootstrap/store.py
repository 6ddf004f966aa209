"""A ticket in torchrun's store: how ranks on several hosts meet under torchrun without a file.

Every process that can reach the store can read it, so the ticket is as safe there as torchrun's job itself.
torch is imported only here, since under torchrun it is installed.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from unisono.bootstrap.ticket import Ticket, TicketSource
from unisono.errors import RendezvousError

__all__ = ["StoreSource"]

# The store runs in torchrun's agent, which is started before any rank.
_CONNECT_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class StoreSource(TicketSource):
    """The ticket under one key of the store at `given` (host:port)."""

    key: str = field(default="")

    @classmethod
    def of_job(cls, store: str, job: str, *, insecure: bool) -> StoreSource:
        """The source of a job's ticket."""
        return cls(store, insecure=insecure, is_keyed=True, known_by="run id", key=f"unisono/{job}")

    @property
    def path(self) -> None:
        """None: it is not a file."""
        return None

    @property
    def may_be_old(self) -> bool:
        """Always: after a restart of the workers the key may still hold the ticket of the round before."""
        return True

    def __str__(self) -> str:
        return f"torchrun's store at {self.given}"

    def read(self) -> Ticket:
        """Get the ticket.

        Raises:
            FileNotFoundError: it is not there yet.
            UsageError: the value is not a ticket.
            RendezvousError: the store does not answer.
        """
        try:
            store = _client(self.given)
            if not store.check([self.key]):
                raise FileNotFoundError(self.key)
            text: bytes = store.get(self.key)
        except RuntimeError as error:
            raise self._silent(error) from error
        return Ticket.parse(text.decode("utf-8", "replace"), insecure=self.insecure)

    def write(self, ticket: Ticket) -> Callable[[], None]:
        """Store the ticket; returns the function that removes it."""
        try:
            store = _client(self.given)
            store.set(self.key, ticket.text())
        except RuntimeError as error:
            raise self._silent(error) from error

        def remove() -> None:
            with contextlib.suppress(RuntimeError):  # torchrun and its store may have ended before us
                store.delete_key(self.key)

        return remove

    def claim(self, ticket: Ticket) -> Callable[[], None]:
        """The same as `write`: the store belongs to one run of torchrun, so no other job uses it."""
        return self.write(ticket)

    def _silent(self, error: Exception) -> RendezvousError:
        return RendezvousError(
            f"{self} does not answer",
            cause=str(error).splitlines()[0],
            next_step="set UNISONO_JOIN to a file that all ranks can read",
        )


@lru_cache(maxsize=1)
def _client(address: str) -> Any:
    """The connection to the store, one per process."""
    from torch.distributed import TCPStore  # takes a second or two, but only under torchrun on several hosts

    host, _, port = address.rpartition(":")
    return TCPStore(
        host.strip("[]"),
        int(port),
        is_master=False,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=_CONNECT_S),
    )
