"""The trainer's side of the store: batches of steps, what frees slots, and going back to a checkpoint."""

from collections import Counter
from dataclasses import dataclass

import msgspec

from rl_async.messages import Done, NotReady, Refused, Reserved, Resumed, Version
from rl_async.transfer_queue.book import Book
from rl_async.transfer_queue.delivery import Delivery
from rl_async.transfer_queue.groups import TRAIN, Group, State
from rl_async.transfer_queue.policy import Candidate, choose
from rl_async.transfer_queue.source import TaskSource
from rl_async.transfer_queue.transitions import (
    BatchCommitted,
    BatchReserved,
    Published,
    ReadmittedGroup,
    Retired,
    RolledBack,
    Tightened,
)


@dataclass(slots=True)
class Batch:
    """The members of one step."""

    groups: list[int]
    committed: bool = False
    released: bool = False  # gave back its slots
    retired: bool = False  # its groups are forgotten


class QueueSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint keeps of the queue: enough to generate again what was not trained."""

    next_group: int
    cursor: bytes  # of the task source, behind next_group
    groups: list[ReadmittedGroup]  # not trained yet


class Batches:
    """Batches by step, in order: a step is reserved once, trained, published and at last retired."""

    def __init__(self, book: Book, delivery: Delivery, source: TaskSource) -> None:
        self._book, self._delivery, self._source = book, delivery, source
        self._batches: dict[int, Batch] = {}
        self._next_step = 0  # the first without a batch
        self._retired = 0  # steps before this one are forgotten
        self._resumed: tuple[int, int, Resumed] | None = None  # step, lineage and answer of the newest resume

    # --- reserve, commit, publish, retire ---------------------------------------------------------------------------

    def reserve(self, step: int, now: float) -> Reserved | NotReady | Refused:
        """Fix the batch of ``step``, or say what is missing. Answers the same however often it is asked."""
        batch = self._batches.get(step)
        if batch is not None and not batch.retired:
            return self._answer(step, batch)
        if step != self._next_step:
            return Refused(code="wrong_step", reason=f"the next step to reserve is {self._next_step}, not {step}")
        members = self._members(step, now)
        if isinstance(members, NotReady):
            return members
        batch = Batch(sorted(members))
        self._batches[step] = batch
        self._next_step = step + 1
        book = self._book
        book.refills_left = min(book.refills_left + book.settings.max_refills, book.settings.refill_allowance)
        for group_id in batch.groups:
            self._book.move(self._book.groups[group_id], State.RESERVED)
        self._book.emit(BatchReserved(step=step, groups=batch.groups))
        return self._answer(step, batch)

    def _members(self, step: int, now: float) -> list[int] | NotReady:
        """The groups pinned to the step, and others for the seats that are left."""
        book, settings = self._book, self._book.settings
        pinned: Counter[int] = Counter()
        members: list[int] = []
        candidates: list[Candidate] = []
        for group in book.open.values():
            if group.pinned == step:
                members.append(group.group_id)
            elif group.pinned is not None:
                pinned[group.pinned] += 1
            else:
                candidates.append(Candidate(group.group_id, group.state is State.READY, self._deadline(group)))
        unfinished = [group_id for group_id in members if book.groups[group_id].state is not State.READY]
        if unfinished:
            return self._not_ready(step, unfinished, now)
        choice = choose(candidates, step, settings.batch_groups - len(members), settings, pinned)
        for group_id in choice.drop:
            self._delivery.drop(group_id, f"too late for its staleness bound when step {step} was reserved")
        if len(members) + len(choice.take) < settings.batch_groups:
            return self._not_ready(step, choice.blocked_by, now)
        return members + choice.take

    def _deadline(self, group: Group) -> int | None:
        return None if group.oldest is None else group.oldest + self._book.settings.max_staleness

    def _not_ready(self, step: int, blocked_by: list[int], now: float) -> NotReady:
        book = self._book
        why = (
            f"step {step} needs {book.settings.batch_groups} groups: {book.count(State.READY)} ready, "
            f"{book.count(State.LEASED)} leased, {book.count(State.WAITING)} waiting"
        )
        if book.published is None:
            why += "; no version is published"
        if blocked_by:
            group = book.groups[blocked_by[0]]
            here = sum(sample.here for sample in group.samples)
            workers = sorted({sample.worker for sample in group.samples if sample.worker is not None})
            ages = [book.leases.age(worker, group.group_id, now) for worker in workers]
            why += f"; first unfinished: group {group.group_id} with {here} of {len(group.samples)} samples"
            why += f", leased by {', '.join(workers)} for {max(ages):.0f} s" if workers else ", leased by nobody"
        return NotReady(why=why)

    def _answer(self, step: int, batch: Batch) -> Reserved:
        groups = [self._book.groups[group_id] for group_id in batch.groups]
        return Reserved(
            step=step,
            headers=[header for group in groups for header in group.headers()],
            tasks={group.group_id: group.task for group in groups},
        )

    def commit(self, step: int) -> Done | Refused:
        """The batch of ``step`` was trained."""
        batch = self._batches.get(step)
        if batch is None:
            if 0 <= step < self._retired:
                return Done()
            return Refused(code="wrong_step", reason=f"step {step} has no batch")
        if not batch.committed:
            batch.committed = True
            for group_id in batch.groups:
                self._book.move(self._book.groups[group_id], State.COMMITTED)
            self._book.emit(BatchCommitted(step=step))
        return Done()

    def publish(self, version: Version) -> Done | Refused:
        """Engines serve ``version``: the groups of all steps before it give back their slots."""
        book = self._book
        if version.lineage != book.lineage:
            return Refused(code="wrong_lineage", reason=f"this is lineage {book.lineage}, not {version.lineage}")
        if book.published is not None and version < book.published:
            return Refused(code="wrong_step", reason=f"{book.published} is published already")
        trained = [(step, batch) for step, batch in self._batches.items() if step < version.step]
        untrained = [step for step, batch in trained if not batch.committed]
        if untrained or version.step > self._next_step:
            return Refused(code="wrong_step", reason=f"{version} before step {min(untrained, default=self._next_step)}")
        if version == book.published:
            return Done()
        released: list[int] = []
        for step, batch in trained:
            if not batch.released:
                batch.released = True
                released += batch.groups
                book.alive -= len(batch.groups)
            if batch.retired:
                del self._batches[step]
        book.published = version
        book.emit(Published(version=version, released=released))
        return Done()

    def retire(self, step: int) -> Done | Refused:
        """Steps before ``step`` are in a durable checkpoint: forget their groups and payloads."""
        if step > self._next_step or any(not b.committed for s, b in self._batches.items() if s < step):
            return Refused(code="wrong_step", reason=f"not every step before {step} was trained")
        if step <= self._retired:
            return Done()
        forgotten: list[int] = []
        for at in [at for at, batch in self._batches.items() if at < step and not batch.retired]:
            batch = self._batches[at]
            batch.retired = True
            forgotten += batch.groups
            for group_id in batch.groups:
                self._book.remove(self._book.groups[group_id])
            if batch.released:
                del self._batches[at]
        self._retired = step
        self._book.emit(Retired(step=step, groups=forgotten))
        return Done()

    def tighten(self, max_staleness: int) -> Done | Refused:
        """Admit for this bound, at most the configured one. What was admitted stays, so it takes effect by and by."""
        book = self._book
        if max_staleness < 0:
            return Refused(code="bad_bound", reason=f"max_staleness={max_staleness} is negative")
        bound = min(max_staleness, book.settings.max_staleness)
        if bound != book.max_staleness:
            book.max_staleness = bound
            book.emit(Tightened(max_staleness=bound))
        return Done()

    # --- checkpoint and resume --------------------------------------------------------------------------------------

    def snapshot(self) -> bytes:
        """What is not trained yet, and where the task source stands."""
        steps = {group: step for step, batch in self._batches.items() for group in batch.groups if not batch.committed}
        groups = [
            ReadmittedGroup(group=group.group_id, task=group.task, step=steps.get(group.group_id, group.pinned))
            for group in self._book.groups.values()
            if group.partition == TRAIN and group.state is not State.COMMITTED
        ]
        snapshot = QueueSnapshot(
            next_group=self._book.next_group,
            cursor=self._source.cursor(),
            groups=sorted(groups, key=lambda group: group.group),
        )
        return msgspec.msgpack.encode(snapshot)

    def resume(self, step: int, lineage: int, snapshot: bytes) -> Resumed | Refused:
        """Go back to ``step`` completed steps. Nothing is leased until the new lineage publishes a version."""
        if self._resumed is not None and self._resumed[:2] == (step, lineage):
            return self._resumed[2]
        if lineage < self._book.lineage or (self._resumed is not None and lineage == self._book.lineage):
            return Refused(code="wrong_lineage", reason=f"lineage {self._book.lineage} has begun")
        untouched = self._book.next_group == 0 and self._next_step == 0
        answer = self._restore(step, lineage, snapshot) if untouched else self._roll_back(step, lineage)
        if isinstance(answer, Resumed):
            self._resumed = (step, lineage, answer)
            self._book.lineage, self._book.published = lineage, None
            self._book.max_staleness = self._book.settings.max_staleness
        return answer

    def _roll_back(self, step: int, lineage: int) -> Resumed | Refused:
        """Steps from ``step`` on get the same batches again, of the trajectories that are still here."""
        book = self._book
        trained = all(batch.committed for at, batch in self._batches.items() if at < step)
        if not self._retired <= step <= self._next_step or not trained:
            reason = f"step {step} is not between the steps retired ({self._retired}) and trained here"
            return Refused(code="wrong_step", reason=reason)
        for at in range(step, self._next_step):
            batch = self._batches.pop(at)
            if batch.released:
                book.alive += len(batch.groups)
            for group_id in batch.groups:
                group = book.groups[group_id]
                group.pinned = at
                book.move(group, State.READY)
        self._next_step = step
        if book.published is not None and book.published.step > step:
            # What is being generated would go on with weights older than its lease promised.
            self._delivery.revoke_all()
        book.emit(RolledBack(step=step, lineage=lineage, fresh=False, next_group=book.next_group))
        return Resumed(kept=len(book.open), readmitted=0)

    def _restore(self, step: int, lineage: int, snapshot: bytes) -> Resumed | Refused:
        """Take over from a queue that is gone: its unfinished groups are generated again, under their old ids."""
        if not snapshot and step > 0:
            return Refused(code="no_snapshot", reason="this queue is new, and the checkpoint has no queue snapshot")
        if not snapshot:
            state = QueueSnapshot(next_group=0, cursor=self._source.cursor(), groups=[])
        else:
            try:
                state = msgspec.msgpack.decode(snapshot, type=QueueSnapshot)
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                return Refused(code="bad_snapshot", reason=str(error))
        book = self._book
        self._source.seek(state.cursor)
        self._next_step = self._retired = step
        book.next_group = state.next_group
        book.given_up = state.next_group - step * book.settings.batch_groups - len(state.groups)
        for group in state.groups:
            self._delivery.admit(group.group, group.task, TRAIN, book.settings.group_size, pinned=group.step)
        book.emit(
            RolledBack(step=step, lineage=lineage, fresh=True, next_group=state.next_group, readmitted=state.groups)
        )
        return Resumed(kept=0, readmitted=len(state.groups))
