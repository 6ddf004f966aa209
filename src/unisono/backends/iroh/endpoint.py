"""A rank's iroh endpoint: its UDP port, key, addresses and relay, and its event loop.

It accepts connections only from holders of the keys in the ranks' cards.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

import iroh
import msgspec

from unisono.backends.iroh.iroh_repairs import repair, use_event_fd
from unisono.backends.registry import BindSpec, decoded_card
from unisono.errors import BackendUnavailable, ProtocolError, UsageError

__all__ = ["Card", "Endpoint", "Loop"]

_log = logging.getLogger("unisono.iroh")

T = TypeVar("T")

ALPN: Final = b"unisono/iroh/1"
# Bounds on connections that have not proved their key yet: time for a handshake, and how many at once.
_HANDSHAKE_S: Final = 5.0
_HANDSHAKES_MAX: Final = 64
# A relay that has not answered within this time is not waited for.
_RELAY_S: Final = 5.0
_JOIN_S: Final = 2.0
_REFUSED: Final = 403  # QUIC application error code
_WARNINGS_MAX: Final = 20


class Card(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What others need to reach a rank; `process` lets ranks of the same host watch it."""

    key: bytes
    addresses: list[str]
    relay: str | None
    process: list[str]

    def encoded(self) -> bytes:
        """The card as bytes."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def parse(cls, data: bytes) -> Card:
        """Read a card.

        Raises:
            ProtocolError: `data` is not a card.
        """
        card = decoded_card(data, cls)
        if len(card.key) != 32 or len(card.process) != 4 or not (card.addresses or card.relay):
            raise ProtocolError("a rank's card is malformed", cause="no key, or no address")
        return card


class Loop:
    """An event loop on a thread of its own."""

    def __init__(self, name: str) -> None:
        _, is_free = repair()
        self.loop = asyncio.new_event_loop()
        self._release_event_fd = use_event_fd(self.loop) if is_free else None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine in the loop and wait for it; signals interrupt the wait."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(timeout)
        except BaseException:
            future.cancel()
            raise

    def is_here(self) -> bool:
        """Whether the calling thread is the loop's."""
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """End the loop, after what is scheduled now."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.loop.stop)
        if not self.is_here():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            # Run the callbacks that iroh has scheduled for those tasks.
            self.loop.run_until_complete(asyncio.sleep(0))
            if self._release_event_fd is not None:
                self._release_event_fd()
            self.loop.close()


class Endpoint:
    """One rank's endpoint."""

    def __init__(self, bound: Any, card: Card) -> None:
        self._bound = bound
        self.card = card
        self._awaited: dict[bytes, Callable[[Any], None]] = {}
        self._handshakes = 0
        self._refused = 0
        self._admissions: set[asyncio.Task[None]] = set()

    @classmethod
    async def bind(cls, spec: BindSpec, process: list[str]) -> Endpoint:
        """Bind a UDP port.

        Raises:
            BackendUnavailable: iroh could not bind the address.
            UsageError: `Config.iroh_relay` is not a relay.
        """
        config = spec.config
        builder = iroh.EndpointBuilder()
        if config.iroh_discovery:
            builder.apply_n0()
        else:
            builder.apply_minimal()
        try:
            builder.relay_mode(_relay_mode(config.iroh_relay))
            builder.alpns([ALPN])
            for address in _addresses_to_bind(spec.host, spec.port):
                builder.bind_addr(address)
            bound = await builder.bind()
            if spec.advertise:
                await bound.add_external_addr(_with_port(spec.advertise, bound))
        except iroh.IrohError as error:
            raise BackendUnavailable(
                "iroh could not bind its UDP port",
                cause=error.message(),
                next_step="name another --address, or use backend='native'",
            ) from None
        if config.iroh_relay != "off":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(bound.online(), _RELAY_S)
        return cls(bound, _card(spec, bound, process))

    def expect(self, key: bytes, arrived: Callable[[Any], None]) -> None:
        """Accept one connection from the holder of a key, and pass it to `arrived`."""
        self._awaited[key] = arrived

    async def serve(self) -> None:
        """Accept expected connections and refuse all others."""
        while (incoming := await self._bound.accept_next()) is not None:
            if not self._awaited or self._handshakes >= _HANDSHAKES_MAX:
                self._log_refusal(
                    "no connection is expected" if not self._awaited else "too many handshakes at once"
                )
                with contextlib.suppress(iroh.IrohError):
                    await incoming.refuse()
                continue
            self._handshakes += 1
            task = asyncio.get_running_loop().create_task(self._admit(incoming))
            self._admissions.add(task)
            task.add_done_callback(self._admissions.discard)

    async def connect(self, card: Card) -> Any:
        """Connect to the holder of a card's key.

        Raises:
            ProtocolError: the key of the other end is not the card's.
        """
        address = iroh.EndpointAddr(iroh.EndpointId.from_bytes(card.key), card.relay, card.addresses)
        connection = await self._bound.connect(address, ALPN)
        if bytes(connection.remote_id().to_bytes()) != card.key:
            connection.close(_REFUSED, b"another key")
            raise ProtocolError("the other end has another key than the card says")
        return connection

    async def close(self) -> None:
        """Release the port."""
        await self._bound.close()

    async def _admit(self, incoming: Any) -> None:
        connection: Any = None
        try:
            connection = await asyncio.wait_for(_handshake(incoming), _HANDSHAKE_S)
            key = bytes(connection.remote_id().to_bytes())
            arrived = self._awaited.pop(key, None)
            if arrived is None:
                self._log_refusal(f"the key {key.hex()[:10]} belongs to no rank of this world")
                connection.close(_REFUSED, b"no rank of this world")
                return
            arrived(connection)
        except (iroh.IrohError, TimeoutError):
            self._log_refusal("its handshake failed or timed out")
        finally:
            self._handshakes -= 1

    def _log_refusal(self, why: str) -> None:
        self._refused += 1
        if self._refused <= _WARNINGS_MAX:  # any process can connect: the log must not fill a disk
            _log.warning("a connection was refused: %s", why)


