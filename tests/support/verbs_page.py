"""docs/verbs.md: every verb with its signature, arguments and errors, from the table that the engine reads.

    python -m tests.support.verbs_page

prints the page; tests/docs/test_verbs_page.py compares.
"""

from __future__ import annotations

import inspect

from unisono.comm.communicator import Communicator
from unisono.comm.fingerprint import VERBS as COLLECTIVES
from unisono.comm.verb_docs import sections_of
from unisono.comm.verb_table import VERBS

__all__ = ["page"]

_INTRODUCTION = """\
# The verbs of a communicator

Made from the table that the engine's argument parser reads (`python -m tests.support.verbs_page`; a test
compares), so `help(world.all_reduce)` says the same.

- `world.verb(...)` waits and returns the result. `world.start.verb(...)` takes the same arguments and returns
  a `Work`: `work.wait(timeout=...)`, `await work`, `work.done()`, `work.cancel()`,
  `work.add_done_callback(fn)`.
- Arrays are anything with the buffer protocol or DLPack on the CPU: NumPy, torch, `array`, `bytearray`. A
  number comes back as a number; torch in, torch out.
- **A leading axis is the rank**: `all_gather(x)[r]` is the x of rank r; `scatter(x)` gives rank r `x[r]`.
- A collective is called by every rank of the communicator, in the same order and with equal arguments.
"""


def page() -> str:
    """The whole page."""
    messages = [name for name in VERBS if name not in COLLECTIVES]
    collectives = [name for name in VERBS if name in COLLECTIVES]
    parts = [_INTRODUCTION]
    for title, names in (("Messages between two ranks", messages), ("Collectives", collectives)):
        parts.append(f"## {title}\n")
        parts += [_verb(name) for name in names]
    return "\n".join(parts)


def _verb(name: str) -> str:
    verb = getattr(Communicator, name)
    signature = (
        str(inspect.signature(verb))
        .replace("(self, ", "(")
        .replace("(/, ", "(")
        .replace("(self, /)", "()")
        .replace("(self)", "()")
    )
    text = inspect.cleandoc(verb.__doc__)
    prose = text.partition("\nArgs:")[0].strip()
    returned = text.partition("\nReturns:\n")[2].partition("\n\n")[0]
    sections = sections_of(text)
    lines = [f"### `{name}{signature}`\n", prose, ""]
    lines += [f"- `{parameter}`: {said}" for parameter, said in sections["Args"].items()]
    if returned:
        lines.append(f"- returns {' '.join(returned.split())}")
    errors = "; ".join(
        f"`{error}`: {said.rstrip('.')}" for error, said in _own_errors(sections["Raises"]).items()
    )
    lines += ["", f"Raises {errors}.", ""] if errors else [""]
    return "\n".join(lines)


def _own_errors(raises: dict[str, str]) -> dict[str, str]:
    """Without those that every verb may raise: they stand in docs/failure.md."""
    common = {"PeerLost", "PeerAborted", "DeadlineExceeded", "Deadlock", "ClosedError", "CollectiveMismatch"}
    return {error: said for error, said in raises.items() if error not in common}


if __name__ == "__main__":
    print(page(), end="")  # noqa: T201
