"""The transitions of the store's state, as facts in order.

The state changes by these only: the store decides on a transition, applies it and emits it, and a replay applies the
same ones again. So a transition holds all that its effect depends on, except the state before it. The journal records
them and frees payloads by them, the ledger writes some of them down for people and for the audit, and the server wakes
parked requests by them.
"""

from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Any

import msgspec

from rl_async.messages import EngineRecord, ShardRecord, Task, TrajectoryHeader, Version


class Transition(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """Base of all transitions, tagged by class name."""


class Admitted(Transition, frozen=True, kw_only=True):
    """A task became a group of ``samples`` episodes to generate, in partition ``train`` or ``eval``.

    A training group has the task source's ``cursor`` after its task, which may be the first of the ``submitted`` ones.
    """

    group: int
    partition: str
    samples: int
    task: Task
    cursor: bytes = b""
    submitted: bool = False


class LeaseGiven(Transition, frozen=True, kw_only=True):
    """A worker generates these samples, from weights of ``min_version`` or newer.

    ``request`` is the id of the request for leases; repeated, it gets the same groups. The episodes of ``traced``
    samples have a trace.
    """

    group: int
    samples: list[int]
    attempt: int
    worker: str
    min_version: Version
    request: bytes = b""
    traced: list[int] = []


class GrantVoided(Transition, frozen=True, kw_only=True):
    """The answer to this request for leases never arrived; repeated, it counts as a new request."""

    request: bytes


class LeaseLost(Transition, frozen=True, kw_only=True):
    """These samples are taken from the worker and wait again. A ``charged`` loss counts as an attempt."""

    group: int
    samples: list[int]
    worker: str
    charged: bool


class SamplesStored(Transition, frozen=True, kw_only=True):
    """A worker handed over these samples, each with all rows of its episode, in one message."""

    samples: list[list[TrajectoryHeader]]


class SampleFailed(Transition, frozen=True, kw_only=True):
    """One attempt at a sample failed; it waits again, or is ``dead`` (evaluation only)."""

    group: int
    sample: int
    attempt: int
    error: str
    dead: bool


class GroupReady(Transition, frozen=True, kw_only=True):
    """The group is complete: no sample is missing."""

    group: int
    partition: str


class SignalWaived(Transition, frozen=True, kw_only=True):
    """A group without signal was accepted, since the allowance for dropping such groups is used up."""

    group: int


class GroupDropped(Transition, frozen=True, kw_only=True):
    """A straggler, or a group without signal, was dropped; another task takes its slot."""

    group: int
    reason: str


class DeadLettered(Transition, frozen=True, kw_only=True):
    """A group failed too often; another task takes its slot."""

    group: int
    error: str


class BatchReserved(Transition, frozen=True, kw_only=True):
    """The members of a step are fixed; ``refills_left`` groups without signal may be dropped from now on."""

    step: int
    groups: list[int]
    refills_left: int = 0


class BatchCommitted(Transition, frozen=True, kw_only=True):
    """The trainer committed the step: its batch was trained."""

    step: int


class Published(Transition, frozen=True, kw_only=True):
    """Every routable engine confirmed ``version``; ``released`` groups gave back their slots."""

    version: Version
    released: list[int]


class Retired(Transition, frozen=True, kw_only=True):
    """The trainer never asks for steps before ``step`` again; ``groups`` and their payloads are forgotten.

    The groups ``shelved`` are kept for consumers that have not read them.
    """

    step: int
    groups: list[int]
    shelved: list[int] = []


class Subscribed(Transition, frozen=True, kw_only=True):
    """A consumer of this name was made, which reads the groups after ``position``."""

    consumer: str
    position: int


class Acknowledged(Transition, frozen=True, kw_only=True):
    """The consumer has read everything up to ``position``; the groups ``freed`` were kept for it alone."""

    consumer: str
    position: int
    freed: list[int]


class Unsubscribed(Transition, frozen=True, kw_only=True):
    """The consumer was removed; the groups ``freed`` were kept for it alone."""

    consumer: str
    freed: list[int]


class Missed(Transition, frozen=True, kw_only=True):
    """The groups kept for consumers outgrew their limit: the oldest are ``freed``, in order of commit."""

    freed: list[int]


class Tightened(Transition, frozen=True, kw_only=True):
    """Groups are admitted for this bound from now on."""

    max_staleness: int


class ReadmittedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group that a fresh queue generates again; ``step`` if its batch was already fixed."""

    group: int
    task: Task
    step: int | None = None


class RolledBack(Transition, frozen=True, kw_only=True):
    """Training continues from ``step`` completed steps, and groups are admitted for the configured bound.

    A ``fresh`` queue had no state, or one that does not reach the checkpoint. It took its state from the checkpoint's
    snapshot, so groups that were admitted from ``next_group`` on are void. Each of the ``readmitted`` groups has
    ``samples`` samples; ``given_up`` groups were dropped or dead-lettered before the checkpoint.
    """

    step: int
    lineage: int
    fresh: bool
    next_group: int
    max_staleness: int
    readmitted: list[ReadmittedGroup] = []
    samples: int = 0
    given_up: int = 0
    cursor: bytes = b""
    measured: dict[str, float] = {}


class Submitted(Transition, frozen=True, kw_only=True):
    """These tasks are admitted before the source's; a repeated ``request`` adds nothing."""

    tasks: list[Task]
    request: bytes


class Requeued(Transition, frozen=True, kw_only=True):
    """The task of a dead letter is admitted next; a repeated ``request`` changes nothing."""

    group: int
    request: bytes


class Drained(Transition, frozen=True, kw_only=True):
    """Admission of training groups stops, or resumes if ``on`` is false."""

    on: bool


class EvalOpened(Transition, frozen=True, kw_only=True):
    """An evaluation began: the held-out tasks were admitted as ``groups``."""

    eval_id: int
    groups: list[int]


class EvalAnswered(Transition, frozen=True, kw_only=True):
    """The result of an evaluation was read; it is forgotten when the next one begins."""

    eval_id: int


class EvalClosed(Transition, frozen=True, kw_only=True):
    """An evaluation is over; its groups and payloads are forgotten."""

    eval_id: int
    groups: list[int]


class EnginesChanged(Transition, frozen=True, kw_only=True):
    """The registry of engines has a new revision, with these engines."""

    revision: int
    engines: list[EngineRecord]


class EngineChanged(Transition, frozen=True, kw_only=True):
    """The registry of engines has a new revision: one engine is new or serves another version.

    Written for each engine of a publication: with the whole registry in it, the journal would grow by the square of
    their number.
    """

    revision: int
    engine: EngineRecord


class EngineRemoved(Transition, frozen=True, kw_only=True):
    """The registry of engines has a new revision, without this engine."""

    revision: int
    engine_id: str


class ShardsChanged(Transition, frozen=True, kw_only=True):
    """The registry of payload shards has a new revision."""

    revision: int
    shards: list[ShardRecord]


class ShardLost(Transition, frozen=True, kw_only=True):
    """A payload shard is gone, and with it the last copy of these samples, (group, index).

    Without ``shard_id``, the queue kept their rows itself before the run had shards.
    """

    shard_id: str
    samples: list[tuple[int, int]]


class RunFinished(Transition, frozen=True, kw_only=True):
    """The run is over: nothing more is admitted or leased.

    The groups ``left`` were not trained, because the run was resumed with fewer steps.
    """

    left: list[int] = []


class Relaunched(Transition, frozen=True, kw_only=True):
    """Every other process of the run was started anew: nothing is published, and the run is not over."""


TransitionType: Any = reduce(or_, Transition.__subclasses__())
# The effects of transitions on one part of the store.
Effects = dict[type[Transition], Callable[[Any], None]]
