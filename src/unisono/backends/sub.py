"""A view on some ranks of another backend: it translates ranks, and the parent does the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from unisono._native import CallLog, NativeGroup, RankMap
from unisono.config import Config
from unisono.core.envelope import ANY, UNTYPED, Any_, Lane
from unisono.core.request import Request
from unisono.core.runtime import Runtime
from unisono.errors import UsageError
from unisono.messaging.backend import Backend, Capabilities, numbered_hosts
from unisono.messaging.fast_path import LibraryCalls, Mailbox
from unisono.messaging.peer_down import PeerDown
from unisono.messaging.stage import Stage

__all__ = ["SubBackend"]


class SubBackend(Backend):
    """Some ranks of a parent backend, renumbered from 0: in the order given (`ordered`), or sorted.

    Raises:
        UsageError: `members` is empty, names a rank twice, or does not contain the parent's own rank.
    """

    def __init__(self, parent: Backend, members: Sequence[int], *, ordered: bool = False) -> None:
        self._bind(parent, self.check(parent, members, ordered=ordered))

    @staticmethod
    def check(parent: Backend, members: Sequence[int], *, ordered: bool = False) -> tuple[int, ...]:
        """The members in their order; raises what the constructor raises."""
        if not members:
            raise UsageError("members is empty; allowed: one or more ranks of the parent")
        for member in members:
            parent.check_peer(member, "member")
        chosen = list(members) if ordered else sorted(set(members))
        if len(set(chosen)) != len(chosen):
            raise UsageError(f"members {chosen} name a rank twice", next_step="name each rank once")
        if parent.rank not in chosen:
            raise UsageError(
                f"rank {parent.rank} is not among the members {chosen}; only members may make the group",
                next_step="call it on the members only",
            )
        return tuple(chosen)

    @classmethod
    def of(cls, parent: Backend, members: tuple[int, ...]) -> SubBackend:
        """A view on members that are known to be right, in the order given."""
        view = cls.__new__(cls)
        view._bind(parent, members)
        return view

    def _bind(self, parent: Backend, members: tuple[int, ...]) -> None:
        # A view on a view would translate ranks once per level, so the parent is always the root backend.
        if isinstance(parent, SubBackend):
            members = parent.rank_map.peers_of(members)
            parent = parent.parent
        self.parent: Backend = parent
        self.rank_map = RankMap(members)
        rank = self.rank_map.to_local(parent.rank)
        assert rank is not None, "only members make the view"
        self._rank = rank

    @property
    def members(self) -> tuple[int, ...]:
        """The parent's numbers of the ranks."""
        return self.rank_map.peers

    def to_global(self, rank: int) -> int:
        """The parent's number of a rank of this view."""
        self.check_peer(rank, "rank")
        return self.rank_map.to_global(rank)

    def to_local(self, rank: int) -> int | None:
        """This view's number of a rank of the parent; None if it is not a member."""
        return self.rank_map.to_local(rank)

    @property
    def rank(self) -> int:
        """This process's rank in the view."""
        return self._rank

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.rank_map)

    @property
    def capabilities(self) -> Capabilities:
        """The parent's."""
        return self.parent.capabilities

    @property
    def runtime(self) -> Runtime:
        """The parent's."""
        return self.parent.runtime

    @property
    def config(self) -> Config:
        """The parent's."""
        return self.parent.config

    def start_send(
        self,
        dst: int,
        context: int,
        tag: int,
        data: memoryview,
        *,
        dtype: int = UNTYPED,
        header: bytes = b"",
        lane: Lane = Lane.BULK,
        sync: bool = False,
    ) -> Request:
        """Send through the parent."""
        target = self.to_global(dst)
        return self._translated(
            self.parent.start_send(
                target, context, tag, data, dtype=dtype, header=header, lane=lane, sync=sync
            ),
            dst,
        )

    def start_recv(
        self, src: int | Any_, context: int, tag: int | Any_, into: memoryview | None, *, dtype: int = UNTYPED
    ) -> Request:
        """Receive through the parent."""
        return self._translated(
            self.parent.start_recv(self._source(src), context, tag, into, dtype=dtype), src
        )

    def probe(self, src: int | Any_, context: int, tag: int | Any_) -> Request:
        """Probe through the parent."""
        return self._translated(self.parent.probe(self._source(src), context, tag), src)

    def run_plan(self, plan: Any, counts: tuple[int, ...], stage: Stage) -> Request:
        """Run a plan in the parent, among the members."""
        inner = replace(stage, rank_map=self.rank_map)
        return self._translated(self.parent.run_plan(plan, counts, inner), self.rank)

    def run_collective(self, problem: Any, stage: Stage) -> Request | None:
        """Let the parent's library run it, among the members."""
        request = self.parent.run_collective(problem, replace(stage, rank_map=self.rank_map))
        return None if request is None else self._translated(request, self.rank)

    def end_group(self, context: int) -> None:
        """End it in the parent."""
        self.parent.end_group(context)

    def end_unused(self, context: int) -> bool:
        """End it in the parent."""
        return self.parent.end_unused(context)

    def native_group(self, *group: Any, **options: Any) -> NativeGroup | None:
        """The members in the parent's engine."""
        return self.parent.native_group(*group, **{**options, "rank_map": self.rank_map})

    def compile_plan(self, plan: Any, itemsize: int) -> tuple[Any, int]:
        """The parent's: a program names the ranks of a group."""
        return self.parent.compile_plan(plan, itemsize)

    def library_calls(
        self, context: int, call_log: CallLog, rank_map: RankMap | None = None
    ) -> LibraryCalls | None:
        """Those of the parent's library, among the members."""
        return self.parent.library_calls(context, call_log, self.rank_map)

    def mailbox(self, context: int, tag: int, rank_map: RankMap | None = None) -> Mailbox | None:
        """The parent's, with the ranks of this view."""
        return self.parent.mailbox(context, tag, self.rank_map)

    def adopt(
        self,
        handle: int,
        peer: int | Any_ | None,
        buffer: memoryview | None,
        dtype: int,
        memory: tuple[Any, ...],
    ) -> Request:
        """Adopt an operation of the parent's engine."""
        there = self.rank_map.to_global(peer) if isinstance(peer, int) else peer
        return self._translated(
            self.parent.adopt(handle, there, buffer, dtype, memory), self.rank if peer is None else peer
        )

    def watch(self, listener: Callable[[PeerDown], None]) -> None:
        """Notify the listener of members that are down, by their ranks in this view."""

        def translate(down: PeerDown) -> None:
            rank = self.to_local(down.rank)
            if rank is not None:
                listener(PeerDown(rank, down.cause, down.left))

        self.parent.watch(translate)

    def close(self) -> None:
        """Do nothing: the parent stays open."""

    def link_kind(self) -> str:
        """The parent's."""
        return self.parent.link_kind()

    def hosts(self) -> tuple[int, ...]:
        """The members' hosts."""
        hosts = self.parent.hosts()
        return numbered_hosts([hosts[member] for member in self.members]) if hosts else ()

    def _translated(self, request: Request, peer: int | Any_) -> Request:
        request.peer, request.rank_map = peer, self.rank_map
        return request

    def _source(self, src: int | Any_) -> int | Any_:
        return src if src is ANY else self.to_global(src)
