"""The queue of a simulated fleet: the real server with ledger and memory journal, in a process of its own.

python -m benchmarks.scale.server ADDRESS WORKERS FOLDER
"""

import sys
import time
from contextlib import closing
from pathlib import Path

import zmq

from benchmarks.queue.arms import ready
from rl_async.process.allocation import collect_rarely, reuse_freed_memory
from rl_async.transfer_queue.admission import QueueSettings
from rl_async.transfer_queue.delivery import Counted
from rl_async.transfer_queue.journal import MemoryJournal
from rl_async.transfer_queue.ledger import Ledger
from rl_async.transfer_queue.server import JournalRecorder, QueueLimits, QueueServer, bind, recover, serve_requests
from rl_async.transfer_queue.store import Feed, Store

ROWS = 8  # of a group
LEASE_S = 15.0  # the default of queue.lease_s
MAX_STALENESS = 3
OTHERS = 64  # connections beside those of the workers


def batch_groups(workers: int) -> int:
    """Groups of a step: with this bound, half of the workers have a group at a time and the others wait for one."""
    return max(4, workers // 8)


def settings(workers: int) -> QueueSettings:
    """Those of a run with this many workers."""
    return QueueSettings(
        steps=1 << 40,
        batch_groups=batch_groups(workers),
        group_size=ROWS,
        max_staleness=MAX_STALENESS,
        lease_s=LEASE_S,
        max_attempts=100,  # what is held by workers that are killed is to be leased again
        max_bytes=1 << 32,
    )


def main(address: str, workers: int, folder: Path) -> None:
    """Serve until killed."""
    limits = QueueLimits(clients=5 * workers // 4 + OTHERS)  # those that are killed keep their places for two minutes
    with (
        closing(MemoryJournal()) as journal,
        closing(Ledger(folder / "ledger.jsonl")) as ledger,
        zmq.Context() as context,
    ):
        feed = Feed(journal.append, ledger.append)
        store = Store(settings(workers), Counted(), [], feed)
        recover(store, journal, ledger, time.monotonic())
        socket = bind(context, address, limits=limits)
        server = QueueServer(store, journal, feed, limits=limits)
        collect_rarely()
        ready()
        serve_requests(socket, server, JournalRecorder(store, journal, ledger).flush, lambda: False)


if __name__ == "__main__":
    reuse_freed_memory()
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
