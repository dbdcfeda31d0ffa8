"""The rules for admission, for leases, and for the groups of a batch: pure functions.

Why staleness stays within the bound S. Let p be the published step, B the groups per step, and n the next step to
reserve. Groups that hold a slot and have tokens never exceed (S + 1) B, and the n - p steps reserved but not yet
published hold (n - p) B of them. So at most (p + S - n + 1) B are unreserved: exactly what the steps n to p + S can
take. A group leased now has tokens of version p or newer and the deadline p + S, hence all of them can meet their
deadlines if steps take the earliest deadline first. Dropping a group that is late, failed or has no reward signal
only makes them fewer, and the task that takes its slot is leased under the same rule. A ready group may pass an
unfinished one only while that remains true (``choose``), and so may one that a sampling policy prefers (``select``):
of the groups left behind, those with the deadline d or an earlier one never outnumber the seats of the steps up to d.
Where admission fills all slots at each publication, that forces every seat; fewer slots than the bound allows
(``slack``) leave the policy a choice, and the bound as it is. A group that is pinned to a step, after a rollback or
because its payload was lost, has a seat of its own there, and is leased when the bound allows that
(``may_lease_for``).

How a policy orders the ready groups while their deadlines bind it. Let need(d) be how many of the groups that are
left, with the deadline d or an earlier one, find no seat in the steps after this one and until d. So many ready groups
of these deadlines must be taken now under any policy, and taking the earliest deadlines does it. A group
that a policy prefers is taken if the seats left then still suffice for the needs. The needs are nested (need(d) counts
towards every later deadline), so the largest unmet one says how many seats that takes, and the greedy choice is the
best one for the order (they form a matroid). A policy may also ask to wait for unfinished groups, but only for those
that are ``coming``, so that it always ends. To add a policy: an entry in ORDERS, and a name in the config's schema.
"""

import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from rl_async.configs.derived import (
    ListedCode,
    Points,
    labels,
    listed_code,
    parts,
    points_of,
    samples_per_group,
    shares_by_label,
    slack,
)
from rl_async.configs.schema.data import CurriculumConfig
from rl_async.configs.schema.run import RunConfig

Sampling = Literal["fifo", "freshest", "priority", "quota"]

# The multiples of the golden ratio are spread evenly over the unit interval.
_GOLDEN = (math.sqrt(5) - 1) / 2
# A share of a batch that is this close below a whole number counts as that number.
_ROUNDING = 1e-9


class Candidate(NamedTuple):
    """An unreserved group, as the choice of a batch sees it.

    ``deadline`` is the last step that may train it; a group that was never leased has none. An unfinished group is
    ``coming`` if a worker has it or may lease it now. ``source`` names its data set.
    """

    group: int
    ready: bool
    deadline: int | None
    coming: bool = True
    priority: float = 0.0
    source: str = ""


class Later(NamedTuple):
    """The steps after ``step``; ``pinned`` counts their taken seats, by step."""

    step: int
    batch_groups: int
    pinned: Mapping[int, int]

    def seats_until(self, deadline: int) -> int:
        """Free seats of the steps after this one until ``deadline``; negative if it has passed."""
        seats = (deadline - self.step) * self.batch_groups
        return seats - sum(count for at, count in self.pinned.items() if self.step < at <= deadline)


class Selection(NamedTuple):
    """``take`` is the choice; it is empty when ``wait_for`` is not."""

    take: list[int]
    wait_for: list[int]


def urgency(candidate: Candidate) -> tuple[bool, int, int]:
    """The sort key of the line: earliest deadline first, then in order of admission."""
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
    """Choose ``seats`` of the ready ``candidates``, or the groups to wait for.

    Candidates come most urgent first, with enough ready ones. With ``passing``, unfinished groups need no seat in time.
    ``weights`` are those of the data sets, for ``quota``. The same arguments give the same choice.
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
    """Deadlines with the number of ready groups of this or an earlier one that must be taken now."""
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
    """Gives seats away while enough stay free for the groups that need one to meet their deadlines."""

    def __init__(self, seats: int, needs: Sequence[tuple[int, int]]) -> None:
        self._seats, self._unmet = seats, list(needs)
        # By group.
        self.taken: dict[int, Candidate] = {}

    @property
    def free(self) -> int:
        """Seats that no group needs to meet its deadline."""
        return self._seats - len(self.taken) - max(0, 0, *(need for _, need in self._unmet))

    def offer(self, candidate: Candidate) -> bool:
        """Take the candidate, unless it has a seat or too few would be left for groups that need one."""
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
    """Divide ``seats`` by ``shares``, which sum to 1; over many steps each data set gets exactly its share.

    Whole seats come first. The fractions that remain lie end to end on a line, and points one apart, shifted from step
    to step, give the other seats away: systematic sampling (Madow, Annals of Mathematical Statistics 20, 1949).
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


OnStraggler = Literal["wait", "drop", "mask"]


