"""Verbs: what followers of the registry of engines are told, what a Put stores, and what a key's role allows."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rl_async import messages as m
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.admission import QueueSettings
from rl_async.transfer_queue.auth.keys import make_client_keys, make_keys, read_client_keys
from rl_async.transfer_queue.auth.roles import ROLES, AllowList
from rl_async.transfer_queue.delivery import Counted
from rl_async.transfer_queue.journal.journal import MemoryJournal
from rl_async.transfer_queue.server import QueueServer
from rl_async.transfer_queue.shard.__main__ import ShardServer
from rl_async.transfer_queue.store import Feed, Store
from rl_async.transfer_queue.transitions import EnginesChanged, SamplesStored
from rl_async.transfer_queue.verbs import ANSWER_S, SHARD_VERBS, VERBS
from tests.unit.transfer_queue.served import HEADER, Served

WAIT_S = 30.0


def engines(served: Served, count: int) -> None:
    for number in range(count):
        served.ask("t", m.RegisterEngine(engine_id=f"e{number}", url="http://h:1", kind="vllm"))


@pytest.fixture
def served() -> Served:
    served = Served()
    served.hello("t", *(f"w{n}" for n in range(20)))
    engines(served, 10)
    served.now += 1.0
    served.server.tick()
    return served


def follow(served: Served, name: str, after: int) -> list[int]:
    """The revisions that a reader is told at once."""
    answers = served.ask(name, m.ListEngines(after=after, wait_s=WAIT_S))
    return [answer.response.reply.revision for answer in answers]


def test_changes_that_come_together_are_told_together(served: Served) -> None:
    for n in range(20):
        assert follow(served, f"w{n}", 10) == []
    first = served.ask("t", m.Confirm(engine_id="e0", version=m.Version()))
    assert len(first) == 21
    for n in range(20):
        assert follow(served, f"w{n}", 11) == []
    for number in range(1, 10):
        assert len(served.ask("t", m.Confirm(engine_id=f"e{number}", version=m.Version()))) == 1
    served.now += 21 * ANSWER_S
    told = [answer.response.reply.revision for answer in served.server.tick()]
    assert told == [20] * 20


def test_a_reader_that_knows_nothing_and_one_that_will_not_wait_are_told_at_once(served: Served) -> None:
    assert follow(served, "w0", 9) == [10]
    served.ask("t", m.Confirm(engine_id="e0", version=m.Version()))
    assert follow(served, "w1", 10) == [], "w0 was told just now"
    assert follow(served, "w2", -1) == [11]
    (now,) = served.ask("w3", m.ListEngines(after=10, wait_s=0.0))
    assert now.response.reply.revision == 11


def test_a_reader_that_asks_in_between_takes_no_announcement_from_those_that_wait(served: Served) -> None:
    assert follow(served, "w0", 9) == [10]
    assert follow(served, "w1", 10) == []
    served.ask("t", m.Confirm(engine_id="e0", version=m.Version()))
    served.now += 2 * ANSWER_S
    assert follow(served, "w2", 10) == [11]
    served.now += 2 * ANSWER_S
    (answer,) = served.server.tick()
    assert (answer.identity, answer.response.reply.revision) == (b"w1", 11)


def test_a_reader_is_answered_at_its_deadline(served: Served) -> None:
    assert follow(served, "w0", 10) == []
    served.now += WAIT_S
    (answer,) = served.server.tick()
    assert (answer.identity, answer.response.reply.revision) == (b"w0", 10)
    assert served.server.tick() == []


def test_a_lost_connection_and_a_repeated_request_leave_nothing_parked(served: Served) -> None:
    answer = served.ask("w0", m.Status())[0]
    follow(served, "w0", 10)
    follow(served, "w1", 10)
    served.server.undelivered(answer)
    served.now += 1.0
    answers = served.ask("t", m.Confirm(engine_id="e0", version=m.Version()))
    assert [answer.identity for answer in answers] == [b"t", b"w1"]


def test_the_journal_gets_one_engine_of_each_that_confirms(served: Served) -> None:
    before = len(served.seen)
    for number in range(10):
        served.ask("t", m.Confirm(engine_id=f"e{number}", version=m.Version()))
    changes = served.seen[before:]
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
PUBLISH = m.Publish(version=m.Version(0, 0), engines=[])
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
