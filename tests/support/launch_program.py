# ruff: noqa: T201 - a program
"""A program that spawns ranks, for process/test_spawn.py: `python launch_program.py <case>` prints JSON.

It needs no engine: `enter` gives a rank its LaunchInfo and, with backend "meet", a rendezvous with the
others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import unisono as uni
from unisono.bootstrap.entry import enter as join_world
from unisono.bootstrap.launch_info import LaunchInfo
from unisono.config import Config
from unisono.errors import PeerLost
from unisono.launcher.spawn import spawn


@uni.register
@dataclasses.dataclass
class Point:
    x: int
    y: np.ndarray[Any, Any]


_given = Config()


@contextlib.contextmanager
def enter(info: LaunchInfo, backend: str, config: Config, timeout: float) -> Iterator[LaunchInfo]:
    global _given
    _given = config
    if backend == "meet":
        assert info.source is not None
        with join_world(
            info, make_card=lambda listen: b"%d" % listen.rank, config=config, version="1", timeout=timeout
        ) as entry:
            assert entry.view.cards == [b"%d" % rank for rank in range(info.size)]
            yield info
    else:
        yield info


def add(info: LaunchInfo, x: np.ndarray[Any, Any], y: int) -> tuple[int, float]:
    return info.rank, float(x.sum()) + y


def move(info: LaunchInfo, point: Point) -> Point:
    return Point(point.x + info.rank, point.y * info.rank)


def big(info: LaunchInfo, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return x + info.rank


def environment_of(info: LaunchInfo) -> dict[str, Any]:
    return {
        "env": {
            name: text for name, text in os.environ.items() if name.startswith(("UNISONO", "RANK", "MINE"))
        },
        "argv": sys.argv[1:],
        "main": __name__,
        "eager": _given.eager_bytes,
    }


class Odd(Exception):
    """An exception that is not built in."""


def fail(info: LaunchInfo, kind: str) -> None:
    if info.rank != 1:
        threading.Event().wait()
    if kind == "key":
        raise KeyError("no", 7)
    if kind == "ours":
        raise PeerLost("rank 3 is gone", ranks=(3,), cause="silent")
    if kind == "odd":
        raise Odd("hm")
    if kind == "exit":
        sys.exit(3)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def blame(info: LaunchInfo) -> None:
    """Ranks 0 and 2 get rank 1's error before rank 1's process has printed it."""
    if info.rank == 1:
        time.sleep(0.3)  # the order of events is what is tested
        raise ValueError("the root of it")
    raise PeerLost("rank 1 is gone", ranks=(1,))


def opaque(info: LaunchInfo) -> Any:
    return threading.Lock()


def hang(info: LaunchInfo, first: int) -> None:
    if info.rank >= first:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Event().wait()


def tell_pid(info: LaunchInfo, descriptor: int) -> None:
    os.write(1, b"%d\n" % os.getpid())  # one write: the ranks share the pipe
    threading.Event().wait()


def start(fn: Callable[..., Any], n: int, *args: Any, backend: str = "alone", **options: Any) -> list[Any]:
    given = {"timeout": 60.0, "grace_s": 0.5, **options}
    return spawn(fn, n, args, enter=enter, backend=backend, version="1", **given)


def case_results() -> Any:
    return start(add, 3, np.arange(1000.0), 2)


def case_meet() -> Any:
    return start(add, 4, np.ones(3), 1, backend="meet")


def case_dataclass() -> Any:
    points = start(move, 2, Point(5, np.arange(3)))
    return [[type(p).__name__, p.x, p.y.tolist()] for p in points]


def case_big() -> Any:
    x = np.arange(3_000_000, dtype=np.int64)
    return [int(r[0]) + int(r[-1]) for r in start(big, 2, x)]


def case_environment(*_: str) -> Any:
    return start(environment_of, 2, env={"MINE": "1"}, config=Config(eager_bytes=77))


def case_closure() -> Any:
    def inner(info: LaunchInfo) -> None: ...

    texts = []
    for fn in (inner, lambda info: None, "x".join):
        try:
            start(fn, 2)
        except uni.UsageError as error:
            texts.append(str(error))
    return texts


def case_argument() -> Any:
    return start(add, 2, threading.Lock(), 1)


def case_fail(kind: str) -> Any:
    return start(fail, 3, kind)


def case_blame() -> Any:
    return start(blame, 3, grace_s=10.0)


def case_opaque() -> Any:
    return start(opaque, 2)


def case_hang() -> Any:
    return start(hang, 3, 1, timeout=5.0)


def case_orphans() -> Any:
    return start(tell_pid, 2, 0)


def main() -> None:
    began = time.monotonic()
    case = globals()[f"case_{sys.argv[1]}"]
    try:
        said: Any = {"value": case(*sys.argv[2:])}
    except Exception as error:
        fields = ("ranks", "rank", "waiting_on", "type_name", "traceback_text")
        said = {
            "error": type(error).__name__,
            "text": str(error),
            "notes": getattr(error, "__notes__", []),
            **{name: getattr(error, name) for name in fields if hasattr(error, name)},
        }
    said["seconds"] = time.monotonic() - began
    print(json.dumps(said))


if __name__ == "__main__":
    main()
