"""The queue's state machine: no sockets, no clock, no files. Time is passed in, changes come out as transitions.

A verb decides, and changes the state by a transition and by nothing else; ``recover`` applies the same transitions
again. So a store that was recovered is in the state of the lost one.

    tasks --admit--> WAITING --lease--> LEASED --put--> READY --reserve--> RESERVED --commit--> COMMITTED --retire-->
                        ^                  |              ^                   |                    |
                        +-- fail, expiry --+              +------ resume -----+--------------------+

``Batches`` is the trainer's side, with slots, evaluations and the snapshots of checkpoints; ``delivery.py`` is the
workers' side, ``registry.py`` that of other readers, engines and payload shards; all work on the one ``book.py``. The
rules for staleness are in ``admission.py``. Listings for people change nothing and cost O(groups). To add a change:
declare a transition, emit it from a verb, and list its effect in the ``effects`` of its part.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import msgspec

from rl_async import messages as m
from rl_async.errors import DataError
from rl_async.files import UNDECODABLE
from rl_async.transfer_queue import transitions as t
from rl_async.transfer_queue.admission import Candidate, QueueSettings, choose, is_blocked, may_lease
from rl_async.transfer_queue.book import (
    EVAL,
    EVAL_GROUPS,
    TRAIN,
    Book,
    BookState,
    Grant,
    Group,
    Sample,
    State,
    given_up_text,
)
from rl_async.transfer_queue.delivery import Delivery, Tasks, TaskSource
from rl_async.transfer_queue.registry import Consumers, ConsumersState, Engines, Shards, ShardsState

# A worker that was silent for this long is gone.
HEARD_S = 60.0
# Programs pause for less than this between two episodes.
AWAY_S = 10.0
# The workers that are remembered.
REMEMBERED = 4096


class QueueSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the queue in a checkpoint: its untrained groups, and the task source's cursor after next_group.

    With a curriculum, ``measured`` are the tasks' mean rewards.
    """

    next_group: int
    cursor: bytes
    groups: list[t.ReadmittedGroup]
    measured: dict[str, float] = {}


def decode_snapshot(body: bytes, step: int) -> QueueSnapshot:
    """Decode the snapshot of a checkpoint after ``step`` steps. Raises ValueError if it is inconsistent.

    Its cursor is opaque here; the task source checks it.
    """
    snapshot = msgspec.msgpack.decode(body, type=QueueSnapshot)
    if step < 0 or not 0 <= snapshot.next_group <= EVAL_GROUPS:
        raise ValueError(f"step {step}, next_group={snapshot.next_group}")
    ids = [group.group for group in snapshot.groups]
    if len(set(ids)) < len(ids) or not all(0 <= group_id < snapshot.next_group for group_id in ids):
        raise ValueError(f"groups {ids} are not different ones below {snapshot.next_group}")
    if late := [group.group for group in snapshot.groups if group.step is not None and group.step < step]:
        raise ValueError(f"groups {late} belong to steps before {step}")
    return snapshot


class StepBatch(msgspec.Struct):
    """The groups of one step, and their progress: trained, slots given back, groups forgotten."""

    groups: list[int]
    committed: bool = False
    released: bool = False
    retired: bool = False


class BatchesState(msgspec.Struct, kw_only=True):
    """The dump of Batches: all batches, and the trainer's position."""

    batches: dict[int, StepBatch]
    next_step: int
    retired: int
    resumed: tuple[int, int, m.Resumed] | None


