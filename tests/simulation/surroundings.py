"""Simulated connections, and a disk with the journal on it.

Messages are lost, doubled, delayed and overtake one another; connections break. The disk keeps what was flushed, and
a crash may strike at every call.
"""

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from rl_async import messages as m
from rl_async.messages import Frame, RowKey
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.client import refusal
from rl_async.transfer_queue.journal import Recovered, freed_by
from rl_async.transfer_queue.transitions import Transition, TransitionType

if TYPE_CHECKING:
    from tests.simulation.world import World

PATIENCE_S = 0.4  # without an answer for this long, beyond the wait asked for, a client reconnects; doubled each time
MOST_PATIENCE_S = 3.0
LATEST_S = 1.5  # no message travels longer


class Pending:
    """A request that is not answered yet, and who waits for it."""

    def __init__(self, request: m.Request, frames: Sequence[Any], process: Any) -> None:
        self.request, self.frames, self.process = request, frames, process
        self.patience = (request.wait_s if isinstance(request, m.LongPoll) else 0.0) + PATIENCE_S
        self.sent = 0  # times


class Client:
    """One end of a connection, as ``QueueClient`` is: hello first, and what is unanswered is sent again."""

    def __init__(self, world: "World", owner: Any, name: str) -> None:
        self._world, self._owner, self._name = world, owner, name
        self._pending: dict[bytes, Pending] = {}
        self._connections = 0
        self._hello_id, self._run_id = b"", ""
        self._welcome = False  # on this connection: nothing else overtakes it there
        self.identity = b""
        self._connect()

    def _connect(self) -> None:
        self.new_identity()
        self._welcome = False
        self._hello_id = self._world.new_id()
        hello = m.Hello(schema=m.SCHEMA, role="simulated", name=self._name)
        self._world.network.to_queue(self, wire.encode(self._hello_id, hello))

    def new_identity(self) -> None:
        """The connection broke; the client does not know, and the queue has not heard of the new one."""
        self._world.network.clients.pop(self.identity, None)
        self._connections += 1
        self.identity = f"{self._name}/{self._connections}".encode()
        self._world.network.clients[self.identity] = self

    @property
    def alive(self) -> bool:
        """Whether the process that has this end lives."""
        return not self._owner.dead

    @property
    def met(self) -> bool:
        """Whether a queue has welcomed this end."""
        return bool(self._run_id)

    def ask(self, request: m.Request, payload: Sequence[bytes], process: Any) -> None:
        """Send until it is answered; ``process`` goes on with the reply message."""
        request_id = self._world.new_id()
        self._pending[request_id] = Pending(request, wire.encode(request_id, request, payload), process)
        self._send(request_id)

    def _send(self, request_id: bytes) -> None:
        pending = self._pending[request_id]
        pending.sent += 1
        self._world.network.to_queue(self, pending.frames)
        self._world.after(pending.patience, self._impatient, request_id, pending.sent, self._connections)

    def _impatient(self, request_id: bytes, sent: int, connection: int) -> None:
        pending = self._pending.get(request_id)
        if pending is None or pending.sent != sent or not self.alive:
            return
        if self._owner.frozen_until > self._world.now:
            thaws = self._owner.frozen_until - self._world.now
            self._world.after(thaws, self._impatient, request_id, sent, connection)
            return
        pending.patience = min(2 * pending.patience, MOST_PATIENCE_S)
        if connection == self._connections:
            self._connect()
        self._send(request_id)

    def receive(self, frames: Sequence[bytes], disk: str) -> None:
        """A message of the queue."""
        message = wire.decode_reply(frames)
        if message.request_id == self._hello_id:
            if not isinstance(message.reply, m.Welcome):
                self._world.rules.broken(f"{self._name}'s hello was answered {message.reply}")
            run_id = message.reply.run_id
            if self._run_id not in ("", run_id):
                self._owner.queue_lost()
            self._run_id, self._welcome = run_id, True
            return
        if self._run_id not in ("", disk):
            self._owner.queue_lost()
            return
        pending = self._pending.get(message.request_id)
        if pending is None or not (self._welcome or refusal(message.reply) == wire.HELLO):
            return
        if refusal(message.reply) == wire.HELLO:
            self._impatient(message.request_id, pending.sent, self._connections)
            return
        if isinstance(message.reply, m.Malformed):
            self._world.rules.broken(f"{pending.request} was malformed: {message.reply.reason}")
        del self._pending[message.request_id]
        self._world.proceed(self._owner, pending.process, (message, disk))


