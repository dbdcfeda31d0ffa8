"""Prometheus reads the queue over HTTP."""

import contextlib
import socket
import urllib.error
import urllib.request

import pytest

from rl_async.errors import UserError
from rl_async.process.http_auth import bearer
from rl_async.transfer_queue import SyncQueueClient, serve
from rl_async.transfer_queue.delivery import numbered
from rl_async.transfer_queue.telemetry import serve_metrics
from tests.contracts.queue.peers import trajectory
from tests.support.ports import free_port

TOKEN = "m" * 43


@pytest.fixture
def port() -> int:
    return free_port()


def scrape(port: int, path: str = "/metrics") -> dict[str, float]:
    """The samples by name and label; comments are checked to come in pairs before them."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=bearer(TOKEN))
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        lines = answer.read().decode().splitlines()
    helped = [line.split()[2] for line in lines if line.startswith("# HELP")]
    assert helped == [line.split()[2] for line in lines if line.startswith("# TYPE")]
    found = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert {name.split("{")[0] for name in found} <= set(helped)
    return {name.removeprefix("rl_async_queue_"): float(value) for name, value in found.items()}


def test_a_scrape_shows_the_queue_as_it_is(port):
    tasks = list(map(numbered, range(9)))
    with (
        serve(tasks, batch_groups=2) as address,
        serve_metrics(port, address, TOKEN),
        SyncQueueClient(address, role="agent", name="w", timeout_s=10) as queue,
    ):
        first, second = queue.lease(2, 5.0).groups
        queue.put(trajectory(first, 0))
        queue.fail(second.group_id, 0, second.attempt, "boom")
        found = scrape(port)
        assert found['groups{state="ready"}'] == found['groups{state="waiting"}'] == 1
        assert found['groups{state="leased"}'] == 0
        assert found['events_total{kind="redelivered"}'] == 1
        assert (found["slots"], found["slots_used"], found["admitted_total"], found["workers"]) == (4, 2, 2, 1)
        assert found["payload_bytes"] == queue.status().payload_bytes > 0
        assert found['rate_per_second{of="rows"}'] > 0
        assert 'oldest_seconds{state="ready"}' in found and 'oldest_seconds{state="leased"}' not in found
        assert (found["draining"], found["published_step"]) == (0, 0)
        queue.drain()
        assert scrape(port)["draining"] == 1
        with pytest.raises(urllib.error.HTTPError, match="404") as missing:
            scrape(port, "/else")
        missing.value.close()


def test_without_a_queue_a_scrape_fails_and_does_not_show_zeros(port, address):
    with (
        serve_metrics(port, address, TOKEN, answer_s=0.2),
        pytest.raises(urllib.error.HTTPError, match="503") as failed,
    ):
        scrape(port)
    failed.value.close()


def test_strangers_who_begin_a_request_and_fall_silent_hold_no_scrape_up(port):
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(serve(list(map(numbered, range(9)))))
        stack.enter_context(serve_metrics(port, address, TOKEN))
        for _ in range(30):
            silent = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            silent.sendall(b"GET /metrics HTTP/1.1\r\nHost: ")
        assert scrape(port)["published_step"] == 0


def test_a_taken_port_is_named(port, address):
    with (
        serve_metrics(port, address, TOKEN),
        pytest.raises(UserError, match=r"--metrics-port"),
        serve_metrics(port, address, TOKEN),
    ):
        raise AssertionError("it served")


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 401), (bearer("0" * 43), 401), (bearer(TOKEN) | {"Origin": "null"}, 403), ({"Host": "a.example"}, 403)],
)
def test_a_scrape_without_the_token_or_of_a_web_page_is_refused(port, address, headers, status):
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=headers)
    with serve_metrics(port, address, TOKEN), pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=20)
    refused.value.close()
    assert refused.value.code == status
