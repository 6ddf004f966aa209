"""Two replacements in iroh's Python bindings.

The bindings copy outgoing bytes one by one (5 MB/s); the replacement uses one memmove. And when a future is
done, a thread of iroh waits for the GIL in order to report it. Meanwhile the thread answers no pings, so a
rank whose interpreter is busy looks dead; the replacement signals an event descriptor instead, which is also
faster.

Both are applied only if the source text of the replaced functions is the known one. Otherwise the bindings
stay as they are, and a warning names the consequences.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import importlib.metadata
import inspect
import itertools
import textwrap
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from unisono._native import CompletionEventFd

__all__ = ["repair", "use_event_fd"]

# The series that was checked; within it the digests of the functions' source decide.
_SERIES: Final = "1.2."
_COPY: Final = {
    "_UniffiRustBufferBuilder.write": "1dc5c39048caed57",
    "_UniffiRustBufferBuilder._reserve": "676a487dca237f79",
    "_UniffiRustBuffer.alloc_with_builder": "643f98c43def5122",
}
_WAKE: Final = {
    "_uniffi_rust_call_async": "c97dc6a3f1e5a216",
    "_uniffi_rust_call_with_error": "ce81d7439d23fac0",
}
_SAMPLE: Final = bytes(range(256)) * 5
# Futures that are done at once, in a row, before other tasks of the loop get a turn.
_AT_ONCE_MAX: Final = 8


def repair(bindings: Any = None, version: str | None = None) -> tuple[bool, bool]:
    """Apply both replacements once; returns for each whether it is in place: the copy, the wake-up."""
    if bindings is None:
        from iroh import iroh_ffi

        bindings = iroh_ffi
    found = importlib.metadata.version("iroh") if version is None else version
    done = []
    for what, known, make in (
        ("its copy of outgoing bytes stays slow, and iroh sends some MB/s only", _COPY, _mend_copy),
        ("a rank that keeps Python busy for long may be declared dead", _WAKE, _mend_wake),
    ):
        if make in getattr(bindings, "_unisono_repairs", ()):
            done.append(True)
            continue
        reason = _difference(bindings, found, known) or make(bindings)
        if reason is None:
            bindings._unisono_repairs = (*getattr(bindings, "_unisono_repairs", ()), make)
        else:
            warnings.warn(f"iroh's Python bindings are left as they are: {reason}; {what}", stacklevel=2)
        done.append(reason is None)
    return done[0], done[1]


def use_event_fd(loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
    """Let iroh wake a loop through an event descriptor; returns a function that ends this."""
    waiting = _Waiting(loop)
    _waiting[loop] = waiting
    return waiting.close


def _difference(bindings: Any, version: str, known: dict[str, str]) -> str | None:
    """How these bindings differ from the known ones; None if they do not."""
    if not version.startswith(_SERIES):
        return f"iroh {version} is not of the series {_SERIES}x"
    for path, digest in known.items():
        found = bindings
        for name in path.split("."):
            found = getattr(found, name, None)
        try:
            source = textwrap.dedent(inspect.getsource(found))
        except (TypeError, OSError):
            return f"there is no readable {path}"
        if hashlib.blake2b(source.encode(), digest_size=8).hexdigest() != digest:
            return f"{path} differs from the known one"
    return None


# -- the copy ---------------------------------------------------------------------------------------------


def _mend_copy(bindings: Any) -> str | None:
    builder, converter = bindings._UniffiRustBufferBuilder, bindings._UniffiFfiConverterBytes
    slow, builder.write = builder.write, _write
    # Check the copy through iroh's own memory and back, without a network.
    if all(converter.lift(converter.lower(s)) == bytes(s) for s in (b"", _SAMPLE, memoryview(_SAMPLE))):
        return None
    builder.write = slow
    return "the replacement did not keep the bytes"


def _write(self: Any, value: Any) -> None:
    """The builder's `write`, as one memmove."""
    count = len(value)
    if not count:
        return
    with self._reserve(count):
        target = ctypes.addressof(self.rbuf.data.contents) + self.rbuf.len
        # The address of memory that may be read-only: ctypes itself gives that of writable memory only.
        ctypes.memmove(target, np.frombuffer(value, np.uint8).ctypes.data, count)


# -- the wake-ups -----------------------------------------------------------------------------------------


class _Waiting:
    """The futures that the tasks of one loop wait for, by number."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._event_fd = CompletionEventFd()
        self._futures: dict[int, asyncio.Future[int]] = {}
        self._numbers = itertools.count(1)
        self._at_once = 0
        loop.add_reader(self._event_fd.descriptor(), self.dispatch)

    def begin(self) -> tuple[asyncio.Future[int], int]:
        """A future, and the ticket that ends it."""
        number, future = next(self._numbers), self._loop.create_future()
        self._futures[number] = future
        return future, self._event_fd.token(number)

    def dispatch(self) -> None:
        for number, code in self._event_fd.take():
            future = self._futures.pop(number)
            if not future.done():
                future.set_result(code)

    async def end(self, future: asyncio.Future[int]) -> int:
        """Wait for a future, unless it is done already."""
        self.dispatch()
        if not future.done():
            self._at_once = 0
            return await future
        self._at_once += 1
        if self._at_once >= _AT_ONCE_MAX:
            self._at_once = 0
            await asyncio.sleep(0)
        return future.result()

    def close(self) -> None:
        """Stop watching the descriptor; tickets that were not used yet keep it open."""
        self._loop.remove_reader(self._event_fd.descriptor())
        _waiting.pop(self._loop, None)


_waiting: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Waiting] = weakref.WeakKeyDictionary()


def _mend_wake(bindings: Any) -> str | None:
    kind = bindings._UNIFFI_RUST_FUTURE_CONTINUATION_CALLBACK
    if (kind._restype_, kind._argtypes_) != (None, (ctypes.c_uint64, ctypes.c_int8)):
        return "its callbacks are called in another way"
    ring, ready = kind(CompletionEventFd.ring()), bindings._UNIFFI_RUST_FUTURE_POLL_READY
    theirs, complete_with = bindings._uniffi_rust_call_async, bindings._uniffi_rust_call_with_error

    async def call(future: Any, poll: Any, complete: Any, free: Any, lift: Any, errors: Any) -> Any:
        """`_uniffi_rust_call_async`, with an event descriptor in place of the callback."""
        waiting = _waiting.get(asyncio.get_running_loop())
        if waiting is None:
            return await theirs(future, poll, complete, free, lift, errors)
        try:
            while True:
                ended, ticket = waiting.begin()
                poll(future, ring, ticket)
                if await waiting.end(ended) == ready:
                    return lift(complete_with(errors, complete, future))
        finally:
            free(future)

    bindings._uniffi_rust_call_async = call
    return None
