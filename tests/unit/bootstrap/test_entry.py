"""Entering a world: rank 0 hosts the seed, the other ranks find the seed by its ticket file."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.joining_ranks import PATIENCE_S, VERSION, MakeSeed, Ranks, enter_by, ticket_without_seed
from tests.support.ranks import wait_until

from unisono.bootstrap.address import Address
from unisono.bootstrap.join import report_ended
from unisono.bootstrap.launch_info import LaunchInfo, decide
from unisono.bootstrap.seed import Seed
from unisono.bootstrap.ticket import Ticket, TicketSource
from unisono.core.clock import RealRuntime
from unisono.environment import Launch, Network
from unisono.errors import RendezvousError


def test_ranks_of_one_job_meet_at_their_file(tmp_path: Path) -> None:
    def info(rank: int) -> LaunchInfo:
        started = Launch("Slurm", rank, 3, local_rank=rank, is_one_host=True, job="Slurm/1/0")
        return decide(started, Network(folder=str(tmp_path)))

    source = info(0).source
    assert source is not None
    source.write(ticket_without_seed())  # the ticket of an earlier job of the same name
    with ThreadPoolExecutor(3) as pool:
        entered = list(pool.map(lambda rank: enter_by(info(rank)), (2, 1, 0)))
    for view, listen in entered:
        assert view.cards == [b"card 0", b"card 1", b"card 2"]
        assert listen.bind == listen.advertise == Address("127.0.0.1")
        assert not listen.is_encrypted
        assert listen.secret == view.secret
        assert not listen.folder.exists()  # removed by the last rank that left
    assert len({listen.folder for _, listen in entered}) == 1
    assert source.path is not None
    assert not source.path.exists()


def test_a_file_of_a_seed_that_is_complete_is_an_old_one(tmp_path: Path, make_seed: MakeSeed) -> None:
    seed, ranks = make_seed(1)
    ranks.all()
    source = TicketSource.keyed(str(tmp_path), "job")
    source.write(seed.ticket)
    newer, _ = make_seed(1)
    made_for: list[Ticket] = []

    def card(ticket: Ticket) -> bytes:
        made_for.append(ticket)
        return b"card %d" % len(made_for)

    waiting = ranks.start(0, source=source, card=card)
    wait_until(lambda: seed.counts["refused"] > 1)
    source.write(newer.ticket)
    view = waiting.result(PATIENCE_S)
    # The engine's secret comes from the ticket, so its card must be made for the right ticket, and only once.
    assert (view.job, view.cards) == (newer.job, [b"card 2"])
    assert made_for == [seed.ticket, newer.ticket]


def test_the_end_of_a_process_that_is_older_than_the_seed_is_another_jobs(
    tmp_path: Path, make_seed: MakeSeed
) -> None:
    """The launcher of another host read the ticket file after the next job had written its ticket there."""
    before = time.monotonic()
    seed, _ = make_seed(2)
    after = time.monotonic()
    source = TicketSource(str(tmp_path / "ticket"))
    source.write(seed.ticket)

    def tell(rank: int, started_at: float) -> None:
        report_ended(
            source,
            rank,
            "exit code 0",
            started_at=started_at,
            version="1.0",
            deadline=RealRuntime().deadline(PATIENCE_S),
        )

    tell(1, before)
    assert seed.counts["proven"] == 1
    assert "has ended" not in seed.report()
    tell(1, after)
    assert "rank 1 has ended (exit code 0)" in seed.report()


def test_an_engine_that_cannot_start_does_not_end_the_seed(make_seed: MakeSeed) -> None:
    _, ranks = make_seed(2)

    def card(ticket: Ticket) -> bytes:
        raise PermissionError("no memory for rings")

    with pytest.raises(PermissionError, match="no memory for rings"):
        ranks.start(0, card=card).result(PATIENCE_S)


def test_rank_0_removes_its_ticket_when_it_gives_up(tmp_path: Path) -> None:
    path = tmp_path / "job.ticket"
    info = decide(None, Network(), rank=0, size=2, join=str(path))
    with pytest.raises(RendezvousError, match=r"1 of 2 ranks joined \(0\); missing: 1"):
        enter_by(info, timeout=0.3)
    assert list(tmp_path.iterdir()) == []


def test_a_declared_port_is_the_seeds_and_ranks_take_the_next(tmp_path: Path) -> None:
    network = Network(join=str(tmp_path / "t"), address="127.0.0.1:47110", advertise="127.0.0.3:5000")
    info = LaunchInfo(1, 2, local_rank=1, network=network, source=TicketSource(str(tmp_path / "t")))
    with Seed(2, version=VERSION) as seed, ThreadPoolExecutor(2) as pool:
        TicketSource(str(tmp_path / "t")).write(seed.ticket)
        other = pool.submit(enter_by, LaunchInfo(0, 2, source=info.source))
        view, listen = pool.submit(enter_by, info).result(PATIENCE_S)
        other.result(PATIENCE_S)
    assert view.rank == 1
    assert listen.bind == Address("127.0.0.1", 47112)
    assert listen.advertise == Address("127.0.0.3", 5002)


def test_a_seed_with_too_few_descriptors_for_its_ranks_says_so() -> None:
    program = (
        "import os, resource, sys\n"
        "from unisono.bootstrap.seed import Seed\n"
        "seed = Seed(5, version='1.0').start()\n"
        "limit = len(os.listdir('/proc/self/fd')) + 2\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))\n"
        "print(seed.ticket.text(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        ranks = Ranks(Ticket.parse(process.stdout.readline()), 5)
        try:
            joining = [ranks.start(rank, timeout=2.0) for rank in range(5)]
            texts = [str(future.exception(PATIENCE_S)) for future in joining]
        finally:
            ranks.close()
        _, err = process.communicate()
    named = [text for text in texts if "the seed cannot accept more connections: Too many open files" in text]
    assert named, texts
    assert all("(ulimit -n)" in text for text in named)
    assert err.count("cannot accept more connections") == 1


def test_a_seed_without_free_descriptors_still_lets_ranks_in() -> None:
    program = (
        "import resource, sys\n"
        "from unisono.bootstrap.seed import Seed\n"
        "seed = Seed(2, version='1.0').start()\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))\n"
        "print(seed.ticket.text(), flush=True)\n"
        "sys.stdin.read()\n"
        "print(seed.counts['evicted'] > 0, seed.counts['mistakes'])\n"
    )
    with (
        subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
        contextlib.ExitStack() as stack,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        ticket = Ticket.parse(process.stdout.readline())
        for _ in range(100):
            stack.enter_context(socket.create_connection((ticket.address.host, ticket.address.port)))
        ranks = Ranks(ticket, 2)
        try:
            assert len(ranks.all()) == 2
        finally:
            ranks.close()
        process.stdin.close()
        assert process.stdout.read() == "True 0\n"
