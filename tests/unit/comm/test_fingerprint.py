"""The fingerprint of a call: 16 bytes, the same in Python and C++, from which any rank can name the call."""

from __future__ import annotations

import random
import sys
import zlib
from dataclasses import replace

import numpy as np
import pytest

import unisono as uni
from unisono import _native
from unisono.comm import mismatch
from unisono.comm.control_messages import CallReport
from unisono.comm.fingerprint import (
    COUNT_ANY,
    FORGOTTEN,
    NOTHING,
    Fingerprint,
    Operand,
    described,
    fingerprint_of,
    fused,
    hash_of,
    may_be_one_call,
    words_of,
)
from unisono.comm.point_to_point import Messages
from unisono.comm.verb_table import COLLECTIVES, Fact, verbs_with
from unisono.comm.verbs import ReferenceVerbs
from unisono.core.dtypes import DTYPES
from unisono.core.ops import OP_NAMES, as_op
from unisono.messaging.stage import FINGERPRINT_BYTES
from unisono.plans.catalog import ALGORITHM_NAMES, CATALOG

WIDTHS = (8, 8, 8, 8, 20, 4, 40, 32)
F4 = DTYPES["float32"]


def random_fields(rng: random.Random) -> tuple[int, ...]:
    """Random fields, each small, large or arbitrary."""
    return tuple(rng.choice((0, 1, (1 << width) - 1, rng.getrandbits(width))) for width in WIDTHS)


def record(verb: str = "all_reduce", operand: Operand | None = None, **other: object) -> bytes:
    how = {"op": as_op("sum"), "algorithm": "ring", "root": 0, "stage": 0, "rest": ("a group", 4096)}
    return fingerprint_of(verb, described(F4, (5,)) if operand is None else operand, **(how | other))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(50))
def test_both_languages_read_the_same_fields(seed: int) -> None:
    rng = random.Random(seed)
    fields = random_fields(rng)
    data = Fingerprint(*fields).pack()
    assert len(data) == FINGERPRINT_BYTES
    assert Fingerprint.unpack(data).fields() == fields
    assert _native.fingerprint_fields(data) == fields
    *others, count, hash_ = random_fields(rng)
    changed = _native.fingerprint_with(data, count, hash_)
    assert Fingerprint.unpack(changed).fields() == (*fields[:6], count, hash_), others


@pytest.mark.parametrize("at", range(len(WIDTHS)))
def test_a_field_that_does_not_hold_a_value_is_refused(at: int) -> None:
    fields = [0] * len(WIDTHS)
    fields[at] = 1 << WIDTHS[at]
    with pytest.raises(AssertionError, match="bits"):
        Fingerprint(*fields).pack()


@pytest.mark.parametrize("seed", range(50))
def test_both_languages_have_one_hash(seed: int) -> None:
    rng = random.Random(seed)
    values = [rng.choice((0, 1, -1, 2**63 - 1, -(2**63), rng.getrandbits(40))) for _ in range(seed % 9)]
    start = rng.choice((0, 2**64 - 1, rng.getrandbits(64)))
    assert hash_of(start, values) == _native.fingerprint_hash(start, values)


def test_different_shapes_have_different_hashes() -> None:
    shapes = [(), (1,), (0,), (5,), (5, 1), (1, 5), (1, 1, 5), (5, 0), (0, 5), (6,), (5, 5)]
    shapes += [(n, 1024 // n) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)]
    assert len({hash_of(77, shape) for shape in shapes}) == len(shapes)
    assert len({hash_of(seed, (5,)) for seed in range(1000)}) == 1000
    bits = [1 << bit for bit in range(63)]
    assert len({hash_of(77, (bit,)) for bit in bits}) == len(bits), "every bit of a value changes the hash"


def test_tables_fit_their_fields_and_name_everything_once() -> None:
    for table, largest in ((COLLECTIVES, 254), (OP_NAMES, 254), (ALGORITHM_NAMES, 255), (tuple(DTYPES), 254)):
        assert len(set(table)) == len(table) <= largest
    assert {name for entries in CATALOG.values() for name in entries} | {"auto"} == set(ALGORITHM_NAMES)
    assert (
        set(COLLECTIVES) >= verbs_with(Fact.ROOTED) >= {"reduce", "broadcast", "gather_v", "scatter_object"}
    )


def test_every_collective_verb_has_a_number() -> None:
    """Every collective that a communicator starts is in the table; a missing verb fails here."""
    public = {name for name in dir(ReferenceVerbs) if not name.startswith("_")}
    assert public - set(dir(Messages)) == set(COLLECTIVES)
    with uni.local(1)[0] as comm:
        assert [verb for verb in COLLECTIVES if not callable(getattr(comm, verb))] == []


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (record(), "all_reduce float32[5] op=sum algorithm=ring"),
        (record("reduce", root=3), "reduce float32[5] op=sum root=3 algorithm=ring"),
        (record("broadcast", root=0, op=None), "broadcast float32[5] root=0 algorithm=ring"),
        (record("barrier", NOTHING, op=None, algorithm="auto"), "barrier algorithm=auto"),
        (
            record("all_gather", described(F4, (6, 6), (2, 3)), op=None),
            "all_gather float32[6] algorithm=ring",
        ),
        (record("all_gather_v", Operand(F4, None), op=None), "all_gather_v float32[*] algorithm=ring"),
        (record("scatter_v", stage=2, op=None), "scatter_v float32[5] root=0 stage=2 algorithm=ring"),
        (record(op=uni.op(np.add, name="mine")), "all_reduce float32[5] op=user algorithm=ring"),
        (record(operand=described(F4, (1 << 40,))), "all_reduce float32[*] op=sum algorithm=ring"),
        (FORGOTTEN, "(another call, made long ago)"),
    ],
)
def test_a_record_alone_can_be_put_into_words(data: bytes, words: str) -> None:
    assert words_of(data) == words


