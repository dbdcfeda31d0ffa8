"""A Redis server that loses the tail of the journal in a failover: the queue ends, and no later one trains the rest."""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from rl_async.errors import JournalError
from rl_async.messages import Done, Version
from rl_async.transfer_queue.delivery import Counted
from rl_async.transfer_queue.journal.redis import RedisJournal
from rl_async.transfer_queue.ledger import Ledger
from rl_async.transfer_queue.server import JournalRecorder, recover
from rl_async.transfer_queue.store import Feed, Store
from tests.contracts.queue_storage.journals import (
    EVAL_TASK,
    SETTINGS,
    Driver,
    OpenJournal,
    redis_journals,
    redis_server,
)

STREAM = "rl-async:run:transitions"


class Pair:
    """A master and its replica behind one address: a Unix socket whose name is a link to one of theirs."""

    def __init__(self, folder: Path, master: "redis.Redis", replica: "redis.Redis") -> None:
        self._folder, self.master, self.replica = folder, master, replica
        self.url = f"unix://{folder / 'address'}"
        self._point_at("master")

    def _point_at(self, name: str) -> None:
        link = self._folder / "address"
        link.unlink(missing_ok=True)
        link.symlink_to(self._folder / f"{name}.sock")

    def journals(self, **settings: Any) -> OpenJournal:
        """Opens the same journal again and again, on whichever server the address names."""
        return lambda: RedisJournal(self.url, "run", **({"owner_s": 1.0, "tries_s": 1.0} | settings))

    def cut_off(self) -> None:
        """From now on the replica hears nothing of the master; all before is there."""
        deadline = time.monotonic() + 30
        while self._offset(self.replica) != self._offset(self.master):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        self.replica.replicaof("NO", "ONE")

    @staticmethod
    def _offset(server: "redis.Redis") -> Any:
        info: Any = server.info("replication")
        return info.get("slave_repl_offset", info["master_repl_offset"])

    def fail_over(self) -> None:
        """The address leads to the replica, and open connections to the master are lost."""
        self._point_at("replica")
        self.master.client_kill_filter(_type="normal", skipme=True)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    for name in ("master", "replica"):
        (tmp_path / name).mkdir()
    sockets = [["--unixsocket", str(tmp_path / f"{name}.sock")] for name in ("master", "replica")]
    # A master waits 5 s for more replicas before it sends one its data.
    sockets[0] += ["--repl-diskless-sync-delay", "0"]
    with (
        redis_server(tmp_path / "master", options=sockets[0]) as (port, _),
        redis_server(tmp_path / "replica", options=[*sockets[1], "--replicaof", f"127.0.0.1 {port}"]) as (other, _),
        redis.Redis(port=port) as master,
        redis.Redis(port=other) as replica,
    ):
        deadline = time.monotonic() + 30
        while master.wait(1, 100) != 1:
            assert time.monotonic() < deadline
        yield Pair(tmp_path, master, replica)


def started(opened: OpenJournal) -> Driver:
    driver = Driver(opened)
    assert driver.store.publish(Version(0, 0), []) == Done()
    driver.journal.flush()
    return driver


def test_a_queue_whose_server_lost_the_tail_writes_nothing_more(pair: Pair) -> None:
    """Else the log had a hole: what the lost flush said would be missing from a replay, and what follows would not."""
    driver = started(pair.journals())
    pair.cut_off()
    kept = driver.store.dump()
    groups = driver.lease(2)
    driver.put(groups[0], 0)
    driver.journal.flush()  # acknowledged by the master alone
    pair.fail_over()
    driver.put(groups[0], 1)
    length = pair.replica.xlen(STREAM)
    with pytest.raises(JournalError, match=r"--resume"):
        driver.journal.flush()
    assert pair.replica.xlen(STREAM) == length
    driver.journal.close()
    other = Driver(pair.journals())
    assert other.store.dump() == kept
    other.journal.close()


def test_a_failover_that_loses_nothing_goes_unnoticed(pair: Pair) -> None:
    driver = started(pair.journals())
    driver.train(0)
    driver.journal.flush()
    pair.cut_off()
    pair.fail_over()
    driver.train(1)
    driver.journal.flush()
    kept = driver.store.dump()
    driver.journal.close()
    other = Driver(pair.journals())
    assert other.store.dump() == kept
    other.journal.close()


def test_nothing_counts_that_too_few_replicas_have(pair: Pair) -> None:
    driver = started(pair.journals(replicas=1))
    assert pair.replica.xlen(STREAM) == pair.master.xlen(STREAM)
    pair.cut_off()
    driver.train(0)
    with pytest.raises(JournalError, match=r"queue\.redis\.replicas"):
        driver.journal.flush()
    driver.journal.close()


@contextmanager
def queue(folder: Path, opened: OpenJournal, *, clients_remain: bool) -> Iterator[tuple[Store, JournalRecorder]]:
    """The queue's store and recorder, as its process makes them."""
    with closing(opened()) as journal, closing(Ledger(folder / "ledger.jsonl")) as ledger:
        store = Store(SETTINGS, Counted(), [EVAL_TASK], Feed(journal.append, ledger.append))
        recover(store, journal, ledger, 0.0, clients_remain=clients_remain)
        yield store, JournalRecorder(store, journal, ledger)


def test_a_queue_killed_with_its_server_starts_again_only_without_its_clients(pair: Pair, tmp_path: Path) -> None:
    """They were told what the promoted replica does not know; the ledger in the run folder shows it."""
    opened = pair.journals()
    with queue(tmp_path, opened, clients_remain=True) as (store, recorder):
        store.publish(Version(0, 0), [])
        recorder.flush()
        pair.cut_off()
        store.delivery.renew("w", 0.0)
        assert len(store.delivery.lease("w", 2, 0.0).groups) == 2
        recorder.flush()
    pair.fail_over()
    with pytest.raises(JournalError, match=r"ledger\.jsonl.*--resume"), queue(tmp_path, opened, clients_remain=True):
        pass
    with queue(tmp_path, opened, clients_remain=False) as (store, _):
        assert store.book.next_group == 0
    with queue(tmp_path, opened, clients_remain=True):
        pass


@pytest.mark.parametrize("lost", [0, 2])
def test_a_stream_with_a_hole_is_refused(tmp_path: Path, lost: int) -> None:
    with redis_server(tmp_path) as (port, _), redis.Redis(port=port) as client:
        driver = started(redis_journals(port))
        driver.train(0)
        driver.journal.flush()
        driver.journal.close()
        entries: Any = client.xrange(STREAM)
        client.xdel(STREAM, entries[lost][0])
        with pytest.raises(JournalError, match=STREAM):
            Driver(redis_journals(port))


def test_a_stream_that_goes_on_without_its_dump_is_refused(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (port, _), redis.Redis(port=port) as client:
        driver = started(redis_journals(port))
        driver.journal.compact(driver.store.dump())
        driver.journal.close()
        client.delete("rl-async:run:dump")
        with pytest.raises(JournalError, match=STREAM):
            Driver(redis_journals(port))
