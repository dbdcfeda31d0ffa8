"""Whoever takes a run's telemetry in benchmarks: a collector of spans, and what scrapes metrics as Prometheus does."""

import json
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rl_async.process.http_auth import bearer, run_token
from rl_async.process.run_files import TARGETS_FOLDER

SCRAPE_EVERY_S = 5.0


class Discarding(BaseHTTPRequestHandler):
    """Reads what is posted and answers that it was taken."""

    server: "Collector"

    def do_POST(self) -> None:
        self.server.bodies.append(len(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


class Collector(ThreadingHTTPServer):
    """Takes spans on a free port; ``bodies`` has the length of each request."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Discarding)
        self.bodies: list[int] = []
        self.endpoint = f"http://127.0.0.1:{self.server_port}"


@contextmanager
def discarding_collector() -> Iterator[Collector]:
    """Take spans while the block runs."""
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def scraped(run: Path, every_s: float = SCRAPE_EVERY_S) -> Iterator[Counter[str]]:
    """Scrape every process that the run lists while the block runs; yields how often each answered, by its name.

    Exits if none was listed, or if one never answered.
    """
    stopped, answers = threading.Event(), Counter[str]()

    def scrape() -> None:
        while not stopped.wait(every_s):
            for entry in _targets(run):
                answers[entry["labels"]["name"]] += _answers(run, entry["targets"][0])

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield answers
    finally:
        stopped.set()
        thread.join()
    silent = [name for name, count in answers.items() if not count]
    if silent or not answers:
        sys.exit(f"{run}: no scrape was answered by {', '.join(silent) or 'any process'}: there is nothing to compare")


def _targets(run: Path) -> Iterator[dict[str, Any]]:
    for file in (run / TARGETS_FOLDER).glob("*.json"):
        try:
            yield from json.loads(file.read_text())
        except FileNotFoundError:  # its process has just ended
            continue


def _answers(run: Path, address: str) -> bool:
    request = urllib.request.Request(f"http://{address}/metrics", headers=bearer(run_token(run, "metrics")))
    try:
        with urllib.request.urlopen(request, timeout=SCRAPE_EVERY_S) as answer:
            answer.read()
    except OSError:  # it refuses, or it begins or ends just now
        return False
    return True
