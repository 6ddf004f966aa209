"""The join port: the seed's listening socket, its connections and their handshakes.

The port decides which connections stay open; requests of those that have proven the token go to its owner. An
error on one connection ends that connection only.
"""

from __future__ import annotations

import errno
import logging
import secrets
import selectors
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from unisono.bootstrap import limits, protocol
from unisono.bootstrap.address import Address
from unisono.bootstrap.admission import AdmissionLimiter
from unisono.bootstrap.descriptors import is_exhausted, limit
from unisono.bootstrap.join_connection import JoinConnection
from unisono.bootstrap.protocol import JoinServer, WrongToken
from unisono.bootstrap.tls_stream import PlainStream, TlsStream, server_context
from unisono.core.clock import RealRuntime
from unisono.errors import ProtocolError, RendezvousError

if TYPE_CHECKING:
    from unisono.bootstrap.identity import Authority

__all__ = ["LINGER_S", "JoinPort", "PortOwner", "listen"]

_log = logging.getLogger("unisono.bootstrap")

# A refused worker may still be sending; closing at once would destroy the reason on its way.
LINGER_S: Final = 1.0
_LINGER_BYTES_MAX: Final = 1 << 20
_ACCEPTS_PER_ROUND: Final = 64
# A worker whose host has vanished is noticed within 5 s, so that its rank is reported as missing.
_SOCKET_OPTIONS: Final = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5000),
)


class PortOwner(Protocol):
    """What the port reports; all calls come from the thread that serves it."""

    def on_request(self, connection: JoinConnection, body: bytes) -> None:
        """A connection that has proven the token sent a frame.

        Raises:
            ProtocolError: the frame is wrong; the port ends the connection.
        """

    def on_wrong_token(self, host: str, reason: str) -> None:
        """A connection from `host` failed to prove the token."""

    def on_dropped(self, connection: JoinConnection) -> None:
        """A connection is closed."""


