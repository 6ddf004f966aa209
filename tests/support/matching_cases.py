"""One table of cases for both matchers: `unisono/messaging/matching.py` and `native/messaging/matcher.hpp`.

A case is a list of steps, `(verb, *words)`, and the results of those steps that search. Receives and messages
have names; (source, context, tag) follow in this order.
"""

from __future__ import annotations

import random
from typing import Any, TypeAlias

from unisono.core.envelope import ANY, TAG_MAX, Envelope, Tags
from unisono.core.request import Request
from unisono.messaging.matching import Matcher, Posted, UnexpectedMessage

__all__ = ["CASES", "Step", "answers_in_python", "random_steps", "text_of"]

Step: TypeAlias = tuple[Any, ...]

COLLECTIVE = Tags.collective(3, 0)

# Name -> steps and results: `receive` gives the first message that would match, `offer` the first receive,
# `state` all posted receives in order of posting.
CASES: dict[str, tuple[list[Step], list[str]]] = {
    "nothing is there": ([("receive", ANY, 0, ANY), ("offer", 1, 0, 5), ("state",)], ["-", "-", "empty"]),
    "the receive that was posted first gets the message": (
        [
            *[("post", "wild", ANY, 0, 5), ("post", "exact", 1, 0, 5), ("post", "any_tag", 1, 0, ANY)],
            *[("offer", 1, 0, 5), ("withdraw", "wild"), ("offer", 1, 0, 5), ("withdraw", "exact")],
            *[("offer", 1, 0, 5), ("withdraw", "any_tag"), ("offer", 1, 0, 5), ("state",)],
        ],
        ["wild", "exact", "any_tag", "-", "empty"],
    ),
    "the message that came first is received first": (
        [
            *[("queue", "a", 1, 0, 5), ("queue", "b", 2, 0, 5), ("queue", "c", 1, 0, 5)],
            *[("receive", 1, 0, 5), ("receive", ANY, 0, 5), ("receive", 2, 0, ANY), ("take", "a")],
            *[("receive", 1, 0, 5), ("receive", ANY, 0, ANY), ("take", "b"), ("receive", ANY, 0, 5)],
        ],
        ["a", "a", "b", "c", "b", "c"],
    ),
    "contexts are apart": (
        [("post", "a", 1, 0, 5), ("queue", "m", 1, 1, 6), ("offer", 1, 1, 5), ("receive", ANY, 0, ANY)],
        ["-", "-"],
    ),
    "a wildcard matches the tags of users only": (
        [
            *[("post", "w", ANY, 0, ANY), ("offer", 1, 0, COLLECTIVE), ("offer", 1, 0, TAG_MAX + 1)],
            *[("offer", 1, 0, TAG_MAX), ("queue", "m", 1, 0, COLLECTIVE), ("receive", 1, 0, ANY)],
            *[("receive", ANY, 0, COLLECTIVE)],
        ],
        ["-", "-", "w", "-", "m"],
    ),
    "a receive that is posted again has its old place": (
        [
            *[("post", "a", 1, 0, 5), ("post", "b", 1, 0, 5), ("post", "c", ANY, 0, 5), ("withdraw", "a")],
            *[("offer", 1, 0, 5), ("repost", "a"), ("offer", 1, 0, 5), ("withdraw", "c"), ("state",)],
            *[("post", "d", ANY, 0, 5), ("repost", "c"), ("offer", 2, 0, 5), ("state",)],
        ],
        ["b", "a", "posted a b", "c", "posted a b c d"],
    ),
}


def random_steps(seed: int, count: int) -> list[Step]:
    """A long case without results, with few sources and tags, so that messages match and tables grow."""
    rng, steps = random.Random(seed), list[Step]()
    posted: list[str] = []
    withdrawn: list[str] = []
    queued: list[str] = []
    for number in range(count):
        source, context = rng.choice((0, 1, 2)), rng.choice((0, 0, 0, 1))
        tag = rng.choice((0, 1, TAG_MAX, COLLECTIVE, COLLECTIVE + rng.randrange(200)))
        wild = (rng.choice((source, source, ANY)), context, rng.choice((tag, tag, ANY)))
        verb = rng.choice(
            ("post", "post", "queue", "queue", "withdraw", "repost", "take", "receive", "offer")
        )
        if verb == "post":
            steps.append((verb, f"r{number}", *wild))
            posted.append(f"r{number}")
        elif verb == "queue":
            steps.append((verb, f"m{number}", source, context, tag))
            queued.append(f"m{number}")
        elif verb == "receive":
            steps.append((verb, *wild))
        elif verb == "offer":
            steps.append((verb, source, context, tag))
        elif (names := {"withdraw": posted, "repost": withdrawn, "take": queued}[verb]) and names:
            name = names.pop(rng.randrange(len(names)))
            steps.append((verb, name))
            if verb != "take":
                (withdrawn if verb == "withdraw" else posted).append(name)
        steps += [("offer", source, context, tag), ("receive", *wild)]
    return [*steps, ("state",)]


def text_of(steps: list[Step]) -> str:
    """The steps as tests/native/matcher_test.cpp reads them."""
    return "".join(" ".join("-1" if word is ANY else str(word) for word in step) + "\n" for step in steps)


def answers_in_python(steps: list[Step]) -> list[str]:
    """The results of the Python matcher."""
    matcher: Matcher[str] = Matcher()
    receives: dict[str, Posted] = {}
    messages: dict[str, UnexpectedMessage[str]] = {}
    names: dict[Posted, str] = {}
    answers = []
    for verb, *words in steps:
        match verb:
            case "post":
                name, source, context, tag = words
                receives[name] = Posted(source, context, tag, Request(source))
                names[receives[name]] = name
                matcher.post(receives[name])
            case "queue":
                name, source, context, tag = words
                messages[name] = UnexpectedMessage(Envelope(source, context, tag, 0), name)
                matcher.queue(messages[name])
            case "withdraw":
                assert matcher.withdraw(receives[words[0]])
            case "repost":
                matcher.post(receives[words[0]])
            case "take":
                assert matcher.take(messages[words[0]])
            case "receive":
                source, context, tag = words
                found = matcher.find_unexpected(Posted(source, context, tag, Request(source)))
                answers.append("-" if found is None else found.payload)
            case "offer":
                posted = matcher.find_posted(Envelope(*words, 0))
                answers.append("-" if posted is None else names[posted])
            case "state":
                in_order = sorted(matcher.all_posted(), key=lambda p: p.number)
                state = "empty" if matcher.is_empty() else "posted"
                answers.append(" ".join([state, *(names[p] for p in in_order)]))
    return answers
