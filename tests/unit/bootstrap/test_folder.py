"""Folders for sockets: a living process keeps its own; a new process removes those of dead processes."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import warnings
from pathlib import Path

import pytest
from tests.support.launched import PATIENCE_S, gone, launched, run

from unisono.bootstrap.folder import enter_socket_folder, own_folder, remove_dead_folders, socket_folder

# Ranks that join, wait for a line, and then use links that they have not used before.
WAIT = """
import os, sys
import numpy as np
import unisono as uni
with uni.init(timeout=100) as world:
    print("here", os.getpid(), flush=True)
    if len(sys.argv) > 1:
        open(sys.argv[1] + str(world.rank)).read()
    x = np.arange(1000.0) * (world.rank + 1)
    world.all_reduce(x)
    assert (x == np.arange(1000.0) * 6).all()
    assert world.all_gather_object(world.rank) == [0, 1, 2]
"""


def folders(parent: Path) -> set[str]:
    return {path.name for path in own_folder(str(parent)).iterdir()}


def test_a_later_job_removes_what_a_killed_one_has_left_and_nothing_that_lives(tmp_path: Path) -> None:
    program, env = str(tmp_path / "program.py"), {"TMPDIR": str(tmp_path)}
    Path(program).write_text(WAIT)
    for name in ("living", "killed"):
        for rank in range(3):
            os.mkfifo(tmp_path / f"{name}{rank}")
    with launched("-n", "3", program, str(tmp_path / "living"), env=env) as living:
        living.pids(3)
        mine = folders(tmp_path)
        assert len(mine) == 1
        with launched("-n", "3", program, str(tmp_path / "killed"), env=env) as killed:
            pids = killed.pids(3)
            killed.process.kill()
            killed.process.wait(PATIENCE_S)
            assert gone(pids, 2 * 0.5)
        left = folders(tmp_path) - mine
        assert len(left) == 1  # no process was left to remove it
        assert len(list((own_folder(str(tmp_path)) / left.pop()).iterdir())) == 3

        assert run("-n", "3", program, env=env)[0] == 0
        assert folders(tmp_path) == mine

        for rank in range(3):
            (tmp_path / f"living{rank}").write_text("go")  # blocks until the rank reads
        assert living.end()[0] == 0
    assert folders(tmp_path) == set()


def test_a_process_that_enters_keeps_its_folder_while_others_clean_up(tmp_path: Path) -> None:
    """Locks belong to open descriptors, so threads race here as processes do."""
    stop, faults = threading.Event(), []

    def live(token: bytes, name: str) -> None:
        for turn in range(150):
            path, leave = enter_socket_folder(str(tmp_path), token)
            file = path / f"{name}-{turn}"
            try:
                file.touch()
                if path != socket_folder(str(tmp_path), token) or not file.exists():
                    faults.append(f"{file} is gone")
                file.unlink()
            except OSError as error:
                faults.append(f"{file}: {error}")
            leave()

    def clear() -> None:
        while not stop.is_set():
            remove_dead_folders(str(tmp_path))

    clearing = [threading.Thread(target=clear) for _ in range(2)]
    living = [threading.Thread(target=live, args=(bytes([n // 2]) * 32, f"t{n}")) for n in range(4)]
    for thread in (*clearing, *living):
        thread.start()
    for thread in living:
        thread.join(PATIENCE_S)
    stop.set()
    for thread in clearing:
        thread.join(PATIENCE_S)
    assert faults == []
    assert folders(tmp_path) == set()


def test_a_folder_with_an_open_socket_stays_though_no_process_holds_it() -> None:
    with tempfile.TemporaryDirectory() as folder:  # a socket's path is 107 bytes at most, pytest's is longer
        path, leave = enter_socket_folder(folder, bytes(32))
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(path / "r0-0123.sock"))
            leave()
            remove_dead_folders(folder)
            assert path.exists()
        remove_dead_folders(folder)
        assert not path.exists()


def test_a_fork_that_leaves_does_not_take_the_folder_along(tmp_path: Path) -> None:
    path, leave = enter_socket_folder(str(tmp_path), bytes(32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        leave()
        remove_dead_folders(str(tmp_path))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert path.exists()
    remove_dead_folders(str(tmp_path))
    assert path.exists()
    leave()
    assert not path.exists()


def test_notes_of_ends_are_removed_after_a_day(tmp_path: Path) -> None:
    folder = own_folder(str(tmp_path))
    folder.mkdir(mode=0o700)
    old, new = folder / "a.end", folder / "b.end"
    for path in (old, new):
        path.touch()
    yesterday = new.stat().st_mtime - 25 * 3600
    os.utime(old, (yesterday, yesterday))
    remove_dead_folders(str(tmp_path))
    assert list(folder.iterdir()) == [new]


@pytest.mark.parametrize("name", ["0123456789abcdef.ticket", "notes", "0123456789abcdeX"])
def test_only_folders_of_jobs_are_cleared_up(tmp_path: Path, name: str) -> None:
    _, leave = enter_socket_folder(str(tmp_path), bytes(32))
    leave()
    other = own_folder(str(tmp_path)) / name
    other.mkdir()
    target = tmp_path / "target"
    target.mkdir()
    (own_folder(str(tmp_path)) / "fedcba9876543210").symlink_to(target)
    remove_dead_folders(str(tmp_path))
    assert other.exists()
    assert target.exists()
