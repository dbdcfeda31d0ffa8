"""The workers' side of the store: which task comes next, admission, leases, and the samples that workers put."""

import re
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from rl_async import messages as m
from rl_async.configs.derived import code_problem
from rl_async.errors import DataError
from rl_async.transfer_queue import transitions as t
from rl_async.transfer_queue.admission import is_short_of_bytes, may_admit, may_lease, may_lease_for, passed_over
from rl_async.transfer_queue.book import (
    EVAL,
    EVAL_GROUPS,
    PINNED,
    TRAIN,
    Book,
    Grant,
    Grants,
    Group,
    Lent,
    Lost,
    Sample,
    State,
    leased_group,
)

# Tasks that wait to be admitted are held in memory.
MOST_SUBMITTED = 100_000
# The tasks in a row that a curriculum may leave out.
MOST_PASSED_OVER = 10_000
# The newest requests that submitted tasks.
REMEMBERED = 4096


class TaskSource(Protocol):
    """A resumable stream of tasks.

    ``seek(cursor())`` makes ``next`` repeat itself exactly, for the same steps.
    """

    def next(self, step: int) -> m.Task | None:
        """The next task, which is expected to be trained by ``step``; None at the end.

        Raises DataError naming an invalid row.
        """
        ...

    def cursor(self) -> bytes:
        """The place after the last task taken; opaque to the queue."""
        ...

    def seek(self, cursor: bytes) -> None:
        """Continue from a place that ``cursor`` returned, perhaps in another process."""
        ...


class TaskList:
    """Yields given tasks, once each. Implements TaskSource."""

    def __init__(self, tasks: Sequence[m.Task]) -> None:
        self._tasks, self._taken = tasks, 0

    def next(self, step: int = 0) -> m.Task | None:
        """The next task, the same at any step; None after the last."""
        if self._taken >= len(self._tasks):
            return None
        self._taken += 1
        return self._tasks[self._taken - 1]

    def cursor(self) -> bytes:
        """The numbers of tasks taken and of all tasks."""
        return f"{self._taken}/{len(self._tasks)}".encode()

    def seek(self, cursor: bytes) -> None:
        """Continue from a cursor. Raises DataError if it belongs to a list of another length."""
        taken, _, total = cursor.decode(errors="replace").partition("/")
        if total != str(len(self._tasks)) or not taken.isdecimal() or int(taken) > len(self._tasks):
            raise DataError(f"the queue continues a list of {total or '?'} tasks, here are {len(self._tasks)}")
        self._taken = int(taken)


class GrowingTaskList(TaskList):
    """A list that a resumed run may append tasks to. Implements TaskSource."""

    def cursor(self) -> bytes:
        """The number of tasks taken."""
        return str(self._taken).encode()

    def seek(self, cursor: bytes) -> None:
        """Continue from a cursor, which may be that of a shorter list."""
        self._taken = int(cursor)


def numbered(number: int) -> m.Task:
    """A task that consists of its number."""
    return m.Task(task_id=f"t{number}", data_source="", prompt=[], ground_truth="")


class Counted:
    """Makes endless tasks from their numbers, from 0. Implements TaskSource."""

    def __init__(self, make: Callable[[int], m.Task] = numbered) -> None:
        self._make, self.taken = make, 0

    def next(self, step: int = 0) -> m.Task:
        """The next task, the same at any step."""
        self.taken += 1
        return self._make(self.taken - 1)

    def cursor(self) -> bytes:
        """The number of tasks taken."""
        return str(self.taken).encode()

    def seek(self, cursor: bytes) -> None:
        self.taken = int(cursor)


