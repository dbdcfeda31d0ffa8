"""The server without its socket: its verbs, and how parked requests are found and answered."""

import gc
import hashlib
import math
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from rl_async import messages as m
from rl_async.configs.derived import ListedCode
from rl_async.errors import JournalError, ProtocolError
from rl_async.process.http_auth import ROLES
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.admission import QueueSettings
from rl_async.transfer_queue.auth import AllowList, make_client_keys, make_keys, read_client_keys
from rl_async.transfer_queue.delivery import Counted
from rl_async.transfer_queue.journal import MemoryJournal
from rl_async.transfer_queue.server import (
    IDLE_S,
    MOST_REQUESTS,
    OTHER_FILES,
    PROBE_S,
    PROBES,
    Outgoing,
    Parking,
    QueueLimits,
    QueueServer,
    bind,
    serve_requests,
)
from rl_async.transfer_queue.shard import ShardServer
from rl_async.transfer_queue.store import Feed, Store
from rl_async.transfer_queue.transitions import (
    Admitted,
    EnginesChanged,
    LeaseLost,
    SamplesStored,
    ShardLost,
    Submitted,
    Transition,
)
from rl_async.transfer_queue.verbs import ANSWER_S, SHARD_VERBS, VERBS, Incoming

# A server without its socket, for tests: clients ask it directly.


LEASE_S = 10.0
EVAL_TASK = m.Task(task_id="e", data_source="", prompt=[], ground_truth="")

HEADER = m.TrajectoryHeader(
    group_id=0,
    sample=0,
    attempt=0,
    partition="train",
    episode_id="e",
    segment=0,
    tokens=1,
    sampled=1,
    reward=0.0,
    finish_reason="stop",
    versions=[],
    tokens_hash="",
)


class Served:
    """A server at time ``now``; every client's identity is its name."""

    def __init__(self, limits: QueueLimits | None = None, **settings: Any) -> None:
        self.now = 0.0
        self.seen: list[Transition] = []
        self._ids = wire.RequestIds()
        journal = MemoryJournal()
        feed = Feed(self.seen.append, journal.append)
        usual: dict[str, Any] = {"steps": 10, "batch_groups": 2, "group_size": 1, "lease_s": LEASE_S, "max_attempts": 1}
        store = Store(QueueSettings(**(usual | settings)), Counted(), [EVAL_TASK], feed)
        self.server = QueueServer(store, journal, feed, lambda: self.now, limits)

    def ask(self, name: str, request: m.Request, *payload: bytes) -> list[Outgoing]:
        return self.server.handle([name.encode(), *wire.encode(self._ids.take(), request, payload)])

    def hello(self, *names: str) -> None:
        for name in names:
            (welcome,) = self.ask(name, m.Hello(schema=m.SCHEMA, role="test", name=name))
            assert isinstance(welcome.response.reply, m.Welcome)

    def lease(self, name: str, groups: int = 1) -> list[Outgoing]:
        return self.ask(name, m.Lease(worker=name, max_groups=groups, wait_s=60.0))

    def publish(self) -> list[Outgoing]:
        done, *woken = self.ask("t", m.Publish(version=m.Version(0, 0), engines=[]))
        assert done.response.reply == m.Done()
        return woken


@pytest.fixture
def served() -> Served:
    served = Served()
    served.hello("t", "a", "b")
    return served


def leased(message: Outgoing) -> tuple[str, list[int]]:
    """Who gets which groups."""
    reply: Any = message.response.reply
    return message.identity.decode(), [group.group_id for group in reply.groups]


def test_a_parked_request_of_a_silent_worker_gets_nothing(served: Served) -> None:
    assert served.lease("a") == []
    served.now = LEASE_S
    assert served.server.tick() == []
    assert served.lease("b") == []
    (answer,) = served.publish()
    assert leased(answer) == ("b", [0])


def test_parked_requests_keep_no_leases(served: Served) -> None:
    served.publish()
    (first,) = served.lease("a", groups=4)
    assert len(leased(first)[1]) == 4
    assert served.lease("a") == []  # all slots are taken; this one is parked
    served.now = LEASE_S - 1
    served.ask("t", m.Evaluate(eval_id=0))  # parked leases are tried again
    served.now = LEASE_S
    served.server.tick()
    assert {lost.worker for lost in served.seen if isinstance(lost, LeaseLost)} == {"a"}


@pytest.mark.parametrize("stood_still", [1.5 * LEASE_S, 20 * LEASE_S])
def test_time_in_which_the_queue_stood_still_ends_no_lease_and_no_shard(stood_still: float) -> None:
    served = Served(replicas=1)
    served.hello("t", "a", "s")
    served.ask("s", m.RegisterShard(shard_id="s1", name="s", url="tcp://x:1"))
    served.publish()
    served.lease("a", groups=2)
    served.server.begin_turn()
    served.now += stood_still
    served.server.begin_turn()
    served.server.tick()
    assert not [change for change in served.seen if isinstance(change, LeaseLost | ShardLost)]
    # Whoever is silent while the queue serves is lost as ever.
    for _ in range(20):
        served.now += LEASE_S / 16
        served.server.begin_turn()
        served.server.tick()
    lost = {type(change) for change in served.seen if isinstance(change, LeaseLost | ShardLost)}
    assert lost == {LeaseLost, ShardLost}


