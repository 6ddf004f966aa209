"""What no honest agent sends: hostile names, and frames made of noise. Errors only, and others are served."""

from __future__ import annotations

import random
import threading

import msgspec
import pytest
from tests.fuzz.rpc_frames import corpus, mutated

import unisono as uni
from unisono.rpc import Agent
from unisono.rpc.frames import Ask, decode, encode
from unisono.rpc.registry import Registry

NAMES = 100_000
FRAMES = 20_000


def hostile_names(seed: int, count: int):
    """Attributes, paths, modules, code, dunders, and noise."""
    draw = random.Random(seed)
    words = [
        "os",
        "system",
        "echo",
        "eval",
        "import",
        "builtins",
        "class",
        "init",
        "globals",
        "..",
        "/",
        "self",
        "\0",
    ]
    shapes = ["{}", "__{}__", "{}.{}", "echo.{}", "echo.__{}__", "{}({})", " {}", "{}\n", "ECHO{}", "../{}"]
    for _ in range(count):
        if draw.random() < 0.5:
            shape = draw.choice(shapes)
            yield shape.format(*(draw.choice(words) for _ in range(shape.count("{}"))))
        else:
            yield "".join(chr(draw.choice([draw.randrange(128), draw.randrange(0xD7FF)])) for _ in range(9))


def test_hostile_names_find_nothing():
    registry = Registry()
    registry.add("echo", lambda: None)
    for name in hostile_names(1, NAMES):
        assert name == "echo" or registry.find(name) is None


def test_hostile_names_are_answered_with_an_error():
    (comm,) = uni.local(1)
    with comm:
        agent = Agent(comm)
        agent.register("echo", lambda: "echo")
        called = [name for name in hostile_names(2, 2000) if name != "echo"]
        works = [agent.start(0, name) for name in called]
        for work in works:
            with pytest.raises(uni.NotExposed):
                work.wait()
        assert agent.call(0, "echo") == "echo"


def test_frames_of_noise_are_errors_only():
    """Straight into an agent that serves: nothing raises, and the calls of others go on."""
    a, b, c = uni.local(3)
    with a, b, c:
        agents = [Agent(a), Agent(b)]
        ran = threading.Event()
        for agent in agents:
            agent.register("echo", lambda *args, **kwargs: ran.set() or [list(args), kwargs])
        assert agents[0].call(1, "echo", 1) == [[1], {}]
        draw = random.Random(7)
        seeds = corpus()
        for _ in range(FRAMES):
            agents[1]._hearing.on_frame(2, mutated(draw, seeds))
        assert agents[0].call(1, "echo", 2) == [[2], {}]
        assert agents[1].call(0, "echo", 3) == [[3], {}]


def test_the_frames_of_the_corpus_are_sound():
    for data in corpus():
        assert encode(decode(data)) == data


def test_a_frame_that_is_none_is_a_protocol_error():
    for data in (b"", b"\xc1", b"\x90", msgspec.msgpack.encode([99, 1]), encode(Ask(1, "f", None, []))[:-1]):
        with pytest.raises(uni.ProtocolError):
            decode(data)
    with pytest.raises(uni.ProtocolError):
        decode(msgspec.msgpack.encode([0, 1, "f", None, [msgspec.msgpack.Ext(5, b"x")]]))
