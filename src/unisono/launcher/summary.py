"""The summary of a failed job: one line for all ranks that ended alike, then the culprit's last words.

Pure: text in, lines out. However many ranks there are, the summary fits a screen.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

from unisono.core.call_site import is_users
from unisono.errors import rank_numbers, ranks_text
from unisono.launcher.failure import VICTIM_TYPES, End, exit_words
from unisono.launcher.output import beginnings

__all__ = ["AFTER_MAX", "Ended", "end_of", "summary"]

# Groups, the culprit's lines and the launcher's line about threads are at most 25 lines: a small terminal.
_GROUPS_MAX: Final = 6
_WORDS_MAX: Final = 15
# Up to this many lines after a rank's last words belong to the summary; more are shown before it.
AFTER_MAX: Final = 5

_FRAME: Final = re.compile(rb'^\s*(?:\| *)?File "([^"]+)", line (\d+)')
_CRASHED: Final = b"Current thread 0x"
_TYPE: Final = re.compile(rb"^(?:\s*\| )?((?:\w+\.)*)(\w+)(?=$|: |\s*\()")
_VICTIM: Final = re.compile(rb"^(?:\s*\| )?(?:[\w.]+\.)?(%s)\b(.*)" % "|".join(VICTIM_TYPES).encode())
_BLAMED: Final = re.compile(
    rb"^: ranks? ([\d, -]+) (?:(?:is|are) (?:gone|out of reach)|aborted|gave up|cancelled)\b"
    rb"|\branks? ([\d, -]+) differs? from ranks? "
)
# A rank that waited in uni.init for one that had ended is a victim; other rendezvous errors are its own.
_MISSED: Final = re.compile(rb"^(?:[\w.]+\.)?RendezvousError: .*?\branks? ([\d, -]+) ha(?:s|ve) ended \(")
# What differs between ranks that ended alike: how long each had waited, addresses, process ids.
_OWN: Final = re.compile(rb", after [\d.e+-]+ s|0x[0-9a-f]+|\(pid \d+\)")


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of one rank. `code` is None if the launcher ended it."""

    rank: int
    code: int | None
    words: list[bytes]
    after: list[bytes] = field(default_factory=list)
    """Lines after its last words: output, or more lines of the exception's message."""


def end_of(ended: Ended) -> End:
    """Whether the rank is a victim, and which ranks its last words blame."""
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
    """The lines to print. `about` says how the guilty rank ended; without a guilty one, only the groups.

    `verbose` leaves nothing out: the last words of all ranks, one after the other.
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
            is_repeated = end is guilty or (guilty is not None and end in alike and end.after == guilty.after)
            lines += [_prefix([end.rank]) + line for line in end.after if not is_repeated]
        lines += map(_one_line, groups[:_GROUPS_MAX])
        if len(groups) > _GROUPS_MAX:
            rest = sorted(end.rank for group in groups[_GROUPS_MAX:] for end in group)
            lines.append(_prefix(rest) + b"ended in other ways; --verbose shows how")
    if guilty is None:
        return lines
    lines_max = _WORDS_MAX - len(guilty.after)
    words = [*(guilty.words if verbose else _cut(without_library(guilty.words), lines_max)), *guilty.after]
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
    """A traceback without the frames of this library and of the code that started the program.

    The frame that raised stays, unless it raised an error of this library, whose text says what is wrong. Of
    a crash report, only the thread that crashed stays.
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
    """Whether a line belongs to the frame above it: its source, the carets below it, or a repetition."""
    return line.lstrip(b"|").startswith((b"    ", b"  [Previous line repeated"))


def _cut(words: list[bytes], lines_max: int) -> list[bytes]:
    if len(words) <= lines_max:
        return words
    head = 4
    tail = lines_max - head - 1
    left = len(words) - head - tail
    return [*words[:head], b"  ... %d lines left out; --verbose shows them" % left, *words[-tail:]]


def _grouped(ends: Sequence[Ended], guilty: Ended | None) -> list[list[Ended]]:
    """Ranks that ended alike, in the order of the first of each group.

    Victims of the guilty rank are alike whatever they were doing; other ranks if their last words are equal.
    """
    groups: dict[tuple[object, ...], list[Ended]] = {}
    texts = [_alike(end) for end in ends]
    shared = Counter(texts)
    for end, text in zip(ends, texts, strict=True):
        headline, known = _headline(end.words), end_of(end)
        key: tuple[object, ...] = (end.code,)
        if headline and guilty is not None and end is not guilty and guilty.rank in known.blames:
            key = (headline.partition(b":")[0], "victim")
        elif headline:
            # A text of which no other rank has the same may differ only in the number of its own rank.
            key = (text if shared[text] > 1 else re.sub(rb"\brank %d\b" % end.rank, b"rank", text),)
        groups.setdefault(key, []).append(end)
    return list(groups.values())


def _alike(end: Ended) -> bytes:
    """The last words of a rank without what differs between ranks that ended alike."""
    words = _headline(end.words) if end_of(end).is_victim else b"\n".join(without_library(end.words))
    return _OWN.sub(b"", words)


def _one_line(group: list[Ended]) -> bytes:
    first = max(group, key=lambda end: len(_headline(end.words)))  # the one that says most
    text = _headline(first.words)
    if not text:
        text = b"ended by the launcher" if first.code is None else exit_words(first.code).encode()
    elif not end_of(first).is_victim:
        frames = [found for found in map(_FRAME.match, without_library(first.words)) if found]
        if frames:
            text += b", at %s:%s" % (frames[-1][1].rpartition(b"/")[2], frames[-1][2])
    count = b" (%d ranks)" % len(group) if len(group) > 1 else b""
    return _prefix(sorted(end.rank for end in group)) + text + count


def _headline(words: list[bytes]) -> bytes:
    """The exception that ended a rank, on one line; nothing if there is no traceback."""
    starts = beginnings(words)
    if not starts:
        return b""
    first = words[starts[0]]
    if first[:1] not in b" |+" and not first.startswith((b"Traceback", b"Exception Group")):
        return first  # a crash report
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
    """The prefix of lines about these ranks: [0,1,3-31]."""
    pairs = re.compile(r"\b(\d+)-(\d+)\b")
    text = pairs.sub(
        lambda m: ",".join(m.groups()) if int(m[2]) == int(m[1]) + 1 else m[0], rank_numbers(ranks)
    )
    return f"[{text.replace(' ', '')}] ".encode()
