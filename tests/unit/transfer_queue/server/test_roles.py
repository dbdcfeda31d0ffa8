"""What a key of each role may do, on the queue and on a payload shard, without sockets."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
from rl_async.transfer_queue.store import Store
from rl_async.transfer_queue.transitions import Feed
from rl_async.transfer_queue.verbs import SHARD_VERBS, VERBS

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
