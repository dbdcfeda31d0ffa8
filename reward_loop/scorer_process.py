"""A process of the pool: gets conversations over a socket and answers with scores, until the socket closes.

Frames are msgpack, preceded by a four-byte length. The socket is not one of the standard streams, which belong to the
users' functions: what those print goes to the log, and what they read is empty.
"""

import asyncio
import ctypes
import inspect
import math
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from typing import Any, BinaryIO, Literal

import msgspec

from rl_async.reward_loop.api import Conversation, Score, ScorerFailed, to_score
from rl_async.reward_loop.scorers.scorer_registry import describe, get_scorer

LENGTH = struct.Struct(">I")
GRACE_S = 5.0  # past the deadline, in which the pool should have killed this process
PR_SET_PDEATHSIG = 1  # prctl(2)

Mode = Literal["process", "awaited"]  # one conversation at a time, or coroutines beside each other
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
        """Return the score. Raises ScorerFailed if there is none."""
        if self.error:
            raise ScorerFailed(self.error)
        return Score(self.value, self.extra, self.reason)


def missed(timeout_s: float) -> str:
    """Say that a deadline was missed."""
    return f"did not answer within {timeout_s:g} s (reward.timeout_s)"


def converted(number: int, answer: object) -> ScoreReply:
    """Return the reply for what a function returned. Raises what the user's objects raise while they are converted."""
    score = to_score(answer)
    return ScoreReply(number, score.value, score.extra, score.reason)


def failed(number: int, error: BaseException) -> ScoreReply:
    """Return the reply for what a function raised: anything, such as SystemExit, fails this conversation alone."""
    if isinstance(error, MemoryError):
        return ScoreReply(number, error="needs more memory than reward.process_bytes")
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
            # The pool kills a process that misses its deadline; if the pool itself is dead, the kernel does.
            signal.alarm(math.ceil(request.timeout_s + GRACE_S))
            reply = _called(functions[request.scorer], request)
            if os.getpid() != process:
                # A child that a scorer forked came back from it: its reply would be taken for another conversation's.
                os._exit(1)
            signal.alarm(0)
            _write(replies, reply)


def _called(function: Function, request: ScoreRequest) -> ScoreReply:
    try:
        answer = function(request.conversation)
        if inspect.isawaitable(answer):  # of a decorator that hides a coroutine function
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
    """Report that the functions are ready, then score by coroutines until the socket closes.

    Consumes ScoreRequests; produces a ScoreReply for each, at its deadline at the latest; waits for the next one,
    unblocked by the end of the stream.
    """
    process, decoder = os.getpid(), msgspec.msgpack.Decoder(ScoreRequest)
    reader, writer = await asyncio.open_connection(sock=channel)
    running = dict[int, asyncio.Task[None]]()

    async def answer(function: Function, request: ScoreRequest) -> None:
        called = asyncio.create_task(_awaited_reply(function, request))
        try:
            await asyncio.wait({called}, timeout=request.timeout_s)
        finally:
            running.pop(request.number)
            called.cancel()
        reply = called.result() if called.done() else ScoreReply(request.number, error=missed(request.timeout_s))
        if os.getpid() != process:
            os._exit(1)
        writer.write(_framed(reply))

    writer.write(_framed(ScoreReply()))
    while True:
        try:
            body = await reader.readexactly(*LENGTH.unpack(await reader.readexactly(LENGTH.size)))
        except asyncio.IncompleteReadError:
            return
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
    """Serve the scorers whose names are the last arguments, over the socket that the first one is the number of, in the
    mode of the second, after the most bytes of memory; 0: no limit.
    """
    channel, mode, most, *names = socket.socket(fileno=int(sys.argv[1])), *sys.argv[2:]
    channel.set_inheritable(False)
    # The worker may be killed while a function blocks this process, which then would not see the end of the stream.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if int(most):
        # Private memory, not addresses: libraries reserve far more of those than they use.
        resource.setrlimit(resource.RLIMIT_DATA, (int(most), int(most)))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes the socket
    functions = {name: get_scorer(name).function for name in names}
    if mode == "process":
        serve(channel, functions)
        return
    asyncio.run(_until_closed(channel, functions))


async def _until_closed(channel: socket.socket, functions: dict[str, Function]) -> None:
    await serve_concurrently(channel, functions)
    # A coroutine that swallows its cancellation would keep the event loop from ending.
    os._exit(0)


if __name__ == "__main__":
    main()
