"""The seed: the service where the ranks of a job meet, and that is off the data path afterwards.

One thread serves the join port; the formation decides which ranks may join.
"""

from __future__ import annotations

import datetime
import logging
import os
import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Self

from unisono.bootstrap import limits, protocol
from unisono.bootstrap.address import Address
from unisono.bootstrap.join_connection import JoinConnection
from unisono.bootstrap.join_port import LINGER_S, JoinPort, listen
from unisono.bootstrap.rendezvous import Formation, Join, Membership
from unisono.bootstrap.ticket import Ticket
from unisono.core.clock import RealRuntime
from unisono.errors import ProtocolError, UsageError

if TYPE_CHECKING:
    from unisono.bootstrap.identity import Authority

__all__ = ["Seed"]

_log = logging.getLogger("unisono.bootstrap")

# How often waiting workers get the status of the formation, if it has changed.
_STATUS_INTERVAL_S: Final = 0.25
_TICK_S: Final = 0.1


class Seed:
    """Serves one formation from `start` to `close`.

    The constructor binds and listens without a thread, so that a launcher can fork first. `ticket` is what
    workers need. Without `tls`, the addresses decide: loopback needs none. `store_port` is sent to the
    launchers of other nodes.

    Raises:
        UsageError: the addresses cannot be used together.
        RendezvousError: the address cannot be listened on.
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
        store_port: int = 0,
    ) -> None:
        address = address or Address("127.0.0.1")
        _check_exposure(address, advertise, insecure)
        self.job = secrets.token_hex(16)
        self._runtime = RealRuntime()
        self._started_at = self._runtime.now()
        self._formed_at: float | None = None
        self._formation = Formation(size, version)
        self._authority: Authority | None = None
        is_local = address.is_loopback and (advertise is None or advertise.is_loopback)
        if (not is_local if tls is None else tls) and not insecure:
            from unisono.bootstrap.identity import Authority  # 60 ms, paid only where TLS is used

            self._authority = Authority(self.job, _wall_clock())
        listener = listen(address)
        self._bound = Address(address.host, listener.getsockname()[1])
        public = advertise or address
        self.ticket = Ticket.create(
            Address(public.host, public.port or self._bound.port),
            self._authority.fingerprint if self._authority is not None else b"",
        )
        self._port = JoinPort(self, listener, self.ticket.token, self._authority)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._next_tick = 0.0
        self._next_status = 0.0
        self._status = ""
        self._refused: set[str] = set()  # instances whose refusal was logged
        self._is_closing = False
        self._close_reason = ""
        self._store_port = store_port
        self._nodes: dict[int, str] = {}  # launchers of other nodes that have come: their instances
        self._ended: deque[tuple[int, str]] = (
            deque()
        )  # ranks that have ended, and how; for the serving thread
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def counts(self) -> Counter[str]:
        """What happened at the port, by kind."""
        return self._port.counts

    @property
    def local_ticket(self) -> Ticket:
        """The ticket for ranks of this host, which may not reach the advertised address."""
        return self.ticket if self._bound.is_wildcard else self.ticket.at(self._bound)

    def start(self) -> Self:
        """Begin to serve."""
        self._port.listen_again()
        self._port.watch(self._wake_fd, self._on_wake)
        self._thread = threading.Thread(target=self._serve, name="unisono-seed", daemon=True)
        self._thread.start()
        return self

    def report(self) -> str:
        """Which ranks joined, are missing and were refused, in one sentence."""
        with self._lock:
            return self._standing()

    @property
    def is_formed(self) -> bool:
        """Whether every rank has joined."""
        with self._lock:
            return self._formation.is_formed

    def on_rank_ended(self, rank: int, how: str) -> None:
        """A launcher reports that a rank's process has ended. If it had not joined, the world cannot form."""
        with self._lock:
            if self._thread is not None and not self._is_closing:
                self._ended.append((rank, how))
                os.eventfd_write(self._wake_fd, 1)

    def close(self, reason: str = "") -> None:
        """Stop serving. Workers that still wait get the reason and the missing ranks."""
        if self._thread is None:
            if not self._is_closing:
                self._port.close()
                os.close(self._wake_fd)
            self._is_closing = True
            return
        with self._lock:
            if not self._is_closing:
                self._close_reason = reason
                self._is_closing = True
                os.eventfd_write(self._wake_fd, 1)
        self._thread.join(2 * LINGER_S)

    def __enter__(self) -> Self:
        if self._thread is None:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Seed at {self.ticket.address}>"

    # -- the serving thread --------------------------------------------------------------------------------

    def on_request(self, connection: JoinConnection, body: bytes) -> None:
        """A holder of the token asks to be a rank, or reports an ended one."""
        if connection.join is not None or connection.is_ending:
            raise ProtocolError("more than one request")
        request = protocol.parse_request(body)
        if isinstance(request, protocol.Ended):
            # A ticket file may be read after another job has put its ticket there: a process that is older
            # than this seed may have been a rank of an earlier job, and its end says nothing about this one.
            if request.age_s < connection.proven_at - self._started_at:
                self._on_rank_ended(request.rank, request.how)
            self._port.end(connection)
            return
        if isinstance(request, protocol.Arrival):
            self._on_arrival(connection, request)
            return
        join = _join(request, connection.host)
        reason = self._formation.offer(connection.key, join)
        if reason is not None:
            self._refuse(connection, join, reason, self._formation.refusal(join))
            return
        connection.join = join
        connection.expires_at = None
        self.counts["admitted"] += 1
        if self._authority is not None or request.csr:
            incarnation = self._formation.incarnation(join.rank)
            try:
                connection.certificate_pem = self._certifying().certify(
                    request.csr, join.rank, incarnation, _wall_clock()
                )
            except ProtocolError as error:
                self._formation.leave(connection.key)
                self._formation.note_refusal(join, str(error))
                self._refuse(connection, join, str(error))
                return
        for key, why in self._formation.misfits():
            misfit = self._port.connections[key]
            assert misfit.join is not None
            self._refuse(misfit, misfit.join, why)
        membership, _ = self._formation.membership()
        if membership is None:
            connection.send_frame(protocol.encode(protocol.Status(self._standing())))
        else:
            self._publish(membership)

    def _certifying(self) -> Authority:
        """The authority. On a port without TLS it is made for the first rank that asks for a certificate.

        Ranks with QUIC links need certificates on one host, too, and a launcher need not know their links.
        Frames of the join are authenticated by the token.
        """
        if self._authority is None:
            from unisono.bootstrap.identity import Authority  # 60 ms, paid only where certificates are used

            self._authority = Authority(self.job, _wall_clock())
        return self._authority

    def on_wrong_token(self, host: str, reason: str) -> None:
        """Name it in the status: it may be a rank with an old ticket."""
        self._formation.note_refusal(f"a process on {host}", reason)

    def on_dropped(self, connection: JoinConnection) -> None:
        """Its rank is missing again, unless the world is formed."""
        if connection.join is not None:
            self._formation.leave(connection.key)

    def _serve(self) -> None:
        try:
            while not self._is_closing:
                for act in self._port.ready(_TICK_S):
                    self._contain(act)
                self._contain(self._tick)
            self._contain(self._say_goodbye)
        finally:
            self._port.close()
            os.close(self._wake_fd)

    def _contain(self, act: Callable[[], None]) -> None:
        """Run `act` under the lock; a bug of ours must not end the formation."""
        try:
            with self._lock:
                act()
        except Exception:
            self.counts["mistakes"] += 1
            _log.exception("the seed failed")

    def _on_wake(self) -> None:
        os.eventfd_read(self._wake_fd)
        while self._ended:
            self._on_rank_ended(*self._ended.popleft())

    def _tick(self) -> None:
        now = self._runtime.now()
        if now < self._next_tick:
            return
        self._next_tick = now + _TICK_S
        self._port.listen_again()
        self._port.expire(now)
        if now >= self._next_status and not self._formation.is_formed:
            self._next_status = now + _STATUS_INTERVAL_S
            self._send_status()

    def _send_status(self) -> None:
        # That the port is crowded is sent again when the number of evicted connections has doubled.
        crowd = self.counts["evicted"].bit_length() if self._port.crowd() else 0
        status = repr((self._formation.ranks_joined(), self.counts["refused"], crowd, self._port.trouble))
        if status == self._status:
            return
        self._status = status
        body = protocol.encode(protocol.Status(self._standing()))
        for connection in self._port.waiting():
            connection.send_frame(body)
            self._port.flush(connection)

    def _standing(self) -> str:
        membership, text = self._formation.membership()
        notes = (self._port.crowd(), self._port.trouble) if membership is None else ()
        return "; ".join([text, *filter(None, notes)])

    def _publish(self, membership: Membership) -> None:
        """Every rank has joined: send each its certificate, and all the same view."""
        self.counts["formed"] += 1
        self._formed_at = self._runtime.now()
        members = [
            protocol.Member(m.rank, m.incarnation, m.card, m.host, m.pid, m.address)
            for m in membership.members
        ]
        body = protocol.encode(protocol.Members(members))
        ca_pem = self._authority.certificate_pem if self._authority is not None else b""
        for connection in self._port.waiting():
            assert connection.join is not None
            incarnation = self._formation.incarnation(connection.join.rank)
            connection.send_frame(
                protocol.encode(protocol.Admitted(self.job, incarnation, ca_pem, connection.certificate_pem))
            )
            connection.send_frame(body)
            self._port.end(connection, linger_s=limits.REQUEST_S)
        _log.info("the world of %d ranks is formed", membership.size)

    def _on_rank_ended(self, rank: int, how: str) -> None:
        """The world cannot form any more: refuse every rank that waits."""
        reason = self._formation.on_rank_ended(rank, how)
        if reason is None:
            return
        for connection in self._port.waiting():
            assert connection.join is not None
            self._refuse(connection, connection.join, reason, "over")

    def _on_arrival(self, connection: JoinConnection, arrival: protocol.Arrival) -> None:
        """If this job is past its formation, the second launcher of a node belongs to the next job."""
        node, formation = arrival.node, self._formation
        is_second = self._nodes.get(node, arrival.instance) != arrival.instance
        reply: protocol.Reply = protocol.Store(self._store_port)
        if not 0 < node < formation.size:
            reply = protocol.Refused(f"node {node} in a job of {formation.size} ranks")
        elif is_second and (formation.is_formed or formation.why_over):
            reply = protocol.Refused(f"the launcher of node {node} has come before", "taken")
        elif formation.why_over:
            reply = protocol.Refused(formation.why_over, "over")
        else:
            self._nodes[node] = arrival.instance
        connection.send_frame(protocol.encode(reply))
        self._port.end(connection)

    def _refuse(
        self, connection: JoinConnection, join: Join, reason: str, kind: protocol.Refusal = "misfit"
    ) -> None:
        self.counts["refused"] += 1
        # Logged once per process: one with an old ticket asks repeatedly. What ends the formation is not
        # logged here: every rank raises it.
        if join.instance not in self._refused and kind != "over":
            if len(self._refused) == limits.REFUSED_REMEMBERED_MAX:
                self._refused.clear()
            self._refused.add(join.instance)
            _log.warning("join refused: %s: %s", join, reason)
        formed_s = 0.0 if self._formed_at is None else self._runtime.now() - self._formed_at
        connection.send_frame(protocol.encode(protocol.Refused(reason, kind, formed_s)))
        self._port.end(connection)

    def _say_goodbye(self) -> None:
        """Tell waiting workers why the seed closes, and let views that are being sent arrive."""
        if not self._formation.is_formed:
            why = f"{self._close_reason or 'the seed was closed'}; {self._standing()}"
            for connection in self._port.waiting():
                connection.send_frame(protocol.encode(protocol.Refused(why)))
                self._port.end(connection)
        self._port.stop()


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
                f"{address.host} is every address of this host, so ranks do not know which one to join",
                next_step="name the address to advertise too",
            )
        _log.warning("the seed listens on every address of this host, as asked")
    public = advertise or address
    if insecure and not public.is_loopback:
        _log.warning("insecure: ranks join and talk without encryption, at %s", public.host)


def _wall_clock() -> datetime.datetime:
    """For certificates only; everything else uses the monotonic clock."""
    return datetime.datetime.now(datetime.UTC)
