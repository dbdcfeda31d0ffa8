"""The workers, the trainer and a consumer beside it. They do what the real ones do, without a model.

The consumer is slow and killed now and then; it keeps a record of its own that a kill does not undo.
"""

from typing import TYPE_CHECKING, Any

from rl_async import messages as m
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.client import refusal
from rl_async.transfer_queue.wire import ReplyMessage
from tests.simulation.rules import Checkpoint, Record
from tests.simulation.surroundings import Client

if TYPE_CHECKING:
    from tests.simulation.world import World

Reply = tuple[ReplyMessage, str]  # and the disk of the queue that gave it


class Worker:
    """Leases, generates, puts or fails, and is replaced by another when it dies."""

    def __init__(self, world: "World", slot: int) -> None:
        self._world, self._slot = world, slot
        self._number = 0
        self.done = False
        self._begin()

    def _begin(self) -> None:
        self._number += 1
        life = self._life = _WorkerLife(self._world, self, f"w{self._slot}-{self._number}")
        self._world.spawn(life, life.renew())
        self._world.spawn(life, life.work())

    def killed(self) -> None:
        """Another takes its place."""
        if not self._life.dead:
            self._life.dead = True
            self._world.after(self._world.rng.random(), self._begin)
            self.done = False

    def freeze(self) -> None:
        """It does nothing for longer than a lease."""
        self.hold(self._world.rng.random() * 4)

    def hold(self, seconds: float) -> None:
        """It does nothing for so long."""
        self._life.frozen_until = self._world.now + seconds


class _WorkerLife:
    def __init__(self, world: "World", worker: Worker, name: str) -> None:
        self._world, self._worker, self.name = world, worker, name
        self.dead = False
        self.frozen_until = 0.0
        self._held: set[m.SampleKey] = set()
        self.client = Client(world, self, name)

    def queue_lost(self) -> None:
        self._worker.killed()

    def renew(self) -> Any:
        while True:
            yield m.Renew(worker=self.name, held=sorted(self._held)), []
            yield self._world.settings.lease_s / 3

    def work(self) -> Any:
        world, rng = self._world, self._world.rng
        while True:
            lease = m.Lease(worker=self.name, max_groups=rng.randint(1, 3), wait_s=rng.choice([0.0, 0.1, 0.5]))
            message, disk = yield lease, []
            if message.reply.finished:
                self._worker.done = self.dead = True
                return
            if disk == world.host.disk.run_id:
                world.rules.leased(self.name, message.reply)
            todo = [each for group in message.reply.groups for each in self._remembered(group)]
            self._held |= {(group.group_id, sample, group.attempt) for group, sample in todo}
            while todo:
                count = rng.randint(1, 4)
                yield from self._produce(todo[:count])
                self._held -= {(group.group_id, sample, group.attempt) for group, sample in todo[:count]}
                todo = todo[count:]
            if not message.reply.groups:
                yield 0.02

    def _remembered(self, group: m.LeasedGroup) -> list[tuple[m.LeasedGroup, int]]:
        """The samples of the group, of which one may be forgotten: it is neither put nor failed, nor listed as held."""
        samples = list(group.samples)
        if self._world.faults and self._world.rng.random() < 0.06:
            self._world.struck["sample forgotten"] += 1
            samples.pop()
        return [(group, sample) for sample in samples]

    def _produce(self, todo: list[tuple[m.LeasedGroup, int]]) -> Any:
        world, rng = self._world, self._world.rng
        since = world.serving
        yield rng.random() * (1.0 if rng.random() < 0.1 else 0.1)
        samples, rows = [], []
        for group, sample in todo:
            if rng.random() < 0.03 and world.faults:
                world.struck["sample failed"] += 1
                yield self._failure(group, sample), []
                continue
            headers = self._headers(group, sample, since)
            samples.append(headers)
            rows += [header.tokens_hash.encode() for header in headers]
        if samples:
            for headers in samples:
                world.rules.put(headers)
            put = m.Put(worker=self.name, samples=samples, lengths=list(map(len, rows)))
            message, disk = yield put, wire.join(rows)
            if disk == world.host.disk.run_id:
                world.rules.answered(samples, message.reply)

    def _failure(self, group: m.LeasedGroup, sample: int) -> m.Fail:
        return m.Fail(
            worker=self.name, group_id=group.group_id, sample=sample, attempt=group.attempt, error="simulated"
        )

    def _headers(self, group: m.LeasedGroup, sample: int, since: m.Version) -> list[m.TrajectoryHeader]:
        """Of one row, or of two; tokens of two versions if one was published meanwhile."""
        rng = self._world.rng
        reward = float(rng.random() < 0.5)
        runs = [m.VersionRun(since, 0, 1), m.VersionRun(self._world.serving, 1, 2)]
        return [
            m.TrajectoryHeader(
                group_id=group.group_id,
                sample=sample,
                attempt=group.attempt,
                partition=group.partition,
                episode_id="",
                segment=segment,
                tokens=2,
                sampled=2,
                reward=reward,
                finish_reason="stop",
                versions=runs,
                tokens_hash=f"{self.name}:{group.group_id}.{sample}.{segment}:{group.attempt}",
            )
            for segment in range(1 + (group.group_id + sample) % 2)
        ]


