"""The queue's state for Prometheus: ``GET /metrics`` in its text format.

The thread that answers asks the queue as any client does, so the queue's own thread shares nothing with it.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from rl_async.errors import ProtocolError, QueueLost, UserError
from rl_async.messages import Inspection
from rl_async.process.http_auth import Access
from rl_async.transfer_queue.auth.keys import ClientKeys
from rl_async.transfer_queue.client.sync_client import SyncQueueClient
from rl_async.transfer_queue.state.groups import State

HOST = "127.0.0.1"
ANSWER_S = 5.0  # of the queue to one scrape
STOP_S = 10.0
PREFIX = "rl_async_queue_"


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
    return GaugeMetricFamily(PREFIX + name, text, float(value))


def _by(label: str, name: str, text: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([str(key)], float(value))
    return family


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
    try:
        server = HTTPServer((HOST, port), _handler(address, Access(token), keys, answer_s))
    except (OSError, OverflowError) as error:
        raise UserError(f"queue.metrics_port: port {port} cannot be used ({error}); choose another, or 0") from error
    thread = threading.Thread(target=_answer, args=[server], name="queue metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join(STOP_S)
        server.server_close()


def _answer(server: HTTPServer) -> None:
    """Consumes scrapes; produces their answers. Waits for a connection; unblocked by one, or by ``shutdown``."""
    server.serve_forever(poll_interval=0.1)


def _handler(address: str, access: Access, keys: ClientKeys | None, answer_s: float) -> type[BaseHTTPRequestHandler]:
    class Scrape(BaseHTTPRequestHandler):
        timeout = ANSWER_S  # of the scraper, to send its request

        def do_GET(self) -> None:
            headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in self.headers.items()]
            if (refused := access.refusal("GET", self.path, HOST, headers)) is not None:
                self.send_error(refused[0], explain=refused[1])
                return
            if self.path.split("?")[0] != "/metrics":
                self.send_error(404, "only /metrics is here")
                return
            try:
                client = SyncQueueClient(address, role="metrics", name="metrics", timeout_s=answer_s, keys=keys)
                with client as queue:
                    body = generate_latest(InspectionCollector(queue.inspect()))
            except (QueueLost, ProtocolError) as error:
                self.send_error(503, "the queue does not answer", str(error))
                return
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE_PLAIN_0_0_4)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Do not log scrapes."""

    return Scrape
