"""The engine's state machines, read from their tables in native/ and drawn for docs/machines.md.

    python -m tests.support.machines

prints the page; tests/docs/test_machines_page.py compares.
"""

from __future__ import annotations

import re

from tests.support.paths import ROOT

__all__ = ["MACHINES", "page", "rows_of"]

# What stands above each picture: the header, the table in it, the name and one sentence.
MACHINES = (
    (
        "native/connect/handshake.hpp",
        "handshake_transitions",
        "Handshake",
        "Four messages precede every connection: hello, challenge, introduction, verdict.",
    ),
    (
        "native/link/tcp_link.hpp",
        "read_transitions",
        "TCP connection, reading",
        "What epoll and `read` have reported of one socket.",
    ),
    (
        "native/link/tcp_link.hpp",
        "write_transitions",
        "TCP connection, writing",
        "Whether the socket takes more bytes.",
    ),
    (
        "native/link/link.hpp",
        "offer_transitions",
        "Rendezvous, the word in shared memory",
        "Which side may touch the memory of a message that was announced by an RTS.",
    ),
    (
        "native/messaging/peer.hpp",
        "transitions",
        "Rendezvous, the receiver",
        "From the RTS of a message to its FIN. The action is the reply that is sent.",
    ),
    (
        "native/engine/mailbox.hpp",
        "leader_transitions",
        "Mailbox leader",
        "Which of the threads that read a mailbox makes progress.",
    ),
)

_INTRODUCTION = """\
# State machines of the engine

Drawn from the tables that the engine runs (`python -m tests.support.machines`; a test compares). Each arrow
is an event, with the action behind the slash. A pair of state and event without an arrow is impossible: if a
peer caused it, its connection is closed.
"""

_ROW = re.compile(r"\{(\w+)::(\w+),\s*(\w+)::(\w+),\s*(\w+)::(\w+)(?:,\s*\w+::(\w+))?\}")


def rows_of(header: str, table: str) -> list[tuple[str, str, str, str]]:
    """The transitions of one table: state, event, next state, and the action or nothing."""
    text = (ROOT / header).read_text()
    begin = text.index(f" {table}")
    end = min(at for at in (text.find("});", begin), text.find("}};", begin)) if at >= 0)
    return [
        (m[2], m[4], m[6], "" if m[7] in (None, "none") else m[7])
        for m in _ROW.finditer(text, begin, end + 1)
    ]


def page() -> str:
    """The whole page."""
    parts = [_INTRODUCTION]
    for header, table, name, what in MACHINES:
        lines = [
            f"    {state} --> {after}: {event}{f' / {action}' if action else ''}"
            for state, event, after, action in rows_of(header, table)
        ]
        parts.append(f"## {name}\n\n{what} The table: `{header}`.\n")
        parts.append("```mermaid\nstateDiagram-v2\n" + "\n".join(lines) + "\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")  # noqa: T201
