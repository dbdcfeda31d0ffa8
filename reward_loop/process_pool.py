"""The processes of users' functions and of scorers that block; one that misses its deadline is killed and replaced."""

import asyncio
import itertools
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

import msgspec

from rl_async.concurrency import to_the_end
from rl_async.process.role import own_module
from rl_async.reward_loop.api import Conversation, Score, ScorerFailed
from rl_async.reward_loop.scorer_process import LENGTH, Mode, ScoreReply, ScoreRequest, missed

START_S = 60.0  # to start Python and import a scorer's modules
LAST_BYTES_S = 0.5  # for what an ended process had written, whose children may keep its socket open
UNBLOCK_S = 1.0  # past the deadline, for an event loop to say that it has given up a coroutine


class ProcessPool:
    """A fixed number of processes, each of which scores one conversation at a time, and one for all coroutines."""

    def __init__(self, blocking: Sequence[str], awaited: Sequence[str], processes: int, process_bytes: int) -> None:
        self._processes = [_OneByOne(blocking, process_bytes) for _ in range(processes)]
        self._free: asyncio.LifoQueue[_OneByOne] = asyncio.LifoQueue()
        for process in self._processes:
            self._free.put_nowait(process)
        self._concurrent = _Concurrent(awaited, process_bytes)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await to_the_end(self._concurrent.stop(), *(process.stop() for process in self._processes))

    async def score(self, scorer: str, conversation: Conversation, timeout_s: float) -> Score:
        """Score in the next free process. The deadline ``timeout_s`` starts once that process is ready.

        Raises ScorerFailed if the scorer raised, missed the deadline or ended its process.
        """
        process = await self._free.get()
        try:
            return await process.score(ScoreRequest(0, scorer, conversation, timeout_s))
        finally:
            self._free.put_nowait(process)

    async def score_concurrently(self, scorer: str, conversation: Conversation, timeout_s: float) -> Score:
        """Score by a coroutine function, beside others. The deadline ``timeout_s`` starts once its process is ready.

        Raises ScorerFailed as ``score`` does, and if another conversation's coroutine ended or blocked the process.
        """
        return await self._concurrent.score(scorer, conversation, timeout_s)


class _Channel:
    """A running process with the socket to it. Its process group is its own, so that its children end with it."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process, self.writer = process, writer
        self._reader = reader
        self._decoder = msgspec.msgpack.Decoder(ScoreReply)

    @classmethod
    async def start(cls, mode: Mode, scorers: Sequence[str], process_bytes: int) -> Self:
        """Start a process. Raises ScorerFailed if it is not ready within START_S."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *own_module("reward_loop.scorer_process", str(theirs.fileno()), mode, str(process_bytes), *scorers),
                stdin=asyncio.subprocess.DEVNULL,
                # What a scorer prints goes to the log.
                stdout=2,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        channel = cls(process, *await asyncio.open_connection(sock=ours))
        ready = False
        try:
            async with asyncio.timeout(START_S):
                await channel.read()
            ready = True
        except TimeoutError:
            raise ScorerFailed(f"its process was not ready within {START_S:g} s") from None
        except asyncio.IncompleteReadError:
            code = await process.wait()
            raise ScorerFailed(f"its process did not start (exit code {code}); its log says why") from None
        finally:
            if not ready:
                await channel.kill()
        return channel

    def write(self, request: ScoreRequest) -> None:
        body = msgspec.msgpack.encode(request)
        self.writer.write(LENGTH.pack(len(body)) + body)

    async def read(self) -> ScoreReply:
        """Return the next reply. Raises IncompleteReadError if the process ends, also while children of it live on."""
        reading, ending = asyncio.ensure_future(self._frame()), asyncio.ensure_future(self.process.wait())
        try:
            await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await asyncio.wait({reading}, timeout=LAST_BYTES_S)
            if not reading.done():
                raise asyncio.IncompleteReadError(b"", None)
            return reading.result()
        except ConnectionError:
            raise asyncio.IncompleteReadError(b"", None) from None
        finally:
            reading.cancel()
            ending.cancel()

    async def _frame(self) -> ScoreReply:
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        return self._decoder.decode(await self._reader.readexactly(length))

    async def kill(self) -> None:
        """End the process with what it started in its process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()
        self.writer.close()


class _OneByOne:
    """A process that is started when first needed, and again after it was killed."""

    def __init__(self, scorers: Sequence[str], process_bytes: int) -> None:
        self._scorers, self._process_bytes = scorers, process_bytes
        self._channel: _Channel | None = None

    async def score(self, request: ScoreRequest) -> Score:
        answered = False
        try:
            if self._channel is None:
                self._channel = await _Channel.start("process", self._scorers, self._process_bytes)
            reply = await self._exchange(self._channel, request)
            answered = True
        finally:
            if not answered:  # a late reply must not be taken for the reply to the next request
                await self.stop()
        return reply.score()

    async def _exchange(self, channel: _Channel, request: ScoreRequest) -> ScoreReply:
        try:
            async with asyncio.timeout(request.timeout_s):
                channel.write(request)
                return await channel.read()
        except TimeoutError:
            raise ScorerFailed(missed(request.timeout_s)) from None
        except asyncio.IncompleteReadError:
            code = await channel.process.wait()
            raise ScorerFailed(f"ended its process (exit code {code})") from None

    async def stop(self) -> None:
        """Kill the process if it runs; the next request starts another."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.kill()


