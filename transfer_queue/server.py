"""The queue's server without its socket: verbs and parked long polls around the pure store.

    request --> [gate -> verb -> store] --> responses, to be sent when the journal has them (``server_loop.py``)
                            |  transitions
                            v
             journal, ledger; parked long polls are tried again

One thread does all of it, so handlers need no locks. A request that cannot be understood is answered Malformed and
counted; one that does not apply is answered Refused. Neither changes anything. ``recover`` restores the store from a
journal and completes the ledger. ``serve`` runs a queue without a run, for scripts, tests and other systems:

    with serve(tasks, group_size=4, batch_groups=8) as address:  # in this process, on a thread
        ...  # clients, here or elsewhere
"""

import contextlib
import heapq
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import zmq

from rl_async import messages as m
from rl_async.configs.derived import is_loopback, slack
from rl_async.configs.schema.queue import QueueConfig, QueueLimits
from rl_async.configs.suggestions import nearest
from rl_async.errors import JournalError, ProtocolError, UserError
from rl_async.files import UNDECODABLE
from rl_async.messages import Task, Version
from rl_async.transfer_queue import transitions as t
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.admission import QueueSettings, Sampling
from rl_async.transfer_queue.auth.roles import AllowList
from rl_async.transfer_queue.delivery import TaskList
from rl_async.transfer_queue.journal.journal import Journal, MemoryJournal
from rl_async.transfer_queue.journal.sqlite import SqliteJournal
from rl_async.transfer_queue.ledger import Ledger
from rl_async.transfer_queue.server_loop import Gate, Outgoing, Response, bind
from rl_async.transfer_queue.server_loop import serve as serve_socket
from rl_async.transfer_queue.store import Rates, Store
from rl_async.transfer_queue.transitions import Feed, Transition
from rl_async.transfer_queue.verbs import ENGINES_CHANGE, VERBS, Announcing, Incoming, Leasing, Serving, Verb


class _Parked(NamedTuple):
    incoming: Incoming[Any]
    deadline: float


class Parking:
    """The parked requests of all connections. A request that comes again takes the place of its first copy."""

    def __init__(self, verbs: Sequence[Verb]) -> None:
        self._parked: dict[Verb, dict[bytes, _Parked]] = {verb: {} for verb in verbs if verb.wakes}
        self._of: dict[bytes, set[tuple[Verb, bytes]]] = {}  # by connection; ids may repeat among verbs
        # By deadline, also of requests that are gone; the number keeps verbs from being compared.
        self._deadlines: list[tuple[float, int, Verb, bytes]] = []
        self._added = 0

    def add(self, verb: Verb, incoming: Incoming[Any], deadline: float) -> None:
        """Park a request until ``deadline`` at the latest."""
        if (before := self._parked[verb].get(incoming.request_id)) is not None:
            self.remove(verb, before.incoming)
        self._parked[verb][incoming.request_id] = _Parked(incoming, deadline)
        self._of.setdefault(incoming.identity, set()).add((verb, incoming.request_id))
        self._added += 1
        heapq.heappush(self._deadlines, (deadline, self._added, verb, incoming.request_id))

    def remove(self, verb: Verb, incoming: Incoming[Any]) -> None:
        """Forget a parked request."""
        del self._parked[verb][incoming.request_id]
        own = self._of[incoming.identity]
        own.discard((verb, incoming.request_id))
        if not own:
            del self._of[incoming.identity]

    def waking(self, changed: set[Any]) -> list[tuple[Verb, list[Incoming[Any]]]]:
        """The verbs that one of these transitions concerns, with their parked requests, if there are any."""
        return [
            (verb, [waiting.incoming for waiting in parked.values()])
            for verb, parked in self._parked.items()
            if parked and not changed.isdisjoint(verb.wakes)
        ]

    def due(self, now: float) -> list[tuple[Verb, Incoming[Any]]]:
        """The requests whose deadline has come; they stay parked until they are removed."""
        due = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, verb, request_id = heapq.heappop(self._deadlines)
            waiting = self._parked[verb].get(request_id)
            if waiting is not None and waiting.deadline <= now:
                due.append((verb, waiting.incoming))
        return due

    def holds(self, verb: Verb, request_id: bytes) -> bool:
        """Whether the request is parked."""
        return request_id in self._parked[verb]

    def forget(self, identity: bytes) -> None:
        """Forget all that a connection waits for."""
        for verb, request_id in self._of.pop(identity, ()):
            del self._parked[verb][request_id]


