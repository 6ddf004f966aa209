"""Ranks inside one process, each with an engine of its own: what `uni.local` gives to threads.

The engines are linked by memory of the process, without sockets. Whether a thread can go on is known here
with certainty, so deadlocks are seen by the threads that wait (thread_watch.py), not by messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unisono import _native
from unisono.backends.native.backend import NativeBackend
from unisono.backends.native.clock import NativeRuntime
from unisono.backends.native.completions import CompletionDispatcher
from unisono.backends.registry import BackendInfo
from unisono.backends.thread_watch import ThreadUsers, ThreadWatch
from unisono.config import Config
from unisono.core.envelope import Tags
from unisono.core.runtime import Event, Waiting
from unisono.messaging.backend import Capabilities

__all__ = ["DESCRIPTION", "LocalRank"]

_CAPABILITIES = Capabilities("local", run_plan=True)


class LocalRank(NativeBackend):
    """One of n ranks that share this process."""

    @classmethod
    def create(cls, size: int, config: Config | None = None) -> list[LocalRank]:
        """Make `size` connected ranks.

        Raises:
            UsageError: `size` is not an integer of at least 1.
        """
        settings = config if config is not None else Config()
        engines: list[_native.Engine] = []
        watch = ThreadWatch(size, settings.deadlock_after_s, _Engines(engines))
        world = _native.LocalWorld(size)
        ranks: list[LocalRank] = []
        try:
            for rank in range(size):
                ranks.append(cls(rank, size, settings, world, watch))
                engines.append(ranks[-1].engine)
        except BaseException:
            for made in ranks:
                made.close()
            raise
        cards = [rank.card() for rank in ranks]
        for each in ranks:
            each.connect(cards)
        return ranks

    def __init__(
        self, rank: int, size: int, config: Config, world: _native.LocalWorld, watch: ThreadWatch
    ) -> None:
        self._watch = watch
        super().__init__(rank, size, "", b"", config=config, neighbours=False, local=world)
        self._left = self._runtime.finalizer(self, lambda: watch.note_left(rank))

    @property
    def engine(self) -> _native.Engine:
        """The engine of this rank."""
        return self._engine

    @property
    def capabilities(self) -> Capabilities:
        """The engine runs plans."""
        return _CAPABILITIES

    def link_kind(self) -> str:
        """Memory, whatever the settings say about links between processes."""
        return "shm"

    def close(self) -> None:
        """Leave. Messages that were sent before can still be received."""
        super().close()
        if self._left.detach():
            self._watch.note_left(self._rank)

    def _make_runtime(self, completions: CompletionDispatcher) -> NativeRuntime:
        return _LocalRuntime(completions, self._watch)


class _LocalRuntime(NativeRuntime):
    """The runtime of native ranks, with the watch for threads that can never go on."""

    sees_deadlocks = True

    def __init__(self, completions: CompletionDispatcher, watch: ThreadWatch) -> None:
        super().__init__(completions)
        self._watch = watch

    def used(self, rank: int) -> None:
        """The calling thread starts an operation of a rank: it belongs to the rank."""
        self._watch.used(rank)

    def block(
        self, event: Event, timeout: float | None, waiting: Callable[[], Waiting], *, is_limited: bool = True
    ) -> bool:
        """Wait; without a time limit, raise Deadlock once no thread can end the wait."""
        return self._watch.block(super().block, self.now, event, timeout, waiting, is_limited=is_limited)


class _Engines:
    """What the engines of all ranks know of threads and messages."""

    def __init__(self, engines: Sequence[_native.Engine]) -> None:
        self._engines = engines

    def moves(self) -> int:
        return sum(map(_native.LocalWorld.moves, self._engines))

    def is_quiet(self) -> bool:
        """Twice in a row: what moved at one rank may move something at a rank that was asked before."""
        return all(map(_native.LocalWorld.is_quiet, (*self._engines, *self._engines)))

    def has_pending(self, rank: int) -> bool:
        return _native.LocalWorld.has_pending(self._engines[rank], Tags.CONTROL)

    def users(self, rank: int) -> ThreadUsers:
        living, has_lost_users = _native.LocalWorld.users(self._engines[rank])
        return ThreadUsers(dict(living), has_lost_users)


DESCRIPTION = BackendInfo(
    name="local",
    summary="ranks as threads of one process",
    check=lambda: None,
    install="part of unisono",
    capabilities=_CAPABILITIES,
)
