"""A worker joins: it finds the seed, proves the token, sends its card and gets the view of the world.

Nothing secret is sent before the seed's certificate has proven to be the pinned one, and nothing about this
rank before the seed has proven the token, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

from unisono.bootstrap import limits, protocol
from unisono.bootstrap.address import Address
from unisono.bootstrap.connect import ConnectLog, connect
from unisono.bootstrap.limits import printable
from unisono.bootstrap.protocol import Frames, JoinClient, WrongToken
from unisono.bootstrap.rendezvous import Member
from unisono.bootstrap.ticket import MalformedTicket, Ticket, TicketSource
from unisono.config import Config
from unisono.core.clock import RealRuntime
from unisono.core.runtime import Deadline
from unisono.errors import ProtocolError, RendezvousError, UsageError

if TYPE_CHECKING:
    import ssl

    from unisono.bootstrap.identity import Identity, WorkerKey

__all__ = ["View", "arrive", "join", "report_ended"]

_Result = TypeVar("_Result")

_PAUSE_FIRST_S: Final = 0.02
_PAUSE_LAST_S: Final = 0.25
# The kernel reports when a process was started, and how long the host is up, in ticks of 10 ms.
_CLOCK_TICKS_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class View:
    """The world as one rank sees it. `members[r]` holds rank r's card.

    `identity` is for links with TLS and for QUIC; None if this world has none, because it is on one host or
    insecure. `secret` is what ranks prove to each other on links without TLS.
    """

    job: str
    rank: int
    size: int
    incarnation: int
    members: tuple[Member, ...]
    identity: Identity | None
    secret: bytes = field(repr=False)

    @property
    def names(self) -> list[str]:
        """The names in the ranks' certificates, by rank."""
        from unisono.bootstrap.identity import Name  # already imported where TLS is used

        return [Name(self.job, member.rank, member.incarnation).uri for member in self.members]

    @property
    def cards(self) -> list[bytes]:
        """The cards by rank."""
        return [member.card for member in self.members]


def join(
    source: TicketSource,
    *,
    rank: int,
    size: int,
    card: bytes | Callable[[Ticket], bytes],
    config: Config,
    version: str,
    deadline: Deadline,
) -> View:
    """Join the world. Blocks until every rank has joined.

    A `card` that is a function is called once a seed has proven the token, and again if that ticket turns out
    to be an old one.

    Raises:
        RendezvousError: the deadline passed, or the seed refused. The text says which ranks joined
            and which are missing, which address was tried and what it answered.
    """
    return _Worker(source, rank, size, card, config, version, deadline).join()


def report_ended(
    source: TicketSource, rank: int, how: str, *, started_at: float, version: str, deadline: Deadline
) -> None:
    """Report to the seed that the process of a rank has ended, from the launcher of a host without a seed.

    A seed that is younger than the process ignores it: the seed may belong to the next job.
    """
    _Worker(source, rank, 0, b"", Config(), version, deadline).report_ended(how, started_at)


def arrive(source: TicketSource, node: int, *, version: str, deadline: Deadline) -> Address:
    """Tell the seed that the launcher of another node has come. Blocks until there is a seed.

    Returns where the store of torch programs listens on the seed's host. A seed that is past its formation,
    and to which another launcher of this node has come, belongs to an earlier job: the ticket is read again.

    Raises:
        RendezvousError: the deadline passed, or the seed refused.
    """
    return _Worker(source, node, 0, b"", Config(), version, deadline, f"node {node}").arrive()


class _Retry(Exception):
    """This attempt failed; another one may succeed."""


