"""What bench/rpc.py has measured, as Markdown tables. Pure: it knows neither clocks nor processes.

The data of a run is a dict that JSON can hold; `merge` puts that of several runs together, so that a long
bench can be made in short pieces.

A *turn* is one measurement of each of the things that are compared: the ratio of two is taken within a turn,
and shown as its median with the least and the most.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

__all__ = ["PAGE_ROWS", "PARTS", "into_page", "merge", "tables"]

# By name of what was measured: a time in microseconds, or p50, p99 and p99.9 of it.
Turn: TypeAlias = dict[str, Any]

# What each of ours is compared with.
PEERS = {"shm": ("torch",), "tcp": ("torch-tcp", "torch"), "tls": ("torch-tcp",)}
LIBRARIES = ("shm", "tcp", "tls", "torch", "torch-tcp", "grpc", "zmq")
OURS = ("shm", "tcp", "tls")
MESSAGES, FORMS = "messages", ("bytes", "bytearray", "text", "array")
BEGIN, END = "<!-- bench/rpc.py: begin -->", "<!-- bench/rpc.py: end -->"
# The rows of the page, and what they are called there.
PAGE_ROWS = {
    "int": "an int",
    "text-100": "a text of 100 characters",
    "list-3": "a list of three ints",
    "keywords": "keyword arguments",
    "dict-3": "a dict of three",
    "set-3": "a set of three ints",
    "tuple-20": "a tuple of 20 ints",
    "dataclass": "a registered dataclass",
    "named-tuple": "a registered named tuple",
    "numpy-scalar": "a NumPy scalar",
    "floats-1000": "a list of 1,000 floats",
    "array-8": "an array of 8 bytes",
    "bytes-1Ki": "bytes, 1 KiB",
    "array-1Ki": "an array, 1 KiB",
    "bytes-64Ki": "bytes, 64 KiB",
    "array-64Ki": "an array, 64 KiB",
    "bytes-1Mi": "bytes, 1 MiB",
    "array-1Mi": "an array, 1 MiB",
    "bytes-16Mi": "bytes, 16 MiB",
    "array-16Mi": "an array, 16 MiB",
}
TITLES = {
    "shm": "shared memory",
    "tcp": "TCP",
    "tls": "TLS",
    "torch": "torch.rpc",
    "torch-tcp": "torch.rpc by TCP",
    "grpc": "gRPC",
    "zmq": "ZeroMQ",
}
# nexar 0.2.0, both ranks in one process, over TCP: reported figures, not measured here.
NEXAR_US = {"bytes-1Ki": 118, "bytes-1Mi": 5000}


def merge(into: dict[str, Any], new: dict[str, Any]) -> None:
    """Add the turns of another run to each row."""
    for part, rows in new.items():
        if part == "about":
            into.setdefault(part, []).extend(rows)
            continue
        for row, turns in rows.items():
            into.setdefault(part, {}).setdefault(row, []).extend(turns)


def tables(data: dict[str, Any], parts: Iterable[str]) -> Iterator[str]:
    """The lines of all tables for which there is data."""
    for about in data.get("about", ()):
        yield f"- {about}"
    for part in parts:
        if data.get(part):
            yield ""
            yield from PARTS[part](data[part])


def into_page(text: str, data: dict[str, Any]) -> str:
    """A page with the tables of a run between its two lines that name this bench."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no lines {BEGIN} and {END}")
    return "\n".join([before + BEGIN, "", *page(data), "", END + after])


def page(data: dict[str, Any]) -> Iterator[str]:
    """What a page shows of a run: times beside torch's, then the other parts."""
    for about in dict.fromkeys(data.get("about", ())):
        yield f"- {about}"
    for part, (words, made) in PAGE.items():
        if data.get(part):
            yield from ("", words, "", *made(data[part]))


def page_kinds(rows: dict[str, list[Turn]]) -> Iterator[str]:
    """Each kind of argument beside torch, one line each."""
    peers = [(name, PEERS[name][0]) for name in OURS]
    names = [*OURS, *dict.fromkeys(peer for _, peer in peers)]
    beside_peers = [f"{TITLES[name]} / {TITLES[peer]}" for name, peer in peers]
    yield from head(["microseconds", *(TITLES[name] for name in names), *beside_peers, "nexar"])
    for row, title in PAGE_ROWS.items():
        if row in rows:
            turns, nexar = rows[row], NEXAR_US.get(row)
            ratios = [ratio(turns, name, peer) for name, peer in peers]
            cells = [middle(turns, name) for name in names]
            yield line([title, *cells, *ratios, f"{nexar:,}" if nexar else ""])


