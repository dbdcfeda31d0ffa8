"""A process of the pool: gets conversations over a socket and answers with scores, until the socket closes.

Frames are msgpack, preceded by a four-byte length. The socket is not one of the standard streams, which belong to the
users' functions: their output goes to the log, and their input is empty.
"""

import asyncio
import ctypes
import inspect
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from typing import Any, BinaryIO, Literal

import msgspec

from rl_async.concurrency import Overdue, within
from rl_async.reward_loop.api import Conversation, Score, ScorerFailed, to_score
from rl_async.reward_loop.scorers.scorer_registry import describe, get_scorer

# A process that needs more memory fails what it scores.
MOST_BYTES = 8 << 30
LENGTH = struct.Struct(">I")
# The option of prctl(2) that asks for a signal when the parent dies.
PR_SET_PDEATHSIG = 1

# Score one conversation at a time, or run coroutines concurrently.
Mode = Literal["process", "awaited"]
Function = Callable[[Any], Any]


class ScoreRequest(msgspec.Struct):
    """A conversation to score, from the pool. Without one, the coroutine of the request ``number`` is cancelled."""

    number: int
    scorer: str
    conversation: Conversation | None
    timeout_s: float


class ScoreReply(msgspec.Struct):
    """The score, or in ``error`` why there is none. An empty one is sent first, when the process is ready."""

    number: int = 0
    value: float = 0.0
    extra: dict[str, float] = {}
    reason: str = ""
    error: str = ""

    def score(self) -> Score:
        """Return the score. Raises ScorerFailed with the ``error``."""
        if self.error:
            raise ScorerFailed(self.error)
        return Score(self.value, self.extra, self.reason)


def missed(timeout_s: float) -> str:
    """Say that a deadline was missed."""
    return f"did not answer within {timeout_s:g} s (reward.timeout_s)"


def converted(number: int, answer: object) -> ScoreReply:
    """Convert a function's result to a reply. Errors that the user's objects raise meanwhile pass through."""
    score = to_score(answer)
    return ScoreReply(number, score.value, score.extra, score.reason)


def failed(number: int, error: BaseException) -> ScoreReply:
    """Convert an error of a function to a reply. Any error, even SystemExit, fails only this conversation."""
    if isinstance(error, MemoryError):
        return ScoreReply(number, error=f"needs more than {MOST_BYTES >> 30} GiB of memory")
    return ScoreReply(number, error=describe(error))


def serve(channel: socket.socket, functions: dict[str, Function]) -> None:
    """Report that the scorers are ready, then score until the socket closes.

    Consumes ScoreRequests; produces a ScoreReply for each; waits for the next one, unblocked by the end of the stream.
    """
    process, decoder = os.getpid(), msgspec.msgpack.Decoder(ScoreRequest)
    with channel.makefile("rb") as requests, channel.makefile("wb") as replies:
        _write(replies, ScoreReply())
        while head := requests.read(LENGTH.size):
            request = decoder.decode(requests.read(*LENGTH.unpack(head)))
            reply = _called(functions[request.scorer], request)
            if os.getpid() != process:
                # A child that a scorer forked came back from it: its reply would be taken for another conversation's.
                os._exit(1)
            _write(replies, reply)


def _called(function: Function, request: ScoreRequest) -> ScoreReply:
    try:
        answer = function(request.conversation)
        # A decorator can hide a coroutine function.
        if inspect.isawaitable(answer):
            answer = asyncio.run(_awaited(answer))
        return converted(request.number, answer)
    except BaseException as error:
        return failed(request.number, error)


async def _awaited(answer: Awaitable[object]) -> object:
    return await answer


def _write(stream: BinaryIO, reply: ScoreReply) -> None:
    stream.write(_framed(reply))
    stream.flush()


def _framed(reply: ScoreReply) -> bytes:
    body = msgspec.msgpack.encode(reply)
    return LENGTH.pack(len(body)) + body


async def serve_concurrently(channel: socket.socket, functions: dict[str, Function]) -> None:
    """Report that the functions are ready, score by coroutines until the socket closes, then end the process.

    Consumes ScoreRequests; produces a ScoreReply for each, at its deadline at the latest; waits for the next one,
    unblocked by the end of the stream.
    """
    process, decoder = os.getpid(), msgspec.msgpack.Decoder(ScoreRequest)
    reader, writer = await asyncio.open_connection(sock=channel)
    running = dict[int, asyncio.Task[None]]()

    async def answer(function: Function, request: ScoreRequest) -> None:
        called = asyncio.create_task(_awaited_reply(function, request))
        try:
            # Not cancelled at the deadline, since a coroutine that swallows that would hold up the reply.
            reply = await within(request.timeout_s, asyncio.shield(called))
        except Overdue:
            reply = ScoreReply(request.number, error=missed(request.timeout_s))
        finally:
            running.pop(request.number)
            called.cancel()
        if os.getpid() != process:
            os._exit(1)
        writer.write(_framed(reply))

    writer.write(_framed(ScoreReply()))
    while True:
        try:
            body = await reader.readexactly(*LENGTH.unpack(await reader.readexactly(LENGTH.size)))
        except asyncio.IncompleteReadError:
            # A coroutine that swallows its cancellation would keep the event loop from ending.
            os._exit(0)
        request = decoder.decode(body)
        if request.conversation is not None:
            running[request.number] = asyncio.create_task(answer(functions[request.scorer], request))
        elif (given_up := running.get(request.number)) is not None:
            given_up.cancel()


async def _awaited_reply(function: Function, request: ScoreRequest) -> ScoreReply:
    try:
        return converted(request.number, await function(request.conversation))
    except BaseException as error:
        return failed(request.number, error)


def main() -> None:
    """Serve scorers over an inherited socket.

    The arguments are the socket's number, the mode and the scorers' names.
    """
    channel, mode, *names = socket.socket(fileno=int(sys.argv[1])), *sys.argv[2:]
    channel.set_inheritable(False)
    # The worker may be killed while a function blocks this process, which then would not see the end of the stream.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # Private memory, not addresses: libraries reserve far more of those than they use.
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    # Ctrl-C is for the parent, which then closes the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    functions = {name: get_scorer(name).function for name in names}
    if mode == "process":
        serve(channel, functions)
    else:
        asyncio.run(serve_concurrently(channel, functions))


if __name__ == "__main__":
    main()
