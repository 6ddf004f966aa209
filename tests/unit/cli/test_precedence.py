"""The precedence for every setting: an argument or option, then a variable, then the default.

A rank's identity (rank, size, local rank and size, ticket) comes from the launcher alone.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit.test_config import OTHER

from unisono.config import Config, as_options
from unisono.environment import Network, environment, given, network
from unisono.errors import UsageError

pytestmark = pytest.mark.more

PATIENCE_S = 60.0
DEFAULTS = {field.name: field.default for field in dataclasses.fields(Config)}
# Further variables: where ranks join, and by which backend. The value of the variable, and of the option.
PLACES = {"backend": ("iroh", "gloo"), "address": ("localhost", "127.0.0.1"), "advertise": ("h:1", "h:2")}

# Prints the settings that a rank reads; with "nested", those in a rank of a launcher that this rank starts.
PROGRAM = """
import dataclasses, json, os, subprocess, sys
from unisono.config import Config
from unisono.environment import network
if sys.argv[1:] == ["nested"]:
    sys.exit(subprocess.run([sys.executable, "-m", "unisono", "run", __file__]).returncode)
read = {**dataclasses.asdict(Config()), **dataclasses.asdict(network())}
identity = {name: os.environ.get(f"UNISONO_{name}") for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")}
print("read " + json.dumps({**read, **identity}))
"""


def user_environment(**variables: str) -> dict[str, str]:
    ours = {name: text for name, text in os.environ.items() if not name.startswith("UNISONO_")}
    return {**ours, **{f"UNISONO_{name.upper()}": text for name, text in variables.items()}}


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "unisono", "run", *arguments],
        env=user_environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "program.py").write_text(PROGRAM)
    return str(tmp_path / "program.py")


def read_by(ended: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert ended.returncode == 0, ended.stderr
    (line,) = (line for line in ended.stdout.splitlines() if "read {" in line)
    found: dict[str, Any] = json.loads(line.partition("read ")[2])
    return found


def variables_of_all(without: str) -> dict[str, str]:
    """Every setting by its variable; `insecure` contradicts `tls` and QUIC links."""
    excluded = {without, *(("links",) if without == "tls" else ())}
    settings = {name: str(value) for name, value in OTHER.items() if name not in excluded}
    return {**settings, **{name: values[0] for name, values in PLACES.items()}}


def options_of_all() -> list[str]:
    """Every setting as an option: its own option, or --env."""
    own = [word for name, values in PLACES.items() for word in (f"--{name}", values[1])]
    return own + [
        word for name, value in DEFAULTS.items() for word in ("--env", f"UNISONO_{name.upper()}={value}")
    ]


def test_without_options_and_variables_a_rank_reads_the_defaults(program: str) -> None:
    read = read_by(run(program))
    fresh = dataclasses.asdict(Network())
    assert {name: read[name] for name in DEFAULTS} == DEFAULTS
    assert {name: read[name] for name in PLACES} == {name: fresh[name] for name in PLACES}


@pytest.mark.parametrize("without", ["insecure", "tls"])
def test_a_variable_wins_over_the_default_and_an_option_over_both(program: str, without: str) -> None:
    variables = variables_of_all(without)
    by_variable = read_by(run(program, **variables))
    wanted = {name: OTHER[name] if name in variables else DEFAULTS[name] for name in OTHER}
    assert {name: by_variable[name] for name in OTHER} == wanted
    assert {name: by_variable[name] for name in PLACES} == {name: PLACES[name][0] for name in PLACES}

    by_option = read_by(run(*options_of_all(), program, **variables))
    assert {name: by_option[name] for name in DEFAULTS} == DEFAULTS
    assert {name: by_option[name] for name in PLACES} == {name: PLACES[name][1] for name in PLACES}


def test_the_switch_of_the_command_line_wins_over_its_variable(program: str) -> None:
    assert read_by(run("--insecure", program, insecure="0"))["insecure"] is True


OPTIONS = {
    "options": ["--backend", "gloo", "--address", "127.0.0.1", "--advertise", "h:2", "--insecure"],
    "--env": [
        word
        for name, value in {
            "BACKEND": "gloo",
            "ADDRESS": "127.0.0.1",
            "ADVERTISE": "h:2",
            "INSECURE": "1",
        }.items()
        for word in ("--env", f"UNISONO_{name}={value}")
    ],
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_launcher_in_a_rank_reads_the_users_settings_not_its_parents(
    program: str, options: list[str]
) -> None:
    read = read_by(run(*options, program, "nested"))
    fresh = dataclasses.asdict(Network())
    assert {name: read[name] for name in PLACES} == {name: fresh[name] for name in PLACES}
    assert read["insecure"] is False
    variables = {name: values[0] for name, values in PLACES.items()}
    read = read_by(run(*options, program, "nested", **variables, insecure="0"))
    assert {name: read[name] for name in PLACES} == variables
    assert read["insecure"] is False


def test_what_a_rank_sets_for_a_launcher_counts_as_the_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, text in environment({"UNISONO_BACKEND": "gloo"}, {"OMP_NUM_THREADS": "1"}).items():
        monkeypatch.setenv(name, text)
    assert network(given()).backend == "native"
    monkeypatch.setenv("UNISONO_BACKEND", "quic")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert network(given()).backend == "quic"
    assert environment({}, {"OMP_NUM_THREADS": "1"})["OMP_NUM_THREADS"] == "2"


def test_no_variable_and_no_option_changes_a_ranks_identity(program: str) -> None:
    lies = {"rank": "5", "size": "9", "local_rank": "3", "local_size": "4", "join": "/nowhere"}
    wanted = {"RANK": "0", "SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1", "join": None}
    read = read_by(run(program, **lies))
    assert {name: read[name] for name in wanted} == wanted
    options = [
        word
        for name, text in lies.items()
        if name != "join"
        for word in ("--env", f"UNISONO_{name.upper()}={text}")
    ]
    read = read_by(run(*options, program))
    assert {name: read[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("options", "backend"),
    [([], "iroh"), (["--backend", "native"], "native"), (["--env", "UNISONO_BACKEND=native"], "native")],
)
def test_ranks_work_by_the_backend_that_was_asked_for(
    tmp_path: Path, options: list[str], backend: str
) -> None:
    path = tmp_path / "program.py"
    path.write_text(
        "import unisono as uni\n"
        "with uni.init() as world:\n"
        "    print(world.backend.capabilities.name, world.all_reduce(world.rank + 1), flush=True)\n"
    )
    ended = run("-n", "2", *options, str(path), backend="iroh")
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == [f"[{rank}] {backend} 3" for rank in range(2)]


def test_an_argument_wins_over_option_and_variable(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(
        "import unisono as uni\n"
        "with uni.init(backend='native', config=uni.Config(flush_s=3.5)) as world:\n"
        "    print(world.backend.capabilities.name, flush=True)\n"
    )
    ended = run(
        "-n", "2", "--backend", "gloo", "--env", "UNISONO_FLUSH_S=2", str(path), backend="quic", flush_s="1"
    )
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["[0] native", "[1] native"]
    assert Config(flush_s=3.5).flush_s == 3.5


SPAWN = """
import unisono as uni

def name(world):
    return world.backend.capabilities.name

if __name__ == "__main__":
    print(uni.spawn(name, 2))
"""


def test_spawn_is_native_unless_its_argument_says_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(SPAWN)
    # Its ranks are on this host, so an address for other hosts does not apply.
    environ = user_environment(backend="gloo", address="203.0.113.1:4711")
    ended = subprocess.run(
        [sys.executable, str(path)], env=environ, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert ended.stdout == "['native', 'native']\n", ended.stderr


def test_options_that_contradict_each_other_are_refused() -> None:
    assert as_options({"INSECURE": "1", "BACKEND": None}, {"UNISONO_INSECURE": "yes"}) == {
        "UNISONO_RUN_INSECURE": "1"
    }
    with pytest.raises(UsageError, match="--env UNISONO_BACKEND=quic contradicts --backend"):
        as_options({"BACKEND": "gloo"}, {"UNISONO_BACKEND": "quic"})


def test_a_ticket_is_the_users_only_outside_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_JOIN", "/file")
    monkeypatch.delenv("UNISONO_RANK", raising=False)
    assert network(given()).join == "/file"
    assert "UNISONO_JOIN" not in environment({})
    monkeypatch.setenv("UNISONO_RANK", "0")
    assert network(given()).join is None


def test_a_backend_without_processes_is_refused_by_the_name_that_was_used(program: str) -> None:
    assert "UNISONO_BACKEND=local; allowed" in run(program, backend="local").stderr
    assert "--backend local; allowed" in run("--backend", "local", program).stderr
