"""One schedule: a clock, the queue's host, faults, and the actors, all driven by one seeded generator of numbers."""

import contextlib
import heapq
import itertools
import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from rl_async.messages import Fail, Lease, Put, Renew, Request, Version
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.admission import QueueSettings
from rl_async.transfer_queue.client import refusal
from rl_async.transfer_queue.delivery import Counted
from rl_async.transfer_queue.ledger import Ledger
from rl_async.transfer_queue.server import JournalRecorder, Outgoing, QueueServer, recover, serve_requests
from rl_async.transfer_queue.store import Feed, Store
from rl_async.transfer_queue.transitions import LeaseLost, Transition
from tests.simulation.actors import Reader, Trainer, Worker
from tests.simulation.rules import Broken, Rules
from tests.simulation.surroundings import PATIENCE_S, Crash, Disk, Fuse, Network, RouterSocket, SimJournal
from tests.support.queue import easy_or_hard

TICK_S = 0.1
FAULTS_S = 6.0  # at most; then everything is driven to the end
END_S = 200.0  # a run that takes longer has stopped
MOST_EVENTS = 100_000  # so has one that goes round and round
Process = Generator[float | tuple[Request, list[bytes]], Any, None]


class Host:
    """Where the queue's process runs: the real server, store, loop and recovery on the simulated disk."""

    def __init__(self, world: "World", folder: Path) -> None:
        self._world = world
        self._ledger_path = folder / "ledger.jsonl"
        self._ledger_path.unlink(missing_ok=True)
        self._ledger: Ledger | None = None
        self._disks = 0
        self.lives = 0  # processes so far
        self.up = False
        self.ahead = 0.0  # seconds that the flushes of this turn took
        self._slow_s = 0.0  # that the next flush takes
        self._holds: list[tuple[float, float]] = []  # from when until when this process did nothing
        self._heard: dict[str, float] = {}  # when the latest message of each worker came that it took as a sign of life
        self._waking = False
        self.lose_disk()
        self.start(False)

    def lose_disk(self) -> None:
        """All that was recorded is gone, as a memory journal is when its process dies."""
        self._disks += 1
        self._world.rules.disk_lost()
        self.disk = Disk(f"disk-{self._disks}")

    def start(self, relaunched: bool) -> None:
        """A new process, from what the disk has."""
        world = self._world
        if self.up:
            return
        try:
            journal = SimJournal(self.disk, world.fuse, world.rng)
            self._ledger = Ledger(self._ledger_path)
            feed = Feed(journal.append, self._ledger.append)
            self.store = Store(world.settings, Counted(easy_or_hard), [], feed)
            recover(self.store, journal, self._ledger, world.now)
            if relaunched:
                self.store.relaunch()
            self._recorder = JournalRecorder(self.store, journal, self._ledger)
            self._recorder.flush()
            self._server = QueueServer(self.store, journal, feed, self._clock)
            self._socket = RouterSocket(world, self.disk.run_id)
            feed.subscribe(self._see)
            self._holds, self._heard, self._began = [], {}, world.now
            self.up = True
            self.lives += 1
        except Crash:
            self.died()
            world.after(0.1, self.start, relaunched)

    def receive(self, parts: list[Any]) -> None:
        """A message has come."""
        self._socket.inbox.append((self._world.now, parts))
        if not self._waking:
            self._waking = True
            self._world.after(0.002, self.turn)

    def hold(self, seconds: float) -> None:
        """It does nothing for so long, as when it is stopped; what comes waits in its socket."""
        begun, until = max(self._world.now, self._held_until), self._world.now + seconds
        if self.up and until > begun:
            self._holds.append((begun, until))

    def slow_flush(self, seconds: float) -> None:
        """The disk takes so long for the next flush."""
        self._slow_s = seconds

    @property
    def _held_until(self) -> float:
        return max((until for _, until in self._holds), default=0.0)

    def _clock(self) -> float:
        return self._world.now + self.ahead

    def _flush(self) -> None:
        self.ahead, self._slow_s = self.ahead + self._slow_s, 0.0
        self._recorder.flush()

    def turn(self) -> None:
        """One turn of the queue's loop."""
        if self._held_until > self._world.now:
            if self._waking:
                self._world.after(self._held_until - self._world.now, self.turn)
            return
        self._waking = False
        if not self.up:
            return
        turns = iter((False, True))
        try:
            serve_requests(self._socket, self, self._flush, lambda: next(turns), self._clock)  # type: ignore[arg-type]
            if self.ahead:
                self.hold(self.ahead)
        except Crash as crash:
            self.died(torn=str(crash) == "after the flush")
            if self._world.loses_disk:
                self._world.struck["journal lost"] += 1
                self.lose_disk()
                if self._world.trainer.done:  # others still ask for the end that it declared
                    self._world.trainer.killed()
            self._world.after(self._world.rng.random(), self.start, False)
        finally:
            self.ahead = 0.0

    # --- between the loop and the server ----------------------------------------------------------------------------

    def begin_turn(self) -> None:
        """See ``RequestServer``."""
        self._server.begin_turn()

    def handle(self, parts: list[Any], user: bytes = b"") -> list[Outgoing]:
        """See ``RequestServer``; note which worker was heard."""
        outgoing = self._server.handle(parts, user)
        message = wire.decode_request(parts[1:])
        refused = [refusal(out.response.reply) for out in outgoing if out.request_id == message.request_id]
        if isinstance(message.request, (Lease, Renew, Put, Fail)) and wire.HELLO not in refused:
            self._heard[message.request.worker] = self._socket.came
        return outgoing

    def tick(self) -> list[Outgoing]:
        """See ``RequestServer``."""
        return self._server.tick()

    def undelivered(self, message: Outgoing) -> list[Outgoing]:
        """See ``RequestServer``."""
        return self._server.undelivered(message)

    def _see(self, event: Transition) -> None:
        """Check that a worker whose leases end for its silence had the time in which the queue served to speak.

        Each time that the queue is held up, an eighth of a lease counts nevertheless, and what is left of a turn.
        """
        if isinstance(event, LeaseLost) and event.charged and not self.store.book.leases.hears(event.worker):
            lease_s, since = self._world.settings.lease_s, self._heard.get(event.worker, self._began)
            held = [until - max(since, begun) for begun, until in self._holds if until > since]
            silent_s = self._clock() - since - sum(held) + len(held) * (lease_s / 8 + TICK_S)
            self._world.rules.silent(event.worker, silent_s)

    # --- its end ----------------------------------------------------------------------------------------------------

    def died(self, *, torn: bool = False) -> None:
        """The process is gone; it may have been in the middle of a line of the ledger."""
        self.up = False
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None
        if torn:
            with self._ledger_path.open("ab") as file:
                file.write(b'{"event":"pu')

    def recovered(self) -> bytes:
        """The dump of a store that replays the disk."""
        store = Store(self._world.settings, Counted(easy_or_hard), [], lambda _: None)
        dump, _, transitions = SimJournal(self.disk, self._world.fuse, self._world.rng).recover()
        store.recover(dump, transitions, self._world.now)
        return store.dump()


