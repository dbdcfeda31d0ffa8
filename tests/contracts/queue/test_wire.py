"""What the queue answers to messages that it does not understand, and to strangers."""

import msgspec
import pytest
import zmq
import zmq.asyncio

from rl_async.errors import UserError
from rl_async.messages import SCHEMA, Hello, LeasedGroup, Malformed, Put, Status, Version, Welcome
from rl_async.transfer_queue.delivery import numbered
from rl_async.transfer_queue.server import bind
from tests.contracts.queue.peers import HELLO, ID, ask, trajectory


def test_malformed_messages_are_answered_counted_and_harm_nobody(raw, trainer):
    status = msgspec.msgpack.encode(Status())
    assert isinstance(ask(raw, ID, HELLO).reply, Welcome)
    bad = [
        (b"",),
        (b"short", status),
        (ID,),
        (ID, b""),
        (ID, b"\xc1garbage"),
        (ID, msgspec.msgpack.encode({"type": "Explode"})),
        (ID, msgspec.msgpack.encode({"type": "Lease", "worker": 3})),
        (ID, status, b"payload that does not belong here"),
        (ID, HELLO, b"payload that does not belong here"),
        (ID, msgspec.msgpack.encode({"type": "Put", "worker": "w", "header": {}}), b"x"),
    ]
    for parts in bad:
        assert isinstance(ask(raw, *parts).reply, Malformed), parts
    assert isinstance(ask(raw, ID, status).reply, type(trainer.status()))
    assert trainer.status().counters["malformed"] == len(bad)


def test_a_put_needs_a_payload(raw):
    ask(raw, ID, HELLO)
    group = LeasedGroup(group_id=0, partition="train", attempt=0, samples=[0], task=numbered(0), min_version=Version())
    header = trajectory(group, 0).header()
    put = msgspec.msgpack.encode(Put(worker="w", samples=[[header]], lengths=[1]))
    assert isinstance(ask(raw, ID, put).reply, Malformed)
    assert [refused.code for refused in ask(raw, ID, put, b"x").reply.refused] == ["unknown_group"]
    for samples in ([], [[]], [[header], []], [[header, header]], [[header], [header]]):
        put = msgspec.msgpack.encode(Put(worker="w", samples=samples, lengths=[1]))
        assert isinstance(ask(raw, ID, put, b"x").reply, Malformed)
    for lengths in ([], [0], [-1], [2], [1, 1]):
        put = msgspec.msgpack.encode(Put(worker="w", samples=[[header]], lengths=lengths))
        assert isinstance(ask(raw, ID, put, b"x").reply, Malformed)


def test_hello_comes_first_and_with_the_right_schema(raw):
    assert ask(raw, ID, msgspec.msgpack.encode(Status())).reply.code == "hello"
    old = msgspec.msgpack.encode(Hello(schema=SCHEMA + 1, role="test", name="raw"))
    assert ask(raw, ID, old).reply.code == "schema"
    assert isinstance(ask(raw, ID, HELLO).reply, Welcome)


def test_a_port_that_is_taken_is_a_user_error(queue):
    with zmq.asyncio.Context() as context, pytest.raises(UserError, match=queue.address):
        bind(context, queue.address)