class Batches:
    """Batches by step, in order: a step is reserved once, trained, published and at last retired.

    A verb decides and emits a transition; the methods named in the past tense apply it.
    """

    def __init__(
        self,
        book: Book,
        change: Callable[[t.Transition], None],
        delivery: Delivery,
        source: TaskSource,
        divide: Callable[[Sequence[int]], tuple[list[int], list[int]]],
    ) -> None:
        """``divide`` splits retired groups into those to forget and those to keep for other readers."""
        self._book, self._change, self._delivery, self._source = book, change, delivery, source
        self._divide = divide
        self._batches: dict[int, StepBatch] = {}
        # Steps before this one are forgotten.
        self._retired = 0
        # Step, lineage and answer of the newest resume.
        self._resumed: tuple[int, int, m.Resumed] | None = None
        self.effects: t.Effects = {
            t.BatchReserved: self.batch_reserved,
            t.BatchCommitted: self.batch_committed,
            t.Published: self.version_published,
            t.Retired: self.steps_retired,
            t.Tightened: self.bound_tightened,
            t.RolledBack: self.rolled_back,
        }

    # --- reserve, commit, publish, retire ---------------------------------------------------------------------------

    def reserve(self, step: int, now: float) -> m.Reserved | m.NotReady | m.Refused:
        """Fix the batch of ``step``, or say which groups are missing. A repeated request gets the same answer.

        Only members whose payloads were lost with their shard come with other rows, which were generated since.
        """
        batch = self._batches.get(step)
        if batch is not None and not batch.retired:
            lost = [group_id for group_id in batch.groups if group_id in self._book.regenerating]
            return self._not_ready(step, lost, now) if lost else self._answer(step, batch)
        if step != self._book.next_step:
            return m.Refused(
                code="wrong_step", reason=f"the next step to reserve is {self._book.next_step}, not {step}"
            )
        if self.is_short(step):
            return self._not_ready(step, self._book.first_unfinished(step), now)
        if isinstance(members := self._members(step, now), m.NotReady):
            return members
        settings = self._book.settings
        left = min(self._book.refills_left + settings.max_refills, settings.refill_allowance)
        self._change(t.BatchReserved(step=step, groups=sorted(members), refills_left=left))
        return self._answer(step, self._batches[step])

    def is_short(self, step: int) -> bool:
        """Whether ``step`` is next and the counts of groups show, without a walk over them, that it has no batch."""
        book, counts = self._book, self._book.open_counts
        return step == self._book.next_step and (
            book.count(State.READY) < book.settings.batch_groups
            or is_blocked(counts.unfinished, counts.ready, counts.pinned, step, book.settings)
        )

    def _members(self, step: int, now: float) -> list[int] | m.NotReady:
        """Choose the groups pinned to the step, and others for the remaining seats, in a walk over all open groups."""
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
                candidates.append(self._candidate(group))
        unfinished = [group_id for group_id in members if book.groups[group_id].state is not State.READY]
        if unfinished:
            return self._not_ready(step, unfinished, now)
        candidates = self._without_expired(candidates, step)
        seats = max(0, settings.batch_groups - len(members))
        choice = choose(candidates, step, seats, settings, pinned)
        for group_id in choice.drop:
            self._delivery.drop(group_id, f"too late for its staleness bound when step {step} was reserved")
        if len(members) + len(choice.take) < settings.batch_groups:
            return self._not_ready(step, choice.blocked_by, now)
        return members + choice.take

    def _without_expired(self, candidates: list[Candidate], step: int) -> list[Candidate]:
        """Drop groups whose tokens are too old for any later step.

        They exist only if a resumed run has smaller batches, or a tighter bound, than the run that sampled them.
        """
        settings = self._book.settings
        if settings.replays or settings.on_straggler == "mask":
            return candidates
        expired = {c.group for c in candidates if c.deadline is not None and c.deadline < step}
        for group_id in sorted(expired):
            self._delivery.drop(group_id, f"too late for its staleness bound when step {step} was reserved")
        return [c for c in candidates if c.group not in expired]

    def _candidate(self, group: Group) -> Candidate:
        book = self._book
        leasable = book.published is not None and may_lease(
            book.settings, book.active, oldest=group.oldest, published=book.published.step
        )
        return Candidate(
            group.group_id,
            group.state is State.READY,
            None if group.oldest is None else group.oldest + book.settings.max_staleness,
            coming=group.state is State.LEASED or leasable,
            priority=group.task.priority,
            source=group.task.source,
        )

    def _not_ready(self, step: int, blocked_by: list[int], now: float) -> m.NotReady:
        book = self._book
        why = (
            f"step {step} needs {book.settings.batch_groups} groups: {book.count(State.READY)} ready, "
            f"{book.count(State.LEASED)} leased, {book.count(State.WAITING)} waiting"
        )
        if failed := book.counters["dead_letters"]:
            why += f"; {given_up_text(failed, book.last_failure)}"
        if book.published is None:
            why += "; no version is published"
        if book.draining:
            why += "; the queue is draining, so no task is admitted (rl-async queue drain RUN --undo)"
        if blocked_by:
            group = book.groups[blocked_by[0]]
            here = sum(sample.here for sample in group.samples)
            workers = sorted({sample.worker for sample in group.samples if sample.worker is not None})
            ages = [book.leases.age(worker, group.group_id, now) for worker in workers]
            why += f"; first unfinished: group {group.group_id} with {here} of {len(group.samples)} samples"
            why += f", leased by {', '.join(workers)} for {max(ages):.0f} s" if workers else ", leased by nobody"
        return m.NotReady(why=why)

    def _answer(self, step: int, batch: StepBatch) -> m.Reserved | m.Refused:
        groups = [self._book.groups[group_id] for group_id in batch.groups]
        partial = [group.group_id for group in groups if group.lacks_rows()]
        if partial and not batch.committed:
            return m.Refused(code="incomplete", reason=f"samples of the groups {partial} of step {step} are missing")
        return m.Reserved(
            step=step,
            headers=[header for group in groups for header in group.headers()],
            tasks={group.group_id: _without_images(group.task) for group in groups},
        )

    def commit(self, step: int) -> m.Done | m.Refused:
        """Record that the batch of ``step`` was trained."""
        batch = self._batches.get(step)
        if batch is None:
            if 0 <= step < self._retired:
                return m.Done()
            return m.Refused(code="wrong_step", reason=f"step {step} has no batch")
        if not batch.committed:
            self._change(t.BatchCommitted(step=step))
        return m.Done()

    def publish(self, version: m.Version) -> m.Done | m.Refused:
        """Record that engines serve ``version``: the groups of all steps before it free their slots."""
        book = self._book
        if refused := book.fence(version.lineage):
            return refused
        if book.published is not None and version < book.published:
            return m.Refused(code="wrong_step", reason=f"{book.published} is published already")
        trained = [(step, batch) for step, batch in self._batches.items() if step < version.step]
        untrained = [step for step, batch in trained if not batch.committed]
        if untrained or version.step > self._book.next_step:
            first = min(untrained, default=book.next_step)
            return m.Refused(code="wrong_step", reason=f"{version} before step {first}")
        if version != book.published:
            released = [group for _, batch in trained if not batch.released for group in batch.groups]
            self._change(t.Published(version=version, released=released))
        return m.Done()

    def retire(self, step: int) -> m.Done | m.Refused:
        """Forget groups and payloads of the steps before ``step``: a durable checkpoint includes them."""
        if step > self._book.next_step or any(not b.committed for s, b in self._batches.items() if s < step):
            return m.Refused(code="wrong_step", reason=f"not every step before {step} was trained")
        if step <= self._retired:
            return m.Done()
        ended = [batch for at, batch in self._batches.items() if at < step and not batch.retired]
        forgotten, kept = self._divide([group for batch in ended for group in batch.groups])
        self._change(t.Retired(step=step, groups=forgotten, shelved=kept))
        return m.Done()

    def tighten(self, max_staleness: int) -> m.Done | m.Refused:
        """Lower the bound of admission. Admitted groups stay, so it takes effect gradually."""
        book = self._book
        if max_staleness < 0:
            return m.Refused(code="bad_bound", reason=f"max_staleness={max_staleness} is negative")
        bound = min(max_staleness, book.settings.max_staleness)
        if bound != book.max_staleness:
            self._change(t.Tightened(max_staleness=bound))
        return m.Done()

    # --- checkpoint and resume --------------------------------------------------------------------------------------

    def snapshot(self) -> bytes:
        """Encode a QueueSnapshot for a checkpoint."""
        steps = {group: step for step, batch in self._batches.items() for group in batch.groups if not batch.committed}
        groups = [
            t.ReadmittedGroup(group=group.group_id, task=group.task, step=steps.get(group.group_id, group.pinned))
            for group in self._book.untrained()
        ]
        snapshot = QueueSnapshot(
            next_group=self._book.next_group,
            cursor=self._book.cursor,
            groups=sorted(groups, key=lambda group: group.group),
            measured=self._book.measured,
        )
        return msgspec.msgpack.encode(snapshot)

    def resume(self, step: int, lineage: int, snapshot: bytes) -> m.Resumed | m.Refused:
        """Go back to ``step`` completed steps. Nothing is leased until the new lineage publishes a version."""
        if self.has_resumed(step, lineage):
            return self._resume_answer()
        if self._resumed is not None and lineage == self._book.lineage:
            return m.Refused(code="wrong_lineage", reason=f"lineage {self._book.lineage} has begun")
        untouched = self._book.next_group == 0 and self._book.next_step == 0
        if untouched or (snapshot and not self._reaches(step)):
            return self._restore(step, lineage, snapshot)
        return self._roll_back(step, lineage)

    def has_resumed(self, step: int, lineage: int) -> bool:
        """Whether the newest resume was this one, so that a repetition changes nothing."""
        return self._resumed is not None and self._resumed[:2] == (step, lineage)

    def _reaches(self, step: int) -> bool:
        """Whether the batches from ``step`` on are known, and those before it trained."""
        trained = all(batch.committed for at, batch in self._batches.items() if at < step)
        return trained and self._retired <= step <= self._book.next_step

    def _roll_back(self, step: int, lineage: int) -> m.Resumed | m.Refused:
        """Give the steps from ``step`` on the same batches again, made of the trajectories that are still here."""
        book = self._book
        if not self._reaches(step):
            reason = f"step {step} is not between the steps retired ({self._retired}) and trained here"
            return m.Refused(code="wrong_step", reason=reason)
        # Samples in generation would continue with weights older than their lease promised.
        too_new = book.published is not None and book.published.step > step
        bound = book.settings.max_staleness
        self._change(
            t.RolledBack(step=step, lineage=lineage, fresh=False, next_group=book.next_group, max_staleness=bound)
        )
        if too_new:
            self._delivery.revoke_all()
        return self._resume_answer()

    def _restore(self, step: int, lineage: int, snapshot: bytes) -> m.Resumed | m.Refused:
        """Continue a queue that is gone, or whose journal ends before the checkpoint.

        Its unfinished groups are generated again, under their old ids.
        """
        book = self._book
        if not snapshot and step != 0:
            return m.Refused(code="no_snapshot", reason="this queue is new, and the checkpoint has no queue snapshot")
        if not snapshot:
            state = QueueSnapshot(next_group=0, cursor=book.cursor, groups=[])
        else:
            try:
                state = decode_snapshot(snapshot, step)
                self._source.seek(state.cursor)
            except (*UNDECODABLE, ValueError, DataError) as error:
                return m.Refused(code="bad_snapshot", reason=str(error))
        self._change(
            t.RolledBack(
                step=step,
                lineage=lineage,
                fresh=True,
                next_group=state.next_group,
                max_staleness=book.settings.max_staleness,
                readmitted=state.groups,
                samples=book.settings.group_size,
                given_up=max(0, state.next_group - step * book.settings.batch_groups - len(state.groups)),
                cursor=state.cursor,
                measured=state.measured,
            )
        )
        return self._resume_answer()

    def _resume_answer(self) -> m.Resumed:
        assert self._resumed is not None
        return self._resumed[2]

    def committed_from(self, step: int) -> Iterator[tuple[int, list[int]]]:
        """Yield the trained steps from ``step`` on, without a gap, with their groups."""
        while (batch := self._batches.get(step)) is not None and batch.committed:
            yield step, batch.groups
            step += 1

    # --- effects ----------------------------------------------------------------------------------------------------

    def batch_reserved(self, event: t.BatchReserved) -> None:
        """Apply `BatchReserved`: give the step its groups; raise ValueError unless all are complete."""
        groups = [self._book.groups[group_id] for group_id in event.groups]
        if any(group.state is not State.READY for group in groups):
            raise ValueError(f"groups of step {event.step} are not complete")
        self._batches[event.step] = StepBatch(event.groups)
        self._book.next_step = event.step + 1
        self._book.refills_left = event.refills_left
        for group in groups:
            self._book.move(group, State.RESERVED)

    def batch_committed(self, event: t.BatchCommitted) -> None:
        batch = self._batches[event.step]
        batch.committed = True
        for group_id in batch.groups:
            self._book.trained(self._book.groups[group_id])

    def version_published(self, event: t.Published) -> None:
        """Apply `Published`: the steps before the version free their slots."""
        for step in [at for at in self._batches if at < event.version.step]:
            batch = self._batches[step]
            if not batch.released:
                batch.released = True
                self._book.alive -= len(batch.groups)
            if batch.retired:
                del self._batches[step]
        self._book.published = event.version

    def steps_retired(self, event: t.Retired) -> None:
        """Apply `Retired`: forget the groups of the steps; those not published yet keep their slots."""
        for step in [at for at, batch in self._batches.items() if at < event.step and not batch.retired]:
            batch = self._batches[step]
            batch.retired = True
            for group_id in batch.groups:
                self._book.remove(self._book.groups[group_id])
            if batch.released:
                del self._batches[step]
        self._retired = event.step

    def bound_tightened(self, event: t.Tightened) -> None:
        self._book.max_staleness = event.max_staleness

    def rolled_back(self, event: t.RolledBack) -> None:
        """Apply `RolledBack`: forget the batches from ``event.step`` on, and the published version."""
        book = self._book
        if event.fresh:
            self._start_over(event)
        else:
            self._reopen(event.step)
        self._book.next_step = event.step
        book.lineage, book.published, book.finished = event.lineage, None, False
        book.max_staleness = event.max_staleness
        self._unpin_surplus()
        kept = 0 if event.fresh else len(book.open)
        self._resumed = (event.step, event.lineage, m.Resumed(kept=kept, readmitted=len(event.readmitted)))

    def _reopen(self, step: int) -> None:
        for at in range(step, self._book.next_step):
            batch = self._batches.pop(at)
            if batch.released:
                self._book.alive += len(batch.groups)
            for group_id in batch.groups:
                group = self._book.groups[group_id]
                group.pinned = at
                self._book.reopen(group)

    def _unpin_surplus(self) -> None:
        """Unpin groups that do not fit into their former batch because batches are smaller now."""
        pinned: Counter[int] = Counter()
        for _, group in sorted(self._book.open.items()):
            if group.pinned is not None:
                pinned[group.pinned] += 1
                if pinned[group.pinned] > self._book.settings.batch_groups:
                    self._book.pin(group, None)

    def _start_over(self, event: t.RolledBack) -> None:
        book = self._book
        book.clear()
        self._delivery.grants.load([])
        self._batches.clear()
        self._retired = event.step
        book.next_group, book.given_up, book.cursor = event.next_group, event.given_up, event.cursor
        book.measured = dict(event.measured)
        for readmitted in event.readmitted:
            samples = [Sample() for _ in range(event.samples)]
            book.add(Group(readmitted.group, readmitted.task, TRAIN, samples, pinned=readmitted.step))

    # --- dump and load ----------------------------------------------------------------------------------------------

    def dump(self) -> BatchesState:
        """The state for a dump; equal for equal batches."""
        batches = {step: self._batches[step] for step in sorted(self._batches)}
        next_step = self._book.next_step
        return BatchesState(batches=batches, next_step=next_step, retired=self._retired, resumed=self._resumed)

    def load(self, state: BatchesState) -> None:
        self._batches = state.batches
        self._book.next_step, self._retired, self._resumed = state.next_step, state.retired, state.resumed


