"""Errors: one base class, texts for the person paged at night, copies that keep all fields."""

from __future__ import annotations

import ast
import copy
import inspect
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unisono as uni
from unisono import errors
from unisono.errors import (
    DeadlineExceeded,
    Location,
    PeerAborted,
    PeerLost,
    UnisonoError,
    UsageError,
    counted,
    lost_text,
    ranks_text,
    said_of,
)
from unisono.launcher.job import Job

KINDS = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, UnisonoError)]
PACKAGE = Path(uni.__file__).parent
QUICK = settings(derandomize=True, deadline=None, database=None, max_examples=60)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_is_public_documented_and_under_one_base(kind):
    assert getattr(uni, kind.__name__) is kind
    assert kind.__name__ in errors.__all__
    assert kind.__name__ in errors.__doc__
    assert kind.__doc__


def test_bad_calls_and_late_ones_are_also_what_python_calls_them():
    assert issubclass(uni.UsageError, ValueError)
    assert issubclass(uni.DeadlineExceeded, TimeoutError)
    with pytest.raises(ValueError, match="given"):
        raise UsageError("given")


def test_the_text_says_what_where_why_and_what_next():
    error = PeerLost(
        "rank 3 is gone",
        ranks=(3,),
        where=Location("all_reduce", "dp", 7, 1041, 2.6),
        cause="silent for 2.6 s",
        next_step="comm.shrink()",
    )
    assert str(error) == (
        'rank 3 is gone during all_reduce #1041 on "dp", epoch 7, after 2.6 s: silent for 2.6 s. '
        "Next: comm.shrink()"
    )
    assert (error.operation, error.communicator, error.epoch, error.sequence) == ("all_reduce", "dp", 7, 1041)
    assert error.elapsed_s == 2.6


@pytest.mark.parametrize(
    ("where", "text"),
    [
        (Location(), "late"),
        (Location("recv"), "late during recv"),
        (Location("recv", "w"), 'late during recv on "w"'),
        (Location(communicator="w"), 'late on "w"'),
        (Location("barrier", None, 0, 0), "late during barrier #0, epoch 0"),
        (Location(elapsed_s=0.00123456), "late, after 0.00123 s"),
    ],
)
def test_the_text_leaves_out_what_is_unknown(where, text):
    assert str(UsageError("late", where=where)) == f"{text}. Next: {UsageError.usual_step}"


@pytest.mark.parametrize(
    ("error", "fields"),
    [
        (DeadlineExceeded("x"), {"waiting_on": ()}),
        (DeadlineExceeded("x", waiting_on=(1, 4)), {"waiting_on": (1, 4)}),
        (PeerLost("x", ranks=(2, 5)), {"ranks": (2, 5)}),
        (PeerAborted("x", rank=2), {"rank": 2}),
        (uni.CollectiveMismatch("x", report="a\nb"), {"report": "a\nb"}),
        (
            uni.RemoteError("x", rank=1, type_name="KeyError", traceback_text="tb"),
            {"rank": 1, "type_name": "KeyError", "traceback_text": "tb"},
        ),
    ],
)
def test_fields_survive_being_moved_and_copied(error, fields):
    for same in (error, error.located(Location("recv")), copy.copy(error)):
        assert type(same) is type(error)
        assert {name: getattr(same, name) for name in fields} == fields
        assert same.args == error.args


def test_a_moved_error_has_a_traceback_of_its_own():
    def fail(error: UnisonoError) -> UnisonoError:
        with pytest.raises(UnisonoError) as caught:
            raise error
        return caught.value

    first = fail(UsageError("x"))
    second = fail(first.located(Location("recv")))
    assert second is not first
    assert len(traceback.extract_tb(second.__traceback__)) <= len(traceback.extract_tb(first.__traceback__))
    assert first.operation is None


def _unless_none(strategy):
    return st.none() | strategy


LOCATIONS = st.builds(
    Location,
    _unless_none(st.sampled_from(["send", "barrier"])),
    _unless_none(st.sampled_from(["w", "dp"])),
    _unless_none(st.integers(0, 3)),
    _unless_none(st.integers(0, 9)),
    _unless_none(st.sampled_from([0.5, 2.0])),
)


