"""The fuzzer sends every kind of message, and notices what it is there to notice."""

import random

import pytest

from rl_async import messages as m
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.book import Book
from rl_async.transfer_queue.server import Gate
from tests.fuzz.queue_messages import requests, trajectory
from tests.fuzz.queue_servers import CheckedQueue, Keys


def test_every_kind_of_request_is_among_them():
    made = {type(request) for request in requests(random.Random(0), trajectory(0, 0, 0), "")}
    assert made == set(m.REQUESTS)


def send(server: CheckedQueue, sender: bytes, request: m.Request) -> m.Reply:
    return server.handle([sender, *wire.encode(bytes(8), request)])[0].response.reply


def test_a_queue_that_lets_everybody_do_everything_is_noticed(monkeypatch):
    server = CheckedQueue(Keys())
    register = m.RegisterEngine(engine_id="e", url="http://x", kind="vllm")
    assert isinstance(send(server, b"worker", register), m.Refused)
    assert isinstance(send(server, b"operator", register), m.Done)
    monkeypatch.setattr(Gate, "forbidden", lambda *_: None)
    with pytest.raises(AssertionError):
        send(server, b"worker", m.RegisterEngine(engine_id="f", url="http://x", kind="vllm"))


def test_a_queue_that_does_not_fence_a_replaced_trainer_is_noticed(monkeypatch):
    server = CheckedQueue(Keys())
    assert isinstance(send(server, b"trainer", m.Resume(step=0, lineage=1)), m.Resumed)
    assert isinstance(send(server, b"trainer", m.Finish(lineage=0)), m.Refused)
    monkeypatch.setattr(Book, "fence", lambda *_: None)
    with pytest.raises(AssertionError):
        send(server, b"trainer", m.Finish(lineage=0))


def test_a_journal_that_misses_something_is_noticed():
    server = CheckedQueue(Keys())
    send(server, b"worker", m.Lease(worker="w", max_groups=1, wait_s=0.0))
    server.check_replay()
    server.seen.pop()
    with pytest.raises(AssertionError):
        server.check_replay()