log = logging.getLogger("rl_async.queue")

HELD_UP_S = 1.0  # beyond which a turn of the loop is logged
_VERBS = {verb.request: verb for verb in VERBS}


class QueueServer:
    """Answers requests from the store. What ``handle``, ``tick`` and ``undelivered`` return is to be sent once the
    journal is flushed: no client may hear of what a crash could undo."""

    def __init__(
        self,
        store: Store,
        journal: Journal,
        feed: t.Feed,
        clock: Callable[[], float] = time.monotonic,
        limits: QueueLimits | None = None,
        allowed: AllowList | None = None,
    ) -> None:
        self._store, self._read_clock = store, clock
        self._began, self._held_up_s, self._latest = clock(), 0.0, clock()
        clock = self._clock
        self._gate = Gate(limits or QueueLimits(), clock, store.count, journal.run_id, allowed)
        self._leasing, self._rates = Leasing(store.delivery), Rates(clock())
        self._announcing = Announcing(store.engines)
        self._queue = Serving(store, journal, self._leasing, self._announcing, self._rates, clock)
        self._changed: set[type[t.Transition]] = set()
        self._parking = Parking(VERBS)
        feed.subscribe(self._see)

    def begin_turn(self) -> None:
        """Note that the loop is at work again.

        Time beyond an eighth of a lease since the turn before is not counted in any deadline: meanwhile the queue heard
        nobody, so nobody was silent.
        """
        now = self._read_clock()
        held_up_s = now - self._began - self._store.settings.lease_s / 8
        if held_up_s > 0:
            self._held_up_s += held_up_s
            if held_up_s > HELD_UP_S:
                self._store.count("held_up")
                log.warning("the queue was held up for %.1f s; no lease and no shard ends by that", now - self._began)
        self._began = now

    def _clock(self) -> float:
        """Seconds in which the queue has served."""
        self._latest = max(self._latest, self._read_clock() - self._held_up_s)
        return self._latest

    def _see(self, transition: t.Transition) -> None:
        self._changed.add(type(transition))
        self._rates.see(transition, self._clock())

    def handle(self, parts: Sequence[Any], user: bytes = b"") -> list[Outgoing]:
        """Answer one message, and the parked requests that its effect concerns."""
        own = self._gate.answer(parts, self._answer, user)
        return ([] if own is None else [own]) + self._wake()

    def tick(self) -> list[Outgoing]:
        """End leases and waits whose time is over; the answers that follow."""
        self._gate.refresh()
        now = self._clock()
        self._store.expire(now)
        if self._announcing.is_due(now):
            self._changed |= ENGINES_CHANGE
        outgoing = self._wake()
        for verb, incoming in self._parking.due(now):
            if self._parking.holds(verb, incoming.request_id):
                outgoing += self._try(verb, incoming, last=True)
        return outgoing + self._wake()

    def undelivered(self, message: Outgoing) -> list[Outgoing]:
        """Forget what a lost connection waits for, and lease to others what it did not get.

        If the client lives, it says hello on a new connection and repeats its requests.
        """
        self._gate.forget(message.identity)
        self._parking.forget(message.identity)
        self._leasing.undelivered(message.request_id, message.identity)
        return self._wake()

    def _wake(self) -> list[Outgoing]:
        """Try parked requests again, until the store does not change any more."""
        outgoing: list[Outgoing] = []
        while self._changed:
            changed, self._changed = self._changed, set()
            for verb, parked in self._parking.waking(changed):
                for incoming in verb.retry(self._queue, parked):
                    outgoing += self._try(verb, incoming, last=False)
        return outgoing

    def _try(self, verb: Verb, incoming: Incoming[Any], *, last: bool) -> list[Outgoing]:
        """Answer a parked request if there is something to say, or if this is its ``last`` chance."""
        response = verb.handle(self._queue, incoming, last)
        if response is None:
            return []
        self._parking.remove(verb, incoming)
        return [Outgoing(incoming.identity, incoming.request_id, response)]

    def _answer(self, identity: bytes, message: wire.RequestMessage) -> Response | None:
        """The response, or None if the request is parked. Raises ProtocolError for a payload in the wrong place."""
        kind = type(message.request)
        verb = _VERBS.get(kind)
        if message.payload and (verb is None or not verb.payload):
            raise ProtocolError(f"a {kind.__name__} with {len(message.payload)} payload frames")
        if verb is None:
            return Response(m.Refused(code="not_here", reason=f"a {kind.__name__} is for payload shards"))
        if refused := self._gate.forbidden(identity, message, verb.roles):
            return refused
        incoming = Incoming(identity, message.request_id, message.request, message.payload)
        if not isinstance(message.request, m.LongPoll):
            return verb.handle(self._queue, incoming, True)
        wait_s = min(self._wait_s(message.request), verb.arrive(self._store, message.request, self._clock()))
        response = verb.handle(self._queue, incoming, wait_s <= 0)
        if response is None:
            self._parking.add(verb, incoming, self._clock() + wait_s)
        return response

    @staticmethod
    def _wait_s(request: m.LongPoll[Any]) -> float:
        return 0.0 if math.isnan(request.wait_s) else request.wait_s


