"""A ticket: the address of a job's seed, the fingerprint of its certificate and the secret that admits.

A ticket is passed by environment or in a file of mode 0600, never on a command line. Its token is never shown
in a repr or an error.

    unisono1://[::1]:4711/<SHA-256 of the seed's certificate>/<token>
    unisono1://127.0.0.1:4711/plain/<token>                        only on loopback, or with insecure=True
"""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from unisono.bootstrap.address import Address
from unisono.bootstrap.folder import check_private, make_private, own_folder
from unisono.bootstrap.owned_file import EndNote, FileOwned, claim, uptime_s
from unisono.core.clock import RealRuntime
from unisono.errors import RendezvousError, UsageError

__all__ = ["MalformedTicket", "Ticket", "TicketSource"]

# How long a rank 0 waits while another process owns its ticket file; that process may be ending. A longer
# wait would be wrong: ranks of this job may join the other one, and the rest of both must not form a world.
OLD_SEED_S: Final = 2.0
_PAUSE_S: Final = 0.02

_SCHEME: Final = "unisono1://"
_FORM: Final = re.compile(r"unisono1://([^/]+)/(plain|[0-9a-f]{64})/([0-9a-f]{64})")
_BYTES_MAX: Final = 1024


class MalformedTicket(UsageError):
    """The text is not a ticket, or not a complete one."""


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
        """Read the text form. Errors do not show the text.

        Raises:
            MalformedTicket: it is not a ticket.
            UsageError: it is plain, and its address is on another host.
        """
        found = _FORM.fullmatch(text.strip()) if len(text) <= _BYTES_MAX else None
        if found is None:
            raise MalformedTicket(
                f"the ticket is malformed: {_complaint(text)}",
                next_step="copy the ticket exactly as node 0 has written it",
            )
        address = Address.parse(found[1])
        if address.port == 0:
            raise MalformedTicket(
                f"the ticket is malformed: its address {address} has no port",
                next_step="copy the ticket exactly as node 0 has written it",
            )
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
    """Where a worker gets its ticket: given as text, or a file that may not exist yet.

    A file is read again before every attempt, since an earlier job may have left it. With `is_keyed` its name
    is derived from what identifies the job; `known_by` says what that is, for errors. `began` is when this
    process was started (seconds since the host was), if another job may have the same key: see `claim`.
    """

    given: str = field(repr=False)
    insecure: bool = False
    is_keyed: bool = False
    known_by: str = ""
    began: float | None = None

    @classmethod
    def keyed(
        cls, folder: str, job: str, known_by: str = "name of the job", began: float | None = None
    ) -> TicketSource:
        """The file of a job on this host, in a folder that only this user can enter."""
        name = f"{hashlib.sha256(job.encode()).hexdigest()[:32]}.ticket"
        return cls(str(own_folder(folder) / name), is_keyed=True, known_by=known_by, began=began)

    @property
    def path(self) -> Path | None:
        """The file; None for a ticket that was given as text."""
        return None if self.given.startswith(_SCHEME) else Path(self.given)

    @property
    def may_be_old(self) -> bool:
        """Whether an earlier job may have left the ticket, so that it should be read again."""
        return self.path is not None

    def __str__(self) -> str:
        return f"ticket file {self.path}" if self.path is not None else "a given ticket"

    @property
    def how_to_separate(self) -> str:
        """The next step when two jobs use this source at the same time."""
        if self.is_keyed:
            return (
                f"give each job its own {self.known_by}, or set UNISONO_JOIN to a file for each; or end the "
                "processes that an earlier job has left"
            )
        if self.may_be_old:
            return (
                "name another ticket file for each job (UNISONO_JOIN, --join or join=), or end the other job"
            )
        return "see which rank was started twice, and that no two jobs have the same ticket"

    def read(self) -> Ticket:
        """Get the ticket.

        Raises:
            FileNotFoundError: the file is not there yet.
            MalformedTicket: it holds no ticket, or not all of it yet.
            UsageError: its ticket is for another host and without encryption.
            RendezvousError: another user owns the file or its folder, or can read it.
        """
        if self.path is None:
            return Ticket.parse(self.given, insecure=self.insecure)
        if self.is_keyed:
            make_private(self.path.parent)
        return Ticket.parse(_read_private(self.path), insecure=self.insecure)

    def write(self, ticket: Ticket) -> Callable[[], None]:
        """Write the file atomically, readable by this user only; returns the function that removes it."""
        path = self._writable_path()
        temporary = self._temporary(ticket)
        try:
            inode = temporary.stat().st_ino
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise _unwritten(path, error) from error

        def remove() -> None:
            try:
                if path.stat().st_ino == inode:
                    path.unlink()
            except OSError:
                pass  # another process has removed it

        return remove

    def claim(self, ticket: Ticket) -> Callable[[], None]:
        """Write the file for as long as this process lives, or until the returned function is called.

        Of two jobs with the same key that overlap in time only the first gets the file, even if it has ended
        when the second asks: ranks of the second may have joined it.

        Raises:
            RendezvousError: another job owns or owned the file meanwhile, or it cannot be written.
        """
        path = self._writable_path()
        temporary = self._temporary(ticket)
        try:
            release = self._claimed(temporary, path)
        except OSError as error:
            raise _unwritten(path, error) from error
        finally:
            temporary.unlink(missing_ok=True)
        rival = self.rival()
        if rival:
            release()
            raise self._taken(rival)
        owner = os.getpid()

        def leave() -> None:
            atexit.unregister(leave)
            if os.getpid() != owner:
                return  # a forked child
            if self.began is not None:
                EndNote(path.with_suffix(".end")).write(str(ticket.address))
            release()

        atexit.register(leave)  # for a world that is never closed
        return leave

    def rival(self) -> str:
        """The job that owned the file until after this process was started, in words; empty if none did."""
        if self.began is None or self.path is None:
            return ""
        ended_at, pid, name = EndNote(self.path.with_suffix(".end")).read()
        if ended_at <= self.began or pid == os.getpid():
            return ""
        return (
            f"the seed of another job was alive at {name}, in process {pid}, after this process was started"
        )

    def waited_s(self) -> float:
        """Seconds since this process was started, if it was started for this job; otherwise 0."""
        return 0.0 if self.began is None else max(0.0, uptime_s() - self.began)

    def _claimed(self, temporary: Path, path: Path) -> Callable[[], None]:
        runtime = RealRuntime()
        until = runtime.now() + OLD_SEED_S
        while True:
            try:
                return claim(temporary, path)
            except FileOwned as owned:
                if runtime.now() > until:
                    where = "on another host" if owned.pid is None else f"in process {owned.pid}"
                    raise self._taken(f"the seed of another job lives at {self._other()}, {where}") from None
            runtime.sleep(_PAUSE_S)

    def _other(self) -> str:
        try:
            return str(self.read().address)
        except (OSError, UsageError, RendezvousError):
            return "an unknown address"

    def _taken(self, why: str) -> RendezvousError:
        return RendezvousError(
            f"this rank 0 cannot host its job: {why}",
            cause=f"both have the same {self.known_by}" if self.is_keyed else f"both have the {self}",
            next_step=self.how_to_separate,
        )

    def _writable_path(self) -> Path:
        assert self.path is not None
        if self.is_keyed:
            make_private(self.path.parent)
        return self.path

    def _temporary(self, ticket: Ticket) -> Path:
        assert self.path is not None
        temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(ticket.text() + "\n")
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise _unwritten(self.path, error) from error
        return temporary


def new_token() -> bytes:
    """256 random bits from the operating system."""
    return secrets.token_bytes(32)


def _unwritten(path: Path, error: OSError) -> RendezvousError:
    return RendezvousError(f"the ticket could not be written to {path}", cause=str(error))


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
        return f"it has {len(parts)} parts instead of 3 (address, fingerprint, token)"
    if not re.fullmatch("plain|[0-9a-f]{64}", parts[1]):
        return "the fingerprint is not 64 hexadecimal digits"
    if not re.fullmatch("[0-9a-f]{64}", parts[2]):
        return f"the token is not 64 hexadecimal digits ({len(parts[2])} characters)"
    return "the address is missing"
