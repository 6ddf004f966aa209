"""Settings from code and variables, and their checks; and the recognition of the launcher."""

from __future__ import annotations

import dataclasses
import math
import pickle

import pytest
from tests.support.ranks import run_ranks

import unisono as uni
from unisono.config import Config
from unisono.environment import Launch, launch
from unisono.errors import UsageError

FIELDS = {field.name: field for field in dataclasses.fields(Config)}
# For each setting a value that is allowed and not the default.
OTHER = {
    "reproducible": True,
    "segment_bytes": 4096,
    "window_segments": 3,
    "eager_bytes": 512,
    "eager_credit_bytes": 4096,
    "message_bytes_max": 1 << 20,
    "recv_bytes_max": 1 << 20,
    "deadline_s": 12.5,
    "stall_query_s": 0.5,
    "stall_log_s": 3.0,
    "flush_s": 1.5,
    "silence_s": 7.5,
    "shm": False,
    "insecure": True,
    "tls": True,
    "links": "quic",
    "iroh_streams": 2,
    "iroh_relay": "default",
    "iroh_discovery": True,
    "deadlock_after_s": 0.25,
}
BOUNDED = [(name, field.metadata) for name, field in FIELDS.items() if field.metadata["low"] is not None]
LAUNCHERS = {
    "torchrun": {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "4"},
    "Open MPI": {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"},
    "Slurm": {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"},
    "the environment": {"RANK": "1", "WORLD_SIZE": "4"},
}


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for names in LAUNCHERS.values():
        for name in names:
            monkeypatch.delenv(name, raising=False)
    for name in FIELDS:
        monkeypatch.delenv(f"UNISONO_{name.upper()}", raising=False)


def test_the_table_of_this_test_covers_every_setting():
    assert set(OTHER) == set(FIELDS)
    assert all(OTHER[name] != field.default for name, field in FIELDS.items())


@pytest.mark.parametrize("name", FIELDS)
def test_a_setting_comes_from_code_then_from_its_variable_then_by_default(name, monkeypatch):
    assert getattr(Config(), name) == FIELDS[name].default
    monkeypatch.setenv(f"UNISONO_{name.upper()}", str(OTHER[name]))
    assert getattr(Config(), name) == OTHER[name]
    assert type(getattr(Config(), name)) is type(OTHER[name])
    assert getattr(Config(**{name: FIELDS[name].default}), name) == FIELDS[name].default


@pytest.mark.parametrize("name", FIELDS)
def test_ranks_that_differ_in_a_setting_see_it_in_the_digest(name):
    assert Config(**{name: OTHER[name]}).digest() != Config().digest()
    assert Config(**{name: OTHER[name]}).digest() == Config(**{name: OTHER[name]}).digest()


@pytest.mark.parametrize("word", ["1", "true", "YES", "0", "False", "no", ""])
def test_a_switch_is_written_in_words(word, monkeypatch):
    monkeypatch.setenv("UNISONO_REPRODUCIBLE", word)
    assert Config().reproducible is (word.lower() in ("1", "true", "yes"))


@pytest.mark.parametrize(
    ("variable", "text", "words"),
    [
        ("UNISONO_REPRODUCIBLE", "perhaps", "'perhaps' is not a switch; allowed: 1, true, yes, 0"),
        ("UNISONO_SEGMENT_BYTES", "64k", "'64k' is not an integer"),
        ("UNISONO_SEGMENT_BYTES", "1e6", "not an integer"),
        ("UNISONO_SEGMENT_BYTES", "", "not an integer"),
        ("UNISONO_SEGMENT_BYTES", "1", "out of range; allowed: 64 to 1073741824"),
        ("UNISONO_FLUSH_S", "soon", "'soon' is not a number"),
        ("UNISONO_DEADLINE_S", "", "not a number"),
        ("UNISONO_DEADLINE_S", "0", "out of range; allowed: at least 0.001"),
        ("UNISONO_FLUSH_S", "-1", "out of range; allowed: at least 0.0"),
        ("UNISONO_FLUSH_S", "nan", "out of range"),
        ("UNISONO_SEGMENT_BYTE", "64", "did you mean UNISONO_SEGMENT_BYTES"),
        ("UNISONO_QQQ", "1", "is unknown; allowed: UNISONO_REPRODUCIBLE, "),
    ],
)
def test_an_invalid_variable_is_refused_with_the_allowed_values(variable, text, words, monkeypatch):
    monkeypatch.setenv(variable, text)
    with pytest.raises(UsageError) as caught:
        Config()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"segment_byte": 1}, "did you mean segment_bytes"),
        ({"zzz": 1}, "setting 'zzz' is unknown; allowed: reproducible, "),
        ({"segment_bytes": 4096.0}, "segment_bytes=4096.0 is float; allowed: int"),
        ({"segment_bytes": "4096"}, "is str; allowed: int"),
        ({"segment_bytes": True}, "is bool; allowed: int"),
        ({"reproducible": 1}, "is int; allowed: bool"),
        ({"flush_s": None}, "is NoneType; allowed: float"),
        ({"deadline_s": "5"}, "is str; allowed: float"),
        ({"deadline_s": True}, "is bool; allowed: float"),
        ({"deadline_s": math.nan}, "out of range"),
        ({"flush_s": True}, "is bool; allowed: float"),
        ({"flush_s": math.nan}, "out of range"),
        ({"silence_s": 1.1e6}, "out of range; allowed: 0.01 to 1000000.0"),
    ],
)
def test_an_invalid_setting_is_refused_with_the_allowed_values(settings, words):
    with pytest.raises(UsageError) as caught:
        Config(**settings)
    assert words in str(caught.value)


