"""The loop around the server: what is flushed before what is sent, with a socket that writes down what happens."""

import os
import socket
import subprocess
import sys
import time
from collections import deque

import psutil
import pytest
import zmq

from rl_async import messages as m
from rl_async.errors import JournalError
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.admission import QueueSettings
from rl_async.transfer_queue.delivery import Counted
from rl_async.transfer_queue.journal.journal import MemoryJournal
from rl_async.transfer_queue.server import (
    MOST_REQUESTS,
    OTHER_FILES,
    PROBE_S,
    PROBES,
    QueueLimits,
    QueueServer,
    bind,
    serve_requests,
)
from rl_async.transfer_queue.store import Feed, Store


class Router:
    """A ROUTER whose clients have sent all they have to say. Clients in ``gone`` cannot be answered."""

    def __init__(self, log: list[str]) -> None:
        self.inbox: deque[list[bytes]] = deque()
        self.gone: set[bytes] = set()
        self._log, self._ids = log, wire.RequestIds()
        self._first = True

    def ask(self, client: str, request: m.Request) -> None:
        self.inbox.append([client.encode(), *map(bytes, wire.encode(self._ids.take(), request))])

    def poll(self, timeout_ms: int) -> int:
        return len(self.inbox)

    def recv_multipart(self, flags: int, copy: bool = True) -> list[bytes]:
        if not self.inbox:
            raise zmq.Again
        return self.inbox.popleft()

    def send(self, frame: bytes, flags: int = 0, copy: bool = True) -> None:
        if self._first:
            if frame in self.gone:
                raise zmq.ZMQError(zmq.EHOSTUNREACH)
            self._log.append(f"to {frame.decode()}")
        self._first = not flags & zmq.SNDMORE


class Loop:
    """The loop with a journal that can be full; ``log`` says in which order things happened."""

    def __init__(self, max_staleness: int = 0) -> None:
        self.log: list[str] = []
        self.router = Router(self.log)
        self.full, self.flush_s, self.now = False, 0.0, 0.0
        journal = MemoryJournal()
        feed = Feed(journal.append, lambda transition: self.log.append(type(transition).__name__))
        settings = QueueSettings(steps=9, batch_groups=1, group_size=1, max_staleness=max_staleness, lease_s=LEASE_S)
        self._server = QueueServer(Store(settings, Counted(), [], feed), journal, feed, lambda: self.now)
        for client in ("t", "a", "b"):
            self.router.ask(client, m.Hello(schema=m.SCHEMA, role="test", name=client))
        self.run()

    def flush(self) -> None:
        self.log.append("flush")
        self.now += self.flush_s
        if self.full:
            raise JournalError("no room")

    def run(self) -> None:
        """Until all is answered."""
        turns = iter([False] * (1 + len(self.router.inbox)))
        serve_requests(self.router, self._server, self.flush, lambda: next(turns, True), lambda: self.now)  # type: ignore[arg-type]


LEASE_S = 10.0
PUBLISH = m.Publish(version=m.Version(0, 0), engines=[])


def lease(worker: str, wait_s: float = 60.0) -> m.Lease:
    return m.Lease(worker=worker, max_groups=1, wait_s=wait_s)


def test_one_flush_serves_all_that_came_and_those_that_waited_for_it() -> None:
    loop = Loop()
    loop.router.ask("a", lease("a"))
    loop.run()
    loop.log.clear()
    loop.router.ask("b", m.Status())
    loop.router.ask("t", PUBLISH)
    loop.run()
    changes = [entry for entry in loop.log if entry[0].isupper()]
    assert changes == ["Published", "EnginesChanged", "Admitted", "LeaseGiven"]
    last = loop.log.index("LeaseGiven")
    assert loop.log[last + 1 :] == ["flush", "to b", "to t", "to a"]


def test_nothing_is_sent_when_the_journal_is_full() -> None:
    loop = Loop()
    loop.log.clear()
    loop.router.ask("t", PUBLISH)
    loop.full = True
    with pytest.raises(JournalError, match="no room"):
        loop.run()
    assert not [entry for entry in loop.log if entry.startswith("to ")]


def test_what_follows_from_a_lost_answer_is_flushed_before_it_is_sent() -> None:
    loop = Loop()
    loop.router.gone.add(b"a")
    loop.router.ask("a", lease("a"))
    loop.router.ask("b", lease("b"))
    loop.router.ask("t", PUBLISH)
    loop.run()
    taken_back = loop.log.index("LeaseLost")
    assert loop.log[taken_back:] == ["LeaseLost", "GrantVoided", "LeaseGiven", "flush", "to b"]


