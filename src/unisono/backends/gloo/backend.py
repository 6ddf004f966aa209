"""The gloo backend: the Gloo library that comes with torch carries the frames of a FramedBackend.

Process groups are made without torch.distributed's global state. Each peer has two threads: one waits for
what the peer sends, the other for our sends to it to complete. One wait that expires would break all links of
a process group, so no wait expires.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import struct
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

import msgspec

from unisono.backends.framed import FramedBackend, FrameTransport, frame_bytes_max
from unisono.backends.gloo.collectives import GlooCollectives
from unisono.backends.gloo.process_group import GroupMaker, break_links, first_line
from unisono.backends.registry import BackendInfo, BindSpec, decoded_card
from unisono.core.clock import RealRuntime
from unisono.core.envelope import Lane
from unisono.core.request import Request
from unisono.errors import ProtocolError, UsageError
from unisono.messaging.backend import Capabilities
from unisono.messaging.stage import Stage
from unisono.plans.steps import Problem

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DESCRIPTION", "GlooBackend", "UnconnectedGloo"]

_FRAME, _PAYLOAD = 1, 2  # Gloo's tags
# Receives posted for the frames of one peer, so that the next can arrive while one is handled.
_RECEIVES_POSTED: Final = 2
# A thread ends within this time after it was asked to, unless its peer hangs.
_JOIN_S: Final = 1.0
# Gloo does not report the length of a message that is shorter than its buffer, so each frame begins with it.
_LENGTH: Final = struct.Struct("<I")
_CAPABILITIES: Final = Capabilities("gloo", run_collective=True)
_INSTALL: Final = "pip install 'unisono[torch]'"


class GlooBackend(FramedBackend):
    """One rank over two process groups: one for messages, one for Gloo's own collectives.

    A cancelled collective may leave its group in the middle of an exchange; messages go on.
    """

    def __init__(self, spec: BindSpec, device: Any, messages: Any, collectives: Any) -> None:
        super().__init__(spec.rank, spec.size, spec.config, RealRuntime())
        self._collectives = GlooCollectives(self, collectives, device)
        self._transport = transport = _GlooTransport(self, messages)
        self.watch(self._collectives.peer_down)
        transport.start()
        # No thread may return from Gloo while the interpreter shuts down.
        atexit.register(self._abandon)

    @property
    def capabilities(self) -> Capabilities:
        """Messages, and Gloo's own collectives."""
        return _CAPABILITIES

    def run_collective(self, problem: Problem, stage: Stage) -> Request | None:
        """Let Gloo run it, if Gloo gives our results."""
        return self._collectives.run(problem, stage)

    def end_group(self, context: int) -> None:
        """Free the communicator's queue and its unclaimed messages."""
        super().end_group(context)
        self._collectives.close_queue(context)

    def close(self) -> None:
        """Leave."""
        super().close()
        self._collectives.close()
        atexit.unregister(self._abandon)

    def _abandon(self) -> None:
        """Leave without a goodbye."""
        self._collectives.close()
        self._transport.close()


class UnconnectedGloo:
    """A rank that is not connected yet: its process groups wait for the addresses of all ranks."""

    def __init__(self, spec: BindSpec) -> None:
        if spec.is_encrypted:
            raise UsageError(
                "gloo's links have no encryption, and these ranks are on several hosts or asked for it",
                next_step="use backend='native', or insecure=True on a network that only these ranks reach",
            )
        from torch.distributed import ProcessGroupGloo

        self._spec = spec
        self._device = ProcessGroupGloo.create_device(hostname=spec.host, lazy_init=False)
        self._makers = [GroupMaker(self._device, spec.rank, spec.size) for _ in range(2)]

    def card(self) -> bytes:
        """What the others need to reach this rank."""
        return msgspec.msgpack.encode([maker.card() for maker in self._makers])

    def connect(self, cards: Sequence[bytes]) -> GlooBackend:
        """Connect to all other ranks.

        Raises:
            ProtocolError: a card is malformed.
            RendezvousError: Gloo could not connect.
        """
        pairs = [decoded_card(card, tuple[bytes, bytes]) for card in cards]
        for index, maker in enumerate(self._makers):
            maker.fill([pair[index] for pair in pairs])
        messages, collectives = (maker.group() for maker in self._makers)
        return GlooBackend(self._spec, self._device, messages, collectives)

    def close(self) -> None:
        """Give up."""
        for maker in self._makers:
            maker.close()


