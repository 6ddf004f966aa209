"""The names that a user finds by dir() and by completion are the public ones."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import unisono as uni
from unisono import errors

MODULES = ("unisono", "unisono.rpc", "unisono.testing", "unisono.simulation", "unisono.train")


@pytest.mark.parametrize("name", MODULES)
def test_dir_shows_what_is_public_and_nothing_else(name: str) -> None:
    module = importlib.import_module(name)
    assert sorted(each for each in dir(module) if not each.startswith("_")) == sorted(module.__all__)
    for each in module.__all__:
        assert getattr(module, each) is not None, each


def test_the_module_of_remote_calls_is_found_in_the_package() -> None:
    assert "rpc" in dir(uni)
    assert uni.rpc.Agent.__name__ == "Agent"
    assert "__version__" in dir(uni)


def test_every_error_that_is_exported_is_raised_somewhere() -> None:
    package = Path(uni.__file__).parent
    code = "".join(path.read_text() for path in package.rglob("*.py") if path.name != "errors.py")
    for name in errors.__all__:
        assert f"{name}(" in code, name


def test_a_communicator_shows_its_verbs_and_itself() -> None:
    """A name that is added here is part of the API, so the documents must mention it too."""
    with uni.local(1)[0] as world:
        shown = {name for name in dir(world) if not name.startswith("_")}
        verbs = {name for name in dir(world.start) if not name.startswith("_")}
    itself = {"rank", "size", "name", "epoch", "backend", "start", "world", "local_rank", "local_size"}
    assert shown - verbs == itself | {"sub", "mesh", "close", "abort"}
    assert verbs - shown == set()