def _without_images(task: m.Task) -> m.Task:
    """Leave out the bytes of images, which the answers for all ranks would carry; those of rows are fetched."""
    if not any("images" in message for message in task.prompt):
        return task
    prompt = [{key: value for key, value in message.items() if key != "images"} for message in task.prompt]
    return msgspec.structs.replace(task, prompt=prompt)


class EvalRound(msgspec.Struct):
    """One evaluation: a round over the held-out tasks."""

    groups: list[int]
    # Its result was read at least once.
    answered: bool = False


class EvalRounds:
    """Evaluations by id. One whose result was read is forgotten when the next begins."""

    def __init__(self, book: Book, change: Callable[[t.Transition], None], tasks: Sequence[m.Task]) -> None:
        self._book, self._change, self._tasks = book, change, tasks
        self._evals: dict[int, EvalRound] = {}
        self.effects: t.Effects = {t.EvalOpened: self.opened, t.EvalAnswered: self.answered, t.EvalClosed: self.closed}

    def open(self, eval_id: int) -> m.Done | m.Refused:
        """Admit the held-out tasks, unless the evaluation exists."""
        if eval_id in self._evals:
            return m.Done()
        if self._book.finished:
            return m.Refused(code="finished", reason="the run is over")
        self.close_answered()
        samples = self._book.settings.eval_samples
        first = self._book.next_eval_group
        groups = list(range(first, first + len(self._tasks)))
        for group_id, task in zip(groups, self._tasks, strict=True):
            self._change(t.Admitted(group=group_id, partition=EVAL, samples=samples, task=task))
        self._change(t.EvalOpened(eval_id=eval_id, groups=groups))
        return m.Done()

    def result(self, eval_id: int, so_far: bool = False) -> m.Reserved | m.NotReady | m.Refused:
        """The trajectories of an evaluation: those ``so_far``, or all once none is missing."""
        evaluation = self._evals.get(eval_id)
        if evaluation is None:
            return m.Refused(code="unknown_eval", reason=f"there is no evaluation {eval_id}, or it was answered before")
        groups = [self._book.groups[group_id] for group_id in evaluation.groups]
        unfinished = [group for group in groups if group.state is not State.READY]
        if unfinished and not so_far:
            first = unfinished[0]
            return m.NotReady(
                why=f"{len(unfinished)} of {len(groups)} groups of evaluation {eval_id} are unfinished, "
                f"the first is {first.group_id} ({first.state})",
                finished=len(groups) - len(unfinished),
                groups=len(groups),
            )
        if not unfinished and not evaluation.answered:
            self._change(t.EvalAnswered(eval_id=eval_id))
        return m.Reserved(
            step=eval_id,
            headers=[header for group in groups for header in group.headers()],
            tasks={group.group_id: _without_images(group.task) for group in groups},
            failed=[(group.group_id, index) for group in groups for index, s in enumerate(group.samples) if s.dead],
        )

    def close_answered(self) -> None:
        """Forget the evaluations whose result was read."""
        for eval_id in [key for key, evaluation in self._evals.items() if evaluation.answered]:
            self._close(eval_id)

    def close_all(self) -> None:
        """Forget every evaluation and its groups."""
        for eval_id in list(self._evals):
            self._close(eval_id)

    def _close(self, eval_id: int) -> None:
        self._change(t.EvalClosed(eval_id=eval_id, groups=self._evals[eval_id].groups))

    # --- effects ----------------------------------------------------------------------------------------------------

    def opened(self, event: t.EvalOpened) -> None:
        self._evals[event.eval_id] = EvalRound(event.groups)

    def answered(self, event: t.EvalAnswered) -> None:
        self._evals[event.eval_id].answered = True

    def closed(self, event: t.EvalClosed) -> None:
        del self._evals[event.eval_id]
        for group_id in event.groups:
            if group_id in self._book.groups:
                self._book.remove(self._book.groups[group_id])

    # --- dump and load ----------------------------------------------------------------------------------------------

    def dump(self) -> dict[int, EvalRound]:
        """The state for a dump; equal for equal evaluations."""
        return {eval_id: self._evals[eval_id] for eval_id in sorted(self._evals)}

    def load(self, evals: dict[int, EvalRound]) -> None:
        self._evals = evals


