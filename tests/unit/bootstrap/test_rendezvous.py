"""The pure parts: which ranks are admitted and which wait, where ranks join, and which rank is blamed."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from unisono import environment
from unisono.bootstrap.admission import AdmissionLimiter
from unisono.bootstrap.launch_info import decide
from unisono.bootstrap.rendezvous import Formation, Join
from unisono.config import Config
from unisono.environment import Launch, Network
from unisono.errors import RendezvousError, UsageError, rank_numbers
from unisono.launcher.failure import End, culprit, describe, rebuild
from unisono.launcher.job import Job
from unisono.launcher.output import Prefixer, last_words
from unisono.launcher.summary import Ended, end_of


def a_join(rank: int, size: int = 3, **changes: Any) -> Join:
    given: dict[str, Any] = {
        "version": "1.0",
        "config_digest": "d0",
        "card": b"card %d" % rank,
        "host": f"h{rank}",
        "pid": 100 + rank,
        "address": f"10.0.0.{rank}",
        **changes,
    }
    return Join(rank, size, **given)


# -- the formation -----------------------------------------------------------------------------------------


def test_a_world_forms_in_any_order() -> None:
    for order in itertools.permutations(range(3)):
        formation = Formation(3, "1.0")
        for key, rank in enumerate(order):
            assert formation.membership()[0] is None
            assert formation.offer(key, a_join(rank)) is None
        membership, reason = formation.membership()
        assert membership is not None
        assert reason == "all 3 ranks joined"
        assert [(m.rank, m.card, m.host, m.incarnation) for m in membership.members] == [
            (rank, b"card %d" % rank, f"h{rank}", 0) for rank in range(3)
        ]


@pytest.mark.parametrize(
    ("join", "reason"),
    [
        (a_join(1, version="0.9"), "unisono 0.9 cannot join a world of unisono 1.0"),
        (a_join(1, size=4), "it was started with size 4, this world has 3 ranks"),
        (a_join(3), "rank 3; allowed: 0 to 2"),
        (a_join(-1), "rank -1; allowed"),
        (a_join(1, card=bytes(20000)), "card has 20000 bytes"),
        (a_join(0, pid=7), r"rank 0 is taken by rank 0 \(host h0, pid 100, from 10.0.0.0\)"),
        (a_join(1, config_digest="d1"), "settings differ from rank 0's: digest d1"),
    ],
)
def test_a_bad_join_is_named_and_does_not_end_the_formation(join: Join, reason: str) -> None:
    formation = Formation(3, "1.0")
    formation.offer(0, a_join(0))
    refusal = formation.offer(1, join)
    assert refusal is not None
    assert re.search(reason, refusal)
    assert "1 of 3 ranks joined (0); missing: 1-2; refused: rank" in formation.report()
    assert formation.offer(2, a_join(1)) is None
    assert formation.offer(3, a_join(2)) is None
    assert formation.membership()[0] is not None


def test_rank_0_decides_the_settings_even_when_it_comes_last() -> None:
    formation = Formation(3, "1.0")
    formation.offer(1, a_join(1, settings={"eager_bytes": "1"}, config_digest="odd"))
    formation.offer(2, a_join(2, settings={"eager_bytes": "2"}))
    assert formation.misfits() == []
    formation.offer(3, a_join(0, settings={"eager_bytes": "2"}))
    assert formation.misfits() == [
        (1, "its settings differ from rank 0's: eager_bytes=1 (rank 0: 2)"),
    ]
    assert formation.ranks_missing() == [1]


def test_a_rank_that_left_may_come_again_as_another_incarnation() -> None:
    formation = Formation(2, "1.0")
    formation.offer(1, a_join(1, 2))
    formation.leave(1)
    assert formation.ranks_missing() == [0, 1]
    formation.offer(2, a_join(1, 2))
    assert formation.incarnation(1) == 1


def test_a_process_whose_connection_broke_takes_its_own_rank_again() -> None:
    formation = Formation(2, "1.0")
    formation.offer(1, a_join(1, 2, instance="same"))
    assert formation.offer(2, a_join(1, 2, instance="other")) is not None
    assert formation.offer(3, a_join(1, 2, instance="same")) is None
    formation.leave(1)  # the end of the old connection is noticed only later
    assert formation.ranks_joined() == [1]


def test_no_rank_joins_or_leaves_a_complete_world() -> None:
    formation = Formation(1, "1.0")
    formation.offer(0, a_join(0, 1))
    assert formation.membership()[0] is not None
    assert "is complete, and rank 0 (host h0" in str(formation.offer(1, a_join(0, 1)))
    formation.leave(0)
    assert formation.ranks_joined() == [0]


def test_a_world_without_a_rank_that_has_ended_cannot_form() -> None:
    formation = Formation(3, "1.0")
    formation.offer(0, a_join(0))
    assert (
        formation.on_rank_ended(1, "exit code 0")
        == "rank 1 has ended (exit code 0) before this world had formed"
    )
    late = a_join(2)
    assert formation.offer(2, late) == "rank 1 has ended (exit code 0) before this world had formed"
    assert formation.refusal(late) == "over"
    assert "rank 1 has ended" in str(formation.on_rank_ended(0, "exit code 1"))  # because of rank 1
    assert "missing: 1-2; rank 1 has ended (exit code 0)" in formation.report()
    assert formation.on_rank_ended(7, "exit code 0") is None


def test_a_rank_that_ends_after_the_world_has_formed_does_not_concern_the_formation() -> None:
    formation = Formation(1, "1.0")
    formation.offer(0, a_join(0, 1))
    formation.membership()
    assert formation.on_rank_ended(0, "exit code 0") is None
    assert formation.report() == "1 of 1 ranks joined (0)"


def test_a_refusal_says_whether_another_process_has_the_rank() -> None:
    formation = Formation(2, "1.0")
    formation.offer(0, a_join(1, 2))
    assert formation.refusal(a_join(1, 2, pid=7)) == "taken"
    assert formation.refusal(a_join(1, 2, config_digest="odd")) == "misfit"
    formation.offer(1, a_join(0, 2))
    formation.membership()
    assert formation.refusal(a_join(1, 2, pid=7)) == "taken late"
    assert formation.refusal(a_join(1, 2)) == "own late"


def test_a_flood_of_refusals_stays_one_readable_line() -> None:
    formation = Formation(2, "1.0")
    for key in range(1000):
        formation.offer(key, a_join(1, 2, version="\n\x1b[2J" * 99, host="\u202e" * 999))
    assert formation.report().isprintable()
    assert "and 992 more" in formation.report()
    assert len(formation.report()) < 3000


def test_ranks_are_written_as_spans() -> None:
    assert rank_numbers([3, 1, 0, 2, 7, 9, 8]) == "0-3, 7-9"
    assert rank_numbers(range(0, 1000, 2)).endswith("62, ...")


# -- the limiter of admissions -----------------------------------------------------------------------------


def test_a_new_connection_displaces_an_unauthenticated_one_of_its_own_address_first() -> None:
    limiter = AdmissionLimiter(pending_max=4, per_address_max=2, draw=lambda keys: keys[-1])
    assert limiter.arrive(0, "10.0.0.1", 0.0) is None
    assert limiter.arrive(1, "10.0.0.2", 0.0) is None
    assert limiter.arrive(2, "10.0.0.2", 0.0) is None
    assert not limiter.is_crowded(0.0)
    assert limiter.arrive(3, "10.0.0.2", 0.0) == 2
    assert limiter.is_crowded(0.5)
    assert not limiter.is_crowded(1.5)
    assert limiter.arrive(4, "10.0.0.3", 0.0) is None
    assert limiter.arrive(5, "10.0.0.4", 0.0) == 4
    assert len(limiter) == 4
    for key in range(10):
        limiter.depart(key)
    assert len(limiter) == 0
    assert limiter.any() is None


def test_the_evicted_connection_is_drawn_from_all() -> None:
    limiter = AdmissionLimiter(pending_max=8, per_address_max=8)
    victims = [limiter.arrive(key, "10.0.0.1", 0.0) for key in range(2000)]
    ages = {key - victim for key, victim in enumerate(victims) if victim is not None}
    assert min(ages) == 1
    assert max(ages) > 32  # the oldest would be 8


def test_the_addresses_of_one_ipv6_network_count_as_one() -> None:
    limiter = AdmissionLimiter(pending_max=99, per_address_max=1)
    limiter.arrive(0, "2001:db8::1", 0.0)
    assert limiter.arrive(1, "2001:db8::ffff", 0.0) == 0
    assert limiter.arrive(2, "2001:db8:1::1", 0.0) is None


def test_the_answer_to_a_client_that_fails_often_waits_up_to_a_minute() -> None:
    limiter = AdmissionLimiter()
    assert [limiter.fail("10.0.0.1", float(i)) for i in range(20)] == [0.0] * 20
    assert limiter.fail("10.0.0.1", 21.0) == 1.0
    assert limiter.fail("10.0.0.2", 21.0) == 0.0
    assert limiter.fail("10.0.0.1", 99.0) == 0.0


def test_a_crowd_is_named_by_its_number_and_place() -> None:
    limiter = AdmissionLimiter(pending_max=3, per_address_max=3)
    for key in range(19):
        limiter.arrive(key, "10.0.0.1", 0.0)
    assert limiter.crowd() == ""
    for key in range(100, 9000):
        limiter.arrive(key, f"10.{key % 7}.{key % 250}.{key % 251}", 0.0)
    for key in range(9000, 9200):
        limiter.arrive(key, "10.0.0.1", 0.0)
    assert re.fullmatch(
        r"the seed's port is crowded: \d+ connections .* dropped, \d+ of them from 10\.0\.0\.1",
        limiter.crowd(),
    )
    assert len(limiter._turned_away) <= 1024


# -- launch environments -----------------------------------------------------------------------------------

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-vm-77@1",
}
SLURM = {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "3",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
}
BARE = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
OURS = {"UNISONO_RANK": "1", "UNISONO_SIZE": "4", "UNISONO_LOCAL_RANK": "1", "UNISONO_LOCAL_SIZE": "4"}


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Any:
    clean: dict[str, str] = {}
    monkeypatch.setattr(environment.os, "environ", clean)
    return clean


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (OURS, ("unisono run", 1, 4, 1, True, "")),
        (TORCHRUN, ("torchrun", 1, 4, 1, True, "torchrun/none/0/node0/29500")),
        (OMPI, ("Open MPI", 2, 4, 2, True, "Open MPI/prterun-vm-77@1")),
        (SLURM, ("Slurm", 3, 4, 3, True, "Slurm/12/0")),
        (BARE, ("the environment", 1, 4, None, True, "the environment/127.0.0.1/29500")),
        (
            {**BARE, "MASTER_ADDR": "node0"},
            ("the environment", 1, 4, None, False, "the environment/node0/29500"),
        ),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}, ("torchrun", 1, 4, 1, False, "torchrun/none/0/node0/29500")),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "2"}, ("Slurm", 3, 4, 3, False, "Slurm/12/0")),
    ],
)
def test_a_launcher_is_recognised(
    environ: dict[str, str], variables: dict[str, str], expected: tuple[Any, ...]
) -> None:
    environ.update(variables)
    found = environment.launch()
    assert found is not None
    assert (
        found.launcher,
        found.rank,
        found.size,
        found.local_rank,
        found.is_one_host,
        found.job,
    ) == expected


def test_the_inner_launcher_counts(environ: dict[str, str]) -> None:
    layers = [
        ("the environment", BARE),
        ("Slurm", SLURM),
        ("Open MPI", OMPI),
        ("torchrun", TORCHRUN),
        ("unisono run", OURS),
    ]
    for name, variables in layers:
        environ.update(variables)
        found = environment.launch()
        assert found is not None
        assert found.launcher == name


def test_a_process_without_a_launcher_is_alone(environ: dict[str, str]) -> None:
    assert environment.launch() is None
    environ["SLURM_JOB_ID"] = "12"  # a shell inside an allocation is not a step
    environ["SLURM_PROCID"] = "0"
    assert environment.launch() is None
    assert decide(None, Network()).size == 1


@pytest.mark.parametrize("variables", [OURS, TORCHRUN, OMPI, SLURM, BARE])
def test_an_incomplete_environment_is_an_error(environ: dict[str, str], variables: dict[str, str]) -> None:
    for name in variables:
        environ.clear()
        environ.update({key: text for key, text in variables.items() if key != name})
        if "RANK" not in name and "SIZE" not in name and "NUM_TASKS" not in name and "PROCID" not in name:
            continue
        try:
            found = environment.launch()
        except UsageError as error:
            assert "are not both numbers" in str(error)  # noqa: PT017 - some variables may be missing
        else:
            # Without the launcher's mark another launcher is recognised, or none; never a smaller world.
            assert found is None or found.size == 4


@pytest.mark.parametrize(("rank", "size"), [("4", "4"), ("-1", "4"), ("0", "0"), ("x", "4"), ("1.5", "4")])
def test_an_invalid_rank_is_an_error(environ: dict[str, str], rank: str, size: str) -> None:
    environ.update(RANK=rank, WORLD_SIZE=size)
    with pytest.raises(UsageError, match="RANK"):
        environment.launch()


def test_launch_variables_are_no_settings(environ: dict[str, str]) -> None:
    digest = Config().digest()
    environ.update(OURS, UNISONO_JOIN="x", UNISONO_ADDRESS="lo", UNISONO_ADVERTISE="h")
    assert Config().digest() == digest
    environ["UNISONO_RANKS"] = "1"
    with pytest.raises(UsageError, match="UNISONO_RANKS"):
        Config()


def test_a_child_does_not_inherit_its_parents_identity(environ: dict[str, str]) -> None:
    environ.update(
        OURS, **TORCHRUN, **OMPI, **SLURM, UNISONO_JOIN="secret", UNISONO_EAGER_BYTES="1", HOME="/"
    )
    child = environment.environment({"UNISONO_RANK": "0"})
    assert child["UNISONO_RANK"] == "0"
    assert child["HOME"] == "/"
    assert child["UNISONO_EAGER_BYTES"] == "1"
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "UNISONO_JOIN", "OMPI_COMM_WORLD_RANK"} & child.keys()


# -- places ------------------------------------------------------------------------------------------------


def started(launcher: str, rank: int = 0, **more: Any) -> Launch:
    return Launch(launcher, rank, 4, **more)


@pytest.mark.parametrize("rank", [0, 1])
def test_on_one_host_ranks_meet_at_a_file_of_their_job(rank: int) -> None:
    info = decide(started("Slurm", rank, is_one_host=True, job="Slurm/12/0"), Network(folder="/t"))
    other = decide(started("Slurm", rank, is_one_host=True, job="Slurm/12/1"), Network(folder="/t"))
    assert info.source is not None
    assert other.source is not None
    assert str(info.source.path).startswith("/t/unisono-")
    assert info.source.path != other.source.path
    assert info.source.is_keyed
    assert info.seed_address == ("127.0.0.1" if rank == 0 else None)


@pytest.mark.parametrize("launcher", ["torchrun", "Open MPI", "Slurm", "the environment", "unisono run"])
@pytest.mark.parametrize("rank", [0, 3])
def test_several_ranks_never_become_a_world_of_one(launcher: str, rank: int) -> None:
    with pytest.raises(RendezvousError, match="UNISONO_JOIN"):
        decide(started(launcher, rank), Network())


@pytest.mark.parametrize(
    ("begun", "network", "address"),
    [
        (started("torchrun", master="node0"), Network(join="/f"), "node0"),
        (started("torchrun", master="node0"), Network(join="/f", address="eth0"), "eth0"),
        (started("Slurm", is_one_host=True), Network(join="/f"), "127.0.0.1"),
        (started("Slurm", 1), Network(join="/f"), None),
        (started("Slurm"), Network(join="unisono1://h:1/x/y"), None),
        (started("unisono run"), Network(join="/f"), None),
    ],
)
def test_rank_0_hosts_the_seed_where_no_launcher_of_ours_does(
    begun: Launch, network: Network, address: str | None
) -> None:
    info = decide(begun, network)
    assert info.source is not None
    assert info.seed_address == address


def test_a_seed_for_several_hosts_needs_an_address() -> None:
    with pytest.raises(RendezvousError, match="UNISONO_ADDRESS"):
        decide(started("Slurm"), Network(join="/shared/ticket"))


@pytest.mark.parametrize(
    "arguments",
    [{"size": 4}, {"rank": 4, "size": 4}, {"rank": -1, "size": 4}, {"rank": 1}, {"rank": True, "size": 4}],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        decide(None, Network(), **arguments)


@pytest.mark.parametrize("arguments", [{}, {"rank": 0}])
def test_a_ticket_alone_makes_no_world_of_one(arguments: dict[str, Any], tmp_path: Path) -> None:
    """Rank 0 of a world of one would host a seed, and overwrite the ticket of the intended world."""
    ticket = tmp_path / "ticket"
    for network, join in ((Network(join=str(ticket)), None), (Network(), str(ticket))):
        with pytest.raises(UsageError, match=r"neither rank nor size.*unisono run"):
            decide(None, network, join=join, **arguments)
    assert not ticket.exists()


def test_a_place_shows_no_ticket() -> None:
    secret = "ab" * 32
    info = decide(None, Network(join=f"unisono1://127.0.0.1:1/plain/{secret}"), rank=0, size=2)
    assert secret not in repr(info)


# -- ends --------------------------------------------------------------------------------------------------


def victim(rank: int, *blames: int) -> End:
    return End(rank, is_victim=True, blames=blames)


def test_the_culprit_is_the_rank_that_the_victims_name_or_the_first_that_is_no_victim() -> None:
    assert culprit([victim(3), victim(1), End(2), End(0)]) == 2
    assert culprit([victim(3), victim(1)]) == 3
    assert culprit([victim(3, 0), End(2), End(0)]) == 0
    assert culprit([victim(3, 1), victim(0, 1), victim(2, 3)]) == 1, "it left, and most name it"


class Odd(Exception):
    """An exception that the user has defined."""


@pytest.mark.parametrize(
    "error",
    [
        KeyError("a", 3),
        ValueError("x"),
        FileNotFoundError(2, "no such file"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "r"),
    ],
)
def test_a_built_in_exception_is_rebuilt(error: Exception) -> None:
    again = rebuild(describe(error), 3)
    assert type(again) is type(error)
    assert again.args == error.args
    assert "On rank 3:" in again.__notes__[0]


@pytest.mark.parametrize(
    "error",
    [
        Odd("hm"),
        ValueError(object()),
        SystemExit(3),
        KeyboardInterrupt(),
        ExceptionGroup("g", [ValueError()]),
    ],
)
def test_any_other_exception_is_a_remote_error(error: BaseException) -> None:
    again = rebuild(describe(error), 3)
    assert type(again).__name__ == "RemoteError"
    assert again.rank == 3  # type: ignore[attr-defined]
    assert again.type_name == type(error).__name__  # type: ignore[attr-defined]
    assert type(error).__name__ in again.traceback_text  # type: ignore[attr-defined]


def test_an_error_of_ours_keeps_its_fields() -> None:
    from unisono.errors import DeadlineExceeded, Location, PeerLost

    lost = PeerLost(
        "gone",
        ranks=(2, 3),
        where=Location("all_reduce", "world", 0, 7, 1.5),
        cause="silent",
        next_step="shrink",
    )
    again = rebuild(describe(lost), 1)
    assert isinstance(again, PeerLost)
    assert again.ranks == (2, 3)
    assert str(again) == str(lost)
    late = rebuild(describe(DeadlineExceeded("late", waiting_on=(5,))), 1)
    assert isinstance(late, DeadlineExceeded)
    assert late.waiting_on == (5,)


TRACEBACK = [
    b"noise",
    b"Traceback (most recent call last):",
    b"  old",
    b"KeyError: 1",
    b"noise",
    b"Traceback (most recent call last):",
    b"  a",
    b"ZeroDivisionError: x",
    b"",
    b"During handling of the above exception, another exception occurred:",
    b"",
    b"Traceback (most recent call last):",
    b"  b",
    b"ValueError: y",
]


def test_the_last_traceback_is_kept_with_its_causes() -> None:
    assert last_words(TRACEBACK) == TRACEBACK[5:]
    assert last_words([b"%d" % i for i in range(99)]) == [b"%d" % i for i in range(79, 99)]
    assert end_of(Ended(0, 1, TRACEBACK)) == End(0)
    lines = [*TRACEBACK[:-1], b"unisono.errors.PeerLost: rank 3 is gone"]
    assert end_of(Ended(0, 1, lines)) == End(0, is_victim=True, blames=(3,))


def test_every_line_gets_its_rank_once_it_is_whole() -> None:
    prefixer = Prefixer(3, 16, colour=False)
    assert prefixer.feed(b"a\nb") == [b"a"]
    assert prefixer.feed(b"c\n\nd") == [b"bc", b""]
    assert prefixer.finish() == [b"d"]
    assert prefixer.show(b"x") == b" [3] x\n"
    assert prefixer.show(b"10%\r20%\r") == b" [3] 10%\r [3] 20%\n"
    assert [len(line) for line in prefixer.feed(bytes(200_000))] == [200_000]
    assert b"\x1b[" in Prefixer(3, 16, colour=True).show(b"x")


@pytest.mark.parametrize(
    ("job", "complaint"),
    [
        ({"ranks_here": 0}, "at least 1"),
        ({"nodes": 2, "node_rank": 2}, "--node-rank 2"),
        ({"nodes": 2}, "--join FILE"),
        ({"nodes": 2, "join": "/f"}, "--address"),
        ({"nodes": 2, "join": "unisono1://h:1/x/y", "address": "lo"}, "not a ticket"),
        ({"grace_s": -1.0}, "--grace"),
        ({"env": {"UNISONO_JOIN": "x"}}, "command line"),
    ],
)
def test_a_job_that_cannot_work_is_refused(job: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        Job(**{"command": ["true"], "ranks_here": 2, **job}).check()