async def _handshake(incoming: Any) -> Any:
    return await (await incoming.accept()).connect()


def _relay_mode(setting: str) -> Any:
    if setting == "off":
        return iroh.RelayMode.disabled()
    if setting == "default":
        return iroh.RelayMode.default_mode()
    try:
        return iroh.RelayMode.custom_from_urls([url.strip() for url in setting.split(",")])
    except iroh.IrohError as error:
        raise UsageError(
            f"iroh_relay={setting!r} ({error.message()}); allowed: off, default or addresses of relays"
        ) from None


def _addresses_to_bind(host: str, port: int) -> list[str]:
    """The rank's own address; of the other family only loopback, because iroh would take every address."""
    address = ipaddress.ip_address(host)
    if address.version == 4:
        return [f"{host}:{port}", *(["[::1]:0"] if _is_bindable("::1") else [])]
    return [f"[{host}]:{port}", "127.0.0.1:0"]


def _is_bindable(host: str) -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def _card(spec: BindSpec, bound: Any, process: list[str]) -> Card:
    address = bound.addr()
    found = list(address.direct_addresses())
    if spec.config.iroh_relay == "off" and not ipaddress.ip_address(spec.host).is_unspecified:
        found = [text for text in found if text.rpartition(":")[0].strip("[]") == spec.host]
    if spec.advertise:
        found = list(dict.fromkeys([_with_port(spec.advertise, bound), *found]))
    return Card(bytes(bound.id().to_bytes()), found, address.relay_url(), process)


def _with_port(advertised: str, bound: Any) -> str:
    """A numeric address with a port: the bound one if `advertised` names none."""
    name, _, port = advertised.rpartition(":")
    host = socket.getaddrinfo(name.strip("[]"), None, type=socket.SOCK_DGRAM)[0][4][0]
    version = ipaddress.ip_address(host).version
    own = {
        ipaddress.ip_address(text.rpartition(":")[0].strip("[]")).version: text.rpartition(":")[2]
        for text in bound.bound_sockets()
    }
    number = own[version] if port == "0" else port
    return f"[{host}]:{number}" if version == 6 else f"{host}:{number}"
