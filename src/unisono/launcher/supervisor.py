"""Processes that this process has started: watched, signalled and ended together.

The supervisor dispatches events on the caller's thread, inside `serve`. `close` leaves no process behind.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Self

from unisono.core.clock import RealRuntime
from unisono.launcher.parent_death import die_with_parent

__all__ = ["Escalation", "Process", "Supervisor", "forwarded", "wake_pair"]

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def forwarded() -> list[signal.Signals]:
    """The signals to forward: those that end a program, unless it was started to ignore them, as by nohup."""
    return [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]


class Escalation:
    """Pure: which signal is due when. Nothing is due before `begin`: a grace time, SIGTERM, then SIGKILL."""

    def __init__(self, term_s: float) -> None:
        self._term_s = term_s  # from SIGTERM to SIGKILL
        self._steps: list[tuple[float, signal.Signals]] | None = None

    def begin(self, now: float, grace_s: float) -> None:
        """Send SIGTERM in `grace_s` seconds. Of several calls the earliest SIGTERM counts."""
        term_at = now + grace_s
        is_term_pending = self._steps is not None and len(self._steps) == 2
        if self._steps is None or (is_term_pending and term_at < self._steps[0][0]):
            self._steps = [(term_at, signal.SIGTERM), (term_at + self._term_s, signal.SIGKILL)]

    def kill(self, now: float) -> None:
        """Send SIGKILL now."""
        self._steps = [(now, signal.SIGKILL)]

    @property
    def next_at(self) -> float | None:
        """When the next signal is due."""
        return self._steps[0][0] if self._steps else None

    def due(self, now: float) -> signal.Signals | None:
        """The signal to send now; each one is returned once."""
        if self._steps and now >= self._steps[0][0]:
            return self._steps.pop(0)[1]
        return None


class Process:
    """A started process. `code` is its exit code, None while it runs; a negative one is a signal's number."""

    def __init__(self, popen: subprocess.Popen[bytes], *, has_group: bool) -> None:
        self.popen = popen
        self.pidfd = os.pidfd_open(popen.pid)
        self.code: int | None = None
        self.was_told_to_end = False  # by the escalation: its exit code is not its own
        self._send = os.killpg if has_group else os.kill

    def signal(self, number: signal.Signals) -> None:
        """Signal the process, and with a process group of its own all of that.

        Until `code` is set the process is at least a zombie, so its number cannot belong to another one.
        """
        if self.code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                self._send(self.popen.pid, number)


class Supervisor:
    """Starts processes and serves their events until they have ended. `term_s`: from SIGTERM to SIGKILL."""

    def __init__(self, term_s: float) -> None:
        self.processes: list[Process] = []
        self._runtime = RealRuntime()
        self._escalation = Escalation(term_s)
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_running(self) -> bool:
        """Whether a process has not ended."""
        return any(process.code is None for process in self.processes)

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        on_end: Callable[[Process], None] = lambda process: None,
        *,
        has_group: bool = True,
        dies_with_parent: bool = True,
        **options: Any,
    ) -> Process:
        """Start a process; `on_end` is called when it has ended. `options` are those of Popen.

        Args:
            has_group: a process group of its own; signals reach all of it, and what it leaves behind there
                is killed when it ends. Otherwise it stays in the caller's process group.
            dies_with_parent: it is killed when this process ends, however that ends. This runs Python between
                fork and exec, so no thread may have been started: a child could inherit a held lock.
        """
        if dies_with_parent:
            options["preexec_fn"] = die_with_parent(os.getpid())
        if has_group:
            options["process_group"] = 0
        popen = subprocess.Popen(command, env=env, **options)
        process = Process(popen, has_group=has_group)
        self.processes.append(process)
        self.watch(process.pidfd, lambda _: self._on_end(process, on_end))
        return process

    def watch(
        self,
        source: int | socket.socket,
        act: Callable[[int], object],
        events: int = selectors.EVENT_READ,
    ) -> None:
        """Call `act(events)` in `serve` whenever `source` is ready, until `unwatch`."""
        self._selector.register(source, events, act)

    def unwatch(self, source: int | socket.socket) -> None:
        """End a `watch`; the source stays open."""
        self._selector.unregister(source)

    def serve(self, until: float | None = None) -> None:
        """Wait for an event, a signal that is due or the time `until`; dispatch what there is."""
        limits = [at for at in (until, self._escalation.next_at) if at is not None]
        wait = max(0.0, min(limits) - self._runtime.now()) if limits else None
        for key, events in self._selector.select(wait):
            act: Callable[[int], object] = key.data
            act(events)
        number = self._escalation.due(self._runtime.now())
        if number is not None:
            for process in self.processes:
                process.was_told_to_end = True
                process.signal(number)

    def stop(self, grace_s: float) -> None:
        """Give all processes `grace_s` seconds to end; then `serve` sends SIGTERM, then SIGKILL."""
        self._escalation.begin(self._runtime.now(), grace_s)

    def kill(self) -> None:
        """End all processes with SIGKILL in the current or next `serve`."""
        self._escalation.kill(self._runtime.now())

    @contextlib.contextmanager
    def signals(self, on_signal: Callable[[signal.Signals], None]) -> Iterator[None]:
        """Dispatch the signals that end a program in `serve`, not between two instructions.

        The handlers keep the numbers and the socket only wakes `serve`, so a full socket loses no signal.
        """
        reader, writer = wake_pair()
        received: deque[int] = deque()

        def dispatch(_: int) -> None:
            reader.recv(4096)
            while received:
                on_signal(signal.Signals(received.popleft()))

        handlers = {n: signal.signal(n, lambda number, _: received.append(number)) for n in forwarded()}
        wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self.watch(reader, dispatch)
        try:
            yield
        finally:
            self.unwatch(reader)
            signal.set_wakeup_fd(wakeup)
            reader.close()
            writer.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def close(self) -> None:
        """Kill what still runs, and wait for it."""
        for process in self.processes:
            process.signal(signal.SIGKILL)
        for process in self.processes:
            process.code = process.popen.wait()
            os.close(process.pidfd)
        self.processes.clear()
        self._selector.close()

    def _on_end(self, process: Process, on_end: Callable[[Process], None]) -> None:
        process.signal(signal.SIGKILL)  # what it has left behind in its process group
        self.unwatch(process.pidfd)
        process.code = process.popen.wait()
        on_end(process)


def wake_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a socket: a byte sent to the second wakes a loop that watches the first."""
    pair = socket.socketpair()
    for end in pair:
        end.setblocking(False)
    return pair