SLOWEST_OF_S = 60.0


def recover(
    store: Store, journal: Journal, ledger: Ledger, now: float, *, clients_remain: bool = False, within: bool = False
) -> int:
    """Replay the journal into a new store and complete the ledger; returns how many transitions there were.

    The ledger is on the disk before the journal records anything more: without its name there, nothing would go on. A
    journal that is ``within`` the run's folder is this run's: a lost ledger is written again from it.

    Raises JournalError if what was recorded makes no sense, is another run's of the same name, or ends before the
    ledger does and ``clients_remain`` who were told what is lost, or if the ledger is lost and the journal no longer
    has all that it said; DataError if the tasks are not those it was recorded with.
    """
    dump, dumped, transitions = journal.recover()
    lost = ledger.is_empty and within
    if lost and dump:
        raise JournalError(
            "ledger.jsonl is lost, and the journal no longer has the beginning of what it said, which the audit needs: "
            "put the file back, or move the journal away and continue from the newest checkpoint with --resume"
        )
    known = ledger.follow(journal.run_id, dumped) or lost
    try:
        recorded = _of_this_run(dump, transitions, known, journal.run_id)
        store.recover(dump, ledger.catch_up(recorded, may_cut=not clients_remain), now)
    except (*UNDECODABLE, LookupError, ValueError) as error:
        raise JournalError(
            f"the journal of {journal.run_id} does not fit this version of the queue ({type(error).__name__}: {error}"
            "); finish the run with the version that began it, or move the journal away and continue with --resume"
        ) from error
    ledger.force()
    return ledger.count


def _of_this_run(dump: bytes, transitions: Iterable[Transition], known: bool, run_id: str) -> Iterator[Transition]:
    """The transitions; raises JournalError if there are any and the ledger never followed this journal."""
    empty = not dump
    for transition in transitions:
        empty = False
        if known:
            yield transition
    if not empty and not known:
        raise JournalError(
            f"the journal is that of {run_id}, which ledger.jsonl in this run folder does not mention: is it "
            "another run of the same name? Choose another name, or move that journal away (a run that moves to another "
            "host takes its folder along)"
        )


class JournalRecorder:
    """Flushes journal and ledger together, and compacts the journal when it has outgrown the state."""

    def __init__(
        self, store: Store, journal: Journal, ledger: Ledger, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._journal, self._ledger, self._clock = store, journal, ledger, clock
        self._slowest_at = -SLOWEST_OF_S

    def flush(self) -> None:
        """Make durable what happened, then write it down for people. The status has the slowest flush of a while."""
        began = self._clock()
        self._flush()
        now = self._clock()
        if now - began >= self._store.flush_s or now - self._slowest_at >= SLOWEST_OF_S:
            self._store.flush_s, self._slowest_at = now - began, now

    def _flush(self) -> None:
        self._journal.flush()
        self._ledger.flush()
        if self._journal.outgrown:
            self._ledger.compacting()
            self._journal.compact(self._store.dump())


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
