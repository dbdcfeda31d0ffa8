"""Mutated messages for the queue's decoders, for queue and shard in process and for a live queue over TCP.

No exception but ProtocolError, no hang, no growth of memory; nobody changes what his key's role or a trainer's lineage
does not allow, the journal leads to the state, and a healthy client beside it is never harmed.
    python -m tests.fuzz.queue [--frames N | --minutes M] [--seed N]
"""

import argparse
import logging
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import psutil
import zmq

from rl_async import messages as m
from rl_async.errors import ProtocolError
from rl_async.process.http_auth import ROLES, Role
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.admission import QueueSettings
from rl_async.transfer_queue.auth import AllowList, Authenticator, ClientKeys, ServerKeys
from rl_async.transfer_queue.client import SyncQueueClient
from rl_async.transfer_queue.delivery import Counted, numbered
from rl_async.transfer_queue.journal import MemoryJournal
from rl_async.transfer_queue.server import Outgoing, QueueServer, bind, serve_requests
from rl_async.transfer_queue.shard import ShardServer
from rl_async.transfer_queue.store import Feed, Store
from rl_async.transfer_queue.transitions import TransitionType
from rl_async.transfer_queue.verbs import SHARD_VERBS, VERBS

# Messages for the queue and its payload shards, one of every kind, and ways to damage bytes.
#
# The fields that matter are drawn at random. The fuzzer of the HTTP servers damages bytes in the same ways.


def flip(rng: random.Random, frame: bytes, _other: bytes) -> bytes:
    """Some bits."""
    changed = bytearray(frame)
    for _ in range(rng.randint(1, 4)):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(rng: random.Random, frame: bytes, _other: bytes) -> bytes:
    """The end, or the beginning."""
    at = rng.randint(0, len(frame))
    return rng.choice([frame[:at], frame[at:]])


