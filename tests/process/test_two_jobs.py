"""Two jobs with the same environment variables: at most one world forms; other processes get the reason."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unisono.bootstrap.address import Address
from unisono.bootstrap.owned_file import FileOwned, claim
from unisono.bootstrap.ticket import Ticket, TicketSource

pytestmark = pytest.mark.more

PATIENCE_S = 60.0

# Prints each step, and waits for a line of standard input before the next: join the world, then leave.
PROGRAM = """
import sys
import unisono as uni

job, timeout = sys.argv[1], float(sys.argv[2])
print("up", flush=True)
sys.stdin.readline()
try:
    with uni.init(timeout=timeout) as world:
        print("met", world.rank, *world.all_gather_object(job), flush=True)
        sys.stdin.readline()
except uni.RendezvousError as error:
    print("RendezvousError", error, flush=True)
    sys.exit(3)
"""


class Rank:
    """The process of one rank of a job."""

    def __init__(self, folder: Path, job: str, rank: int, timeout: float = PATIENCE_S) -> None:
        foreign = ("UNISONO_", "OMPI_", "SLURM_", "TORCHELASTIC_", "LOCAL_")
        env = {name: text for name, text in os.environ.items() if not name.startswith(foreign)}
        env |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, job, str(timeout)],
            env={**env, "TMPDIR": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def begin(self) -> None:
        """Let the process join, once it has started."""
        assert self.said() == "up"
        self.go_on()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")

    def ended(self) -> int:
        return self.process.wait(PATIENCE_S)


Start = Callable[..., Rank]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with contextlib.ExitStack() as stack:

        def begin(job: str, rank: int, timeout: float = PATIENCE_S) -> Rank:
            started = Rank(tmp_path, job, rank, timeout)
            stack.enter_context(started.process)
            stack.callback(started.process.kill)
            return started

        yield begin


def test_a_rank_of_another_job_is_refused_while_a_job_lives(start: Start) -> None:
    """The ranks of the two jobs look alike, so rank 1 of B joins A. The other two ranks are refused."""
    first, second = start("A", 0), start("B", 1)
    first.begin()
    second.begin()
    assert first.said() == "met 0 A B"
    assert second.said() == "met 1 A B"
    rest = [start("B", 0), start("A", 1, timeout=3.0)]
    for rank in rest:
        rank.begin()
    texts = [rank.said() for rank in rest]
    address = r"127\.0\.0\.1:\d+"
    pid = first.process.pid
    assert re.search(rf"the seed of another job lives at {address}, in process {pid}: both have", texts[0])
    assert re.search(
        rf"within 3\.\d s: the seed at {address} refused it: .* is complete, and rank 1 \(", texts[1]
    )
    for rank, text in zip(rest, texts, strict=True):
        assert text.startswith("RendezvousError")
        assert "Next: give each job its own MASTER_ADDR and MASTER_PORT, or set UNISONO_JOIN" in text
        assert rank.ended() == 3
    first.go_on()
    second.go_on()
    assert (first.ended(), second.ended()) == (0, 0)


def test_a_rank_that_was_there_before_the_others_met_is_refused_at_once(start: Start) -> None:
    """The next world cannot be its own, so it need not wait for its deadline."""
    first, second, left = start("A", 0), start("B", 1), start("A", 1)
    assert left.said() == "up"
    first.begin()
    second.begin()
    assert first.said() == "met 0 A B"
    left.go_on()
    assert re.search(r"^RendezvousError the seed at \S+ refused rank 1 of 2: .* is complete", left.said())
    assert left.ended() == 3


def test_the_next_job_waits_until_rank_0_of_the_first_has_ended(start: Start) -> None:
    first = [start("A", rank) for rank in range(2)]
    for rank in first:
        rank.begin()
    assert [rank.said() for rank in first] == ["met 0 A A", "met 1 A A"]
    first[1].process.kill()
    first[1].ended()
    later = start("B", 1)
    later.begin()
    until = time.monotonic() + 2.5  # longer than a rank 0 waits while another process holds the place
    while time.monotonic() < until:
        assert later.process.poll() is None
        time.sleep(0.05)
    first[0].go_on()
    first[0].ended()
    host = start("B", 0)
    host.begin()
    assert (host.said(), later.said()) == ("met 0 B B", "met 1 B B")
    for rank in (host, later):
        rank.go_on()
    assert (host.ended(), later.ended()) == (0, 0)


def test_no_second_world_forms_of_the_remaining_ranks_after_a_short_one(start: Start) -> None:
    """All four ranks are started together; the first world has ended before the other two ranks ask."""
    first, second, *rest = start("A", 0), start("B", 1), start("B", 0), start("A", 1, timeout=1.0)
    for rank in (first, second):
        rank.begin()
        rank.go_on()
    assert first.said() == "met 0 A B"
    assert (first.ended(), second.ended()) == (0, 0)
    for rank in rest:
        rank.begin()
    texts = [rank.said() for rank in rest]
    rival = rf"the seed of another job was alive at 127\.0\.0\.1:\d+, in process {first.process.pid}, after"
    assert re.search(f"RendezvousError this rank 0 cannot host its job: {rival}", texts[0])
    assert re.search(
        f"RendezvousError rank 1 of 2 could not join .*: rank 0 has not started its seed: .*{rival}", texts[1]
    )
    assert all("Next: give each job its own MASTER_ADDR and MASTER_PORT" in text for text in texts)
    assert [rank.ended() for rank in rest] == [3, 3]


@pytest.mark.more
def test_one_job_after_another_may_have_the_same_variables(start: Start) -> None:
    for job, is_killed in (("A", False), ("B", True), ("C", False)):
        ranks = [start(job, rank) for rank in range(2)]
        for rank in ranks:
            rank.begin()
        assert [rank.said() for rank in ranks] == [f"met 0 {job} {job}", f"met 1 {job} {job}"]
        for rank in ranks:
            rank.process.send_signal(signal.SIGKILL) if is_killed else rank.go_on()
        assert [rank.ended() for rank in ranks] == [-9 * is_killed] * 2


# -- a place for one ---------------------------------------------------------------------------------------


def test_a_place_is_held_by_one_living_process_and_free_after_it(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from unisono.bootstrap.owned_file import claim\n"
        "temporary = Path(sys.argv[1])\n"
        "temporary.write_text('theirs')\n"
        "claim(temporary, temporary.with_name('place'))\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    place, temporary = tmp_path / "place", tmp_path / "temporary"
    temporary.write_text("ours")
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "their temporary")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(FileOwned) as caught:
            claim(temporary, place)
        assert caught.value.pid == other.pid
        assert place.read_text() == "theirs"
        other.kill()
    release = claim(temporary, place)
    assert place.read_text() == "ours"
    release()
    assert list(tmp_path.iterdir()) == []


def test_a_process_may_put_a_newer_ticket_in_its_own_place(tmp_path: Path) -> None:
    source = TicketSource(str(tmp_path / "job.ticket"))
    older, newer = (Ticket.create(Address("127.0.0.1", port)) for port in (1, 2))
    leave_older = source.claim(older)
    leave_newer = source.claim(newer)
    leave_older()
    assert source.read() == newer
    leave_newer()
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_neither_holds_nor_gives_back_its_parents_place(tmp_path: Path) -> None:
    source = TicketSource(str(tmp_path / "job.ticket"))
    leave = source.claim(Ticket.create(Address("127.0.0.1", 1)))
    child = os.fork()
    if child == 0:
        leave()
        signal.pause()
    try:
        assert source.read().address.port == 1
        leave()
        assert not list(tmp_path.iterdir())
        temporary = tmp_path / "temporary"
        temporary.touch()
        claim(temporary, tmp_path / "job.ticket")()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
