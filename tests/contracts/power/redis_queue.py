"""A queue whose journal is on a Redis server that syncs: ``python -m tests.contracts.power.redis_queue ROOT``.

The server is recorded with it. Redis does not sync the folder in which it makes its own, so that is made before.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from rl_async.files import make_durable_folder
from rl_async.transfer_queue.redis_journal import RedisJournal
from tests.contracts.power.queue import RUN, Promise, Queue, train
from tests.support.ports import free_port
from tests.support.power.cuts import Change, marks_of

SERVER = "redis"


class Refused(Exception):
    """Redis does not start on what a cut left: its log says to repair the file with redis-check-aof."""


@contextmanager
def serving(folder: Path) -> Iterator[int]:
    """A server on this folder that syncs each write; its port. It is killed in the end."""
    port = free_port()
    options = ["--bind", "127.0.0.1", "--dir", str(folder), "--appendonly", "yes", "--appendfsync", "always"]
    command = ["redis-server", "--port", str(port), *options, "--save", ""]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        with redis.Redis(port=port) as client:
            while not _answers(client):
                if server.poll() is not None:
                    raise Refused
                time.sleep(0.02)
        yield port
    finally:
        server.kill()
        server.wait()


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


def open_queue(folder: Path, port: int) -> Queue:
    """A queue with its ledger in ``folder`` and its journal on the server."""
    return Queue(folder, RedisJournal(f"redis://127.0.0.1:{port}/0", "run", owner_s=1.0, tries_s=5.0, least_log=20))


def check(changes: list[Change], root: Path, folder: Path, marks: list[str]) -> None:
    """Raise what the queue raises, and AssertionError for what is lost; a server that refuses has noticed."""
    try:
        (folder / SERVER / "appendonlydir").mkdir(parents=True, exist_ok=True)
        with serving(folder / SERVER) as port:
            promise = Promise(marks_of(changes), root, lambda run: open_queue(run, port), may_lose=False)
            promise.check(folder, marks)
    except Refused:
        return


if __name__ == "__main__":
    root = Path(sys.argv[1])
    make_durable_folder(root / SERVER / "appendonlydir")
    with serving(root / SERVER) as port:
        train(root / RUN, lambda folder: open_queue(folder, port))