class World:
    """Everything of one schedule. ``run`` raises Broken, naming the rule, if one does not hold."""

    def __init__(self, seed: int, folder: Path) -> None:
        rng = self.rng = Random(seed)
        self.struck: Counter[str] = Counter()
        self.now, self._events, self._order = 0.0, list[Any](), itertools.count()
        self._ids = itertools.count(1)
        bound = rng.choice([0, 1, 1, 2])
        batch_groups = rng.randint(1, 2)
        self.settings = QueueSettings(
            steps=rng.randint(3, 6),
            batch_groups=batch_groups,
            group_size=rng.randint(1, 3),
            max_staleness=bound,
            on_straggler=rng.choice(["wait", "drop"]),
            lease_s=1.5,
            max_attempts=rng.choice([3, 1000]),
            max_refills=rng.choice([0, 0, 1]),
            slack=rng.randint(0, bound),
            sampling=rng.choice(["fifo", "freshest", "priority", "quota"]),
            window=rng.choice([0, 0, batch_groups, batch_groups + 1]),
            consumer_bytes=rng.choice([0, 2000, 1 << 20]),
            weights={"easy": ((0, 1.0),), "hard": ((0, 2.0), (5, 0.0))},
        )
        self.publish_every = rng.randint(1, bound - self.settings.slack + 1)
        self.checkpoint_every = rng.randint(1, 3)
        self.loses_disk = rng.random() < 0.2
        self.faults = True
        self.serving = Version(0, 0)  # by the engines
        self.fuse = Fuse(self.struck)
        self.rules = Rules(self.settings)
        self.host = Host(self, folder)
        self.network = Network(self)
        self.trainer = Trainer(self)
        self.reader = Reader(self)
        self.workers = [Worker(self, slot) for slot in range(rng.randint(1, 3))]

    # --- time -------------------------------------------------------------------------------------------------------

    def clock(self) -> float:
        """Seconds since the beginning."""
        return self.now

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call it later."""
        heapq.heappush(self._events, (self.now + seconds, next(self._order), call, arguments))

    def new_id(self) -> bytes:
        """A request id."""
        return next(self._ids).to_bytes(8, "big")

    def spawn(self, owner: Any, process: Process) -> None:
        """Begin a process: it yields seconds to sleep, or a request with its payload, whose reply it gets."""
        self.after(0.0, self.proceed, owner, process, None)

    def proceed(self, owner: Any, process: Process, value: Any) -> None:
        """Go on with a process, unless its owner is dead; with that of a frozen one, when it thaws."""
        if owner.dead:
            return
        if owner.frozen_until > self.now:
            self.after(owner.frozen_until - self.now, self.proceed, owner, process, value)
            return
        with contextlib.suppress(StopIteration):
            wanted = process.send(value)
            if isinstance(wanted, tuple):
                owner.client.ask(*wanted, process)
            else:
                self.after(wanted, self.proceed, owner, process, None)

    # --- faults -----------------------------------------------------------------------------------------------------

    def _plan_faults(self) -> None:
        """Draw when what strikes."""
        rng = self.rng
        kinds: list[tuple[str, Callable[[], None], int]] = [
            ("queue", lambda: self.fuse.light(rng.randint(0, 15)), 4),
            ("trainer killed", lambda: self.trainer.killed(), 2),
            ("trainer frozen", lambda: self.trainer.freeze(), 2),
            ("worker killed", lambda: rng.choice(self.workers).killed(), 2),
            ("consumer killed", lambda: self.reader.killed(), 2),
            ("worker frozen", lambda: rng.choice(self.workers).freeze(), 2),
            ("connection broken", self._break_connection, 4),
            ("all relaunched", self._relaunch, 1),
            ("queue held up", lambda: self._hold(self.host.hold), 2),
            ("slow disk", lambda: self.host.slow_flush(self._pause_s()), 2),
            ("trainer held up", lambda: self._hold(self.trainer.hold), 1),
            ("worker held up", lambda: self._hold(rng.choice(self.workers).hold), 1),
            ("consumer held up", lambda: self._hold(self.reader.hold), 1),
            ("machine held up", lambda: self._hold(self._hold_all), 1),
        ]
        length = self.rng.uniform(1.0, FAULTS_S)
        for name, strike, most in kinds:
            for _ in range(rng.randint(0, most)):
                self.after(rng.random() * length, self._strike, name, strike)
        self.after(length, self._calm)

    def _strike(self, name: str, strike: Callable[[], None]) -> None:
        if name != "queue":  # counted where it strikes
            self.struck[name] += 1
        strike()

    def _pause_s(self) -> float:
        """Half of, once, or twice what makes a difference to somebody."""
        return self.rng.choice([0.5, 1.0, 2.0]) * self.rng.choice([self.settings.lease_s, PATIENCE_S])

    def _hold(self, hold: Callable[[float], None]) -> None:
        """Once, or again and again, with a moment in between."""
        for turn in range(self.rng.choice([1, 1, 4])):
            self.after(turn * 1.0, hold, self._pause_s() if not turn else 0.9)

    def _hold_all(self, seconds: float) -> None:
        """A virtual machine that is suspended."""
        for actor in (self.host, self.trainer, self.reader, *self.workers):
            actor.hold(seconds)

    def _break_connection(self) -> None:
        alive = [client for client in self.network.clients.values() if client.alive]
        if alive:
            self.rng.choice(alive).new_identity()

    def _relaunch(self) -> None:
        """Every process of the run is started anew."""
        self.host.died()
        self.trainer.killed()
        for worker in list(self.workers):
            worker.killed()
        self.reader.killed()
        self.after(0.1, self.host.start, True)

    def _calm(self) -> None:
        self.faults = False
        self.fuse.out()

    # --- the whole --------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self.host.turn()
        self.after(TICK_S, self._tick)

    def run(self) -> None:
        """Drive everything to the end, and check what is left."""
        self._tick()
        self._plan_faults()
        while not self._ended():
            self.now, _, call, arguments = heapq.heappop(self._events)
            if self.now > END_S or next(self._order) > MOST_EVENTS:
                status = self.host.store.status(self.now) if self.host.up else "the queue is down"
                self.rules.broken(f"the run does not end: trainer at step {self.trainer.step}, {status}")
            call(*arguments)
        self.host.died()
        record = self.reader.records.get(self.host.disk.run_id)
        self.rules.ended(self.host.store, self.host.disk, self.host.recovered(), self.now, record)

    def _ended(self) -> bool:
        others = all(worker.done for worker in self.workers) and self.reader.done
        return self.trainer.done and self.host.up and others


_CHUNK = 50
_SHARED_MEMORY = Path("/dev/shm")  # ledgers are written there where it is


class Outcome(NamedTuple):
    """Of some schedules: how often what struck, and what broke by seed."""

    struck: Counter[str]
    broken: dict[int, str]


def simulate(seeds: Sequence[int]) -> Outcome:
    """Run these schedules."""
    struck: Counter[str] = Counter()
    broken: dict[int, str] = {}
    folder = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="simulation-", dir=folder) as name:
        for seed in seeds:
            world = World(seed, Path(name))
            try:
                world.run()
            except Broken as error:
                broken[seed] = str(error)
            except Exception as error:  # whatever it is, it is told with its seed, and the program fails
                broken[seed] = f"{type(error).__name__}: {error}"
            struck += world.struck
    return Outcome(struck, broken)


def simulate_all(seeds: Sequence[int], processes: int) -> Outcome:
    """Run these schedules on some processes."""
    chunks = [seeds[start : start + _CHUNK] for start in range(0, len(seeds), _CHUNK)]
    if processes == 1:
        outcomes = [simulate(chunk) for chunk in chunks]
    else:
        quiet = (logging.WARNING,)  # what the queue says of its slow disk
        with ProcessPoolExecutor(processes, get_context("spawn"), logging.disable, quiet) as pool:
            outcomes = list(pool.map(simulate, chunks))
    struck: Counter[str] = Counter()
    broken: dict[int, str] = {}
    for outcome in outcomes:
        struck += outcome.struck
        broken |= outcome.broken
    return Outcome(struck, broken)
