"""The summary of `unisono run` about a failed job: short, complete, and about the right rank."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
import traceback
from pathlib import Path

import numpy as np
import pytest
from tests.support.launched import PATIENCE_S, gone, launched, run

import unisono as uni
from unisono.comm.control_messages import CallReport, GroupFailure
from unisono.comm.fingerprint import described, fingerprint_of
from unisono.comm.mismatch import Mismatch
from unisono.core.dtypes import DTYPES
from unisono.core.ops import as_op
from unisono.errors import CollectiveMismatch, PeerAborted, PeerLost, UnisonoError, UsageError, lost_text
from unisono.launcher import summary as summary_module
from unisono.launcher.failure import End, blamed, culprit, describe
from unisono.launcher.output import ErrorStream, last_words
from unisono.launcher.summary import Ended, end_of, summary, without_library

pytestmark = pytest.mark.more

LIBRARY = str(Path(summary_module.__file__).parent.parent)
LINES_MAX = 25

# A program in which one rank leaves the others waiting; `{rank}` is the rank to blame.
WORLD = """
import os, sys
import numpy as np
import unisono as uni

def fail():
    raise ValueError("the data is bad")

world = uni.init(timeout=100)
world.all_reduce(np.ones(4))
if world.rank == {rank}:
    {end}
