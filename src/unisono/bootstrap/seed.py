"""The seed: the service where the ranks of a job meet, and that is off the data path afterwards.

Knows sockets and connections; one thread serves them all. Does not decide: who may wait is the gate's
business, who speaks rightly the protocol's, who may join the formation's. What goes wrong with one connection
ends that connection.
"""

from __future__ import annotations

import datetime
import errno
import logging
import os
import secrets
import selectors
import socket
import ssl
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Self

from unisono.bootstrap import limits, protocol
from unisono.bootstrap.address import Address
from unisono.bootstrap.admission import AdmissionLimiter
from unisono.bootstrap.descriptors import is_exhausted, limit
from unisono.bootstrap.protocol import JoinServer, WrongToken
from unisono.bootstrap.rendezvous import Formation, Join, Membership
from unisono.bootstrap.ticket import Ticket
from unisono.bootstrap.tls_stream import PlainWire, TlsStream, TlsWire, server_context
from unisono.core.clock import RealRuntime
from unisono.errors import ProtocolError, RendezvousError, UsageError

if TYPE_CHECKING:
    from unisono.bootstrap.identity import Authority

__all__ = ["Seed"]

_log = logging.getLogger("unisono.launch")

# How often workers hear who is missing while they wait.
_STATUS_INTERVAL_S: Final = 0.25
_TICK_S: Final = 0.1
# A refused worker may still be sending; closing at once would destroy the reason on its way.
_LINGER_S: Final = 1.0
_LINGER_BYTES_MAX: Final = 1 << 20
_ACCEPTS_PER_ROUND: Final = 64
_PIECE_BYTES: Final = 16 * 1024
# A worker whose host has vanished is noticed within 5 s, so that its rank is reported as missing.
_SOCKET_OPTIONS: Final = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5000),
)


