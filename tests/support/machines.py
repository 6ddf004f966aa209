"""The state machines, read from their tables in native/ and in messaging/, and drawn for docs/machines.md.

    python -m tests.support.machines

prints the page; tests/docs/test_machines_page.py compares.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import IntEnum

from tests.support.paths import ROOT

from unisono.messaging.rendezvous import RECEIVE_TABLE, SEND_TABLE

__all__ = ["MACHINES", "PYTHON_MACHINES", "page", "rows_in", "rows_of"]

# The text above each picture: the header, the table in it, the name and one sentence.
MACHINES = (
    (
        "native/connect/handshake.hpp",
        "handshake_transitions",
        "Handshake",
        "Four messages precede every connection: hello, challenge, introduction, admission reply.",
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
        "native/link/quic_connection.hpp",
        "quic_transitions",
        "QUIC connection",
        "From the first datagram to the link, on either side, and its end.",
    ),
    (
        "native/link/link.hpp",
        "offer_transitions",
        "Rendezvous, the word in shared memory",
        "Which side may touch the memory of a message that was announced by an RTS.",
    ),
    (
        "native/link/cooperative_copy.hpp",
        "copy_transitions",
        "Cooperative copy",
        "How both ranks copy one long message, and how the receiver drops a sender that writes.",
    ),
    (
        "native/link/shm_link.hpp",
        "guard_transitions",
        "Cooperative copy, the receiver's guard page",
        "Whether a write of the peer can begin. A copy is `fenced` only after the page is shut.",
    ),
    (
        "native/messaging/rendezvous_receive.hpp",
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

# The same for the tables of the pure protocol: the module, the table, the name and one sentence.
PYTHON_MACHINES: tuple[
    tuple[str, Mapping[tuple[IntEnum, IntEnum], tuple[IntEnum, IntEnum]], str, str], ...
] = (
    (
        "src/unisono/messaging/rendezvous.py",
        SEND_TABLE,
        "Rendezvous over frames, the sender",
        "From `start_send` to the FIN, under the local, framed and simulated backends.",
    ),
    (
        "src/unisono/messaging/rendezvous.py",
        RECEIVE_TABLE,
        "Rendezvous over frames, the receiver",
        "From the RTS to the FIN, under the same backends.",
    ),
)

_INTRODUCTION = """\
# State machines of the engine and of the protocol

Drawn from the tables that the code runs (`python -m tests.support.machines`; a test compares). Each arrow
is an event, with the action behind the slash. A pair of state and event without an arrow is impossible; a
peer that causes such a pair loses its connection.
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


def rows_in(
    table: Mapping[tuple[IntEnum, IntEnum], tuple[IntEnum, IntEnum]],
) -> list[tuple[str, str, str, str]]:
    """The transitions of a table in Python, in the same form."""
    return [
        (state.name.lower(), event.name.lower(), after.name.lower(), _action_text(action))
        for (state, event), (after, action) in table.items()
    ]


def page() -> str:
    """The whole page."""
    machines = [(file, rows_of(file, table), name, what) for file, table, name, what in MACHINES]
    machines += [(file, rows_in(table), name, what) for file, table, name, what in PYTHON_MACHINES]
    parts = [_INTRODUCTION]
    for file, rows, name, what in machines:
        lines = [
            f"    {state} --> {after}: {event}{f' / {action}' if action else ''}"
            for state, event, after, action in rows
        ]
        parts.append(f"## {name}\n\n{what} The table: `{file}`.\n")
        parts.append("```mermaid\nstateDiagram-v2\n" + "\n".join(lines) + "\n```\n")
    return "\n".join(parts)


def _action_text(action: IntEnum) -> str:
    return "" if action.name == "NONE" else action.name.lower()


if __name__ == "__main__":
    print(page(), end="")  # noqa: T201