class Network:
    """Between clients and the queue, in both directions."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.clients: dict[bytes, Client] = {}  # by the identity of the connection that is up
        rng = world.rng
        self._loss, self._twice, self._late = (rng.choice([0.0, 0.02, 0.08]) for _ in range(3))

    def _delays(self) -> list[float]:
        """After how many seconds the copies of a message arrive."""
        world = self._world
        if not world.faults:
            return [0.001]
        rng, struck = world.rng, world.struck
        if rng.random() < self._loss:
            struck["message lost"] += 1
            return []
        copies = 1
        if rng.random() < self._twice:
            struck["message doubled"] += 1
            copies = 2
        delays = []
        for _ in range(copies):
            late = rng.random() < self._late
            struck["message late"] += late
            delays.append(rng.random() * (LATEST_S if late else 0.01))
        return delays

    def to_queue(self, client: Client, frames: Sequence[Any]) -> None:
        """On the client's connection of now."""
        for delay in self._delays():
            self._world.after(delay, self._arrive, client, [client.identity, *frames], self._world.host.lives)

    def _arrive(self, client: Client, parts: list[Any], lives: int) -> None:
        world = self._world
        if world.host.up and world.host.lives == lives:
            world.host.receive(parts)
        elif client.alive and client.identity == parts[0] and world.rng.random() < 0.5:
            # What was sent to a dead process is lost; what its socket has not sent yet goes to the next one.
            world.after(0.1, self._arrive, client, parts, world.host.lives)

    def to_client(self, identity: bytes, frames: list[bytes], disk: str) -> None:
        """To the connection with this identity, if it is still up when the message comes."""
        for delay in self._delays():
            self._world.after(self._world.host.ahead + delay, self._deliver, identity, frames, disk)

    def _deliver(self, identity: bytes, frames: list[bytes], disk: str) -> None:
        client = self.clients.get(identity)
        if client is not None and client.alive:
            client.receive(frames, disk)


class RouterSocket:
    """The part of a ROUTER that ``serve_requests`` uses."""

    def __init__(self, world: "World", disk: str) -> None:
        self._world, self._disk = world, disk
        self.inbox: list[tuple[float, list[Any]]] = []
        self.came = 0.0  # when the message that is being answered came
        self._frames: list[bytes] = []

    def poll(self, _timeout_ms: int) -> int:
        """At once."""
        return len(self.inbox)

    def recv_multipart(self, _flags: int, *, copy: bool = True) -> list[Any]:
        """The next message. Raises zmq.Again without one."""
        if not self.inbox:
            raise zmq.Again
        self.came, parts = self.inbox.pop(0)
        return parts

    def send(self, frame: Any, flags: int = 0, *, copy: bool = True) -> None:
        """One frame; the identity first. Raises ZMQError if that connection is known to be gone."""
        if not self._frames:
            self._world.fuse.point("between answers")
            if self._gone(bytes(frame)):
                raise zmq.ZMQError(zmq.EHOSTUNREACH)
        self._frames.append(bytes(frame))
        if not flags & zmq.SNDMORE:
            identity, *frames = self._frames
            self._frames = []
            self._world.network.to_client(identity, frames, self._disk)

    def _gone(self, identity: bytes) -> bool:
        world = self._world
        client = world.network.clients.get(identity)
        if client is not None and client.alive:
            return False
        noticed = world.rng.random() < 0.8
        world.struck["answer to a gone client" if noticed else "answer to a gone client, unnoticed"] += 1
        return noticed


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(TransitionType).decode
Rows = dict[int, dict[int, list[bytes]]]  # by group and sample


