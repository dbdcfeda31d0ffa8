"""The queue's state for Prometheus: ``GET /metrics`` in its text format, version 0.0.4.

The thread that answers asks the queue as any client does, so the queue's own thread shares nothing with it.
https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
"""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

from rl_async.errors import ProtocolError, QueueLost, UserError
from rl_async.messages import Inspection
from rl_async.transfer_queue.auth.keys import ClientKeys
from rl_async.transfer_queue.client.sync_client import SyncQueueClient
from rl_async.transfer_queue.state.groups import State

HOST = "127.0.0.1"
ANSWER_S = 5.0  # of the queue to one scrape
STOP_S = 10.0
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Samples = list[tuple[str, float]]  # the label with its value, or empty, and the number


def metrics_text(report: Inspection) -> str:
    """The exposition: groups, ages and rates by state, slots, bytes, and every counter."""
    status = report.status
    counts = (status.waiting, status.leased, status.ready, status.reserved, status.committed)
    behind = {record.name: record.behind for record in report.consumers}
    families: list[tuple[str, str, str, Samples]] = [
        ("groups", "gauge", "Training groups by state.", _labelled("state", dict(zip(State, counts, strict=True)))),
        ("oldest_seconds", "gauge", "Age of the group longest in a state.", _labelled("state", report.ages_s)),
        ("oldest_lease_seconds", "gauge", "Age of the oldest lease.", [("", status.oldest_lease_s)]),
        ("rate_per_second", "gauge", "Per second over the last minute.", _labelled("of", report.rates)),
        ("slots", "gauge", "Training groups that may be alive.", [("", status.slots)]),
        ("slots_used", "gauge", "Training groups that are alive.", [("", status.slots_used)]),
        ("payload_bytes", "gauge", "Bytes of the trajectories held.", [("", status.payload_bytes)]),
        ("workers", "gauge", "Workers heard of within the lease time.", [("", status.workers)]),
        ("shards", "gauge", "Payload shards that live.", [("", len(report.shards))]),
        ("submitted_tasks", "gauge", "Submitted tasks that are not admitted yet.", [("", report.submitted)]),
        ("consumer_behind", "gauge", "Trained groups that a consumer has not read.", _labelled("consumer", behind)),
        ("consumer_bytes", "gauge", "Bytes kept for consumers only.", [("", report.kept_bytes)]),
        ("draining", "gauge", "1 if nothing is admitted.", [("", report.draining)]),
        ("finished", "gauge", "1 if the run is over.", [("", status.finished)]),
        ("published_step", "gauge", "Step of the published version; -1: none.", [("", status.published.step)]),
        ("published_lineage", "gauge", "Lineage of the published version.", [("", status.published.lineage)]),
        ("admitted_total", "counter", "Training groups admitted.", [("", status.admitted)]),
        ("events_total", "counter", "What else was counted, by kind.", _labelled("kind", dict(status.counters))),
    ]
    lines: list[str] = []
    for name, kind, text, samples in families:
        lines += [f"# HELP rl_async_queue_{name} {text}", f"# TYPE rl_async_queue_{name} {kind}"]
        lines += [f"rl_async_queue_{name}{label} {float(value)!r}" for label, value in samples]
    return "\n".join(lines) + "\n"


def _labelled(label: str, values: "dict[str, float] | dict[State, int] | dict[str, int]") -> Samples:
    return [(f'{{{label}="{name}"}}', float(value)) for name, value in values.items()]


@contextlib.contextmanager
def serve_metrics(
    port: int, address: str, keys: ClientKeys | None = None, *, answer_s: float = ANSWER_S
) -> Iterator[None]:
    """Answer scrapes of the queue at ``address`` on this machine's ``port`` while the block runs; 0: do not.

    Raises UserError if the port cannot be had.
    """
    if port == 0:
        yield
        return
    try:
        server = HTTPServer((HOST, port), _handler(address, keys, answer_s))
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


def _handler(address: str, keys: ClientKeys | None, answer_s: float) -> type[BaseHTTPRequestHandler]:
    class Scrape(BaseHTTPRequestHandler):
        timeout = ANSWER_S  # of the scraper, to send its request

        def do_GET(self) -> None:
            if self.path.split("?")[0] != "/metrics":
                self.send_error(404, "only /metrics is here")
                return
            try:
                client = SyncQueueClient(address, role="metrics", name="metrics", timeout_s=answer_s, keys=keys)
                with client as queue:
                    body = metrics_text(queue.inspect()).encode()
            except (QueueLost, ProtocolError) as error:
                self.send_error(503, "the queue does not answer", str(error))
                return
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Scrapes are not worth a line."""

    return Scrape