@pytest.mark.parametrize(
    ("verb", "shape", "counts"),
    [
        ("reduce_scatter", (3, 2, 5), (10,) * 3),
        ("reduce_scatter", (17, 2), (2,) * 17),
        ("all_reduce", (3, 2), (6,)),
        ("all_gather", (2, 3), (6, 6)),
        ("all_to_all", (2, 3), (3,) * 4),
    ],
)
def test_the_shape_of_an_array_says_what_the_caller_knows(
    verb: str, shape: tuple[int, ...], counts: tuple[int, ...]
) -> None:
    """A call of the engine is described in the same words as the same call from Python."""
    given = described(F4, counts, shape if verb in verbs_with(Fact.SHAPED) else None)
    data = record(verb, given)
    assert words_of(data, lengths=shape) == words_of(data, given.text)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_a_peer_sends_can_be_put_into_words(seed: int) -> None:
    data = random.Random(seed).randbytes(FINGERPRINT_BYTES)
    assert words_of(data).isprintable()
    assert words_of(b"\xff" * 16) == "unknown(254) stage=15 algorithm=unknown(255)"


@pytest.mark.parametrize(
    "other",
    [
        record("all_reduce", described(F4, (6,))),
        record("all_reduce", described(DTYPES["float64"], (5,))),
        record("scan"),
        record(op=as_op("max")),
        record(algorithm="tree"),
        record(stage=1),
        record(rest=("another group", 4096)),
        record(rest=("a group", 4097)),
        record("all_reduce", described(F4, (1 << 40,))),
        record("all_reduce", described(F4, ((1 << 40) + 1,))),
    ],
)
def test_calls_that_differ_have_different_records(other: bytes) -> None:
    assert record() != other
    assert record("all_reduce", described(F4, (1 << 40,))) != record("all_reduce", described(F4, (1 << 41,)))


def test_shapes_and_uneven_counts_differ_in_the_hash_alone() -> None:
    flat, matrix = described(F4, (6, 6), (6,)), described(F4, (6, 6), (6, 1))
    even, uneven = described(F4, (5, 5, 5)), described(F4, (4, 6, 5))
    for one, other in ((flat, matrix), (even, uneven)):
        mine, theirs = (Fingerprint.unpack(record("all_gather", each)) for each in (one, other))
        assert mine.fields()[:7] == theirs.fields()[:7]
        assert mine.hash != theirs.hash
    assert Fingerprint.unpack(record("scan", Operand(F4, None))).count == COUNT_ANY


# -- reports from records alone ---------------------------------------------------------------------------


def report(*calls: CallReport) -> str:
    found = mismatch.Mismatch(4)
    found.add(dict(enumerate(calls)))
    return str(found.error(tuple(range(len(calls))), 0, "world", 0))


def test_a_rank_that_cannot_be_asked_is_shown_without_its_line() -> None:
    mine = CallReport.of(record(), "all_reduce float32[5] op=sum algorithm=ring segment=8 group=12", "a.py:3")
    text = report(mine, CallReport(record("all_reduce", described(F4, (6,)))))
    assert "called different things: count: 5 against 6 during" in text
    assert "rank 0: all_reduce float32[5] op=sum algorithm=ring segment=8 at a.py:3; " in text
    assert "rank 1: all_reduce float32[6] op=sum algorithm=ring. Next" in text


def test_records_that_differ_in_the_hash_alone_say_what_it_stands_for() -> None:
    one, other = (record("all_gather", described(F4, (6, 6), shape)) for shape in ((6,), (6, 1)))
    hashed = "shape, uneven counts, segment size, group or user op"
    assert hashed in report(CallReport(one), CallReport(other))
    assert hashed in report(CallReport(one, "all_gather float32[6] algorithm=ring", ""), CallReport(other))
    text = report(
        CallReport(one, "all_gather float32[6] algorithm=ring", "a.py:1"),
        CallReport(other, "all_gather float32[6,1] algorithm=ring", "a.py:2"),
    )
    assert "shape: 6 against 6,1 during" in text