class JoinPort:
    """Serves a listening socket with a selector. `counts` says what happened at the port."""

    def __init__(
        self, owner: PortOwner, listener: socket.socket, token: bytes, authority: Authority | None
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.connections: dict[int, JoinConnection] = {}
        self.trouble = ""  # why not every connection can be accepted
        self._owner = owner
        self._listener = listener
        self._token = token
        self._runtime = RealRuntime()
        self._limiter = AdmissionLimiter()
        self._selector = selectors.DefaultSelector()
        self._binding = protocol.NO_BINDING
        self._context: ssl.SSLContext | None = None
        if authority is not None:
            self._binding = authority.fingerprint
            self._context = server_context(authority.certificate_pem, authority.key_pem(), self._is_served)
        self._next_key = 0
        self._held: dict[
            int, None
        ] = {}  # connections that wait for the answer to a failed handshake, in order
        self._tags: set[bytes] = set()  # nonces of workers that were seen

    def watch(self, descriptor: int, act: Callable[[], None]) -> None:
        """Have `ready` return `act` whenever a descriptor of the owner is readable."""
        self._selector.register(descriptor, selectors.EVENT_READ, act)

    def ready(self, timeout_s: float) -> list[Callable[[], None]]:
        """Wait for events; the calls that handle them."""
        return [key.data for key, _ in self._selector.select(timeout_s)]

    def crowd(self) -> str:
        """Where a crowd of strangers comes from, in words; empty if few were dropped."""
        return self._limiter.crowd()

    def waiting(self) -> list[JoinConnection]:
        """Connections of ranks that are admitted and wait for the world to form."""
        return [c for c in self.connections.values() if c.join is not None and not c.is_ending]

    def flush(self, connection: JoinConnection) -> None:
        """Send what is queued, as far as the socket takes it."""
        self._contain(connection, lambda _: None)

    def end(self, connection: JoinConnection, linger_s: float = LINGER_S) -> None:
        """Send what is queued, then close."""
        connection.is_ending = True
        connection.bytes_in = 0
        connection.expires_at = self._runtime.now() + linger_s
        self.flush(connection)

    def drop(self, connection: JoinConnection) -> None:
        """Close a connection at once."""
        if self.connections.pop(connection.key, None) is None:
            return
        self._limiter.depart(connection.key)
        self._held.pop(connection.key, None)
        self._owner.on_dropped(connection)
        self._unwatch(connection)
        connection.sock.close()

    def listen_again(self) -> None:
        """Accept connections: at the start, and after descriptors had run out."""
        if self._listener not in self._selector.get_map():
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def expire(self, now: float) -> None:
        """End connections whose time is over."""
        for connection in list(self.connections.values()):
            if connection.expires_at is None or now < connection.expires_at:
                continue
            if connection.key in self._held:
                self._answer(connection)
                continue
            self.counts["lingered" if connection.is_ending else "silent"] += 1
            self._limiter.turn_away(connection.key)
            self.drop(connection)

    def stop(self) -> None:
        """Accept nothing more; wait until ending connections have sent what is queued, or LINGER_S."""
        if self._listener in self._selector.get_map():
            self._selector.unregister(self._listener)
        self._listener.close()
        ends_at = self._runtime.now() + LINGER_S
        while any(c.is_ending for c in self.connections.values()):
            left = ends_at - self._runtime.now()
            if left <= 0:
                return
            for act in self.ready(left):
                act()

    def close(self) -> None:
        """Close everything at once."""
        for connection in list(self.connections.values()):
            self.drop(connection)
        self._selector.close()
        self._listener.close()

    # -- strangers: connections that have not proven the token ------------------------------------------

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_ROUND):
            try:
                sock, source = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                self._on_accept_failed(error)
                return
            try:
                self._admit(sock, str(source[0]))
            except OSError:
                sock.close()  # gone already

    def _on_accept_failed(self, error: OSError) -> None:
        """Out of descriptors: drop a stranger. Without any, stop listening until the next tick."""
        victim = self._limiter.any()
        if victim is not None and is_exhausted(error):
            self._evict(victim)
            return
        trouble = f"the seed cannot accept more connections: {error.strerror}"
        if is_exhausted(error):
            trouble += f"; its process may have {limit()} (ulimit -n)"
        if not self.trouble:
            _log.warning("%s", trouble)
        self.trouble = trouble
        self._selector.unregister(self._listener)

    def _admit(self, sock: socket.socket, host: str) -> None:
        sock.setblocking(False)
        now = self._runtime.now()
        key = self._next_key
        self._next_key += 1
        self.counts["connections"] += 1
        victim = self._limiter.arrive(key, host, now)
        if victim is not None:
            self._evict(victim)
        handshake = JoinServer(self._token, self._binding, secrets.token_bytes(protocol.NONCE_BYTES))
        connection = JoinConnection(key, sock, host, handshake, now + limits.UNPROVEN_S)
        self.connections[key] = connection
        # In a crowd its hello has arrived already: a worker's tag is seen before it can be evicted.
        self._contain(connection, self._receive)

    def _evict(self, key: int) -> None:
        self.counts["evicted"] += 1
        if self.counts["evicted"] == limits.CROWD_MIN:
            _log.warning("%s", self.crowd())
        self._limiter.turn_away(key)
        self.drop(self.connections[key])

    def _is_served(self, name: str) -> bool:
        """Whether a TLS handshake is worth its cost: always, but in a crowd only with a worker's tag."""
        is_tagged = protocol.is_tagged(self._token, protocol.nonce_from_name(name))
        return is_tagged or not self._limiter.is_crowded(self._runtime.now())

    def _recognise(self, connection: JoinConnection) -> None:
        """A connection that shows a new worker's tag, or has proven the token, is no stranger any more."""
        nonce = protocol.nonce_from_name(connection.stream.name) if connection.stream is not None else b""
        nonce = nonce or connection.handshake.worker_nonce
        is_known = connection.handshake.is_proven
        if not is_known and nonce and nonce not in self._tags and protocol.is_tagged(self._token, nonce):
            if len(self._tags) == limits.TAGS_REMEMBERED_MAX:
                self._tags.clear()
            self._tags.add(nonce)
            is_known = True
        if is_known:
            connection.is_known = True
            self._limiter.depart(connection.key)
            for level, option, value in _SOCKET_OPTIONS:
                connection.sock.setsockopt(level, option, value)

    def _fail(self, connection: JoinConnection, kind: str, reason: str, answer: bytes) -> None:
        """A handshake failed. An address that fails often waits for its answers; no other one does."""
        self.counts[kind] += 1
        now = self._runtime.now()
        delay_s = self._limiter.fail(connection.host, now)
        self._limiter.turn_away(connection.key)
        connection.answer = answer
        connection.expires_at = now + delay_s
        self._held[connection.key] = None
        if delay_s == 0:
            self._answer(connection)
        else:
            self._unwatch(connection)
            if len(self._held) > limits.FAILURES_HELD_MAX:
                self.drop(self.connections[next(iter(self._held))])
        # A stranger must not be able to fill a disk.
        if self.counts["wrong token"] + self.counts["garbage"] <= limits.FAILURES_PER_MINUTE_MAX:
            _log.warning("a stranger from %s: %s", connection.host, reason)
        if kind == "wrong token":
            self._owner.on_wrong_token(connection.host, reason)

    def _answer(self, connection: JoinConnection) -> None:
        """Send the answer to a failed handshake, if there is one, and end the connection."""
        del self._held[connection.key]
        if not connection.answer:
            self.drop(connection)
            return
        connection.send_plain(connection.answer)
        self.end(connection)

    # -- one connection ---------------------------------------------------------------------------------

    def _contain(self, connection: JoinConnection, act: Callable[[JoinConnection], None]) -> None:
        """Run `act`, send and update the state; an error ends this connection only."""
        if connection.key not in self.connections:
            return
        try:
            act(connection)
            if connection.key in self.connections:
                connection.flush()
                self._update(connection)
        except WrongToken:
            self._fail(connection, "wrong token", "it does not know the token", protocol.NO_ENTRY)
        except ProtocolError as error:
            reason = f"{error.what}: {error.cause}" if error.cause else error.what
            self._fail(connection, "garbage", reason, b"")
        except OSError:
            self.counts["broken"] += 1
            self.drop(connection)
        except Exception:  # a bug of ours must not end the formation
            _log.exception("the seed failed with a connection")
            self.drop(connection)

    def _receive(self, connection: JoinConnection) -> None:
        try:
            raw = connection.sock.recv(4096)
        except BlockingIOError:
            return
        if not raw:
            self.drop(connection)
            return
        connection.bytes_in += len(raw)
        if connection.is_ending:
            if connection.bytes_in > _LINGER_BYTES_MAX:
                self.drop(connection)
            return
        if not connection.handshake.is_proven and connection.bytes_in > limits.UNPROVEN_BYTES_MAX:
            raise ProtocolError(f"more than {limits.UNPROVEN_BYTES_MAX} bytes before the token was proven")
        if connection.stream is None:
            connection.stream = PlainStream() if self._context is None else TlsStream(self._context)
        answer, bodies = connection.handshake.receive(connection.stream.receive(raw))
        if connection.handshake.is_proven and not connection.proven_at:
            # Before the answer leaves: what a worker measures once it has the answer is later.
            connection.proven_at = self._runtime.now()
        if answer:
            connection.send_plain(answer)
        for body in bodies:
            self._owner.on_request(connection, body)

    def _update(self, connection: JoinConnection) -> None:
        """Act on what `_contain` has changed."""
        if not connection.is_known:
            self._recognise(connection)
        if connection.handshake.is_proven and not connection.was_proven:
            connection.was_proven = True
            self.counts["proven"] += 1
            if connection.join is None and not connection.is_ending:
                connection.expires_at = self._runtime.now() + limits.REQUEST_S
        if connection.is_ending and not connection.wants_to_write and not connection.is_shut:
            connection.is_shut = True
            connection.sock.shutdown(socket.SHUT_WR)
        self._watch(connection)

    def _watch(self, connection: JoinConnection) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_to_write else 0)
        if events == connection.events:
            return

        def act() -> None:
            self._contain(connection, self._receive)

        if connection.events:
            self._selector.modify(connection.sock, events, act)
        else:
            self._selector.register(connection.sock, events, act)
        connection.events = events

    def _unwatch(self, connection: JoinConnection) -> None:
        if connection.events:
            self._selector.unregister(connection.sock)
            connection.events = 0


def listen(address: Address) -> socket.socket:
    """A non-blocking listener.

    Raises:
        RendezvousError: the address cannot be used.
    """
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
