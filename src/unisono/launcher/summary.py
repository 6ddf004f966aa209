"""What is said when a job has failed: equal ends folded into one line, and last the words of the culprit.

Knows tracebacks as text. Does not know processes. However many ranks there are, the summary fits a screen.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

from unisono.core.call_site import is_users
from unisono.errors import rank_numbers, ranks_text
from unisono.launcher.failure import VICTIM_TYPES, End, exit_words
from unisono.launcher.output import beginnings

__all__ = ["AFTER_MAX", "Ended", "end_of", "summary"]

# Together with the lines about the culprit, and the launcher's one about threads, at most 25 lines.
_GROUPS_MAX: Final = 6
_WORDS_MAX: Final = 15
# Who shows a summary shows more lines than these, after a rank's words, before it.
AFTER_MAX: Final = 5

_FRAME: Final = re.compile(rb'^\s*(?:\| *)?File "([^"]+)", line (\d+)')
_CRASHED: Final = b"Current thread 0x"
_TYPE: Final = re.compile(rb"^(?:\s*\| )?((?:\w+\.)*)(\w+)(?=$|: |\s*\()")
_VICTIM: Final = re.compile(rb"^(?:\s*\| )?(?:[\w.]+\.)?(%s)\b(.*)" % "|".join(VICTIM_TYPES).encode())
_BLAMED: Final = re.compile(
    rb"^: ranks? ([\d, -]+) (?:(?:is|are) (?:gone|out of reach)|aborted|gave up|cancelled)\b"
    rb"|\branks? ([\d, -]+) differs? from ranks? "
)
# Who waited in uni.init for a rank that had ended is a victim, too; other rendezvous errors are a rank's own.
_MISSED: Final = re.compile(rb"^(?:[\w.]+\.)?RendezvousError: .*?\branks? ([\d, -]+) ha(?:s|ve) ended \(")
# What differs between ranks that ended in one way: how long each had waited, and where its memory lies.
_OWN: Final = re.compile(rb", after [\d.e+-]+ s|0x[0-9a-f]+|\(pid \d+\)")


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of one rank. `code` is None if it has none of its own: the launcher ended it."""

    rank: int
    code: int | None
    words: list[bytes]
    after: list[bytes] = field(default_factory=list)
    """What it wrote after its words: lines of its own, or more lines of the exception's message."""


def end_of(ended: Ended) -> End:
    """Whether it is a victim, and of whom, as its words tell."""
    for line in ended.words:
        if found := _VICTIM.match(line):
            blames = [rank for named in _BLAMED.finditer(found[2]) for rank in _ranks(named[1] or named[2])]
            return End(ended.rank, True, tuple(sorted(set(blames))))
        if found := _MISSED.match(line):
            return End(ended.rank, True, tuple(_ranks(found[1])))
    return End(ended.rank)


def _ranks(text: bytes) -> list[int]:
    """Read `0, 2-4`."""
    spans = [span.split(b"-") for span in text.split(b", ")]
    return [rank for span in spans for rank in range(int(span[0]), int(span[-1]) + 1)]


def summary(
    ends: Sequence[Ended], guilty: Ended | None, about: str = "", *, verbose: bool = False
) -> list[bytes]:
    """The lines to print. `about` says of the guilty one how it ended; None: nobody is to blame.

    `verbose` leaves nothing out: the words of all ranks, one after the other.
    """
    lines: list[bytes] = []
    alike: list[Ended] = []
    if verbose:
        for end in ends:
            whole = [*end.words, *end.after]
            lines += [_prefix([end.rank]) + line for line in whole if end is not guilty]
    else:
        groups = _grouped(ends, guilty)
        if guilty is not None:
            mine = next((group for group in groups if guilty in group), [guilty])
            alike = [end for end in mine if end is not guilty]
            groups = [group for group in groups if group is not mine]
        for end in ends:
            is_said = end is guilty or (guilty is not None and end in alike and end.after == guilty.after)
            lines += [_prefix([end.rank]) + line for line in end.after if not is_said]
        lines += map(_one_line, groups[:_GROUPS_MAX])
        if len(groups) > _GROUPS_MAX:
            rest = sorted(end.rank for group in groups[_GROUPS_MAX:] for end in group)
            lines.append(_prefix(rest) + b"ended in other ways; --verbose shows how")
    if guilty is None:
        return lines
    room = _WORDS_MAX - len(guilty.after)
    words = [*(guilty.words if verbose else _cut(without_library(guilty.words), room)), *guilty.after]
    text = about
    if alike:
        others = [end.rank for end in alike]
        text += f", {ranks_text(others)} in the same way"
    if words:
        text += "; its last words:"
    elif guilty.code != 0:
        text += "; it said nothing"
    return [*lines, text.encode(), *words]


