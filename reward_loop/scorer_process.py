"""A process of the pool: reads conversations from stdin and writes scores to stdout, until stdin closes.

Frames are msgpack, preceded by a four-byte length.
"""

import asyncio
import inspect
import math
import os
import resource
import signal
import struct
import sys
from collections.abc import Awaitable
from typing import BinaryIO

import msgspec

from rl_async.reward_loop.api import Conversation, to_score
from rl_async.reward_loop.scorers.registry import describe, get_scorer

LENGTH = struct.Struct(">I")
GRACE_S = 5.0  # past the deadline, in which the pool should have killed this process


class ScoreRequest(msgspec.Struct):
    """A conversation to score, from the pool."""

    scorer: str
    conversation: Conversation
    timeout_s: float


class ScoreReply(msgspec.Struct):
    """The score, or in ``error`` why there is none. An empty one is sent first, when the process is ready."""

    value: float = 0.0
    extra: dict[str, float] = {}
    reason: str = ""
    error: str = ""


def serve(requests: BinaryIO, replies: BinaryIO, names: list[str]) -> None:
    """Load the scorers, report that they are ready, then score until ``requests`` ends.

    Consumes ScoreRequests; produces a ScoreReply for each; waits for the next one, unblocked by the end of the stream.
    """
    functions = {name: get_scorer(name).function for name in names}
    process = os.getpid()
    decoder = msgspec.msgpack.Decoder(ScoreRequest)
    _write(replies, ScoreReply())
    while head := requests.read(LENGTH.size):
        request = decoder.decode(requests.read(*LENGTH.unpack(head)))
        # The pool kills a process that misses its deadline; if the pool itself is dead, the kernel does.
        signal.alarm(math.ceil(request.timeout_s + GRACE_S))
        try:
            answer = functions[request.scorer](request.conversation)
            if inspect.isawaitable(answer):  # of a decorator that hides a coroutine function
                answer = asyncio.run(_awaited(answer))
            score = to_score(answer)
            reply = ScoreReply(score.value, score.extra, score.reason)
        except MemoryError:
            reply = ScoreReply(error="needs more memory than reward.process_bytes")
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            # The user's code may raise anything; only this conversation fails.
            reply = ScoreReply(error=describe(error))
        if os.getpid() != process:
            # A child that a scorer forked came back from it: its reply would be taken for another conversation's.
            os._exit(1)
        signal.alarm(0)
        _write(replies, reply)


async def _awaited(answer: Awaitable[object]) -> object:
    return await answer


def _write(stream: BinaryIO, reply: ScoreReply) -> None:
    body = msgspec.msgpack.encode(reply)
    stream.write(LENGTH.pack(len(body)) + body)
    stream.flush()


def main() -> None:
    """Serve the scorers whose names are the arguments, after the most bytes of memory; 0: no limit."""
    if most := int(sys.argv[1]):
        # Private memory, not addresses: libraries reserve far more of those than they use.
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes stdin
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a scorer prints goes to the log
    serve(sys.stdin.buffer, replies, sys.argv[2:])


if __name__ == "__main__":
    main()