class Seed:
    """Serves one formation from `start` to `close`.

    The constructor binds and listens, without a thread, so that a launcher can fork first. `ticket` is what
    workers need. `counts` says what happened at the port. Without `tls`, the addresses decide: loopback
    needs none.
    """

    def __init__(
        self,
        size: int,
        *,
        version: str,
        address: Address | None = None,
        advertise: Address | None = None,
        insecure: bool = False,
        tls: bool | None = None,
    ) -> None:
        address = address or Address("127.0.0.1")
        _check_exposure(address, advertise, insecure)
        self.job = secrets.token_hex(16)
        self.counts: Counter[str] = Counter()
        self._runtime = RealRuntime()
        self._began = self._runtime.now()
        self._formed_at: float | None = None
        self._formation = Formation(size, version)
        self._gate = AdmissionLimiter()
        self._authority: Authority | None = None
        self._context: ssl.SSLContext | None = None
        is_local = address.is_loopback and (advertise is None or advertise.is_loopback)
        if (not is_local if tls is None else tls) and not insecure:
            from unisono.bootstrap.identity import Authority  # costs 60 ms: only who leaves the host pays

            self._authority = Authority(self.job, _wall_clock())
            self._context = server_context(
                self._authority.certificate_pem, self._authority.key_pem(), self._is_served
            )
        self._listener = _listen(address)
        self._port: int = self._listener.getsockname()[1]
        self._bound = address
        public = advertise or address
        self.ticket = Ticket.create(
            Address(public.host, public.port or self._port),
            self._authority.fingerprint if self._authority is not None else b"",
        )
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, _Connection] = {}
        self._next_key = 0
        self._roll_body: bytes | None = None
        self._next_tick = 0.0
        self._next_status = 0.0
        self._status = ""
        self._held: dict[
            int, None
        ] = {}  # connections that wait for the answer to a wrong word, in their order
        self._tags: set[bytes] = set()  # first words of workers
        self._refused: set[str] = set()  # instances whose refusal was logged
        self._closing = False
        self._close_reason = ""
        self._trouble = ""  # why not everybody can be served
        self._news: deque[tuple[int, str]] = deque()  # ranks that have ended, and how
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def local_ticket(self) -> Ticket:
        """The ticket for ranks of this host, who may not reach it by the advertised address."""
        if self._bound.is_wildcard:
            return self.ticket
        return self.ticket.at(Address(self._bound.host, self._port))

    def start(self) -> Self:
        """Begin to serve."""
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._bell, selectors.EVENT_READ, self._ring)
        self._thread = threading.Thread(target=self._serve, name="unisono-seed", daemon=True)
        self._thread.start()
        return self

    def report(self) -> str:
        """Who joined, who is missing and who was refused, in one sentence."""
        with self._lock:
            return self._standing()

    @property
    def is_formed(self) -> bool:
        """Whether every rank has joined."""
        with self._lock:
            return self._formation.is_formed

    def lose(self, rank: int, how: str) -> None:
        """Hear from a launcher that a rank's process has ended: if it had not joined, nobody waits for it."""
        with self._lock:
            if self._thread is not None and not self._closing:
                self._news.append((rank, how))
                os.eventfd_write(self._bell, 1)

    def close(self, reason: str = "") -> None:
        """Stop serving. Workers that still wait are told the reason and who is missing."""
        if self._thread is None:
            self._listener.close()
            if not self._closing:
                os.close(self._bell)
                self._selector.close()
            self._closing = True
            return
        with self._lock:
            if not self._closing:
                self._close_reason = reason
                self._closing = True
                os.eventfd_write(self._bell, 1)
        self._thread.join(2 * _LINGER_S)

    def __enter__(self) -> Self:
        if self._thread is None:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Seed at {self.ticket.address}>"

    def _standing(self) -> str:
        roll, text = self._formation.roll()
        notes = (self._gate.crowd(), self._trouble) if roll is None else ()
        return "; ".join([text, *filter(None, notes)])

    # -- the serving thread --------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._closing:
                for key, _ in self._selector.select(_TICK_S):
                    self._survive(key.data)
                self._survive(self._tick)
            self._survive(self._farewell)
        finally:
            for connection in list(self._connections.values()):
                self._drop(connection)
            self._selector.close()
            self._listener.close()
            os.close(self._bell)

    def _survive(self, act: Callable[[], None]) -> None:
        """Do something; a mistake of ours must not end the formation."""
        try:
            with self._lock:
                act()
        except Exception:
            self.counts["mistakes"] += 1
            _log.exception("the seed failed")

    def _ring(self) -> None:
        os.eventfd_read(self._bell)
        while self._news:
            self._lose(*self._news.popleft())

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_ROUND):
            try:
                sock, place = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                self._make_room(error)
                return
            try:
                self._welcome(sock, str(place[0]))
            except OSError:
                sock.close()  # gone already

    def _make_room(self, error: OSError) -> None:
        """No descriptor is free: a stranger goes. Otherwise wait for the next tick."""
        victim = self._gate.any()
        if victim is not None and is_exhausted(error):
            self._evict(victim)
            return
        trouble = f"the seed cannot take more connections: {error.strerror}"
        if is_exhausted(error):
            trouble += f"; its process may have {limit()} (ulimit -n)"
        if not self._trouble:
            _log.warning("%s", trouble)
        self._trouble = trouble
        self._selector.unregister(self._listener)

    def _welcome(self, sock: socket.socket, host: str) -> None:
        sock.setblocking(False)
        now = self._runtime.now()
        key = self._next_key
        self._next_key += 1
        self.counts["connections"] += 1
        victim = self._gate.arrive(key, host, now)
        if victim is not None:
            self._evict(victim)
        binding = protocol.NO_BINDING if self._authority is None else self._authority.fingerprint
        guest = JoinServer(self.ticket.token, binding, secrets.token_bytes(protocol.NONCE_BYTES))
        connection = _Connection(key, sock, host, guest, now + limits.UNPROVEN_S)
        self._connections[key] = connection
        # In a crowd its first word is here already: a worker's tag is seen before anybody can push it out.
        self._guarded(connection, self._exchange)

    def _evict(self, key: int) -> None:
        self.counts["evicted"] += 1
        if self.counts["evicted"] == limits.CROWD_MIN:
            _log.warning("%s", self._gate.crowd())
        self._gate.turn_away(key)
        self._drop(self._connections[key])

    def _wire(self) -> TlsStream:
        return PlainWire() if self._context is None else TlsWire(self._context)

    def _is_served(self, name: str) -> bool:
        """Whether a TLS handshake is worth its cost: always, but in a crowd only with a tag."""
        is_tagged = protocol.is_tagged(self.ticket.token, protocol.nonce_from_name(name))
        return is_tagged or not self._gate.is_crowded(self._runtime.now())

    def _recognise(self, connection: _Connection) -> None:
        """Whoever shows the tag of a worker, or has proven the token, is no stranger any more."""
        nonce = protocol.nonce_from_name(connection.wire.name) if connection.wire is not None else b""
        nonce = nonce or connection.guest.nonce_heard
        is_known = connection.guest.is_proven
        if (
            not is_known
            and nonce
            and nonce not in self._tags
            and protocol.is_tagged(self.ticket.token, nonce)
        ):
            if len(self._tags) == limits.TAGS_REMEMBERED_MAX:
                self._tags.clear()
            self._tags.add(nonce)
            is_known = True
        if is_known:
            connection.is_known = True
            self._gate.depart(connection.key)
            for level, option, value in _SOCKET_OPTIONS:
                connection.sock.setsockopt(level, option, value)

    def _watch(self, connection: _Connection) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_to_write else 0)
        if events == connection.events:
            return

        def act() -> None:
            self._guarded(connection, self._exchange)

        if connection.events:
            self._selector.modify(connection.sock, events, act)
        else:
            self._selector.register(connection.sock, events, act)
        connection.events = events

    def _guarded(self, connection: _Connection, act: Callable[[_Connection], None]) -> None:
        """Do something with a connection; what fails ends this connection only."""
        if connection.key not in self._connections:
            return
        try:
            act(connection)
            if connection.key in self._connections:
                connection.flush()
                self._settle(connection)
        except WrongToken:
            self._fail(connection, "wrong token", "it does not know the token", protocol.NO_ENTRY)
        except ProtocolError as error:
            reason = f"{error.what}: {error.cause}" if error.cause else error.what
            self._fail(connection, "garbage", reason, b"")
        except OSError:
            self.counts["broken"] += 1
            self._drop(connection)
        except Exception:  # a mistake of ours must not end the formation
            _log.exception("the seed failed with a connection")
            self._drop(connection)

    def _exchange(self, connection: _Connection) -> None:
        try:
            raw = connection.sock.recv(4096)
        except BlockingIOError:
            return
        if not raw:
            self._drop(connection)
            return
        connection.bytes_in += len(raw)
        if connection.is_ending:
            if connection.bytes_in > _LINGER_BYTES_MAX:
                self._drop(connection)
            return
        if not connection.guest.is_proven and connection.bytes_in > limits.UNPROVEN_BYTES_MAX:
            raise ProtocolError(f"more than {limits.UNPROVEN_BYTES_MAX} bytes before the token was proven")
        if connection.wire is None:
            connection.wire = self._wire()  # idle strangers do not cost one
        answer, bodies = connection.guest.receive(connection.wire.receive(raw))
        if answer:
            connection.send_plain(answer)
        for body in bodies:
            self._consider(connection, body)

    def _consider(self, connection: _Connection, body: bytes) -> None:
        """A holder of the token asks to be a rank."""
        if connection.join is not None or connection.is_ending:
            raise ProtocolError("more than one request")
        request = protocol.parse_request(body)
        if isinstance(request, protocol.Ended):
            # A ticket file may be read after another job has put its ticket there: a process that is older
            # than this seed may have been a rank of an earlier job, and its end says nothing about this one.
            if request.age_s < connection.proven_at - self._began:
                self._lose(request.rank, request.how)
            self._end(connection)
            return
        join = _join(request, connection.host)
        reason = self._formation.offer(connection.key, join)
        if reason is not None:
            self._refuse(connection, join, reason, self._formation.refusal(join))
            return
        connection.join = join
        connection.expires_at = None
        self.counts["admitted"] += 1
        if self._authority is not None:
            incarnation = self._formation.incarnation(join.rank)
            try:
                connection.certificate_pem = self._authority.certify(
                    request.csr, join.rank, incarnation, _wall_clock()
                )
            except ProtocolError as error:
                self._formation.leave(connection.key)
                self._formation.note_refusal(join, str(error))
                self._refuse(connection, join, str(error))
                return
        for key, why in self._formation.misfits():
            misfit = self._connections[key]
            assert misfit.join is not None
            self._refuse(misfit, misfit.join, why)
        roll, _ = self._formation.roll()
        if roll is None:
            connection.send_frame(protocol.encode(protocol.Status(self._standing())))
        else:
            self._publish(roll)

    def _publish(self, roll: Membership) -> None:
        """Everybody has come: give each its certificate, and all the same view."""
        self.counts["formed"] += 1
        self._formed_at = self._runtime.now()
        members = [
            protocol.Member(m.rank, m.incarnation, m.card, m.host, m.pid, m.address) for m in roll.members
        ]
        self._roll_body = protocol.encode(protocol.Members(members))
        ca_pem = self._authority.certificate_pem if self._authority is not None else b""
        for connection in list(self._connections.values()):
            if connection.join is None or connection.is_ending:
                continue
            incarnation = self._formation.incarnation(connection.join.rank)
            connection.send_frame(
                protocol.encode(protocol.Admitted(self.job, incarnation, ca_pem, connection.certificate_pem))
            )
            connection.send_frame(self._roll_body)
            self._end(connection, linger_s=limits.REQUEST_S)
        _log.info("the world of %d ranks is formed", roll.size)

    def _lose(self, rank: int, how: str) -> None:
        """Somebody will not come: whoever waits hears so now."""
        reason = self._formation.lose(rank, how)
        if reason is None:
            return
        for connection in list(self._connections.values()):
            if connection.join is not None and not connection.is_ending:
                self._refuse(connection, connection.join, reason, "over")

    def _refuse(
        self, connection: _Connection, join: Join, reason: str, kind: protocol.Refusal = "misfit"
    ) -> None:
        self.counts["refused"] += 1
        # Who may have an old ticket asks again and again; and what ends all is said by each itself.
        if join.instance not in self._refused and kind != "over":
            if len(self._refused) == limits.REFUSED_REMEMBERED_MAX:
                self._refused.clear()
            self._refused.add(join.instance)
            _log.warning("join refused: %s: %s", join, reason)
        formed_s = 0.0 if self._formed_at is None else self._runtime.now() - self._formed_at
        connection.send_frame(protocol.encode(protocol.Refused(reason, kind, formed_s)))
        self._end(connection)

    def _fail(self, connection: _Connection, kind: str, reason: str, answer: bytes) -> None:
        """Somebody said a wrong word. Who says many waits for the answer; nobody else does."""
        self.counts[kind] += 1
        now = self._runtime.now()
        delay_s = self._gate.fail(connection.host, now)
        self._gate.turn_away(connection.key)
        connection.answer = answer
        connection.expires_at = now + delay_s
        self._held[connection.key] = None
        if delay_s == 0:
            self._answer(connection)
        else:
            self._ignore(connection)
            if len(self._held) > limits.FAILURES_HELD_MAX:
                self._drop(self._connections[next(iter(self._held))])
        # A stranger must not be able to fill a disk.
        if self.counts["wrong token"] + self.counts["garbage"] <= limits.FAILURES_PER_MINUTE_MAX:
            _log.warning("a stranger from %s: %s", connection.host, reason)
        if kind == "wrong token":
            self._formation.note_refusal(f"somebody from {connection.host}", reason)

    def _answer(self, connection: _Connection) -> None:
        """Say no, if there is a word for it, and end the connection."""
        del self._held[connection.key]
        if not connection.answer:
            self._drop(connection)
            return
        connection.send_plain(connection.answer)
        self._end(connection)

    def _ignore(self, connection: _Connection) -> None:
        if connection.events:
            self._selector.unregister(connection.sock)
            connection.events = 0

    def _settle(self, connection: _Connection) -> None:
        """Note what an exchange has changed."""
        if not connection.is_known:
            self._recognise(connection)
        if connection.guest.is_proven and not connection.was_proven:
            connection.was_proven = True
            connection.proven_at = self._runtime.now()
            self.counts["proven"] += 1
            if connection.join is None and not connection.is_ending:
                connection.expires_at = self._runtime.now() + limits.REQUEST_S
        if connection.is_ending and not connection.wants_to_write and not connection.is_shut:
            connection.is_shut = True
            connection.sock.shutdown(socket.SHUT_WR)
        self._watch(connection)

    def _end(self, connection: _Connection, linger_s: float = _LINGER_S) -> None:
        """Send what is left, then close."""
        connection.is_ending = True
        connection.bytes_in = 0
        connection.expires_at = self._runtime.now() + linger_s
        self._guarded(connection, lambda _: None)

    def _drop(self, connection: _Connection) -> None:
        if self._connections.pop(connection.key, None) is None:
            return
        self._gate.depart(connection.key)
        self._held.pop(connection.key, None)
        if connection.join is not None:
            self._formation.leave(connection.key)
        self._ignore(connection)
        connection.sock.close()

    def _tick(self) -> None:
        now = self._runtime.now()
        if now < self._next_tick:
            return
        self._next_tick = now + _TICK_S
        if self._listener not in self._selector.get_map():
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        for connection in list(self._connections.values()):
            if connection.expires_at is None or now < connection.expires_at:
                continue
            if connection.key in self._held:
                self._answer(connection)
                continue
            self.counts["lingered" if connection.is_ending else "silent"] += 1
            self._gate.turn_away(connection.key)
            self._drop(connection)
        if now >= self._next_status and not self._formation.is_formed:
            self._next_status = now + _STATUS_INTERVAL_S
            self._tell_status()

    def _tell_status(self) -> None:
        # A crowd is told again when it has doubled.
        crowd = self.counts["evicted"].bit_length() if self._gate.crowd() else 0
        status = repr((self._formation.ranks_joined(), self.counts["refused"], crowd, self._trouble))
        if status == self._status:
            return
        self._status = status
        body = protocol.encode(protocol.Status(self._standing()))
        for connection in list(self._connections.values()):
            if connection.join is not None and not connection.is_ending:
                connection.send_frame(body)
                self._guarded(connection, lambda _: None)

    def _farewell(self) -> None:
        """Tell workers that still wait why nobody serves them any more, and let views get out."""
        if not self._formation.is_formed:
            why = f"{self._close_reason or 'the seed was closed'}; {self._standing()}"
            for connection in list(self._connections.values()):
                if connection.join is not None and not connection.is_ending:
                    connection.send_frame(protocol.encode(protocol.Refused(why)))
                    self._end(connection)
        if self._listener in self._selector.get_map():
            self._selector.unregister(self._listener)
        self._listener.close()
        ends_at = self._runtime.now() + _LINGER_S
        while any(c.is_ending for c in self._connections.values()):
            left = ends_at - self._runtime.now()
            if left <= 0:
                return
            for key, _ in self._selector.select(left):
                key.data()


