"""A ticket: where the ranks of a job meet, how to know the seed, and the secret that admits.

Knows the text form and the files that hold it. Does not know connections. A ticket travels by environment
or by a file of mode 0600, never on a command line, and never shows its token in a repr or an error.

    unisono1://[::1]:4711/<SHA-256 of the seed's certificate>/<token>
    unisono1://127.0.0.1:4711/plain/<token>                        only on loopback, or with insecure=True
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from unisono.errors import RendezvousError, UsageError
from unisono.launch.address import Address
from unisono.launch.folder import check_private, make_private, own_folder

__all__ = ["Ticket", "TicketSource"]

_SCHEME: Final = "unisono1://"
_FORM: Final = re.compile(r"unisono1://([^/]+)/(plain|[0-9a-f]{64})/([0-9a-f]{64})")
_BYTES_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class Ticket:
    """Where to join and the secret that admits. An empty fingerprint means a connection without TLS."""

    address: Address
    ca_fingerprint: bytes
    token: bytes = field(repr=False)

    @classmethod
    def create(cls, address: Address, ca_fingerprint: bytes = b"") -> Ticket:
        """Make a ticket with a new token."""
        return cls(address, ca_fingerprint, new_token())

    @property
    def is_plain(self) -> bool:
        """Whether the connection to the seed is not encrypted."""
        return not self.ca_fingerprint

    def at(self, address: Address) -> Ticket:
        """The same ticket for another address of the seed."""
        return replace(self, address=address)

    def text(self) -> str:
        """The text form. It contains the token: only for an environment or a file of mode 0600."""
        return f"{_SCHEME}{self.address}/{self.ca_fingerprint.hex() or 'plain'}/{self.token.hex()}"

    @classmethod
    def parse(cls, text: str, *, insecure: bool = False) -> Ticket:
        """Read the text form. What is wrong is said without showing the text.

        Raises:
            UsageError: it is not a ticket, or a plain one that leaves this host.
        """
        found = _FORM.fullmatch(text.strip()) if len(text) <= _BYTES_MAX else None
        if found is None:
            raise UsageError(f"the ticket is malformed: {_complaint(text)}")
        address = Address.parse(found[1])
        if address.port == 0:
            raise UsageError(f"the ticket is malformed: its address {address} has no port")
        fingerprint = b"" if found[2] == "plain" else bytes.fromhex(found[2])
        if not fingerprint and not address.is_loopback and not insecure:
            raise UsageError(
                f"the ticket names {address} without a certificate",
                next_step="get a new ticket, or set insecure=True on every rank",
            )
        return cls(address, fingerprint, bytes.fromhex(found[3]))

    def __str__(self) -> str:
        return f"ticket to {self.address}"


@dataclass(frozen=True, slots=True)
class TicketSource:
    """Where a worker gets its ticket: given as text, or in a file that may still have to appear.

    A file is read again before every attempt, since it may be one that an earlier job has left. With
    `is_keyed` the file is one that ranks find by the name of their job.
    """

    given: str = field(repr=False)
    insecure: bool = False
    is_keyed: bool = False

    @classmethod
    def keyed(cls, folder: str, job: str) -> TicketSource:
        """The file of a job on this host, in a folder that only this user can enter."""
        name = f"{hashlib.sha256(job.encode()).hexdigest()[:32]}.ticket"
        return cls(str(own_folder(folder) / name), is_keyed=True)

    @property
    def path(self) -> Path | None:
        """The file, if it is one."""
        return None if self.given.startswith(_SCHEME) else Path(self.given)

    @property
    def may_be_old(self) -> bool:
        """Whether an earlier job may have left what is there, so that it is worth reading again."""
        return self.path is not None

    def __str__(self) -> str:
        return f"ticket file {self.path}" if self.path is not None else "a given ticket"

    def read(self) -> Ticket:
        """Get the ticket.

        Raises:
            FileNotFoundError: the file is not there yet.
            UsageError: it holds no ticket.
            RendezvousError: the file or its folder belongs to, or can be read by, somebody else.
        """
        if self.path is None:
            return Ticket.parse(self.given, insecure=self.insecure)
        if self.is_keyed:
            make_private(self.path.parent)
        return Ticket.parse(_read_private(self.path), insecure=self.insecure)

    def write(self, ticket: Ticket) -> Callable[[], None]:
        """Put a ticket into the file, in one step and readable by nobody else; returns how to remove it."""
        path = self.path
        assert path is not None
        if self.is_keyed:
            make_private(path.parent)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(ticket.text() + "\n")
            inode = draft.stat().st_ino
            draft.replace(path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise RendezvousError(f"the ticket could not be written to {path}", cause=str(error)) from error

        def remove() -> None:
            try:
                if path.stat().st_ino == inode:
                    path.unlink()
            except OSError:
                pass  # somebody was faster

        return remove


def new_token() -> bytes:
    """256 bits from the operating system."""
    return secrets.token_bytes(32)


def _read_private(path: Path) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        check_private(path, os.fstat(file.fileno()), stat.S_ISREG)
        return file.read(_BYTES_MAX + 1).decode("utf-8", "replace")


def _complaint(text: str) -> str:
    text = text.strip()
    if not text:
        return "it is empty"
    if not text.startswith(_SCHEME):
        return f"it does not begin with {_SCHEME}"
    if len(text) > _BYTES_MAX:
        return f"it is longer than {_BYTES_MAX} characters"
    parts = text.removeprefix(_SCHEME).split("/")
    if len(parts) != 3:
        return f"{len(parts)} parts of 3 (address, fingerprint, token)"
    if not re.fullmatch("plain|[0-9a-f]{64}", parts[1]):
        return "the fingerprint is not 64 hexadecimal digits"
    if not re.fullmatch("[0-9a-f]{64}", parts[2]):
        return f"the token is not 64 hexadecimal digits ({len(parts[2])} characters)"
    return "the address is missing"