class Attendance:
    """Tracks when workers were heard, and for how long the programs of each gateway have been away."""

    def __init__(self) -> None:
        self._heard: OrderedDict[str, float] = OrderedDict()
        # By gateway; None while a program is there.
        self._away_since: dict[str, float | None] = {}

    def hear(self, worker: str, now: float, idle_s: float | None = None) -> None:
        """Note a request of a worker; a gateway says for how many seconds no program has played or asked."""
        self._heard[worker] = now
        self._heard.move_to_end(worker)
        if idle_s is not None:
            self._away_since[worker] = now - idle_s if idle_s > 0 else None
        if len(self._heard) > REMEMBERED:
            self._away_since.pop(self._heard.popitem(last=False)[0], None)

    def unattended_s(self, now: float) -> float:
        """Return for how many seconds no episode was played because all workers are gateways without programs.

        0 while episodes are played, or if no worker is left at all.
        """
        away = list[float]()
        for worker, heard in self._heard.items():
            if now - heard > HEARD_S:
                continue
            since = self._away_since.get(worker)
            if since is None:
                return 0.0
            away.append(now - since)
        shortest = min(away, default=0.0)
        return shortest if shortest >= AWAY_S else 0.0


# Groups, or workers, of one answer.
MOST_LISTED = 1000
WINDOW_S = 60
NAMES = ("groups_ready", "groups_reserved", "rows", "bytes")