def page_load(rows: dict[str, list[Turn]]) -> Iterator[str]:
    """Rates of all, and percentiles of ours."""
    peers = [(name, PEERS[name][0]) for name in OURS]
    names = [*OURS, *dict.fromkeys(peer for _, peer in peers)]
    beside_peers = [f"{TITLES[name]} / {TITLES[peer]}" for name, peer in peers]
    yield from head(["calls per second", *(TITLES[name] for name in names), *beside_peers])
    for row, turns in rows.items():
        rates = [middle(turns, name) for name in names]
        yield line([row, *rates, *(ratio(turns, name, peer) for name, peer in peers)])
    yield ""
    yield from head(["p50, p99, p99.9 in ms", *(TITLES[name] for name in OURS)])
    for row, turns in rows.items():
        some = {name: [turn[name] for turn in turns if name in turn] for name in OURS}
        yield line(
            [
                row,
                *(
                    ", ".join(milliseconds(some[name], at) for at in (1, 2, 3)) if some[name] else ""
                    for name in OURS
                ),
            ]
        )


def milliseconds(measured: list[Any], at: int) -> str:
    """The median of one percentile, of microseconds."""
    return figure(statistics.median(one[at] for one in measured) / 1000)


def page_steps(rows: dict[str, list[Turn]]) -> Iterator[str]:
    """The steepest place of each link."""
    yield from head(["link", "bytes", "time of twice as many, in the same turn"])
    for name, turns in rows.items():
        sizes = {int(size) for turn in turns for size in turn}
        found = [(n, [p50(t, str(2 * n)) / p50(t, str(n)) for t in turns]) for n in sizes if 2 * n in sizes]
        for n, ratios in sorted(found, key=lambda one: -statistics.median(one[1]))[:3]:
            yield line([TITLES[name], f"{n:,}", spread(ratios)])


def kinds(rows: dict[str, list[Turn]]) -> Iterator[str]:
    """Each kind of argument, there and back."""
    names = [name for name in LIBRARIES if any(name in turn for turns in rows.values() for turn in turns)]
    pairs = [(name, peer) for name in names for peer in PEERS.get(name, ()) if peer in names]
    yield from head(["there and back, p50 us", *names, *(f"{name} / {peer}" for name, peer in pairs)])
    for row, turns in rows.items():
        cells = [middle(turns, name) for name in names]
        yield line([row, *cells, *(ratio(turns, name, peer) for name, peer in pairs)])
    yield ""
    ours = [name for name in names if name in OURS]
    yield from head(["p99, p99.9 us", *ours])
    for row, turns in rows.items():
        yield line(
            [row, *(f"{middle(turns, name, 1)}, {middle(turns, name, 2)}".strip(", ") for name in ours)]
        )
    yield ""
    yield from head(["in calls with an int", *ours])
    for row, turns in rows.items():
        if row != "int" and "int" in rows:
            yield line([row, *(beside(turns, rows["int"], name) for name in ours)])


def sendrecv(rows: dict[str, list[Turn]]) -> Iterator[str]:
    """Calls with bytes and with an array beside the same bytes by send and recv."""
    yield from head(["link, bytes", "send and recv us", "bytes us", "array us", "bytes /", "array /"])
    for row, turns in rows.items():
        times = [middle(turns, name) for name in (MESSAGES, "bytes", "array")]
        yield line([row, *times, ratio(turns, "bytes", MESSAGES), ratio(turns, "array", MESSAGES)])


def steps(rows: dict[str, list[Turn]]) -> Iterator[str]:
    """Twice the bytes, and one byte more than each threshold."""
    yield from head(["link", "bytes", "us", "twice as many", "ratio"])
    for name, turns in rows.items():
        sizes = sorted({int(size) for turn in turns for size in turn})
        for low in sizes:
            high = 2 * low if 2 * low in sizes else low + 2
            if high in sizes:
                times = [middle(turns, str(low)), middle(turns, str(high))]
                shown = f"{high:,}: {times[1]}"
                yield line([name, f"{low:,}", times[0], shown, ratio(turns, str(high), str(low))])


def alike(rows: dict[str, list[Turn]]) -> Iterator[str]:
    """Bytes, bytearray, text and an array of one size."""
    yield from head(["link, bytes", *(f"{form} us" for form in FORMS), "slowest / fastest"])
    for row, turns in rows.items():
        ratios = [max(p50(turn, f) for f in FORMS) / min(p50(turn, f) for f in FORMS) for turn in turns]
        yield line([row, *(middle(turns, form) for form in FORMS), spread(ratios)])


