"""A payload shard: ``python -m rl_async.transfer_queue.shard --run RUN --queue ADDRESS --address ADDRESS --name NAME``.

    workers --Store--> [rows in memory] --Load--> trainer ranks
                            |   ^
                 its groups |   | which of them are gone
                            v   |
                          the queue

It knows nothing but rows: the queue decides which are needed and for how long. The rows are lost with the process;
the queue then has the trajectories generated again, or names another shard's copy.
"""

import argparse
import logging
import queue
import secrets
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import zmq

from rl_async import messages as m
from rl_async.configs.derived import is_loopback
from rl_async.configs.load import load_resolved
from rl_async.errors import EXIT_FAILED, ProtocolError, QueueLost, UserError
from rl_async.messages import Frame
from rl_async.process.allocation import reuse_freed_memory
from rl_async.process.http_server import exposed
from rl_async.process.role import add_run, heeded, role_parser, run_role
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.auth import AllowList, Authenticator, client_keys, is_file, server_keys
from rl_async.transfer_queue.client import SyncQueueClient
from rl_async.transfer_queue.journal import ALL_GROUPS, Payloads
from rl_async.transfer_queue.server import Gate, Outgoing, QueueLimits, bind, serve_requests
from rl_async.transfer_queue.verbs import SHARD_VERBS, Response

log = logging.getLogger("rl_async.queue")

# The longest wait of a Sweep. The queue answers earlier if leases are short.
SWEEP_S = 1.0
# For the serving thread to drop all rows.
CLEAR_S = 30.0


class ShardServer:
    """Keeps rows by (group, sample, attempt) and refuses other requests. One thread calls it.

    ``orders`` brings groups to forget, or None for all of them; the sender of None waits for ``cleared``.
    """

    def __init__(self, shard_id: str, limits: QueueLimits | None = None, allowed: AllowList | None = None) -> None:
        self.turned_away: Counter[str] = Counter()
        self.orders: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
        self.cleared = threading.Event()
        self._gate = Gate(limits or QueueLimits(), time.monotonic, self._count, shard_id, allowed)
        self._payloads = Payloads()

    def _count(self, name: str) -> None:
        self.turned_away[name] += 1

    def groups(self) -> list[int]:
        """Ids of the groups with rows here. Safe to call from any thread."""
        return self._payloads.groups()

    def begin_turn(self) -> None:
        """Do nothing: a shard has no deadlines."""

    def handle(self, parts: Sequence[Any], user: bytes = b"") -> list[Outgoing]:
        """Answer one message of a worker or reader."""
        answer = self._gate.answer(parts, self._answer, user)
        return [] if answer is None else [answer]

    def tick(self) -> list[Outgoing]:
        """Delete the groups that the queue no longer needs."""
        self._gate.refresh()
        while not self.orders.empty():
            groups = self.orders.get()
            self._payloads.free(ALL_GROUPS if groups is None else groups)
            if groups is None:
                self.cleared.set()
        return []

    def undelivered(self, message: Outgoing) -> list[Outgoing]:
        """Forget a lost connection; its client asks again, here or at another shard."""
        self._gate.forget(message.identity)
        return []

    def _answer(self, identity: bytes, message: wire.RequestMessage) -> Response:
        request = message.request
        roles = SHARD_VERBS.get(type(request))
        if roles is not None and (refused := self._gate.forbidden(identity, message, roles)):
            return refused
        if isinstance(request, m.StoreRows):
            return self._store(request, message.payload)
        if message.payload:
            raise ProtocolError(f"a {type(request).__name__} with {len(message.payload)} payload frames")
        if isinstance(request, m.LoadRows):
            return self._load(request)
        return Response(m.Refused(code="not_here", reason=f"a payload shard knows no {type(request).__name__}"))

    def _store(self, request: m.StoreRows, payload: Sequence[Frame]) -> Response:
        if len(request.samples) != len(request.lengths):
            raise ProtocolError(f"{len(request.samples)} samples with lengths of {len(request.lengths)}")
        rows = iter(wire.split(payload, [length for some in request.lengths for length in some]))
        for (group, sample, attempt), lengths in zip(request.samples, request.lengths, strict=True):
            self._payloads.put(group, (sample, attempt), [next(rows) for _ in lengths])
        return Response(m.Done())

    def _load(self, request: m.LoadRows) -> Response:
        found: list[Frame] = []
        for group, sample, attempt, segment in request.rows:
            row = self._payloads.get(group, (sample, attempt), segment)
            if row is None:
                return Response(m.Refused(code="unknown_row", reason=f"no row {(group, sample, attempt, segment)}"))
            found.append(row)
        return Response(m.FetchedRows(lengths=list(map(len, found))), wire.join(found))


