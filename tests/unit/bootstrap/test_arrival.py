"""The launcher of another node connects to the seed, and learns the address of torch's store."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from unisono.bootstrap.address import Address
from unisono.bootstrap.join import arrive, join
from unisono.bootstrap.seed import Seed
from unisono.bootstrap.ticket import TicketSource
from unisono.config import Config
from unisono.core.clock import RealRuntime
from unisono.core.runtime import Deadline
from unisono.errors import RendezvousError

VERSION = "1"


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def seed(request: pytest.FixtureRequest) -> Iterator[Seed]:
    with Seed(4, version=VERSION, tls=request.param, store_port=29871) as served:
        yield served


def within(seconds: float) -> Deadline:
    return RealRuntime().deadline(seconds)


def come(source: TicketSource, node: int, seconds: float = 20.0) -> Address:
    return arrive(source, node, version=VERSION, deadline=within(seconds))


def come_until_refused(source: TicketSource, node: int) -> None:
    """Connect until the seed refuses: the seed learns of an ended rank on its own thread."""
    while True:
        come(source, node, 0.3)


def form(seed: Seed) -> None:
    """All ranks join."""
    source = TicketSource(seed.ticket.text())

    def one(rank: int) -> None:
        join(source, rank=rank, size=4, card=b"", config=Config(), version=VERSION, deadline=within(20))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(4)))
    assert seed.is_formed


def test_every_node_learns_the_address_of_the_store(seed: Seed) -> None:
    source = TicketSource(seed.ticket.text())
    for node in (1, 3, 1):  # the last rank was started again: the world has not formed
        assert come(source, node) == Address("127.0.0.1", 29871)
    form(seed)


@pytest.mark.parametrize("node", [-1, 0, 4])
def test_a_node_that_the_job_does_not_have_is_refused(seed: Seed, node: int) -> None:
    with pytest.raises(RendezvousError, match=f"refused node {node}: node {node} in a job of 4 ranks"):
        come(TicketSource(seed.ticket.text()), node)


def test_a_job_that_cannot_begin_any_more_says_why(seed: Seed) -> None:
    come(TicketSource(seed.ticket.text()), 1)
    seed.on_rank_ended(0, "exit code 3")
    with pytest.raises(RendezvousError, match=r"node 2 cannot join: rank 0 has ended \(exit code 3\)"):
        come_until_refused(TicketSource(seed.ticket.text()), 2)


@pytest.mark.parametrize("is_formed", [True, False], ids=["formed", "ended"])
def test_a_node_waits_for_the_seed_of_its_own_job(seed: Seed, is_formed: bool, tmp_path: Path) -> None:
    """The previous job has used the same ticket file, and node 0 has not ended that job yet."""
    source = TicketSource(str(tmp_path / "ticket"))
    source.write(seed.ticket)
    come(source, 1)
    if is_formed:
        form(seed)
    else:
        seed.on_rank_ended(2, "exit code 0")  # a program that did not use this world
    with pytest.raises(
        RendezvousError, match=r"node 1 could not join.*the launcher of node 1 has come before"
    ):
        come_until_refused(source, 1)
    with Seed(4, version=VERSION, store_port=29872) as other, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(come, source, 1)
        source.write(other.ticket)
        assert waiting.result() == Address("127.0.0.1", 29872)


def test_a_node_without_node_0_says_where_it_looked(tmp_path: Path) -> None:
    file = tmp_path / "ticket"
    with pytest.raises(
        RendezvousError, match=f"node 1 could not join within 0.1 s.*ticket file {file} is not"
    ):
        come(TicketSource(str(file)), 1, 0.1)
