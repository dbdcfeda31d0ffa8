"""The client of the queue for a thread that may block; ``client.py`` has the one for an event loop.

Every request may be sent twice: the queue answers a repetition as it answered the first. So a client that hears
nothing opens a new connection, says hello, and sends its unanswered request again, until its deadline.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

import zmq

from rl_async import messages as m
from rl_async.errors import QueueLost
from rl_async.messages.codec import Frame
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.auth.keys import ClientKeys
from rl_async.transfer_queue.client import conversations
from rl_async.transfer_queue.client.conversations import SHARD_S
from rl_async.transfer_queue.client.session import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    PATIENCE_S,
    Session,
    decode_row,
    expect,
    expect_either,
    is_busy,
    must_repeat,
    send_sync,
    wait_of,
)

R = TypeVar("R", bound=m.Reply)
S = TypeVar("S", bound=m.Reply)
T = TypeVar("T")
MOST_CALLS = 16  # at once


class SyncQueueClient:
    """One request at a time over one DEALER, blocking. Use it as ``with``, in one thread.

    All methods raise QueueLost when no answer came within ``timeout_s`` beyond the wait asked for, and ProtocolError
    when the queue refuses or the answer makes no sense.
    """

    def __init__(
        self,
        address: str,
        *,
        role: str,
        name: str,
        timeout_s: float = 60.0,
        patience_s: float = PATIENCE_S,
        shard_s: float = SHARD_S,
        keys: ClientKeys | None = None,
    ) -> None:
        """``patience_s`` without an answer, beyond the wait asked for, make it reconnect; doubled each time.

        A payload shard that does not answer for ``shard_s`` is passed over.
        """
        self._session = Session(address, role, name, keys)
        self._connect_shard = partial(
            SyncQueueClient, role=role, name=name, timeout_s=shard_s, patience_s=patience_s, keys=keys
        )
        self._shards: dict[str, SyncQueueClient] = {}  # by url
        self._callers: ThreadPoolExecutor | None = None  # for several shards at once
        self._sending = conversations.Sending()
        self._timeout_s, self._patience_s = timeout_s, patience_s
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._hello_id = b""

    @property
    def worker(self) -> str:
        """The name under which this client leases, unique to it."""
        return self._session.worker

    def __enter__(self) -> Self:
        self._connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the client cannot be used any more."""
        if self._callers is not None:
            self._callers.shutdown()
        for shard in self._shards.values():
            shard.close()
        self._shards.clear()
        if self._socket is not None:
            self._session.abandon()
            self._socket.close(0)
        self._context.term()

    def _connect(self) -> "zmq.Socket[bytes]":
        if self._socket is not None:
            self._session.abandon()
            self._socket.close(0)
        self._socket = self._context.socket(zmq.DEALER)
        self._session.prepare(self._socket)
        self._socket.connect(self._session.address)
        self._hello_id, frames = self._session.hello()
        send_sync(self._socket, frames)
        return self._socket

    def exchange(
        self, request: m.Request, payload: Sequence[Frame] = (), *, timeout_s: float | None = None
    ) -> wire.ReplyMessage:
        """Send a request until it is answered."""
        wait_s, timeout_s = wait_of(request), self._timeout_s if timeout_s is None else timeout_s
        began = time.monotonic()
        deadline = began + wait_s + timeout_s
        patience, pause = wait_s + self._patience_s, FIRST_PAUSE_S
        request_id = self._session.ids.take()
        frames = wire.encode(request_id, request, payload)
        socket = self._socket or self._connect()
        while True:
            send_sync(socket, frames)
            answer = self._receive(socket, request_id, min(deadline, time.monotonic() + patience))
            if answer is not None and not must_repeat(answer.reply):
                return wire.checked(answer)
            if time.monotonic() >= deadline:
                raise self._session.lost(request, time.monotonic() - began)
            if answer is not None:
                time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
                pause = min(2 * pause, LONGEST_PAUSE_S)
                if is_busy(answer.reply):
                    continue
            patience *= 2
            socket = self._connect()

    def _receive(self, socket: "zmq.Socket[bytes]", request_id: bytes, until: float) -> wire.ReplyMessage | None:
        """The reply to ``request_id``; late replies to earlier requests are passed over. None when time is up."""
        while (left := until - time.monotonic()) > 0:
            if not socket.poll(max(1, int(left * 1000))):
                continue
            message = wire.decode_reply(socket.recv_multipart(copy=False))
            if message.request_id == self._hello_id:
                self._session.welcome(message.reply)
            elif message.request_id == request_id:
                return message
        return None

    def request(self, message: m.Request, *, timeout_s: float | None = None) -> tuple[m.Reply, list[Frame]]:
        """Send any request; its reply, which may be Refused, and the reply's payload."""
        answer = self.exchange(message, timeout_s=timeout_s)
        return answer.reply, answer.payload

    def _ask(self, request: m.Request, kind: type[R]) -> R:
        return expect(self.exchange(request).reply, kind)

    def _ask_either(self, request: m.Request, kind: type[R], other: type[S]) -> R | S:
        return expect_either(self.exchange(request).reply, kind, other)

    def lease(self, max_groups: int, wait_s: float, task: m.Task | None = None) -> m.Leased:
        """Groups to generate, empty if there were none within ``wait_s``; of a ``task`` of the caller's own, one."""
        request = m.Lease(worker=self.worker, max_groups=max_groups, wait_s=wait_s, task=task)
        return self._ask(request, m.Leased)

    def renew(self) -> m.Done:
        """Keep this client's leases."""
        return self._ask(m.Renew(worker=self.worker), m.Done)

    def put(self, *rows: m.Trajectory, media: Mapping[str, bytes] | None = None) -> m.Done | m.Refused:
        """Hand over all rows of one sample, from segment 0; Refused (``fenced``) if they are no longer wanted.

        ``media`` has the bytes, by hash, of what the rows refer to.
        """
        parcels = [conversations.parcel(rows, media)]
        (refused,) = self._converse(conversations.put(self.worker, parcels, self._sending, self._timeout_s))
        return refused or m.Done()

    def fail(self, group_id: int, sample: int, attempt: int, error: str) -> m.Done | m.Refused:
        """Give up one attempt at one sample."""
        request = m.Fail(worker=self.worker, group_id=group_id, sample=sample, attempt=attempt, error=error)
        return self._ask_either(request, m.Done, m.Refused)

    def reserve(self, step: int, wait_s: float) -> m.Reserved | m.NotReady:
        """Fix the batch of ``step``."""
        return self._ask_either(m.Reserve(step=step, wait_s=wait_s), m.Reserved, m.NotReady)

    def fetch(self, rows: Sequence[m.RowKey]) -> list[m.Trajectory]:
        """The trajectories of these rows. Raises RowsLost if they went with a payload shard."""
        return [decode_row(row) for row in self._converse(conversations.fetch(rows, self._timeout_s))]

    def fetch_media(self, rows: Sequence[m.Trajectory]) -> dict[str, bytes]:
        """The bytes, by hash, of all media that these rows refer to."""
        return self._converse(conversations.fetch_media(rows, self._timeout_s))

    def _converse(self, conversation: conversations.Conversation[T]) -> T:
        """Make the calls of a conversation, those of one turn at once."""
        try:
            calls = next(conversation)
            while True:
                calls = conversation.send(self._call_all(calls))
        except StopIteration as end:
            result: T = end.value
            return result

    def _call_all(self, calls: Sequence[conversations.Call]) -> list[conversations.Outcome]:
        if len(calls) < 2:
            return [self._call(call) for call in calls]
        if self._callers is None:
            self._callers = ThreadPoolExecutor(MOST_CALLS, thread_name_prefix="queue client")
        return list(self._callers.map(self._call, calls))

    def _call(self, call: conversations.Call) -> conversations.Outcome:
        """The calls of one turn go to different shards, so no two threads use one of these clients at a time."""
        try:
            if call.url == conversations.QUEUE:
                return self.exchange(call.request, call.payload)
            if call.url not in self._shards:
                self._shards[call.url] = self._connect_shard(call.url)
            return self._shards[call.url].exchange(call.request, call.payload)
        except QueueLost as error:
            if call.url in self._shards:  # it may come back under its url, with nothing
                self._shards.pop(call.url).close()
            return error

    def commit(self, step: int) -> m.Done:
        """The batch of ``step`` was trained."""
        return self._ask(m.Commit(step=step), m.Done)

    def publish(self, version: m.Version, engines: Sequence[str]) -> m.Done:
        """These engines confirmed ``version``."""
        return self._ask(m.Publish(version=version, engines=list(engines)), m.Done)

    def confirm(self, engine_id: str, version: m.Version) -> m.Done | m.Refused:
        """An engine caught up; Refused if it was removed meanwhile."""
        return self._ask_either(m.Confirm(engine_id=engine_id, version=version), m.Done, m.Refused)

    def snapshot(self) -> bytes:
        """What a checkpoint must keep of the queue."""
        return self._ask(m.Snapshot(), m.SnapshotTaken).snapshot

    def resume(self, step: int, lineage: int, snapshot: bytes = b"") -> m.Resumed:
        """Go back to the checkpoint after ``step`` completed steps."""
        return self._ask(m.Resume(step=step, lineage=lineage, snapshot=snapshot), m.Resumed)

    def retire(self, step: int) -> m.Done:
        """The checkpoint after ``step`` completed steps is durable."""
        return self._ask(m.Retire(step=step), m.Done)

    def tighten(self, max_staleness: int) -> m.Done:
        """Admit only what keeps staleness within this bound, or the configured one if that is smaller."""
        return self._ask(m.Tighten(max_staleness=max_staleness), m.Done)

    def evaluate(self, eval_id: int) -> m.Done:
        """Begin an evaluation."""
        return self._ask(m.Evaluate(eval_id=eval_id), m.Done)

    def eval_result(self, eval_id: int, wait_s: float) -> m.Reserved | m.NotReady:
        """What an evaluation produced, once it is complete."""
        return self._ask_either(m.EvalResult(eval_id=eval_id, wait_s=wait_s), m.Reserved, m.NotReady)

    def engines(self, after: int = -1, wait_s: float = 0.0) -> m.EngineList:
        """The registry, at once or when its revision passes ``after``."""
        return self._ask(m.Engines(after=after, wait_s=wait_s), m.EngineList)

    def register_engine(self, engine_id: str, url: str, kind: str) -> m.Done:
        """Announce an engine that answers its health probe."""
        return self._ask(m.RegisterEngine(engine_id=engine_id, url=url, kind=kind), m.Done)

    def remove_engine(self, engine_id: str, reason: str) -> m.Done:
        """Announce that an engine is gone."""
        return self._ask(m.RemoveEngine(engine_id=engine_id, reason=reason), m.Done)

    def status(self) -> m.StatusReport:
        """Counts of everything."""
        return self._ask(m.Status(), m.StatusReport)

    def submit(self, tasks: Sequence[m.Task]) -> m.Done | m.Refused:
        """Tasks to admit before those of the queue's own; Refused (``full``) if too many wait."""
        return self._ask_either(m.Submit(tasks=list(tasks)), m.Done, m.Refused)

    def requeue(self, group_id: int) -> m.Done | m.Refused:
        """Admit the task of a dead letter once more, as a new group; Refused if it could not be trained."""
        return self._ask_either(m.Requeue(group_id=group_id), m.Done, m.Refused)

    def drain(self, on: bool = True) -> m.Done:
        """Stop admission, or go on with it."""
        return self._ask(m.Drain(on=on), m.Done)

    def inspect(self) -> m.Inspection:
        """Counts, ages, rates and dead letters."""
        return self._ask(m.Inspect(), m.Inspection)

    def group_list(self, after: int = -1, limit: int = 1000, state: str = "") -> m.GroupList:
        """Groups by id, of one state unless it is empty."""
        return self._ask(m.ListGroups(after=after, limit=limit, state=state), m.GroupList)

    def peek(self, group_id: int) -> m.Peeked | m.Refused:
        """One group with the headers of what is here of it; Refused if it is not here."""
        return self._ask_either(m.Peek(group_id=group_id), m.Peeked, m.Refused)

    def subscribe(self, consumer: str, *, oldest: bool = False) -> m.Subscription:
        """Read what is trained from now on, or from the oldest group that is here; a known consumer goes on."""
        return self._ask(m.Subscribe(consumer=consumer, oldest=oldest), m.Subscription)

    def read(self, consumer: str, wait_s: float, *, after: int = -1, max_groups: int = 16) -> m.Delivered:
        """Trained groups in order of commit, behind ``after`` or what was acknowledged; ``fetch`` has the rows."""
        request = m.Read(consumer=consumer, after=after, max_groups=max_groups, wait_s=wait_s)
        return self._ask(request, m.Delivered)

    def acknowledge(self, consumer: str, position: int) -> m.Done:
        """Everything up to ``position`` was read, and need not be kept for this consumer."""
        return self._ask(m.Acknowledge(consumer=consumer, position=position), m.Done)

    def unsubscribe(self, consumer: str) -> m.Done:
        """Forget the consumer."""
        return self._ask(m.Unsubscribe(consumer=consumer), m.Done)

    def finish(self) -> m.Done:
        """The run is over."""
        return self._ask(m.Finish(), m.Done)
