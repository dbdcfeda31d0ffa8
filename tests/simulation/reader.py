"""A consumer beside the trainer: slow, killed now and then, with a record of its own that a kill does not undo."""

from typing import TYPE_CHECKING, Any

from rl_async import messages as m
from rl_async.transfer_queue import wire
from tests.simulation.network import Client
from tests.simulation.rules import Record

if TYPE_CHECKING:
    from tests.simulation.world import World

NAME = "logger"


class Reader:
    """Reads every trained group once: what it read and where it stands are one transaction."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._number = 0
        self.done = False
        self.records: dict[str, Record] = {}  # by the disk of the queue that they are of
        self.slow = world.rng.choice([0.02, 0.5, 3.0])
        self._begin()

    def _begin(self) -> None:
        self._number += 1
        life = self._life = _ReaderLife(self._world, self, f"{NAME}-{self._number}")
        self._world.spawn(life, life.read())

    def killed(self) -> None:
        """Another takes its place, and has the record."""
        if not self._life.dead:
            self._life.dead = True
            self.done = False
            self._world.after(self._world.rng.random(), self._begin)

    def hold(self, seconds: float) -> None:
        """It does nothing for so long."""
        self._life.frozen_until = self._world.now + seconds


class _ReaderLife:
    def __init__(self, world: "World", reader: Reader, name: str) -> None:
        self._world, self._reader = world, reader
        self.dead, self.frozen_until = False, 0.0
        self.client = Client(world, self, name)

    def queue_lost(self) -> None:
        self._reader.killed()

    def read(self) -> Any:
        world, rules = self._world, self._world.rules
        message, disk = yield m.Subscribe(consumer=NAME, oldest=True), []
        began = message.reply.position
        record = self._reader.records.setdefault(disk, Record(began))
        while True:
            after = record.position if world.rng.random() < 0.5 else -1  # its own place, or the queue's
            request = m.Read(consumer=NAME, after=after, max_groups=world.rng.randint(1, 4), wait_s=0.3)
            message, _ = yield request, []
            delivered = message.reply
            if not isinstance(delivered, m.Delivered):
                rules.broken(f"a consumer was answered {delivered}")
            for group in delivered.groups:
                yield from self._take(record, group)
            yield m.Acknowledge(consumer=NAME, position=record.position), []
            record.skipped = max(record.skipped, delivered.skipped)
            if delivered.finished:
                self._reader.done = self.dead = True
                return
            yield world.rng.random() * (self._reader.slow if world.faults else 0.02)

    def _take(self, record: Any, group: m.DeliveredGroup) -> Any:
        if group.position <= record.position:
            return  # it was killed before it could acknowledge
        fetched, _ = yield m.Fetch(rows=[header.key for header in group.headers]), []
        if isinstance(fetched.reply, m.Refused):
            return  # given up meanwhile: the next answer counts it
        rows = [bytes(row).decode() for row in wire.split(fetched.payload, fetched.reply.lengths)]
        self._world.rules.consumed(record, group, rows)
