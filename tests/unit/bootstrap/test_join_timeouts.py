"""The errors of a join that reaches its deadline."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from tests.support.joining_ranks import PATIENCE_S, MakeSeed, enter_by, join_alone, ticket_without_seed
from tests.support.metronome import stopwatch
from tests.support.ranks import wait_until

from unisono.bootstrap.address import Address
from unisono.bootstrap.launch_info import decide
from unisono.bootstrap.ticket import Ticket, TicketSource
from unisono.environment import Launch, Network
from unisono.errors import RendezvousError, UsageError

# -- the text of the timeout -------------------------------------------------------------------------------


def test_a_timeout_names_the_ranks_that_joined_and_the_missing_ones(make_seed: MakeSeed, tls: bool) -> None:
    _, ranks = make_seed(5, tls=tls)
    with stopwatch() as seconds:
        joining = [ranks.start(rank, timeout=1.0) for rank in (1, 2)]
        refused = ranks.start(3, version="0.9")
        assert isinstance(refused.exception(PATIENCE_S), RendezvousError)
        texts = [str(future.exception(PATIENCE_S)) for future in joining]
        assert seconds() < 2 * 1.0
    assert any(
        "2 of 5 ranks joined (1-2); missing: 0, 3-4; refused: rank 3 (host" in text for text in texts
    ), texts
    assert all(
        "could not join within 1" in text and "Next: see why the missing ranks" in text for text in texts
    )


def test_a_timeout_names_the_address_and_what_it_answered() -> None:
    ticket = ticket_without_seed()
    with pytest.raises(RendezvousError) as caught:
        join_alone(ticket.text(), 0.3)
    assert re.search(rf"tried {ticket.address} refused the connection \(\d+ times\)", str(caught.value))


def test_a_seed_that_says_nothing_is_described() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        ticket = Ticket.create(Address("127.0.0.1", mute.getsockname()[1]))
        with pytest.raises(RendezvousError, match="accepted the connection, but did not answer"):
            join_alone(ticket.text(), 0.3)


def test_a_name_that_does_not_resolve_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    ticket = Ticket.create(Address("no-such-node", 1), bytes(32))
    with pytest.raises(
        RendezvousError, match=r"tried no-such-node:1 could not be resolved \(Name or service"
    ):
        join_alone(ticket.text(), 0.2)


def test_a_missing_ticket_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "job.ticket"
    with pytest.raises(RendezvousError, match=f"ticket file {path} is not there"):
        join_alone(str(path), 0.2)


@pytest.mark.parametrize("rest", ["", "unisono1://127.0.0.1:1/pl"])
def test_a_ticket_file_that_is_not_whole_is_read_again(
    make_seed: MakeSeed, tmp_path: Path, rest: str
) -> None:
    path = tmp_path / "job.ticket"
    path.touch(mode=0o600)
    path.write_text(rest)
    seed, ranks = make_seed(2)
    ranks.start(0)
    with pytest.raises(
        RendezvousError, match=rf"rank 0 has not started its seed: the ticket file {path} holds no whole"
    ):
        join_alone(str(path), 0.2)
    copied = ranks.start(1, source=TicketSource(str(path)))
    text = seed.ticket.text()
    for end in (0, 9, len(text) // 2, len(text) - 1):
        assert not copied.done()
        path.write_text(text[:end])
    path.write_text(text)
    assert copied.result(PATIENCE_S).size == 2


def test_a_given_ticket_that_is_not_whole_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="malformed"):
        join_alone("unisono1://127.0.0.1:1/plain/00", PATIENCE_S)


def test_a_rank_0_that_has_not_come_is_named(tmp_path: Path) -> None:
    started = Launch("the environment", 1, 2, is_one_host=True, job="the environment/127.0.0.1/29500")
    with pytest.raises(
        RendezvousError,
        match=r"rank 0 has not started its seed: the ticket file .* is not there. "
        r"Next: see whether rank 0 was started, with the same MASTER_ADDR and MASTER_PORT",
    ):
        enter_by(decide(started, Network(folder=str(tmp_path))), timeout=0.2)


def test_a_seed_that_closes_names_the_missing_ranks(make_seed: MakeSeed, tls: bool) -> None:
    seed, ranks = make_seed(3, tls=tls)
    waiting = ranks.start(2)
    wait_until(lambda: seed.counts["admitted"] == 1)
    seed.close("the operator gave up")
    with pytest.raises(
        RendezvousError, match=r"the operator gave up; 1 of 3 ranks joined \(2\); missing: 0-1"
    ):
        waiting.result(PATIENCE_S)
