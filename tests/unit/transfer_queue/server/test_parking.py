"""Parked requests are found by verb, connection and deadline, whatever ids clients give them."""

import pytest

from rl_async import messages as m
from rl_async.transfer_queue.server import Parking
from rl_async.transfer_queue.verbs import VERBS, Incoming

ENGINES, SHARDS = (next(verb for verb in VERBS if verb.request is kind) for kind in (m.ListEngines, m.ListShards))


@pytest.fixture
def parking() -> Parking:
    """Two requests of different verbs with one id, from one connection."""
    parking = Parking(VERBS)
    parking.add(ENGINES, engines(), 1.0)
    parking.add(SHARDS, shards(), 2.0)
    return parking


def engines() -> Incoming[m.ListEngines]:
    return Incoming(b"a", b"id", m.ListEngines(after=0, wait_s=9.0))


def shards() -> Incoming[m.ListShards]:
    return Incoming(b"a", b"id", m.ListShards(after=0, wait_s=9.0))


def test_each_of_two_requests_with_one_id_is_answered(parking: Parking) -> None:
    for now, verb, incoming in ((1.0, ENGINES, engines()), (2.0, SHARDS, shards())):
        assert parking.due(now) == [(verb, incoming)]
        parking.remove(verb, incoming)
    assert not parking.holds(ENGINES, b"id") and not parking.holds(SHARDS, b"id")


def test_a_lost_connection_waits_for_neither(parking: Parking) -> None:
    parking.forget(b"a")
    assert parking.due(2.0) == []
