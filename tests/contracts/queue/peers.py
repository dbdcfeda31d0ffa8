"""A queue on a thread, and what its clients send."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import numpy as np
import zmq

from rl_async.messages import SCHEMA, Done, Hello, LeasedGroup, Sampling, Trajectory, VersionRun
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.admission import QueueSettings
from rl_async.transfer_queue.auth import Authenticator, ServerKeys, is_file
from rl_async.transfer_queue.client import QueueClient
from rl_async.transfer_queue.delivery import Counted, numbered
from rl_async.transfer_queue.journal import Journal, MemoryJournal
from rl_async.transfer_queue.server import QueueLimits, QueueServer, bind, serve_requests
from rl_async.transfer_queue.store import Feed, Store

FREE_PORT = "tcp://127.0.0.1:*"
PATIENCE_MS = 60_000
ENDS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
SETTINGS = QueueSettings(steps=50, batch_groups=2, group_size=2, lease_s=30.0)


class RunningQueue:
    """A queue on a thread, by default with a memory journal; closed to strangers if it has ``keys``."""

    def __init__(
        self,
        address: str,
        settings: QueueSettings,
        *,
        keys: ServerKeys | None = None,
        limits: QueueLimits | None = None,
        open_journal: Callable[[], Journal] = MemoryJournal,
    ) -> None:
        self.address = address
        self._open_journal = open_journal
        self._keys, self._limits = keys, limits
        self._ready, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._serve, args=[settings])
        self._thread.start()
        assert self._ready.wait(10)

    def _serve(self, settings: QueueSettings) -> None:
        journal = self._open_journal()
        feed = Feed(journal.append)
        store = Store(settings, Counted(), [numbered(0)], feed)
        journal.recover()
        allowed = None if self._keys is None else self._keys.allowed
        server = QueueServer(store, journal, feed, limits=self._limits, allowed=allowed)
        with zmq.Context() as context, ExitStack() as stack:
            auth = None
            if self._keys is not None and not is_file(self.address):
                auth = stack.enter_context(Authenticator(context, self._keys.allowed, lambda: store.count("denied")))
            socket = stack.enter_context(bind(context, self.address, keys=self._keys, limits=self._limits))
            self.address = socket.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
            self._ready.set()
            serve_requests(socket, server, journal.flush, self._stop.is_set, auth=auth)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(10)
        assert not self._thread.is_alive()


def trajectory(group: LeasedGroup, sample: int, tokens: int = 5) -> Trajectory:
    return Trajectory(
        task_id=group.task.task_id,
        group_id=group.group_id,
        sample=sample,
        attempt=group.attempt,
        partition=group.partition,
        episode_id=f"{group.group_id}.{sample}",
        token_ids=np.arange(tokens, dtype=np.int32),
        loss_mask=np.ones(tokens, dtype=bool),
        logprobs=np.linspace(-1, 0, tokens, dtype=np.float32),
        versions=[VersionRun(group.min_version, 0, tokens)],
        sampling=Sampling(),
        reward=0.5,
    )


def worker(queue: RunningQueue, name: str = "worker-0", timeout_s: float = 10.0) -> QueueClient:
    return QueueClient(queue.address, role="agent", name=name, timeout_s=timeout_s)


async def put_all(client: QueueClient, groups: list[LeasedGroup], tokens: int = 5) -> None:
    rows = [trajectory(group, sample, tokens) for group in groups for sample in group.samples]
    assert set(map(type, await asyncio.gather(*map(client.put, rows)))) == {Done}


def ask(raw: zmq.Socket, *parts: bytes) -> wire.ReplyMessage:
    raw.send_multipart(parts)
    return wire.decode_reply(raw.recv_multipart())


@contextmanager
def disconnected(socket: zmq.Socket) -> Iterator[None]:
    """Wait at the end of the block until a connection of the socket has ended, or was refused."""
    monitor = socket.get_monitor_socket(ENDS)
    try:
        yield
        assert monitor.poll(PATIENCE_MS), "the connection goes on"
    finally:
        socket.disable_monitor()
        monitor.close(0)


ID = b"12345678"
HELLO = msgspec.msgpack.encode(Hello(schema=SCHEMA, role="test", name="raw"))
