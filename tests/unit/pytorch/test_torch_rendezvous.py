"""How ranks of a torch group find each other through a store; here it is a dict, and ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import unisono as uni
from unisono.bootstrap.address import Address
from unisono.bootstrap.store import StoreSource
from unisono.bootstrap.ticket import Ticket, TicketSource
from unisono.environment import Launch, Network
from unisono.pytorch import rendezvous
from unisono.pytorch.rendezvous import join_world

KEY = "unisono/ticket"
SOON = timedelta(seconds=0.5)
LATER = timedelta(seconds=30)


class Store:
    """The methods of torch's store that a group uses; remembers every ticket."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.tickets: list[str] = []
        self.is_read = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.tickets.append(value)
        self.values[key] = value

    def get(self, key: str) -> bytes:
        self.is_read.set()
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None


class KeepingStore(Store):
    """A store that cannot delete keys, as a user's store may be."""

    def delete_key(self, key: str) -> bool:
        raise RuntimeError("not implemented")


class DeadStore(Store):
    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Connection reset by peer\nand a stack")

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("Connection reset by peer\nand a stack")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def sums(world: uni.Communicator) -> list[float]:
    """The result of a sum whose elements depend on rank and index, so that a wrong rank or order shows."""
    with world:
        x = np.arange(5.0) * 10.0**world.rank
        return [float(each) for each in world.all_reduce(x)]


def expected(size: int) -> list[float]:
    return [float(each) for each in np.arange(5.0) * sum(10.0**rank for rank in range(size))]


def meet(pool: ThreadPoolExecutor, store: Store, size: int) -> None:
    """All ranks join, the last rank first, and compute."""
    ends = [
        pool.submit(lambda r=rank: sums(join_world(store, r, size, LATER, "0"))) for rank in range(size)[::-1]
    ]
    assert [end.result() for end in ends] == [expected(size)] * size


def test_ranks_meet_and_the_ticket_is_gone_once_all_have_joined(pool: ThreadPoolExecutor) -> None:
    store = Store()
    meet(pool, store, 3)
    assert len(store.tickets) == 1
    assert store.values == {}


@pytest.mark.parametrize("kind", [Store, KeepingStore])
def test_the_keys_of_a_store_come_back(kind: type[Store], pool: ThreadPoolExecutor) -> None:
    store = kind()
    for times in (1, 2, 3):
        meet(pool, store, 2)
        assert len(set(store.tickets)) == times


def test_a_ticket_that_leads_nowhere_is_read_again(pool: ThreadPoolExecutor) -> None:
    store = Store()
    store.values[KEY] = Ticket.create(Address("127.0.0.1", 1)).text()
    early = pool.submit(lambda: sums(join_world(store, 1, 2, LATER, "0")))
    assert store.is_read.wait(10)
    assert sums(join_world(store, 0, 2, LATER, "0")) == expected(2)
    assert early.result() == expected(2)


def test_the_ticket_of_a_world_that_still_lives_is_not_taken_for_the_next(pool: ThreadPoolExecutor) -> None:
    """A rank may make its next group before rank 0 has removed the ticket of the destroyed one."""
    store = KeepingStore()
    other = pool.submit(join_world, store, 1, 2, LATER, "0")
    with join_world(store, 0, 2, LATER, "0"), other.result():
        store.is_read.clear()
        again = pool.submit(lambda: sums(join_world(store, 1, 2, LATER, "0")))
        assert store.is_read.wait(10)  # it connects to the seed of the first world, and is refused
        assert sums(join_world(store, 0, 2, LATER, "0")) == expected(2)
        assert again.result() == expected(2)


def test_rank_0_names_the_ranks_that_have_not_come(pool: ThreadPoolExecutor) -> None:
    store = Store()

    def ends(rank: int, timeout: timedelta) -> str:
        with pytest.raises(uni.RendezvousError) as caught:
            join_world(store, rank, 4, timeout, "7")
        return str(caught.value)

    waiting = pool.submit(ends, 2, LATER)
    assert "2 of 4 ranks joined (0, 2); missing: 1, 3" in ends(0, 3 * SOON)
    assert "rank 0 gave up" in waiting.result()
    assert store.values == {}


