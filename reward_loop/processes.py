"""Processes for scorers that block. One that hangs is killed and replaced; the others go on.

Not ``ProcessPoolExecutor``: it cannot end one worker, and a worker that dies breaks the whole pool.
"""

import asyncio
import logging
import struct
import sys
from contextlib import suppress
from types import TracebackType
from typing import Self

import msgspec

from rl_async.reward_loop.api import Score, ScoreRequest, ScorerFailed

log = logging.getLogger("rl_async.reward_loop")

START_S = 60.0  # a process must answer within this long after its start: imports may be slow
STOP_S = 2.0


class Job(msgspec.Struct, kw_only=True):
    """To a scoring process."""

    scorer: str
    request: ScoreRequest


class Answer(msgspec.Struct, kw_only=True):
    """From a scoring process: a score, or why there is none."""

    score: Score | None = None
    error: str = ""


_ANSWER = msgspec.msgpack.Decoder(Answer)


class ScorerProcesses:
    """Up to ``count`` processes, started when first needed. Use it as ``async with``, on one event loop."""

    def __init__(self, count: int) -> None:
        self._free: asyncio.Queue[asyncio.subprocess.Process | None] = asyncio.Queue()
        for _ in range(count):
            self._free.put_nowait(None)
        self._running: set[asyncio.subprocess.Process] = set()
        self.killed = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in list(self._running):
            await self._end(process)

    async def score(self, scorer: str, request: ScoreRequest, timeout_s: float) -> Score:
        """Have it scored by a free process. The deadline counts from when one is free and ready.

        Raises ScorerFailed when the scorer raised, died, or exceeded ``timeout_s``.
        """
        process = await self._free.get()
        try:
            if process is None or process.returncode is not None:
                process = await self._start()
            body = msgspec.msgpack.encode(Job(scorer=scorer, request=request))
            try:
                answer = await asyncio.wait_for(_exchange(process, body), timeout_s)
            except TimeoutError as error:
                self.killed += 1
                raise ScorerFailed(f"no answer within {timeout_s:g} s; its process was killed") from error
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                raise ScorerFailed("its process died") from error
        except BaseException:  # also cancelled: what it is doing is unknown, so it cannot be used again
            if process is not None:
                await self._end(process)
            process = None
            raise
        finally:
            self._free.put_nowait(process)
        if answer.score is None:
            raise ScorerFailed(answer.error)
        return answer.score

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rl_async.reward_loop.scorer_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        self._running.add(process)
        try:
            await asyncio.wait_for(_read(process), START_S)
        except (TimeoutError, asyncio.IncompleteReadError) as error:
            await self._end(process)
            raise ScorerFailed("a scoring process did not start") from error
        return process

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        self._running.discard(process)
        with suppress(ProcessLookupError):
            process.kill()
        if process.stdin is not None:
            process.stdin.close()
        await asyncio.wait_for(process.wait(), STOP_S)


async def _exchange(process: asyncio.subprocess.Process, body: bytes) -> Answer:
    assert process.stdin is not None
    process.stdin.write(struct.pack("<I", len(body)) + body)
    await process.stdin.drain()
    return _ANSWER.decode(await _read(process))


async def _read(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    (size,) = struct.unpack("<I", await process.stdout.readexactly(4))
    return await process.stdout.readexactly(size)