# A lease ends after this long, so that a worker that renews it forever does not keep its group. It outlasts several
# deadlines of an episode, since a worker may play the samples of a group one after another.
MAX_LEASE_S = 14400.0
LEASE_EPISODES = 8


class QueueSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the config that the store needs.

    ``group_size`` and ``eval_samples`` count the trajectories of a training group and of a held-out task. A batch may
    replace ``max_refills`` groups without signal. ``replicas`` payload shards keep each payload; with 0 the queue keeps
    it itself. Admission leaves ``slack`` steps of the bound to the sampling policy, which takes a batch from ``window``
    groups at the head of the line, or from all with 0. ``consumer_bytes`` are kept of trained groups that consumers
    have not read. ``weights`` of the data sets are given by step. ``reward_limit`` bounds a reward and the parts named
    in ``reward_parts``. Clients' tasks may name only ``code``, unless it is None, and with ``replays`` clients may
    submit none, since recorded groups alone are trained. ``curriculum`` passes over tasks by their rewards, with a
    ``seed``.
    """

    steps: int
    batch_groups: int
    group_size: int
    eval_samples: int = 1
    max_staleness: int = 1
    on_straggler: OnStraggler = "wait"
    lease_s: float = 15.0
    max_lease_s: float = MAX_LEASE_S
    max_attempts: int = 3
    max_bytes: int = 1 << 30
    max_refills: int = 0
    replicas: int = 0
    sampling: Sampling = "fifo"
    slack: int = 0
    consumer_bytes: int = 1 << 28
    window: int = 0
    weights: dict[str, Points] = {}
    reward_limit: float = sys.float_info.max
    reward_parts: tuple[str, ...] = ()
    code: ListedCode | None = None
    replays: bool = False
    curriculum: CurriculumConfig | None = None
    seed: int = 0

    @property
    def slots(self) -> int:
        """The largest number of training groups between their first token and the publication after their step."""
        return (self.max_staleness + 1) * self.batch_groups

    def slots_at(self, max_staleness: int) -> int:
        """The largest number between admission and that publication, for a bound that the trainer may tighten."""
        return (min(max_staleness, self.max_staleness - self.slack) + 1) * self.batch_groups

    @property
    def refill_allowance(self) -> int:
        """The largest number of groups without signal dropped before the next batch is complete."""
        return (self.max_staleness + 1) * self.max_refills

    @classmethod
    def of(cls, config: RunConfig) -> "QueueSettings":
        """Derive the settings from the run's config.

        In a replay, one batch is admitted at a time and taken whole, regardless of the sampling policy and the age of
        its tokens, so that each step trains the groups that it trained when it was recorded.
        """
        settings = cls._sampled(config)
        if not config.rollout.replay:
            return settings
        return msgspec.structs.replace(
            settings, max_staleness=0, slack=0, sampling="fifo", window=0, max_refills=0, replays=True, curriculum=None
        )

    @classmethod
    def _sampled(cls, config: RunConfig) -> "QueueSettings":
        return cls(
            steps=config.trainer.steps,
            batch_groups=config.data.train_batch_groups,
            group_size=samples_per_group(config),
            eval_samples=config.eval.samples,
            max_staleness=config.queue.max_staleness,
            on_straggler=config.queue.on_straggler,
            lease_s=config.queue.lease_s,
            max_lease_s=max(MAX_LEASE_S, LEASE_EPISODES * config.agent.episode_timeout_s, config.queue.lease_s),
            max_attempts=config.queue.max_attempts,
            max_bytes=config.queue.max_bytes,
            replicas=config.queue.replicas if config.queue.shards else 0,
            max_refills=config.algorithm.shaping.max_refills,
            sampling=config.queue.sampling,
            slack=slack(config.queue),
            window=config.queue.window,
            weights=dict(zip(labels(config.data), map(points_of, parts(config.data)), strict=True)),
            reward_limit=config.reward.limit,
            reward_parts=tuple(term.name for term in config.reward.functions),
            code=listed_code(config),
            curriculum=config.data.curriculum,
            seed=config.seed,
        )


def passed_over(settings: QueueSettings, reward: float | None, draw: str) -> bool:
    """Whether a task whose newest group had this mean ``reward``, or None, is left out by the curriculum.

    ``draw`` makes the chance of training it again the same in every repetition.
    """
    chosen = settings.curriculum
    if chosen is None or reward is None:
        return False
    easy = chosen.easy is not None and reward >= chosen.easy
    hard = chosen.hard is not None and reward <= chosen.hard
    return (easy or hard) and random.Random(f"{settings.seed} {draw}").random() >= chosen.again


class Occupancy(NamedTuple):
    """The part of the queue's state that decides on admission.

    ``slots`` are fewer than the settings' while the bound is tightened. ``alive`` training groups hold one, and
    ``unreserved`` of these are in no batch. The steps without a batch need ``wanted`` groups. ``expected_bytes`` are
    those of the payloads held and still missing, ``group_bytes`` those of one more group.
    """

    slots: int
    alive: int
    unreserved: int
    wanted: int
    expected_bytes: int
    group_bytes: int


def may_admit(settings: QueueSettings, occupancy: Occupancy) -> bool:
    """Whether one more training group may be admitted.

    Slots and the run's length are hard limits. The byte budget yields when the next batch could not be filled
    otherwise: a budget smaller than a batch must slow the run down, not stop it.
    """
    fits = occupancy.expected_bytes + occupancy.group_bytes <= settings.max_bytes
    return _has_slot(occupancy) and (fits or occupancy.unreserved < settings.batch_groups)


def is_short_of_bytes(settings: QueueSettings, occupancy: Occupancy) -> bool:
    """Whether only the byte budget keeps the next training group out."""
    return _has_slot(occupancy) and not may_admit(settings, occupancy)


def _has_slot(occupancy: Occupancy) -> bool:
    return occupancy.alive < occupancy.slots and occupancy.unreserved < occupancy.wanted


def may_lease(settings: QueueSettings, active: int, *, oldest: int | None, published: int) -> bool:
    """Whether a waiting training group, whose oldest token is of the version ``oldest``, may be leased.

    ``active`` groups have tokens already. Refuses only after a rollback: weights as old as those published then would
    be too old when the group's turn comes. New tokens do not age a group that has tokens as old as these, even if a
    resumed run has fewer slots than active groups.
    """
    if oldest is not None and oldest <= published:
        return True
    return active + (oldest is None) <= settings.slots


def may_lease_for(settings: QueueSettings, step: int, published: int) -> bool:
    """Whether a group that ``step`` waits for may be leased.

    Tokens sampled from the ``published`` weights on are young enough then. Its seat is its own, so no other group's
    deadline depends on it.
    """
    return step <= published + settings.max_staleness


class Choice(NamedTuple):
    """``take`` is the batch, which is empty while groups ``blocked_by`` are missing. It costs the groups ``drop``."""

    take: list[int]
    drop: list[int]
    blocked_by: list[int]


def choose(
    candidates: Sequence[Candidate], step: int, seats: int, settings: QueueSettings, pinned: Mapping[int, int]
) -> Choice:
    """Choose ``seats`` ready groups for ``step``: those that must meet a deadline, then by the sampling policy.

    ``pinned`` counts the seats of later steps that are already taken (after a rollback). With ``mask`` stragglers are
    passed freely, because the trainer masks their stale tokens.
    """
    ordered = sorted(candidates, key=urgency)
    ready = [c for c in ordered if c.ready]
    unfinished = [c for c in ordered if not c.ready]
    if len(ready) < seats:
        return Choice([], [], [c.group for c in unfinished])
    later = Later(step, settings.batch_groups, pinned)
    mask = settings.on_straggler == "mask"
    late = [] if mask else _too_late(sorted(ready[seats:] + unfinished, key=urgency), later)
    if late and settings.on_straggler == "wait":
        return Choice([], [], late)
    kept = [c for c in ordered if c.group not in late]
    chosen = select(settings.sampling, settings.window, settings.weights, kept, seats, later, passing=mask)
    if chosen.wait_for:
        return Choice([], [], chosen.wait_for)
    return Choice(chosen.take, late, [])


def is_blocked(
    unfinished: Mapping[int, int], ready: Mapping[int, int], pinned: int, step: int, settings: QueueSettings
) -> bool:
    """Whether a straggler keeps ``choose`` from taking a batch for ``step``, given enough ready groups.

    ``unfinished`` and ``ready`` count groups by the step of their oldest token. The most urgent ready groups fill the
    seats of this step. Of the others, those with the deadline d or an earlier one need seats of the steps after this
    one until d; if they outnumber these and an unfinished one is among them, it is waited for. So the counts suffice.
    If groups are ``pinned`` or stragglers are not waited for, False says nothing: then only ``choose`` can tell.
    """
    if pinned or settings.on_straggler != "wait":
        return False
    # Of this age or older.
    stragglers = complete = 0
    for oldest in sorted({*unfinished, *ready}):
        stragglers += unfinished.get(oldest, 0)
        complete += ready.get(oldest, 0)
        left = stragglers + max(0, complete - settings.batch_groups)
        if stragglers and left > (oldest + settings.max_staleness - step) * settings.batch_groups:
            return True
    return False


def _too_late(left: Sequence[Candidate], later: Later) -> list[int]:
    """Unfinished groups without which all others of ``left``, most urgent first, still meet their deadlines."""
    late: list[int] = []
    # Candidates that are kept so far, all of them at least as urgent as the next.
    ahead: list[Candidate] = []
    for candidate in left:
        if candidate.deadline is None:
            break
        ahead.append(candidate)
        if len(ahead) > later.seats_until(candidate.deadline):
            straggler = next((c for c in ahead if not c.ready), None)
            if straggler is not None:
                ahead.remove(straggler)
                late.append(straggler.group)
    return late
