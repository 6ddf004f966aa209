"""Variables that ranks get unless the user has set them; and `uni.spawn` sets no time limit."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import unisono as uni
from unisono.launcher.defaults import cores, rank_defaults
from unisono.launcher.spawn import spawn

PATIENCE_S = 60.0
NAMES = ("PYTHONFAULTHANDLER", "OMP_NUM_THREADS")
SHOW = f"import os; print(*[os.environ.get(name) for name in {NAMES!r}])"


def run(*arguments: str, **variables: str) -> tuple[int, str, str]:
    ours = {name: text for name, text in os.environ.items() if name not in NAMES}
    ended = subprocess.run(
        [sys.executable, "-m", "unisono", "run", *arguments],
        env={**ours, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    return ended.returncode, ended.stdout, ended.stderr


@pytest.fixture
def show(tmp_path: Path) -> str:
    (tmp_path / "show.py").write_text(SHOW)
    return str(tmp_path / "show.py")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_the_cores_and_that_is_logged_once(show: str, ranks: int) -> None:
    code, out, err = run("-n", str(ranks), show)
    share = max(1, cores() // ranks)
    assert code == 0
    assert sorted(out.splitlines()) == [f"[{rank}] 1 {share}" for rank in range(ranks)]
    assert err.count(f"OMP_NUM_THREADS={share} for each of {ranks} ranks") == (ranks > 1)


def test_variables_that_the_user_has_set_stay_and_nothing_is_logged(show: str) -> None:
    code, out, err = run("-n", "2", show, OMP_NUM_THREADS="7", PYTHONFAULTHANDLER="")
    assert (code, sorted(out.splitlines()), err) == (0, ["[0]  7", "[1]  7"], "")
    code, out, err = run("-n", "1", "--env", "OMP_NUM_THREADS=5", show, OMP_NUM_THREADS="7")
    assert (code, out, err) == (0, "[0] 1 5\n", "")


def test_a_launcher_in_a_rank_does_not_take_our_number_for_the_users(show: str, tmp_path: Path) -> None:
    (tmp_path / "outer.py").write_text(
        "import os, subprocess, sys\n"
        "if os.environ['UNISONO_RANK'] == '0':\n"
        f"    subprocess.run([sys.executable, '-m', 'unisono', 'run', {show!r}])\n"
    )
    code, out, _ = run("-n", str(2 * cores()), str(tmp_path / "outer.py"))
    assert code == 0
    assert out.split("] ", 1)[1] == f"[0] 1 {cores()}\n"


def test_a_crash_prints_its_stack(tmp_path: Path) -> None:
    (tmp_path / "crash.py").write_text(
        "import faulthandler\ndef deep():\n    faulthandler._sigsegv()\ndeep()\n"
    )
    code, _, err = run("-n", "1", str(tmp_path / "crash.py"))
    assert code == 139
    last = err[err.index("unisono run: rank 0 failed first (killed by SIGSEGV)") :]
    assert "crash.py" in last
    assert "line 3 in deep" in last


def variables(world: uni.Communicator) -> list[str | None]:
    return [os.environ.get(name) for name in NAMES]


def test_spawned_ranks_get_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    assert uni.spawn(variables, 2) == [list(rank_defaults(2).values())] * 2
    assert uni.spawn(variables, 2, env={"OMP_NUM_THREADS": "9"}) == [["1", "9"]] * 2


def test_spawn_has_no_limit_unless_it_is_given() -> None:
    for fn in (uni.spawn, spawn):
        assert inspect.signature(fn).parameters["timeout"].default is None
