"""Two hosts on one machine: network namespaces connected by a veth pair, and a packet capture on it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.support.system import run_tool

__all__ = ["Hosts", "hosts"]

_CLONE_NEWNET = 0x40000000

# Captures every packet of the interface until standard input ends. Prints a line once it captures.
_CAPTURE = """
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
        """The command that runs a Python program on a host."""
        return ["ip", "netns", "exec", self[host], sys.executable, *words]

    def enter(self, host: int) -> None:
        """Move this process, or this thread, to a host."""
        with open(f"/var/run/netns/{self[host]}") as space:
            if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")

    @contextlib.contextmanager
    def link_cutter(self) -> Iterator[Callable[[int, bool], None]]:
        """Yield `cut(host, is_cut)`: from then on packets that the host sends are lost, or arrive again."""
        with contextlib.ExitStack() as stack:
            tools, cards = [], []
            for name, interface in zip(self, self.interfaces, strict=True):
                shown = subprocess.run(
                    ["ip", "-n", name, "-json", "link", "show", interface], check=True, capture_output=True
                )
                cards.append(json.loads(shown.stdout)[0]["address"])
                tool = subprocess.Popen(["ip", "-n", name, "-batch", "-"], stdin=subprocess.PIPE, text=True)
                tools.append(stack.enter_context(tool))

            def cut(host: int, is_cut: bool) -> None:
                to, card = f"10.77.0.{2 - host}", "02:00:00:00:00:01" if is_cut else cards[1 - host]
                words = f"neigh replace {to} lladdr {card} dev {self.interfaces[host]} nud permanent\n"
                stdin = tools[host].stdin
                assert stdin is not None
                stdin.write(words)
                stdin.flush()

            yield cut

    @contextlib.contextmanager
    def captured(self, file: Path) -> Iterator[None]:
        """Write every packet between the hosts into a file."""
        command = self.command(0, "-c", _CAPTURE, self.interfaces[0], str(file))
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
    """Two hosts, connected by a veth pair."""
    pair = Hosts((f"unisono-a-{os.getpid()}", f"unisono-b-{os.getpid()}"))
    pair.interfaces = (f"uni-a-{os.getpid()}"[:15], f"uni-b-{os.getpid()}"[:15])

    ip = partial(run_tool, "ip")
    with contextlib.ExitStack() as stack:
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
        yield pair