class Tasks:
    """Yields submitted tasks, then the source's. Slots and the bound on staleness do not depend on the order."""

    def __init__(self, book: Book, change: Callable[[t.Transition], None], source: TaskSource) -> None:
        self._book, self._change, self._source = book, change, source
        self.effects: t.Effects = {t.Submitted: self.submitted, t.Requeued: self.requeued, t.Drained: self.drained}

    def take(self) -> tuple[m.Task, bytes, bool] | None:
        """The next task, the source's cursor after it, and whether it was submitted. The caller must admit it."""
        book = self._book
        if book.submitted:
            return book.submitted[0], book.cursor, True
        step = book.next_step + len(book.open) // book.settings.batch_groups
        # If nearly all tasks are passed over, admission goes on with one of them.
        left = MOST_PASSED_OVER
        while (task := self._source.next(step)) is not None:
            cursor, reward = self._source.cursor(), book.measured.get(task.task_id)
            left -= 1
            if not left or not passed_over(book.settings, reward, f"{task.task_id} {cursor.hex()}"):
                return task, cursor, False
            book.unjournaled_counters["passed_over"] += 1
        return None

    def refused(self, tasks: Sequence[m.Task]) -> m.Refused | None:
        """Refuse a client's tasks if one names code that is not listed in the config."""
        for task in tasks:
            if problem := code_problem(task, self._book.settings.code):
                return m.Refused(code="code", reason=f"task {task.task_id:.80}: {problem}")
        return None

    def submit(self, tasks: Sequence[m.Task], request: bytes = b"") -> m.Done | m.Refused:
        """Queue tasks for admission; the same ``request`` again changes nothing."""
        book = self._book
        if request in book.submissions:
            return m.Done()
        if refused := self.refused(tasks):
            return refused
        if book.settings.replays:
            return m.Refused(code="replay", reason="this run trains recorded groups alone (rollout.replay)")
        if book.finished:
            return m.Refused(code="finished", reason="the run is over")
        if len(book.submitted) + len(tasks) > MOST_SUBMITTED:
            reason = f"{len(book.submitted)} submitted tasks wait, and at most {MOST_SUBMITTED} may; submit more later"
            return m.Refused(code="full", reason=reason)
        self._change(t.Submitted(tasks=list(tasks), request=request))
        return m.Done()

    def requeue(self, group: int, request: bytes = b"") -> m.Done | m.Refused:
        """Queue the task of a dead letter first, as a new group: the old one's slot is gone, and its attempts fenced.

        The new group waits for a slot as any other does, so the bound on staleness and the length of the run hold.
        The same ``request`` again changes nothing.
        """
        book = self._book
        if request in book.submissions:
            return m.Done()
        if group not in book.dead_letters:
            known = ", ".join(map(str, book.dead_letters)) or "none"
            return m.Refused(code="unknown_group", reason=f"group {group} is not a dead letter; those kept: {known}")
        if book.finished:
            return m.Refused(code="finished", reason="the run is over")
        if len(book.open) >= book.wanted:
            reason = f"all groups of the run are admitted, so group {group} could not be trained any more"
            return m.Refused(code="too_late", reason=reason)
        self._change(t.Requeued(group=group, request=request))
        return m.Done()

    def drain(self, on: bool) -> m.Done:
        """Stop admission, or resume it with ``on=False``."""
        if on != self._book.draining:
            self._change(t.Drained(on=on))
        return m.Done()

    # --- effects ----------------------------------------------------------------------------------------------------

    def submitted(self, event: t.Submitted) -> None:
        self._book.submitted.extend(event.tasks)
        self._remember(event.request)

    def requeued(self, event: t.Requeued) -> None:
        book = self._book
        book.submitted.appendleft(book.dead_letters.pop(event.group).task)
        book.counters["requeued"] += 1
        self._remember(event.request)

    def _remember(self, request: bytes) -> None:
        submissions = self._book.submissions
        if request:
            submissions[request] = None
            if len(submissions) > REMEMBERED:
                submissions.popitem(last=False)

    def drained(self, event: t.Drained) -> None:
        self._book.draining = event.on


_WHOLE = (State.READY, State.RESERVED)
# Those of the rows of one sample.
Headers = Sequence[m.TrajectoryHeader]
# Stands in a dead letter before the error of its last attempt.
LAST = " times; last: "
# The class of an error, as workers report it. So many causes are counted by name.
CLASS = re.compile(r"([A-Za-z_]\w{0,63}): ")
MOST_CAUSES = 32
# The reason for dropping a group without reward signal.
NO_SIGNAL = "no_signal"