def without_library(words: list[bytes]) -> list[bytes]:
    """A traceback without the frames of this library and of what started the program.

    The frame that raised stays, unless it raised an error of the library, which says itself what is wrong. Of
    a crash, the thread stays that crashed.
    """
    current = next((i for i, line in enumerate(words) if line.startswith(_CRASHED)), None)
    if current is not None:
        return [*words[:1], *takewhile(bool, words[current:])]
    kept: list[bytes] = []
    hidden: list[bytes] = []
    is_hidden = False
    for line in words:
        frame = _FRAME.match(line)
        if frame:
            hidden = [] if is_hidden else hidden
            path = frame[1].decode(errors="replace")
            is_hidden = path == "<frozen runpy>" or not is_users(path)
        elif is_hidden and not _is_of_frame(line):
            is_hidden = False
            if not line.lstrip(b" |").startswith((b"unisono.", b"KeyboardInterrupt")):
                kept += hidden
            hidden = []
        if is_hidden:
            hidden.append(line)
        else:
            kept.append(line)
    return kept


def _is_of_frame(line: bytes) -> bool:
    """Whether a line belongs to the frame above it: its source, marks below it, or a repetition."""
    return line.lstrip(b"|").startswith((b"    ", b"  [Previous line repeated"))


def _cut(words: list[bytes], room: int) -> list[bytes]:
    if len(words) <= room:
        return words
    head = 4
    tail = room - head - 1
    left = len(words) - head - tail
    return [*words[:head], b"  ... %d lines left out; --verbose shows them" % left, *words[-tail:]]


def _grouped(ends: Sequence[Ended], guilty: Ended | None) -> list[list[Ended]]:
    """Ranks that ended in one way, in the order of the first of each.

    Victims of the guilty rank are alike wherever they heard of it; others if their words are.
    """
    groups: dict[tuple[object, ...], list[Ended]] = {}
    for end in ends:
        headline, told = _headline(end.words), end_of(end)
        key: tuple[object, ...] = (end.code,)
        if headline and guilty is not None and end is not guilty and guilty.rank in told.blames:
            key = (headline.partition(b":")[0], "victim")
        elif headline:
            words = headline if told.is_victim else b"\n".join(without_library(end.words))
            key = (re.sub(rb"\brank %d\b" % end.rank, b"rank", _OWN.sub(b"", words)),)
        groups.setdefault(key, []).append(end)
    return list(groups.values())


def _one_line(group: list[Ended]) -> bytes:
    first = max(group, key=lambda end: len(_headline(end.words)))  # who tells most
    text = _headline(first.words)
    if not text:
        text = b"ended by the launcher" if first.code is None else exit_words(first.code).encode()
    elif not end_of(first).is_victim:
        places = [found for found in map(_FRAME.match, without_library(first.words)) if found]
        if places:
            text += b", at %s:%s" % (places[-1][1].rpartition(b"/")[2], places[-1][2])
    count = b" (%d ranks)" % len(group) if len(group) > 1 else b""
    return _prefix(sorted(end.rank for end in group)) + text + count


def _headline(words: list[bytes]) -> bytes:
    """The exception that ended a rank, on one line; nothing if there is no traceback."""
    starts = beginnings(words)
    if not starts:
        return b""
    first = words[starts[0]]
    if first[:1] not in b" |+" and not first.startswith((b"Traceback", b"Exception Group")):
        return first  # a crash
    # The one that escaped: of a chain the last, of a group the outermost.
    start = starts[0] if words[starts[-1]][:1] in b" |+" else starts[-1]
    for line in words[start + 1 :]:
        text = line.strip() if line[:1] != b" " or line.lstrip().startswith(b"| ") else b""
        text = text.removeprefix(b"| ")
        if text and not text.startswith((b"File ", b" ")):
            found = _TYPE.match(text)
            return text[len(found[1]) :] if found else text
    return words[-1]


def _prefix(ranks: Sequence[int]) -> bytes:
    """As lines of ranks begin: [0,1,3-31]."""
    pairs = re.compile(r"\b(\d+)-(\d+)\b")
    text = pairs.sub(
        lambda m: ",".join(m.groups()) if int(m[2]) == int(m[1]) + 1 else m[0], rank_numbers(ranks)
    )
    return f"[{text.replace(' ', '')}] ".encode()
