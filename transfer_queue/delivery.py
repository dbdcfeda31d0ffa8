"""The workers' side of the store: admission, leases, and what comes back."""

from collections.abc import Sequence

import msgspec

from rl_async.messages import Done, Leased, LeasedGroup, Refused, Task, TrajectoryHeader, Version, has_signal
from rl_async.transfer_queue.book import Book
from rl_async.transfer_queue.groups import EVAL, EVAL_GROUPS, TRAIN, Group, Sample, State
from rl_async.transfer_queue.policy import is_short_of_bytes, may_admit, may_lease
from rl_async.transfer_queue.source import TaskSource
from rl_async.transfer_queue.transitions import (
    Admitted,
    DeadLettered,
    GroupDropped,
    LeaseGiven,
    LeaseLost,
    SampleFailed,
    SampleStored,
)

NO_SIGNAL = "no_signal"  # the reason for which a group without signal is dropped


class Delivery:
    """Hands out groups and takes in trajectories. Every sample is with one worker, here, or waiting."""

    def __init__(self, book: Book, source: TaskSource) -> None:
        self._book, self._source = book, source

    def admit(self, group_id: int, task: Task, partition: str, samples: int, pinned: int | None = None) -> Group:
        """Make a task into a waiting group."""
        group = Group(group_id, task, partition, [Sample() for _ in range(samples)], pinned=pinned)
        self._book.add(group)
        return group

    def lease(self, worker: str, max_groups: int, now: float) -> Leased:
        """Up to ``max_groups`` groups with all their missing samples, evaluations first, then the oldest.

        Asking is no sign of life, since the question may have waited for long: a worker that was not heard of (see
        ``renew``) within the lease time gets nothing.
        """
        book = self._book
        if book.finished:
            return Leased(groups=[], finished=True)
        if not book.leases.hears(worker):
            return Leased(groups=[])
        groups: list[LeasedGroup] = []
        while book.published is not None and len(groups) < max_groups:
            group = book.head(EVAL) or self._next_train()
            if group is None:
                break
            groups.append(self._give(group, worker, book.published, now))
        return Leased(groups=groups)

    def _next_train(self) -> Group | None:
        book = self._book
        waiting = book.head(TRAIN)
        if waiting is not None:
            return waiting if may_lease(book.settings, book.active, begun=waiting.oldest is not None) else None
        load = book.load()
        if not may_admit(book.settings, load):
            if is_short_of_bytes(book.settings, load):
                book.counters["short_of_bytes"] += 1
            return None
        task, group_id = self._source.next(), book.next_group
        book.next_group += 1
        book.emit(Admitted(group=group_id, partition=TRAIN, samples=book.settings.group_size, task=task))
        return self.admit(group_id, task, TRAIN, book.settings.group_size)

    def _give(self, group: Group, worker: str, version: Version, now: float) -> LeasedGroup:
        missing, attempt = group.missing(), group.leases
        self._book.take(group, version.step)
        group.leases += 1
        for index in missing:
            group.samples[index].attempt = attempt
            group.samples[index].worker = worker
        self._book.leases.give(worker, group.group_id, missing, now)
        self._book.settle(group)
        self._book.emit(
            LeaseGiven(group=group.group_id, samples=missing, attempt=attempt, worker=worker, min_version=version)
        )
        return LeasedGroup(
            group_id=group.group_id,
            partition=group.partition,
            attempt=attempt,
            samples=missing,
            task=group.task,
            min_version=version,
        )

    def renew(self, worker: str, now: float) -> Done:
        """Keep the worker's leases."""
        self._book.leases.hear(worker, now)
        return Done()

    def put(self, worker: str, headers: Sequence[TrajectoryHeader], now: float) -> Done | Refused:
        """Take in all rows of a sample. The same again is Done again; those of an older attempt are fenced.

        Whether they are new shows in the transitions: only new ones are announced as stored.
        """
        self._book.leases.hear(worker, now)
        if not _belong_together(headers):
            return Refused(code="rows", reason="the rows of a put are one attempt's at one sample, from segment 0")
        header = headers[0]
        found = self._find(header.group_id, header.sample, header.attempt)
        if isinstance(found, Refused):
            return found
        group, sample = found
        if sample.here:
            if _bytes(sample.headers) == _bytes(headers):
                return Done()
            return Refused(code="conflict", reason=f"{_name(header.group_id, header.sample)} is here, and differs")
        if sample.worker is None:
            return self._fenced(header.group_id, header.sample, header.attempt)
        if header.partition != group.partition:
            return Refused(code="conflict", reason=f"group {group.group_id} belongs to partition {group.partition}")
        self._book.leases.end(sample.worker, group.group_id, header.sample)
        sample.worker, sample.headers = None, list(headers)
        self._book.stored(sample.nbytes)
        self._book.emit(SampleStored(headers=sample.headers))
        self._book.settle(group)
        self._refill(group)
        return Done()

    def _refill(self, group: Group) -> None:
        """Give up a training group that is complete and teaches nothing, as long as the allowance lasts.

        One that a batch already has, as after a resume, stays: a batch never changes its members. The bound on
        staleness is not touched, since there are only fewer groups that need a place in time (``policy.py``).
        """
        book = self._book
        if not book.settings.max_refills or group.partition != TRAIN or group.state is not State.READY:
            return
        if group.pinned is not None or has_signal(group.headers()):
            return
        if book.refills_left <= 0:
            book.counters["accepted_without_signal"] += 1
            return
        book.refills_left -= 1
        self.drop(group.group_id, NO_SIGNAL, counter="refilled")

    def fail(self, worker: str, group_id: int, index: int, attempt: int, error: str, now: float) -> Done | Refused:
        """One attempt failed: the sample waits again, or its group is dead-lettered."""
        self._book.leases.hear(worker, now)
        found = self._find(group_id, index, attempt)
        if isinstance(found, Refused):
            return found
        group, sample = found
        if sample.here:
            return Refused(code="conflict", reason=f"{_name(group_id, index)} is here")
        if sample.worker is None:
            return Done()  # reported before
        self._book.leases.end(sample.worker, group_id, index)
        sample.worker = None
        self._charge(group, [index], error)
        return Done()

    def _find(self, group_id: int, index: int, attempt: int) -> tuple[Group, Sample] | Refused:
        group = self._book.groups.get(group_id)
        if group is None:
            if 0 <= group_id < self._book.next_group or EVAL_GROUPS <= group_id < self._book.next_eval_group:
                return self._fenced(group_id, index, attempt)
            return Refused(code="unknown_group", reason=f"there is no group {group_id}")
        if not 0 <= index < len(group.samples):
            return Refused(code="unknown_sample", reason=f"group {group_id} has {len(group.samples)} samples")
        sample = group.samples[index]
        if attempt != sample.attempt:
            return self._fenced(group_id, index, attempt)
        return group, sample

    def _fenced(self, group_id: int, index: int, attempt: int) -> Refused:
        self._book.counters["fenced"] += 1
        return Refused(code="fenced", reason=f"attempt {attempt} at {_name(group_id, index)} is no longer wanted")

    def expire(self, now: float) -> None:
        """Take back what silent workers hold; it counts as an attempt, since a task may kill its worker."""
        for worker, held in self._book.leases.expired(now):
            for group_id, samples in held.items():
                if group_id in self._book.groups:  # else dead-lettered just now, by another worker's loss
                    group = self._take_back(worker, group_id, samples, charged=True)
                    self._charge(group, samples, f"worker {worker} was lost")

    def revoke_all(self) -> None:
        """Take back all leases, so that what they generate now is fenced; no attempt is charged."""
        for worker, held in self._book.leases.holding():
            for group_id, samples in held.items():
                self._book.settle(self._take_back(worker, group_id, samples, charged=False))

    def undelivered(self, worker: str, groups: Sequence[LeasedGroup]) -> None:
        """Take back leases of which the worker never heard; no attempt is charged."""
        for leased in groups:
            group = self._book.groups.get(leased.group_id)
            if group is None:
                continue
            held = [i for i in leased.samples if group.samples[i].worker == worker]
            held = [i for i in held if group.samples[i].attempt == leased.attempt]
            if held:
                self._book.settle(self._take_back(worker, leased.group_id, held, charged=False))

    def _take_back(self, worker: str, group_id: int, samples: list[int], *, charged: bool) -> Group:
        group = self._book.groups[group_id]
        for index in samples:
            self._book.leases.end(worker, group_id, index)
            group.samples[index].worker = None
        self._book.counters["leases_lost"] += len(samples)
        self._book.emit(LeaseLost(group=group_id, samples=samples, worker=worker, charged=charged))
        return group

    def _charge(self, group: Group, samples: list[int], error: str) -> None:
        """These samples, which no worker holds, used up one attempt each."""
        limit = self._book.settings.max_attempts
        for index in samples:
            sample = group.samples[index]
            sample.failures += 1
            exhausted = sample.failures >= limit
            if exhausted and group.partition == TRAIN:
                self._dead_letter(group, f"sample {index} failed {sample.failures} times; last: {error}")
                return
            if exhausted:
                sample.dead = True
                self._book.counters["eval_missing"] += 1
                self._book.sample_given_up()
            else:
                self._book.counters["redelivered"] += 1
            self._book.emit(
                SampleFailed(group=group.group_id, sample=index, attempt=sample.attempt, error=error, dead=sample.dead)
            )
        self._book.settle(group)

    def _dead_letter(self, group: Group, error: str) -> None:
        self._book.give_up(group)
        self._book.counters["dead_letters"] += 1
        self._book.emit(DeadLettered(group=group.group_id, error=error))

    def drop(self, group_id: int, reason: str, counter: str = "dropped") -> None:
        """Give up a group that is in no batch, and count it."""
        group = self._book.groups[group_id]
        if group.state in (State.RESERVED, State.COMMITTED):
            raise ValueError(f"group {group_id} is {group.state}")
        self._book.give_up(group)
        self._book.counters[counter] += 1
        self._book.emit(GroupDropped(group=group_id, reason=reason))


def _belong_together(headers: Sequence[TrajectoryHeader]) -> bool:
    places = {(h.group_id, h.sample, h.attempt, h.partition, h.episode_id) for h in headers}
    return len(places) == 1 and [h.segment for h in headers] == list(range(len(headers)))


def _bytes(headers: Sequence[TrajectoryHeader]) -> bytes:
    return msgspec.msgpack.encode(headers)  # unlike the structs, equal when a reward is not a number


def _name(group_id: int, index: int) -> str:
    return f"sample {index} of group {group_id}"
