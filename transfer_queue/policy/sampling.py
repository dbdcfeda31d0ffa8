"""Which ready groups a step takes: pure functions. A policy orders the groups; their deadlines bind it.

Let need(d) be how many of the groups that are left, with the deadline d or an earlier one, find no seat in the steps
after this one and until d. So many ready groups of these deadlines must be taken now, whatever a policy prefers, and
taking the earliest deadlines does it. A group that a policy prefers is taken if the seats left then still suffice for
what is needed. The needs are nested (need(d) counts towards every later deadline), so the largest of them that is
unmet says how many seats that takes, and the greedy choice is the best one for the order (they form a matroid).

A policy may also ask to wait for unfinished groups: only for those that are ``coming``, so that it always ends.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from rl_async.configs.derived.data import Points, shares_by_label

Sampling = Literal["fifo", "freshest", "priority", "quota"]

_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples are spread evenly over the unit interval
_ROUNDING = 1e-9  # a share of a batch that is this little below a whole number is that number


class Candidate(NamedTuple):
    """An unreserved group, as far as the choice of a batch is concerned."""

    group: int
    ready: bool
    deadline: int | None  # last step that may train it; None: not leased yet, so there is none
    coming: bool = True  # unfinished, and a worker has it or may have it now
    priority: float = 0.0
    source: str = ""  # data set


class Later(NamedTuple):
    """The steps after ``step``; ``pinned`` counts their seats that are given away, by step."""

    step: int
    batch_groups: int
    pinned: Mapping[int, int]

    def seats_until(self, deadline: int) -> int:
        """Free seats of the steps after this one until ``deadline``; fewer than 0 if it is over."""
        seats = (deadline - self.step) * self.batch_groups
        return seats - sum(count for at, count in self.pinned.items() if self.step < at <= deadline)


class Selection(NamedTuple):
    """``take`` is the choice; it is empty when ``wait_for`` is not."""

    take: list[int]
    wait_for: list[int]


def urgency(candidate: Candidate) -> tuple[bool, int, int]:
    """The line: earliest deadline first, then in order of admission."""
    deadline = candidate.deadline
    return deadline is None, deadline or 0, candidate.group


def _freshest(candidate: Candidate) -> Any:
    return -math.inf if candidate.deadline is None else -candidate.deadline, candidate.group


def _priority(candidate: Candidate) -> Any:
    return -candidate.priority, urgency(candidate)


ORDERS: dict[Sampling, Callable[[Candidate], Any]] = {
    "fifo": urgency,
    "freshest": _freshest,
    "priority": _priority,
    "quota": urgency,
}


def select(
    sampling: Sampling,
    window: int,
    weights: Mapping[str, Points],
    candidates: Sequence[Candidate],
    seats: int,
    later: Later,
    *,
    passing: bool = False,
) -> Selection:
    """Choose ``seats`` of the ready ``candidates``, of which there are enough, most urgent first; or whom to wait for.

    ``passing``: unfinished groups need no seat in time. ``weights`` are those of the data sets, for ``quota``. The same
    arguments give the same choice.
    """
    eligible, awaited = _within(window, candidates, seats)
    if awaited:
        return Selection([], awaited)
    taking = _Taking(seats, _needs(candidates, seats, later, passing))
    ready = sorted((c for c in eligible if c.ready), key=ORDERS[sampling])
    if sampling == "quota":
        shares = shares_by_label(weights, later.step)
        left = Counter(seats_by_source(shares, seats, later.step))
        for candidate in ready:
            if left[candidate.source] > 0 and taking.offer(candidate):
                left[candidate.source] -= 1
        missing = [c.group for c in eligible if not c.ready and c.coming and left[c.source] > 0]
        if missing and taking.free:
            return Selection([], missing)
    for candidate in ready:
        taking.offer(candidate)
    return Selection(list(taking.taken), [])


def _within(window: int, candidates: Sequence[Candidate], seats: int) -> tuple[Sequence[Candidate], list[int]]:
    """The head of the line, or the groups to wait for; the whole line if no coming group could fill the batch."""
    head = candidates[:window] if window else candidates
    if sum(c.ready for c in head) >= seats:
        return head, []
    return candidates, [c.group for c in head if not c.ready and c.coming]


def _needs(candidates: Sequence[Candidate], seats: int, later: Later, passing: bool) -> list[tuple[int, int]]:
    """(deadline, ready groups with this or an earlier one that must be taken now), where there are any."""
    needs: list[tuple[int, int]] = []
    waiting = ready = 0
    bound = [c for c in candidates if c.deadline is not None and (c.ready or not passing)]
    for place, candidate in enumerate(bound, start=1):
        assert candidate.deadline is not None
        waiting, ready = place, ready + candidate.ready
        if place < len(bound) and bound[place].deadline == candidate.deadline:
            continue
        need = min(waiting - max(0, later.seats_until(candidate.deadline)), ready, seats)
        if need > 0:
            needs.append((candidate.deadline, need))
    return needs


class _Taking:
    """Seats being given away, so that those which are needed stay free for those who need them."""

    def __init__(self, seats: int, needs: Sequence[tuple[int, int]]) -> None:
        self._seats, self._unmet = seats, list(needs)
        self.taken: dict[int, Candidate] = {}  # by group

    @property
    def free(self) -> int:
        """Seats that no group needs to meet its deadline."""
        return self._seats - len(self.taken) - max(0, 0, *(need for _, need in self._unmet))

    def offer(self, candidate: Candidate) -> bool:
        """Take it, unless it has a seat, or then too few would be left for those who need them."""
        if candidate.group in self.taken:
            return False
        unmet = [(deadline, need - _until(candidate, deadline)) for deadline, need in self._unmet]
        if len(self.taken) + 1 + max(0, 0, *(need for _, need in unmet)) > self._seats:
            return False
        self.taken[candidate.group], self._unmet = candidate, unmet
        return True


def _until(candidate: Candidate, deadline: int) -> bool:
    return candidate.deadline is not None and candidate.deadline <= deadline


def seats_by_source(shares: Mapping[str, float], seats: int, step: int) -> dict[str, int]:
    """``seats`` divided by ``shares``, which sum to 1; over many steps each data set gets just its share.

    Whole seats first. What is left of the shares lies end to end on a line, on which points one apart, shifted from
    step to step, give the other seats away: systematic sampling (Madow, Annals of Mathematical Statistics 20, 1949).
    """
    whole = {name: math.floor(share * seats + _ROUNDING) for name, share in shares.items()}
    rest = seats - sum(whole.values())
    point = (step * _GOLDEN) % 1.0
    start = 0.0
    for place, (name, share) in enumerate(shares.items(), start=1):
        part = max(0.0, share * seats - whole[name])
        end = float(rest) if place == len(shares) else min(rest, start + part)
        whole[name] += math.ceil(end - point) - math.ceil(start - point)
        start = end
    return whole