def insert(rng: random.Random, frame: bytes, _other: bytes) -> bytes:
    """Random bytes, or a MessagePack head that promises much."""
    heads = [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\x91" * 2000]
    at = rng.randint(0, len(frame))
    return frame[:at] + rng.choice([rng.randbytes(rng.randint(1, 9)), *heads]) + frame[at:]


def splice(rng: random.Random, frame: bytes, other: bytes) -> bytes:
    """The beginning of one message and the end of another."""
    return frame[: rng.randint(0, len(frame))] + other[rng.randint(0, len(other)) :]


MUTATIONS: tuple[Callable[[random.Random, bytes, bytes], bytes], ...] = (flip, cut, insert, splice)


Frames = list[bytes]


def trajectory(group: int, sample: int, attempt: int) -> m.Trajectory:
    """A small row."""
    return m.Trajectory(
        task_id="t",
        group_id=group,
        sample=sample,
        attempt=attempt,
        episode_id="e",
        token_ids=np.arange(9, dtype=np.int32),
        loss_mask=np.ones(9, dtype=bool),
        logprobs=np.zeros(9, dtype=np.float32),
        versions=[m.VersionRun(m.Version(), 0, 9)],
        sampling=m.Sampling(),
        reward=0.5,
    )


def requests(rng: random.Random, row: m.Trajectory, key: str) -> list[m.Request]:
    """One of every kind that may apply; ``row`` is what a Put hands over, ``key`` what a Hello may show."""
    group, sample, step = row.group_id, row.sample, rng.randrange(3)
    lineage, optional = rng.choice([0, 0, 1, 2]), rng.choice([None, 0, 1])
    header = row.header()
    header.shards = rng.choice([[], ["s"], ["s", "s"], ["unknown"]])
    header.reward = rng.choice([0.5, 1.0, 1e39, float("nan")])
    media = [(group, medium.sha256) for medium in row.media]
    length = rng.choice([len(m.encode(row))] * 4 + [5, 0, -1, 1 << 62])
    wait_s = rng.choice([0.0, 0.01, -1.0, float("nan"), float("inf")])
    task = m.Task(task_id="own", data_source="", prompt=[], ground_truth="", agent=rng.choice(["", "evil.py:run"]))
    return [
        m.Hello(
            schema=rng.choice([m.SCHEMA, m.SCHEMA, 0]), role="fuzzer", name="f", key=rng.choice([key, "", "no key"])
        ),
        m.Lease(worker="f", max_groups=rng.choice([2, 0, -1, 1 << 62]), wait_s=wait_s, task=rng.choice([None, task])),
        m.Renew(worker="f", held=rng.choice([None, [], [(group, sample, row.attempt)]])),
        m.Put(worker=rng.choice(["f", "other"]), samples=[[header]], lengths=[length], media=media),
        m.Fail(worker="f", group_id=group, sample=sample, attempt=row.attempt, error="e"),
        m.Reserve(step=step, wait_s=0.0, lineage=lineage),
        m.Fetch(rows=[row.key], lineage=optional),
        m.StoreRows(samples=[(group, sample, 0)], lengths=[[rng.choice([5, 0, -1])]]),
        m.LoadRows(rows=[(group, sample, 0, 0)]),
        m.RegisterShard(shard_id="s", name="s", url="tcp://127.0.0.1:1"),
        m.Sweep(shard_id="s", groups=[group], wait_s=0.0),
        m.ListShards(after=rng.choice([-1, 0]), wait_s=0.0),
        m.Commit(step=step, lineage=lineage),
        m.Publish(version=m.Version(lineage, step), engines=["e"]),
        m.Confirm(engine_id="e", version=m.Version(lineage, step)),
        m.Withdraw(engine_ids=["e"], lineage=lineage),
        m.Snapshot(lineage=optional),
        m.Resume(step=step, lineage=rng.randrange(2), snapshot=b""),
        m.Retire(step=step, lineage=lineage),
        m.Tighten(max_staleness=rng.choice([0, 1, -1]), lineage=lineage),
        m.Evaluate(eval_id=step, lineage=optional),
        m.AwaitEvaluation(eval_id=step, wait_s=0.0, lineage=optional, so_far=rng.random() < 0.5),
        m.RegisterEngine(engine_id="e", url="http://x", kind="vllm"),
        m.RemoveEngine(engine_id="e", reason="r", lineage=optional),
        m.ListEngines(lineage=optional),
        m.Status(),
        m.Submit(tasks=[task, numbered(7)]),
        m.Requeue(group_id=group),
        m.Drain(on=rng.random() < 0.2),
        m.Inspect(),
        m.ListGroups(after=-1, limit=rng.choice([10, 0, -1]), state=rng.choice(["", "ready", "junk"])),
        m.Peek(group_id=group),
        m.Subscribe(consumer="logger", oldest=True),
        m.Read(consumer="logger", after=step),
        m.Acknowledge(consumer="logger", position=step),
        m.Unsubscribe(consumer="logger"),
        m.Finish(lineage=lineage),
    ]


def valid(rng: random.Random, key: str = "") -> Frames:
    """The frames of a message that may apply, of any kind."""
    row = trajectory(rng.randrange(6), rng.randrange(2), rng.randrange(3))
    if rng.random() < 0.3:
        row.media = [m.Media.of(b"image", "image/png", 0)]
    request = rng.choice(requests(rng, row, key))
    payload: list[bytes] = []
    if isinstance(request, m.Put):
        payload = [_bytes(m.encode(row)), *[b"image"] * len(row.media)]
    elif isinstance(request, m.StoreRows):
        payload = [b"bytes"]
    return [_bytes(frame) for frame in wire.encode(rng.randbytes(wire.ID_BYTES), request, payload)]


def _bytes(frame: m.Frame) -> bytes:
    return frame if isinstance(frame, bytes) else bytes(frame)


# Servers for the fuzzer: a queue and a payload shard in process, whose rules are checked at every message, and a queue
# on a thread behind a real socket.


SETTINGS = QueueSettings(steps=1000, batch_groups=2, group_size=2, lease_s=0.2, max_attempts=1000, reward_limit=1e6)
ANSWER_S = 60.0
REFUSING = {wire.DENIED, wire.FORBIDDEN, wire.HELLO, wire.REPLACED, wire.BUSY, "wrong_lineage", "not_here", "schema"}

_ROLES_OF = {verb.request: verb.roles for verb in VERBS}
_encode = msgspec.msgpack.Encoder().encode
_transition = msgspec.msgpack.Decoder(TransitionType)


class Keys:
    """A pair of keys for each role."""

    def __init__(self) -> None:
        self.public: dict[Role, bytes] = {}
        self.secret: dict[Role, bytes] = {}
        for role in ROLES:
            self.public[role], self.secret[role] = zmq.curve_keypair()
        self.role_of = {secret.decode(): role for role, secret in self.secret.items()}

    def allowed(self) -> AllowList:
        """The list of them, without a folder."""
        lines = [f"{key.decode()} {role}" for role, key in self.public.items()]
        return AllowList(Path(tempfile.gettempdir(), "no", "such", "folder"), lines)


def new_store(settings: QueueSettings, feed: Feed) -> Store:
    """A store with tasks without end and one held-out task."""
    return Store(settings, Counted(), [numbered(0)], feed)


def new_server(settings: QueueSettings = SETTINGS, allowed: AllowList | None = None) -> tuple[QueueServer, Store, Feed]:
    """A queue with an empty store."""
    journal = MemoryJournal()
    feed = Feed(journal.append)
    store = new_store(settings, feed)
    return QueueServer(store, journal, feed, allowed=allowed), store, feed


class CheckedQueue:
    """A queue that is asked by a connection of each role and by a stranger; ``handle`` raises AssertionError where a
    message changed what its sender, or a trainer that was replaced, may not change."""

    def __init__(self, keys: Keys | None = None, replicas: int = 0) -> None:
        self.settings = msgspec.structs.replace(SETTINGS, replicas=replicas)
        self.server, self.store, feed = new_server(self.settings, keys.allowed() if keys else None)
        self.seen: list[bytes] = []
        feed.subscribe(lambda transition: self.seen.append(_encode(transition)))
        self._keys = keys
        self._roles: dict[bytes, Role | None] = {}
        for role in ROLES:
            self.handle([role.encode(), *wire.encode(bytes(8), hello(keys, role))])
        publish = m.Publish(version=m.Version(), engines=[])
        self.handle([b"trainer", *wire.encode(bytes(8), publish)])

    def handle(self, parts: Sequence[Any]) -> list[Outgoing]:
        """Pass a message on, and check what it changed."""
        before, lineage = len(self.seen), self.store.book.lineage
        outgoing = self.server.handle(parts)
        try:
            request = wire.decode_request(parts[1:]).request
        except ProtocolError:
            request = None
        if len(self.seen) > before:
            self._may_change(parts[0], request, lineage)
            replies = [out.response.reply for out in outgoing[:1]]
            for reply in replies:
                refused = isinstance(reply, m.Malformed) or (isinstance(reply, m.Refused) and reply.code in REFUSING)
                assert not refused, f"{reply} after {self.seen[before:]}"
        if isinstance(request, m.Hello) and outgoing and isinstance(outgoing[0].response.reply, m.Welcome):
            self._roles[parts[0]] = self._keys.role_of.get(request.key) if self._keys else None
        return outgoing

    def _may_change(self, identity: bytes, request: m.Request[Any] | None, lineage: int) -> None:
        assert request is not None, "bytes that are no message changed the state"
        assert identity in self._roles, "a connection without a hello changed the state"
        kind = type(request)
        if self._keys is not None:
            assert self._roles[identity] in _ROLES_OF[kind], f"{self._roles[identity]} made a {kind.__name__}"
        if isinstance(request, m.Resume):
            assert request.lineage >= lineage, "an older trainer resumed"
        elif (asked := getattr(request, "lineage", None)) is not None:
            assert asked == lineage, f"the trainer of lineage {asked} changed the state of lineage {lineage}"

    def tick(self) -> list[Outgoing]:
        """Let time pass."""
        return self.server.tick()

    def check_replay(self) -> None:
        """A store that applies the journal's transitions is the same store."""
        again = new_store(self.settings, Feed())
        again.recover(b"", map(_transition.decode, self.seen), 0.0)
        assert again.dump() == self.store.dump(), "the journal does not lead to the state"


class CheckedShard:
    """A payload shard; only who may keep rows can make it keep any."""

    def __init__(self, keys: Keys) -> None:
        self.server, self._keys = ShardServer("s", allowed=keys.allowed()), keys
        self._roles: dict[bytes, Role | None] = {}
        for role in ROLES:
            self.handle([role.encode(), *wire.encode(bytes(8), hello(keys, role))])

    def handle(self, parts: Sequence[Any]) -> list[Outgoing]:
        """Pass a message on, and check whether it may have changed the rows."""
        before = set(self.server.groups())
        outgoing = self.server.handle(parts)
        try:
            request = wire.decode_request(parts[1:]).request
        except ProtocolError:
            request = None
        if set(self.server.groups()) != before:
            assert isinstance(request, m.StoreRows) and self._roles[parts[0]] in SHARD_VERBS[m.StoreRows]
        if isinstance(request, m.Hello) and isinstance(outgoing[0].response.reply, m.Welcome):
            self._roles[parts[0]] = self._keys.role_of.get(request.key)
        return outgoing

    def tick(self) -> list[Outgoing]:
        """Let the queue forget some groups, so that rows do not pile up."""
        if len(self.server.groups()) > 100:
            self.server.orders.put(None)
        return self.server.tick()

    def check_replay(self) -> None:
        """Nothing: a shard keeps no journal."""


def hello(keys: Keys | None, role: Role) -> m.Hello:
    """The hello of a connection with the key of this role."""
    return m.Hello(schema=m.SCHEMA, role=role, name=role, key=keys.secret[role].decode() if keys else "")


class LiveQueue:
    """A server on a thread of its own, as ``serve_requests`` runs it; the error that ended it is raised at the end.

    With ``keys`` it is encrypted, and takes those clients.
    """

    def __init__(self, keys: Keys | None = None) -> None:
        self._ready, self._stop = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._keys = keys
        self.public, self._secret = zmq.curve_keypair()
        self.address = ""
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        if not self._ready.wait(ANSWER_S):
            raise RuntimeError("the queue did not start")

    def _serve(self) -> None:
        allowed = self._keys.allowed() if self._keys else None
        server, _, _ = new_server(allowed=allowed)
        keys = ServerKeys(self._secret, allowed) if allowed else None
        with ExitStack() as stack:
            context = stack.enter_context(zmq.Context())
            auth = stack.enter_context(Authenticator(context, allowed, lambda: None)) if allowed else None
            socket = stack.enter_context(bind(context, "tcp://127.0.0.1:*", keys=keys))
            self.address = socket.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
            self._ready.set()
            try:
                serve_requests(socket, server, lambda: None, self._stop.is_set, auth=auth)
            except BaseException as error:
                self._error = error
                raise

    def stop(self) -> None:
        """End it. Raises what it died of."""
        self._stop.set()
        self._thread.join(ANSWER_S)
        if self._thread.is_alive():
            raise RuntimeError("the queue hangs")
        if self._error is not None:
            raise self._error


GROWTH_BYTES = 64 << 20  # more than the tables of remembered peers and requests take
IDENTITIES = (*(role.encode() for role in ROLES), b"stranger")
_row = m.decoder(m.Trajectory)


def mutated(rng: random.Random, key: str = "") -> Frames:
    """A message with some frames changed, left out or doubled."""
    frames = valid(rng, key)
    for _ in range(rng.randint(0, 2)):
        at = rng.randrange(len(frames))
        frames[at] = rng.choice(MUTATIONS)(rng, frames[at], rng.choice(valid(rng)))
    if rng.random() < 0.1:
        frames = [frame for frame in frames for _ in range(rng.choice([0, 1, 1, 2]))]
    return frames or [b""]


class Found(NamedTuple):
    """Of one part: messages sent and what they were answered with."""

    frames: int
    answers: Counter[str]
    seconds: float


def decode(frames: Frames) -> None:
    """What reads the bytes of others: each must take them or raise ProtocolError."""
    for read in (wire.decode_request, wire.decode_reply):
        try:
            read(frames)
        except ProtocolError:
            continue
    for frame in frames[1:]:
        try:
            _row(frame)
        except ProtocolError:
            continue


def in_process(rng: random.Random, messages: int, until: float) -> Found:
    """Decoders and servers. A new one now and then, lest a Finish or a Resume ends all variety."""
    answers: Counter[str] = Counter()
    began, sent = time.monotonic(), 0
    keys = Keys()
    make: list[Callable[[], CheckedQueue | CheckedShard]] = [
        CheckedQueue,
        lambda: CheckedQueue(keys),
        lambda: CheckedQueue(keys, replicas=2),
        lambda: CheckedShard(keys),
    ]
    while sent < messages and time.monotonic() < until:
        server = rng.choice(make)()
        for _ in range(500):
            frames = mutated(rng, rng.choice(list(keys.role_of)))
            decode(frames)
            for outgoing in [*server.handle([rng.choice(IDENTITIES), *frames]), *server.tick()]:
                answers[type(outgoing.response.reply).__name__] += 1
            sent += 1
        server.check_replay()
    return Found(sent, answers, time.monotonic() - began)


def over_tcp(rng: random.Random, messages: int, until: float) -> Found:
    """Mutated messages on a connection of their own, encrypted or not; every so often the healthy client must be
    answered."""
    answers: Counter[str] = Counter()
    keys = rng.choice([None, Keys()])
    queue = LiveQueue(keys)
    began, sent = time.monotonic(), 0

    def own(role: Role) -> ClientKeys | None:
        return ClientKeys(queue.public, keys.public[role], keys.secret[role]) if keys else None

    try:
        with (
            zmq.Context() as context,
            context.socket(zmq.DEALER) as fuzzer,
            SyncQueueClient(
                queue.address, role="test", name="healthy", timeout_s=ANSWER_S, keys=own("operator")
            ) as healthy,
        ):
            role = rng.choice(ROLES)
            connect(fuzzer, queue.address, own(role))
            fuzzer.send_multipart(wire.encode(bytes(8), hello(None, role)))
            while sent < messages and time.monotonic() < until:
                for _ in range(100):
                    fuzzer.send_multipart(mutated(rng))
                    sent += 1
                healthy.register_engine("healthy", "http://healthy", "embedded")
                if "healthy" not in {engine.engine_id for engine in healthy.engines().engines}:
                    raise RuntimeError("the healthy client's engine is gone")
                answers += Counter(_received(fuzzer))
    finally:
        queue.stop()
    return Found(sent, answers, time.monotonic() - began)


def connect(socket: Any, address: str, keys: ClientKeys | None) -> None:
    """Connect a DEALER, which must not keep this process when the queue is gone."""
    socket.set(zmq.LINGER, 0)
    if keys is not None:
        socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = keys.server, keys.public, keys.secret
    socket.connect(address)


def _received(socket: Any) -> Iterator[str]:
    """The kinds of what came."""
    while socket.poll(0):
        yield type(wire.decode_reply(socket.recv_multipart()).reply).__name__


def main() -> int:
    """Both parts in turn until there were enough messages, or the time is over; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.queue", description=__doc__)
    parser.add_argument("--frames", type=int, default=0, metavar="N", help="messages in all")
    parser.add_argument("--minutes", type=float, default=1.0, metavar="M", help="unless --frames is given (default: 1)")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # each malformed message is one
    rng = random.Random(arguments.seed)
    process = psutil.Process()
    wanted = arguments.frames or 1 << 62
    until = time.monotonic() + (1e9 if arguments.frames else arguments.minutes * 60)
    parts: dict[str, Callable[[random.Random, int, float], Found]] = {"in process": in_process, "over TCP": over_tcp}
    total: dict[str, Found] = {}
    resident: list[int] = []
    while (sent := sum(found.frames for found in total.values())) < wanted and time.monotonic() < until:
        for name, part in parts.items():
            share = min(20_000 if part is in_process else 10_000, wanted - sent)
            found, before = part(rng, share, until), total.get(name, Found(0, Counter(), 0.0))
            total[name] = Found(
                before.frames + found.frames, before.answers + found.answers, before.seconds + found.seconds
            )
        resident.append(process.memory_info().rss)
    for name, found in total.items():
        rate = found.frames / found.seconds if found.seconds else 0.0
        print(f"{name}: {found.frames} messages, {rate:.0f}/s, answers {dict(sorted(found.answers.items()))}")
    warm = resident[min(1, len(resident) - 1)]
    grown = max(resident) - warm
    print(
        f"{sum(found.frames for found in total.values())} messages, no crash, no hang, the healthy client was served; "
        f"memory grew by {grown / 1e6:.1f} MB from {warm / 1e6:.0f} MB after the first rounds"
    )
    if grown > GROWTH_BYTES:
        print(f"that is more than {GROWTH_BYTES / 1e6:.0f} MB", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