def test_a_renewal_says_what_others_play_by_now(served: Served) -> None:
    served.lease("a")
    served.publish()
    assert served.ask("a", m.Renew(worker="a", held=[(0, 0, 0)]))[0].response.reply == m.Renewed()
    served.now = LEASE_S
    served.server.tick()
    answer, *_ = served.ask("a", m.Renew(worker="a", held=[(0, 0, 0)]))
    assert answer.response.reply == m.Renewed(gone=[(0, 0, 0)])


def calls_of_a_put(groups: int) -> int:
    """How many calls of Python functions a Put takes that completes a group while a step waits for more."""
    served = Served(batch_groups=groups)
    served.hello("t", "a")
    served.publish()
    served.lease("a", groups=groups)
    assert served.ask("t", m.Reserve(step=0, wait_s=60.0)) == []
    calls = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    # A collection of garbage of earlier tests would call their finalizers.
    gc.disable()
    sys.setprofile(count)
    try:
        (answer,) = served.ask("a", m.Put(worker="a", samples=[[HEADER]], lengths=[3]), b"row")
    finally:
        sys.setprofile(None)
        gc.enable()
    assert answer.response.reply == m.Taken(refused=[None])
    return calls


def test_a_step_that_waits_for_groups_costs_no_put_more_for_each_open_group() -> None:
    assert calls_of_a_put(groups=4) == calls_of_a_put(groups=64)


def test_leases_that_were_not_delivered_go_to_others_and_cost_no_attempt(served: Served) -> None:
    served.lease("a", groups=4)
    (to_a,) = served.publish()
    assert leased(to_a) == ("a", [0, 1, 2, 3])
    served.lease("b")
    (to_b,) = served.server.undelivered(to_a)
    assert leased(to_b) == ("b", [0])
    assert [(lost.worker, lost.charged) for lost in served.seen if isinstance(lost, LeaseLost)] == [("a", False)] * 4


def test_whatever_else_the_lost_connection_waits_for_is_forgotten(served: Served) -> None:
    for _ in range(2):
        served.lease("a")
    to_a, again = served.publish()
    assert (leased(to_a), leased(again)) == (("a", [0]), ("a", [1]))
    served.lease("a", groups=4)
    assert served.server.undelivered(to_a) == []
    (refused,) = served.ask("a", m.Status())
    assert isinstance(refused.response.reply, m.Refused) and refused.response.reply.code == "hello"


def test_a_repeated_answer_that_is_lost_takes_nothing_from_the_one_that_arrived(served: Served) -> None:
    served.publish()
    request_id = b"12345678"
    parts = wire.encode(request_id, m.Lease(worker="w", max_groups=1, wait_s=1.0))
    (arrived,) = served.server.handle([b"b", *parts])
    (repeated,) = served.server.handle([b"a", *parts])
    assert repeated.response == arrived.response
    served.server.undelivered(repeated)
    assert not [lost for lost in served.seen if isinstance(lost, LeaseLost)]


def test_a_late_copy_of_a_lease_that_was_answered_with_nothing_gets_nothing(served: Served) -> None:
    """The worker has gone on: it would keep, by its sign of life, groups of which it never heard."""
    request = wire.encode(b"a-lease.", m.Lease(worker="a", max_groups=1, wait_s=0.0))
    served.hello("a, connected again")
    (nothing,) = served.server.handle([b"a, connected again", *request])
    assert leased(nothing) == ("a, connected again", [])
    served.publish()
    (late,) = served.server.handle([b"a", *request])
    assert leased(late) == ("a", [])
    assert leased(served.lease("b")[0]) == ("b", [0])


@pytest.mark.parametrize(
    "body",
    [
        msgspec.msgpack.encode(m.Renew(worker="ab")).replace(b"ab", b"\xa5b"),
        msgspec.msgpack.encode({"type": "Renew", "worker": "a", "x": 0})[:-1] + b"\x91" * 5000,
    ],
    ids=["text that is not UTF-8", "nested too deep"],
)
def test_bytes_that_no_decoder_takes_are_malformed(served: Served, body: bytes) -> None:
    (answer,) = served.server.handle([b"a", bytes(8), body])
    assert isinstance(answer.response.reply, m.Malformed)
    with pytest.raises(ProtocolError):
        m.decoder(m.Task)(body)


def test_hungry_workers_share_the_groups_whatever_each_of_them_asks_for(served: Served) -> None:
    served.lease("a", groups=100)
    served.lease("b", groups=100)
    assert [leased(answer) for answer in served.publish()] == [("a", [0, 1]), ("b", [2, 3])]


def test_a_share_that_one_worker_does_not_want_is_another_s(served: Served) -> None:
    served.lease("a", groups=1)
    served.lease("b", groups=100)
    assert [leased(answer) for answer in served.publish()] == [("a", [0]), ("b", [1, 2, 3])]


def test_groups_that_come_one_by_one_go_to_workers_in_turn_though_one_always_asks_first(served: Served) -> None:
    served.hello("c")
    served.publish()
    (all_slots,) = served.lease("t", groups=100)
    names = ["a", "b", "c"]
    for name in names:
        served.lease(name, groups=100)
    got: list[str] = []
    for group in leased(all_slots)[1]:
        _, answer = served.ask("t", m.Fail(worker="t", group_id=group, sample=0, attempt=0, error="lost"))
        name, _groups = leased(answer)
        got.append(name)
        for again in names:  # what a poll that has ended does, "a" always before the others
            served.lease(again, groups=100)
    assert [sorted(got[:3]), got[3]] == [names, "a"]


