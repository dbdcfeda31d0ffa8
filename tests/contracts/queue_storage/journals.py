"""Journals of all kinds for the contract tests, a real Redis server among them, and a store that writes one."""

import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from rl_async import messages as m
from rl_async.errors import JournalError
from rl_async.messages import Done, LeasedGroup, Reserved, Task, TrajectoryHeader, Version, VersionRun
from rl_async.transfer_queue.admission import QueueSettings
from rl_async.transfer_queue.client import SyncQueueClient
from rl_async.transfer_queue.delivery import Counted
from rl_async.transfer_queue.journal import Journal, MemoryJournal, SqliteJournal
from rl_async.transfer_queue.redis_journal import RedisJournal
from rl_async.transfer_queue.shard import run_shard
from rl_async.transfer_queue.store import Feed, Store
from tests.contracts.queue.peers import SETTINGS, RunningQueue
from tests.support.ports import free_port

OpenJournal = Callable[[], Journal]
EVAL_TASK = Task(task_id="e", data_source="", prompt=[], ground_truth="")


@contextmanager
def redis_server(
    folder: Path, port: int = 0, options: Sequence[str] = (), password: str | None = None
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """A server of its own that answers; it ends with the block. Skips the test where there is none."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("no redis-server here; install it with: apt-get install redis-server")
    if not port:
        port = free_port()
    given = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    given += ["--appendonly", "yes", "--appendfsync", "always"]  # with everysec a killed server may lose some
    given += ["--requirepass", password] if password else []
    server = subprocess.Popen([program, *given, *options], stdout=subprocess.DEVNULL)
    try:
        with redis.Redis(port=port, password=password) as client:
            deadline = time.monotonic() + 30
            while True:
                try:
                    client.ping()
                    break
                except redis.RedisError:
                    assert time.monotonic() < deadline and server.poll() is None
                    time.sleep(0.05)
        yield port, server
    finally:
        server.kill()
        server.wait()


def sqlite_journals(folder: Path, **settings: Any) -> OpenJournal:
    """Opens the same journal again and again."""
    return lambda: SqliteJournal(folder, "run", **settings)


def redis_journals(port: int, *, tries_s: float = 2.0, **settings: Any) -> OpenJournal:
    """Opens the same journal again and again."""
    return lambda: RedisJournal(f"redis://127.0.0.1:{port}/0", "run", owner_s=1.0, tries_s=tries_s, **settings)


@contextmanager
def journals(kind: str, folder: Path) -> Iterator[OpenJournal]:
    """Opens the same journal each time it is called, a short log being worth compacting; ``memory`` is another each
    time."""
    if kind == "memory":
        yield MemoryJournal
    elif kind == "sqlite":
        yield sqlite_journals(folder, least_log_bytes=0)
    else:
        with redis_server(folder) as (port, _):
            yield redis_journals(port, least_log=0)


class Driver:
    """A store with its journal, as the queue has them, driven by hand."""

    def __init__(self, open_journal: OpenJournal, settings: QueueSettings = SETTINGS) -> None:
        self._open_journal, self._settings = open_journal, settings
        self._start()

    def _start(self) -> None:
        self.journal = self._open_journal()
        self.store = Store(self._settings, Counted(), [EVAL_TASK], Feed(self.journal.append))
        try:
            dump, self.count, transitions = self.journal.recover()
            self.store.recover(dump, transitions, 0.0)
        except JournalError:
            self.journal.close()
            raise

    def restart(self) -> None:
        """Another queue in the place of one that is gone; what was not flushed went with it."""
        self.journal.close()
        self._start()

    def lease(self, groups: int = 9, request: bytes = b"") -> list[LeasedGroup]:
        self.store.delivery.renew("w", 0.0)
        return self.store.delivery.lease("w", groups, 0.0, request).groups

    def put(self, group: LeasedGroup, sample: int, rows: Sequence[bytes] = (b"abc",)) -> None:
        headers = [header(group, sample, segment, row) for segment, row in enumerate(rows)]
        assert self.store.delivery.put("w", headers, 0.0) == Done()
        self.journal.put(group.group_id, sample, rows)

    def train(self, step: int) -> list[int]:
        """Generate, train and publish a step; the groups."""
        for group in self.lease():
            for sample in group.samples:
                self.put(group, sample, [payload(group.group_id, sample), b"", b"tail"])
        batch = self.store.batches.reserve(step, 0.0)
        assert isinstance(batch, Reserved), batch
        assert self.store.batches.commit(step) == self.store.publish(Version(0, step + 1), []) == Done()
        return sorted(batch.tasks)

    def read(self, group: int, sample: int, segment: int = 0) -> bytes | None:
        row = self.journal.get((group, sample, segment))
        return None if row is None else bytes(row)


def payload(group: int, sample: int, nbytes: int = 1000) -> bytes:
    return f"{group}.{sample};".encode() * (nbytes // 6)


def header(group: LeasedGroup, sample: int, segment: int, body: bytes) -> TrajectoryHeader:
    values: dict[str, Any] = {"episode_id": "e", "finish_reason": "stop", "tokens_hash": "", "reward": 1.0}
    return TrajectoryHeader(
        group_id=group.group_id,
        sample=sample,
        attempt=group.attempt,
        partition=group.partition,
        segment=segment,
        tokens=1,
        sampled=1,
        versions=[VersionRun(group.min_version, 0, 1)],
        nbytes=len(body),
        **values,
    )


# Payload shards on threads, and what the queue knows of them.


WAIT_S = 10.0


class RunningShard:
    """A payload shard on a thread. What ends it before its time fails the test, as any thread's error does."""

    def __init__(self, address: str, queue: RunningQueue, name: str, run: Path | None = None) -> None:
        self.address = address
        self._stop = threading.Event()
        arguments = (address, queue.address, name)
        options = {"stopped": self._stop.is_set, "run": run}
        self._thread = threading.Thread(target=run_shard, args=arguments, kwargs=options)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


def registry(client: SyncQueueClient) -> m.ShardList:
    reply = client.shards(-1, 0.0)
    assert isinstance(reply, m.ShardList)
    return reply


def wait_for_shards(client: SyncQueueClient, count: int, other_than: m.ShardList | None = None) -> m.ShardList:
    """Until the queue knows so many, and not those that it knew before."""
    deadline = time.monotonic() + WAIT_S
    while len((found := registry(client)).shards) != count or (other_than and found.shards == other_than.shards):
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found
