"""Properties: for every verb, type, operation, size, count, root and group the result equals NumPy's.

Each property runs on in-process ranks and, unchanged, on simulated ones. Numbers are small integers in every
type, so that sums are exact in any order and the oracle needs no tolerance.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.oracle import UFUNCS
from tests.support.processes import KINDS, run_processes
from tests.support.ranks import Ended, run_ranks

import unisono as uni
from unisono.core.dtypes import DTYPES, Kind
from unisono.core.ops import as_op
from unisono.plans import CATALOG
from unisono.plans.choose import fitting
from unisono.plans.steps import Problem

SOME = settings(derandomize=True, deadline=None, database=None, max_examples=120)
FEW = settings(derandomize=True, deadline=None, database=None, max_examples=60)
PROPERTIES: dict[str, tuple[Any, tuple[Any, ...]]] = {}


def holds(examples: settings, *strategies: Any) -> Any:
    """A property of every world. It is registered, so that it can be checked on other kinds of ranks."""

    def enter(prop: Any) -> Any:
        PROPERTIES[prop.__name__] = (prop, strategies)
        return pytest.mark.parametrize("world", ["local", "simulated"])(examples(given(*strategies)(prop)))

    return enter


SIZES = st.integers(1, 6)
NAMES = st.sampled_from(list(DTYPES))
# Short segments and a narrow window: a few elements take every path of long arrays.
CONFIGS = st.sampled_from(
    [
        {},
        {"segment_bytes": 64},
        {"segment_bytes": 64, "window_segments": 1, "eager_bytes": 0},
        {"reproducible": True},
    ]
)
COUNTS = st.integers(0, 12) | st.integers(13, 130)


def run(
    world: str, program, size: int, *args: Any, config: dict[str, Any] | None = None, seed: int = 0
) -> list[Any]:
    settings_ = uni.Config(**(config or {}))
    if world == "local":
        return run_ranks(program, size, *args, config=settings_).values()
    if world in KINDS:
        return Ended(run_processes(program, size, *args, kind=world, config=settings_)).values()
    results = uni.simulate(program, size, *args, seed=seed, config=settings_).results
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def numpy_type(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def numbers(shape: Any, name: str, seed: int) -> np.ndarray:
    """Numbers that differ by seed and element, small enough for exact sums and products in every type."""
    rng = np.random.default_rng(seed)
    kind = DTYPES[name].kind
    if kind is Kind.BOOL:
        return rng.integers(0, 2, shape).astype(bool)
    low = 0 if name.startswith("uint") else -3
    x = rng.integers(low, 4, shape)
    return (x + 1j * rng.integers(-2, 3, shape) if kind is Kind.COMPLEX else x).astype(numpy_type(name))


def reduced(parts: list[np.ndarray], op: str) -> np.ndarray:
    """The reduction of contributions in rank order, in their own type."""
    kind = parts[0].dtype
    if len(parts) == 1:
        return parts[0].copy()
    if op == "mean":
        total = reduced([p.astype(np.float32 if kind.itemsize == 2 else kind) for p in parts], "sum")
        # Real and imaginary parts separately: NumPy's complex division rounds more than once.
        halves = total.view(total.real.dtype)
        return (halves / halves.dtype.type(len(parts))).view(total.dtype).astype(kind)
    total = parts[0]
    with np.errstate(over="ignore"):
        for part in parts[1:]:
            total = UFUNCS[op](total, part).astype(kind)
    return total


def ops_for(name: str) -> list[str]:
    fit = []
    for op in (*UFUNCS, "mean"):
        try:
            as_op(op).check(DTYPES[name])
        except uni.UsageError:
            continue
        fit.append(op)
    return fit


def equal(got: Any, wanted: Any) -> None:
    """Equal in type, shape and bits."""
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    assert got.tobytes() == wanted.tobytes(), (got, wanted)


def equal_reduced(got: Any, wanted: Any) -> None:
    """Equal, except for the sign of zero in complex products, which depends on the order."""
    if got.dtype.kind == "c":
        got, wanted = got + np.zeros((), got.dtype), wanted + np.zeros((), wanted.dtype)
    equal(got, wanted)


def algorithm_of(draw, collective: str, size: int, counts: tuple[int, ...], *, ordered: bool) -> str:
    return draw(st.sampled_from(["auto", *fitting(Problem(collective, size, counts), ordered=ordered)]))


# -- reductions ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reduction:
    size: int
    verb: str
    op: str
    dtype: str
    count: int
    root: int
    algorithm: str
    config: Any
    seed: int


@st.composite
def reductions(draw) -> Reduction:
    size, name, count, config = draw(SIZES), draw(NAMES), draw(COUNTS), draw(CONFIGS)
    verb = draw(st.sampled_from(["all_reduce", "reduce", "reduce_scatter", "scan", "exscan"]))
    ops = [op for op in ops_for(name) if not (op == "mean" and "scan" in verb)]
    counts = (count,) * (size if verb == "reduce_scatter" else 1)
    algorithm = algorithm_of(draw, verb, size, counts, ordered=bool(config.get("reproducible")))
    root = draw(st.integers(0, size - 1))
    return Reduction(
        size, verb, draw(st.sampled_from(ops)), name, count, root, algorithm, config, draw(st.integers(0, 99))
    )


def operand(r: Reduction, rank: int) -> np.ndarray:
    shape = (r.size, r.count) if r.verb == "reduce_scatter" else (r.count,)
    return numbers(shape, r.dtype, r.seed * 100 + rank)


def reduce_program(comm, r: Reduction):
    x = operand(r, comm.rank)
    before = x.copy()
    how = {"algorithm": r.algorithm}
    match r.verb:
        case "all_reduce":
            assert comm.all_reduce(x, r.op, **how) is x
            return x
        case "reduce":
            result = comm.reduce(x, r.root, r.op, **how)
            if comm.rank != r.root:
                equal(x, before)
            return result
    result = getattr(comm, r.verb)(x, r.op, **how)
    equal(x, before)
    return result


@holds(SOME, reductions())
def test_reductions_are_numpys(world, r):
    results = run(world, reduce_program, r.size, r, config=r.config, seed=r.seed)
    parts = [operand(r, rank) for rank in range(r.size)]
    for rank, result in enumerate(results):
        match r.verb:
            case "all_reduce":
                equal_reduced(result, reduced(parts, r.op))
            case "reduce":
                assert (result is None) is (rank != r.root)
                if rank == r.root:
                    equal_reduced(result, reduced(parts, r.op))
            case "reduce_scatter":
                equal_reduced(result, reduced([p[rank] for p in parts], r.op))
            case "scan":
                equal_reduced(result, reduced(parts[: rank + 1], r.op))
            case "exscan" if rank:
                equal_reduced(result, reduced(parts[:rank], r.op))
            case "exscan":
                identity = np.full(r.count, as_op(r.op).identity_for(DTYPES[r.dtype]))
                equal(result, identity.astype(numpy_type(r.dtype)))


@holds(FEW, SIZES, st.lists(st.tuples(NAMES, st.integers(0, 20)), max_size=6), st.integers(0, 99), CONFIGS)
def test_many_at_once_are_each_by_itself(world, size, shapes, seed, config):
    def program(comm):
        xs = [numbers(n, name, seed + 7 * i + comm.rank) for i, (name, n) in enumerate(shapes)]
        given_back = comm.all_reduce_many(xs, "max" if has_no_complex else "sum")
        assert all(a is b for a, b in zip(given_back, xs, strict=True))
        return xs

    has_no_complex = not any("complex" in name for name, _ in shapes)
    if not has_no_complex and any(name == "bool" for name, _ in shapes):
        shapes = [(name, n) for name, n in shapes if name != "bool"]
    results = run(world, program, size, config=config, seed=seed)
    for i, (name, n) in enumerate(shapes):
        parts = [numbers(n, name, seed + 7 * i + rank) for rank in range(size)]
        for result in results:
            equal(result[i], reduced(parts, "max" if has_no_complex else "sum"))


@holds(
    FEW,
    SIZES,
    st.sampled_from(["float16", "bfloat16", "float32", "float64", "complex64"]),
    st.integers(1, 60),
    st.data(),
)
def test_every_rank_has_the_same_bits_whatever_the_numbers(world, size, name, count, data):
    """Numbers whose sum depends on the order: any order is allowed, but the same on all ranks."""
    config = data.draw(CONFIGS)
    is_ordered = bool(config.get("reproducible"))
    algorithm = algorithm_of(data.draw, "all_reduce", size, (count,), ordered=is_ordered)

    def program(comm, algorithm):
        x = np.random.default_rng(comm.rank).normal(scale=1e3, size=count) ** 3
        with np.errstate(over="ignore"):
            x = x.astype(numpy_type(name))
        return comm.all_reduce(x, algorithm=algorithm).tobytes()

    results = run(world, program, size, algorithm, config=config)
    assert len(set(results)) == 1
    if is_ordered:
        assert run(world, program, size, "ordered", config=config) == results


# -- moving ----------------------------------------------------------------------------------------------


def anything(shape: Any, name: str, seed: int) -> np.ndarray:
    """Arbitrary bits, including every kind of NaN: data that is only moved must not change."""
    kind = numpy_type(name)
    shape = shape if isinstance(shape, tuple) else (shape,)
    bits = np.random.default_rng(seed).integers(0, 256, math.prod(shape) * kind.itemsize, np.uint8)
    return (bits & 1 if name == "bool" else bits).view(kind).reshape(shape)


@st.composite
def moves(draw):
    size, name, root = draw(SIZES), draw(NAMES), 0
    verb = draw(st.sampled_from(["broadcast", "all_gather", "gather", "scatter", "all_to_all"]))
    shape = draw(st.lists(st.integers(0, 5), max_size=3).map(tuple))
    root = draw(st.integers(0, size - 1))
    held = {"broadcast": 1, "all_to_all": size * size}.get(verb, size)
    algorithm = algorithm_of(draw, verb, size, (math.prod(shape),) * held, ordered=False)
    return size, verb, name, shape, root, algorithm, draw(CONFIGS), draw(st.integers(0, 99))


@holds(SOME, moves())
def test_what_moves_arrives_bit_by_bit(world, move):
    size, verb, name, shape, root, algorithm, config, seed = move
    per_rank = (size, *shape) if verb in ("scatter", "all_to_all") else shape

    def held(rank: int) -> np.ndarray:
        return anything(per_rank, name, seed * 10 + rank)

    def program(comm):
        x, how = held(comm.rank), {"algorithm": algorithm}
        match verb:
            case "broadcast":
                assert comm.broadcast(x, root, **how) is x
                return x
            case "gather":
                return comm.gather(x, root, **how)
            case "scatter":
                return comm.scatter(x if comm.rank == root else None, root, **how)
        return getattr(comm, verb)(x, **how)

    everyone = [held(rank) for rank in range(size)]
    for rank, result in enumerate(run(world, program, size, config=config, seed=seed)):
        match verb:
            case "broadcast":
                equal(result, everyone[root])
            case "all_gather":
                equal(result, np.stack(everyone))
            case "gather":
                assert (result is None) is (rank != root)
                if rank == root:
                    equal(result, np.stack(everyone))
            case "scatter":
                equal(result, everyone[root][rank])
            case "all_to_all":
                equal(result, np.stack([x[rank] for x in everyone]))


@holds(SOME, st.data())
def test_uneven_parts_arrive_whole(world, data):
    size, name, config = data.draw(SIZES), data.draw(NAMES), data.draw(CONFIGS)
    verb = data.draw(st.sampled_from(["all_gather_v", "gather_v", "scatter_v", "all_to_all_v"]))
    width = data.draw(st.sampled_from([(), (3,), (2, 1), (0,)]))
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=size * size, max_size=size * size))
    root, seed = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 99))

    def part(source: int, target: int) -> np.ndarray:
        return anything((lengths[source * size + target], *width), name, seed + source * size + target)

    def program(comm):
        me = comm.rank
        match verb:
            case "all_gather_v":
                return comm.all_gather_v(part(me, 0))
            case "gather_v":
                return comm.gather_v(part(me, 0), root)
            case "scatter_v":
                return comm.scatter_v([part(me, d) for d in range(size)] if me == root else None, root)
        return comm.all_to_all_v([part(me, d) for d in range(size)])

    for rank, result in enumerate(run(world, program, size, config=config, seed=seed)):
        match verb:
            case "scatter_v":
                equal(result, part(root, rank))
                continue
            case "gather_v" if rank != root:
                assert result is None
                continue
            case "all_to_all_v":
                wanted = [part(source, rank) for source in range(size)]
            case _:
                wanted = [part(source, 0) for source in range(size)]
        assert len(result) == size
        for got, one in zip(result, wanted, strict=True):
            equal(got, one)


@holds(FEW, SIZES, st.data())
def test_rows_are_reduced_and_cut_by_counts(world, size, data):
    counts = data.draw(st.lists(st.integers(0, 7), min_size=size, max_size=size))
    name, seed = data.draw(NAMES), data.draw(st.integers(0, 99))
    op = data.draw(st.sampled_from(ops_for(name)))
    width = data.draw(st.sampled_from([(), (3,)]))

    def held(rank: int) -> np.ndarray:
        return numbers((sum(counts), *width), name, seed + rank)

    results = run(world, lambda comm: comm.reduce_scatter_v(held(comm.rank), counts, op), size, seed=seed)
    whole = reduced([held(rank) for rank in range(size)], op)
    for rank, result in enumerate(results):
        start = sum(counts[:rank])
        equal_reduced(result, whole[start : start + counts[rank]])


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=40),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers(), inner, max_size=2)
    ),
    max_leaves=6,
)


@holds(FEW, SIZES, st.data())
def test_objects_arrive_as_they_are(world, size, data):
    values = data.draw(st.lists(PLAIN, min_size=size, max_size=size))
    root = data.draw(st.integers(0, size - 1))

    def program(comm):
        mine = values[comm.rank]
        is_root = comm.rank == root
        return (
            comm.broadcast_object(mine if is_root else None, root),
            comm.all_gather_object(mine),
            comm.gather_object(mine, root),
            comm.scatter_object(values if is_root else None, root),
            comm.all_to_all_object([(mine, target) for target in range(size)]),
            comm.all_reduce_object([mine], lambda a, b: [*a, *b]),
        )

    for rank, got in enumerate(run(world, program, size)):
        exchanged = [(one, rank) for one in values]
        whole = values if rank == root else None
        assert got == (values[root], values, whole, values[rank], exchanged, values)


# -- groups ----------------------------------------------------------------------------------------------

COLORS = st.none() | st.integers(0, 2) | st.sampled_from([-(2**63), 2**63 - 1])
KEYS = st.integers(-2, 2) | st.sampled_from([-(2**63), 2**63 - 1])


def members_of(pattern: list[tuple[Any, int]], rank: int) -> list[int] | None:
    """The ranks with the color of `rank`, in the order of (key, rank)."""
    color = pattern[rank][0]
    if color is None:
        return None
    return sorted((r for r, (c, _) in enumerate(pattern) if c == color), key=lambda r: (pattern[r][1], r))


@holds(SOME, st.data())
def test_any_split_gives_the_right_groups_and_they_work(world, data):
    size = data.draw(st.integers(1, 6))
    patterns = data.draw(
        st.lists(st.lists(st.tuples(COLORS, KEYS), min_size=size, max_size=size), min_size=1, max_size=3)
    )

    def program(comm):
        seen = []
        for pattern in patterns:
            color, key = pattern[comm.rank]
            child = comm.split(color, key)
            if child is None:
                seen.append(None)
                continue
            ranks = child.all_gather(comm.rank).tolist()
            assert child.size == len(ranks)
            assert ranks[child.rank] == comm.rank
            # Nested splits: every rank by itself, and all ranks in reverse order.
            assert child.split(child.rank).size == 1
            back = child.split(7, -child.rank)
            assert back.all_gather(child.rank).tolist() == list(range(child.size))[::-1]
            seen.append((ranks, child.all_reduce(np.array([comm.rank, 1])).tolist()))
        return seen

    for rank, seen in enumerate(run(world, program, size)):
        for pattern, got in zip(patterns, seen, strict=True):
            members = members_of(pattern, rank)
            assert got == (None if members is None else (members, [sum(members), len(members)]))


@holds(FEW, st.data())
def test_any_subs_give_the_right_groups_although_they_overlap(world, data):
    size = data.draw(st.integers(1, 6))
    subsets = data.draw(
        st.lists(st.lists(st.integers(0, size - 1), min_size=1, max_size=2 * size), min_size=1, max_size=4)
    )

    def program(comm):
        children = [(comm.sub(list(ranks)), ranks) for ranks in subsets if comm.rank in ranks]
        sums = []
        for child, ranks in children:
            members = sorted(set(ranks))
            assert (child.size, child.rank) == (len(members), members.index(comm.rank))
            right, left = (child.rank + 1) % child.size, (child.rank - 1) % child.size
            got = np.empty(1, np.int64)
            status = child.sendrecv(np.array([comm.rank]), right, got, left, tag=3)
            assert (status.source, got[0]) == (left, members[left])
            sums.append(int(child.all_reduce(comm.rank + 1)))
        return sums

    for rank, sums in enumerate(run(world, program, size)):
        assert sums == [sum(r + 1 for r in set(ranks)) for ranks in subsets if rank in ranks]


@holds(FEW, st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda shape: math.prod(shape) <= 8))
def test_a_mesh_reduces_along_its_axes(world, shape):
    names = ["x", "y", "z"][: len(shape)]

    def program(comm):
        mesh = comm.mesh(shape, names)
        assert mesh.grid.rank_of(mesh.coords) == comm.rank
        assert all(mesh[name].rank == mesh.coords[axis] for axis, name in enumerate(names))
        return [mesh[name].all_reduce(comm.rank) for name in names]

    grid = np.arange(math.prod(shape)).reshape(shape)
    for rank, got in enumerate(run(world, program, math.prod(shape))):
        where = np.argwhere(grid == rank)[0]
        wanted = []
        for axis in range(len(shape)):
            line: list[Any] = list(where)
            line[axis] = slice(None)
            wanted.append(int(grid[tuple(line)].sum()))
        assert got == wanted


# -- messages --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Message:
    source: int
    target: int
    tag: int
    count: int


def payload(number: int, message: Message) -> np.ndarray:
    return np.arange(message.count) + 1000 * number


@st.composite
def exchanges(draw):
    size = draw(st.integers(1, 4))
    rank = st.integers(0, size - 1)
    # Counts on both sides of the eager limit of 16 KiB.
    message = st.builds(Message, rank, rank, st.integers(0, 2), st.sampled_from([0, 1, 7, 2048, 2049]))
    messages = draw(st.lists(message, max_size=12))
    return (
        size,
        messages,
        draw(st.sampled_from(["exact", "tag", "source", "any"])),
        draw(st.randoms(use_true_random=False)),
    )


@holds(SOME, exchanges())
def test_messages_arrive_once_whole_and_in_order(world, exchange):
    """All messages are started at once; receives are posted in another order, with or without wildcards."""
    size, messages, how, rng = exchange
    orders = [rng.sample(range(len(messages)), len(messages)) for _ in range(size)]

    def program(comm):
        me = comm.rank
        sends = [
            comm.start.send(payload(i, m), m.target, m.tag) for i, m in enumerate(messages) if m.source == me
        ]
        works = []
        for i in orders[me]:
            message = messages[i]
            if message.target == me:
                buf = np.full(2049, -1)
                source = message.source if how in ("exact", "source") else uni.ANY
                tag = message.tag if how in ("exact", "tag") else uni.ANY
                works.append((comm.start.recv(buf, source, tag), buf))
        received = []
        for work, buf in works:
            status = work.wait()
            assert (buf[status.nbytes // 8 :] == -1).all()
            received.append((status, buf[: status.nbytes // 8]))
        uni.wait_all(sends)
        assert comm.probe(timeout=0) is None
        return received

    for rank, received in enumerate(run(world, program, size)):
        came: dict[tuple[int, int], list[np.ndarray]] = defaultdict(list)
        for status, data in received:
            came[status.source, status.tag].append(data)
        sent: dict[tuple[int, int], list[np.ndarray]] = defaultdict(list)
        for i, m in enumerate(messages):
            if m.target == rank:
                sent[m.source, m.tag].append(payload(i, m))
        assert came.keys() == sent.keys()
        for key, wanted in sent.items():
            # Receives were posted in this order, so they get the messages in the order of sending.
            assert [d.tolist() for d in came[key]] == [w.tolist() for w in wanted]


@holds(FEW, st.integers(2, 5), st.integers(0, 40), NAMES, st.integers(0, 9))
def test_a_ring_of_sendrecv_turns_everything_by_one(world, size, count, name, seed):
    def program(comm):
        x = anything(count, name, seed + comm.rank)
        out = np.empty_like(x)
        for _ in range(size):
            comm.sendrecv(x, (comm.rank + 1) % size, out, (comm.rank - 1) % size)
            x, out = out, x
        return x

    for rank, x in enumerate(run(world, program, size)):
        equal(x, anything(count, name, seed + rank))


@pytest.mark.more
def test_both_worlds_are_really_used():
    backends = {
        name: run(name, lambda comm: comm.backend.capabilities.name, 2)[0] for name in ("local", "simulated")
    }
    assert backends["local"] == "local"
    assert backends["simulated"] != "local"


def test_every_verb_of_a_reduction_and_every_algorithm_is_drawn():
    """The strategies draw every verb and every algorithm."""
    drawn: set[tuple[str, str]] = set()

    @settings(derandomize=True, deadline=None, database=None, max_examples=2000)
    @given(reductions())
    def collect(r):
        drawn.add((r.verb, r.algorithm))

    collect()
    for verb in ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan"):
        named = {name for name, entry in CATALOG[verb].items() if not entry.needs_hosts}
        assert {a for v, a in drawn if v == verb} == {"auto", *named}


def test_a_rank_that_is_done_may_leave_although_its_goodbye_is_lost():
    """With nothing eager a goodbye is still in flight when its sender ends; others go on receiving."""

    def program(comm):
        x = np.arange(3) + comm.rank
        comm.all_reduce(x, algorithm="ring")
        return x.tolist()

    for seed in range(5):
        results = run("simulated", program, 3, config={"eager_bytes": 0, "window_segments": 1}, seed=seed)
        assert results == [[3, 6, 9]] * 3
