"""Calls with bad arguments, by a rank of three, and words that their errors must contain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch

import unisono as uni
from unisono.plans import algorithms

__all__ = ["CALLER", "SIZE", "STARTABLE", "Bad", "bad_groups", "ones"]

SIZE = 3
CALLER = 1  # the rank that makes the bad call; 0 is the usual root


class Bad(NamedTuple):
    """A call on `comm` or on `comm.start`, and words that its error must contain."""

    name: str
    call: Callable[[Any], object]
    words: tuple[str, ...]


class Shown:
    """A value with a given repr, which must appear in the error."""


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def frozen(*shape: int) -> np.ndarray:
    x = ones(*shape)
    x.flags.writeable = False
    return x


def strided(*shape: int) -> np.ndarray:
    return ones(*shape, 2)[..., 0]


# Every verb with correct arguments, of which a case replaces one: the inputs, and the memory to fill.
ARRAY_VERBS: dict[str, Callable[[Any, Any], object]] = {
    "send": lambda c, x: c.send(x, 0),
    "sendrecv": lambda c, x: c.sendrecv(x, 0, ones(3), 0),
    "all_reduce": lambda c, x: c.all_reduce(x),
    "all_reduce_many": lambda c, x: c.all_reduce_many([ones(2), x]),
    "reduce": lambda c, x: c.reduce(x),
    "broadcast": lambda c, x: c.broadcast(x),
    "all_gather": lambda c, x: c.all_gather(x),
    "gather": lambda c, x: c.gather(x),
    "scatter": lambda c, x: c.scatter(x, CALLER),
    "reduce_scatter": lambda c, x: c.reduce_scatter(x),
    "reduce_scatter_v": lambda c, x: c.reduce_scatter_v(x, [1, 1, 1]),
    "all_to_all": lambda c, x: c.all_to_all(x),
    "scan": lambda c, x: c.scan(x),
    "exscan": lambda c, x: c.exscan(x),
    "all_gather_v": lambda c, x: c.all_gather_v(x),
    "gather_v": lambda c, x: c.gather_v(x),
    "scatter_v": lambda c, x: c.scatter_v([x] * SIZE, CALLER),
    "all_to_all_v": lambda c, x: c.all_to_all_v([x] * SIZE),
}
FILLED: dict[str, Callable[[Any, Any], object]] = {
    "recv": lambda c, x: c.recv(x, 0),
    "sendrecv": lambda c, x: c.sendrecv(ones(1), 0, x, 0),
    "all_reduce": lambda c, x: c.all_reduce(x),
    "all_reduce out": lambda c, x: c.all_reduce(ones(3), out=x),
    "all_reduce_many": lambda c, x: c.all_reduce_many([x, ones(3)]),
    "reduce at root": lambda c, x: c.reduce(x, root=CALLER),
    "broadcast": lambda c, x: c.broadcast(x, root=0),
    "scan out": lambda c, x: c.scan(ones(3), out=x),
    "exscan out": lambda c, x: c.exscan(ones(3), out=x),
    "reduce_scatter out": lambda c, x: c.reduce_scatter(ones(3, 3), out=x),
    "scatter out": lambda c, x: c.scatter(ones(3, 3), CALLER, out=x),
}
ROOTED: dict[str, Callable[[Any, Any], object]] = {
    "reduce": lambda c, r: c.reduce(ones(3), r),
    "broadcast": lambda c, r: c.broadcast(ones(3), r),
    "gather": lambda c, r: c.gather(ones(3), r),
    "scatter": lambda c, r: c.scatter(ones(3), r),
    "gather_v": lambda c, r: c.gather_v(ones(3), r),
    "scatter_v": lambda c, r: c.scatter_v([ones(3)] * SIZE, r),
    "broadcast_object": lambda c, r: c.broadcast_object(1, r),
    "gather_object": lambda c, r: c.gather_object(1, r),
    "scatter_object": lambda c, r: c.scatter_object([1] * SIZE, r),
}
REDUCING: dict[str, Callable[..., object]] = {
    "all_reduce": lambda c, x, op, **how: c.all_reduce(x, op, **how),
    "all_reduce_many": lambda c, x, op, **how: c.all_reduce_many([x], op, **how),
    "reduce": lambda c, x, op, **how: c.reduce(x, 0, op, **how),
    "reduce_scatter": lambda c, x, op, **how: c.reduce_scatter(x, op, **how),
    "reduce_scatter_v": lambda c, x, op, **how: c.reduce_scatter_v(x, [1, 1, 1], op, **how),
    "scan": lambda c, x, op, **how: c.scan(x, op, **how),
    "exscan": lambda c, x, op, **how: c.exscan(x, op, **how),
}
BY_ALGORITHM: dict[str, Callable[[Any, str], object]] = {
    **{name: lambda c, a, verb=verb: verb(c, ones(3), "sum", algorithm=a) for name, verb in REDUCING.items()},
    "broadcast": lambda c, a: c.broadcast(ones(3), algorithm=a),
    "all_gather": lambda c, a: c.all_gather(ones(3), algorithm=a),
    "gather": lambda c, a: c.gather(ones(3), algorithm=a),
    "scatter": lambda c, a: c.scatter(ones(3), CALLER, algorithm=a),
    "all_to_all": lambda c, a: c.all_to_all(ones(3), algorithm=a),
    "barrier": lambda c, a: c.barrier(algorithm=a),
    "all_gather_v": lambda c, a: c.all_gather_v(ones(3), algorithm=a),
    "gather_v": lambda c, a: c.gather_v(ones(3), algorithm=a),
    "scatter_v": lambda c, a: c.scatter_v([ones(1)] * 3, CALLER, algorithm=a),
    "all_to_all_v": lambda c, a: c.all_to_all_v([ones(1)] * 3, algorithm=a),
}
NO_RANKS = (SIZE, -1, 10**30, 1.0, "0", None, True, (0,))
NO_TAGS = (-1, 2**31, 1.0, "0", None, True)


def bad_ranks() -> list[Bad]:
    peers: dict[str, Callable[[Any, Any], object]] = {
        "send dst": lambda c, r: c.send(ones(1), r),
        "sendrecv dst": lambda c, r: c.sendrecv(ones(1), r, ones(1), 0),
        "sendrecv src": lambda c, r: c.sendrecv(ones(1), 0, ones(1), r),
        "recv src": lambda c, r: c.recv(ones(1), r),
        "recv_bytes src": lambda c, r: c.recv_bytes(r),
        "send_object dst": lambda c, r: c.send_object([1], r),
        "recv_object src": lambda c, r: c.recv_object(r),
        "probe src": lambda c, r: c.probe(r),
    }
    cases = []
    for name, call in peers.items():
        for rank in (*NO_RANKS, *((uni.ANY,) if name.endswith("dst") else ())):
            what = name.split()[1]
            given = "ANY" if rank is uni.ANY else repr(rank)
            words = (f"{what}={given}; allowed: ranks 0 to 2",)
            cases.append(Bad(f"{name} {rank!r:.12}", lambda c, f=call, r=rank: f(c, r), words))
    for name, call in ROOTED.items():
        for rank in (*NO_RANKS, uni.ANY):
            given = "ANY" if rank is uni.ANY else repr(rank)
            words = (f"root={given}; allowed: ranks 0 to 2",)
            cases.append(Bad(f"{name} root {rank!r:.12}", lambda c, f=call, r=rank: f(c, r), words))
    return cases


def bad_tags() -> list[Bad]:
    verbs: dict[str, Callable[[Any, Any], object]] = {
        "send": lambda c, t: c.send(ones(1), 0, t),
        "sendrecv": lambda c, t: c.sendrecv(ones(1), 0, ones(1), 0, t),
        "recv": lambda c, t: c.recv(ones(1), 0, t),
        "recv_bytes": lambda c, t: c.recv_bytes(0, t),
        "send_object": lambda c, t: c.send_object([1], 0, t),
        "recv_object": lambda c, t: c.recv_object(0, t),
        "probe": lambda c, t: c.probe(0, t),
    }
    cases = []
    for name, call in verbs.items():
        for tag in (*NO_TAGS, *((uni.ANY,) if "send" in name else ())):
            words = (f"tag={tag!r}; allowed: 0 to 2147483647",)
            cases.append(Bad(f"{name} tag {tag!r}", lambda c, f=call, t=tag: f(c, t), words))
    return cases


def bad_data() -> list[Bad]:
    kinds = [
        ("objects", np.array([[{}], [{}], [{}]], object), ("dtype object; allowed: bool, int8",)),
        ("texts", np.array([["a"]] * 3), ("dtype <U1; allowed: bool, int8",)),
        ("times", np.zeros((3, 1), "datetime64[s]"), ("dtype datetime64[s]; allowed: bool",)),
        (
            "other endianness",
            ones(3, 1, dtype=">f4"),
            ("foreign byte order (>f4); allowed: the machine's byte order",),
        ),
        ("a list", [1.0, 2.0, 3.0], ("is list; allowed: an array with the buffer protocol or DLPack",)),
        ("a text", "abc", ("is str; allowed: an array",)),
        ("nothing", None, ("allowed: an array",)),
        ("float8", torch.zeros(3, 1).to(torch.float8_e4m3fn), ("dtype torch.float8_e4m3fn; allowed: bool",)),
        ("a mask", np.ma.masked_array(ones(3, 1)), ("masked array", "allowed: plain arrays")),
        ("a sparse tensor", torch.eye(3).to_sparse(), ("allowed: dense tensors on the CPU",)),
    ]
    where = {
        "send": "data",
        "sendrecv": "data",
        "all_reduce_many": "xs[1]",
        "scatter_v": "parts[0]",
        "all_to_all_v": "parts[0]",
    }
    cases = []
    for verb, call in ARRAY_VERBS.items():
        for kind, given, words in kinds:
            if verb == "scatter" and given is None:
                words = ("scatter needs x on root; elsewhere it is None",)
            else:
                words = (f"{where.get(verb, 'x')} ", *words)
            cases.append(Bad(f"{verb} of {kind}", lambda c, f=call, x=given: f(c, x), words))
    return cases


def bad_targets() -> list[Bad]:
    """Targets that cannot be filled: read-only, not contiguous, no array, of another type or shape."""
    kinds = [
        ("read-only", frozen(3), ("is read-only; allowed: writable memory",)),
        ("bytes", b"abcdefghijkl", ("is read-only; allowed: writable memory",)),
        ("strided", strided(3), ("is not contiguous (strides (8,)); allowed: C-contiguous memory",)),
        ("reversed", ones(3)[::-1], ("is not contiguous", "allowed: C-contiguous")),
        ("a column", torch.ones(3, 2)[:, 0], ("is not contiguous", "allowed: C-contiguous")),
        ("objects", np.array([{}] * 3, object), ("dtype object; allowed: bool",)),
        ("a list", [0.0] * 3, ("is list; allowed: an array",)),
    ]
    cases = []
    for verb, call in FILLED.items():
        for kind, given, words in kinds:
            cases.append(Bad(f"{verb} into {kind}", lambda c, f=call, x=given: f(c, x), words))
        if "out" in verb or "recv" in verb:
            what = "out" if "out" in verb else "buf"
            words = (f"{what} is a number; allowed: writable memory to receive into",)
            cases.append(Bad(f"{verb} into a number", lambda c, f=call: f(c, 3.5), words))
        if "out" in verb:
            for given in (ones(4), ones(3, 1), ones(3, dtype=np.float64), ones()):
                words = (f"out is {given.dtype} of shape {given.shape}; allowed: float32 of shape (3,)",)
                name = f"{verb} into {given.dtype} of shape {given.shape}"
                cases.append(Bad(name, lambda c, f=call, x=given: f(c, x), words))
    return cases


def overlaps() -> list[Bad]:
    def of(call):
        """`call(comm, whole)` on 30 elements, of which it uses two overlapping parts."""
        return lambda c: call(c, np.arange(30, dtype=np.float32))

    out = ("out overlaps x; allowed: separate memory",)
    return [
        Bad("all_reduce onto itself", of(lambda c, w: c.all_reduce(w, out=w)), out),
        Bad("all_reduce onto a part", of(lambda c, w: c.all_reduce(w[:9], out=w[8:17])), out),
        Bad("all_gather onto itself", of(lambda c, w: c.all_gather(w[:5], out=w[4:19].reshape(3, 5))), out),
        Bad("gather at root", of(lambda c, w: c.gather(w[:5], CALLER, out=w[:15].reshape(3, 5))), out),
        Bad("scatter at root", of(lambda c, w: c.scatter(w.reshape(3, 10), CALLER, out=w[20:30])), out),
        Bad("reduce_scatter", of(lambda c, w: c.reduce_scatter(w.reshape(3, 10), out=w[:10])), out),
        Bad(
            "all_to_all", of(lambda c, w: c.all_to_all(w[:15].reshape(3, 5), out=w[14:29].reshape(3, 5))), out
        ),
        Bad("scan", of(lambda c, w: c.scan(w[:5], out=w[4:9])), out),
        Bad("exscan", of(lambda c, w: c.exscan(w[:5], out=w[4:9])), out),
        Bad(
            "sendrecv",
            of(lambda c, w: c.sendrecv(w[:5], 0, w[4:9], 0)),
            ("data and buf overlap; allowed: separate memory",),
        ),
        Bad(
            "torch onto numpy",
            of(lambda c, w: c.scan(torch.from_numpy(w)[:5], out=w[2:7])),
            out,
        ),
    ]


def bad_operations() -> list[Bad]:
    pairs = [
        (np.bool_, "sum", "op 'sum' is not defined for bool; allowed for bool types: min, max, band"),
        (np.int32, "mean", "op 'mean' is not defined for int32; allowed for integer types: sum, prod"),
        (np.float32, "bxor", "op 'bxor' is not defined for float32; allowed for float types: sum, prod"),
        (ml_dtypes.bfloat16, "land", "op 'land' is not defined for bfloat16; allowed for float types"),
        (np.complex64, "max", "op 'max' is not defined for complex64; allowed for complex types: sum, prod"),
    ]
    cases = []
    for verb, call in REDUCING.items():
        for op in ("average", "SUM", "", None, 7, max, ["sum"]):
            words = (f"op {op!r} is unknown; allowed: sum, prod, min, max",)
            cases.append(Bad(f"{verb} {op!r:.12}", lambda c, f=call, o=op: f(c, ones(3), o), words))
        for dtype, op, text in pairs:
            words = (f"{verb} has no mean",) if op == "mean" and "scan" in verb else (text,)
            x = ones(3, dtype=dtype)
            cases.append(Bad(f"{verb} {op} of {x.dtype}", lambda c, f=call, x=x, o=op: f(c, x, o), words))
    for verb in ("scan", "exscan"):
        call = REDUCING[verb]
        words = (f"{verb} has no mean", "allowed: sum")
        cases.append(Bad(f"{verb} mean", lambda c, f=call: f(c, ones(3), "mean"), words))
    first = uni.op(lambda left, right: left, name="first")
    mine = uni.op(lambda left, right: left, identity=1.5, name="mine")
    cases += [
        Bad("exscan without identity", lambda c: c.exscan(ones(3), first), ("identity", "'first'")),
        Bad(
            "exscan of integers from 1.5",
            lambda c: c.exscan(ones(3, dtype=np.int32), mine),
            ("identity=1.5 of op 'mine' is not a value of int32",),
        ),
    ]
    return cases


def bad_algorithms() -> list[Bad]:
    cases = []
    for verb, call in BY_ALGORITHM.items():
        collective = "all_reduce" if verb == "all_reduce_many" else verb.removesuffix("_v")
        for name in ("rings", "", "AUTO", None, 3):
            words = (f"algorithm={name!r} is unknown for ", f"{collective}; allowed: auto, ")
            cases.append(Bad(f"{verb} by {name!r}", lambda c, f=call, a=name: f(c, a), words))
        foreign = next(
            a for a in ("hillis_steele", "ring", "dissemination") if a not in algorithms(collective)
        )
        words = (f"algorithm={foreign!r} is unknown for ", "; allowed: auto, ")
        cases.append(Bad(f"{verb} by {foreign}", lambda c, f=call, a=foreign: f(c, a), words))
    first = uni.op(lambda left, right: left, commutative=False, name="first")
    words = ("algorithm='ring' of ", "does not keep the order", "first, which does not commute")
    cases += [
        Bad(
            f"{verb} in order by ring",
            lambda c, f=REDUCING[verb]: f(c, ones(3), first, algorithm="ring"),
            words,
        )
        for verb in ("all_reduce", "all_reduce_many", "reduce_scatter", "reduce_scatter_v")
    ]
    uneven = ("algorithm='dissemination' is unknown for an uneven all_to_all; allowed: auto, pairwise, flat",)
    parts = [ones(n) for n in (1, 0, 2)]
    cases.append(
        Bad(
            "all_to_all_v by dissemination",
            lambda c: c.all_to_all_v(parts, algorithm="dissemination"),
            uneven,
        )
    )
    return cases


def bad_shapes() -> list[Bad]:
    def axis(shape, what="x"):
        return (f"{what} has shape {shape}; allowed: a leading axis of 3, one per rank",)

    def parts(call):
        rule = ("parts must be a list of length 3: one array per rank",)
        alike = ("parts differ in dtype or in shape beyond axis 0; allowed: the same for all ranks",)
        wrong = [
            ("too few", [ones(1)] * 2, rule),
            ("too many", [ones(1)] * 4, rule),
            ("none", None, rule),
            ("a number", 3, rule),
            ("text", "abc", rule),
            ("bytes", b"abc", rule),
            ("an array", ones(3), rule),
            ("other types", [ones(1), ones(1), ones(1, dtype=np.int8)], alike),
            ("other widths", [ones(1, 2), ones(1, 2), ones(1, 3)], alike),
            ("a number inside", [ones(1), 1.0, ones(1)], ("parts[1] has no axis 0; allowed: arrays of one",)),
        ]
        return [(name, lambda c, p=given: call(c, p), words) for name, given, words in wrong]

    cases = []
    for verb in ("reduce_scatter", "all_to_all", "scatter"):
        for shape in ((), (0,), (2, 3), (4,), (1, 3)):
            call = ARRAY_VERBS[verb]
            cases.append(Bad(f"{verb} of {shape}", lambda c, f=call, s=shape: f(c, ones(*s)), axis(shape)))
    for verb in ("all_gather_v", "gather_v"):
        words = ("x has no axis 0; allowed: arrays of one dimension or more",)
        cases.append(Bad(f"{verb} of a number", lambda c, f=ARRAY_VERBS[verb]: f(c, 2.5), words))
    for verb, call in (
        ("scatter_v", lambda c, p: c.scatter_v(p, CALLER)),
        ("all_to_all_v", lambda c, p: c.all_to_all_v(p)),
    ):
        cases += [Bad(f"{verb} {name}", made, words) for name, made, words in parts(call)]
    counts = [
        (
            [1, 1],
            "counts=[1, 1] do not cut axis 0 of x, shape (3, 2); allowed: 3 lengths >= 0 that add up to 3",
        ),
        ([1, 1, 2], "add up to 3"),
        ([4, -1, 0], "lengths >= 0"),
        ([1, 1, 1, 0], "allowed: 3 lengths"),
        ([1.0, 1.0, 1.0], "counts=[1.0, 1.0, 1.0]; allowed: a list of 3 lengths"),
        ("111", "counts='111'; allowed: a list of 3 lengths"),
        (3, "counts=3; allowed: a list of 3 lengths"),
        (None, "counts=None; allowed: a list of 3 lengths"),
    ]
    for given, text in counts:
        name = f"reduce_scatter_v cut by {given!r}"
        cases.append(Bad(name, lambda c, n=given: c.reduce_scatter_v(ones(3, 2), n), (text,)))
    words = ("counts=[1, 1, 1] do not cut axis 0 of x, shape ()",)
    cases.append(Bad("reduce_scatter_v of a number", lambda c: c.reduce_scatter_v(1.0, [1, 1, 1]), words))
    for given in (ones(3), 3, None):
        words = ("all_reduce_many takes a list of arrays, not",)
        cases.append(Bad(f"all_reduce_many of {type(given)}", lambda c, x=given: c.all_reduce_many(x), words))
    words = ("scatter needs x on root; elsewhere it is None",)
    cases.append(Bad("scatter nothing", lambda c: c.scatter(None, CALLER), words))
    return cases


def bad_objects() -> list[Bad]:
    lists = ("scatter_object takes a list of 3 objects on root: one per rank",)
    cases = [
        Bad(f"scatter_object {given!r:.12}", lambda c, v=given: c.scatter_object(v, CALLER), lists)
        for given in (None, [1, 2], [1] * 4, "abc", b"abc", 3)
    ]
    lists = ("all_to_all_object takes a list of 3 objects: one per rank",)
    cases += [
        Bad(f"all_to_all_object {given!r:.12}", lambda c, v=given: c.all_to_all_object(v), lists)
        for given in (None, [], [1, 2], [1] * 4, "abc", b"abc", 3)
    ]
    words = ("cannot be called; allowed: a function of two objects",)
    cases += [
        Bad(f"fn={given!r}", lambda c, f=given: c.all_reduce_object(1, f), words) for given in (None, "sum")
    ]
    words = (
        "['k'][0] of the object is ",
        "Shown; allowed: plain data, bytes, arrays, and dataclasses",
        "Next: ",
    )
    value = {"k": [Shown()]}
    return [
        *cases,
        Bad("send_object", lambda c: c.send_object(value, 0), words),
        Bad("broadcast_object", lambda c: c.broadcast_object(value, CALLER), words),
        Bad("all_gather_object", lambda c: c.all_gather_object(value), words),
        Bad("gather_object", lambda c: c.gather_object(value), words),
        Bad("scatter_object", lambda c: c.scatter_object([value] * 3, CALLER), words),
        Bad("all_to_all_object", lambda c: c.all_to_all_object([1, value, 1]), words),
        Bad("all_reduce_object", lambda c: c.all_reduce_object(value, max), words),
    ]


def bad_splits() -> list[Bad]:
    numbers = ("red", 1.5, True, 2**63, -(2**63) - 1, [0])
    return [
        *(
            Bad(
                f"split color {n!r}",
                lambda c, n=n: c.split(n),
                (f"color={n!r}; allowed: a signed 64-bit integer or None",),
            )
            for n in numbers
        ),
        *(
            Bad(
                f"split key {n!r}",
                lambda c, n=n: c.split(0, n),
                (f"key={n!r}; allowed: a signed 64-bit integer",),
            )
            for n in (*numbers, None)
        ),
    ]


def bad_groups() -> list[Bad]:
    """Calls that give no Work: `sub` sends nothing, `mesh` checks its arguments before it splits."""
    ranks = ("allowed: ranks 0 to 2",)
    return [
        Bad("sub of none", lambda c: c.sub([]), ("members is empty; allowed: one or more ranks",)),
        Bad("sub without oneself", lambda c: c.sub([0, 2]), ("rank 1 is not among the members [0, 2]",)),
        *(
            Bad(f"sub with {r!r}", lambda c, r=r: c.sub([CALLER, r]), (f"member={r!r}", *ranks))
            for r in (3, -1, 0.0, "0", None, True, [0])
        ),
        Bad("sub with any", lambda c: c.sub([CALLER, uni.ANY]), ("member=unisono.ANY", *ranks)),
        Bad("sub of a number", lambda c: c.sub(2), ("ranks=2; allowed: a list",)),
        Bad("mesh of 4", lambda c: c.mesh([2, 2]), ("mesh shape (2, 2) holds 4 ranks; allowed: exactly 3",)),
        Bad("mesh of none", lambda c: c.mesh([]), ("mesh shape (); allowed: one or more lengths >= 1",)),
        Bad("mesh of negatives", lambda c: c.mesh([-3, -1]), ("mesh shape (-3, -1); allowed",)),
        Bad("mesh of fractions", lambda c: c.mesh([3.0]), ("mesh shape (3.0,); allowed",)),
        Bad("mesh of a number", lambda c: c.mesh(3), ("shape=3; allowed: a list",)),
        Bad(
            "mesh with few names",
            lambda c: c.mesh([3, 1], ["a"]),
            ("names ('a',); allowed: 2 different names",),
        ),
        Bad("mesh with equal names", lambda c: c.mesh([3, 1], ["a", "a"]), ("allowed: 2 different names",)),
        Bad("mesh with numbers", lambda c: c.mesh([3], [1]), ("allowed: 1 different names",)),
        Bad("mesh with lists", lambda c: c.mesh([3], [[]]), ("allowed: 1 different names",)),
        Bad("mesh with one name", lambda c: c.mesh([3], 7), ("names=7; allowed: a list",)),
    ]


STARTABLE = [
    *bad_ranks(),
    *bad_tags(),
    *bad_data(),
    *bad_targets(),
    *overlaps(),
    *bad_operations(),
    *bad_algorithms(),
    *bad_shapes(),
    *bad_objects(),
    *bad_splits(),
]
