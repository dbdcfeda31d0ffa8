"""Redis: a lost server, a replaced queue, another version: a clean recovery, or an error that says what to do."""

import random
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import redis

from rl_async.errors import JournalError
from rl_async.messages import Version
from rl_async.transfer_queue.journal.redis import RedisJournal
from rl_async.transfer_queue.transitions import GrantVoided
from tests.contracts.queue_storage.journals import (
    Driver,
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