class _Connection:
    """One connection to the join port."""

    def __init__(
        self,
        key: int,
        sock: socket.socket,
        host: str,
        guest: JoinServer,
        expires_at: float,
    ) -> None:
        self.key = key
        self.sock = sock
        self.host = host
        self.wire: TlsStream | None = None  # made for the first byte
        self.guest = guest
        self.expires_at: float | None = expires_at
        self.events = 0
        self.bytes_in = 0
        self.is_known = False
        self.was_proven = False
        self.proven_at = 0.0
        self.answer = b""
        self.is_ending = False
        self.is_shut = False
        self.join: Join | None = None
        self.certificate_pem = b""
        self._plain: deque[memoryview] = deque()
        self._raw = b""

    @property
    def wants_to_write(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._raw or self._plain)

    def send_plain(self, data: bytes) -> None:
        """Queue bytes."""
        self._plain.append(memoryview(data))

    def send_frame(self, body: bytes) -> None:
        """Queue a frame; the body, which may be everybody's, is not copied before its turn."""
        assert self.guest.frames is not None
        self.send_plain(self.guest.frames.seal(body))
        self.send_plain(body)

    def flush(self) -> None:
        """Send what the socket takes."""
        while self.wire is not None:
            if not self._raw:
                self._raw = self.wire.to_send()
            if not self._raw:
                if not self._plain or not self.wire.is_open:
                    return
                piece = self._plain.popleft()
                if len(piece) > _PIECE_BYTES:
                    self._plain.appendleft(piece[_PIECE_BYTES:])
                    piece = piece[:_PIECE_BYTES]
                self.wire.send(piece)
                continue
            try:
                sent = self.sock.send(self._raw)
            except BlockingIOError:
                return
            self._raw = self._raw[sent:]


