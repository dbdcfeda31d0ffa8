"""A queue without a run, for scripts, tests and other systems.

    with serve(tasks, group_size=4, batch_groups=8) as address:  # in this process, on a thread
        ...  # clients, here or elsewhere

Version 0.0 is published from the start, so workers get leases at once. Whoever reads batches commits, publishes and
retires them (``state/batches.py`` says what that means; ``client/readers.py`` does it).
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import zmq

from rl_async.configs.derived.queue import is_loopback, slack
from rl_async.configs.nearest import nearest
from rl_async.configs.schema.queue import QueueConfig
from rl_async.errors import UserError
from rl_async.messages import Task, Version
from rl_async.transfer_queue.journal.interface import Journal
from rl_async.transfer_queue.journal.memory import MemoryJournal
from rl_async.transfer_queue.journal.recovery import JournalRecorder, recover
from rl_async.transfer_queue.journal.sqlite import SqliteJournal
from rl_async.transfer_queue.policy.admission import QueueSettings
from rl_async.transfer_queue.policy.sampling import Sampling
from rl_async.transfer_queue.reports.ledger import Ledger
from rl_async.transfer_queue.server.loop import bind
from rl_async.transfer_queue.server.loop import serve as serve_socket
from rl_async.transfer_queue.server.queue_server import QueueServer
from rl_async.transfer_queue.state.store import Store
from rl_async.transfer_queue.state.tasks import TaskList
from rl_async.transfer_queue.state.transitions import Feed

LOOPBACK = "tcp://127.0.0.1:*"  # a free port
ENDLESS = 1 << 40  # steps
CHOICES = ("fifo", "freshest", "priority")
START_S = 30.0
STOP_S = 30.0


def standalone_settings(
    *,
    group_size: int,
    batch_groups: int,
    max_staleness: int = 1,
    lease_s: float = 15.0,
    sampling: Sampling = "fifo",
    window: int = 0,
) -> QueueSettings:
    """The settings of a queue without a run. Raises UserError naming an argument that is out of range."""
    least = {"group_size": (group_size, 1), "batch_groups": (batch_groups, 1), "max_staleness": (max_staleness, 0)}
    for name, (value, smallest) in least.items():
        if value < smallest:
            raise UserError(f"{name}={value}: at least {smallest} is needed")
    if not lease_s > 0:
        raise UserError(f"lease_s={lease_s}: more than 0 seconds are needed")
    if sampling not in CHOICES:
        raise UserError(
            f"sampling={sampling}{nearest(sampling, CHOICES)} (quotas need the data sets of a run's config)"
        )
    if sampling != "fifo" and max_staleness < 2:
        raise UserError(f"sampling={sampling} has nothing to choose from with max_staleness={max_staleness}: give 2")
    settings = QueueSettings(
        sampling=sampling,
        slack=slack(QueueConfig(sampling=sampling)),
        window=window,
        steps=ENDLESS,
        batch_groups=batch_groups,
        group_size=group_size,
        max_staleness=max_staleness,
        lease_s=lease_s,
    )
    slots = settings.slots_at(max_staleness)
    if window and not batch_groups <= window < slots:
        raise UserError(f"window={window}: at least batch_groups={batch_groups} and fewer than all {slots}, or 0")
    return settings


def serve_standalone(
    settings: QueueSettings,
    tasks: Sequence[Task],
    *,
    address: str = LOOPBACK,
    folder: Path | None = None,
    listening: Callable[[str], None],
    stopped: Callable[[], bool],
) -> None:
    """Serve until ``stopped``; ``listening`` is called once with the address.

    With a ``folder`` the queue is durable: another one with the same folder and tasks continues from there. Raises
    UserError for an address that is not this machine's loopback, a taken port, a journal that cannot be used, or a list
    of tasks of another length than the journal's.
    """
    if not is_loopback(urlsplit(address).hostname or ""):
        raise UserError(f"{address} can be reached from elsewhere, and a queue served without a run has no keys")
    with contextlib.ExitStack() as stack:
        journal: Journal = MemoryJournal("alone") if folder is None else SqliteJournal(folder, "alone")
        stack.callback(journal.close)
        flush, feed = journal.flush, Feed(journal.append)
        if folder is None:
            store = Store(settings, TaskList(tasks), [], feed)
        else:
            ledger = stack.enter_context(contextlib.closing(Ledger(folder / "ledger.jsonl")))
            feed.subscribe(ledger.append)
            store = Store(settings, TaskList(tasks), [], feed)
            recover(store, journal, ledger, time.monotonic())
            flush = JournalRecorder(store, journal, ledger).flush
        if store.status(time.monotonic()).published.step < 0:
            store.publish(Version(0, 0), [])
        flush()
        socket = stack.enter_context(bind(stack.enter_context(zmq.Context()), address))
        listening(socket.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode())
        serve_socket(socket, QueueServer(store, journal, feed), flush, stopped)


@contextlib.contextmanager
def serve(
    tasks: Sequence[Task] = (),
    *,
    group_size: int = 1,
    batch_groups: int = 1,
    max_staleness: int = 1,
    lease_s: float = 15.0,
    sampling: Sampling = "fifo",
    window: int = 0,
    address: str = LOOPBACK,
    folder: Path | None = None,
) -> Iterator[str]:
    """A queue on a thread of this process while the block runs; its address.

    ``tasks`` are handed out once each, then those that producers submit or bring. Up to ``(max_staleness + 1) *
    batch_groups`` groups of ``group_size`` samples are alive between admission and publication. With a ``folder``,
    which must exist, the queue is durable. Raises UserError as ``serve_standalone`` does, at the end of the block if it
    happens in between.
    """
    settings = standalone_settings(
        group_size=group_size,
        batch_groups=batch_groups,
        max_staleness=max_staleness,
        lease_s=lease_s,
        sampling=sampling,
        window=window,
    )
    addresses: list[str] = []
    changed, stop = threading.Event(), threading.Event()

    def listening(at: str) -> None:
        addresses.append(at)
        changed.set()

    with ThreadPoolExecutor(1, thread_name_prefix="transfer queue") as thread:
        serving = thread.submit(
            serve_standalone, settings, tasks, address=address, folder=folder, listening=listening, stopped=stop.is_set
        )
        serving.add_done_callback(lambda _: changed.set())
        try:
            if not changed.wait(START_S):
                raise UserError(f"the transfer queue did not start within {START_S:g} s")
            if addresses:
                yield addresses[0]
        finally:
            stop.set()
            serving.result(STOP_S)
    if not addresses:
        raise UserError("the transfer queue ended before it began")