def test_words_and_line_may_come_after_the_record() -> None:
    found = mismatch.Mismatch(0)
    found.add({1: CallReport(record())})
    assert found.ranks_reported() == set()
    found.add({1: CallReport.of(record(stage=1), "other words", "a.py:7")})
    assert found.ranks_reported() == {1}
    assert found.calls[1] == CallReport(record(), "", "a.py:7"), "the first record stays"
    found.add({1: CallReport.of(record(), "words", "b.py:8")})
    assert found.calls[1] == CallReport(record(), "words", "a.py:7")


# -- the call log -----------------------------------------------------------------------------------------


KEPT = 512  # native/collective/call_log.hpp


def test_the_log_keeps_the_last_calls_and_where_they_stand() -> None:
    log = _native.CallLog()
    code = compile("\n\nx = 1\ny = 2\n", "program.py", "exec")
    lines = {line: start for start, _, line in code.co_lines() if line is not None}
    for number in range(KEPT + 36):
        log.remember(number, number.to_bytes(16, "little"), code, lines[3 + number % 2])
    assert len(log) == KEPT
    assert log.find(35) is log.site(35) is None
    assert log.find(36) == (36).to_bytes(16, "little")
    assert [log.site(number) for number in (36, KEPT + 35)] == [("program.py", 3), ("program.py", 4)]
    assert log.last(2) == {number: number.to_bytes(16, "little") for number in (KEPT + 34, KEPT + 35)}
    log.remember(KEPT + 36, bytes(16))
    assert log.site(KEPT + 36) is None
    with pytest.raises(TypeError, match="code object"):
        log.remember(KEPT + 37, bytes(16), "program.py", 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="16 bytes"):
        log.remember(KEPT + 37, bytes(15))
    assert len(log) == KEPT


def test_the_log_holds_a_code_object_as_long_as_its_call() -> None:
    log, code = _native.CallLog(), compile("1", "program.py", "exec")
    held = sys.getrefcount(code)
    log.remember(0, bytes(16), code, 0)
    assert sys.getrefcount(code) == held + 1
    for number in range(1, KEPT + 1):
        log.remember(number, bytes(16))
    assert sys.getrefcount(code) == held, "the calls after it have taken its place"
    log.remember(KEPT + 1, bytes(16), code, 0)
    del log
    assert sys.getrefcount(code) == held


def test_arrays_that_travel_together_are_compared_by_type_and_length_in_the_order_given() -> None:
    f8 = DTYPES["float64"]
    lists = [
        [(F4, 2), (F4, 3)],
        [(F4, 3), (F4, 2)],
        [(F4, 5)],
        [(F4, 2), (f8, 3)],
        [(f8, 3), (F4, 2)],
        [(F4, 0), (F4, 5)],
        [(F4, 5), (F4, 0)],
        [(F4, 1)] * 5,
    ]
    records = [record("all_reduce_many", fused(arrays)) for arrays in lists]
    assert len(set(records)) == len(lists)
    assert [fused(arrays).text for arrays in lists[2:5]] == [
        "float32[5]",
        "float32[2] float64[3]",
        "float64[3] float32[2]",
    ]
    assert fused([]).text == "[]"
    # The call log of the engine holds enough for the same words.
    assert words_of(records[0], lengths=(2, 3)) == words_of(records[0], fused(lists[0]).text)
    many = [(F4, n) for n in range(40)]
    data = record("all_reduce_many", fused(many))
    assert words_of(data, lengths=tuple(range(40))) == words_of(data, fused(many).text)
    assert f"15+{zlib.crc32(repr(tuple(range(40))).encode()):x}]" in words_of(data, fused(many).text)


def test_a_rank_that_is_a_stage_further_may_have_made_the_same_call():
    """A root in its second stage sends a stall query to ranks that wait in the first: this is no mismatch."""
    first = Fingerprint(COLLECTIVES.index("scatter"), 0, 0, 0, 2, 0, 7, 5)
    second = replace(first, stage=1, count=1824, hash=9, algorithm=3)
    assert may_be_one_call(first.pack(), first.pack())
    assert may_be_one_call(first.pack(), second.pack())
    assert may_be_one_call(second.pack(), first.pack())
    assert not may_be_one_call(first.pack(), replace(first, count=8).pack())
    assert not may_be_one_call(first.pack(), replace(second, root=1).pack())
    assert not may_be_one_call(first.pack(), replace(second, verb=COLLECTIVES.index("barrier")).pack())
    assert not may_be_one_call(first.pack(), b"short")
