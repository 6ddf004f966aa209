"""Pictures of plans: as text, and as an SVG with ranks as lines, rounds as columns and messages as arrows.

Pure: it returns text.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final, NamedTuple

from unisono.plans.layout import is_local
from unisono.plans.steps import BoundPlan, Copy, Recv, RecvReduce, Reduce, Send
from unisono.plans.units import bytes_text

__all__ = ["Message", "as_svg", "as_text", "messages", "rank_text"]


class Message(NamedTuple):
    """One arrow: from a send to its receive."""

    src: int
    dst: int
    sent_in: int
    received_in: int
    elements: int
    reduces: bool


def messages(plans: Sequence[BoundPlan]) -> list[Message]:
    """Pair every send with its receive: the k-th send from p to q with q's k-th receive from p."""
    receives: defaultdict[tuple[int, int], deque[tuple[int, bool]]] = defaultdict(deque)
    for plan in plans:
        for number, steps in enumerate(plan.rounds):
            for step in steps:
                if isinstance(step, Recv | RecvReduce):
                    receives[step.peer, plan.rank].append((number, isinstance(step, RecvReduce)))
    found = []
    for plan in plans:
        for number, steps in enumerate(plan.rounds):
            for step in steps:
                if isinstance(step, Send) and receives[plan.rank, step.peer]:
                    received_in, reduces = receives[plan.rank, step.peer].popleft()
                    found.append(Message(plan.rank, step.peer, number, received_in, step.src.count, reduces))
    return sorted(found, key=lambda message: (message.sent_in, message.src, message.dst))


def as_text(plans: Sequence[BoundPlan], itemsize: int) -> str:
    """Write every step of every rank, round by round, with the bytes that each round moves."""
    lines = []
    width = len(str(len(plans) - 1))
    for number in range(max((len(plan.rounds) for plan in plans), default=0)):
        here = [(plan.rank, plan.rounds[number]) for plan in plans if number < len(plan.rounds)]
        sends = [step for _, steps in here for step in steps if isinstance(step, Send)]
        moved = bytes_text(itemsize * sum(step.src.count for step in sends))
        lines.append(f"round {number}: {_counted(len(sends), 'message')}, {moved}")
        lines += [f"  {rank:{width}}  {'; '.join(map(str, steps))}" for rank, steps in here if steps]
    return "\n".join(lines)


def rank_text(plan: BoundPlan) -> str:
    """Write one rank's steps, a line each."""
    width = len(str(len(plan.rounds) - 1))
    return "\n".join(
        f"{number:{width}}  {step}" for number, steps in enumerate(plan.rounds) for step in steps
    )


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


# The palette of Okabe and Ito: distinct for colour-blind readers, and in print.
_STYLE: Final = """
  text { font-family: ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, sans-serif; fill: #1f2933; }
  .title { font-size: 17px; font-weight: 600; }
  .note { font-size: 12px; fill: #61707f; }
  .label { font-size: 12px; font-variant-numeric: tabular-nums; }
  .rail { stroke: #c3ccd5; stroke-width: 1.2; }
  .column { fill: #f3f6f9; }
  .host { fill: #e8f0f7; }
  .move { stroke: #0072b2; fill: none; }
  .reduce { stroke: #d55e00; fill: none; }
  .move-end { fill: #0072b2; }
  .reduce-end { fill: #d55e00; }
  .copy-dot { fill: #8a97a5; }
  .reduce-dot { fill: #d55e00; }
"""


@dataclass(frozen=True, slots=True)
class _Frame:
    """The layout of the page, in pixels."""

    left: int
    top: int
    column: int
    row: int

    def x(self, column: float) -> float:
        return round(self.left + column * self.column, 1)

    def y(self, rank: float) -> float:
        return round(self.top + (rank + 0.5) * self.row, 1)