class _Worker:
    """A worker and its attempts to join."""

    def __init__(
        self,
        source: TicketSource,
        rank: int,
        size: int,
        card: bytes | Callable[[Ticket], bytes],
        config: Config,
        version: str,
        deadline: Deadline,
        name: str = "",
    ) -> None:
        self._source = source
        self._name = name or f"rank {rank} of {size}"
        self._rank, self._size = rank, size
        self._make_card = card
        self._card: tuple[Ticket, bytes] | None = None
        self._config = config
        self._version = version
        self._deadline = deadline
        self._runtime = RealRuntime()
        self._began = self._runtime.now()
        self._log = ConnectLog()
        self._status = ""
        self._absence = ""  # why there is no ticket yet
        self._is_rank_taken = False  # a seed has said that another process has this rank
        self._late = ""  # the last answer, if it was that the world is already complete
        self._instance = secrets.token_hex(8)
        self._key: WorkerKey | None = None

    def join(self) -> View:
        """Join; tries until the deadline."""
        return self._retried(self._attempt)

    def arrive(self) -> Address:
        """Tell that a node's launcher has come; tries until the deadline."""
        return self._retried(self._attempt_arrival)

    def _retried(self, attempt: Callable[[Ticket], _Result]) -> _Result:
        pause = _PAUSE_FIRST_S
        while True:
            try:
                return attempt(self._ticket())
            except _Retry:
                left = self._left()
                if left <= 0:
                    raise self._timed_out() from None
                self._runtime.sleep(min(pause, left))
                pause = min(2 * pause, _PAUSE_LAST_S)

    def _ticket(self) -> Ticket:
        try:
            ticket = self._source.read()
        except FileNotFoundError:
            self._absence = "has no ticket" if self._source.path is None else "is not there"
        except MalformedTicket as error:
            if not self._source.may_be_old:
                raise
            self._absence = f"holds no whole ticket ({error.what})"  # it may be in the middle of a copy
        except OSError as error:
            raise self._error(f"the {self._source} cannot be read", str(error)) from error
        else:
            self._absence = ""
            return ticket
        raise _Retry

    def _attempt(self, ticket: Ticket) -> View:
        with self._proven(ticket) as (sock, frames):
            # Outside of `_answers`: an error here is the backend's, not the seed's.
            card = self._card_for(ticket)
            with self._answers(ticket):
                return self._ask(sock, frames, ticket, card)

    def _attempt_arrival(self, ticket: Ticket) -> Address:
        with self._proven(ticket) as (sock, frames), self._answers(ticket):
            body = protocol.encode(protocol.Arrival(self._rank, self._instance))
            sock.sendall(frames.seal(body) + body)
            while data := sock.recv(4096):
                for reply in map(protocol.parse_reply, frames.receive(data)):
                    match reply:
                        case protocol.Store(port) if 0 < port < 1 << 16:
                            return dataclasses.replace(ticket.address, port=port)
                        case protocol.Refused(reason, "taken") if self._source.may_be_old:
                            self._log.note(str(ticket.address), f"refused: {printable(reason, 400)}")
                            raise _Retry
                        case protocol.Refused():
                            raise self._refused(ticket, reply, 0.0)
                        case _:
                            raise ProtocolError("another answer than a port")
            raise ConnectionResetError("the seed closed the connection")

    def report_ended(self, how: str, started_at: float) -> None:
        """Report an ended rank if there is a seed; there is none before a job and after it."""
        with contextlib.suppress(_Retry, RendezvousError, UsageError):
            ticket = self._ticket()
            with self._proven(ticket) as (sock, frames), self._answers(ticket):
                age_s = self._runtime.now() - started_at
                body = protocol.encode(protocol.Ended(self._rank, how, age_s))
                sock.sendall(frames.seal(body) + body)
                while sock.recv(4096):
                    pass

    @contextlib.contextmanager
    def _proven(self, ticket: Ticket) -> Iterator[tuple[socket.socket, Frames]]:
        """A connection on which both sides have proven the token."""
        sock = connect(ticket.address, self._deadline, self._runtime, self._log)
        if sock is None:
            raise _Retry
        nonce = protocol.tagged_nonce(ticket.token, secrets.token_bytes(protocol.NONCE_BYTES // 2))
        with contextlib.ExitStack() as stack:
            stack.enter_context(sock)
            sock.settimeout(self._handshake_s())
            with self._answers(ticket):
                if not ticket.is_plain:
                    sock = stack.enter_context(self._secured(sock, ticket, nonce))
                frames = self._prove(sock, ticket, nonce)
            yield sock, frames

    @contextlib.contextmanager
    def _answers(self, ticket: Ticket) -> Iterator[None]:
        """Log what the seed answered, and decide whether to try again."""
        try:
            yield
        except WrongToken:
            raise self._final_or_retry(ticket, "refused the token") from None
        except ProtocolError as error:
            raise self._final_or_retry(ticket, f"is not our seed: {error}") from error
        except TimeoutError:
            self._log.note(str(ticket.address), "accepted the connection, but did not answer")
            raise _Retry from None
        except OSError as error:
            said = "closed the connection" if isinstance(error, ConnectionError) else str(error)
            if not self._status:
                said += " before it answered, as a crowded seed does"
            self._log.note(str(ticket.address), said)
            raise _Retry from None

    def _card_for(self, ticket: Ticket) -> bytes:
        if self._card is None or self._card[0] != ticket:
            made = self._make_card if isinstance(self._make_card, bytes) else self._make_card(ticket)
            if len(made) > limits.CARD_BYTES_MAX:
                raise UsageError(f"the card has {len(made)} bytes; allowed: {limits.CARD_BYTES_MAX}")
            self._card = (ticket, made)
        return self._card[1]

    def _secured(self, sock: socket.socket, ticket: Ticket, nonce: bytes) -> ssl.SSLSocket:
        """Set up TLS, and accept only the pinned certificate."""
        import ssl  # 80 ms with cryptography, paid only where TLS is used

        from unisono.bootstrap.identity import WorkerKey, fingerprint
        from unisono.bootstrap.tls_stream import client_context

        if self._key is None:
            self._key = WorkerKey()
        try:
            secured = client_context().wrap_socket(sock, server_hostname=protocol.nonce_as_name(nonce))
        except ssl.SSLError as error:
            raise ProtocolError(
                "it does not speak TLS 1.3", cause=error.reason or "the handshake broke off"
            ) from None
        certificate = secured.getpeercert(binary_form=True)
        if certificate is None or fingerprint(certificate) != ticket.ca_fingerprint:
            secured.close()
            raise ProtocolError(
                "its certificate is not the one in the ticket", cause="an old ticket, or a man in the middle"
            )
        if secured.selected_alpn_protocol() != protocol.ALPN:
            secured.close()
            raise ProtocolError("it speaks another protocol inside TLS")
        return secured

    def _prove(self, sock: socket.socket, ticket: Ticket, nonce: bytes) -> Frames:
        """Both sides prove the token."""
        binding = ticket.ca_fingerprint or protocol.NO_BINDING
        handshake = JoinClient(ticket.token, binding, nonce)
        sock.sendall(handshake.hello())
        sock.sendall(handshake.proof(_exactly(sock, handshake.greeting_bytes)))
        return handshake.frames(_exactly(sock, handshake.answer_bytes))

    def _ask(self, sock: socket.socket, frames: Frames, ticket: Ticket, card: bytes) -> View:
        """Ask to be a rank, and wait for the view."""
        body = protocol.encode(self._request(card))
        present_s = self._present_s()
        sock.sendall(frames.seal(body) + body)
        admitted: protocol.Admitted | None = None
        while True:
            left = self._left()
            if left <= 0:
                raise self._timed_out()
            sock.settimeout(left)
            try:
                data = sock.recv(65536)
            except TimeoutError:
                raise self._timed_out() from None
            if not data:
                raise ConnectionResetError("the seed closed the connection")
            for reply in map(protocol.parse_reply, frames.receive(data)):
                match reply:
                    case protocol.Refused():
                        raise self._refused(ticket, reply, present_s)
                    case protocol.Status(text):
                        self._status, self._late = printable(text, 2000), ""
                    case protocol.Admitted():
                        admitted = reply
                    case protocol.Members(members) if admitted is not None:
                        return self._view(ticket, admitted, members)
                    case _:
                        raise ProtocolError("a view without an admission")

    def _request(self, card: bytes) -> protocol.Request:
        settings = {f.name: repr(getattr(self._config, f.name)) for f in dataclasses.fields(self._config)}
        if self._key is None and self._config.links == "quic":
            from unisono.bootstrap.identity import WorkerKey  # 60 ms, paid only where certificates are used

            self._key = WorkerKey()
        return protocol.Request(
            rank=self._rank,
            size=self._size,
            version=self._version,
            config_digest=self._config.digest(),
            settings=settings,
            card=card,
            csr=self._key.request() if self._key is not None else b"",
            host=socket.gethostname(),
            pid=os.getpid(),
            instance=self._instance,
        )

    def _view(self, ticket: Ticket, admitted: protocol.Admitted, members: list[protocol.Member]) -> View:
        if [m.rank for m in members] != list(range(self._size)):
            raise ProtocolError("a view that is not of this world's size")
        identity = None
        if self._key is not None:
            identity = self._key.identity(
                admitted.certificate_pem, admitted.ca_pem, datetime.datetime.now(datetime.UTC)
            )
            if (identity.name.job, identity.name.rank) != (admitted.job, self._rank):
                raise ProtocolError("the seed certified another rank")
        return View(
            job=admitted.job,
            rank=self._rank,
            size=self._size,
            incarnation=admitted.incarnation,
            members=tuple(
                Member(m.rank, m.incarnation, m.card, printable(m.host), m.pid, printable(m.address))
                for m in members
            ),
            identity=identity,
            secret=protocol.links_secret(ticket.token),
        )

    def _final_or_retry(self, ticket: Ticket, answer: str) -> Exception:
        """A wrong seed or token is final, unless the ticket may be an old one."""
        self._log.note(str(ticket.address), answer)
        if self._source.may_be_old:
            return _Retry()
        return self._error(
            f"{self._name} could not join",
            str(self._log),
            "use the ticket of the job that runs now",
        )

    def _refused(self, ticket: Ticket, reply: protocol.Refused, present_s: float) -> Exception:
        """`present_s` is how long this process was there when it asked: the answer may have taken a while."""
        reason = printable(reply.reason, 4000)
        is_taken = reply.kind in ("taken", "taken late")
        self._is_rank_taken |= is_taken
        # The complete world may be an earlier one whose rank 0 still runs: this process was in it, or it was
        # complete before this process began to join.
        is_late = reply.kind == "own late" or (
            reply.kind == "taken late" and present_s <= reply.formed_s + _CLOCK_TICKS_S
        )
        if is_late and self._source.may_be_old:
            self._late = f"the seed at {ticket.address} refused it: {reason}"
            self._log.note(str(ticket.address), f"refused: {reason}")
            return _Retry()
        what = f"the seed at {ticket.address} refused {self._name}"
        if reply.kind == "over":
            what = f"{self._name} cannot join"
            return self._error(what, reason, "see why it ended; every rank of a job calls uni.init()")
        return self._error(what, reason, self._source.how_to_separate if is_taken else None)

    def _timed_out(self) -> RendezvousError:
        elapsed = self._runtime.now() - self._began
        what = f"{self._name} could not join within {elapsed:.1f} s"
        if self._late and not self._absence:
            return self._error(what, self._late, self._source.how_to_separate)
        if self._status:
            return self._error(
                what, self._status, "see why the missing ranks have not started, or raise timeout="
            )
        if self._absence:
            cause = f"rank 0 has not started its seed: the {self._source} {self._absence}"
            if self._log:
                cause += f"; before, {self._log}"
            if rival := self._source.rival():
                cause += f"; {rival}"
            known_by = self._source.known_by or "ticket file"
            is_shared = self._is_rank_taken or rival
            step = f"see whether rank 0 was started, with the same {known_by}"
            return self._error(what, cause, self._source.how_to_separate if is_shared else step)
        return self._error(
            what, f"tried {self._log}", "see whether the seed runs, and whether this host can reach it"
        )

    def _error(self, what: str, cause: str, next_step: str | None = None) -> RendezvousError:
        return RendezvousError(what, cause=cause, next_step=next_step)

    def _present_s(self) -> float:
        """Seconds since this process began to join, or was started for this job if that is known."""
        return max(self._runtime.now() - self._began, self._source.waited_s())

    def _left(self) -> float:
        left = self._deadline.remaining(self._runtime.now())
        return 1e9 if left is None else left

    def _handshake_s(self) -> float:
        # Also a seed that delays answers to failing addresses answers within this time.
        return max(0.001, min(self._left(), limits.UNPROVEN_S + limits.FAILURE_DELAY_S))


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise ConnectionResetError("the connection was closed")
        data += piece
    return data