def oldest_lease(book: Book, now: float) -> m.LeaseRecord | None:
    """The oldest lease that has not ended."""
    oldest = book.leases.oldest()
    if oldest is None:
        return None
    worker, group = oldest
    return m.LeaseRecord(group_id=group, worker=worker, age_s=book.leases.age(worker, group, now))


def list_workers(book: Book, now: float) -> list[m.WorkerRecord]:
    """The workers heard of with the number of their leases, by name, at most MOST_LISTED."""
    records: list[m.WorkerRecord] = []
    for worker in book.leases.names()[:MOST_LISTED]:
        held = book.leases.held(worker)
        oldest = max((book.leases.age(worker, group, now) for group in held), default=0.0)
        records.append(m.WorkerRecord(worker=worker, samples=sum(held.values()), groups=len(held), oldest_s=oldest))
    return records


def oldest_ages(book: Book, now: float) -> dict[str, float]:
    """The seconds that the oldest training group of each state has been in it; empty states have no entry."""
    oldest: dict[str, float] = {}
    for group in book.groups.values():
        if group.partition == TRAIN:
            age = now - book.since[group.group_id]
            oldest[group.state] = max(age, oldest.get(group.state, 0.0))
    return {state: oldest[state] for state in State if state in oldest}


def group_list(book: Book, after: int, limit: int, state: str, now: float) -> m.GroupList | m.Refused:
    """Groups with an id above ``after``, by id, at most ``limit`` and MOST_LISTED, in ``state`` unless it is empty."""
    if state and state not in list(State):
        return m.Refused(code="unknown_state", reason=f"no state {state!r}; there are: {', '.join(State)}")
    limit = max(1, min(limit, MOST_LISTED))
    ids = (i for i in sorted(book.groups) if i > after and (not state or book.groups[i].state == state))
    found = [_record(book, book.groups[group_id], now) for group_id in islice(ids, limit + 1)]
    return m.GroupList(groups=found[:limit], more=len(found) > limit)