@pytest.mark.parametrize(("name", "limits"), BOUNDED, ids=[name for name, _ in BOUNDED])
def test_limits_are_allowed_and_beyond_is_not(name, limits):
    kind = type(OTHER[name])
    step = 1 if kind is int else 1e-9
    assert getattr(Config(**{name: kind(limits["low"])}), name) == limits["low"]
    with pytest.raises(UsageError, match="out of range"):
        Config(**{name: kind(limits["low"] - step)})
    if limits["high"] is not None:
        assert getattr(Config(**{name: kind(limits["high"])}), name) == limits["high"]
        with pytest.raises(UsageError, match="out of range"):
            Config(**{name: kind(limits["high"] + step)})


def test_whole_seconds_need_no_point():
    assert Config(flush_s=2).flush_s == 2.0
    assert type(Config(flush_s=2).flush_s) is float


@pytest.mark.parametrize("word", ["none", "None"])
def test_no_deadline_can_be_said_by_the_variable_too(word, monkeypatch):
    monkeypatch.setenv("UNISONO_DEADLINE_S", word)
    assert Config().deadline_s is None
    monkeypatch.setenv("UNISONO_FLUSH_S", word)
    with pytest.raises(UsageError, match="is not a number"):
        Config()


def test_settings_do_not_change():
    config = Config(segment_bytes=4096)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.segment_bytes = 1
    assert dataclasses.replace(config, eager_bytes=1) == Config(segment_bytes=4096, eager_bytes=1)


def test_a_setting_reaches_the_ranks():
    (world,) = uni.local(1, Config(segment_bytes=4096))
    with world:
        assert world.backend.config.segment_bytes == 4096


@pytest.mark.parametrize(
    "name", ["deadline_s", "stall_query_s", "stall_log_s", "flush_s", "deadlock_after_s"]
)
@pytest.mark.parametrize("value", [math.inf, 1e300])
def test_ranks_can_wait_for_the_longest_times(name, value):
    """The range of the system's clock ends long before that of a float."""
    run_ranks(lambda comm: [comm.barrier() for _ in range(3)], 2, config=Config(**{name: value})).values()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_names_rank_and_size(launcher, monkeypatch):
    for name, text in LAUNCHERS[launcher].items():
        monkeypatch.setenv(name, text)
    assert launch() == Launch(launcher, 1, 4)


def test_alone_means_no_launcher():
    assert launch() is None


def test_the_first_launcher_in_the_documented_order_counts(monkeypatch):
    for place, names in enumerate(LAUNCHERS.values()):
        for name, text in names.items():
            monkeypatch.setenv(name, str(place) if "RANK" in name or "PROCID" in name else text)
        assert launch().launcher in list(LAUNCHERS)[: place + 1]
    for name, text in LAUNCHERS["torchrun"].items():
        monkeypatch.setenv(name, text)
    assert launch() == Launch("torchrun", 1, 4)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("spoiled", ["missing", "text", "outside", "negative"])
def test_a_launcher_that_makes_no_sense_is_named(launcher, spoiled, monkeypatch):
    names = dict(LAUNCHERS[launcher])
    rank_name = next(name for name in names if name.endswith(("RANK", "PROCID")))
    changes = {"missing": None, "text": "one", "outside": "4", "negative": "-1"}
    for name, text in names.items():
        given = changes[spoiled] if name == rank_name else text
        if given is not None:
            monkeypatch.setenv(name, given)
    with pytest.raises(UsageError, match=f"^{launcher} set .*{rank_name}"):
        launch()


def test_a_child_reads_a_changed_environment(monkeypatch):
    monkeypatch.setenv("UNISONO_SEGMENT_BYTES", "4096")
    read = Config.inherited({"UNISONO_TLS": "1", "PATH": "elsewhere"})
    assert (read.segment_bytes, read.tls) == (4096, True)
    assert not Config().tls


def test_encryption_and_none_contradict_each_other():
    with pytest.raises(UsageError, match="contradict"):
        Config(insecure=True, tls=True)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_of_several_ranks_never_leaves_each_alone(launcher, monkeypatch):
    for name, text in LAUNCHERS[launcher].items():
        monkeypatch.setenv(name, text)
    with pytest.raises(uni.RendezvousError, match=r"4 ranks.* do not know where to meet"):
        uni.init()


@pytest.mark.parametrize("name", ["streams", "relay", "discovery"])
def test_the_old_name_of_a_setting_is_refused_with_the_new_one(name, monkeypatch):
    with pytest.raises(UsageError, match=f"iroh_{name}"):
        Config(**{f"quic_{name}": 2})
    monkeypatch.setenv(f"UNISONO_QUIC_{name.upper()}", "2")
    with pytest.raises(UsageError, match=f"UNISONO_IROH_{name.upper()}"):
        Config()


@pytest.mark.parametrize("value", [4, 5])
def test_settings_that_the_user_gave_are_known_in_every_copy(
    value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Config().chosen("iroh_") == []
    assert Config.inherited({}).chosen("iroh_") == []
    assert dataclasses.replace(Config(), flush_s=1.0).chosen("iroh_") == []
    assert Config().changed(links="quic").chosen("iroh_") == []
    assert Config.inherited({"UNISONO_IROH_STREAMS": str(value)}).chosen("iroh_") == ["iroh_streams"]
    given = Config(iroh_streams=value)
    for copy in (
        given,
        given.changed(flush_s=1.0),
        Config.unpacked(given.packed()),
        pickle.loads(pickle.dumps(given)),
    ):
        assert copy.chosen("iroh_") == ["iroh_streams"]
        assert copy.iroh_streams == value
    monkeypatch.setenv("UNISONO_IROH_STREAMS", str(value))
    assert Config().chosen("iroh_") == ["iroh_streams"]
