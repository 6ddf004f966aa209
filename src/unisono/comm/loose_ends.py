"""Loose ends: what a user left undone on a communicator, logged as a warning when it is closed.

Works that were never waited for, messages that were never received, and a mismatch that was raised only in
another thread than the one that closes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

from unisono.comm.group_state import GroupState
from unisono.core.call_site import call_site, calling_thread, line_of
from unisono.core.envelope import ANY, Any_, Envelope
from unisono.errors import CollectiveMismatch, UnisonoError

__all__ = ["LooseEnds"]

_log = logging.getLogger("unisono")


class LooseEnds:
    """The loose ends of one group."""

    def __init__(self, state: GroupState) -> None:
        self._state = state
        # By verb and line of the caller: works that were started and not waited for yet.
        self._unwaited: dict[tuple[str, str], int] = {}
        self.is_lenient = False  # about works that are dropped, or never waited for
        # By thread: where a mismatch was raised in it first.
        self._raised: dict[int, str] = {}

    def add_started(self, operation: str) -> tuple[str, str]:
        """A work was started here; the caller holds the lock and passes the result to `remove_started`."""
        started = (operation, call_site())
        self._unwaited[started] = self._unwaited.get(started, 0) + 1
        return started

    def remove_started(self, started: tuple[str, str]) -> None:
        """A thread of the user has seen how the work ended."""
        with self._state.lock:
            self._unwaited[started] -= 1
            if not self._unwaited[started]:
                del self._unwaited[started]

    def note_raised(self, where: str, error: BaseException | None) -> None:
        """An error is raised in this thread; a mismatch is remembered."""
        if isinstance(error, CollectiveMismatch):
            thread = threading.current_thread()
            self._raised.setdefault(thread.ident or 0, f"{where} at {call_site()}, in thread {thread.name}")

    def warn(self, where: Callable[[], str]) -> None:
        """Log the loose ends of a group that is being closed."""
        state = self._state
        with state.lock:
            error, unwaited = state.poisoned_by, dict(self._unwaited)
            for verb, code, instruction, n in () if state.native is None else state.native.unwaited():
                started_at = (verb, line_of(code, instruction))
                unwaited[started_at] = unwaited.get(started_at, 0) + n
            works = [] if self.is_lenient else sorted(unwaited.items())
        loose: list[str] = []
        if error is None:
            started = [f"{verb} at {site}" + (f" ({n} times)" if n > 1 else "") for (verb, site), n in works]
            queued = [f"{n} bytes from rank {rank}, tag {tag}" for rank, tag, n in self._unreceived()]
            loose += [f"works never waited for: {', '.join(started)}"] if started else []
            loose += [f"messages never received: {'; '.join(queued)}"] if queued else []
        elif isinstance(error, CollectiveMismatch) and calling_thread() not in self._raised:
            raised = "; ".join(self._raised.values())
            how = f"was raised {raised}" if raised else "no call has raised"
            loose.append(f"a mismatch that {how}: {error.what}")
        if loose and not state.is_aborted:
            _log.warning(
                "rank %d closes %r%s with %s", state.world_rank, state.name, where(), "; ".join(loose)
            )

    def _unreceived(self) -> list[tuple[int, int, int]]:
        """The first queued message of each member: its world rank, tag and length."""
        found: list[tuple[int, int, int]] = []
        if self._state.native is not None and not self._state.native.has_unexpected():
            return found
        with contextlib.suppress(UnisonoError):
            if self._queued_from(ANY) is not None:
                for source, rank in enumerate(self._state.world_ranks):
                    if (envelope := self._queued_from(source)) is not None:
                        found.append((rank, envelope.tag, envelope.nbytes))
        return found

    def _queued_from(self, source: int | Any_) -> Envelope | None:
        probe = self._state.backend.probe(source, self._state.context, ANY)
        probe.cancel()
        return probe.envelope
