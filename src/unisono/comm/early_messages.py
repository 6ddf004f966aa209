"""Control messages about communicators that were not made here yet: kept until they are, within a bound."""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from typing import Final

import msgspec

from unisono.comm.control_messages import Goodbye, GroupFailure, decode, encode
from unisono.messaging.credit import ENVELOPE_BYTES

__all__ = ["EARLY_BYTES_MAX", "EarlyMessages"]

# Per sender. A rank that runs far ahead may use and close some thousand communicators before they are made
# here; each goodbye takes a few hundred bytes.
EARLY_BYTES_MAX: Final = 1 << 20


class EarlyMessages:
    """Encoded failures and goodbyes, by context and sender. The caller holds a lock.

    Beyond the bound, a sender's oldest goodbyes lose all calls but the last. Only if that is not enough, its
    oldest messages are dropped.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._by_context: dict[int, dict[int, tuple[int, bytes]]] = {}
        # By sender: the context of each message by number; of all of them, and of those not shortened yet.
        self._by_sender: dict[int, OrderedDict[int, int]] = {}
        self._unshortened: dict[int, OrderedDict[int, int]] = {}
        self._bytes: Counter[int] = Counter()

    def keep(self, sender: int, context: int, data: bytes) -> None:
        """Add a message, and make room for it."""
        number = next(self._numbers)
        self._by_context.setdefault(context, {})[number] = (sender, data)
        kept = self._by_sender.setdefault(sender, OrderedDict())
        unshortened = self._unshortened.setdefault(sender, OrderedDict())
        kept[number] = unshortened[number] = context
        self._bytes[sender] += _cost(data)
        while self._bytes[sender] > EARLY_BYTES_MAX and unshortened:
            self._shorten(*unshortened.popitem(last=False))
        while self._bytes[sender] > EARLY_BYTES_MAX:
            oldest, its_context = kept.popitem(last=False)
            messages = self._by_context[its_context]
            self._bytes[sender] -= _cost(messages.pop(oldest)[1])
            if not messages:
                del self._by_context[its_context]

    def take(self, context: int) -> list[tuple[int, GroupFailure | Goodbye]]:
        """Remove and return the messages of a context, with their senders, in the order of arrival."""
        found = self._by_context.pop(context, {})
        for number, (sender, data) in found.items():
            del self._by_sender[sender][number]
            self._unshortened[sender].pop(number, None)
            self._bytes[sender] -= _cost(data)
        return [(sender, _decoded(data)) for sender, data in found.values()]

    def _shorten(self, number: int, context: int) -> None:
        """Keep only the last call of a goodbye: its number decides which ranks still wait for the sender."""
        sender, data = self._by_context[context][number]
        message = _decoded(data)
        if len(message.calls) > 1 and isinstance(message, Goodbye):
            last = max(message.calls)
            shorter = encode(msgspec.structs.replace(message, calls={last: message.calls[last]}))
            self._by_context[context][number] = (sender, shorter)
            self._bytes[sender] -= len(data) - len(shorter)


def _decoded(data: bytes) -> GroupFailure | Goodbye:
    message = decode(data)
    assert isinstance(message, GroupFailure | Goodbye), "nothing else is kept"
    return message


def _cost(data: bytes) -> int:
    return len(data) + ENVELOPE_BYTES
