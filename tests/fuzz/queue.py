"""Mutated messages for the queue's decoders, for queue and shard in process and for a live queue over TCP.

No exception but ProtocolError, no hang, no growth of memory; nobody changes what his key's role or a trainer's lineage
does not allow, the journal leads to the state, and a healthy client beside it is never harmed.
    python -m tests.fuzz.queue [--frames N | --minutes M] [--seed N]
"""

import argparse
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import psutil
import zmq

from rl_async import codec
from rl_async import messages as m
from rl_async.errors import ProtocolError
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.auth.keys import ClientKeys
from rl_async.transfer_queue.auth.roles import ROLES, Role
from rl_async.transfer_queue.client import SyncQueueClient
from tests.fuzz.queue_messages import MUTATIONS, Frames, valid
from tests.fuzz.queue_servers import ANSWER_S, CheckedQueue, CheckedShard, Keys, LiveQueue, hello

GROWTH_BYTES = 64 << 20  # more than the tables of remembered peers and requests take
IDENTITIES = (*(role.encode() for role in ROLES), b"stranger")
_row = codec.decoder(m.Trajectory)


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