def peek(book: Book, group_id: int, now: float) -> m.Peeked | m.Refused:
    """One group with the headers of its finished rows; Refused if it is not here."""
    group = book.groups.get(group_id)
    if group is not None:
        return m.Peeked(group=_record(book, group, now), task=group.task, headers=group.headers())
    letter = book.dead_letters.get(group_id)
    if letter is not None:
        return m.Refused(code="dead_letter", reason=f"group {group_id} is a dead letter: {letter.error}")
    admitted = 0 <= group_id < book.next_group or EVAL_GROUPS <= group_id < book.next_eval_group
    reason = "was trained and retired, dropped, or its evaluation is over" if admitted else "was never admitted"
    return m.Refused(code="unknown_group", reason=f"group {group_id} is not here: it {reason}")


def _record(book: Book, group: Group, now: float) -> m.GroupRecord:
    return m.GroupRecord(
        group_id=group.group_id,
        partition=group.partition,
        state=group.state,
        task_id=group.task.task_id,
        samples=len(group.samples),
        here=sum(sample.here for sample in group.samples),
        workers=sorted({sample.worker for sample in group.samples if sample.worker is not None}),
        age_s=now - book.since[group.group_id],
        nbytes=sum(sample.nbytes for sample in group.samples),
    )


class Rates:
    """Sums for each second of the window, so that the cost does not depend on the traffic."""

    def __init__(self, now: float) -> None:
        self._began = now
        # Oldest first.
        self._seconds: deque[tuple[int, Counter[str]]] = deque()

    def see(self, transition: t.Transition, now: float) -> None:
        """Count the rows or groups of a transition; training groups only."""
        match transition:
            case t.SamplesStored(samples=samples):
                nbytes = [header.nbytes for rows in samples if rows[0].partition == TRAIN for header in rows]
                counts = self._second(now)
                counts["rows"] += len(nbytes)
                counts["bytes"] += sum(nbytes)
            case t.GroupReady(partition=partition) if partition == TRAIN:
                self._second(now)["groups_ready"] += 1
            case t.BatchReserved(groups=groups):
                self._second(now)["groups_reserved"] += len(groups)

    def _second(self, now: float) -> "Counter[str]":
        if not self._seconds or self._seconds[-1][0] != int(now):
            self._seconds.append((int(now), Counter()))
            self._trim(now)
        return self._seconds[-1][1]

    def _trim(self, now: float) -> None:
        while self._seconds and self._seconds[0][0] <= now - WINDOW_S:
            self._seconds.popleft()

    def per_second(self, now: float) -> dict[str, float]:
        """Rates by name over the last WINDOW_S, or since the beginning if that is shorter; over a second at least."""
        self._trim(now)
        window = max(1.0, min(now - self._began, float(WINDOW_S)))
        total: Counter[str] = Counter()
        for _, counts in self._seconds:
            total.update(counts)
        return {name: total[name] / window for name in NAMES}


