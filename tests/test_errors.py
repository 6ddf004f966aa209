"""Errors: one family, texts for the person paged at night, copies that keep what is known."""

from __future__ import annotations

import copy
import inspect
import traceback

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unisono as uni
from unisono import errors
from unisono.errors import (
    ClosedError,
    DeadlineExceeded,
    Location,
    PeerAborted,
    PeerLost,
    ProtocolError,
    UnisonoError,
    UsageError,
)

KINDS = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, UnisonoError)]
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
    assert str(UsageError("late", where=where)) == text


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


@pytest.mark.parametrize("kind", [DeadlineExceeded, PeerLost, PeerAborted, ProtocolError, ClosedError])
def test_an_error_that_is_told_no_next_step_names_the_usual_one(kind: type[UnisonoError]) -> None:
    assert str(kind("something ended")) == f"something ended. Next: {kind.usual_step}"
    assert str(kind("something ended", next_step="wait")) == "something ended. Next: wait"