world.all_reduce(np.ones(4))
"""


@pytest.fixture
def program(tmp_path: Path):  # type: ignore[no-untyped-def]
    def write(text: str) -> str:
        (tmp_path / "program.py").write_text(text)
        return str(tmp_path / "program.py")

    return write


@pytest.mark.parametrize("ranks", [4, pytest.param(32, marks=pytest.mark.more)])
def test_a_failure_fits_a_screen_however_many_ranks_there_are(program, ranks: int) -> None:  # type: ignore[no-untyped-def]
    code, out, err = run("-n", str(ranks), "--grace", "60", program(WORLD.format(rank=2, end="fail()")))
    lines = err.splitlines()
    assert (code, out) == (1, "")
    assert len(lines) <= LINES_MAX
    others = "0,1,3" if ranks == 4 else "0,1,3-31"
    assert re.search(
        rf"^\[{others}\] PeerAborted: rank 2 .*ValueError: the data is bad.* \({ranks - 1} ranks\)$",
        err,
        re.M,
    ), err
    assert LIBRARY not in err
    start = lines.index("unisono run: rank 2 failed first (exit code 1); its last words:")
    assert lines[start + 1] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: the data is bad"
    assert "in fail" in err


def test_with_verbose_everything_is_shown_rank_by_rank(program) -> None:  # type: ignore[no-untyped-def]
    code, _, err = run("-n", "3", "--verbose", "--grace", "60", program(WORLD.format(rank=2, end="fail()")))
    assert code == 1
    assert LIBRARY in err
    heads = [line[:4] for line in err.splitlines() if line.endswith("Traceback (most recent call last):")]
    assert sorted(heads) == ["Trac", "[0] ", "[1] "]
    ranks = [line[:4] for line in err.splitlines() if line.startswith("[")]
    assert ranks in (sorted(ranks), sorted(ranks, reverse=True))  # the outputs are not interleaved


def test_an_error_that_all_ranks_raise_is_shown_once(program) -> None:  # type: ignore[no-untyped-def]
    code, _, err = run("-n", "5", program("import nothing_of_that_name\n"))
    assert code == 1
    assert err.count("ModuleNotFoundError: No module named 'nothing_of_that_name'") == 1
    assert re.search(r"rank \d failed first \(exit code 1\), ranks [\d, -]+ in the same way; its last", err)
    assert len(err.splitlines()) <= 7


def test_the_traceback_of_a_rank_that_lives_on_is_shown_whole(program) -> None:  # type: ignore[no-untyped-def]
    path = program(
        "import sys, traceback\n"
        "for _ in range(3):\n"
        "    try:\n        1 / 0\n"
        "    except ZeroDivisionError:\n        traceback.print_exc()\n"
        "print('then this', file=sys.stderr)\n"
        "import threading; threading.Event().wait()\n"
    )
    with launched("-n", "3", path) as launcher:
        seen: list[str] = []
        while sum(line.endswith("then this\n") for line in seen) < 3:
            seen.append(launcher.err.readline())
    runs = [rank for rank, _ in itertools.groupby(line[:3] for line in seen if line.startswith("["))]
    assert sorted(runs) == ["[0]", "[1]", "[2]"]


@pytest.mark.parametrize("end", ["sys.exit(0)", "os._exit(0)", "world.close(); sys.exit(0)"])
def test_a_rank_that_leaves_the_others_alone_is_blamed_although_it_ended_well(program, end: str) -> None:  # type: ignore[no-untyped-def]
    code, _, err = run("-n", "3", "--grace", "60", program(WORLD.format(rank=1, end=end)))
    assert code == 1
    assert err.splitlines()[-1] == (
        "unisono run: rank 1 failed first (exit code 0, while others still needed it)"
    )
    assert "[0,2] PeerLost: rank 1 is gone" in err


def test_a_rank_that_left_is_named_although_the_others_do_not_mention_it(program) -> None:  # type: ignore[no-untyped-def]
    text = WORLD.format(rank=1, end="sys.exit(0)")
    caught = text[: text.rindex("world.all_reduce")] + (
        "try:\n    world.all_reduce(np.ones(4))\nexcept uni.PeerLost:\n    sys.exit(7)\n"
    )
    code, _, err = run("-n", "3", program(caught))
    assert code == 7
    assert re.search(r"rank \d failed first \(exit code 7; rank 1 ended with exit code 0\)", err), err


def test_a_rank_that_ends_well_before_it_joins_is_blamed(program) -> None:  # type: ignore[no-untyped-def]
    path = program(
        "import os, unisono as uni\nif os.environ['UNISONO_RANK'] != '1':\n    uni.init(timeout=100)\n"
    )
    code, _, err = run("-n", "3", path)
    assert code == 1
    assert err.splitlines()[-1].startswith("unisono run: rank 1 failed first (exit code 0, ")
    assert re.search(r"^\[0,2\] RendezvousError: .*rank 1 has ended .*\(2 ranks\)$", err, re.M), err


@pytest.mark.parametrize("ranks", [2, 4])
def test_in_a_mismatch_the_minority_is_blamed(program, ranks: int) -> None:  # type: ignore[no-untyped-def]
    end = "world.all_reduce(np.ones(4, np.float32))"
    code, _, err = run("-n", str(ranks), "--grace", "60", program(WORLD.format(rank=1, end=end)))
    assert code == 1
    if ranks > 2:  # of two ranks neither is the minority
        assert "unisono run: rank 1 failed first (exit code 1); its last words:" in err
        assert "[0,2,3] CollectiveMismatch: " in err
        assert "rank 1 differs from ranks 0, 2, 3 in dtype: float32, they float64" in err
    assert len(err.splitlines()) <= LINES_MAX


def test_a_rank_that_stopped_is_blamed_and_the_rank_that_noticed_gives_the_code(program) -> None:  # type: ignore[no-untyped-def]
    end = "import signal; os.kill(os.getpid(), signal.SIGSTOP)"
    code, _, err = run("-n", "2", "--grace", "0.5", program(WORLD.format(rank=0, end=end)))
    assert code == 1
    assert "unisono run: rank 0 failed first (it did not end by itself)" in err.splitlines()[-1]


# -- the culprit and the text, without processes -------------------------------------------------------------

ALONE, VICTIM = False, True


@pytest.mark.parametrize(
    ("ends", "wanted"),
    [
        ([End(2, ALONE), End(0, VICTIM, (2,))], 2),
        ([End(0, VICTIM, (2,)), End(1, VICTIM, (2,))], 2),  # the rank left: its own end is not in the list
        ([End(0, VICTIM, (1,)), End(3, ALONE), End(1, ALONE)], 1),  # a rank that another names comes first
        ([End(3, ALONE), End(0, VICTIM, (1,))], 1),  # rank 3 caught the error and ended in another way
        ([End(0, VICTIM, (1, 2)), End(2, ALONE)], 2),
        ([End(0, VICTIM, (3,)), End(1, VICTIM, (2,)), End(2, VICTIM, (3,))], 3),
        ([End(4, VICTIM), End(1, VICTIM)], 4),  # no report says more
        ([End(4, VICTIM), End(1, ALONE)], 1),
    ],
)
def test_the_culprit_is_the_rank_that_victims_name(ends: list[End], wanted: int) -> None:
    assert culprit(ends) == wanted


def odd(culprits: tuple[int, ...], size: int) -> CollectiveMismatch:
    """The error of a mismatch in which these ranks differ from the others."""
    mismatch = Mismatch(3)
    mismatch.add({rank: _report(rank + 8 if rank in culprits else 4) for rank in range(size)})
    return mismatch.error(tuple(range(size)), 0, "world", 0)


def _report(count: int) -> CallReport:
    operand = described(DTYPES["float32"], (count,))
    return CallReport(fingerprint_of("all_reduce", operand, as_op("sum"), "ring", 0, 0, ()))


@pytest.mark.parametrize(
    ("error", "blames"),
    [
        (PeerLost(lost_text((3,)), ranks=(3,), cause="rank 5 is gone"), (3,)),
        (PeerLost(lost_text((1, 12)), ranks=(1, 12)), (1, 12)),
        (PeerLost(lost_text(tuple(range(3, 40))), ranks=()), tuple(range(3, 40))),
        (PeerAborted("rank 7 aborted", rank=7, cause="ValueError: rank 2 is gone"), (7,)),
        (PeerLost(lost_text((3, 4), "cannot be reached from rank 0"), ranks=(3, 4)), (3, 4)),
        (PeerAborted("rank 7 gave up", rank=7, cause="OSError: no space"), (7,)),
        (GroupFailure.of(UsageError("no such op"), 0).error(7), (7,)),
        (PeerAborted("rank 1 cancelled all_reduce", rank=1), (1,)),
        (odd((2,), 4), (2,)),
        (odd((0, 5), 32), (0, 5)),
        (odd((1,), 2), ()),
    ],
)
def test_the_text_of_an_error_shows_victim_and_culprit(error: UnisonoError, blames: tuple[int, ...]) -> None:
    """The error is printed by Python, so that a change of its text fails here, where the text is parsed."""
    try:
        raise error
    except UnisonoError:
        words = traceback.format_exc().encode().splitlines()
    assert end_of(Ended(0, 1, words)) == End(0, True, blames)
    assert getattr(error, "culprits", blames) == blames


def test_an_error_that_only_quotes_another_is_no_victims() -> None:
    assert end_of(Ended(0, 1, frames("x.py", error="ValueError: PeerLost: rank 3 is gone"))) == End(0)


def test_an_error_names_the_blamed_ranks_to_spawn() -> None:
    assert blamed(describe(PeerLost("x", ranks=(1, 2)))) == (1, 2)
    assert blamed(describe(PeerAborted("x", rank=0))) == (0,)
    assert blamed(describe(CollectiveMismatch("x"))) == ()
    assert blamed(describe(ValueError("x"))) == ()
    lost = ExceptionGroup("tasks", [ExceptionGroup("more", [PeerLost("x", ranks=(1, 2))])])
    assert blamed(describe(lost)) == (1, 2)
    assert blamed(describe(ExceptionGroup("tasks", [*lost.exceptions, ValueError("x")]))) == ()
    assert blamed(describe(CollectiveMismatch("x", culprits=(3,)))) == (3,)


def differ(world: uni.Communicator, odd_rank: int) -> None:
    world.all_reduce(np.ones(4, np.float32 if world.rank == odd_rank else np.float64))


def test_spawn_raises_what_the_minority_raised() -> None:
    with pytest.raises(uni.CollectiveMismatch, match="rank 2 differs from ranks 0, 1 in dtype") as caught:
        uni.spawn(differ, 3, 2, timeout=PATIENCE_S)
    assert caught.value.culprits == (2,)
    assert caught.value.__notes__[0].startswith("On rank 2:")


def frames(*paths: str, error: str) -> list[bytes]:
    lines = ["Traceback (most recent call last):"]
    for path in paths:
        lines += [f'  File "{path}", line 7, in f', "    g()", "    ^^^"]
    return [line.encode() for line in (*lines, error)]


def test_frames_of_the_library_are_left_out_but_for_one_that_broke() -> None:
    mine, ours = "/home/me/x.py", f"{LIBRARY}/group.py"
    traceback = frames("<frozen runpy>", mine, ours, ours, error="unisono.errors.PeerLost: rank 1 is gone")
    assert without_library(traceback) == [*frames(mine, error="unisono.errors.PeerLost: rank 1 is gone")]
    called_back = frames(mine, ours, mine, error="KeyError: 1")
    assert without_library(called_back) == frames(mine, mine, error="KeyError: 1")
    broken = frames(mine, ours, f"{LIBRARY}/work.py", error="AssertionError")
    assert without_library(broken) == frames(mine, f"{LIBRARY}/work.py", error="AssertionError")


@pytest.mark.parametrize("words", ["no such file", "no such module", "no Python"])
def test_a_program_that_cannot_begin_is_reported_once(program, tmp_path: Path, words: str) -> None:  # type: ignore[no-untyped-def]
    arguments = {
        "no such file": [str(tmp_path / "nothing.py")],
        "no such module": ["-m", "nothing_of_that_name"],
        "no Python": [program("def f(:\n")],
    }
    code, _, err = run("-n", "4", *arguments[words])
    assert code in (1, 2)
    assert re.search(r"rank \d failed first \(exit code \d\), ranks [\d, -]+ in the same way; its last", err)
    assert len(err.splitlines()) <= 6


def test_a_crash_report_shows_the_thread_that_crashed() -> None:
    dump = [
        "Fatal Python error: Aborted",
        "",
        "Thread 0x01 (most recent call first):",
        '  File "a.py", line 1 in f',
    ]
    dump += [
        "",
        "Current thread 0x02 (most recent call first):",
        '  File "b.py", line 2 in g',
        "",
        "Extension: x",
    ]
    lines = [line.encode() for line in dump]
    assert without_library(lines) == [lines[0], lines[5], lines[6]]
    assert summary([Ended(3, -6, lines)], None) == [b"[3] Fatal Python error: Aborted, at b.py:2"]


def test_tracebacks_of_a_chain_and_of_a_group_stay_together() -> None:
    chain = [
        *frames("a.py", error="KeyError: 1"),
        b"",
        b"During handling of the above exception, another exception occurred:",
        b"",
        *frames("b.py", error="RuntimeError: no"),
    ]
    assert last_words([b"noise", *chain]) == chain
    group = [
        b"  + Exception Group Traceback (most recent call last):",
        b'  |   File "a.py", line 3, in <module>',
        b"  |     raise g",
        b"  | ExceptionGroup: several (1 sub-exception)",
        b"  +-+---------------- 1 ----------------",
        b"    | Traceback (most recent call last):",
        b'    |   File "a.py", line 2, in f',
        b"    | unisono.errors.PeerLost: rank 4 is gone",
        b"    +------------------------------------",
    ]
    assert last_words([b"noise", *group]) == group
    assert end_of(Ended(0, 1, group)) == End(0, True, (4,))
    assert summary([Ended(0, 1, group)], None) == [b"[0] ExceptionGroup: several (1 sub-exception)"]


def test_many_kinds_of_ends_and_long_tracebacks_are_cut() -> None:
    ends = [Ended(rank, 1, frames(f"{rank}.py", error=f"E{rank}: x")) for rank in range(32)]
    guilty = Ended(40, 1, frames(*["deep.py"] * 100, error="RecursionError: deep"))
    lines = summary([*ends, guilty], guilty, "rank 40 failed first")
    assert len(lines) < LINES_MAX
    assert lines[0] == b"[0] E0: x, at 0.py:7"
    assert b"lines left out; --verbose shows them" in b"\n".join(lines)
    assert lines[-1] == b"RecursionError: deep"
    own = [Ended(rank, 1, frames("x.py", error=f"ValueError: rank {rank} has no data")) for rank in (8, 12)]
    assert summary(own, None) == [b"[8,12] ValueError: rank 12 has no data, at x.py:7 (2 ranks)"]
    cycle = "Deadlock: no rank can go on, after {} s: rank 0 waits for rank 1; rank 1 waits for rank 0"
    same = [Ended(rank, 1, frames("x.py", error=cycle.format(4 + rank / 10))) for rank in (0, 1)]
    assert len(summary(same, None)) == 1
    assert b", rank 1 in the same way;" in b"\n".join(summary(same, same[0], "rank 0 failed first"))
    alike = [Ended(rank, -9, []) for rank in (3, 4, 6)]
    assert summary(alike, None) == [b"[3,4,6] killed by SIGKILL (3 ranks)"]


def test_a_traceback_is_kept_until_it_is_released_and_what_comes_before_it_is_shown() -> None:
    errors = ErrorStream()
    assert errors.add(b"first", 1.0) == [b"first"]
    words = frames("a.py", error="ValueError: x")
    assert [shown for line in words for shown in errors.add(line, 2.0)] == []
    assert errors.held_since == 2.0
    assert errors.release() == words
    assert errors.add(b"later", 3.0) == [b"later"]
    for line in [*words, b"goodbye", *words]:
        assert errors.add(line, 4.0) == []
    assert errors.split() == ([*words, b"goodbye"], words, [])


def test_what_follows_a_traceback_is_no_part_of_it() -> None:
    words = frames("a.py", error="ValueError: x")
    group = [
        b"  + Exception Group Traceback (most recent call last):",
        b'  |   File "a.py", line 1, in <module>',
        b"  | ExceptionGroup: two (1 sub-exception)",
        b"  +-+---------------- 1 ----------------",
        b"    | ValueError: x",
        b"    +------------------------------------",
    ]
    after = [b"flushed 7 items", b"", b"bye"]
    for before, last in (([b"Exception in thread T:", *words, b""], words), ([], group)):
        errors = ErrorStream()
        for line in [*before, *last, *after]:
            assert errors.add(line, 1.0) == []
        assert errors.split() == (before, last, after)


def test_lines_that_follow_the_traceback_of_any_rank_are_shown(program) -> None:  # type: ignore[no-untyped-def]
    path = program(
        "import atexit, os, sys\n"
        "rank = int(os.environ['UNISONO_RANK'])\n"
        "for i in range(8 * (rank == 2) + 1):\n"
        "    atexit.register(print, 'rank', rank, 'saved', i, file=sys.stderr)\n"
        "raise ValueError(f'no data {rank ** 2}')\n"
    )
    code, _, err = run("-n", "3", path)
    assert code == 1
    for rank, count in ((0, 1), (1, 1), (2, 9)):
        for i in range(count):
            assert err.count(f"rank {rank} saved {i}\n") == 1
        assert f"ValueError: no data {rank**2}" in err


# -- a reader that stops reading ---------------------------------------------------------------------------

FLOOD = "import os\nprint('pid', os.getpid(), flush=True)\nwhile True:\n    print('y' * 1000)\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_launcher_obeys_signals_although_its_output_is_not_read(program, number: signal.Signals) -> None:  # type: ignore[no-untyped-def]
    with launched("-n", "2", program(FLOOD)) as launcher:
        pids = set()
        while len(pids) < 2:
            words = launcher.out.readline().split()
            if words[1] == "pid":
                pids.add(int(words[2]))
        wait_until_stuck(launcher.process.pid)
        began = time.monotonic()
        launcher.process.send_signal(number)
        code = launcher.process.wait(PATIENCE_S)
        assert time.monotonic() - began < 2 * 5
        assert code == 128 + number
        assert gone(list(pids), 1)


def test_a_rank_that_fails_ends_the_others_although_the_output_is_not_read(program, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    os.mkfifo(tmp_path / "fifo")
    path = program(
        "import os\n"
        "if os.environ['UNISONO_RANK'] == '1':\n"
        f"    open({str(tmp_path / 'fifo')!r}).read()\n    os._exit(3)\n" + FLOOD
    )
    with launched("-n", "2", "--grace", "0", path) as launcher:
        pid = int(launcher.out.readline().split()[-1])
        wait_until_stuck(launcher.process.pid)
        (tmp_path / "fifo").write_text("go")
        assert gone([pid], 2 * 3)
        assert "[0] y" in launcher.out.read()
        assert launcher.process.wait(PATIENCE_S) == 3


def test_a_slow_reader_misses_nothing(program) -> None:  # type: ignore[no-untyped-def]
    path = program(
        "import os\nfor i in range(30_000):\n    print(os.environ['UNISONO_RANK'], i, 'x' * 100)\n"
    )
    with launched("-n", "2", path) as launcher:
        wait_until_stuck(launcher.process.pid)
        code, out, _ = launcher.end()
    assert code == 0
    for rank in range(2):
        lines = [line for line in out.splitlines() if line.startswith(f"[{rank}]")]
        assert lines == [f"[{rank}] {rank} {i} {'x' * 100}" for i in range(30_000)]


def wait_until_stuck(pid: int) -> None:
    """Wait until a process is blocked: neither it nor its children have used CPU time for a while."""
    deadline = time.monotonic() + PATIENCE_S
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()

    def used() -> list[str]:
        return [
            Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()[11] for each in (pid, *children)
        ]

    same_since, before = time.monotonic(), used()
    while time.monotonic() - same_since < 0.5:
        assert time.monotonic() < deadline
        time.sleep(0.02)
        if (now := used()) != before:
            same_since, before = time.monotonic(), now