def test_a_flooder_is_told_to_wait_and_its_neighbour_is_served() -> None:
    served = Served(QueueLimits(requests_per_s=2.0))
    served.hello("flood", "calm")

    def status(name: str) -> str:
        reply = served.ask(name, m.Status())[0].response.reply
        return reply.code if isinstance(reply, m.Refused) else type(reply).__name__

    assert [status("flood") for _ in range(4)] == ["StatusReport"] * 2 + ["busy"] * 2
    assert status("calm") == "StatusReport"
    served.now = 0.5
    assert [status("flood") for _ in range(2)] == ["StatusReport", "busy"]


def test_a_message_beyond_the_limits_is_not_decoded() -> None:
    served = Served(QueueLimits(message_bytes=100, frames=4))
    served.hello("a")
    for parts in ([b"x" * 101], [b""] * 4):
        (refused,) = served.server.handle([b"a", b"12345678", *parts])
        reply = refused.response.reply
        assert isinstance(reply, m.Refused) and reply.code == "too_large" and "100 bytes" in reply.reason
    status = served.ask("a", m.Status())[0].response.reply
    assert isinstance(status, m.StatusReport) and status.counters["too_large"] == 2


def test_a_full_queue_takes_a_client_when_another_has_been_silent_for_long() -> None:
    served = Served(QueueLimits(clients=2))
    served.hello("a", "b")

    def hello() -> m.Reply:
        return served.ask("c", m.Hello(schema=m.SCHEMA, role="test", name="c"))[0].response.reply

    refused = hello()
    assert isinstance(refused, m.Refused) and refused.code == "busy" and "2 clients" in refused.reason
    served.now = IDLE_S
    served.ask("a", m.Status())
    assert isinstance(hello(), m.Welcome)
    assert isinstance(served.ask("a", m.Status())[0].response.reply, m.StatusReport)
    gone = served.ask("b", m.Status())[0].response.reply
    assert isinstance(gone, m.Refused) and gone.code == "hello"


def test_a_first_resume_forgets_evaluations_though_nothing_was_published(served: Served) -> None:
    served.ask("t", m.Evaluate(eval_id=0))
    (resumed, *_) = served.ask("t", m.Resume(step=0, lineage=0))
    assert isinstance(resumed.response.reply, m.Resumed)
    (result,) = served.ask("t", m.AwaitEvaluation(eval_id=0, wait_s=0.0))
    assert isinstance(result.response.reply, m.Refused) and result.response.reply.code == "unknown_eval"


def test_groups_are_taken_back_only_when_no_copy_of_the_answer_may_have_arrived(served: Served) -> None:
    """A request and its repetition over a new connection are read together; the old connection is dead."""
    served.publish()
    parts = wire.encode(b"12345678", m.Lease(worker="w", max_groups=1, wait_s=1.0))
    (first,) = served.server.handle([b"b", *parts])
    (again,) = served.server.handle([b"a", *parts])
    served.server.undelivered(first)
    assert not [lost for lost in served.seen if isinstance(lost, LeaseLost)]
    served.server.undelivered(again)
    assert [lost for lost in served.seen if isinstance(lost, LeaseLost)]


def test_a_row_without_bytes_and_a_row_asked_for_twice_are_refused(served: Served) -> None:
    served.hello("a")
    put = wire.encode(b"12345678", m.Put(worker="a", samples=[[HEADER]], lengths=[0]), [b""])
    (answer,) = served.server.handle([b"a", *put])
    assert isinstance(answer.response.reply, m.Malformed)
    reply = served.ask("a", m.Fetch(rows=[(0, 0, 0), (0, 0, 0)]))[0].response.reply
    assert isinstance(reply, m.Refused) and reply.code == "rows"


@pytest.mark.parametrize("replicas", [0, 1])
@pytest.mark.parametrize("bad", ["no rows", "no hash"])
def test_of_a_put_that_is_malformed_nothing_is_taken(replicas: int, bad: str) -> None:
    served = Served(replicas=replicas)
    served.hello("t", "a")
    served.ask("t", m.RegisterShard(shard_id="s1", name="s", url="tcp://x:1"))
    served.publish()
    served.lease("a", groups=2)
    good = msgspec.structs.replace(HEADER, shards=["s1"], nbytes=1)
    rest = [] if bad == "no rows" else [msgspec.structs.replace(good, group_id=1, media=["no hash"])]
    payload = [] if replicas else [b"row"] * (1 + len(rest))
    (answer,) = served.ask("a", m.Put(worker="a", samples=[[good], rest], lengths=[3] * len(payload)), *payload)
    assert isinstance(answer.response.reply, m.Malformed)
    assert not [event for event in served.seen if isinstance(event, SamplesStored)]


def test_a_shard_hears_at_once_that_the_last_consumer_of_its_rows_is_gone() -> None:
    served = Served(replicas=1)
    served.hello("t", "a", "s")
    served.ask("s", m.RegisterShard(shard_id="s1", name="s", url="tcp://x:1"))
    served.publish()
    served.ask("t", m.Subscribe(consumer="logger"))
    served.lease("a", groups=2)
    headers = [msgspec.structs.replace(HEADER, group_id=n, shards=["s1"], nbytes=1) for n in range(2)]
    served.ask("a", m.Put(worker="a", samples=[[header] for header in headers]))
    for request in (m.Reserve(step=0, wait_s=0.0), m.Commit(step=0), m.Retire(step=1)):
        served.ask("t", request)
    assert served.ask("s", m.Sweep(shard_id="s1", groups=[0, 1], wait_s=1.0)) == [], "the logger has not read them"
    _, woken = served.ask("t", m.Unsubscribe(consumer="logger"))
    assert (woken.identity, woken.response.reply) == (b"s", m.Swept(gone=[0, 1]))


