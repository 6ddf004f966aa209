"""The line of the user in logs and errors, also when a library makes the call for the user."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import unisono as uni
from unisono import _native
from unisono.core import call_site
from unisono.core.work import Work


@pytest.fixture
def comm() -> Iterator[uni.Communicator]:
    (made,) = uni.local(1)
    with made:
        yield made


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The folder of a library whose frames are hidden during the test."""
    monkeypatch.setattr(call_site, "_hidden", call_site._hidden)
    call_site.hide_files("/somewhere/library")
    yield "/somewhere/library/verbs.py"
    monkeypatch.undo()
    call_site.is_users.cache_clear()
    _native.set_user_files(call_site.is_users)


def made_in(filename: str) -> Callable[[Callable[[], Any]], Any]:
    """A function in a given file that calls its argument."""
    scope: dict[str, Any] = {}
    exec(compile("def call(fn):\n    return fn()\n", filename, "exec"), scope)
    call: Callable[[Callable[[], Any]], Any] = scope["call"]
    return call


def started_by(run: Callable[[Callable[[], Any]], Any], comm: uni.Communicator) -> str:
    work: Work[None] = run(comm.start.barrier)
    work.wait()
    code, _ = work._call_site
    assert code is not None
    return code.co_filename


def test_a_call_is_shown_at_the_line_that_called_the_library(comm: uni.Communicator, library: str):
    assert started_by(made_in("/elsewhere/program.py"), comm) == "/elsewhere/program.py"
    assert started_by(made_in(library), comm) == __file__
    assert made_in(library)(lambda: call_site.caller().f_code.co_filename) == __file__
    assert started_by(made_in("/somewhere/library of mine.py"), comm) == "/somewhere/library of mine.py"


def test_a_library_that_was_seen_before_is_hidden_from_now_on(comm: uni.Communicator, library: str):
    assert started_by(made_in("/later/verbs.py"), comm) == "/later/verbs.py"
    call_site.hide_files("/later")
    assert started_by(made_in("/later/verbs.py"), comm) == __file__


def test_a_single_file_is_hidden(comm: uni.Communicator, library: str):
    call_site.hide_files("/single/wrapper.py")
    assert started_by(made_in("/single/wrapper.py"), comm) == __file__
    assert started_by(made_in("/single/verbs.py"), comm) == "/single/verbs.py"


def test_without_a_line_of_the_user_the_innermost_is_kept(comm: uni.Communicator, library: str):
    found: list[str] = []
    call = made_in(library)

    def run() -> None:
        found.append(started_by(call, comm))

    hidden = made_in(library)
    run.__code__ = run.__code__.replace(co_filename=library)
    started = started_by.__code__
    started_by.__code__ = started.replace(co_filename=library)
    try:
        thread = threading.Thread(target=hidden, args=(run,))
        thread.start()
        thread.join()
    finally:
        started_by.__code__ = started
    assert found == [library]


def test_helpers_of_python_are_no_lines_of_the_user():
    assert not call_site.is_users(contextlib.__file__)
    assert not call_site.is_users(threading.__file__)


def test_programs_may_compile_any_number_of_code_objects(comm: uni.Communicator, library: str):
    for number in range(5000):
        made_in(f"/generated/{number}.py")(comm.start.barrier).wait()
    assert started_by(made_in("/generated/0.py"), comm) == "/generated/0.py"
    assert started_by(made_in(library), comm) == __file__
