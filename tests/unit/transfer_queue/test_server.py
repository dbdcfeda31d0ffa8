"""The server without its socket: its verbs, and how parked requests are found and answered."""

import gc
import math
import sys
from typing import Any

import msgspec
import pytest

from rl_async import codec
from rl_async import messages as m
from rl_async.configs.derived import ListedCode
from rl_async.errors import ProtocolError
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.server import IDLE_S, Outgoing, Parking, QueueLimits
from rl_async.transfer_queue.transitions import Admitted, LeaseLost, SamplesStored, ShardLost, Submitted
from rl_async.transfer_queue.verbs import VERBS, Incoming
from tests.unit.transfer_queue.served import EVAL_TASK, HEADER, LEASE_S, Served


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
        codec.decoder(m.Task)(body)


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