class _GlooTransport(FrameTransport):
    """Frames and payloads as sends and receives of a process group."""

    def __init__(self, backend: GlooBackend, group: Any) -> None:
        import torch

        self._torch = torch
        self._backend = backend
        self._group = group
        self._frame_bytes = _LENGTH.size + frame_bytes_max(backend.config)
        others = [peer for peer in range(backend.size) if peer != backend.rank]
        self._send_locks = {peer: threading.Lock() for peer in others}
        self._sent: dict[int, SimpleQueue[tuple[Any, Tensor] | None]] = {
            peer: SimpleQueue() for peer in others
        }
        self._threads = [
            threading.Thread(target=partial(work, peer), name=f"unisono-gloo-{name}-{peer}", daemon=True)
            for peer in others
            for name, work in (("receiver", self._receive), ("sender", self._complete_sends))
        ]

    def start(self) -> None:
        """Begin to receive."""
        for thread in self._threads:
            thread.start()

    def send(self, peer: int, frame: bytes, payload: memoryview | None, lane: Lane | None) -> None:
        """Start the sends; Gloo keeps their order."""
        with self._send_locks[peer]:
            self._start_send(peer, memoryview(_LENGTH.pack(len(frame)) + frame), _FRAME)
            if payload:
                self._start_send(peer, payload, _PAYLOAD)

    def is_own_thread(self) -> bool:
        """Whether this thread is one of those that wait for Gloo."""
        return threading.current_thread() in self._threads

    def close(self) -> None:
        """Let the threads end, also those whose peers have not answered the goodbye."""
        for queue in self._sent.values():
            queue.put(None)
        unanswered = [peer for peer in self._sent if not self._backend.is_over(peer)]
        if unanswered:
            break_links(self._group, tuple(unanswered))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)

    def _start_send(self, peer: int, memory: memoryview, tag: int) -> None:
        tensor = self._tensor(memory)
        # The receiver thread reports a broken link, after the frames that had arrived before.
        with contextlib.suppress(RuntimeError):
            self._sent[peer].put((self._group.send([tensor], peer, tag), tensor))

    def _complete_sends(self, peer: int) -> None:
        """Keep what was sent to a peer until Gloo is done with it."""
        while (entry := self._sent[peer].get()) is not None:
            with contextlib.suppress(RuntimeError):
                entry[0].wait()

    def _receive(self, peer: int) -> None:
        """Receive the frames of a peer until it has left."""
        backend, torch = self._backend, self._torch
        try:
            buffers = [torch.empty(self._frame_bytes, dtype=torch.uint8) for _ in range(_RECEIVES_POSTED)]
            works = [self._start_recv(buffer, peer, _FRAME) for buffer in buffers]
            while not backend.is_over(peer):
                _wait(works.pop(0))
                buffer = buffers.pop(0)
                payload = backend.arrive_logged(peer, _frame_in(buffer))
                if payload is not None:
                    memory, on_received = payload
                    _wait(self._start_recv(self._tensor(memory), peer, _PAYLOAD))
                    on_received()
                if not backend.is_over(peer):
                    buffers.append(buffer)
                    works.append(self._start_recv(buffer, peer, _FRAME))
        except ProtocolError as error:
            backend.broken(peer, error)
        except _LinkError as error:
            backend.lost(peer, f"closed its connection ({error})")

    def _start_recv(self, memory: Tensor, peer: int, tag: int) -> Any:
        try:
            return self._group.recv([memory], peer, tag)
        except RuntimeError as error:
            raise _LinkError(first_line(error)) from None

    def _tensor(self, memory: memoryview) -> Tensor:
        """A tensor on the memory; on a copy if it is read-only, because torch warns about that."""
        torch = self._torch
        return torch.frombuffer(bytearray(memory) if memory.readonly else memory, dtype=torch.uint8)


class _LinkError(Exception):
    """A link of Gloo's is gone."""


def _wait(work: Any) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise _LinkError(first_line(error)) from None


def _frame_in(buffer: Tensor) -> memoryview:
    """The frame in a receive buffer."""
    memory = memoryview(buffer.numpy())
    (length,) = _LENGTH.unpack_from(memory)
    if length > len(memory) - _LENGTH.size:
        raise ProtocolError(f"a frame says it has {length} bytes; at most {len(memory) - _LENGTH.size} fit")
    return memory[_LENGTH.size : _LENGTH.size + length]


def _check() -> str | None:
    """Why it cannot run here. torch itself is not imported, because that takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return "torch is not installed"
    if not (Path(spec.submodule_search_locations[0]) / "distributed").is_dir():
        return "this torch was built without torch.distributed"
    return None


DESCRIPTION = BackendInfo(
    name="gloo",
    summary="ranks as processes, over the Gloo library of torch",
    check=_check,
    install=_INSTALL,
    capabilities=_CAPABILITIES,
    bind=UnconnectedGloo,
)
