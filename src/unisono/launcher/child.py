"""The program of a spawned rank: run the caller's main file, join, call the function, report the result.

How ranks are connected is up to `enter`, which the parent names.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from dataclasses import replace
from typing import Any

from unisono.bootstrap.launch_info import LaunchInfo
from unisono.bootstrap.ticket import TicketSource
from unisono.config import Config
from unisono.core import codec
from unisono.environment import network
from unisono.errors import UsageError
from unisono.launcher.failure import describe
from unisono.launcher.parent_death import die_with_parent
from unisono.launcher.pipe import FrameSender, frame, receive_frame
from unisono.launcher.program import Main, Reference, run_main

__all__ = ["main"]


def main() -> None:
    """Run: `python -c "from unisono.launcher.child import main; main()" <descriptor> <parent's pid>`."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)()
    sock = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    try:
        task = codec.unpack(receive_frame(sock))
        packed_arguments = receive_frame(sock)
    except EOFError:
        os._exit(1)
    threading.Thread(target=_end_with_parent, args=(sock,), name="unisono-parent", daemon=True).start()
    report = _run(task, packed_arguments)
    try:
        FrameSender(frame(report)).send(sock)
    except OSError:
        os._exit(1)  # the parent is gone


def _run(task: dict[str, Any], packed_arguments: bytearray) -> bytes:
    """Call the function; its result or exception, packed."""
    try:
        sys.argv[:] = task["argv"]
        sys.path[:] = task["path"]
        run_main(Main(*task["main"]))
        fn = Reference(*task["fn"]).find()
        enter = Reference(*task["enter"]).find()
        arguments = codec.unpack(packed_arguments)
        info = LaunchInfo(
            task["rank"],
            task["size"],
            launcher="uni.spawn",
            local_rank=task["rank"],
            source=TicketSource(task["join"]) if task["join"] else None,
            # All ranks and their seed are on this host: loopback, whatever the environment names.
            network=replace(network(), address=None, advertise=None),
        )
        config = Config() if task["config"] is None else Config.unpacked(task["config"])
        with enter(info, task["backend"], config, task["timeout"]) as world:
            value = fn(world, *arguments)
        try:
            return codec.pack({"value": value}, lambda steps: codec.path_of(steps[1:], "the result"))
        except UsageError as error:
            raise UsageError(
                f"rank {info.rank} returned a value that cannot be sent to the parent",
                cause=error.what,
                next_step=error.next_step,
            ) from None
    except BaseException as error:  # also SystemExit: the parent waits for a report
        return codec.pack({"error": describe(error)})


def _end_with_parent(sock: socket.socket) -> None:
    """End this process when the parent's end of the socket closes; the parent sends nothing more."""
    try:
        while sock.recv(1):
            pass
    except OSError:
        pass
    os._exit(1)
