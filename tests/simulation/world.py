"""One schedule: a clock, the queue's host, faults, and the actors, all driven by one seeded generator of numbers."""

import contextlib
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from random import Random
from typing import Any

from rl_async.messages import Request, Version
from rl_async.transfer_queue.journal.recovery import JournalRecorder, recover
from rl_async.transfer_queue.policy.admission import QueueSettings
from rl_async.transfer_queue.reports.ledger import Ledger
from rl_async.transfer_queue.server.loop import serve
from rl_async.transfer_queue.server.queue_server import QueueServer
from rl_async.transfer_queue.state.store import Store
from rl_async.transfer_queue.state.tasks import Counted
from rl_async.transfer_queue.state.transitions import Feed
from tests.simulation.actors import Trainer, Worker
from tests.simulation.disk import Crash, Disk, Fuse, SimJournal
from tests.simulation.network import Network, RouterSocket
from tests.simulation.reader import Reader
from tests.simulation.rules import Rules
from tests.support.tasks import easy_or_hard

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
            self._server = QueueServer(self.store, journal, feed, world.clock)
            self._socket = RouterSocket(world, self.disk.run_id)
            self.up = True
            self.lives += 1
        except Crash:
            self.died()
            world.after(0.1, self.start, relaunched)

    def receive(self, parts: list[Any]) -> None:
        """A message has come."""
        self._socket.inbox.append(parts)
        if not self._waking:
            self._waking = True
            self._world.after(0.002, self.turn)

    def turn(self) -> None:
        """One turn of the queue's loop."""
        self._waking = False
        if not self.up:
            return
        turns = iter((False, True))
        try:
            serve(self._socket, self._server, self._recorder.flush, lambda: next(turns), self._world.clock)  # type: ignore[arg-type]
        except Crash as crash:
            self.died(torn=str(crash) == "after the flush")
            if self._world.loses_disk:
                self._world.struck["journal lost"] += 1
                self.lose_disk()
                if self._world.trainer.done:  # others still ask for the end that it declared
                    self._world.trainer.killed()
            self._world.after(self._world.rng.random(), self.start, False)

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
