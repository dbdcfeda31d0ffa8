"""Redis: a lost or replaced server, a failover that loses the journal's tail, another version.

Each is a clean recovery, or an error that says how to continue.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from rl_async.errors import JournalError
from rl_async.messages import Done, Version
from rl_async.transfer_queue.delivery import Counted
from rl_async.transfer_queue.ledger import Ledger
from rl_async.transfer_queue.redis_journal import RedisJournal
from rl_async.transfer_queue.server import JournalRecorder, recover
from rl_async.transfer_queue.store import Feed, Store
from rl_async.transfer_queue.transitions import GrantVoided
from tests.contracts.queue_storage.journals import (
    EVAL_TASK,
    SETTINGS,
    Driver,
    OpenJournal,
    payload,
    redis_journals,
    redis_server,
)


def test_a_server_that_comes_back_in_time_is_written_once(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (port, server):
        driver = Driver(redis_journals(port, tries_s=60.0))
        driver.store.publish(Version(0, 0), [])
        driver.journal.flush()
        server.kill()
        server.wait()
        driver.train(0)
        back = threading.Event()
        with_server = threading.Thread(target=lambda: _serve_again(tmp_path, port, back))
        with_server.start()
        try:
            driver.journal.flush()
            before = driver.store.dump()
            driver.journal.close()
            other = Driver(redis_journals(port))
            assert other.store.dump() == before
            assert other.read(0, 0) == payload(0, 0)
            other.journal.close()
        finally:
            back.set()
            with_server.join()


def _serve_again(folder: Path, port: int, ended: threading.Event) -> None:
    time.sleep(0.5)  # within which the first tries fail
    with redis_server(folder, port):
        assert ended.wait(60)


def test_the_servers_password_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with redis_server(tmp_path, password="secret") as (port, _):
        with pytest.raises(JournalError):
            redis_journals(port, tries_s=0.0)()
        monkeypatch.setenv("RL_ASYNC_REDIS_PASSWORD", "secret")
        redis_journals(port)().close()


def test_a_flush_repeated_because_its_answer_was_lost_changes_nothing(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (port, _):
        driver = Driver(redis_journals(port))
        journal = driver.journal
        assert isinstance(journal, RedisJournal)
        driver.store.publish(Version(0, 0), [])
        driver.train(0)
        assert journal._write() == journal._write() == 1
        driver.journal.flush()
        driver.train(1)
        driver.journal.flush()
        before = driver.store.dump()
        driver.journal.close()
        other = Driver(redis_journals(port))
        assert other.store.dump() == before
        other.journal.close()


def test_a_server_that_stays_away_is_an_error_that_names_it(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (port, server):
        driver = Driver(redis_journals(port))
        driver.store.publish(Version(0, 0), [])
        server.kill()
        server.wait()
        with pytest.raises(JournalError, match=rf"redis://127\.0\.0\.1:{port}/0.*\b2 s\b.*--resume"):
            driver.journal.flush()
        driver.journal.close()


def test_a_queue_that_was_replaced_while_it_was_silent_writes_nothing(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (port, _), redis.Redis(port=port) as client:
        old = Driver(redis_journals(port))
        old.store.publish(Version(0, 0), [])
        old.journal.flush()
        new = Driver(redis_journals(port))
        assert new.store.dump() == old.store.dump()
        before = client.xlen("rl-async:run:transitions")
        old.put(old.lease(1)[0], 0)
        with pytest.raises(JournalError, match="rl-async:run:transitions"):
            old.journal.flush()
        assert client.xlen("rl-async:run:transitions") == before
        old.journal.close()
        new.train(0)
        new.journal.flush()
        new.journal.close()


def test_an_owner_whose_time_was_over_goes_on_if_nobody_took_over(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (port, _), redis.Redis(port=port) as client:
        driver = Driver(redis_journals(port))
        driver.journal.append(GrantVoided(request=b"x"))
        assert client.delete("rl-async:run:owner") == 1
        driver.journal.flush()
        assert client.xlen("rl-async:run:transitions") == 1
        driver.journal.close()


def test_a_stream_of_another_version_and_an_evicted_payload_are_named(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (port, _), redis.Redis(port=port) as client:
        driver = Driver(redis_journals(port))
        driver.store.publish(Version(0, 0), [])
        driver.train(0)
        driver.journal.flush()
        client.delete(*client.keys("rl-async:run:payload:*"))
        with pytest.raises(JournalError, match="maxmemory-policy"):
            driver.read(0, 0)
        driver.journal.close()
        for damaged in (b"\xc1", b"\x81\xa6run_id\xa1\xff", b"\x81\xa1x" + b"\x91" * 100_000):
            client.set("rl-async:run:meta", damaged)
            with pytest.raises(JournalError, match=r"rl-async:run:meta.*--resume"):
                Driver(redis_journals(port))


def test_a_changed_bit_of_any_value_is_named(tmp_path: Path) -> None:
    with redis_server(tmp_path, options=("--appendfsync", "no")) as (port, _), redis.Redis(port=port) as client:
        driver = Driver(redis_journals(port))
        driver.store.publish(Version(0, 0), [])
        driver.train(0)
        driver.journal.flush()
        driver.journal.compact(driver.store.dump())
        driver.train(1)
        driver.put(driver.lease(1)[0], 0)
        driver.journal.flush()
        expected = driver.store.dump()
        driver.journal.close()
        # A value by its name in an error, and how to write another one in its place.
        meta, dump, places = (f"rl-async:run:{name}" for name in ("meta", "dump", "places"))
        values: list[tuple[str, bytes, Callable[[bytes], object]]] = [
            (key, client.get(key), partial(client.set, key)) for key in (meta, dump)
        ]
        for field, value in list(client.hgetall(places).items())[:2]:
            values.append((f"{places} {field.decode()}", value, partial(client.hset, places, field.decode())))
        entries = client.xrange("rl-async:run:transitions")
        for place in (0, len(entries) // 2, len(entries) - 1):
            entry_id, fields = entries[place]
            number = entry_id.decode().partition("-")[2]
            values.append((f"rl-async:run:transitions {number}", fields[b"body"], partial(rewritten, client, place)))
        assert len(values) > 4
        for name, value, write in values:
            places_of_bits = [(random.randrange(len(value)), random.randrange(8)) for _ in range(3)]
            if name == meta:
                # The highest bit of the first character of the run's id, which leaves no UTF-8.
                places_of_bits.append((value.index(driver.journal.run_id.encode()), 7))
            for place, bit in places_of_bits:
                damaged = bytearray(value)
                damaged[place] ^= 1 << bit
                write(bytes(damaged))
                with pytest.raises(JournalError, match=rf"{name}\b.*--resume"):
                    replay(port)
            write(value)
        (key, *_) = client.keys("rl-async:run:payload:*")
        body = client.get(key)
        client.set(key, bytes([body[0] ^ 1]) + body[1:])
        driver = Driver(redis_journals(port))
        assert driver.store.dump() == expected
        with pytest.raises(JournalError, match=rf"{key.decode()}\b.*--resume"):
            for group, samples in driver.journal._places.items():
                for sample in samples:
                    driver.read(group, sample)
        driver.journal.close()


def replay(port: int) -> None:
    with closing(redis_journals(port)()) as journal:
        list(journal.recover().transitions)


def rewritten(client: "redis.Redis", place: int, body: bytes) -> None:
    """Write the stream again with another body in one entry."""
    entries = client.xrange("rl-async:run:transitions")
    client.delete("rl-async:run:transitions")
    for number, (entry_id, fields) in enumerate(entries):
        client.xadd("rl-async:run:transitions", fields | ({b"body": body} if number == place else {}), id=entry_id)


def test_orphaned_payloads_are_deleted(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (port, _), redis.Redis(port=port) as client:
        client.set("rl-async:run:payload:dead:1", b"never named")
        driver = Driver(redis_journals(port))
        assert client.keys("rl-async:run:payload:*") == []
        driver.journal.close()


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