@pytest.mark.parametrize("task", [{"agent": "evil.py:run"}, {"tools": ["os:system"]}])
def test_a_clients_task_names_no_code(task: dict[str, Any]) -> None:
    served = Served(code=ListedCode(("own.py:run",), ("own.py:tool",)))
    served.hello("t", "a", "b")
    served.publish()
    named = msgspec.structs.replace(EVAL_TASK, **task)
    listed = msgspec.structs.replace(EVAL_TASK, agent="own.py:run", tools=["own.py:tool", "calculator"])
    for request in (m.Submit([listed, named]), m.Lease(worker="a", max_groups=1, wait_s=60.0, task=named)):
        (answer,) = served.ask("a", request)
        assert isinstance(answer.response.reply, m.Refused) and answer.response.reply.code == "code"
    assert not any(isinstance(seen, (Submitted, Admitted)) for seen in served.seen), "nothing was admitted"
    (answer,) = served.ask("a", m.Submit([listed]))
    assert answer.response.reply == m.Done()
    (answer,) = served.ask("b", m.Lease(worker="b", max_groups=1, wait_s=60.0, task=listed))
    assert isinstance(answer.response.reply, m.Leased) and len(answer.response.reply.groups) == 1


FENCED = [
    m.Reserve(step=0, wait_s=60.0),
    m.Fetch(rows=[], lineage=0),
    m.Commit(step=0),
    m.Publish(version=m.Version(0, 0), engines=[]),
    m.Confirm(engine_id="e", version=m.Version(0, 0)),
    m.Withdraw(engine_ids=["e"], lineage=0),
    m.Snapshot(lineage=0),
    m.Resume(step=0, lineage=0),
    m.Retire(step=0),
    m.Tighten(max_staleness=0),
    m.Evaluate(eval_id=0, lineage=0),
    m.AwaitEvaluation(eval_id=0, wait_s=60.0, lineage=0),
    m.RemoveEngine(engine_id="e", reason="", lineage=0),
    m.ListEngines(lineage=0),
    m.Finish(),
]


def test_every_request_that_a_trainer_makes_carries_its_lineage() -> None:
    assert {type(request) for request in FENCED} == {
        kind for kind in m.REQUESTS if {"lineage", "version"} & set(kind.__struct_fields__)
    }


@pytest.mark.parametrize("request_", FENCED, ids=lambda request: type(request).__name__)
def test_a_trainer_that_another_has_replaced_is_refused_and_changes_nothing(served: Served, request_: Any) -> None:
    served.publish()
    served.ask("b", m.RegisterEngine(engine_id="e", url="http://e", kind="embedded"))
    served.ask("b", m.Resume(step=0, lineage=1))
    served.ask("b", m.Publish(version=m.Version(1, 0), engines=["e"]))
    seen = len(served.seen)
    (answer,) = served.ask("t", request_)
    assert isinstance(answer.response.reply, m.Refused)
    assert answer.response.reply.code == wire.REPLACED
    assert served.seen[seen:] == []


def test_a_trainer_that_waits_for_a_batch_hears_that_it_was_replaced(served: Served) -> None:
    served.publish()
    assert served.ask("t", m.Reserve(step=0, wait_s=60.0)) == []
    _, woken = served.ask("b", m.Resume(step=0, lineage=1))
    assert woken.identity == b"t"
    assert isinstance(woken.response.reply, m.Refused)
    assert woken.response.reply.code == wire.REPLACED


def test_a_trainer_that_has_not_resumed_is_refused(served: Served) -> None:
    served.publish()
    (answer,) = served.ask("t", m.Commit(step=0, lineage=1))
    assert isinstance(answer.response.reply, m.Refused)
    assert answer.response.reply.code == "wrong_lineage"


@pytest.mark.parametrize(
    ("reward", "parts"),
    [(1e39, {}), (math.nan, {}), (-3.0, {}), (0.0, {"exact_answer": 3.0}), (0.0, {"other": math.inf})],
)
@pytest.mark.parametrize("replicas", [0, 1])
def test_a_reward_beyond_the_bound_fails_its_attempt(reward: float, parts: dict[str, float], replicas: int) -> None:
    served = Served(replicas=replicas, reward_limit=2.0, reward_parts=("exact_answer",), max_attempts=2)
    served.hello("t", "a")
    served.publish()
    payload = [] if replicas else [b"x"]

    def put(attempt: int, **changes: Any) -> m.Reply:
        header = msgspec.structs.replace(HEADER, attempt=attempt, shards=["s"] * replicas, **changes)
        answer, *_ = served.ask("a", m.Put(worker="a", samples=[[header]], lengths=[1] * len(payload)), *payload)
        assert isinstance(answer.response.reply, m.Taken)
        return answer.response.reply.refused[0]

    served.lease("a")
    refused = put(0, reward=reward, reward_parts=parts)
    assert isinstance(refused, m.Refused) and refused.code == "reward"
    assert not any(isinstance(seen, SamplesStored) for seen in served.seen)
    (again,) = served.lease("a")
    assert isinstance(again.response.reply, m.Leased) and again.response.reply.groups[0].attempt == 1
    if not replicas:
        assert put(1, reward=-2.0, reward_parts={"exact_answer": 2.0, "other": 99.0}) is None


