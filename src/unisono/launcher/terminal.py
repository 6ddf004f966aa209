"""Takes the launcher and all ranks into one session without a terminal, if it was started at one.

The system stops a process that reads from the terminal of its own session in the background, but not one of
another session: so rank 0 may read what the user types. And all ranks must share a session: Linux schedules
sessions against each other (`sched_autogroup`), and a rank that waits cannot yield its core to another
session.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from typing import NoReturn

from unisono.launcher.parent_death import die_with_parent
from unisono.launcher.supervisor import forwarded

__all__ = ["leave_terminal"]


def leave_terminal() -> None:
    """Return in a child process that has a session of its own.

    This process stays at the terminal: it forwards signals, and ends as the child does. Call it before
    anything is printed, and before the first thread is started: the child could inherit a held lock.
    """
    become_child = die_with_parent(os.getpid())
    waited_for = [*forwarded(), signal.SIGTSTP, signal.SIGCHLD]
    # A signal that comes before this process waits for it is kept until then.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    child = os.fork()
    if child != 0:
        _stay(child, waited_for)
    become_child()
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stay(child: int, waited_for: Sequence[signal.Signals]) -> NoReturn:
    """Forward signals to the child until it ends; then end in the same way."""
    while True:
        number = signal.sigwait(waited_for)
        if number == signal.SIGCHLD:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid == child:
                _end_like(os.waitstatus_to_exitcode(status))
        elif number == signal.SIGTSTP:  # Ctrl-Z: the launcher stops, and goes on when this process does
            os.kill(child, signal.SIGSTOP)
            _stop()
            os.kill(child, signal.SIGCONT)
        else:
            os.kill(child, number)


def _stop() -> None:
    """Stop until a shell continues this process; not at all if there is none that could.

    SIGSTOP would stop it for ever then, as under `ssh -t host unisono run ...`.
    """
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTSTP])  # it takes effect here
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTSTP])


def _end_like(code: int) -> NoReturn:
    """End with an exit code, or, if it is negative, by that signal."""
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler that could be in the way
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)
