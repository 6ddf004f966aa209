"""Listeners on native ranks: they get every message in order, whatever they do."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.processes import forked
from tests.support.ranks import wait_until

from unisono.backends.native.backend import NativeBackend
from unisono.core.envelope import Lane, Tags
from unisono.errors import ClosedError, UnisonoError
from unisono.messaging.peer_down import PeerDown

CONTEXT = 5


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[NativeBackend]]:
    backends = [NativeBackend(rank, 2, str(tmp_path), b"secret") for rank in range(2)]
    cards = [backend.card() for backend in backends]
    for backend in backends:
        backend.connect(cards)
    yield backends
    for backend in backends:
        backend.close()


def message(k: int, nbytes: int = 9) -> memoryview:
    return memoryview(k.to_bytes(4, "little") + bytes([k % 251]) * (nbytes - 4))


def test_messages_from_before_and_after_the_call_are_delivered_in_order(pair: list[NativeBackend]) -> None:
    delivered: list[tuple[int, bytes]] = []
    for k in range(100):
        pair[1].post(0, CONTEXT, Tags.CONTROL, message(k), Lane.CONTROL)
    assert pair[0].listen(CONTEXT, Tags.CONTROL, lambda *one: delivered.append(one), lambda error: None)
    for k in range(100, 300):
        # Short messages, and some beyond the eager limit.
        pair[1].post(0, CONTEXT, Tags.CONTROL, message(k, 9 if k % 50 else 40_000), Lane.CONTROL)
    wait_until(lambda: len(delivered) == 300)
    assert delivered == [(1, bytes(message(k, 9 if k < 100 or k % 50 else 40_000))) for k in range(300)]


def test_a_listener_that_raises_gets_the_next_message(pair: list[NativeBackend]) -> None:
    delivered: list[int] = []

    def on_message(source: int, data: bytes) -> None:
        delivered.append(int.from_bytes(data[:4], "little"))
        if delivered[-1] == 1:
            raise ValueError("the listener fails")

    for k in (1, 2):
        pair[0].post(0, CONTEXT, Tags.CONTROL, message(k), Lane.CONTROL)
    with pytest.raises(ValueError, match="fails"):
        pair[0].listen(CONTEXT, Tags.CONTROL, on_message, lambda error: None)
    assert delivered == [1, 2]
    pair[1].post(0, CONTEXT, Tags.CONTROL, message(3), Lane.CONTROL)
    wait_until(lambda: delivered == [1, 2, 3])


def test_a_listener_is_notified_of_the_end_once(pair: list[NativeBackend]) -> None:
    ends: list[UnisonoError] = []
    pair[0].listen(CONTEXT, Tags.CONTROL, lambda *one: None, ends.append)
    pair[0].close()
    wait_until(lambda: ends)
    pair[1].close()
    assert [type(error) for error in ends] == [ClosedError]


def test_a_peers_end_is_reported_after_all_that_it_sent() -> None:
    def program(backend: NativeBackend, pipe: Any) -> Any:
        if backend.rank == 1:
            for k in range(200):
                backend.post(0, CONTEXT, Tags.CONTROL, message(k), Lane.CONTROL)
            request = backend.start_send(0, CONTEXT, 7, message(0), sync=True)
            wait_until(lambda: backend.runtime.polled() or request.done)
            os.kill(os.getpid(), signal.SIGKILL)
        delivered: list[int] = []
        down: list[tuple[PeerDown, int]] = []

        def on_message(source: int, data: bytes) -> None:
            time.sleep(0.0005)  # the peer is dead before the last message is delivered
            delivered.append(int.from_bytes(data[:4], "little"))

        backend.watch(lambda one: down.append((one, len(delivered))))
        backend.start_recv(1, CONTEXT, 7, memoryview(bytearray(9)))
        backend.listen(CONTEXT, Tags.CONTROL, on_message, lambda error: None)
        wait_until(lambda: backend.runtime.polled() or down)
        return delivered, [(one.rank, one.left, number) for one, number in down]

    with forked(program, 2) as ranks:
        assert ranks.result(0) == (list(range(200)), [(1, False, 200)])
        assert ranks.code(1) == -signal.SIGKILL
