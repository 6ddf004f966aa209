"""Faults of a program: exceptions, and ranks that exit."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.bounds import REPORTED_WITHIN_S
from tests.support.faults import (
    all_ready,
    each_backend,
    in_world,
    until_lost,
)
from tests.support.processes import PATIENCE_S, Failed, forked

from unisono.comm.communicator import Communicator

pytestmark = pytest.mark.more


@each_backend
def test_an_exception_on_one_rank_reaches_the_others(kind: str) -> None:
    class ProgramError(Exception):
        pass

    def program(comm: Communicator, pipe: Connection) -> Any:
        if comm.rank != 1:
            return until_lost(comm, pipe)
        comm.barrier()
        pipe.send("ready")
        comm.all_reduce(np.ones(2000, np.float32), "max")
        pipe.send(time.monotonic())
        raise ProgramError("spilled coffee")

    with forked(in_world(program), 3, kind=kind) as ranks:
        all_ready(ranks)
        raised_at = ranks.receive(1)
        for rank in (0, 2):
            name, culprit, at, stolen_s = ranks.result(rank)
            assert (name, culprit) == ("PeerAborted", (1,))
            assert at - raised_at - stolen_s < REPORTED_WITHIN_S
        failed = ranks.result(1)
        assert isinstance(failed, Failed)
        assert failed.type_name == "ProgramError"


ENDINGS = {
    "end of script": "",
    "sys.exit": "sys.exit(0)",
    "os._exit": "os._exit(0)",
    "SIGTERM": "os.kill(os.getpid(), 15); time.sleep(60)",
    "Ctrl-C": "os.kill(os.getpid(), 2); time.sleep(60)",
}
SCRIPT = """
import os, sys, time
import numpy as np
import unisono as uni
world = uni.init()
if world.rank == 0:
    world.send(b"hello", 1)
    try:
        world.recv_bytes(1)
    except uni.UnisonoError as error:
        print(type(error).__name__, flush=True)
    world.close()
else:
    world.recv_bytes(0)
    works = [world.start.all_reduce(np.ones(300_000)), world.start.recv_bytes(0, 5)]
    print("pending", flush=True)
    ENDING
"""


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_ends_although_works_are_pending(ending: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "TMPDIR": folder, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        with socket.create_server(("127.0.0.1", 0)) as free:
            env["MASTER_PORT"] = str(free.getsockname()[1])
        text = SCRIPT.replace("ENDING", ENDINGS[ending])
        ranks = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", text],
                env={**env, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            assert ranks[1].stdout is not None
            assert ranks[1].stdout.readline() == "pending\n"
            exited_at = time.monotonic()
            _, errors = ranks[1].communicate(timeout=PATIENCE_S)
            assert time.monotonic() - exited_at < 4 + 4, "two seconds, twice, and a starved machine"
            assert ranks[1].returncode in (0, -15, -2, 130), errors
            assert "Fatal" not in errors
            said, _ = ranks[0].communicate(timeout=PATIENCE_S)
            assert said in ("PeerLost\n", "PeerAborted\n")
        finally:
            for process in ranks:
                process.kill()
                process.communicate()


WAITING_THREAD = """
import os, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import numpy as np
import unisono as uni

def waits():
    try:
        world.recv(np.empty(5), 0, tag=9)
    except (uni.ClosedError, uni.PeerAborted, uni.PeerLost) as error:
        print("thread", type(error).__name__, flush=True)

def executed():
    return ThreadPoolExecutor(1).submit(waits)

def threaded(daemon=False):
    threading.Thread(target=waits, daemon=daemon).start()

world = uni.init()
if world.rank == 1:
    START
    world.send(np.ones(2), 0)
    ENDING
else:
    try:
        world.recv(np.empty(2), 1)  # an abort, in the control lane, may overtake the message
        world.recv(np.empty(2), 1)
    except uni.UnisonoError as error:
        print("other", type(error).__name__, error.cause, flush=True)
"""
LEFT, RAISED = "other PeerLost rank 1 left", "other PeerAborted ValueError: the root of it"
# How the main thread of rank 1 ends, which of its threads waits meanwhile, and what rank 0 gets.
MAIN_ENDS = {
    "raises": ("raise ValueError('the root of it')", "threaded()", "native", RAISED),
    "raises, executor": ("raise ValueError('the root of it')", "executed()", "native", RAISED),
    "raises, daemon": ("raise ValueError('the root of it')", "threaded(daemon=True)", "native", RAISED),
    "ends": ("pass", "threaded()", "native", LEFT),
    "sys.exit(0)": ("sys.exit(0)", "threaded()", "native", LEFT),
    "sys.exit(3)": ("sys.exit(3)", "threaded()", "native", LEFT),
    "Ctrl-C": (
        "os.kill(os.getpid(), 2); time.sleep(60)",
        "threaded()",
        "native",
        "other PeerAborted KeyboardInterrupt",
    ),
    "raises, gloo": ("raise ValueError('the root of it')", "threaded()", "gloo", RAISED),
    "raises, iroh": ("raise ValueError('the root of it')", "threaded()", "iroh", RAISED),
    "raises, mpi": ("raise ValueError('the root of it')", "threaded()", "mpi", RAISED),
    "ends, gloo": ("pass", "executed()", "gloo", LEFT),
    "ends, iroh": ("pass", "executed()", "iroh", LEFT),
}


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(how, marks=() if backend == "native" else pytest.mark.more)  # torch and mpiexec: slow
        for how, (_, _, backend, _) in MAIN_ENDS.items()
    ],
)
def test_the_others_learn_of_a_main_thread_that_ends_while_another_thread_waits(
    how: str, tmp_path: Path
) -> None:
    """Python joins threads before it ends: a thread that waits for rank 0 must not block the goodbye."""
    ending, start, backend, heard = MAIN_ENDS[how]
    path = tmp_path / "program.py"
    path.write_text(WAITING_THREAD.replace("START", start).replace("ENDING", ending))
    command = [sys.executable, "-m", "unisono", "run", "-n", "2", "--grace", "30", "--backend", backend]
    ended = subprocess.run(
        [*command, str(path)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert heard in ended.stdout, (ended.stdout, ended.stderr)
    assert "daemon" in how or "thread " in ended.stdout, (ended.stdout, ended.stderr)
    assert (ended.returncode == 0) == (ending in ("pass", "sys.exit(0)")), ended.stderr
    assert "Fatal" not in ended.stderr


def test_ranks_of_one_process_end_with_its_main_thread() -> None:
    text = """
import threading
import numpy as np
import unisono as uni

def waits(comm):
    try:
        comm.recv(np.empty(2), 1 - comm.rank)
    except uni.UnisonoError as error:
        print(type(error).__name__ + " ", end="", flush=True)  # in one piece: both write at the same time

threads = [threading.Thread(target=waits, args=(comm,)) for comm in uni.local(2)]
for thread in threads:
    thread.start()
ENDING
"""
    for ending, said in (("", {"ClosedError", "PeerLost"}), ("raise ValueError('x')", {"PeerAborted"})):
        command = [sys.executable, "-c", text.replace("ENDING", ending)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        words = ended.stdout.split()
        assert len(words) == 2, ended
        assert set(words) <= said, ended