def test_the_trainer_is_told_that_all_agent_programs_are_away(served: Served) -> None:
    served.publish()
    reserve, status = m.Reserve(step=0, wait_s=0.0), m.Status()
    (answer,) = served.ask("t", reserve)
    assert isinstance(answer.response.reply, m.NotReady) and answer.response.reply.unattended_s == 0.0
    served.ask("a", m.Lease(worker="a", max_groups=0, wait_s=0.0, idle_s=280.0))
    (answer,) = served.ask("t", reserve)
    assert isinstance(answer.response.reply, m.NotReady) and answer.response.reply.unattended_s == 280.0
    (answer,) = served.ask("t", status)
    assert answer.response.reply.unattended_s == 280.0
    served.ask("t", m.Evaluate(eval_id=0))
    (answer,) = served.ask("t", m.AwaitEvaluation(eval_id=0, wait_s=0.0))
    assert answer.response.reply.unattended_s == 280.0 and answer.response.reply.groups > 0
    served.ask("b", m.Renew(worker="b"))
    (answer,) = served.ask("t", status)
    assert answer.response.reply.unattended_s == 0.0, "an agent worker plays"


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


# The loop around the server: what is flushed before what is sent, with a socket that writes down what happens.


class Router:
    """A ROUTER whose clients have sent all they have to say. Clients in ``gone`` cannot be answered."""

    def __init__(self, log: list[str]) -> None:
        self.inbox: deque[list[bytes]] = deque()
        self.gone: set[bytes] = set()
        self._log, self._ids = log, wire.RequestIds()
        self._first = True

    def ask(self, client: str, request: m.Request) -> None:
        self.inbox.append([client.encode(), *map(bytes, wire.encode(self._ids.take(), request))])

    def poll(self, timeout_ms: int) -> int:
        return len(self.inbox)

    def recv_multipart(self, flags: int, copy: bool = True) -> list[bytes]:
        if not self.inbox:
            raise zmq.Again
        return self.inbox.popleft()

    def send(self, frame: bytes, flags: int = 0, copy: bool = True) -> None:
        if self._first:
            if frame in self.gone:
                raise zmq.ZMQError(zmq.EHOSTUNREACH)
            self._log.append(f"to {frame.decode()}")
        self._first = not flags & zmq.SNDMORE


class Loop:
    """The loop with a journal that can be full; ``log`` says in which order things happened."""

    def __init__(self, max_staleness: int = 0) -> None:
        self.log: list[str] = []
        self.router = Router(self.log)
        self.full, self.flush_s, self.now = False, 0.0, 0.0
        journal = MemoryJournal()
        feed = Feed(journal.append, lambda transition: self.log.append(type(transition).__name__))
        settings = QueueSettings(
            steps=9, batch_groups=1, group_size=1, max_staleness=max_staleness, lease_s=LOOP_LEASE_S
        )
        self._server = QueueServer(Store(settings, Counted(), [], feed), journal, feed, lambda: self.now)
        for client in ("t", "a", "b"):
            self.router.ask(client, m.Hello(schema=m.SCHEMA, role="test", name=client))
        self.run()

    def flush(self) -> None:
        self.log.append("flush")
        self.now += self.flush_s
        if self.full:
            raise JournalError("no room")

    def run(self) -> None:
        """Until all is answered."""
        turns = iter([False] * (1 + len(self.router.inbox)))
        serve_requests(self.router, self._server, self.flush, lambda: next(turns, True), lambda: self.now)  # type: ignore[arg-type]


LOOP_LEASE_S = 10.0
PUBLISH = m.Publish(version=m.Version(0, 0), engines=[])


def lease(worker: str, wait_s: float = 60.0) -> m.Lease:
    return m.Lease(worker=worker, max_groups=1, wait_s=wait_s)


def test_one_flush_serves_all_that_came_and_those_that_waited_for_it() -> None:
    loop = Loop()
    loop.router.ask("a", lease("a"))
    loop.run()
    loop.log.clear()
    loop.router.ask("b", m.Status())
    loop.router.ask("t", PUBLISH)
    loop.run()
    changes = [entry for entry in loop.log if entry[0].isupper()]
    assert changes == ["Published", "EnginesChanged", "Admitted", "LeaseGiven"]
    last = loop.log.index("LeaseGiven")
    assert loop.log[last + 1 :] == ["flush", "to b", "to t", "to a"]


def test_nothing_is_sent_when_the_journal_is_full() -> None:
    loop = Loop()
    loop.log.clear()
    loop.router.ask("t", PUBLISH)
    loop.full = True
    with pytest.raises(JournalError, match="no room"):
        loop.run()
    assert not [entry for entry in loop.log if entry.startswith("to ")]


def test_what_follows_from_a_lost_answer_is_flushed_before_it_is_sent() -> None:
    loop = Loop()
    loop.router.gone.add(b"a")
    loop.router.ask("a", lease("a"))
    loop.router.ask("b", lease("b"))
    loop.router.ask("t", PUBLISH)
    loop.run()
    taken_back = loop.log.index("LeaseLost")
    assert loop.log[taken_back:] == ["LeaseLost", "GrantVoided", "LeaseGiven", "flush", "to b"]