class Trainer:
    """Reserves, trains, commits, publishes and saves; another goes on from the last checkpoint when it dies.

    One that is only taken for dead goes on beside its successor, until it is told that it was replaced.
    """

    def __init__(self, world: "World") -> None:
        self._world = world
        self._lineage = -1
        self.step = 0
        self.checkpoint = Checkpoint()
        self._begin()

    def _begin(self) -> None:
        self._lineage += 1
        self.done = False
        self._life = _TrainerLife(self._world, self, self._lineage)
        self._world.spawn(self._life, self._life.train())

    def _replace(self, life: "_TrainerLife") -> None:
        """Begin the successor, unless there is one, or the trainer came to the end meanwhile."""
        if self.is_newest(life) and not self.done:
            self._begin()

    def is_newest(self, life: "_TrainerLife") -> bool:
        """Whether this trainer has no successor."""
        return self._life is life

    def killed(self) -> None:
        """Another takes its place; what this one has sent may still arrive."""
        if not self._life.dead:
            self._life.dead, self.done = True, False
            self._world.after(self._world.rng.random(), self._replace, self._life)

    def freeze(self) -> None:
        """It does nothing for a while, and another takes its place.

        It has met its queue: one that lost its journal knows no lineage, and is told from the lost one by its run id.
        """
        if self._life.client.met and not self._life.dead and not self.done:
            self.hold(self._world.rng.random() * 4)
            self._world.after(self._world.rng.random(), self._replace, self._life)

    def hold(self, seconds: float) -> None:
        """It does nothing for so long, and nobody takes its place."""
        self._life.frozen_until = self._world.now + seconds


class _TrainerLife:
    def __init__(self, world: "World", trainer: Trainer, lineage: int) -> None:
        self._world, self._trainer, self._lineage = world, trainer, lineage
        self.dead, self.frozen_until = False, 0.0
        self.client = Client(world, self, f"trainer-{lineage}")

    @property
    def _newest(self) -> bool:
        return self._trainer.is_newest(self)

    def queue_lost(self) -> None:
        if self._newest:
            self._trainer.killed()
        else:
            self.dead = True

    def _ask(self, request: m.Request, *kinds: type[m.Reply]) -> Any:
        """The reply, which is of one of these kinds; the end, if another trainer has resumed."""
        message, _ = yield request, []
        if refusal(message.reply) == wire.REPLACED and not self._newest:
            yield from self._replaced("by the queue")
        if not isinstance(message.reply, kinds):
            self._world.rules.broken(f"{request} was answered {message.reply}")
        return message

    def _replaced(self, told: str) -> Any:
        self._world.struck[f"replaced trainer refused {told}"] += 1
        self.dead = True
        yield 0.0  # and never goes on

    def train(self) -> Any:
        world, trainer, rules = self._world, self._trainer, self._world.rules
        saved = trainer.checkpoint
        step = saved.step
        if self._lineage:
            yield from self._ask(m.Resume(step=step, lineage=self._lineage, snapshot=saved.queue), m.Resumed)
            if self._newest:
                rules.resumed(saved, world.host.disk.run_id)
        yield from self._publish(step)
        while step < world.settings.steps:
            if self._newest:
                trainer.step = step
            yield from self._one_step(step)
            step += 1
            last = step == world.settings.steps
            if last or step % world.publish_every == 0:
                yield from self._publish(step)
            if last or step % world.checkpoint_every == 0:
                yield from self._save(step)
            if world.rng.random() < 0.1:
                bound = world.rng.randint(world.publish_every - 1, 3)
                yield from self._ask(m.Tighten(max_staleness=bound, lineage=self._lineage), m.Done)
        yield from self._retire(step)  # the one that saved it may have died before
        message, disk = yield m.Finish(lineage=self._lineage), []
        if refusal(message.reply) == wire.REPLACED and not self._newest:
            yield from self._replaced("by the queue")
        if not isinstance(message.reply, m.Done):
            rules.broken(f"Finish was answered {message.reply}")
        if disk == world.host.disk.run_id:
            trainer.done = True
        else:  # the queue that heard of it lost its journal meanwhile, and workers ask the next one
            self.queue_lost()

    def _publish(self, step: int) -> Any:
        """Send the weights to the engines, which refuse those of a trainer that they know to be replaced."""
        version = m.Version(self._lineage, step)
        if version.lineage < self._world.serving.lineage:
            yield from self._replaced("by the engines")
        self._world.serving = version
        yield self._world.rng.random() * 0.05
        yield from self._ask(m.Publish(version=version, engines=[]), m.Done)

    def _one_step(self, step: int) -> Any:
        while True:
            answer = yield from self._reserve(step, 0.5)
            if isinstance(answer, m.Reserved):
                break
            yield 0.01
        headers = answer.headers
        fetch = m.Fetch(rows=[header.key for header in headers], lineage=self._lineage)
        rows = yield from self._ask(fetch, m.FetchedRows)
        if self._world.rng.random() < 0.3 and step + 1 < self._world.settings.steps:
            yield from self._reserve(step + 1, 0.0)
        yield self._world.rng.random() * 0.2
        if self._newest:  # what another trains is in no checkpoint
            payloads = [bytes(row) for row in wire.split(rows.payload, rows.reply.lengths)]
            self._world.rules.trained(step, headers, payloads)
        yield from self._ask(m.Commit(step=step, lineage=self._lineage), m.Done)

    def _reserve(self, step: int, wait_s: float) -> Any:
        request = m.Reserve(step=step, wait_s=wait_s, lineage=self._lineage)
        answer = yield from self._ask(request, m.Reserved, m.NotReady)
        if isinstance(answer.reply, m.Reserved) and self._newest:
            self._world.rules.reserved(step, answer.reply.headers)
        return answer.reply

    def _save(self, step: int) -> Any:
        taken = yield from self._ask(m.Snapshot(lineage=self._lineage), m.SnapshotTaken)
        yield 0.05
        if not self._newest:
            yield from self._replaced("by the run folder")
        self._trainer.checkpoint = self._world.rules.checkpoint(step, taken.reply.snapshot)
        yield from self._retire(step)

    def _retire(self, step: int) -> Any:
        yield from self._ask(m.Retire(step=step, lineage=self._lineage), m.Done)


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