class _BlockedByAnother(Exception):
    """The process was killed because of another conversation."""


class _Concurrent:
    """The process of coroutine functions, whose event loop serves many requests at once; started when first needed.

    It is replaced when it ends, and killed when its event loop is blocked: when it does not give up a coroutine within
    UNBLOCK_S of its deadline. The other requests are then sent to its successor, for the time that they have left.
    """

    def __init__(self, scorers: Sequence[str], process_bytes: int) -> None:
        self._scorers, self._process_bytes = scorers, process_bytes
        self._numbers = itertools.count()
        self._starting = asyncio.Lock()
        self._channel: _Channel | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._blocked: _Channel | None = None
        self._waiting = dict[int, asyncio.Future[ScoreReply]]()

    async def score(self, scorer: str, conversation: Conversation, timeout_s: float) -> Score:
        left = timeout_s
        while True:
            channel = await self._running()
            began = asyncio.get_running_loop().time()
            try:
                return (await self._exchange(channel, scorer, conversation, left, timeout_s)).score()
            except _BlockedByAnother:
                left -= asyncio.get_running_loop().time() - began

    async def _running(self) -> _Channel:
        async with self._starting:
            if self._receiving is not None and self._receiving.done():
                await self.stop()
            if self._channel is None:
                self._channel = await _Channel.start("awaited", self._scorers, self._process_bytes)
                self._receiving = asyncio.create_task(self._receive(self._channel))
            return self._channel

    async def _exchange(
        self, channel: _Channel, scorer: str, conversation: Conversation, left_s: float, timeout_s: float
    ) -> ScoreReply:
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        reply = self._waiting[number] = loop.create_future()
        channel.write(ScoreRequest(number, scorer, conversation, left_s))
        try:
            await asyncio.wait([reply], timeout=left_s)
        except asyncio.CancelledError:
            self._waiting.pop(number, None)
            channel.write(ScoreRequest(number, scorer, None, left_s))
            raise
        if not reply.done():
            reply.cancel()
            loop.call_later(UNBLOCK_S, self._end_if_blocked, channel, number)
            raise ScorerFailed(missed(timeout_s))
        return reply.result()

    def _end_if_blocked(self, channel: _Channel, number: int) -> None:
        if number in self._waiting and channel is self._channel:
            self._blocked = channel
            with suppress(ProcessLookupError):
                os.killpg(channel.process.pid, signal.SIGKILL)

    async def _receive(self, channel: _Channel) -> None:
        """Consumes replies and hands each to its request; runs until the process ends, which fails all requests."""
        try:
            while True:
                reply = await channel.read()
                if (waiting := self._waiting.pop(reply.number, None)) is not None and not waiting.done():
                    waiting.set_result(reply)
        except asyncio.IncompleteReadError:
            code = await channel.process.wait()
            lost, self._waiting = self._waiting, {}
            for waiting in lost.values():
                if not waiting.done():
                    reason = f"ended its process, or another coroutine in it did (exit code {code})"
                    blocked = channel is self._blocked
                    waiting.set_exception(_BlockedByAnother() if blocked else ScorerFailed(reason))

    async def stop(self) -> None:
        """Kill the process if it runs; the next request starts another."""
        channel, self._channel = self._channel, None
        receiving, self._receiving = self._receiving, None
        if channel is not None:
            await channel.kill()
        if receiving is not None:
            await receiving