def test_a_rank_without_rank_0_says_where_it_looked() -> None:
    with pytest.raises(uni.RendezvousError) as caught:
        join_world(Store(), 1, 2, SOON, "7")
    assert "rank 1 of 2 could not join within 0." in str(caught.value)
    assert "rank 0 has not started its seed: the store of torch's group '7' has no ticket" in str(
        caught.value
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_is_gone_is_named(rank: int) -> None:
    with pytest.raises(
        uni.RendezvousError, match="store of torch's group '7' does not answer: Connection reset"
    ):
        join_world(DeadStore(), rank, 2, LATER, "7")


def test_a_world_of_one_needs_no_store() -> None:
    assert sums(join_world(DeadStore(), 0, 1, SOON, "0")) == expected(1)


@pytest.mark.parametrize(
    "variables",
    [
        {"UNISONO_RANK": "5", "UNISONO_SIZE": "9", "UNISONO_JOIN": "/nowhere"},
        {"UNISONO_ADDRESS": "127.0.0.1:9", "UNISONO_ADVERTISE": "127.0.0.1:9"},
        {"RANK": "x", "WORLD_SIZE": "y"},
        {"SLURM_STEP_NUM_TASKS": "64", "SLURM_PROCID": "63"},
    ],
    ids=["unisono run", "a port of another world", "no numbers", "srun"],
)
def test_what_torch_says_counts_whatever_the_launcher(
    variables: dict[str, str], pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    store = Store()
    store.host, store.port = "127.0.0.1", 29500  # type: ignore[attr-defined]
    meet(pool, store, 2)


def test_a_backend_with_a_launcher_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_BACKEND", "mpi")
    with pytest.raises(uni.UsageError, match="takes its ranks from"):
        join_world(Store(), 0, 2, SOON, "0")


# -- a ticket for ranks on other hosts ----------------------------------------------------------------------

REMOTE = Ticket.create(Address("10.0.0.1", 4711), bytes(range(32)))


def source(store: Store, secret: bytes) -> StoreSource:
    return StoreSource("a store", key=KEY, connect=lambda: store, secret=lambda: secret)


def test_a_ticket_is_sealed_with_what_only_the_ranks_know() -> None:
    store = Store()
    source(store, b"job").write(REMOTE)
    assert REMOTE.token.hex() not in store.values[KEY]
    assert REMOTE.text() not in store.values[KEY]
    assert source(store, b"job").read() == REMOTE


@pytest.mark.parametrize("secret", [b"", b"other"])
def test_a_sealed_ticket_is_for_the_ranks_of_its_job(secret: bytes) -> None:
    store = Store()
    source(store, b"job").write(REMOTE)
    with pytest.raises(uni.UsageError, match="not sealed by a rank of this job"):
        source(store, secret).read()


@pytest.mark.parametrize(
    "spoil", [lambda text: text[:-1] + "xy", lambda text: text[:-4], lambda text: text[:7]]
)
def test_an_altered_ticket_is_none(spoil: Callable[[str], str]) -> None:
    store = Store()
    source(store, b"job").write(REMOTE)
    store.values[KEY] = spoil(store.values[KEY])
    with pytest.raises(uni.UsageError, match="not sealed by a rank of this job"):
        source(store, b"job").read()


def test_an_open_ticket_is_not_taken_in_place_of_a_sealed_one() -> None:
    store = Store()
    source(store, b"").write(REMOTE)
    assert source(store, b"").read() == REMOTE
    with pytest.raises(uni.UsageError, match="is not sealed"):
        source(store, b"job").read()


def test_a_ticket_for_this_host_needs_no_seal() -> None:
    store, here = Store(), Ticket.create(Address("127.0.0.1", 4711))
    source(store, b"job").write(here)
    assert store.values[KEY] == here.text()
    assert source(store, b"job").read() == here


def test_the_secret_is_the_token_of_unisono_run(tmp_path: Path) -> None:
    file = TicketSource(str(tmp_path / "ticket"))
    file.write(REMOTE)
    ours = Launch("unisono run", 0, 2)
    assert rendezvous._secret(ours, Network(join=file.given), False) == REMOTE.token
    assert rendezvous._secret(ours, Network(join=REMOTE.text()), False) == REMOTE.token
    for started in (None, TWO_HOSTS):
        assert rendezvous._secret(started, Network(join=REMOTE.text()), False) == b""
    with pytest.raises(uni.RendezvousError, match="the ticket of this job cannot be read"):
        rendezvous._secret(ours, Network(join=str(tmp_path / "nothing")), False)


# -- where rank 0 hosts the seed ----------------------------------------------------------------------------

AWAY = "10.77.0.9"  # the source address toward the store's host


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> None:
    def source_toward(address: Address, timeout: float) -> str:
        return "127.0.1.1" if address.host == "me" else AWAY

    monkeypatch.setattr(rendezvous, "source_toward", source_toward)


def inside(store: object) -> object:
    return SimpleNamespace(underlying_store=SimpleNamespace(underlying_store=store))


TWO_HOSTS = Launch("torchrun", 0, 4)
ONE_HOST = Launch("torchrun", 0, 4, is_one_host=True)
UNKNOWN = Launch("the environment", 0, 4)
TCP: Callable[[str], object] = lambda host: inside(SimpleNamespace(host=host, port=1))  # noqa: E731
FILE = inside(SimpleNamespace())


@pytest.mark.usefixtures("routes")
@pytest.mark.parametrize(
    ("store", "named", "started", "found"),
    [
        (TCP("localhost"), None, TWO_HOSTS, "127.0.0.1"),
        (TCP("127.0.0.1"), None, None, "127.0.0.1"),
        (TCP("::1"), None, None, "127.0.0.1"),
        (TCP("node0"), None, TWO_HOSTS, AWAY),
        (TCP("node0"), None, ONE_HOST, AWAY),
        (TCP("node0"), "eth7", TWO_HOSTS, "eth7"),
        (TCP("me"), None, ONE_HOST, "127.0.0.1"),
        (TCP("me"), None, UNKNOWN, "127.0.0.1"),
        (TCP("me"), None, None, "127.0.0.1"),
        (FILE, None, None, "127.0.0.1"),
        (FILE, None, UNKNOWN, "127.0.0.1"),
        (FILE, "eth7", TWO_HOSTS, "eth7"),
    ],
)
def test_the_seed_is_where_the_members_reach_it(
    store: object, named: str | None, started: Launch | None, found: str
) -> None:
    assert rendezvous._seed_address(store, Network(address=named), started) == found


@pytest.mark.usefixtures("routes")
@pytest.mark.parametrize("store", [TCP("me"), FILE])
def test_an_address_that_others_cannot_reach_is_refused(store: object) -> None:
    with pytest.raises(
        uni.RendezvousError, match=r"torchrun started ranks on several hosts.*UNISONO_ADDRESS"
    ):
        rendezvous._seed_address(store, Network(), TWO_HOSTS)
