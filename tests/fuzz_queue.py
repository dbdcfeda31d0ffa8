"""Mutated messages for the queue's decoders, for the server in process and for a live one over TCP.

No exception but ProtocolError, no hang, no growth of memory, and a healthy client beside it is never harmed.
    scripts/fuzz_queue [--frames N | --minutes M] [--seed N]
"""

import argparse
import logging
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import psutil
import zmq

from rl_async import messages as m
from rl_async.errors import ProtocolError
from rl_async.messages import codec
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.client.sync_client import SyncQueueClient
from rl_async.transfer_queue.journal.memory import MemoryJournal
from rl_async.transfer_queue.policy.admission import QueueSettings
from rl_async.transfer_queue.server.loop import bind, serve
from rl_async.transfer_queue.server.queue_server import QueueServer
from rl_async.transfer_queue.state.store import Store
from rl_async.transfer_queue.state.tasks import Counted, numbered
from rl_async.transfer_queue.state.transitions import Feed

SETTINGS = QueueSettings(steps=1000, batch_groups=2, group_size=2, lease_s=0.2, max_attempts=1000)
GROWTH_BYTES = 64 << 20  # more than the tables of remembered peers and requests take
ANSWER_S = 10.0
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


def valid(rng: random.Random) -> Frames:
    """The frames of a message that may apply, of every kind of request."""
    group, sample, step = rng.randrange(6), rng.randrange(2), rng.randrange(3)
    row = trajectory(group, sample, rng.randrange(3))
    if rng.random() < 0.3:
        row.media = [m.Media.of(b"image", "image/png", 0)]
    media = [(group, medium.sha256) for medium in row.media]
    requests: list[m.Request] = [
        m.Hello(schema=m.SCHEMA, role="fuzzer", name="f"),
        m.Lease(worker="f", max_groups=2, wait_s=rng.choice([0.0, 0.01])),
        m.Renew(worker="f"),
        m.Put(worker="f", samples=[[row.header()]], media=media),
        m.StoreRows(samples=[(group, sample, 0)], lengths=[[5]]),
        m.LoadRows(rows=[(group, sample, 0, 0)]),
        m.RegisterShard(shard_id="s", name="s", url="tcp://127.0.0.1:1"),
        m.Sweep(shard_id="s", groups=[group], wait_s=0.0),
        m.ListShards(after=-1, wait_s=0.0),
        m.Fail(worker="f", group_id=group, sample=sample, attempt=row.attempt, error="e"),
        m.Reserve(step=step, wait_s=0.0),
        m.Fetch(rows=[row.key]),
        m.Commit(step=step),
        m.Publish(version=m.Version(0, step), engines=["e"]),
        m.Confirm(engine_id="e", version=m.Version(0, step)),
        m.Snapshot(),
        m.Resume(step=step, lineage=rng.randrange(2), snapshot=b""),
        m.Retire(step=step),
        m.Tighten(max_staleness=1),
        m.Evaluate(eval_id=step),
        m.AwaitEvaluation(eval_id=step, wait_s=0.0),
        m.RegisterEngine(engine_id="e", url="http://x", kind="vllm"),
        m.RemoveEngine(engine_id="e", reason="r"),
        m.ListEngines(),
        m.Status(),
        m.Subscribe(consumer="logger", oldest=True),
        m.Read(consumer="logger", after=step),
        m.Acknowledge(consumer="logger", position=step),
        m.Unsubscribe(consumer="logger"),
        m.Finish(),
    ]
    request = rng.choice(requests)
    payload = [_bytes(codec.encode(row)), *[b"image"] * len(media)] if isinstance(request, m.Put) else []
    payload += [b"bytes"] if isinstance(request, m.StoreRows) else []
    return [_bytes(frame) for frame in wire.encode(rng.randbytes(wire.ID_BYTES), request, payload)]


def _bytes(frame: codec.Frame) -> bytes:
    return frame if isinstance(frame, bytes) else bytes(frame)


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


def mutated(rng: random.Random) -> Frames:
    """A message with some frames changed, left out or doubled."""
    frames, others = valid(rng), valid(rng)
    for _ in range(rng.randint(0, 2)):
        at = rng.randrange(len(frames))
        frames[at] = rng.choice(MUTATIONS)(rng, frames[at], rng.choice(others))
    if rng.random() < 0.1:
        frames = [frame for frame in frames for _ in range(rng.choice([0, 1, 1, 2]))]
    return frames or [b""]


class Found(NamedTuple):
    """Of one part: messages sent and what they were answered with."""

    frames: int
    answers: Counter[str]
    seconds: float


def new_server() -> tuple[QueueServer, MemoryJournal]:
    """With an empty store."""
    journal = MemoryJournal()
    feed = Feed(journal.append)
    return QueueServer(Store(SETTINGS, Counted(), [numbered(0)], feed), journal, feed), journal


_row = codec.decoder(m.Trajectory)


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
    """Decoders and a server. A new one now and then, lest a Finish or a Resume ends all variety."""
    answers: Counter[str] = Counter()
    began, sent = time.monotonic(), 0
    while sent < messages and time.monotonic() < until:
        server, _ = new_server()
        for request in (m.Hello(schema=m.SCHEMA, role="f", name="f"), m.Publish(version=m.Version(), engines=[])):
            server.handle([b"f", *wire.encode(bytes(8), request)])
        for _ in range(500):
            frames = mutated(rng)
            decode(frames)
            for outgoing in [*server.handle([b"f", *frames]), *server.tick()]:
                answers[type(outgoing.response.reply).__name__] += 1
            sent += 1
    return Found(sent, answers, time.monotonic() - began)


class LiveQueue:
    """A server on a thread of its own, as ``loop.serve`` runs it; what ended it is raised at the end."""

    def __init__(self) -> None:
        self._ready, self._stop = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self.address = ""
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        if not self._ready.wait(ANSWER_S):
            raise RuntimeError("the queue did not start")

    def _serve(self) -> None:
        server, journal = new_server()
        with zmq.Context() as context, bind(context, "tcp://127.0.0.1:*") as socket:
            self.address = socket.get_string(zmq.LAST_ENDPOINT)
            self._ready.set()
            try:
                serve(socket, server, journal.flush, self._stop.is_set)
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


def over_tcp(rng: random.Random, messages: int, until: float) -> Found:
    """Mutated messages on a connection of their own; every so often the healthy client must be answered."""
    answers: Counter[str] = Counter()
    queue = LiveQueue()
    began, sent = time.monotonic(), 0
    try:
        with (
            zmq.Context() as context,
            context.socket(zmq.DEALER) as fuzzer,
            SyncQueueClient(queue.address, role="test", name="healthy", timeout_s=ANSWER_S) as healthy,
        ):
            fuzzer.set(zmq.LINGER, 0)
            fuzzer.connect(queue.address)
            fuzzer.send_multipart(wire.encode(bytes(8), m.Hello(schema=m.SCHEMA, role="fuzzer", name="f")))
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


def _received(socket: Any) -> Iterator[str]:
    """The kinds of what came."""
    while socket.poll(0):
        yield type(wire.decode_reply(socket.recv_multipart()).reply).__name__


def main() -> int:
    """Both parts in turn until there were enough messages, or the time is over; the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz_queue", description=__doc__)
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