class Feed:
    """Hands every transition to every consumer, in order of subscription, before the store continues."""

    def __init__(self, *consumers: Callable[[t.Transition], None]) -> None:
        self._consumers = list(consumers)

    def subscribe(self, consumer: Callable[[t.Transition], None]) -> None:
        """Add a consumer; it sees only later transitions."""
        self._consumers.append(consumer)

    def __call__(self, transition: t.Transition) -> None:
        for consumer in self._consumers:
            consumer(transition)


class StoreState(msgspec.Struct, kw_only=True):
    """The dump of the store: all but the times of leases and the unjournaled counters."""

    book: BookState
    grants: list[Grant]
    batches: BatchesState
    consumers: ConsumersState
    evals: dict[int, EvalRound]
    engines: t.EnginesChanged
    shards: ShardsState


class Store:
    """The parts of the state, and the verbs that concern several of them; all other verbs are methods of one part.

    A verb is answered at once. ``now`` is in seconds and never decreases.
    """

    def __init__(
        self,
        settings: QueueSettings,
        source: TaskSource,
        eval_tasks: Sequence[m.Task],
        emit: Callable[[t.Transition], None],
    ) -> None:
        self.settings, self._emit, self._source = settings, emit, source
        # Seconds of the slowest flush lately, for the status.
        self.flush_s = 0.0
        book = self.book = Book(settings, source.cursor())
        self.tasks = Tasks(book, self._change, source)
        self.delivery = Delivery(book, self._change, self.tasks)
        self.consumers = Consumers(book, self._change)
        self.batches = Batches(book, self._change, self.delivery, source, self.consumers.divide)
        self.evals = EvalRounds(book, self._change, eval_tasks)
        self.engines = Engines(self._change)
        self.shards = Shards(book, self._change, self.consumers)
        self.attendance = Attendance()
        parts = (self.tasks, self.delivery, self.consumers, self.batches, self.evals, self.engines, self.shards)
        self._effects: t.Effects = {kind: effect for part in parts for kind, effect in part.effects.items()} | {
            t.BatchCommitted: self._batch_committed,
            t.Retired: self._steps_retired,
            t.RolledBack: self._rolled_back,
            t.RunFinished: self._run_finished,
            t.Relaunched: self._relaunched,
        }

    def _change(self, transition: t.Transition) -> None:
        """Apply a transition and announce it. The state changes in no other way."""
        self._effects[type(transition)](transition)
        self._emit(transition)

    def _batch_committed(self, event: t.BatchCommitted) -> None:
        self.batches.batch_committed(event)
        self.consumers.committed(self.batches.committed_from(self.consumers.logged))

    def _steps_retired(self, event: t.Retired) -> None:
        # First, while the book has the groups.
        self.consumers.retired(event)
        self.batches.steps_retired(event)

    def _rolled_back(self, event: t.RolledBack) -> None:
        self.batches.rolled_back(event)
        self.consumers.rolled_back(event)
        # Group ids are given again after a fresh start.
        if event.fresh:
            self.shards.clear()

    # --- recovery ---------------------------------------------------------------------------------------------------

    def dump(self) -> bytes:
        """The whole state, for a journal's snapshot; equal for equal stores."""
        state = StoreState(
            book=self.book.dump(),
            grants=self.delivery.grants.dump(),
            batches=self.batches.dump(),
            consumers=self.consumers.dump(),
            evals=self.evals.dump(),
            engines=self.engines.dump(),
            shards=self.shards.dump(),
        )
        return msgspec.msgpack.encode(state)

    def recover(self, dump: bytes, transitions: Iterable[t.Transition], now: float) -> None:
        """Restore a dump, unless it is empty, and apply the transitions after it. Only a new store can.

        Every worker with leases has a full lease time from ``now``. Nothing is emitted. Raises DataError if the tasks
        are not those that the cursor was taken from.
        """
        self.book.now = now
        if dump:
            state = msgspec.msgpack.decode(dump, type=StoreState)
            self.book.load(state.book)
            self.delivery.grants.load(state.grants)
            self.batches.load(state.batches)
            self.consumers.load(state.consumers)
            self.evals.load(state.evals)
            self.engines.changed(state.engines)
            self.shards.load(state.shards)
        for transition in transitions:
            self._effects[type(transition)](transition)
        self._source.seek(self.book.cursor)
        self.book.leases.revive(now)
        self.shards.revive(now)

    def relaunch(self) -> None:
        """Forget leases, engines and shards, and the end of the run: all other processes were started anew."""
        self.delivery.revoke_all()
        self.engines.forget_all()
        self.shards.forget_all()
        if self.book.published is not None or self.book.finished or self.book.draining:
            self._change(t.Relaunched())

    def _relaunched(self, event: t.Relaunched) -> None:
        self.book.published, self.book.finished, self.book.draining = None, False, False

    def _run_finished(self, event: t.RunFinished) -> None:
        self.book.finished = True

    def expire(self, now: float) -> None:
        """Take back the leases of silent workers. Its calls are the clock of groups' ages."""
        self.book.now = now
        self.delivery.expire(now)
        self.shards.expire(now)

    def task_of(self, group: int) -> m.Task | None:
        """Return the task of a group that has not ended for the trainer or a consumer."""
        found = self.book.groups.get(group)
        return self.consumers.task_of(group) if found is None else found.task

    # --- trainer ----------------------------------------------------------------------------------------------------

    def publish(self, version: m.Version, engines: Sequence[str]) -> m.Done | m.Refused:
        """Record that these engines serve ``version``: slots are freed, and groups are leased under it."""
        before = self.book.published
        answer = self.batches.publish(version)
        if isinstance(answer, m.Done) and self.book.published != before:
            self.engines.published(engines, version)
        return answer

    def retire(self, step: int) -> m.Done | m.Refused:
        """Forget the steps before ``step``, except for groups that consumers have not read."""
        answer = self.batches.retire(step)
        self.consumers.trim()
        return answer

    def resume(self, step: int, lineage: int, snapshot: bytes) -> m.Resumed | m.Refused:
        """Go back to a checkpoint; evaluations of the lost lineage are forgotten."""
        repeated = self.batches.has_resumed(step, lineage)
        answer = self.book.replaced(lineage) or self.batches.resume(step, lineage, snapshot)
        if isinstance(answer, m.Resumed) and not repeated:
            self.evals.close_all()
            self.engines.unpublished()
        return answer

    def finish(self) -> m.Done:
        """End the run: nothing more is admitted or leased."""
        if not self.book.finished:
            self.evals.close_answered()
            self._change(t.RunFinished(left=sorted(group.group_id for group in self.book.untrained())))
        return m.Done()

    def engine_list(self) -> m.EngineList:
        """The registry. Before the first publication of a lineage, ``published`` has step -1."""
        return self.engines.listed(self._published())

    def status(self, now: float) -> m.StatusReport:
        """Counts of training groups, and counters: journaled ones since the run began, others since the start."""
        book = self.book
        return m.StatusReport(
            published=self._published(),
            waiting=book.count(State.WAITING),
            leased=book.count(State.LEASED),
            ready=book.count(State.READY),
            reserved=book.count(State.RESERVED),
            committed=book.count(State.COMMITTED),
            slots_used=book.alive,
            slots=book.settings.slots_at(book.settings.max_staleness),
            max_staleness=book.max_staleness,
            admitted=book.next_group,
            payload_bytes=book.payload_bytes,
            counters=dict(book.counters + book.unjournaled_counters)
            | {name: n for name, n in book.counters.items() if not n},
            oldest_lease_s=book.leases.oldest_s(now),
            workers=book.leases.workers,
            finished=book.finished,
            unattended_s=self.attendance.unattended_s(now),
            last_failure=book.last_failure,
            scored=book.scored,
            unscored=book.unscored,
            flush_s=self.flush_s,
        )

    def inspect(self, now: float, rates: dict[str, float]) -> m.Inspection:
        """The status with lists of dead letters, shards, consumers and workers, and the caller's ``rates``."""
        return m.Inspection(
            status=self.status(now),
            group_size=self.book.settings.group_size,
            draining=self.book.draining,
            submitted=len(self.book.submitted),
            oldest_lease=oldest_lease(self.book, now),
            ages_s=oldest_ages(self.book, now),
            rates=rates,
            dead_letters=list(self.book.dead_letters.values()),
            shards=self.shards.list().shards,
            consumers=self.consumers.records(),
            kept_bytes=self.consumers.kept_bytes,
            workers=list_workers(self.book, now),
        )

    def count(self, counter: str) -> None:
        """Add one to an unjournaled counter of the status report."""
        self.book.unjournaled_counters[counter] += 1

    def _published(self) -> m.Version:
        return self.book.published or m.Version(self.book.lineage, -1)