def load(rows: dict[str, list[Turn]]) -> Iterator[str]:
    """Many calls under way: rates, and the time from start to answer."""
    names = [name for name in LIBRARIES if any(name in turn for turns in rows.values() for turn in turns)]
    yield from head(["under way", "library", "calls/s", "p50, p99, p99.9 us", "rate / torch"])
    for row, turns in rows.items():
        for name in names:
            some = [turn for turn in turns if name in turn]
            if some:
                percentiles = ", ".join(middle(some, name, at) for at in (1, 2, 3))
                ratios = [
                    f"{peer} {ratio(some, name, peer)}"
                    for peer in PEERS.get(name, ())
                    if ratio(some, name, peer)
                ]
                yield line([row, name, middle(some, name), percentiles, "; ".join(ratios)])


def busy(rows: dict[str, list[Turn]]) -> Iterator[str]:
    """One call at a time while the callee's main thread is busy."""
    yield from head(["link, callee's main thread", "p50 us", "p99", "p99.9"])
    for row, turns in rows.items():
        yield line([row, *(middle(turns, "int", at) for at in range(3))])


def wakes(rows: dict[str, list[Turn]]) -> Iterator[str]:
    """How often threads go to sleep per call."""
    yield from head(["link, argument", "voluntary context switches per call"])
    for row, turns in rows.items():
        roles = sorted({role for turn in turns for role in turn})
        cells = [f"{role} {statistics.median(turn.get(role, 0.0) for turn in turns):.2f}" for role in roles]
        yield line([row, ", ".join(cells) or "none"])


PARTS: dict[str, Callable[[dict[str, list[Turn]]], Iterator[str]]] = {
    "kinds": kinds,
    "sendrecv": sendrecv,
    "steps": steps,
    "alike": alike,
    "load": load,
    "busy": busy,
    "wakes": wakes,
}

# The sentence above each table of a page.
PAGE: dict[str, tuple[str, Callable[[dict[str, list[Turn]]], Iterator[str]]]] = {
    "kinds": (
        """The median time of a call and its answer, and ratios within a turn: their median, and in brackets
the least and the most. nexar's figures are reported ones (0.2.0, both ranks in one process, TCP).""",
        page_kinds,
    ),
    "sendrecv": (
        "Calls with bytes and with an array beside the same bytes there and back by `send` and `recv`:",
        sendrecv,
    ),
    "alike": ("The same bytes in four forms:", alike),
    "steps": ("The three steepest steps of each link, among bytes from 256 B to 16 MiB:", page_steps),
    "load": ("Many calls under way, with an int; four ranks, so more than cores:", page_load),
    "busy": ("One call at a time with an int, while the callee's main thread is busy:", busy),
    "wakes": (
        """How often threads go to sleep per call, by their role. The engine's thread and readers that have
no work look again each millisecond or so while a call lasts, so a longer call has more:""",
        wakes,
    ),
}


# -- cells -----------------------------------------------------------------------------------------------


def p50(turn: Turn, name: str, at: int = 0) -> float:
    """The first number of a measurement, or another one."""
    measured = turn[name]
    return float(measured[at] if isinstance(measured, list | tuple) else measured)


def middle(turns: list[Turn], name: str, at: int = 0) -> str:
    """The median of the turns; empty without any."""
    found = [p50(turn, name, at) for turn in turns if name in turn]
    return figure(statistics.median(found)) if found else ""


def figure(number: float) -> str:
    """Three significant digits or so."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}"


def ratio(turns: list[Turn], one: str, other: str) -> str:
    """One beside another in the same turns."""
    return spread([p50(turn, one) / p50(turn, other) for turn in turns if one in turn and other in turn])


def beside(turns: list[Turn], others: list[Turn], name: str) -> str:
    """The k-th turn of one row beside the k-th of another: they were made one after the other."""
    both = [(t, o) for t, o in zip(turns, others, strict=False) if name in t and name in o]
    return spread([p50(t, name) / p50(o, name) for t, o in both])


def spread(ratios: list[float]) -> str:
    """The median, with the least and the most."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""


def head(titles: list[str]) -> Iterator[str]:
    """The first two lines of a table."""
    yield line(titles)
    yield line(["---"] * len(titles))


def line(cells: list[str]) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |"