def test_a_renewal_that_waits_is_heard_before_leases_end() -> None:
    loop = Loop()
    loop.router.ask("a", lease("a"))
    loop.router.ask("t", PUBLISH)
    loop.run()
    for _ in range(15):
        loop.now += LOOP_LEASE_S / 16
        loop.run()
    loop.now += LOOP_LEASE_S / 16
    loop.router.ask("a", m.Renew(worker="a"))
    loop.run()
    assert "LeaseLost" not in loop.log
    for _ in range(16):
        loop.now += LOOP_LEASE_S / 16
        loop.run()
    assert "LeaseLost" in loop.log


def test_a_slow_flush_before_a_lost_answer_ends_no_other_lease() -> None:
    loop = Loop(max_staleness=1)
    for client, request in (("t", PUBLISH), ("a", lease("a"))):
        loop.router.ask(client, request)
    loop.run()
    loop.router.gone.add(b"b")
    loop.router.ask("b", lease("b"))
    loop.flush_s = 2 * LOOP_LEASE_S
    loop.run()
    loop.run()
    assert loop.log.count("LeaseGiven") == 2 and loop.log.count("LeaseLost") == 1, "only b's, which did not hear of it"


def test_a_slow_flush_serves_more_requests() -> None:
    loop = Loop()
    loop.flush_s = 10.0
    for _ in range(2 * MOST_REQUESTS + 1):
        loop.router.ask("b", m.Status())
    loop.log.clear()
    loop.run()
    answers = "".join("." if entry == "to b" else "|" for entry in loop.log).strip("|").split("|")
    assert [len(part) for part in answers if part] == [MOST_REQUESTS, MOST_REQUESTS + 1]


def test_a_flush_does_not_wait_for_ever_more_requests() -> None:
    loop = Loop()
    loop.log.clear()
    for _ in range(2 * MOST_REQUESTS + 1):
        loop.router.ask("b", m.Status())
    loop.run()
    answers = "".join("." if entry == "to b" else "|" for entry in loop.log).strip("|").split("|")
    assert [len(part) for part in answers if part] == [MOST_REQUESTS, MOST_REQUESTS, 1]


def test_all_clients_may_connect_at_once_and_have_no_timers() -> None:
    with zmq.Context() as context, bind(context, "tcp://127.0.0.1:*", limits=QueueLimits(clients=700)) as server:
        assert server.get(zmq.BACKLOG) == 700
        assert server.get(zmq.HEARTBEAT_IVL) == 0


def accepted(port: int) -> list[socket.socket]:
    """Copies of the connections that this process has accepted at ``port``."""
    here = psutil.Process().net_connections("tcp4")
    return [socket.socket(fileno=os.dup(one.fd)) for one in here if one.laddr.port == port and one.raddr]


def test_the_kernel_probes_the_hosts_of_clients() -> None:
    """libzmq hands each of these on to the connections that it accepts."""
    with zmq.Context() as context, bind(context, "tcp://127.0.0.1:*", limits=QueueLimits()) as server:
        address = server.get(zmq.LAST_ENDPOINT).decode()
        with socket.create_connection(("127.0.0.1", port := int(address.rpartition(":")[2]))):
            deadline = time.monotonic() + 30
            while not (found := accepted(port)):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            with found[0] as connection:
                assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
                values = [connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names]
                assert values == [PROBE_S, PROBE_S, PROBES, 1000 * PROBE_S * (PROBES + 1)]


