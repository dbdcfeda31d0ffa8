"""A pool of processes for scorers that block; a process that misses its deadline is killed and replaced."""

import asyncio
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec

from rl_async.reward_loop.api import Conversation, Score, ScorerFailed
from rl_async.reward_loop.scorer_process import LENGTH, ScoreReply, ScoreRequest

START_S = 60.0  # to start Python and import a scorer's modules


class ProcessPool:
    """A fixed number of processes, each of which scores one conversation at a time."""

    def __init__(self, scorers: Sequence[str], processes: int, process_bytes: int) -> None:
        self._processes = [_ScorerProcess(scorers, process_bytes) for _ in range(processes)]
        self._free: asyncio.LifoQueue[_ScorerProcess] = asyncio.LifoQueue()
        for process in self._processes:
            self._free.put_nowait(process)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(process.stop() for process in self._processes))

    async def score(self, scorer: str, conversation: Conversation, timeout_s: float) -> Score:
        """Score in the next free process. The deadline ``timeout_s`` starts once that process is ready.

        Raises ScorerFailed if the scorer raised, missed the deadline or ended its process.
        """
        process = await self._free.get()
        try:
            return await process.score(ScoreRequest(scorer, conversation, timeout_s))
        finally:
            self._free.put_nowait(process)


class _ScorerProcess:
    """A process that is started when first needed, and again after it was killed."""

    def __init__(self, scorers: Sequence[str], process_bytes: int) -> None:
        self._scorers, self._process_bytes = scorers, process_bytes
        self._process: asyncio.subprocess.Process | None = None
        self._decoder = msgspec.msgpack.Decoder(ScoreReply)

    async def score(self, request: ScoreRequest) -> Score:
        answered = False
        try:
            process = self._process or await self._start()
            reply = await self._exchange(process, request)
            answered = True
        finally:
            if not answered:  # a late reply must not be taken for the reply to the next request
                await self.stop()
        if reply.error:
            raise ScorerFailed(reply.error)
        return Score(reply.value, reply.extra, reply.reason)

    async def _exchange(self, process: asyncio.subprocess.Process, request: ScoreRequest) -> ScoreReply:
        stdin = process.stdin
        assert stdin is not None
        try:
            async with asyncio.timeout(request.timeout_s):
                body = msgspec.msgpack.encode(request)
                stdin.write(LENGTH.pack(len(body)) + body)
                await stdin.drain()
                return await self._read(process)
        except TimeoutError:
            raise ScorerFailed(f"did not answer within {request.timeout_s:g} s (reward.timeout_s)") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await process.wait()
            raise ScorerFailed(f"ended its process (exit code {code})") from None

    async def _start(self) -> asyncio.subprocess.Process:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rl_async.reward_loop.scorer_process",
            str(self._process_bytes),
            *self._scorers,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(START_S):
                await self._read(self._process)
        except TimeoutError:
            raise ScorerFailed(f"its process was not ready within {START_S:g} s") from None
        except asyncio.IncompleteReadError:
            code = await self._process.wait()
            raise ScorerFailed(f"its process did not start (exit code {code}); its log says why") from None
        return self._process

    async def _read(self, process: asyncio.subprocess.Process) -> ScoreReply:
        stdout = process.stdout
        assert stdout is not None
        (length,) = LENGTH.unpack(await stdout.readexactly(LENGTH.size))
        return self._decoder.decode(await stdout.readexactly(length))

    async def stop(self) -> None:
        """Kill the process if it runs; the next request starts another."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        await process.wait()
