"""Listings of the queue for people, which change nothing and cost O(groups), and rates over the last minute."""

from collections import Counter, deque
from itertools import islice

from rl_async.messages import GroupList, GroupRecord, LeaseRecord, Peeked, Refused, WorkerRecord
from rl_async.transfer_queue.state.book import Book
from rl_async.transfer_queue.state.groups import EVAL_GROUPS, TRAIN, Group, State
from rl_async.transfer_queue.state.transitions import BatchReserved, GroupReady, SamplesStored, Transition

MOST_LISTED = 1000  # groups, or workers, of one answer
WINDOW_S = 60
NAMES = ("groups_ready", "groups_reserved", "rows", "bytes")


def oldest_lease(book: Book, now: float) -> LeaseRecord | None:
    """The lease given first of those that have not ended."""
    oldest = book.leases.oldest()
    if oldest is None:
        return None
    worker, group = oldest
    return LeaseRecord(group_id=group, worker=worker, age_s=book.leases.age(worker, group, now))


def workers(book: Book, now: float) -> list[WorkerRecord]:
    """The workers heard of with what they hold, by name, at most MOST_LISTED."""
    return [_worker(book, worker, now) for worker in book.leases.names()[:MOST_LISTED]]


def _worker(book: Book, worker: str, now: float) -> WorkerRecord:
    held = book.leases.held(worker)
    oldest = max((book.leases.age(worker, group, now) for group in held), default=0.0)
    return WorkerRecord(worker=worker, samples=sum(held.values()), groups=len(held), oldest_s=oldest)


def ages(book: Book, now: float) -> dict[str, float]:
    """By state, for how many seconds the training group that is longest in it has been there; no group, no entry."""
    oldest: dict[str, float] = {}
    for group in book.groups.values():
        if group.partition == TRAIN:
            age = now - book.since[group.group_id]
            oldest[group.state] = max(age, oldest.get(group.state, 0.0))
    return {state: oldest[state] for state in State if state in oldest}


def group_list(book: Book, after: int, limit: int, state: str, now: float) -> GroupList | Refused:
    """Groups with an id above ``after``, by id, at most ``limit`` and MOST_LISTED; of one state unless it is empty."""
    if state and state not in list(State):
        return Refused(code="unknown_state", reason=f"no state {state!r}; there are: {', '.join(State)}")
    limit = max(1, min(limit, MOST_LISTED))
    ids = (i for i in sorted(book.groups) if i > after and (not state or book.groups[i].state == state))
    found = [_record(book, book.groups[group_id], now) for group_id in islice(ids, limit + 1)]
    return GroupList(groups=found[:limit], more=len(found) > limit)


def peek(book: Book, group_id: int, now: float) -> Peeked | Refused:
    """One group with the headers of its finished rows; Refused if it is not here."""
    group = book.groups.get(group_id)
    if group is not None:
        return Peeked(group=_record(book, group, now), task=group.task, headers=group.headers())
    letter = book.dead_letters.get(group_id)
    if letter is not None:
        return Refused(code="dead_letter", reason=f"group {group_id} is a dead letter: {letter.error}")
    admitted = 0 <= group_id < book.next_group or EVAL_GROUPS <= group_id < book.next_eval_group
    reason = "was trained and retired, dropped, or its evaluation is over" if admitted else "was never admitted"
    return Refused(code="unknown_group", reason=f"group {group_id} is not here: it {reason}")


def _record(book: Book, group: Group, now: float) -> GroupRecord:
    return GroupRecord(
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
    """Sums by second, as many as the window has, so that the cost does not depend on the traffic."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._seconds: deque[tuple[int, Counter[str]]] = deque()  # oldest first

    def see(self, transition: Transition, now: float) -> None:
        """Count what the transition stands for; training groups only."""
        match transition:
            case SamplesStored(samples=samples):
                nbytes = [header.nbytes for rows in samples if rows[0].partition == TRAIN for header in rows]
                counts = self._second(now)
                counts["rows"] += len(nbytes)
                counts["bytes"] += sum(nbytes)
            case GroupReady(partition=partition) if partition == TRAIN:
                self._second(now)["groups_ready"] += 1
            case BatchReserved(groups=groups):
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
        """By name, over the last WINDOW_S or since the beginning, whichever is shorter; over one second at least."""
        self._trim(now)
        window = max(1.0, min(now - self._began, float(WINDOW_S)))
        total: Counter[str] = Counter()
        for _, counts in self._seconds:
            total.update(counts)
        return {name: total[name] / window for name in NAMES}