LISTENS = """
import logging, resource, sys, zmq
from rl_async.transfer_queue.server import QueueLimits
from rl_async.transfer_queue.server import bind
logging.basicConfig()
resource.setrlimit(resource.RLIMIT_NOFILE, (400, int(sys.argv[1])))
with zmq.Context() as context, bind(context, "tcp://127.0.0.1:*", limits=QueueLimits(clients=300)):
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def listening(hard: int) -> tuple[int, str]:
    """The open files allowed to a queue for 300 clients that was started with 400 and may have ``hard``; its log."""
    done = subprocess.run([sys.executable, "-c", LISTENS, str(hard)], capture_output=True, text=True, check=True)
    return int(done.stdout), done.stderr


def test_a_file_for_each_connection_may_be_opened_if_the_hard_limit_lets_it() -> None:
    assert listening(1000) == (300 + OTHER_FILES, "")
    allowed, log = listening(500)
    assert allowed == 500 and "300 connections" in log


# Verbs: what followers of the registry of engines are told, what a Put stores, and what a key's role allows.


WAIT_S = 30.0


def verbs_engines(served: Served, count: int) -> None:
    for number in range(count):
        served.ask("t", m.RegisterEngine(engine_id=f"e{number}", url="http://h:1", kind="vllm"))


@pytest.fixture
def verbs_served() -> Served:
    served = Served()
    served.hello("t", *(f"w{n}" for n in range(20)))
    verbs_engines(served, 10)
    served.now += 1.0
    served.server.tick()
    return served


def follow(served: Served, name: str, after: int) -> list[int]:
    """The revisions that a reader is told at once."""
    answers = served.ask(name, m.ListEngines(after=after, wait_s=WAIT_S))
    return [answer.response.reply.revision for answer in answers]


def test_changes_that_come_together_are_told_together(verbs_served: Served) -> None:
    for n in range(20):
        assert follow(verbs_served, f"w{n}", 10) == []
    first = verbs_served.ask("t", m.Confirm(engine_id="e0", version=m.Version()))
    assert len(first) == 21
    for n in range(20):
        assert follow(verbs_served, f"w{n}", 11) == []
    for number in range(1, 10):
        assert len(verbs_served.ask("t", m.Confirm(engine_id=f"e{number}", version=m.Version()))) == 1
    verbs_served.now += 21 * ANSWER_S
    told = [answer.response.reply.revision for answer in verbs_served.server.tick()]
    assert told == [20] * 20


def test_a_reader_that_knows_nothing_and_one_that_will_not_wait_are_told_at_once(verbs_served: Served) -> None:
    assert follow(verbs_served, "w0", 9) == [10]
    verbs_served.ask("t", m.Confirm(engine_id="e0", version=m.Version()))
    assert follow(verbs_served, "w1", 10) == [], "w0 was told just now"
    assert follow(verbs_served, "w2", -1) == [11]
    (now,) = verbs_served.ask("w3", m.ListEngines(after=10, wait_s=0.0))
    assert now.response.reply.revision == 11


def test_a_reader_that_asks_in_between_takes_no_announcement_from_those_that_wait(verbs_served: Served) -> None:
    assert follow(verbs_served, "w0", 9) == [10]
    assert follow(verbs_served, "w1", 10) == []
    verbs_served.ask("t", m.Confirm(engine_id="e0", version=m.Version()))
    verbs_served.now += 2 * ANSWER_S
    assert follow(verbs_served, "w2", 10) == [11]
    verbs_served.now += 2 * ANSWER_S
    (answer,) = verbs_served.server.tick()
    assert (answer.identity, answer.response.reply.revision) == (b"w1", 11)


def test_a_reader_is_answered_at_its_deadline(verbs_served: Served) -> None:
    assert follow(verbs_served, "w0", 10) == []
    verbs_served.now += WAIT_S
    (answer,) = verbs_served.server.tick()
    assert (answer.identity, answer.response.reply.revision) == (b"w0", 10)
    assert verbs_served.server.tick() == []


def test_a_lost_connection_and_a_repeated_request_leave_nothing_parked(verbs_served: Served) -> None:
    answer = verbs_served.ask("w0", m.Status())[0]
    follow(verbs_served, "w0", 10)
    follow(verbs_served, "w1", 10)
    verbs_served.server.undelivered(answer)
    verbs_served.now += 1.0
    answers = verbs_served.ask("t", m.Confirm(engine_id="e0", version=m.Version()))
    assert [answer.identity for answer in answers] == [b"t", b"w1"]


def test_the_journal_gets_one_engine_of_each_that_confirms(verbs_served: Served) -> None:
    before = len(verbs_served.seen)
    for number in range(10):
        verbs_served.ask("t", m.Confirm(engine_id=f"e{number}", version=m.Version()))
    changes = verbs_served.seen[before:]
    assert len(changes) == 10
    assert not any(isinstance(change, EnginesChanged) for change in changes)


MEDIUM = b"m" * 1000
KEY = hashlib.sha256(MEDIUM).hexdigest()


def test_a_medium_counts_although_the_first_sample_that_has_it_is_fenced() -> None:
    served = Served(group_size=2, batch_groups=1, max_attempts=3)
    served.hello("t", "a")
    served.publish()
    served.lease("a")
    fenced = msgspec.structs.replace(HEADER, sample=0, attempt=7, media=[KEY])
    good = msgspec.structs.replace(HEADER, sample=1, media=[KEY])
    put = m.Put(worker="a", samples=[[fenced], [good]], lengths=[3, 3], media=[(0, KEY)])
    (answer,) = served.ask("a", put, b"rowrow", MEDIUM)
    assert isinstance(answer.response.reply, m.Taken)
    assert [refused is None for refused in answer.response.reply.refused] == [False, True]
    (stored,) = [event for event in served.seen if isinstance(event, SamplesStored)]
    assert [header.nbytes for headers in stored.samples for header in headers] == [3 + len(MEDIUM)]


ENGINE = m.RegisterEngine(engine_id="mine", url="http://192.0.2.1:9", kind="embedded")
LEASE = m.Lease(worker="w", max_groups=1, wait_s=0.0)
Ask = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def queue(folder: Path) -> QueueServer:
    journal = MemoryJournal()
    feed = Feed(journal.append)
    store = Store(QueueSettings(steps=10, batch_groups=1, group_size=1), Counted(), [], feed)
    return QueueServer(store, journal, feed, allowed=AllowList(folder / "clients"))


@pytest.fixture
def ask(queue: QueueServer, folder: Path) -> Ask:
    return asking(queue, folder)


def asking(server: QueueServer | ShardServer, folder: Path) -> Ask:
    """Send as a client on a socket file, which shows the key of its role in its hello; the reply."""
    ids, greeted = wire.RequestIds(), set[str]()

    def ask(role: str, request: m.Request[Any], payload: Sequence[bytes] = ()) -> Any:
        if role not in greeted:
            key = read_client_keys(folder, role).secret.decode()
            hello = m.Hello(schema=m.SCHEMA, role="test", name=role, key=key)
            (welcome,) = server.handle([role.encode(), *wire.encode(ids.take(), hello)])
            assert isinstance(welcome.response.reply, m.Welcome)
            greeted.add(role)
        answers = server.handle([role.encode(), *wire.encode(ids.take(), request, payload)])
        return answers[0].response.reply

    return ask


def code(reply: Any) -> str:
    return reply.code if isinstance(reply, m.Refused) else ""


@pytest.mark.parametrize(
    ("role", "request_"),
    [
        ("worker", m.Commit(step=0)),
        ("worker", ENGINE),
        ("worker", m.Resume(step=0, lineage=1, snapshot=b"")),
        ("worker", m.Finish()),
        ("worker", m.RemoveEngine(engine_id="engine-0", reason="")),
        ("worker", m.RegisterShard(shard_id="s", name="s", url="tcp://192.0.2.1:9")),
        ("reader", LEASE),
        ("reader", m.Drain(on=True)),
        ("trainer", ENGINE),
        ("operator", PUBLISH),
        ("shard", LEASE),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_verb_of_another_role_is_refused_counted_and_changes_nothing(
    ask: Ask, role: str, request_: m.Request[Any]
) -> None:
    before = ask("reader", m.Inspect())
    assert code(ask(role, request_)) == wire.FORBIDDEN
    after = ask("reader", m.Inspect())
    assert after.status.counters["forbidden"] == 1
    assert after.status.published == before.status.published and not (after.draining or after.shards)
    assert ask("reader", m.ListEngines(after=-1, wait_s=0.0)).engines == []
    assert not after.status.finished and after.status.leased == 0


def test_each_role_does_its_own_work(ask: Ask) -> None:
    assert code(ask("operator", ENGINE)) == ""
    assert code(ask("trainer", PUBLISH)) == ""
    assert len(ask("worker", LEASE).groups) == 1
    assert [engine.engine_id for engine in ask("reader", m.ListEngines(after=-1, wait_s=0.0)).engines] == ["mine"]


def test_every_verb_has_a_role_and_a_trainer_s_are_its_own() -> None:
    by_kind = {verb.request: verb.roles for verb in VERBS} | SHARD_VERBS
    assert all(roles and roles <= set(ROLES) for roles in by_kind.values())
    for kind in (m.Reserve, m.Commit, m.Publish, m.Retire, m.Tighten, m.Resume, m.Finish, m.Confirm, m.Withdraw):
        assert by_kind[kind] == {"trainer"}
    assert by_kind[m.RegisterEngine] == {"operator"}


@pytest.mark.parametrize("shown", ["", "x" * 40, "no key", "é"])
def test_a_hello_without_a_key_that_is_allowed_is_refused_and_counted(queue: QueueServer, ask: Ask, shown: str) -> None:
    ids = wire.RequestIds()
    hello = m.Hello(schema=m.SCHEMA, role="test", name="stranger", key=shown)
    for request, expected in ((hello, wire.DENIED), (m.Status(), wire.HELLO)):
        (answer,) = queue.handle([b"stranger", *wire.encode(ids.take(), request)])
        assert code(answer.response.reply) == expected
    assert ask("reader", m.Status()).counters["denied"] == 1


def test_a_key_that_is_added_counts_from_the_next_hello(ask: Ask, folder: Path) -> None:
    assert code(ask("worker", m.Status())) == ""
    make_client_keys(folder, "guest", "reader")
    assert (code(ask("guest", m.Inspect())), code(ask("guest", LEASE))) == ("", wire.FORBIDDEN)


def test_a_key_that_is_revoked_is_refused_on_its_open_connection(queue: QueueServer, ask: Ask, folder: Path) -> None:
    assert code(ask("worker", m.Status())) == ""
    (folder / "clients" / "worker.pub").unlink()
    queue.tick()
    assert code(ask("worker", m.Status())) == wire.DENIED


def test_a_connection_that_takes_another_s_name_does_not_get_its_role(queue: QueueServer, folder: Path) -> None:
    """Over TCP a client may choose the identity of its connection, also that of one that is gone."""
    trainer, worker = (read_client_keys(folder, role).public for role in ("trainer", "worker"))
    ids = wire.RequestIds()

    def reply(user: bytes, request: m.Request[Any]) -> Any:
        return queue.handle([b"chosen", *wire.encode(ids.take(), request)], user)[0].response.reply

    assert isinstance(reply(trainer, m.Hello(schema=m.SCHEMA, role="test", name="t")), m.Welcome)
    assert code(reply(worker, PUBLISH)) == wire.HELLO
    assert isinstance(reply(worker, m.Hello(schema=m.SCHEMA, role="test", name="w")), m.Welcome)
    assert code(reply(worker, PUBLISH)) == wire.FORBIDDEN


def test_a_shard_stores_for_workers_and_loads_for_trainers(folder: Path) -> None:
    ask = asking(ShardServer("shard", allowed=AllowList(folder / "clients")), folder)
    store, load = m.StoreRows(samples=[(0, 0, 0)], lengths=[[3]]), m.LoadRows(rows=[(0, 0, 0, 0)])
    assert code(ask("trainer", store, [b"row"])) == code(ask("worker", load)) == wire.FORBIDDEN
    assert code(ask("worker", store, [b"row"])) == ""
    assert code(ask("trainer", load)) == ""


def test_a_hello_shows_no_secret() -> None:
    assert "secret" not in repr(m.Hello(schema=m.SCHEMA, role="test", name="t", key="secret"))
