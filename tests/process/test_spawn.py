"""uni.spawn without the engine: results, errors, ends, and no process left behind."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.paths import SUPPORT

from unisono.bootstrap.descriptors import limit, need
from unisono.bootstrap.launch_info import LaunchInfo
from unisono.errors import RendezvousError
from unisono.launcher.spawn import spawn

pytestmark = pytest.mark.more

PROGRAM = SUPPORT / "launch_program.py"
PATIENCE_S = 60.0


def run(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(PROGRAM), *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: list[int], within_s: float) -> None:
    descriptors = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            descriptors.append(os.pidfd_open(pid))
    import select

    deadline = time.monotonic() + within_s
    for descriptor in descriptors:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        os.close(descriptor)
        assert ready, f"of {pids} some live on"


def test_results_are_ordered_by_rank() -> None:
    assert run("results")["value"] == [[0, 499502.0], [1, 499502.0], [2, 499502.0]]


def test_spawned_ranks_find_each_other() -> None:
    assert run("meet")["value"] == [[rank, 4.0] for rank in range(4)]


def test_dataclasses_of_the_main_file_can_be_sent() -> None:
    assert run("dataclass")["value"] == [["Point", 5, [0, 0, 0]], ["Point", 6, [0, 1, 2]]]


def test_arguments_and_results_may_be_longer_than_any_pipe() -> None:
    assert run("big")["value"] == [2_999_999, 3_000_001]


def test_a_rank_knows_its_identity_and_settings_but_not_the_ticket() -> None:
    said = run("environment", "--flag")["value"]
    for rank, found in enumerate(said):
        assert found["main"] == "__mp_main__"
        assert found["eager"] == 77
        assert found["argv"] == ["environment", "--flag"]
        assert found["env"] == {
            "UNISONO_RANK": str(rank),
            "UNISONO_SIZE": "2",
            "UNISONO_LOCAL_RANK": str(rank),
            "UNISONO_LOCAL_SIZE": "2",
            "UNISONO_RUN_SET": found["env"]["UNISONO_RUN_SET"],
            "MINE": "1",
        }


def test_functions_that_a_new_process_cannot_find_are_refused_at_once() -> None:
    texts = run("closure")["value"]
    assert len(texts) == 3
    assert "defined inside a function" in texts[0]
    assert "lambda" in texts[1]
    assert "a function with a name" in texts[2]


def test_an_argument_that_cannot_be_sent_is_refused_before_anything_starts() -> None:
    said = run("argument")
    assert said["error"] == "UsageError"
    assert "argument 1 is _thread.lock" in said["text"]
    assert said["seconds"] < 1


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("key", "KeyError", "('no', 7)"),
        ("ours", "PeerLost", "rank 3 is gone: silent"),
        ("odd", "RemoteError", "rank 1 raised Odd: hm"),
        ("exit", "RemoteError", "rank 1 raised SystemExit: 3"),
        ("kill", "PeerLost", "ended without a result: killed by SIGKILL"),
    ],
)
def test_the_first_failure_is_raised_here(kind: str, error: str, words: str) -> None:
    said = run("fail", kind)
    assert said["error"] == error
    assert words in said["text"]
    assert said["seconds"] < PATIENCE_S / 2
    if kind == "kill":
        assert said["ranks"] == [1]
    else:
        assert said["notes"][0].startswith("On rank 1:\nTraceback")
        assert "launch_program.py" in said["notes"][0]
    if error == "RemoteError":
        assert said["rank"] == 1
        assert said["type_name"] in ("Odd", "SystemExit")


def test_a_rank_that_only_reports_a_failure_is_not_blamed() -> None:
    said = run("blame")
    assert (said["error"], said["text"]) == ("ValueError", "the root of it")


def test_a_result_that_cannot_be_sent_is_an_error_that_says_so() -> None:
    said = run("opaque")
    assert said["error"] == "UsageError"
    assert "returned a value that cannot be sent to the parent" in said["text"]


def test_a_timeout_ends_all_and_names_the_missing_ranks() -> None:
    said = run("hang")
    assert said["error"] == "DeadlineExceeded"
    assert said["waiting_on"] == [1, 2]
    assert "ranks 1, 2 of 3 had not ended after" in said["text"]
    assert said["seconds"] < 2 * (5.0 + 1.0)  # the timeout, and a second for SIGTERM, which the ranks ignore


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_rank_outlives_the_process_that_spawned_it(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), "orphans"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        assert all(is_alive(pid) for pid in pids)
        parent.send_signal(number)
        parent.wait(PATIENCE_S)
    wait_until_gone(pids, within_s=2 * 2.0)
    assert not any(is_alive(pid) for pid in pids)


def test_a_main_file_without_a_guard_is_refused_with_the_next_step(tmp_path: Path) -> None:
    program = tmp_path / "unguarded.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(PROGRAM.parent)!r})\n"
        "import launch_program\n"
        "launch_program.start(launch_program.add, 2, [], 1)\n"
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert 'put the call under `if __name__ == "__main__":`' in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["unguarded.py"]


def test_a_module_that_was_run_by_name_works_too(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "helper.py").write_text("WORD = 'relative'\n")
    (package / "program.py").write_text(
        f"import sys; sys.path.insert(0, {str(PROGRAM.parent)!r})\n"
        "from launch_program import start\n"
        "from .helper import WORD\n"
        "def speak(info):\n    return WORD, info.rank\n"
        "if __name__ == '__main__':\n    print(start(speak, 2))\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "package.program"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.stdout == "[('relative', 0), ('relative', 1)]\n", done.stderr


def test_functions_typed_at_a_prompt_are_refused() -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(PROGRAM.parent)!r})\n"
        "import launch_program\n"
        "def typed(info): ...\n"
        "launch_program.start(typed, 2)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert "typed at a prompt" in done.stderr


@pytest.mark.parametrize(
    ("top", "guarded", "is_module"),
    [
        ("", "def work(comm):\n        return 2", False),
        ("def work(comm):\n    return 1", "def work(comm):\n        return 2", True),  # another function
    ],
)
def test_a_function_under_the_guard_is_refused_with_a_reason(
    tmp_path: Path, top: str, guarded: str, is_module: bool
) -> None:
    (tmp_path / "guarded.py").write_text(
        "import unisono as uni\n"
        f"{top}\n"
        "if __name__ == '__main__':\n"
        f"    {guarded}\n"
        "    try:\n"
        "        print(uni.spawn(work, 2))\n"
        "    except uni.UsageError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, *(["-m", "guarded"] if is_module else ["guarded.py"])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert "work' in a new process: " in done.stdout
    assert 'what is defined under `if __name__ == "__main__":` does not exist there' in done.stdout
    assert "Next: define it at the top of a module, and pass what it uses as arguments" in done.stdout


def test_no_rank_waits_for_a_spawned_rank_that_ended_before_it_joined(tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text(
        "import os, time\n"
        "import unisono as uni\n"
        "if os.environ.get('UNISONO_RANK') == '1':\n"
        "    os._exit(0)\n"
        "def wait(comm): ...\n"
        "if __name__ == '__main__':\n"
        "    began = time.monotonic()\n"
        "    try:\n"
        "        uni.spawn(wait, 3, timeout=50)\n"
        "    except uni.PeerLost as error:\n"
        "        print(time.monotonic() - began < 25, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "early.py"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout.startswith("True rank 1 (pid "), done.stderr
    assert "ended without a result: exit code 0" in done.stdout


def test_spawn_with_few_descriptors_starts_nothing_and_says_why() -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    for free in (0, 4, 20):
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + free, before[1]))
        try:
            with pytest.raises(
                RendezvousError, match=r"spawn has too few file descriptors: it needs 24, and has"
            ):
                spawn(rank_of, 4, (), enter=enter_alone, backend="", version="1")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def enter_alone(info: LaunchInfo, backend: str, config: object, timeout: float) -> Iterator[LaunchInfo]:
    yield info


def rank_of(info: LaunchInfo) -> int:
    return info.rank


def no_descriptor(comm: Any) -> None:
    raise OSError(errno.EMFILE, "of my own")


def test_a_rank_that_ran_out_of_descriptors_is_no_failure_to_start() -> None:
    with pytest.raises(OSError, match="of my own") as caught:
        spawn(no_descriptor, 1, (), enter=enter_alone, backend="", version="1")
    assert caught.value.errno == errno.EMFILE


def test_a_process_without_a_limit_has_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: unlimited)
    with need(1000, "this test"):
        assert limit() > 1 << 40


def test_a_test_can_spawn_its_own_functions() -> None:
    assert spawn(rank_of, 2, (), enter=enter_alone, backend="", version="1") == [0, 1]
