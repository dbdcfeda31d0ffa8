"""The queue's spans: an episode as a whole, from its admission until it is trained or given up, and its waits.

The queue also chooses which episodes have a trace; of the others no span is made.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rl_async import tracing
from rl_async.messages import TrajectoryHeader
from rl_async.tracing import EPISODE
from rl_async.transfer_queue.state.groups import TRAIN
from rl_async.transfer_queue.state.transitions import (
    Admitted,
    BatchCommitted,
    BatchReserved,
    DeadLettered,
    GroupDropped,
    GroupReady,
    LeaseGiven,
    LeaseLost,
    RolledBack,
    SampleFailed,
    SamplesStored,
    Transition,
)


def traced_samples(group: int, samples: Sequence[int], attempt: int) -> list[int]:
    """Return the samples, of those of a group that are leased as an attempt, whose episodes have a trace."""
    return [sample for sample in samples if tracing.begins(f"{group}.{sample}.{attempt}")]


class _Here(NamedTuple):
    """A sample that is stored: the name of its episode, and since when."""

    episode: str
    since: int


class _Group:
    """What is known of a group; after a restart of the queue, since then."""

    def __init__(self, partition: str) -> None:
        self.partition, self.admitted = partition, tracing.now()
        self.attempts: dict[int, int] = {}  # of traced samples that are with a worker
        self.here: dict[int, _Here] = {}  # traced samples


class QueueTraces:
    """Follows the transitions of the queue, as a consumer of its feed."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        self._steps: dict[int, list[int]] = {}

    def __call__(self, transition: Transition) -> None:
        match transition:
            case Admitted(group=number, partition=partition):
                self._groups[number] = _Group(partition)
            case LeaseGiven(group=number, traced=[_, *_] as traced, attempt=attempt):
                self._leased(number, traced, attempt)
            case SamplesStored(samples=stored):
                for headers in stored:
                    if headers[0].traced:
                        self._stored(headers[0])
            case SampleFailed(group=number, sample=sample, error=error):
                self._given_up(number, [sample], error)
            case LeaseLost(group=number, samples=samples, worker=worker):
                self._given_up(number, samples, f"worker {worker} lost its lease")
            case GroupDropped(group=number, reason=reason) | DeadLettered(group=number, error=reason):
                self._ended(number, {"rl_async.dropped": reason}, reason)
            case GroupReady(group=number, partition=partition) if partition != TRAIN:
                self._ended(number, {})
            case RolledBack():
                self._groups.clear()
                self._steps.clear()
            case BatchReserved(step=step, groups=groups):
                self._reserved(step, groups)
            case BatchCommitted(step=step):
                for number in self._steps.pop(step, []):
                    self._ended(number, {"rl_async.step": step})

    def _group(self, group: int, partition: str = TRAIN) -> _Group:
        return self._groups.setdefault(group, _Group(partition))

    def _leased(self, number: int, samples: Sequence[int], attempt: int) -> None:
        group = self._group(number)
        for sample in samples:
            group.attempts[sample] = attempt
            tracing.add(f"{number}.{sample}.{attempt}", "wait for worker", group.admitted, {}, parent=EPISODE)

    def _stored(self, header: TrajectoryHeader) -> None:
        group = self._group(header.group_id, header.partition)
        group.attempts.pop(header.sample, None)
        name = f"{header.group_id}.{header.sample}.{header.attempt}"
        group.here[header.sample] = _Here(name, tracing.now())

    def _reserved(self, step: int, groups: list[int]) -> None:
        self._steps[step] = groups
        about: dict[str, tracing.Value] = {"rl_async.step": step}
        for group in (self._groups[number] for number in groups if number in self._groups):
            for here in group.here.values():
                tracing.add(here.episode, "wait for batch", here.since, about, parent=EPISODE)

    def _given_up(self, number: int, samples: Sequence[int], error: str) -> None:
        group = self._group(number)
        for sample in samples:
            if (attempt := group.attempts.pop(sample, None)) is not None:
                self._add(number, sample, f"{number}.{sample}.{attempt}", {}, error)

    def _ended(self, number: int, about: dict[str, tracing.Value], error: str = "") -> None:
        if number in self._groups:  # else there was no trace of it since the queue's restart
            for sample, here in self._groups[number].here.items():
                self._add(number, sample, here.episode, about, error)
            del self._groups[number]

    def _add(self, number: int, sample: int, episode: str, about: dict[str, tracing.Value], error: str) -> None:
        group = self._groups[number]
        whole: dict[str, tracing.Value] = {
            "gen_ai.conversation.id": episode,
            "rl_async.group": number,
            "rl_async.sample": sample,
            "rl_async.partition": group.partition,
            **about,
        }
        tracing.add(episode, EPISODE, group.admitted, whole, key=EPISODE, parent="", error=error)
