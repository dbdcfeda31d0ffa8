"""The queue's metrics for Prometheus, and its spans for OpenTelemetry.

The thread that answers a scrape asks the queue as any client does, so the queue's own thread shares nothing with it.
Spans cover an episode from its admission until it is trained or given up, and its waits. The queue also chooses which
episodes have a trace; the others get no span.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, Metric

from rl_async import tracing
from rl_async.errors import ProtocolError, QueueLost, RequestRefused
from rl_async.messages import TrajectoryHeader
from rl_async.process.http_server import answering, by_label, gauge, metrics_text
from rl_async.tracing import EPISODE
from rl_async.transfer_queue import transitions as t
from rl_async.transfer_queue.auth import ClientKeys
from rl_async.transfer_queue.book import TRAIN, State
from rl_async.transfer_queue.client import SyncQueueClient

# The queue must answer a scrape within this.
ANSWER_S = 5.0
PREFIX = "rl_async_queue_"


class QueueCollector:
    """Collects groups, ages and rates by state, slots, bytes, and every counter of the queue at ``address``.

    It asks the queue at each scrape, and refuses the scrape (503) if the queue does not answer within ``answer_s``.
    """

    def __init__(self, address: str, keys: ClientKeys | None = None, answer_s: float = ANSWER_S) -> None:
        self._address, self._keys, self._answer_s = address, keys, answer_s

    def collect(self) -> Iterator[Metric]:
        """Yield each metric with its samples; prometheus_client calls it."""
        client = SyncQueueClient(
            self._address, role="metrics", name="metrics", timeout_s=self._answer_s, keys=self._keys
        )
        try:
            with client as queue:
                report = queue.inspect()
        except (QueueLost, ProtocolError) as error:
            raise RequestRefused(f"the queue does not answer: {error}", code="queue_lost", status=503) from error
        status = report.status
        counts = (status.waiting, status.leased, status.ready, status.reserved, status.committed)
        behind = {record.name: record.behind for record in report.consumers}
        yield _by("state", "groups", "Training groups by state.", dict(zip(State, counts, strict=True)))
        yield _by("state", "oldest_seconds", "Age of the group longest in a state.", report.ages_s)
        yield _gauge("oldest_lease_seconds", "Age of the oldest lease.", status.oldest_lease_s)
        yield _by("of", "rate_per_second", "Per second over the last minute.", report.rates)
        yield _gauge("slots", "Training groups that may be alive.", status.slots)
        yield _gauge("slots_used", "Training groups that are alive.", status.slots_used)
        yield _gauge("payload_bytes", "Bytes of the trajectories held.", status.payload_bytes)
        yield _gauge("workers", "Workers heard of within the lease time.", status.workers)
        yield _gauge("shards", "Registered payload shards.", len(report.shards))
        yield _gauge("submitted_tasks", "Submitted tasks that are not admitted yet.", report.submitted)
        yield _by("consumer", "consumer_behind", "Trained groups that a consumer has not read.", behind)
        yield _gauge("consumer_bytes", "Bytes kept for consumers only.", report.kept_bytes)
        yield _gauge("draining", "1 if nothing is admitted.", report.draining)
        yield _gauge("finished", "1 if the run is over.", status.finished)
        yield _gauge("published_step", "Step of the published version; -1: none.", status.published.step)
        yield _gauge("published_lineage", "Lineage of the published version.", status.published.lineage)
        yield CounterMetricFamily(PREFIX + "admitted", "Training groups admitted.", status.admitted)
        events = CounterMetricFamily(PREFIX + "events", "Other counted events, by kind.", labels=["kind"])
        for kind, count in status.counters.items():
            events.add_metric([kind], count)
        yield events


def _gauge(name: str, text: str, value: float) -> Metric:
    return gauge(PREFIX + name, text, value)


def _by(label: str, name: str, text: str, values: Mapping[str, float]) -> Metric:
    return by_label(label, PREFIX + name, text, {str(key): value for key, value in values.items()})


@contextlib.contextmanager
def serve_metrics(port: int, address: str, token: str, *, answer_s: float = ANSWER_S) -> Iterator[None]:
    """Answer scrapes of the queue at ``address`` on this machine's ``port``, unless it is 0, while the block runs.

    A scrape must carry ``token``. Raises UserError if the port cannot be had.
    """
    if port == 0:
        yield
        return
    text = metrics_text(QueueCollector(address, None, answer_s))
    with answering(port, "--metrics-port", token, text):
        yield


def traced_samples(group: int, samples: Sequence[int], attempt: int) -> list[int]:
    """Return the samples of a lease whose episodes have a trace."""
    return [sample for sample in samples if tracing.begins(f"{group}.{sample}.{attempt}")]


class _Here(NamedTuple):
    """A stored sample: the name of its episode, and the time of the put."""

    episode: str
    since: int


class _Group:
    """The traced samples of a group: the attempts that workers play, and the samples that are here.

    After a restart of the queue, earlier ones are unknown.
    """

    def __init__(self, partition: str) -> None:
        self.partition, self.admitted = partition, tracing.now()
        self.attempts: dict[int, int] = {}
        self.here: dict[int, _Here] = {}


class QueueTraces:
    """Follows the transitions of the queue, as a consumer of its feed."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        self._steps: dict[int, list[int]] = {}

    def __call__(self, transition: t.Transition) -> None:
        match transition:
            case t.Admitted(group=number, partition=partition):
                self._groups[number] = _Group(partition)
            case t.LeaseGiven(group=number, traced=[_, *_] as traced, attempt=attempt):
                self._leased(number, traced, attempt)
            case t.SamplesStored(samples=stored):
                for headers in stored:
                    if headers[0].traced:
                        self._stored(headers[0])
            case t.SampleFailed(group=number, sample=sample, error=error):
                self._given_up(number, [sample], error)
            case t.LeaseLost(group=number, samples=samples, worker=worker):
                self._given_up(number, samples, f"worker {worker} lost its lease")
            case t.GroupDropped(group=number, reason=reason) | t.DeadLettered(group=number, error=reason):
                self._ended(number, {"rl_async.dropped": reason}, reason)
            case t.GroupReady(group=number, partition=partition) if partition != TRAIN:
                self._ended(number, {})
            case t.RolledBack():
                self._groups.clear()
                self._steps.clear()
            case t.BatchReserved(step=step, groups=groups):
                self._reserved(step, groups)
            case t.BatchCommitted(step=step):
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
        # A group without a trace since the queue's restart is unknown.
        if number in self._groups:
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
