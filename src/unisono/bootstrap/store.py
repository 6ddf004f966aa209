"""A ticket in a key-value store of torch: how ranks meet under torchrun, or in a group of torch.distributed.

Every process that can reach the store can read and write it, and nothing is encrypted on the way. So the
ticket is as safe there as torch's job itself, unless the ranks know a secret that the store does not: then it
is sealed. torch is imported only for the store of torchrun, since under torchrun it is installed.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Protocol

from unisono.bootstrap.ticket import MalformedTicket, Ticket, TicketSource
from unisono.errors import RendezvousError

__all__ = ["KeyValueStore", "StoreSource"]

_SEALED: Final = "sealed:"
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
    secret: Callable[[], bytes] = field(default=bytes, repr=False)
    """What the ranks know, but not the store: a ticket with a certificate is sealed with it. Empty: none."""

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
            UsageError: the value is not a ticket, or not sealed as it must be.
            RendezvousError: the store does not answer.
        """
        try:
            store = self.connect()
            if not store.check([self.key]):
                raise FileNotFoundError(self.key)
            text = store.get(self.key)
        except RuntimeError as error:
            raise self._silent(error) from error
        return self._opened(text.decode("utf-8", "replace"))

    def write(self, ticket: Ticket) -> Callable[[], None]:
        """Store the ticket; returns the function that removes it."""
        try:
            store = self.connect()
            store.set(self.key, self._sealed(ticket))
        except RuntimeError as error:
            raise self._silent(error) from error

        def remove() -> None:
            with contextlib.suppress(RuntimeError):  # the store may have ended before us
                store.delete_key(self.key)

        return remove

    def claim(self, ticket: Ticket) -> Callable[[], None]:
        """The same as `write`: the store belongs to one job, so no other uses it."""
        return self.write(ticket)

    def _sealed(self, ticket: Ticket) -> str:
        # A plain ticket is for this host, or the user chose insecure=True.
        secret = b"" if ticket.is_plain else self.secret()
        if not secret:
            return ticket.text()
        from unisono.bootstrap.seal import seal  # as for TLS, paid only between hosts

        return _SEALED + seal(ticket.text(), secret)

    def _opened(self, text: str) -> Ticket:
        if text.startswith(_SEALED):
            from unisono.bootstrap.seal import unseal

            try:
                text = unseal(text.removeprefix(_SEALED), self.secret())
            except ValueError:
                raise MalformedTicket("the ticket was not sealed by a rank of this job") from None
            return Ticket.parse(text, insecure=self.insecure)
        ticket = Ticket.parse(text, insecure=self.insecure)
        if not ticket.is_plain and self.secret():
            raise MalformedTicket("the ticket is not sealed, so it may be anybody's")
        return ticket

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