class Delivery:
    """Hands out groups and takes in trajectories. Every sample is with one worker, here, or waiting.

    A verb decides and emits a transition; the methods named in the past tense below apply it.
    """

    def __init__(self, book: Book, change: Callable[[t.Transition], None], tasks: Tasks) -> None:
        self._book, self._change, self._tasks = book, change, tasks
        self.grants = Grants()
        self.effects: t.Effects = {
            t.Admitted: self.admitted,
            t.LeaseGiven: self.lease_given,
            t.GrantVoided: lambda event: self.grants.void(event.request),
            t.LeaseLost: self.lease_lost,
            t.SamplesStored: self.samples_stored,
            t.SampleFailed: self.sample_failed,
            t.GroupReady: self.group_ready,
            t.SignalWaived: self.signal_waived,
            t.GroupDropped: self.group_dropped,
            t.DeadLettered: self.dead_lettered,
        }

    def lease(
        self, worker: str, max_groups: int, now: float, request: bytes = b"", task: m.Task | None = None
    ) -> m.Leased:
        """Up to ``max_groups`` groups with all their missing samples, evaluations first, then the oldest.

        With a ``task`` of the worker's own: one group of it, once no other group waits and one more may be admitted.
        The request may have been parked for long, so it does not count as a sign of life: a worker that was not heard
        of (see ``renew``) within the lease time gets nothing. A request that was answered with groups gets the same
        again.
        """
        book = self._book
        granted = self.grants.get(request)
        if granted is not None:
            return m.Leased(groups=self._lent(granted))
        if book.finished:
            return m.Leased(groups=[], finished=True)
        if not book.leases.hears(worker):
            return m.Leased(groups=[])
        book.now = now
        groups: list[m.LeasedGroup] = []
        if task is not None:
            waits = book.head(PINNED) or book.head(TRAIN)
            own = None if book.published is None or waits else self._admit(task)
            return m.Leased(groups=[self._give(own, worker, book.published, request)] if own and book.published else [])
        while book.published is not None and len(groups) < max_groups:
            group = book.head(EVAL) or self._next_train()
            if group is None:
                break
            groups.append(self._give(group, worker, book.published, request))
        return m.Leased(groups=groups)

    def _lent(self, grant: Grant) -> list[m.LeasedGroup]:
        """The groups of an answer that still exist."""
        groups = self._book.groups
        return [leased_group(groups[lent.group], lent) for lent in grant.lent if lent.group in groups]

    def _next_train(self) -> Group | None:
        book = self._book
        pinned = book.head(PINNED)
        due = None if pinned is None else book.due(pinned)
        if due is not None and book.published and may_lease_for(book.settings, due, book.published.step):
            return pinned
        waiting = book.head(TRAIN)
        if waiting is not None:
            published = book.published.step if book.published else -1
            free = may_lease(book.settings, book.active, oldest=waiting.oldest, published=published)
            return waiting if free else None
        return self._admit()

    def _admit(self, own: m.Task | None = None) -> Group | None:
        """Admit a training group of the worker's ``own`` task or the next one; return None if none may be admitted."""
        book = self._book
        if book.draining:
            return None
        occupancy = book.occupancy()
        if not may_admit(book.settings, occupancy):
            if is_short_of_bytes(book.settings, occupancy):
                book.unjournaled_counters["short_of_bytes"] += 1
            return None
        next_task = self._tasks.take() if own is None else (own, book.cursor, False)
        if next_task is None:
            return None
        task, cursor, submitted = next_task
        group_id, samples = book.next_group, book.settings.group_size
        self._change(
            t.Admitted(group=group_id, partition=TRAIN, samples=samples, task=task, cursor=cursor, submitted=submitted)
        )
        return book.groups[group_id]

    def _give(self, group: Group, worker: str, version: m.Version, request: bytes) -> m.LeasedGroup:
        samples, attempt = group.missing(), group.leases
        traced = self._book.traced(group.group_id, samples, attempt)
        lent = Lent(group.group_id, attempt, samples, version, traced)
        self._change(
            t.LeaseGiven(
                group=lent.group,
                samples=lent.samples,
                attempt=lent.attempt,
                worker=worker,
                min_version=version,
                request=request,
                traced=traced,
            )
        )
        return leased_group(group, lent)

    def renew(self, worker: str, now: float, held: Sequence[m.SampleKey] | None = None) -> m.Renewed:
        """Renew the worker's leases. Those missing in ``held`` for the lease time end; None stands for all."""
        self._book.leases.hear(worker, now)
        if held is None:
            return m.Renewed()
        groups = self._book.groups
        own = [key for key in held if key[0] in groups and groups[key[0]].is_at(key[1], key[2])]
        lost = self._book.leases.forgotten(worker, {(at, index) for at, index, _ in own}, now)
        self._take_back(lost, f"worker {worker} has forgotten it")
        return m.Renewed(gone=[key for key in held if key not in own])

    def put(self, worker: str, headers: Headers, now: float) -> m.Done | m.Refused:
        """Take in all rows of one sample; see ``put_all``."""
        (refused,) = self.put_all(worker, [headers], now)
        return refused or m.Done()

    def put_all(
        self,
        worker: str,
        samples: Sequence[Headers],
        now: float,
        sized: Callable[[Headers], list[m.TrajectoryHeader]] = list,
    ) -> list[m.Refused | None]:
        """Take in samples with all their rows; for each, return None or why it is not wanted.

        A repeated sample is taken again; those of another worker or attempt are fenced. Only new samples are announced
        as stored, all by one transition, with the headers that ``sized`` returns.
        """
        self._book.leases.hear(worker, now)
        new: dict[tuple[int, int], Headers] = {}
        answers = [self._offer(worker, headers, new) for headers in samples]
        for rows in new.values():
            if all(header.scored for header in rows):
                self._book.scored += 1
            else:
                self._book.unscored += 1
        if new:
            groups = [self._book.groups[group_id] for group_id in dict.fromkeys(group_id for group_id, _ in new)]
            self._change_samples(groups, t.SamplesStored(samples=list(map(sized, new.values()))))
            for group in groups:
                self._refill(group)
        return answers

    def _offer(self, worker: str, headers: Headers, new: dict[tuple[int, int], Headers]) -> m.Refused | None:
        """Refuse a sample that is not wanted; add another to ``new`` unless it is here already."""
        if not _are_one_sample(headers):
            return m.Refused(code="rows", reason="the rows of a put are one attempt's at one sample, from segment 0")
        header = headers[0]
        found = self._find(header.group_id, header.sample, header.attempt)
        if isinstance(found, m.Refused):
            return found
        group, sample = found
        key = header.group_id, header.sample
        if here := sample.headers or new.get(key):
            if _content(here) == _content(headers):
                return None
            return m.Refused(code="conflict", reason=f"{_name(*key)} is here, and differs")
        if sample.worker != worker:
            return self._fenced(header.group_id, header.sample, header.attempt)
        if header.partition != group.partition:
            return m.Refused(code="conflict", reason=f"group {group.group_id} belongs to partition {group.partition}")
        new[key] = headers
        return None

    def _change_samples(self, groups: Sequence[Group], transition: t.SamplesStored | t.SampleFailed) -> None:
        """Apply a change that may complete these groups, and announce the completed ones."""
        unfinished = [group for group in groups if group.state not in _WHOLE]
        self._change(transition)
        for group in unfinished:
            if group.state in _WHOLE:
                self._change(t.GroupReady(group=group.group_id, partition=group.partition))

    def _refill(self, group: Group) -> None:
        """Drop a complete training group without reward signal, as long as the allowance lasts.

        A group that already belongs to a batch, as after a resume, stays: a batch never changes its members. The bound
        on staleness holds, since fewer groups need a place in time (``admission.py``).
        """
        book = self._book
        if not book.settings.max_refills or group.partition != TRAIN or group.state is not State.READY:
            return
        if group.pinned is not None or m.has_signal(group.headers()):
            return
        if book.refills_left <= 0:
            self._change(t.SignalWaived(group=group.group_id))
            return
        self.drop(group.group_id, NO_SIGNAL)

    def fail(self, worker: str, group_id: int, index: int, attempt: int, error: str, now: float) -> m.Done | m.Refused:
        """Record a failed attempt: the sample waits again, or its group is dead-lettered."""
        self._book.leases.hear(worker, now)
        found = self._find(group_id, index, attempt)
        if isinstance(found, m.Refused):
            return found
        group, sample = found
        if sample.here:
            return m.Refused(code="conflict", reason=f"{_name(group_id, index)} is here")
        # Otherwise the failure was reported before, or the sample is another worker's.
        if sample.worker == worker:
            self._charge(group, [index], error)
        return m.Done()

    def _find(self, group_id: int, index: int, attempt: int) -> tuple[Group, Sample] | m.Refused:
        group = self._book.groups.get(group_id)
        if group is None:
            if 0 <= group_id < self._book.next_group or EVAL_GROUPS <= group_id < self._book.next_eval_group:
                return self._fenced(group_id, index, attempt)
            return m.Refused(code="unknown_group", reason=f"there is no group {group_id}")
        if not 0 <= index < len(group.samples):
            return m.Refused(code="unknown_sample", reason=f"group {group_id} has {len(group.samples)} samples")
        sample = group.samples[index]
        if attempt != sample.attempt:
            return self._fenced(group_id, index, attempt)
        return group, sample

    def _fenced(self, group_id: int, index: int, attempt: int) -> m.Refused:
        self._book.unjournaled_counters["fenced"] += 1
        return m.Refused(code="fenced", reason=f"attempt {attempt} at {_name(group_id, index)} is no longer wanted")

    def expire(self, now: float) -> None:
        """Take back the leases of silent workers, and those that any worker has held for too long."""
        for lost in self._book.leases.expired(now):
            self._take_back(lost, f"worker {lost.worker} was lost")
        for lost in self._book.leases.overdue(now):
            limit = f"{self._book.settings.max_lease_s:g} s, the longest that a lease lasts"
            self._take_back(lost, f"worker {lost.worker} did not hand it over within {limit}")

    def _take_back(self, lost: Lost, error: str) -> None:
        """End leases; it counts as an attempt, since a task may kill its worker."""
        for group_id, samples in lost.held.items():
            # Another worker's loss may just have dead-lettered the group.
            if group_id in self._book.groups:
                self._change(t.LeaseLost(group=group_id, samples=samples, worker=lost.worker, charged=True))
                self._charge(self._book.groups[group_id], samples, error)

    def revoke_all(self) -> None:
        """Take back all leases, so that their results are fenced; no attempt is charged."""
        for worker, held in self._book.leases.holding():
            for group_id, samples in held.items():
                self._change(t.LeaseLost(group=group_id, samples=samples, worker=worker, charged=False))

    def undelivered(self, request: bytes) -> None:
        """Take back the leases of an answer that the worker never received; no attempt is charged."""
        grant = self.grants.get(request)
        if grant is None:
            return
        for lent in grant.lent:
            group = self._book.groups.get(lent.group)
            if group is None:
                continue
            held = [i for i in lent.samples if group.samples[i].worker == grant.worker]
            held = [i for i in held if group.samples[i].attempt == lent.attempt]
            if held:
                self._change(t.LeaseLost(group=lent.group, samples=held, worker=grant.worker, charged=False))
        self._change(t.GrantVoided(request=request))

    def _charge(self, group: Group, samples: list[int], error: str) -> None:
        """Count one failed attempt for each of these samples; too many dead-letter their group."""
        limit = self._book.settings.max_attempts
        for index in samples:
            sample = group.samples[index]
            # A group of a batch has succeeded before. The batch keeps its members, and the trainer has a deadline.
            exhausted = sample.failures + 1 >= limit and self._book.due(group) is None
            if exhausted and group.partition == TRAIN:
                text = f"sample {index} failed {sample.failures + 1}{LAST}{error}"
                self._change(t.DeadLettered(group=group.group_id, error=text))
                return
            failed = t.SampleFailed(
                group=group.group_id, sample=index, attempt=sample.attempt, error=error, dead=exhausted
            )
            self._change_samples([group], failed)

    def drop(self, group_id: int, reason: str) -> None:
        """Give up a group that is in no batch, and count it."""
        group = self._book.groups[group_id]
        if group.state in (State.RESERVED, State.COMMITTED):
            raise ValueError(f"group {group_id} is {group.state}")
        self._change(t.GroupDropped(group=group_id, reason=reason))

    # --- effects ----------------------------------------------------------------------------------------------------

    def admitted(self, event: t.Admitted) -> None:
        book = self._book
        if event.partition == TRAIN:
            book.next_group, book.cursor = event.group + 1, event.cursor
            if event.submitted:
                book.submitted.popleft()
        else:
            book.next_eval_group = event.group + 1
        book.add(Group(event.group, event.task, event.partition, [Sample() for _ in range(event.samples)]))

    def lease_given(self, event: t.LeaseGiven) -> None:
        """Apply `LeaseGiven`: lease the head of a line to a worker."""
        book, group = self._book, self._book.groups[event.group]
        book.take(group, event.min_version.step)
        group.leases = event.attempt + 1
        for index in event.samples:
            group.samples[index].attempt = event.attempt
            group.samples[index].worker = event.worker
        book.leases.give(event.worker, event.group, event.samples, book.now)
        book.settle(group)
        lent = Lent(event.group, event.attempt, event.samples, event.min_version, event.traced)
        self.grants.give(event.request, event.worker, lent)

    def lease_lost(self, event: t.LeaseLost) -> None:
        group = self._book.groups[event.group]
        for index in event.samples:
            self._book.leases.end(event.worker, event.group, index)
            group.samples[index].worker = None
        self._book.counters["leases_lost"] += len(event.samples)
        self._book.settle(group)

    def samples_stored(self, event: t.SamplesStored) -> None:
        book = self._book
        groups: dict[int, Group] = {}
        for headers in event.samples:
            group_id = headers[0].group_id
            group = groups[group_id] = book.groups[group_id]
            sample = self._leave(group, headers[0].sample)
            sample.headers = headers
            book.stored(sample.nbytes)
        for group in groups.values():
            book.settle(group)

    def sample_failed(self, event: t.SampleFailed) -> None:
        """Apply `SampleFailed`: the sample waits again, or is given up."""
        group = self._book.groups[event.group]
        sample = self._leave(group, event.sample)
        if group.partition == TRAIN:
            self._count_failure(event.error)
        sample.failures += 1
        sample.dead = event.dead
        if event.dead:
            self._book.counters["eval_missing"] += 1
            self._book.sample_given_up()
        else:
            self._book.counters["redelivered"] += 1
        self._book.settle(group)

    def _leave(self, group: Group, index: int) -> Sample:
        """Return a sample after ending its lease."""
        sample = group.samples[index]
        if sample.worker is not None:
            self._book.leases.end(sample.worker, group.group_id, index)
            sample.worker = None
        return sample

    def group_ready(self, event: t.GroupReady) -> None:
        """Apply `GroupReady`: a curriculum measures its task. The sample that completed the group made it READY."""
        book, group = self._book, self._book.groups[event.group]
        if book.settings.curriculum is not None and event.partition == TRAIN:
            # A greedy episode is no sample of the policy.
            rewards = m.episode_rewards(header for header in group.headers() if not header.baseline).values()
            if rewards:
                book.measured[group.task.task_id] = sum(rewards) / len(rewards)

    def signal_waived(self, event: t.SignalWaived) -> None:
        self._book.counters["accepted_without_signal"] += 1

    def group_dropped(self, event: t.GroupDropped) -> None:
        """Apply `GroupDropped`: forget the group; one without signal uses up the allowance."""
        book = self._book
        book.give_up(book.groups[event.group])
        if event.reason == NO_SIGNAL:
            book.refills_left -= 1
            book.counters["refilled"] += 1
        else:
            book.counters["dropped"] += 1

    def dead_lettered(self, event: t.DeadLettered) -> None:
        """Apply `DeadLettered`: forget the group and keep its task as a dead letter."""
        group = self._book.groups[event.group]
        self._book.give_up(group)
        self._count_failure(event.error.partition(LAST)[2])
        self._book.bury(m.DeadLetter(group_id=event.group, task=group.task, error=event.error))
        self._book.counters["dead_letters"] += 1

    def _count_failure(self, error: str) -> None:
        """Count a failed attempt at a training sample by its cause: the error's class, or a lost worker."""
        known = CLASS.match(error)
        cause = known[1] if known else "lost_worker" if error.startswith("worker ") else "other"
        counters = self._book.counters
        causes = [name for name in counters if name.startswith(m.FAILED)]
        name = m.FAILED + (cause if m.FAILED + cause in causes or len(causes) < MOST_CAUSES else "other")
        counters[name] += 1


def _are_one_sample(headers: Headers) -> bool:
    """Whether these are all rows of one attempt at one sample, in order."""
    if len(headers) == 1:
        return headers[0].segment == 0
    places = {(h.group_id, h.sample, h.attempt, h.partition, h.episode_id) for h in headers}
    return len(places) == 1 and [h.segment for h in headers] == list(range(len(headers)))


def _content(headers: Headers) -> bytes:
    """The headers without the sizes: only the first sample to bring media counts their bytes.

    Encoded ones are equal although a reward is not a number.
    """
    return msgspec.msgpack.encode([msgspec.structs.replace(header, nbytes=0) for header in headers])


def _name(group_id: int, index: int) -> str:
    return f"sample {index} of group {group_id}"
