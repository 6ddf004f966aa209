"""Messages between two ranks: send, receive and probe.

Wrong arguments are refused here, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from unisono.comm.deadlock import ANY_RANK, ANY_TAG
from unisono.comm.group import Group
from unisono.comm.object_payload import as_no_object, packed, unpacked
from unisono.core import buffers
from unisono.core.buffers import Array
from unisono.core.call import Call, Message, Steps, await_request, await_requests
from unisono.core.envelope import ANY, TAG_MAX, Any_, Status, as_int
from unisono.core.request import Request
from unisono.core.runtime import NEVER
from unisono.core.work import Work
from unisono.errors import ProtocolError, UsageError

__all__ = ["Messages", "receivable", "received"]

T = TypeVar("T")


class Messages:
    """The verbs between two ranks, each of which returns a Work. Arguments and errors: verb_docs.py."""

    def __init__(self, group: Group, *, timers: bool = True) -> None:
        self._group = group
        # The thread in a blocking verb watches its deadline; a started operation needs a timer.
        self._timers = timers

    def send(self, data: Any, dst: int, tag: int = 0, *, timeout: float | None = None) -> Work[None]:
        """Send an array or a number to rank `dst`.

        A message up to the eager limit (`Config.eager_bytes`) is copied, and the send ends at once, while the
        receiver has credit for it. Any other send ends when the message was received: `data` must not change
        before.
        """
        return self._send("send", buffers.view(data, "data"), dst, tag, timeout)

    def recv(
        self, buf: Any, src: int | Any_ = ANY, tag: int | Any_ = ANY, *, timeout: float | None = None
    ) -> Work[Status]:
        """Receive a message into `buf`, which may be longer than the message.

        Messages of one sender with one tag are received in the order they were sent.

        Returns:
            Status(source, tag, nbytes).
        """
        array = receivable(buf)
        src, tag = self._source_of(src), tag if isinstance(tag, Any_) else _tag_of(tag)

        def steps(call: Call) -> Steps[Any]:
            return (yield from self._receive(call, array, src, tag))

        return self._begin("recv", timeout, steps)

    def recv_bytes(
        self, src: int | Any_ = ANY, tag: int | Any_ = ANY, *, timeout: float | None = None
    ) -> Work[bytes]:
        """Receive a message of unknown length as bytes; at most `Config.recv_bytes_max`."""
        return self._receive_unsized("recv_bytes", src, tag, timeout)

    def sendrecv(
        self, data: Any, dst: int, buf: Any, src: int | Any_, tag: int = 0, *, timeout: float | None = None
    ) -> Work[Status]:
        """Send `data` to `dst` and receive into `buf` from `src` at the same time: swapping cannot block."""
        array, into = buffers.view(data, "data"), receivable(buf)
        dst, tag = self._rank_of(dst, "dst"), _tag_of(tag)
        src = self._source_of(src)
        if array.overlaps(into):
            raise UsageError("data and buf overlap; allowed: separate memory")

        def steps(call: Call) -> Steps[Status]:
            sending = self._start_send(array, dst, tag)
            call.messages = (self._message(dst, tag, sending, is_send=True),)
            try:
                status: Status = yield from self._receive(call, into, src, tag)
            except Exception:
                sending.cancel()
                yield from await_requests(call, [sending])
                raise
            yield from await_request(call, sending, lambda: (self._group.world_ranks[dst],))
            return status

        return self._begin("sendrecv", timeout, steps)

    def send_object(self, obj: Any, dst: int, tag: int = 0, *, timeout: float | None = None) -> Work[None]:
        """Send an object to rank `dst`, which calls `recv_object`.

        It is packed at once, and may change when the call returns. At most `Config.recv_bytes_max` bytes.
        """
        array = packed(obj, self._group.backend.config.recv_bytes_max)
        return self._send("send_object", array, dst, tag, timeout)

    def recv_object(
        self, src: int | Any_ = ANY, tag: int | Any_ = ANY, *, timeout: float | None = None
    ) -> Work[Any]:
        """Receive what `send_object` has sent, and return the object."""
        return self._receive_unsized("recv_object", src, tag, timeout)

    def probe(
        self, src: int | Any_ = ANY, tag: int | Any_ = ANY, *, timeout: float | None = None
    ) -> Work[Status | None]:
        """Wait for a message without receiving it; with `timeout=0`, None if none is queued now."""
        src, tag = self._source_of(src), tag if isinstance(tag, Any_) else _tag_of(tag)
        is_poll = timeout == 0 and not isinstance(timeout, bool)
        if is_poll:
            self._group.backend.runtime.polled()

        def steps(call: Call) -> Steps[Any]:
            request = self._group.backend.probe(src, self._group.context, tag)
            if is_poll and not request.done and request.cancel():
                return None
            call.messages = (self._message(src, tag, request),)
            yield from await_request(call, request, self._awaited(src))
            return received(self._group, "probe", request)

        return self._begin("probe", None if is_poll else timeout, steps)

    @property
    def _rank(self) -> int:
        return self._group.backend.rank

    @property
    def _size(self) -> int:
        return self._group.backend.size

    def _begin(
        self,
        operation: str,
        timeout: float | None,
        steps: Callable[[Call], Steps[T]],
        *,
        is_collective: bool = False,
        is_send: bool = False,
    ) -> Work[T]:
        backend = self._group.backend
        limit_s = backend.config.deadline_s if timeout is None else timeout
        deadline = NEVER if limit_s is None else backend.runtime.deadline(limit_s)
        return self._group.start(
            operation, deadline, steps, is_collective=is_collective, timers=self._timers, is_send=is_send
        )

    def _send(self, operation: str, array: Array, dst: int, tag: int, timeout: float | None) -> Work[None]:
        dst, tag = self._rank_of(dst, "dst"), _tag_of(tag)

        def steps(call: Call) -> Steps[None]:
            request = self._start_send(array, dst, tag)
            call.messages = (self._message(dst, tag, request, is_send=True),)
            yield from await_request(call, request, lambda: (self._group.world_ranks[dst],))

        return self._begin(operation, timeout, steps, is_send=True)

    def _receive_unsized(
        self, operation: str, src: int | Any_, tag: int | Any_, timeout: float | None
    ) -> Work[Any]:
        src, tag = self._source_of(src), tag if isinstance(tag, Any_) else _tag_of(tag)

        def steps(call: Call) -> Steps[Any]:
            request = self._group.backend.start_recv(src, self._group.context, tag, None)
            call.messages = (self._message(src, tag, request),)
            yield from await_request(call, request, self._awaited(src))
            return received(self._group, operation, request)

        return self._begin(operation, timeout, steps)

    def _start_send(self, array: Array, dst: int, tag: int) -> Request:
        group = self._group
        header = group.introduction(dst)
        return group.backend.start_send(
            dst, group.context, tag, array.bytes(), dtype=array.dtype.code, header=header
        )

    def _receive(self, call: Call, into: Array, src: int | Any_, tag: int | Any_) -> Steps[Any]:
        backend = self._group.backend
        request = backend.start_recv(src, self._group.context, tag, into.bytes(), dtype=into.dtype.code)
        call.messages += (self._message(src, tag, request),)
        yield from await_request(call, request, self._awaited(src))
        return received(self._group, call.operation, request)

    def _message(
        self, peer: int | Any_, tag: int | Any_, request: Request, *, is_send: bool = False
    ) -> Message:
        """The message as deadlock detection sees it."""
        rank = ANY_RANK if isinstance(peer, Any_) else self._group.world_ranks[peer]
        return Message(is_send, rank, ANY_TAG if isinstance(tag, Any_) else tag, request)

    def _awaited(self, src: int | Any_) -> Callable[[], tuple[int, ...]]:
        ranks = () if isinstance(src, Any_) else (self._group.world_ranks[src],)
        return lambda: ranks

    def _rank_of(self, rank: Any, what: str) -> int:
        """A rank that the user passed, as an int; every kind of integer is allowed."""
        if rank is ANY:
            raise UsageError(f"{what}=ANY; allowed: ranks 0 to {self._size - 1}")
        number: int = as_int(rank)
        self._group.backend.check_peer(number, what)
        return number

    def _source_of(self, src: Any) -> int | Any_:
        return src if isinstance(src, Any_) else self._rank_of(src, "src")


def receivable(buf: Any, what: str = "buf") -> Array:
    """View an object as memory to receive into."""
    array = buffers.view(buf, what, writable=True)
    if array.is_value:
        raise UsageError(f"{what} is a number; allowed: writable memory to receive into")
    return array


def _tag_of(tag: Any) -> int:
    number = as_int(tag)
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= TAG_MAX:
        raise UsageError(f"tag={tag!r}; allowed: 0 to {TAG_MAX}")
    return number


def received(group: Group, operation: str, request: Request) -> Any:
    """What a verb gives whose receive or probe has ended well.

    Raises:
        ProtocolError: the message belongs to another group, or is no object.
    """
    envelope = request.envelope
    assert envelope is not None
    if operation != "probe":
        group.check_introduction(envelope.header, envelope.source)
    match operation:
        case "recv_bytes":
            return bytes(request.data or b"")
        case "recv_object":
            try:
                return unpacked(request.data or b"")
            except ProtocolError as error:
                raise as_no_object(error) from error.__cause__
    return Status(envelope.source, envelope.tag, envelope.nbytes)
