"""The ways of calling: the line of an operation becomes the loop that is timed.

The loop is compiled from text, as timeit does, so that every library is called from the user's side of its
border: no lambda and no frame of the package in between. Where a library has no started form of a call, its
blocking one takes its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from unisono.bench.operations import Operation

__all__ = ["WAYS", "Way", "loop_text"]


@dataclass(frozen=True, slots=True)
class Way:
    """How a call is made. `operands`: the same ones, or those that no call has had before.

    `repeats` is a fixed number of calls in a turn, where they must be the same ones for every system.
    `is_seen`: each operand has been in one untimed call.
    """

    form: str = "blocking"
    operands: str = "known"
    lines: int = 1
    repeats: int | None = None
    is_seen: bool = False
    for_gloo: bool = True


WAYS: Final = {
    "blocking": Way(),
    "timeout": Way(form="timeout"),
    "started": Way(form="started"),
    # Some of Gloo's works never report that they are done unless a thread waits for them.
    "polled": Way(form="polled", for_gloo=False),
    # Gloo keeps nothing that another size, array or line could miss, and hundreds of its calls take seconds.
    # Sizes grow from call to call, so that every system makes the same number of calls.
    "new size": Way(operands="new size", repeats=250, for_gloo=False),
    # The same calls as those with new sizes, made a second time: what a new size costs is the difference.
    "seen size": Way(operands="seen size", repeats=250, is_seen=True, for_gloo=False),
    "new view": Way(operands="new view", for_gloo=False),
    "new array": Way(operands="new array", for_gloo=False),
    "1000 lines": Way(lines=1000, for_gloo=False),
}

# What begins, polls and ends an operation in each library.
_PREFIX: Final = {"unisono": "world.", "mpi": "world.", "gloo": "dist."}
_IS_DONE: Final = {"unisono": "done()", "mpi": "Test()", "gloo": "is_completed()"}
_WAIT: Final = {"unisono": "wait()", "mpi": "Wait()", "gloo": "wait()"}
# mpi4py has no request for these; of the lower-case calls only messages have one.
_MPI_BLOCKING: Final = ("Probe", "Split", "Create_group", "Create_cart", "Dup")
_MPI_STARTED_OBJECTS: Final = ("send", "recv")
_SPACES: Final = " " * 8


def loop_text(library: str, operation: Operation, way: Way, rank: int, names: tuple[str, ...]) -> str:
    """The source of `run(items)`, which makes the calls with every tuple of operands.

    It returns the last result.
    """
    line = operation.lines[library]
    text = line.odd if line.odd and rank == 1 else line.text
    calls = [] if operation.is_pair and rank > 1 else text.split("; ")
    if operation.is_posted:
        body = _posted(library, calls, way)
    else:
        body = [
            each
            for index, call in enumerate(calls)
            for each in _made(library, call, way, line.then if index == len(calls) - 1 else "")
        ]
    # One statement per line: each repetition is another place of the program.
    body = (body or ["pass"]) * way.lines
    header = f"for {', '.join(names)}, in items:" if names else "for _ in items:"
    return "\n".join(
        ["def run(items):", "    result = None", f"    {header}"]
        + [_SPACES + each for each in body]
        + ["    return result", ""]
    )


def _made(library: str, call: str, way: Way, then: str) -> list[str]:
    """One call, begun and ended."""
    begun = _started(library, call)
    if begun is None or way.form == "blocking":
        return [f"result = {_PREFIX[library]}{call}{then}"]
    if way.form == "timeout":
        return [f"result = {_PREFIX[library]}{_with_timeout(library, call)}{then}"]
    end = f"{_WAIT[library]}{then}"
    if way.form == "started":
        return [f"result = {begun}.{end}"]
    return [f"work = {begun}", f"while not work.{_IS_DONE[library]}: pass", f"result = work.{end}"]


def _posted(library: str, calls: list[str], way: Way) -> list[str]:
    """All calls started, then all waited for."""
    works = [f"work{index}" for index in range(len(calls))]
    listed = ", ".join(works)
    begun = [f"{work} = {_started(library, call)}" for work, call in zip(works, calls, strict=True)]
    if library == "mpi":
        if way.form == "polled":
            return [*begun, f"while not Request.Testall([{listed}]): pass"]
        return [*begun, f"Request.Waitall([{listed}])"]
    polls = [f"while not {work}.{_IS_DONE[library]}: pass" for work in works if way.form == "polled"]
    return [*begun, *polls, *(f"{work}.{_WAIT[library]}" for work in works)]


def _started(library: str, call: str) -> str | None:
    """The call that starts the operation; None if the library has none."""
    name, _, rest = call.partition("(")
    if library == "unisono":
        return f"world.start.{call}"
    if library == "gloo":
        if name in ("send", "recv"):
            return f"dist.i{call}"
        return None if "object" in name else f"dist.{_with(call, 'async_op=True')}"
    if name in _MPI_BLOCKING or (name[0].islower() and name not in _MPI_STARTED_OBJECTS):
        return None
    if name[0].islower():
        # irecv takes no buffer and needs room for a long message; the blocking one finds out by itself.
        return None if name == "recv" else f"world.i{call}"
    return f"world.I{name[0].lower()}{name[1:]}({rest}"


def _with_timeout(library: str, call: str) -> str:
    """The peers have no deadline for a call: theirs is the plain one."""
    return _with(call, "timeout=60") if library == "unisono" else call


def _with(call: str, argument: str) -> str:
    return f"{call[:-1]}{'' if call.endswith('()') else ', '}{argument})"