@QUICK
@given(LOCATIONS, LOCATIONS)
def test_a_location_is_filled_in_but_never_overwritten(first, second):
    moved = UsageError("x", where=first, cause="c", next_step="n").located(second)
    for name in Location.__slots__:
        known, offered = getattr(first, name), getattr(second, name)
        assert getattr(moved.where, name) == (known if known is not None else offered)
    assert (moved.what, moved.cause, moved.next_step) == ("x", "c", "n")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_without_a_next_step_of_its_own_names_the_usual_one(kind: type[UnisonoError]) -> None:
    assert kind.usual_step
    assert str(kind("something ended")) == f"something ended. Next: {kind.usual_step}"
    assert str(kind("something ended", next_step="wait")) == "something ended. Next: wait"
    assert kind("something ended").next_step == kind.usual_step


def test_an_error_has_one_next_step_even_if_another_error_is_its_cause() -> None:
    first = UsageError("root=9; allowed: ranks 0 to 3")
    assert str(PeerAborted("rank 1 aborted", rank=1, cause=f"UsageError: {first}")) == (
        "rank 1 aborted: UsageError: root=9; allowed: ranks 0 to 3. Next: see the error of that rank first"
    )


def _raised() -> Iterator[tuple[str, ast.Call, str]]:
    """Every place in the package that constructs an error: location, call, and text."""
    kinds = {kind.__name__: kind for kind in KINDS}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "errors.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds:
                first = ast.walk(node.args[0]) if node.args else ()
                text = "".join(
                    n.value for n in first if isinstance(n, ast.Constant) and isinstance(n.value, str)
                )
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", node, text


def test_a_refused_call_names_what_is_allowed_or_what_to_do() -> None:
    """The default next step of a UsageError is to correct the call, so its text must say how."""
    places = list(_raised())
    assert len(places) > 200
    silent = [
        where
        for where, call, text in places
        if call.func.id == "UsageError"
        and "allowed" not in text
        and not any(keyword.arg == "next_step" for keyword in call.keywords)
    ]
    assert not silent


def test_the_text_of_a_remote_exception_names_its_last_line() -> None:
    trace = (
        'Traceback (most recent call last):\n  File "/home/me/train.py", line 7, in main\n    step()\n'
        '  File "/home/me/model.py", line 42, in step\n    raise KeyError("w")\nKeyError: \'w\'\n'
    )
    error = uni.RemoteError("rank 1 raised KeyError", rank=1, traceback_text=trace, cause="'w'")
    assert str(error) == (
        "rank 1 raised KeyError: 'w', at /home/me/model.py:42 in step. Next: " + uni.RemoteError.usual_step
    )
    assert error.cause == "'w'"
    assert "model.py:42 in step" in str(error.located(Location("call")))
    assert "\x1b" not in str(uni.RemoteError("x", traceback_text='  File "\x1b[2Ja.py", line 1, in f\n'))


@pytest.mark.parametrize(
    ("cause", "sentence"),
    [
        ("left", "rank 1 left"),
        ("died: its connection was closed", "rank 1 died: its connection was closed"),
        ("it hung up during the greeting", "rank 1 hung up during the greeting"),
        ("its certificate is rank 2's", "rank 1: its certificate is rank 2's"),
        ("no answer within the time for a greeting", "rank 1: no answer within the time for a greeting"),
        ("silent for 2.5 s", "rank 1 silent for 2.5 s"),
        ("cannot be reached from rank 0", "rank 1 cannot be reached from rank 0"),
        ("cannot map shared memory", "rank 1: cannot map shared memory"),
    ],
)
def test_what_happened_to_a_rank_reads_as_a_sentence(cause, sentence):
    assert said_of(1, cause) == sentence


def test_numbers_of_things_and_ranks_agree_with_their_nouns():
    assert [counted(n, "rank") for n in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert ranks_text([4]) == "rank 4"
    assert ranks_text([1, 0]) == "ranks 0, 1"
    assert lost_text((0, 1)) == "ranks 0, 1 are gone"
    assert ranks_text(range(64)) == "ranks 0-63"
    with pytest.raises(UsageError, match=r"^0 ranks on 1 node; allowed"):
        Job(["x"], 0).check()
