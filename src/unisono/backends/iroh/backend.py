"""The iroh backend: iroh, a QUIC implementation in Rust, carries the frames of a FramedBackend.

The later of two ranks connects to the earlier one. All connections are made at the beginning; after that one
thread, the event loop's, does everything. It also watches the peers: iroh answers pings without Python, and
the kernel reports the end of a process on this host.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib.util
import logging
import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from unisono.backends.framed import FramedBackend, FrameTransport, frame_bytes_max
from unisono.backends.iroh.watch import TICKS, Pulse, open_process, own_process
from unisono.backends.registry import BackendInfo, BindSpec
from unisono.core.clock import RealRuntime
from unisono.core.envelope import Lane
from unisono.errors import ProtocolError, RendezvousError
from unisono.messaging.backend import Capabilities

if TYPE_CHECKING:
    from unisono.backends.iroh.endpoint import Card, Endpoint, Loop
    from unisono.backends.iroh.link import Link

__all__ = ["DESCRIPTION", "IrohBackend", "UnconnectedIroh"]

_log = logging.getLogger("unisono.iroh")

# All ranks are up when connecting begins, so only a broken network or a dead rank takes this long.
_CONNECT_S: Final = 30.0
# Time for the last frames to reach a peer when this rank closes.
_FLUSH_S: Final = 2.0
# The same at the exit of an interpreter that has not closed the backend.
_ABANDON_S: Final = 0.5
_CLOSE_S: Final = 1.0
# After the end of a process on this host, its last datagrams may still be in our sockets: poll interval.
_DRAIN_S: Final = 0.05
_LOST: Final = 2
_CAPABILITIES: Final = Capabilities("iroh")
_INSTALL: Final = "pip install 'unisono[iroh]'"


class IrohBackend(FramedBackend):
    """One rank over one endpoint."""

    # 1 MiB: several streams share a message of some MiB, and the cost per piece is still small.
    piece_bytes = 1 << 20

    def __init__(self, spec: BindSpec, loop: Loop, endpoint: Endpoint) -> None:
        super().__init__(spec.rank, spec.size, spec.config, RealRuntime())
        self._transport: _IrohTransport = _IrohTransport(self, spec, loop, endpoint)
        # No thread may return from iroh while the interpreter shuts down.
        atexit.register(self._abandon)

    @property
    def capabilities(self) -> Capabilities:
        """Messages only."""
        return _CAPABILITIES

    def connect(self, cards: Sequence[Card]) -> None:
        """Connect to all other ranks."""
        self._transport.connect(cards)

    def give_up(self) -> None:
        """Close without goodbyes: the ranks were not connected."""
        for peer in range(self.size):
            if peer != self.rank:
                self.lost(peer, "was not reached")
        self.close()

    def close(self) -> None:
        """Leave."""
        super().close()
        atexit.unregister(self._abandon)

    def _abandon(self) -> None:
        """Leave without a goodbye."""
        if not self.is_forked():
            self._transport.abandon()


class UnconnectedIroh:
    """A rank that is not connected yet: its endpoint has a port and a key."""

    def __init__(self, spec: BindSpec) -> None:
        from unisono.backends.iroh.endpoint import Endpoint, Loop

        self._spec = spec
        self._backend: IrohBackend | None = None
        self._loop = Loop(f"unisono-iroh-{spec.rank}")
        try:
            self._endpoint = self._loop.call(Endpoint.bind(spec, own_process()))
        except BaseException:
            self._loop.stop()
            raise

    def card(self) -> bytes:
        """What the others need to reach this rank."""
        return self._endpoint.card.encoded()

    def connect(self, cards: Sequence[bytes]) -> IrohBackend:
        """Connect to all other ranks.

        Raises:
            ProtocolError: a card is malformed.
            RendezvousError: a rank could not be reached; call `close` then.
        """
        from unisono.backends.iroh.endpoint import Card

        known = [Card.parse(card) for card in cards]
        backend = self._backend = IrohBackend(self._spec, self._loop, self._endpoint)
        backend.connect(known)
        return backend

    def close(self) -> None:
        """Give up."""
        if self._backend is not None:
            self._backend.give_up()
            return
        with contextlib.suppress(RuntimeError, TimeoutError):
            self._loop.call(self._endpoint.close(), _CLOSE_S)
        self._loop.stop()


class _IrohTransport(FrameTransport):
    """Frames over links, one per peer."""

    def __init__(self, backend: IrohBackend, spec: BindSpec, loop: Loop, endpoint: Endpoint) -> None:
        self._backend = backend
        self._spec = spec
        self._loop = loop
        self._endpoint = endpoint
        self._links: dict[int, Link] = {}
        self._pulses = {peer: Pulse() for peer in range(spec.size) if peer != spec.rank}
        self._processes: dict[int, int] = {}
        self._causes: dict[int, str] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closed = False
        self._flush_s = _FLUSH_S

    def connect(self, cards: Sequence[Card]) -> None:
        """Connect to the earlier ranks, wait for the later ones, and begin to receive from all."""
        self._loop.call(self._connect(cards))

    def send(self, peer: int, frame: bytes, payload: memoryview | None, lane: Lane | None) -> None:
        """Queue the frame at the peer's link."""
        if (link := self._links.get(peer)) is not None:
            link.send(frame, payload, lane)

    def is_own_thread(self) -> bool:
        """Whether this thread is the loop's."""
        return self._loop.is_here()

    def close(self) -> None:
        """Let the last frames get through, then close all links and the endpoint."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._loop.is_here():
            self._loop.loop.create_task(self._close()).add_done_callback(lambda _: self._loop.stop())
            return
        with contextlib.suppress(RuntimeError, TimeoutError):
            self._loop.call(self._close(), self._flush_s + 2 * _CLOSE_S)
        self._loop.stop()

    def abandon(self) -> None:
        """Close, with little time for the last frames."""
        self._flush_s = _ABANDON_S
        self.close()

    # -- what runs on the loop's thread -------------------------------------------------------------------

    async def _connect(self, cards: Sequence[Card]) -> None:
        loop, rank = asyncio.get_running_loop(), self._spec.rank
        coming: dict[int, asyncio.Future[Any]] = {}
        for peer in range(rank + 1, self._spec.size):
            coming[peer] = loop.create_future()
            self._endpoint.expect(cards[peer].key, coming[peer].set_result)
        self._tasks.append(loop.create_task(self._endpoint.serve()))
        opening = {
            peer: loop.create_task(self._open_link(peer, cards[peer], coming.get(peer)))
            for peer in self._pulses
        }
        if opening:
            await asyncio.wait(opening.values(), timeout=_CONNECT_S, return_when=asyncio.FIRST_EXCEPTION)
        failed = {peer: _failure(task) for peer, task in opening.items() if not _has_succeeded(task)}
        if failed:
            for task in opening.values():
                task.cancel()
            causes = "; ".join(f"rank {peer}: {why}" for peer, why in sorted(failed.items()))
            raise RendezvousError(
                f"rank {rank} could not connect by iroh",
                cause=causes,
                next_step="open UDP between these ranks, or set iroh_relay",
            )
        for peer, task in opening.items():
            self._links[peer] = link = task.result()
            link.start()
            self._tasks.append(loop.create_task(self._serve(peer, link)))
            if (descriptor := open_process(cards[peer].process)) is not None:
                self._processes[peer] = descriptor
                loop.add_reader(descriptor, self._process_ended, peer)
        self._tasks.append(loop.create_task(self._watch()))

    async def _open_link(self, peer: int, card: Card, coming: asyncio.Future[Any] | None) -> Link:
        """Open the link with a peer: connect to it, or wait until it has connected (`coming`)."""
        from unisono.backends.iroh.link import Introduction, Link

        connection = await (self._endpoint.connect(card) if coming is None else coming)
        spec, backend = self._spec, self._backend
        link = Link(
            connection,
            Introduction(spec.rank, peer, self._endpoint.card.key, card.key, spec.secret),
            streams=spec.config.iroh_streams,
            frame_bytes_max=frame_bytes_max(spec.config),
            piece_bytes=backend.piece_bytes,
            arrive=partial(backend.arrive_logged, peer),
            is_over=partial(backend.is_over, peer),
        )
        await link.open()
        return link

    async def _serve(self, peer: int, link: Link) -> None:
        """Receive from a peer until it has left or is gone."""
        from unisono.backends.iroh.link import LinkError

        try:
            await link.receive()
        except ProtocolError as error:
            await link.close(0)
            self._backend.broken(peer, error)
        except LinkError as error:
            await link.close(0)
            self._backend.lost(peer, self._causes.get(peer, f"closed its connection ({error})"))
        except Exception as error:  # a bug of ours must not become a hang
            _log.exception("rank %d: the link with rank %d failed", self._spec.rank, peer)
            await link.close(0)
            self._backend.lost(peer, f"its link failed here ({error})")

    async def _watch(self) -> None:
        """Ping silent peers, and declare those dead that do not answer."""
        silence_s = self._spec.config.silence_s
        while True:
            await asyncio.sleep(silence_s / TICKS)
            for peer, link in self._links.items():
                if self._backend.is_over(peer):
                    continue
                is_due, is_lost = self._pulses[peer].tick(link.rx_datagrams())
                if is_lost:
                    self._give_up(peer, f"silent for {silence_s:g} s")
                elif is_due:
                    link.ping()

    def _process_ended(self, peer: int) -> None:
        self._close_process(peer)
        self._tasks.append(self._loop.loop.create_task(self._drain(peer)))

    async def _drain(self, peer: int) -> None:
        """A process of this host has ended: receive what is already in our sockets, then give it up."""
        link, before = self._links[peer], (-1, -1)
        while (now := (link.rx_datagrams(), link.bytes_received)) != before:
            before = now
            await asyncio.sleep(_DRAIN_S)
        self._give_up(peer, "its process ended")

    def _give_up(self, peer: int, cause: str) -> None:
        if not self._backend.is_over(peer):
            self._causes.setdefault(peer, cause)
            self._links[peer].connection.close(_LOST, cause.encode())

    def _close_process(self, peer: int) -> None:
        descriptor = self._processes.pop(peer)
        self._loop.loop.remove_reader(descriptor)
        os.close(descriptor)

    async def _close(self) -> None:
        for peer in list(self._processes):
            self._close_process(peer)
        await asyncio.gather(
            *(
                link.close(self._flush_s if peer not in self._causes else 0)
                for peer, link in self._links.items()
            ),
            return_exceptions=True,
        )
        mine = asyncio.current_task()
        for task in self._tasks:
            if task is not mine:
                task.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._endpoint.close(), _CLOSE_S)


def _has_succeeded(task: asyncio.Task[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _failure(task: asyncio.Task[Any]) -> str:
    if not task.done():
        return "no connection yet"
    error = None if task.cancelled() else task.exception()
    return (str(error).splitlines() or [type(error).__name__])[0]


def _check() -> str | None:
    """Why it cannot run here."""
    return None if importlib.util.find_spec("iroh") is not None else "iroh is not installed"


DESCRIPTION = BackendInfo(
    name="iroh",
    summary="ranks as processes, over QUIC by iroh: through routers and relays if asked",
    check=_check,
    install=_INSTALL,
    capabilities=_CAPABILITIES,
    bind=UnconnectedIroh,
)