def _join(request: protocol.Request, host: str) -> Join:
    return Join(
        rank=request.rank,
        size=request.size,
        version=request.version,
        config_digest=request.config_digest,
        settings=request.settings,
        card=request.card,
        host=limits.printable(request.host),
        pid=request.pid,
        address=host,
        instance=request.instance,
    )


def _check_exposure(address: Address, advertise: Address | None, insecure: bool) -> None:
    if address.is_wildcard:
        if insecure:
            raise UsageError(
                "insecure=True with a wildcard address; name one address", next_step="name one address"
            )
        if advertise is None:
            raise UsageError(
                f"{address.host} is every address of this host, so nobody knows where to join",
                next_step="name the address to advertise too",
            )
        _log.warning("the seed listens on every address of this host, as asked")
    public = advertise or address
    if insecure and not public.is_loopback:
        _log.warning("insecure: ranks join and talk without encryption, at %s", public.host)


def _listen(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        info = socket.getaddrinfo(address.host, address.port, family, socket.SOCK_STREAM)
        listener.bind(info[0][4])
        listener.listen(1024)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        what = f"the seed cannot listen on {address}"
        if error.errno == errno.EADDRINUSE:
            raise RendezvousError(
                what, cause="the port is in use", next_step="leave the port out: a free one is taken"
            ) from error
        raise RendezvousError(what, cause=error.strerror or str(error)) from error
    return listener


def _wall_clock() -> datetime.datetime:
    """For certificates only: everything else uses the monotonic clock."""
    return datetime.datetime.now(datetime.UTC)
