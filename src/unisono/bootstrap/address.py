"""Addresses as users write them: names, IPv4, bracketed IPv6, interfaces; with or without a port."""

from __future__ import annotations

import fcntl
import ipaddress
import logging
import socket
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unisono.bootstrap.limits import printable
from unisono.errors import RendezvousError, UsageError

__all__ = ["Address", "Endpoint", "bindable", "resolve", "source_toward"]

_log = logging.getLogger("unisono.bootstrap")

# What getaddrinfo returns and connect takes: family and address.
Endpoint = tuple[int, tuple[str, int] | tuple[str, int, int, int]]

_SIOCGIFADDR: Final = 0x8915


@dataclass(frozen=True, slots=True)
class Address:
    """A host (a name, IPv4 or IPv6 without brackets) and a port; 0: any free port."""

    host: str
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read `host`, `host:port`, `[ipv6]`, `[ipv6]:port` or a bare IPv6 address.

        Raises:
            UsageError: it is none of these.
        """
        host, port = text, ""
        if text.startswith("["):
            host, closed, rest = text[1:].partition("]")
            if not closed or (rest and not rest.startswith(":")):
                raise _malformed(text)
            port = rest[1:] if rest else ""
        elif text.count(":") == 1:
            host, _, port = text.partition(":")
        if not host or not host.isprintable() or any(c in host for c in "/@[] ") or len(host) > 255:
            raise _malformed(text)
        if port and not (port.isascii() and port.isdecimal() and int(port) < 65536):
            raise UsageError(f"port {printable(port, 40)!r}; allowed: 0 to 65535")
        return cls(host, int(port) if port else 0)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether it cannot be reached from another host."""
        number = _number(self.host)
        return self.host == "localhost" if number is None else number.is_loopback

    @property
    def is_wildcard(self) -> bool:
        """Whether it means every address of this host."""
        number = _number(self.host)
        return number is not None and number.is_unspecified


def resolve(address: Address, timeout: float) -> list[Endpoint]:
    """The addresses of a name, IPv4 and IPv6 alternating, within `timeout` seconds.

    `getaddrinfo` has no timeout, so it runs on a thread of its own, which is left behind if it hangs.

    Raises:
        OSError: the name is unknown, or was not resolved in time.
    """
    if _number(address.host) is not None:
        return _endpoints(address)
    found: list[list[Endpoint] | OSError] = []

    def look_up() -> None:
        try:
            found.append(_endpoints(address))
        except (OSError, UnicodeError) as error:
            found.append(error if isinstance(error, OSError) else OSError(str(error)))

    thread = threading.Thread(target=look_up, name="unisono-resolve", daemon=True)
    thread.start()
    thread.join(timeout)
    if not found:
        raise TimeoutError(f"name {address.host!r} was not resolved in {timeout:.3g} s")
    if isinstance(found[0], OSError):
        raise found[0]
    return found[0]


def bindable(text: str) -> Address:
    """Turn an interface, a name or an address of this host into an address to bind.

    Raises:
        UsageError: this host has no such address.
    """
    interfaces = [name for _, name in socket.if_nameindex()]
    name, _, port = text.rpartition(":") if text.count(":") == 1 else (text, "", "")
    if name in interfaces:
        found = _interface_address(name)
        if found is None:
            raise UsageError(f"interface {name!r} has no address", next_step="name another one")
        return Address(found, Address.parse(f"x:{port}").port if port else 0)
    address = Address.parse(text)
    try:
        endpoints = resolve(address, timeout=5.0)
    except OSError as error:
        raise UsageError(
            f"address {printable(address.host)!r} cannot be resolved here: {error.strerror or error}; "
            f"interfaces: {', '.join(interfaces)}",
            next_step="name an address or interface of this host",
        ) from None
    for family, target in endpoints:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind((target[0], 0, *target[2:]))
            except OSError:
                continue
        return Address(target[0], address.port)
    numbers = ", ".join(target[0] for _, target in endpoints)
    raise UsageError(
        f"{printable(address.host)!r} ({numbers}) is not an address of this host; "
        f"interfaces: {', '.join(interfaces)}",
        next_step="name an address or interface of this host",
    )


def source_toward(address: Address, timeout: float) -> str:
    """The address of this host from which another one is reached. Nothing is sent.

    Raises:
        RendezvousError: there is no route to it.
    """
    cause = "no address"
    try:
        for family, target in resolve(address, timeout):
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                try:
                    probe.connect(target)
                except OSError as error:
                    cause = error.strerror or str(error)
                    continue
                return str(probe.getsockname()[0])
    except OSError as error:
        cause = error.strerror or str(error)
    raise RendezvousError(
        f"no route to {address}", cause=cause, next_step="check the address and the routes of this host"
    )


def _endpoints(address: Address) -> list[Endpoint]:
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    six: list[Endpoint] = []
    four: list[Endpoint] = []
    for family, _, _, _, target in found:
        # A Python without IPv6 returns raw bytes for such an address, which cannot be used.
        if family in (socket.AF_INET, socket.AF_INET6) and isinstance(target[0], str):
            (six if family == socket.AF_INET6 else four).append((int(family), target))
    first, second = (six, four) if found and found[0][0] == socket.AF_INET6 else (four, six)
    mixed: list[Endpoint] = []
    for i in range(max(len(first), len(second))):
        mixed += first[i : i + 1] + second[i : i + 1]
    return mixed


def _number(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _interface_address(name: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            return socket.inet_ntoa(reply[20:24])
        except OSError:
            pass  # no IPv4 there
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return None
    rows = [line.split() for line in lines]
    # Global addresses (scope 00) before link-local ones, which need the interface's name as their zone.
    for digits, _, _, scope, _, interface in sorted(rows, key=lambda row: row[3]):
        if interface == name:
            host = str(ipaddress.IPv6Address(bytes.fromhex(digits)))
            return f"{host}%{name}" if scope == "20" else host
    return None


def _malformed(text: str) -> UsageError:
    return UsageError(
        f"address {printable(text, 80)!r}; allowed: host, host:port, [ipv6]:port or an interface of this host"
    )
