"""Calls of a group as verbs of its communicator: blocking where the caller waits at once, else started."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import _profiler_enabled
from torch.autograd.profiler import record_function
from typing_extensions import deprecated

from unisono.comm.communicator import Communicator
from unisono.core.call_site import call_site, hide_files
from unisono.errors import UnisonoError
from unisono.pytorch.completion import Stream
from unisono.pytorch.errors import backend_error
from unisono.pytorch.work import DONE, Message, Once, Several, Started

__all__ = ["Calls", "Finish"]

# What is left to do when an operation has ended; it gets what the verb gives.
Finish: TypeAlias = Callable[[Any], object]

AnyWork = TypeVar("AnyWork", Started, Message, Several)

# In place of a profiler's record while there is no profiler.
_UNSEEN: Final = contextlib.nullcontext()

# Errors show the line that called torch; a function that is deprecated is called from a wrapper.
for _library in (str(Path(torch.__file__).parent), inspect.getfile(deprecated)):
    hide_files(_library)


class Calls:
    """The calls of one group.

    `members` are torch's global ranks, if the communicator has other world ranks.
    """

    def __init__(self, comm: Communicator, timeout: timedelta, members: tuple[int, ...] | None) -> None:
        comm._let_works_go()
        self.comm = comm
        self.timeout_s = timeout.total_seconds()
        # The works since coalescing began, while it is not ended.
        self.coalesced: list[Started | Several] | None = None
        self._members = members
        # By thread: the stream whose callbacks it runs.
        self._serving: dict[int, Stream] = {}
        self._stream = Stream(comm, self._serving)

    def run(
        self,
        verb: str,
        opts: Any,
        outputs: Sequence[Tensor],
        finish: Finish | None,
        *args: Any,
        **named: Any,
    ) -> Any:
        """Start a collective, or run it if the caller waits at once: a work of torch."""
        is_started = opts.asyncOp
        try:
            stream = self._stream if not self._serving else self._stream_here()
            verbs = stream.start if is_started else stream.comm
            with record_function(f"unisono:{_name(verb)}") if _profiler_enabled() else _UNSEEN:
                result = getattr(verbs, verb)(*args, **named, timeout=self._limit_s(opts))
            if finish is not None and not is_started:
                finish(result)
        except UnisonoError as error:
            raise self.failed(error, verb, call_site()) from error
        if not is_started:
            return DONE
        return self.kept(
            Started(self, stream, verb, result, outputs, None if finish is None else Once(finish))
        )

    def message(self, verb: str, tensors: Sequence[Tensor], finish: Once | None, *args: Any) -> dist.Work:
        """Start a send or a receive, in the first stream: its peer need not be in a callback, too."""
        stream = self._stream
        try:
            with record_function(f"unisono:{_name(verb)}") if _profiler_enabled() else _UNSEEN:
                started = getattr(stream.start, verb)(*args, timeout=self.timeout_s)
        except UnisonoError as error:
            raise self.failed(error, verb, call_site()) from error
        return self.kept(Message(self, stream, verb, started, tensors, finish))

    def failed(self, error: UnisonoError, call: str, site: str) -> dist.DistBackendError:
        """The error of a call that was made at a line of the user's program."""
        ranks = self.comm._group.world_ranks if self._members is None else self._members
        return backend_error(error, _name(call), site, ranks[self.comm.rank], self._members)

    def errors(self, call: str) -> _Errors:
        """Raise errors as those of a call."""
        return _Errors(self, call)

    def close(self) -> None:
        """Let the threads for callbacks end when they have run what is due."""
        self._stream.close()

    def kept(self, work: AnyWork) -> AnyWork:
        """The work, which the end of coalescing waits for if that has begun."""
        if self.coalesced is not None:
            self.coalesced.append(work)
        return work

    def _stream_here(self) -> Stream:
        stream = self._serving.get(threading.get_ident())
        return self._stream if stream is None else stream.nested()

    def _limit_s(self, opts: Any) -> float:
        """The seconds for a call: the group's, unless the caller gave others (-1 ms if not)."""
        given: timedelta = opts.timeout
        return self.timeout_s if given.days < 0 else given.total_seconds()


def _name(verb: str) -> str:
    """The verb in torch's words."""
    return verb.removesuffix("_v").removesuffix("_many")


class _Errors:
    """What `Calls.errors` gives: a class and no generator, because every call enters it."""

    __slots__ = ("_call", "_calls")

    def __init__(self, calls: Calls, call: str) -> None:
        self._calls = calls
        self._call = call

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, UnisonoError):
            raise self._calls.failed(error, self._call, call_site()) from error
