"""How the seed bounds processes whose proof is wrong."""

from __future__ import annotations

import re

from unisono.bootstrap.admission import AdmissionLimiter


def test_a_new_connection_displaces_an_unauthenticated_one_of_its_own_address_first() -> None:
    limiter = AdmissionLimiter(pending_max=4, per_address_max=2, draw=lambda keys: keys[-1])
    assert limiter.arrive(0, "10.0.0.1", 0.0) is None
    assert limiter.arrive(1, "10.0.0.2", 0.0) is None
    assert limiter.arrive(2, "10.0.0.2", 0.0) is None
    assert not limiter.is_crowded(0.0)
    assert limiter.arrive(3, "10.0.0.2", 0.0) == 2
    assert limiter.is_crowded(0.5)
    assert not limiter.is_crowded(1.5)
    assert limiter.arrive(4, "10.0.0.3", 0.0) is None
    assert limiter.arrive(5, "10.0.0.4", 0.0) == 4
    assert len(limiter) == 4
    for key in range(10):
        limiter.depart(key)
    assert len(limiter) == 0
    assert limiter.any() is None


def test_the_evicted_connection_is_drawn_from_all() -> None:
    limiter = AdmissionLimiter(pending_max=8, per_address_max=8)
    victims = [limiter.arrive(key, "10.0.0.1", 0.0) for key in range(2000)]
    ages = {key - victim for key, victim in enumerate(victims) if victim is not None}
    assert min(ages) == 1
    assert max(ages) > 32  # the oldest would be 8


def test_the_addresses_of_one_ipv6_network_count_as_one() -> None:
    limiter = AdmissionLimiter(pending_max=99, per_address_max=1)
    limiter.arrive(0, "2001:db8::1", 0.0)
    assert limiter.arrive(1, "2001:db8::ffff", 0.0) == 0
    assert limiter.arrive(2, "2001:db8:1::1", 0.0) is None


def test_the_answer_to_a_client_that_fails_often_waits_up_to_a_minute() -> None:
    limiter = AdmissionLimiter()
    assert [limiter.fail("10.0.0.1", float(i)) for i in range(20)] == [0.0] * 20
    assert limiter.fail("10.0.0.1", 21.0) == 1.0
    assert limiter.fail("10.0.0.2", 21.0) == 0.0
    assert limiter.fail("10.0.0.1", 99.0) == 0.0


def test_a_crowd_is_named_by_its_number_and_place() -> None:
    limiter = AdmissionLimiter(pending_max=3, per_address_max=3)
    for key in range(19):
        limiter.arrive(key, "10.0.0.1", 0.0)
    assert limiter.crowd() == ""
    for key in range(100, 9000):
        limiter.arrive(key, f"10.{key % 7}.{key % 250}.{key % 251}", 0.0)
    for key in range(9000, 9200):
        limiter.arrive(key, "10.0.0.1", 0.0)
    assert re.fullmatch(
        r"the seed's port is crowded: \d+ connections .* dropped, \d+ of them from 10\.0\.0\.1",
        limiter.crowd(),
    )
    assert len(limiter._turned_away) <= 1024