def as_svg(plans: Sequence[BoundPlan], itemsize: int, note: str = "") -> str:
    """Draw a set of plans as a space-time diagram; the SVG is self-contained."""
    first = plans[0]
    ranks, rounds = len(plans), len(first.rounds)
    # Few rounds get wide columns for readable arrows; many rounds must fit on a page that scrolls.
    frame = _Frame(left=78, top=92, column=max(30, min(120, 1500 // max(1, rounds))), row=30)
    width = max(560, int(frame.x(rounds)) + 30)
    height = int(frame.y(ranks)) + 62
    title = f"{first.problem.collective} by {first.algorithm}, {_counted(ranks, 'rank')}"
    shape = f'width="{width}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {shape} viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        _ARROW_HEADS,
        f'<rect {shape} fill="#ffffff"/>',
        f'<text x="24" y="34" class="title">{escape(title)}</text>',
        f'<text x="24" y="54" class="note">{escape(note)}</text>',
        *_grid(plans, frame, rounds, itemsize),
        *_arrows(messages(plans), frame, itemsize),
        *_dots(plans, frame),
        *_legend(height - 20),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


_ARROW_HEAD: Final = """<marker id="{kind}-head" viewBox="0 0 8 8" refX="7" refY="4" orient="auto"
  markerUnits="userSpaceOnUse" markerWidth="8" markerHeight="8">
  <path d="M0 0.8 L8 4 L0 7.2 Z" class="{kind}-end"/></marker>"""
_ARROW_HEADS: Final = f"<defs>{''.join(_ARROW_HEAD.format(kind=kind) for kind in ('move', 'reduce'))}</defs>"


def _grid(plans: Sequence[BoundPlan], frame: _Frame, rounds: int, itemsize: int) -> Iterator[str]:
    """Draw hosts as bands, rounds as columns with their bytes below, ranks as lines."""
    ranks = len(plans)
    top, bottom = frame.y(-0.5), frame.y(ranks - 0.5)
    for number in range(0, rounds, 2):
        x = frame.x(number)
        yield f'<rect x="{x}" y="{top}" width="{frame.column}" height="{bottom - top}" class="column"/>'
    # With many rounds, only every 2nd, 5th, 10th ... is numbered.
    every = next(step for step in (1, 2, 5, 10, 20, 50, 100, rounds) if step * frame.column >= 60)
    for number in range(rounds):
        if number % every:
            continue
        x = frame.x(number + 0.5)
        counts = [step.src.count for plan in plans for step in plan.rounds[number] if isinstance(step, Send)]
        moved = bytes_text(itemsize * sum(counts)) if counts else "local"
        yield f'<text x="{x}" y="{top - 10}" text-anchor="middle" class="label">{number}</text>'
        yield f'<text x="{x}" y="{bottom + 18}" text-anchor="middle" class="note">{moved}</text>'
    hosts = plans[0].problem.hosts
    for rank in range(ranks):
        y = frame.y(rank)
        if hosts and list(dict.fromkeys(hosts)).index(hosts[rank]) % 2:
            yield f'<rect x="14" y="{frame.y(rank - 0.5)}" width="60" height="{frame.row}" class="host"/>'
        name = f"rank {rank}" if not hosts else f"{rank} · h{hosts[rank]}"
        yield f'<text x="68" y="{y + 4}" text-anchor="end" class="label">{name}</text>'
        yield f'<line x1="{frame.left}" y1="{y}" x2="{frame.x(rounds)}" y2="{y}" class="rail"/>'


def _arrows(found: Sequence[Message], frame: _Frame, itemsize: int) -> Iterator[str]:
    longest = max((message.elements for message in found), default=1) or 1
    for message in found:
        kind = "reduce" if message.reduces else "move"
        # Line width grows with the share of the longest message.
        stroke = round(0.9 + 1.4 * message.elements / longest, 2)
        x1, x2 = frame.x(message.sent_in + 0.08), frame.x(message.received_in + 0.92)
        says = f"{message.src} to {message.dst}: {bytes_text(message.elements * itemsize)}"
        says += ", reduced on arrival" if message.reduces else ""
        yield (
            f'<line x1="{x1}" y1="{frame.y(message.src)}" x2="{x2}" y2="{frame.y(message.dst)}" '
            f'class="{kind}" stroke-width="{stroke}" marker-end="url(#{kind}-head)">'
            f"<title>{says}</title></line>"
        )


def _dots(plans: Sequence[BoundPlan], frame: _Frame) -> Iterator[str]:
    """Mark local steps on a rank's line: before the round's messages, or after them."""
    for plan in plans:
        for number, steps in enumerate(plan.rounds):
            for step in steps:
                if not is_local(step):
                    continue
                before = step is steps[0]
                at = 0.04 if before else 0.96
                kind = "copy" if isinstance(step, Copy) else "reduce"
                radius = 2.6 if isinstance(step, Reduce) else 2.2
                yield (
                    f'<circle cx="{frame.x(number + at)}" cy="{frame.y(plan.rank)}" r="{radius}" '
                    f'class="{kind}-dot"><title>{escape(str(step))}</title></circle>'
                )


def _legend(y: int) -> Iterator[str]:
    x = 24
    for kind, says in (("move", "message"), ("reduce", "message, reduced on arrival")):
        yield f'<line x1="{x}" y1="{y - 4}" x2="{x + 26}" y2="{y - 4}" class="{kind}" stroke-width="2" '
        yield f'marker-end="url(#{kind}-head)"/><text x="{x + 34}" y="{y}" class="note">{says}</text>'
        x += 52 + 7 * len(says)
    for kind, says in (("copy", "local copy"), ("reduce", "local reduce")):
        yield f'<circle cx="{x}" cy="{y - 4}" r="3" class="{kind}-dot"/>'
        yield f'<text x="{x + 10}" y="{y}" class="note">{says}</text>'
        x += 28 + 7 * len(says)
