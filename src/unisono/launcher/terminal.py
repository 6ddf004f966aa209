"""Takes the launcher and all ranks into one session without a terminal, if it was started at one.

The system stops a process that reads from the terminal of its own session in the background, but not one of
another session: so rank 0 may read what the user types. And all ranks must share a session: Linux schedules
sessions against each other (`sched_autogroup`), and a rank that waits cannot yield its core to another
session.
"""

from __future__ import annotations

import os
import signal
from typing import Final, NoReturn

from unisono.launcher.parent_death import die_with_parent
from unisono.launcher.supervisor import FORWARDED

__all__ = ["leave_terminal"]

_WAITED_FOR: Final = (*FORWARDED, signal.SIGTSTP, signal.SIGCHLD)


def leave_terminal() -> None:
    """Return in a child process that has a session of its own.

    This process stays at the terminal: it forwards signals, and ends as the child does. Call it before
    anything is printed, and before the first thread is started: the child could inherit a held lock.
    """
    become_child = die_with_parent(os.getpid())
    # A signal that comes before this process waits for it is kept until then.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
    child = os.fork()
    if child != 0:
        _stay(child)
    become_child()
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stay(child: int) -> NoReturn:
    """Forward signals to the child until it ends; then end in the same way."""
    while True:
        number = signal.sigwait(_WAITED_FOR)
        if number in FORWARDED:
            os.kill(child, number)
        elif number == signal.SIGTSTP:  # Ctrl-Z: the launcher stops, and goes on when this process does
            os.kill(child, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            os.kill(child, signal.SIGCONT)
        else:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid == child:
                _end_like(os.waitstatus_to_exitcode(status))


def _end_like(code: int) -> NoReturn:
    """End with an exit code, or, if it is negative, by that signal."""
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)
