"""Matching compared with a simple model: two lists, searched from the front."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.core.dtypes import DTYPES
from unisono.core.envelope import ANY, TAG_MAX, UNTYPED, Envelope, Tags
from unisono.core.request import Request
from unisono.messaging.matching import Matcher, Posted, UnexpectedMessage, refusal

MANY = settings(derandomize=True, deadline=None, database=None, max_examples=400)

# Few sources, contexts and tags, so that patterns and messages match often.
SOURCES = st.integers(0, 1)
CONTEXTS = st.sampled_from([0, 0, 0, 1])
# The lowest and the highest tag of users, and one of collectives.
TAGS = st.sampled_from([0, 0, TAG_MAX, Tags.collective(0, 0)])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("post"), SOURCES | st.just(ANY), CONTEXTS, TAGS | st.just(ANY)),
        st.tuples(st.just("queue"), SOURCES, CONTEXTS, TAGS),
        st.tuples(st.just("withdraw"), st.integers(0, 30)),
        st.tuples(st.just("take"), st.integers(0, 30)),
        st.tuples(st.just("meet"), SOURCES | st.just(ANY), CONTEXTS, TAGS | st.just(ANY)),
        st.tuples(st.just("offer"), SOURCES, CONTEXTS, TAGS),
    ),
    max_size=40,
)


def fits(pattern: tuple, message: tuple) -> bool:
    """The matching rule in its simplest form; both are (source, context, tag)."""
    return (
        pattern[1] == message[1]
        and pattern[0] in (ANY, message[0])
        and (pattern[2] == message[2] or (pattern[2] is ANY and 0 <= message[2] < 2**31))
    )


def queues_of(matcher: Matcher[str]) -> list[object]:
    queues = matcher._contexts.values()
    return [queue for q in queues for queue in (*q.posted_exact.values(), *q.unexpected_exact.values())]


def posted(source, context, tag, **how) -> Posted:
    return Posted(source, context, tag, Request(source), **how)


def arrived(source, context, tag) -> UnexpectedMessage[str]:
    return UnexpectedMessage(Envelope(source, context, tag, 0), "payload")


@MANY
@given(STEPS)
def test_the_matcher_finds_what_a_search_through_lists_finds(steps):
    matcher: Matcher[str] = Matcher()
    receives: list[tuple[Posted, tuple]] = []
    messages: list[tuple[UnexpectedMessage[str], tuple]] = []
    for verb, *words in steps:
        match verb:
            case "post":
                receives.append((posted(*words), tuple(words)))
                matcher.post(receives[-1][0])
            case "queue":
                messages.append((arrived(*words), tuple(words)))
                matcher.queue(messages[-1][0])
            case "withdraw" if receives:
                gone, _ = receives.pop(words[0] % len(receives))
                assert matcher.withdraw(gone)
                assert not matcher.withdraw(gone)
            case "take" if messages:
                taken, _ = messages.pop(words[0] % len(messages))
                assert matcher.take(taken)
                assert not matcher.take(taken)
            case "meet":
                first = next((m for m, what in messages if fits(tuple(words), what)), None)
                assert matcher.find_unexpected(posted(*words)) is first
            case "offer":
                first = next((p for p, pattern in receives if fits(pattern, tuple(words))), None)
                assert matcher.find_posted(arrived(*words).envelope) is first
        for context in (0, 1):
            in_order = [p for p, pattern in receives if pattern[1] == context]
            assert [p for p in matcher.all_posted() if p.context == context] == in_order
            queued = [m for m, what in messages if what[1] == context]
            assert [m for m in matcher.all_unexpected() if m.envelope.context == context] == queued
        assert matcher.is_empty() is (not receives and not messages)
        assert all(queues_of(matcher)), "an empty queue is left behind"
    for receive, _ in receives:
        assert matcher.withdraw(receive)
    for message, _ in messages:
        assert matcher.take(message)
    assert matcher.is_empty()
    assert matcher._contexts == {}


@pytest.mark.parametrize("patterns", list(itertools.permutations([(1, 0, 5), (ANY, 0, 5), (1, 0, ANY)])))
def test_the_receive_that_was_posted_first_gets_the_message(patterns):
    matcher: Matcher[str] = Matcher()
    receives = [posted(*pattern) for pattern in patterns]
    for receive in receives:
        matcher.post(receive)
    for receive in receives:
        assert matcher.find_posted(Envelope(1, 0, 5, 0)) is receive
        matcher.withdraw(receive)


@MANY
@given(SOURCES | st.just(ANY), CONTEXTS, TAGS | st.just(ANY), SOURCES, CONTEXTS, TAGS)
def test_a_pattern_matches_by_the_rule(source, context, tag, sender, its_context, its_tag):
    pattern, message = (source, context, tag), (sender, its_context, its_tag)
    assert posted(*pattern).meets(arrived(*message).envelope) is fits(pattern, message)


@pytest.mark.parametrize(
    "tag", [Tags.CONTROL, Tags.collective(0, 0), Tags.collective(2**40, 15), TAG_MAX + 1, -1]
)
def test_a_wildcard_never_sees_what_users_did_not_send(tag):
    assert not posted(ANY, 0, ANY).meets(Envelope(0, 0, tag, 0))
    assert posted(ANY, 0, tag).meets(Envelope(0, 0, tag, 0))


def test_tags_of_collectives_are_all_different_and_no_users():
    tags = [Tags.collective(sequence, stage) for sequence in range(40) for stage in range(Tags.STAGES)]
    assert len(set(tags)) == len(tags)
    assert not any(Tags.is_users(tag) for tag in [*tags, Tags.CONTROL])
    assert Tags.CONTROL not in tags


FLOAT, DOUBLE, BYTE = (DTYPES[name].code for name in ("float32", "float64", "uint8"))


@pytest.mark.parametrize(
    ("capacity", "wanted", "nbytes", "sent", "words"),
    [
        (8, FLOAT, 8, FLOAT, None),
        (8, FLOAT, 0, FLOAT, None),
        (8, FLOAT, 9, FLOAT, "has 9 bytes, the buffer 8; it stays queued"),
        (0, FLOAT, 1, FLOAT, "has 1 bytes, the buffer 0"),
        (8, FLOAT, 8, DOUBLE, "holds float64, the buffer is float32; it stays queued"),
        (8, FLOAT, 8, 77, "holds type 77, the buffer is float32"),
        (8, FLOAT, 8, BYTE, None),
        (8, BYTE, 8, DOUBLE, None),
        (8, UNTYPED, 8, DOUBLE, None),
        (8, FLOAT, 8, UNTYPED, None),
        (None, FLOAT, 1 << 40, DOUBLE, None),
    ],
)
def test_a_message_that_does_not_fit_is_refused_with_a_reason(capacity, wanted, nbytes, sent, words):
    into = None if capacity is None else memoryview(bytearray(capacity))
    reason = refusal(posted(3, 0, 5, into=into, dtype=wanted), Envelope(3, 0, 5, nbytes, sent))
    if words is None:
        assert reason is None
    else:
        assert str(reason).startswith("the message from rank 3 with tag 5 ")
        assert words in str(reason)
        assert "; it stays queued. Next: receive it into " in str(reason)


@pytest.mark.parametrize(
    ("nbytes", "is_taken"), [(0, True), (99, True), (100, True), (101, False), (1 << 40, False)]
)
def test_a_receive_of_unknown_length_takes_no_more_than_is_allowed(nbytes, is_taken):
    reason = refusal(posted(3, 0, 5), Envelope(3, 0, 5, nbytes), 100)
    assert (reason is None) is is_taken
    if reason is not None:
        assert f"has {nbytes} bytes" in str(reason)
        assert "100 (recv_bytes_max); it stays queued" in str(reason)
        assert "Next: " in str(reason)
        assert "UNISONO_RECV_BYTES_MAX" in str(reason)
