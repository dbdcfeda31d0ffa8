"""Payload shards on threads, and what the queue knows of them."""

import threading
import time
from pathlib import Path

from rl_async import messages as m
from rl_async.transfer_queue.client import SyncQueueClient
from rl_async.transfer_queue.shard.__main__ import run_shard
from tests.contracts.queue.peers import RunningQueue

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