class Crash(Exception):
    """The queue's process is dead; the argument says where it was."""


class Fuse:
    """Counts down the places where a crash may strike; burns when it was lit."""

    def __init__(self, struck: Counter[str]) -> None:
        self._left: int | None = None
        self._struck = struck

    def light(self, points: int) -> None:
        """Crash at this many places from now."""
        self._left = points

    def out(self) -> None:
        """No crash any more."""
        self._left = None

    def point(self, where: str) -> None:
        """A place where a crash may strike."""
        if self._left is None:
            return
        self._left -= 1
        if self._left < 0:
            self._left = None
            self._struck[f"queue killed: {where}"] += 1
            raise Crash(where)


class Disk:
    """What is durable."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.log: list[bytes] = []  # behind the dump
        self.dump, self.dumped = b"", 0
        self.rows: Rows = {}
        self._history: list[bytes] = []

    @property
    def history(self) -> list[Transition]:
        """All there ever were, for the rules."""
        return [_decode(transition) for transition in self._history]

    def commit(self, transitions: list[bytes], rows: Rows | None) -> None:
        """Append the transitions and store the rows, as one transaction does."""
        self.log += transitions
        self._history += transitions
        if rows is not None:
            self.rows = rows


class SimJournal:
    """See ``Journal``. A flush is one transaction, as that of SQLite is."""

    def __init__(self, disk: Disk, fuse: Fuse, rng: Random) -> None:
        self.run_id = disk.run_id
        self._disk, self._fuse = disk, fuse
        self._pending: list[bytes] = []
        self._rows: Rows = {group: dict(samples) for group, samples in disk.rows.items()}
        self._dirty = False
        self._longest = rng.choice([15, 40, 10_000])

    def recover(self) -> Recovered:
        """What was flushed."""
        return Recovered(self._disk.dump, self._disk.dumped, map(_decode, list(self._disk.log)))

    def append(self, transition: Transition) -> None:
        """Take it in, and free payloads."""
        self._fuse.point("append")
        self._pending.append(_encode(transition))
        freed = freed_by(transition)
        for group in list(self._rows) if freed is None else freed:
            self._dirty |= self._rows.pop(group, None) is not None

    def put(self, group: int, sample: int, rows: Sequence[Frame]) -> None:
        """Take the rows in, unless they are here."""
        self._fuse.point("put")
        samples = self._rows.setdefault(group, {})
        if sample not in samples:
            samples[sample] = [bytes(row) for row in rows]
            self._dirty = True

    def has(self, group: int, sample: int) -> bool:
        """Whether rows of this sample are here."""
        return sample in self._rows.get(group, {})

    def get(self, key: RowKey) -> Frame | None:
        """One row; None if it is not here."""
        group, sample, segment = key
        rows = self._rows.get(group, {}).get(sample, [])
        return rows[segment] if 0 <= segment < len(rows) else None

    def flush(self) -> None:
        """Make all pending transitions durable, or none."""
        if not self._pending and not self._dirty:
            return
        self._fuse.point("before the flush")
        rows = {group: dict(samples) for group, samples in self._rows.items()} if self._dirty else None
        self._disk.commit(self._pending, rows)
        self._pending, self._dirty = [], False
        self._fuse.point("after the flush")

    @property
    def outgrown(self) -> bool:
        """Whether the log is long."""
        return len(self._disk.log) > self._longest

    def compact(self, dump: bytes) -> None:
        """The dump in place of the log, in one transaction."""
        self._fuse.point("before compacting")
        disk = self._disk
        disk.dump, disk.dumped, disk.log = dump, disk.dumped + len(disk.log), []
        self._fuse.point("after compacting")

    def close(self) -> None:
        """Nothing is open."""