def test_a_renewal_that_waits_is_heard_before_leases_end() -> None:
    loop = Loop()
    loop.router.ask("a", lease("a"))
    loop.router.ask("t", PUBLISH)
    loop.run()
    for _ in range(15):
        loop.now += LEASE_S / 16
        loop.run()
    loop.now += LEASE_S / 16
    loop.router.ask("a", m.Renew(worker="a"))
    loop.run()
    assert "LeaseLost" not in loop.log
    for _ in range(16):
        loop.now += LEASE_S / 16
        loop.run()
    assert "LeaseLost" in loop.log


def test_a_slow_flush_before_a_lost_answer_ends_no_other_lease() -> None:
    loop = Loop(max_staleness=1)
    for client, request in (("t", PUBLISH), ("a", lease("a"))):
        loop.router.ask(client, request)
    loop.run()
    loop.router.gone.add(b"b")
    loop.router.ask("b", lease("b"))
    loop.flush_s = 2 * LEASE_S
    loop.run()
    loop.run()
    assert loop.log.count("LeaseGiven") == 2 and loop.log.count("LeaseLost") == 1, "only b's, which did not hear of it"


def test_a_slow_flush_serves_more_requests() -> None:
    loop = Loop()
    loop.flush_s = 10.0
    for _ in range(2 * MOST_REQUESTS + 1):
        loop.router.ask("b", m.Status())
    loop.log.clear()
    loop.run()
    answers = "".join("." if entry == "to b" else "|" for entry in loop.log).strip("|").split("|")
    assert [len(part) for part in answers if part] == [MOST_REQUESTS, MOST_REQUESTS + 1]


def test_a_flush_does_not_wait_for_ever_more_requests() -> None:
    loop = Loop()
    loop.log.clear()
    for _ in range(2 * MOST_REQUESTS + 1):
        loop.router.ask("b", m.Status())
    loop.run()
    answers = "".join("." if entry == "to b" else "|" for entry in loop.log).strip("|").split("|")
    assert [len(part) for part in answers if part] == [MOST_REQUESTS, MOST_REQUESTS, 1]


def test_all_clients_may_connect_at_once_and_have_no_timers() -> None:
    with zmq.Context() as context, bind(context, "tcp://127.0.0.1:*", limits=QueueLimits(clients=700)) as server:
        assert server.get(zmq.BACKLOG) == 700
        assert server.get(zmq.HEARTBEAT_IVL) == 0


def accepted(port: int) -> list[socket.socket]:
    """Copies of the connections that this process has accepted at ``port``."""
    here = psutil.Process().net_connections("tcp4")
    return [socket.socket(fileno=os.dup(one.fd)) for one in here if one.laddr.port == port and one.raddr]


def test_the_kernel_probes_the_hosts_of_clients() -> None:
    """libzmq hands each of these on to the connections that it accepts."""
    with zmq.Context() as context, bind(context, "tcp://127.0.0.1:*", limits=QueueLimits()) as server:
        address = server.get(zmq.LAST_ENDPOINT).decode()
        with socket.create_connection(("127.0.0.1", port := int(address.rpartition(":")[2]))):
            deadline = time.monotonic() + 30
            while not (found := accepted(port)):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            with found[0] as connection:
                assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
                values = [connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names]
                assert values == [PROBE_S, PROBE_S, PROBES, 1000 * PROBE_S * (PROBES + 1)]


LISTENS = """
import logging, resource, sys, zmq
from rl_async.transfer_queue.server import QueueLimits
from rl_async.transfer_queue.server import bind
logging.basicConfig()
resource.setrlimit(resource.RLIMIT_NOFILE, (400, int(sys.argv[1])))
with zmq.Context() as context, bind(context, "tcp://127.0.0.1:*", limits=QueueLimits(clients=300)):
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def listening(hard: int) -> tuple[int, str]:
    """The open files allowed to a queue for 300 clients that was started with 400 and may have ``hard``; its log."""
    done = subprocess.run([sys.executable, "-c", LISTENS, str(hard)], capture_output=True, text=True, check=True)
    return int(done.stdout), done.stderr


def test_a_file_for_each_connection_may_be_opened_if_the_hard_limit_lets_it() -> None:
    assert listening(1000) == (300 + OTHER_FILES, "")
    allowed, log = listening(500)
    assert allowed == 500 and "300 connections" in log
