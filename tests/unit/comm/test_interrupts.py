"""Ctrl-C and signals end blocking verbs."""

from __future__ import annotations

import inspect
import signal
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from tests.support.bounds import CTRL_C_WITHIN_S
from tests.support.failing_ranks import (
    ProgramError,
    close_all,
    metronome,  # noqa: F401
)
from tests.support.metronome import Metronome
from tests.support.ranks import PATIENCE_S

import unisono as uni

# -- Ctrl-C -----------------------------------------------------------------------------------------------


INTERRUPTED = """
import signal, sys, threading, time
import numpy as np
import unisono as uni

VERBS = {
    "recv": lambda c: c.recv(np.empty(3), 1),
    "recv from ANY": lambda c: c.recv_bytes(),
    "send": lambda c: c.send(np.ones(100_000), 1),
    "sendrecv": lambda c: c.sendrecv(np.ones(100_000), 1, np.empty(3), 1),
    "probe": lambda c: c.probe(1),
    "barrier": lambda c: c.barrier(),
    "all_reduce": lambda c: c.all_reduce(np.ones(100_000)),
    "split": lambda c: c.split(0),
    "scatter_v": lambda c: c.scatter_v(None, 1),
    "broadcast_object": lambda c: c.broadcast_object(None, 1),
    "with a timeout": lambda c: c.barrier(timeout=60),
    "wait": lambda c: c.start.all_reduce(1).wait(),
}
main = threading.main_thread().ident


def is_blocked():
    frame = sys._current_frames()[main]
    while frame is not None:
        if frame.f_code.co_name == "block":
            return True
        frame = frame.f_back
    return False


def interrupt(when):
    while not is_blocked():
        time.sleep(0.001)
    when.append(time.monotonic())
    signal.pthread_kill(main, signal.SIGINT)


for verb, call in VERBS.items():
    worlds, when = uni.local(2), []
    thread = threading.Thread(target=interrupt, args=(when,))
    thread.start()
    work = None
    try:
        with worlds[0]:
            call(worlds[0])
        print(f"{verb}: ended well")
    except KeyboardInterrupt:
        print(f"{verb}: {metronome.fair_s(when[0], time.monotonic()):.3f}")
    thread.join()
    try:
        worlds[1].barrier()
    except uni.PeerAborted as error:
        assert error.rank == 0, error
    worlds[1].close()
"""
HAMMERED = """
import random, signal, threading, time
import numpy as np
import unisono as uni

main = threading.main_thread().ident
rng = random.Random(5)

for turn in range(60):
    worlds = uni.local(2)
    ready, when = threading.Event(), []

    def echo(comm):
        try:
            with comm:
                while True:
                    comm.all_reduce(np.ones(50))
                    comm.sendrecv(np.ones(5), 0, np.empty(5), 0)
        except uni.UnisonoError:
            pass

    def interrupt(pause):
        ready.wait()
        time.sleep(pause)
        when.append(time.monotonic())
        signal.pthread_kill(main, signal.SIGINT)

    threads = [
        threading.Thread(target=echo, args=(worlds[1],)),
        threading.Thread(target=interrupt, args=(rng.random() * 0.01,)),
    ]
    for thread in threads:
        thread.start()
    try:
        with worlds[0]:
            ready.set()
            while True:
                worlds[0].all_reduce(np.ones(50))
                worlds[0].sendrecv(np.ones(5), 1, np.empty(5), 1)
    except KeyboardInterrupt:
        print(f"turn {turn}: {metronome.fair_s(when[0], time.monotonic()):.3f}")
    worlds[0].close()
    for thread in threads:
        thread.join()
"""


def run_script(source: str) -> list[str]:
    rhythm = f"import itertools, threading, time\n{inspect.getsource(Metronome)}\nmetronome = Metronome()\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", rhythm + source],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert not done.stderr, done.stderr
    return done.stdout.splitlines()


def test_ctrl_c_ends_every_blocking_verb_at_once() -> None:
    lines = run_script(INTERRUPTED)
    assert len(lines) == 12, lines
    for line in lines:
        verb, _, took = line.rpartition(": ")
        assert float(took) < CTRL_C_WITHIN_S, f"{verb} took {took} s to end by Ctrl-C"


def test_ctrl_c_in_the_midst_of_the_work_ends_it_too() -> None:
    """Wherever in our own code the signal arrives: KeyboardInterrupt is raised, and nothing hangs later."""
    lines = run_script(HAMMERED)
    assert len(lines) == 60, lines
    for line in lines:
        assert float(line.rpartition(": ")[2]) < CTRL_C_WITHIN_S, line


def test_a_signal_in_a_wait_leaves_the_receive_withdrawn() -> None:
    """In this process: a signal handler raises, as for Ctrl-C, while the main thread waits."""
    worlds = uni.local(2)
    buffer = np.zeros(2)

    def handler(*_: Any) -> None:
        raise ProgramError("the handler's own")

    previous = signal.signal(signal.SIGUSR1, handler)
    timer = threading.Timer(0.05, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    timer.start()
    try:
        work = worlds[0].start.recv(buffer, 1)
        with pytest.raises(ProgramError):
            work.wait(PATIENCE_S)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, previous)
    assert not work.done()  # a started work goes on
    worlds[1].send(np.array([1.0, 2.0]), 0)
    work.wait(PATIENCE_S)
    assert buffer.tolist() == [1, 2]
    close_all(worlds)
