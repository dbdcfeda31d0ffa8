"""The queue's state for Prometheus.

The thread that answers asks the queue as any client does, so the queue's own thread shares nothing with it.
"""

import contextlib
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, Metric

from rl_async.errors import ProtocolError, QueueLost, RequestRefused
from rl_async.messages import Inspection
from rl_async.telemetry.exposition import answering, by_label, gauge, metrics_text
from rl_async.transfer_queue.auth.keys import ClientKeys
from rl_async.transfer_queue.client.sync_client import SyncQueueClient
from rl_async.transfer_queue.state.groups import State

ANSWER_S = 5.0  # of the queue to one scrape
PREFIX = "rl_async_queue_"


class QueueCollector:
    """Asks the queue at ``address`` for its state at each scrape, and refuses the scrape (503) if it does not answer
    within ``answer_s``."""

    def __init__(self, address: str, keys: ClientKeys | None = None, answer_s: float = ANSWER_S) -> None:
        self._address, self._keys, self._answer_s = address, keys, answer_s

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the queue as it is now."""
        client = SyncQueueClient(
            self._address, role="metrics", name="metrics", timeout_s=self._answer_s, keys=self._keys
        )
        try:
            with client as queue:
                report = queue.inspect()
        except (QueueLost, ProtocolError) as error:
            raise RequestRefused(f"the queue does not answer: {error}", code="queue_lost", status=503) from error
        yield from InspectionCollector(report).collect()


class InspectionCollector:
    """The metrics of one inspection: groups, ages and rates by state, slots, bytes, and every counter."""

    def __init__(self, report: Inspection) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        """Yield each metric with its samples; prometheus_client calls it."""
        report, status = self._report, self._report.status
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
def serve_metrics(
    port: int, address: str, token: str, keys: ClientKeys | None = None, *, answer_s: float = ANSWER_S
) -> Iterator[None]:
    """Answer scrapes of the queue at ``address`` on this machine's ``port`` while the block runs; 0: do not.

    A scrape must carry ``token``. Raises UserError if the port cannot be had.
    """
    if port == 0:
        yield
        return
    text = metrics_text(QueueCollector(address, keys, answer_s))
    with answering(port, "queue.metrics_port", token, text):
        yield