class Membership:
    """A thread that registers this shard with the queue and learns which groups can be deleted.

    Consumes the queue's answers; produces orders to the server. Waits for the queue, SWEEP_S each time; unblocked by
    groups that end. ``failed`` has the error that ended it, if the queue is gone for good.
    """

    def __init__(self, server: ShardServer, client: SyncQueueClient, shard_id: str, name: str, url: str) -> None:
        self._server, self._client = server, client
        self._record = m.RegisterShard(shard_id=shard_id, name=name, url=url)
        self._stopped = threading.Event()
        self.failed: QueueLost | ProtocolError | None = None
        self._thread = threading.Thread(target=self._run, name="shard membership", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the registry drops this shard once its lease time is over."""
        self._stopped.set()
        self._thread.join(SWEEP_S + CLEAR_S)

    def _run(self) -> None:
        try:
            with self._client as client:
                self._register(client)
                while not self._stopped.is_set():
                    self._sweep(client)
        except (QueueLost, ProtocolError) as error:
            self.failed = error

    def _register(self, client: SyncQueueClient) -> None:
        client.register_shard(self._record.shard_id, self._record.name, self._record.url)
        log.info("registered as %s", self._record.shard_id)

    def _sweep(self, client: SyncQueueClient) -> None:
        reply = client.sweep(self._record.shard_id, self._server.groups(), SWEEP_S)
        if isinstance(reply, m.Swept):
            if reply.gone:
                self._server.orders.put(reply.gone)
            return
        if reply.code != wire.SHARD_LOST:
            raise ProtocolError(f"the transfer queue answered a shard with {reply}")
        log.warning("the queue has given this shard up; starting again with nothing")
        self._server.orders.put(None)
        if not self._server.cleared.wait(CLEAR_S):
            raise ProtocolError(f"this shard's rows were not dropped within {CLEAR_S:.0f} s")
        self._server.cleared.clear()
        self._record = m.RegisterShard(shard_id=new_id(self._record.name), name=self._record.name, url=self._record.url)
        self._register(client)


def new_id(name: str) -> str:
    """A random id that no shard had before."""
    return f"{name}-{secrets.token_hex(4)}"


def run_shard(
    address: str, queue_address: str, name: str, *, run: Path | None = None, stopped: Callable[[], bool] = lambda: False
) -> None:
    """Keep payloads of the queue at ``queue_address`` until ``stopped``.

    ``run`` is the folder with config and keys. Raises UserError for a bad config, missing keys or a taken port;
    QueueLost or ProtocolError when the queue is gone or does not want this shard.
    """
    config = None if run is None else load_resolved(run / "config.yaml")
    keys = None if config is None or run is None else server_keys(config, run)
    own = None if config is None or run is None else client_keys(config, run, "shard")
    if keys is None and not is_loopback(urlsplit(address).hostname or ""):
        raise UserError(f"--address {address} can be reached from elsewhere, and a shard without a run has no keys")
    limits = QueueLimits() if config is None else QueueLimits.of(config)
    shard_id = new_id(name)
    server = ShardServer(shard_id, limits, allowed=None if keys is None else keys.allowed)
    with zmq.Context() as context, bind(context, address, keys=keys, limits=limits) as socket:
        client = SyncQueueClient(queue_address, role="shard", name=name, keys=own)
        membership = Membership(server, client, shard_id, name, address)

        def over() -> bool:
            return stopped() or membership.failed is not None

        try:
            # Rows in memory need no flush.
            if keys is None or is_file(address):
                serve_requests(socket, server, lambda: None, over)
            else:
                with Authenticator(context, keys.allowed, lambda: server.turned_away.update(denied=1)) as auth:
                    serve_requests(socket, server, lambda: None, over, auth=auth)
        finally:
            membership.stop()
    if server.turned_away:
        log.warning("turned away: %s", dict(server.turned_away))
    if membership.failed is not None:
        raise membership.failed


def _run(given: argparse.Namespace, ended: threading.Event) -> None:
    wanted = load_resolved(given.run / "config.yaml").tracking.prometheus
    with exposed(wanted, given.run, "shard", given.name):
        run_shard(given.address, given.queue, given.name, run=given.run, stopped=ended.is_set)


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and serve the shard; return the exit code."""
    parser = role_parser("transfer_queue.shard", __doc__)
    add_run(parser)
    parser.add_argument("--queue", required=True, help="address of the transfer queue")
    parser.add_argument("--address", required=True, help="where to listen; workers and trainer ranks must reach it")
    parser.add_argument("--name", required=True, help="the same again after a restart")
    arguments = parser.parse_args(argv)
    reuse_freed_memory()
    ended = threading.Event()
    for number in heeded(signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    return run_role("shard", lambda: _run(arguments, ended), {QueueLost: EXIT_FAILED, ProtocolError: EXIT_FAILED})


if __name__ == "__main__":
    sys.exit(main())
