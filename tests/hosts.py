"""Two hosts on one machine: network namespaces with a cable between them, and an ear at the cable."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["Hosts", "hosts"]

# Whatever passes the interface, until standard input ends. Says when it listens.
_EAR = """
import select, socket, sys
ear = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
ear.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
ear.bind((sys.argv[1], 0))
with open(sys.argv[2], "wb") as file:
    print("listening", flush=True)
    while True:
        ready, _, _ = select.select([ear, sys.stdin], [], [])
        if ear in ready:
            file.write(ear.recv(1 << 17))
        elif sys.stdin in ready:
            break
"""


class Hosts(tuple[str, str]):
    """The names of the namespaces; host k has 10.77.0.(k+1) and fd77::(k+1) on `interfaces[k]`."""

    interfaces: tuple[str, str]

    def command(self, host: int, *words: str) -> list[str]:
        """How to run a Python program on a host."""
        return ["ip", "netns", "exec", self[host], sys.executable, *words]

    @contextlib.contextmanager
    def heard(self, file: Path) -> Iterator[None]:
        """Write all that crosses the cable into a file."""
        command = self.command(0, "-c", _EAR, self.interfaces[0], str(file))
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as ear:
            assert ear.stdin is not None
            assert ear.stdout is not None
            assert ear.stdout.readline() == b"listening\n"
            try:
                yield
            finally:
                ear.stdin.close()
                ear.wait(60)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two hosts, connected by a cable."""
    pair = Hosts((f"unisono-a-{os.getpid()}", f"unisono-b-{os.getpid()}"))
    pair.interfaces = (f"uni-a-{os.getpid()}"[:15], f"uni-b-{os.getpid()}"[:15])

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    with contextlib.ExitStack() as stack:
        try:
            for name in pair:
                ip("netns", "add", name)
                stack.callback(subprocess.run, ["ip", "netns", "delete", name], check=False)
            one, other = pair.interfaces
            ip("link", "add", one, "netns", pair[0], "type", "veth", "peer", other, "netns", pair[1])
            for i, (name, interface) in enumerate(zip(pair, pair.interfaces, strict=True), 1):
                ip("-n", name, "address", "add", f"10.77.0.{i}/24", "dev", interface)
                ip("-n", name, "address", "add", f"fd77::{i}/64", "dev", interface, "nodad")
                for end in (interface, "lo"):
                    ip("-n", name, "link", "set", end, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield pair
