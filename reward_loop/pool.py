"""Processes for scorers that block: each has a deadline, and one that passes it is killed and replaced."""

import asyncio
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec

from rl_async.reward_loop.api import Conversation, Score, ScorerFailed
from rl_async.reward_loop.child import LENGTH, Answer, Ask

START_S = 60.0  # to import a scorer's modules


class ProcessPool:
    """A fixed number of places, each with a process that scores one conversation at a time."""

    def __init__(self, scorers: Sequence[str], processes: int) -> None:
        self._places = [_Place(scorers) for _ in range(processes)]
        self._free: asyncio.LifoQueue[_Place] = asyncio.LifoQueue()
        for place in self._places:
            self._free.put_nowait(place)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(place.stop() for place in self._places))

    async def score(self, scorer: str, conversation: Conversation, timeout_s: float) -> Score:
        """Score in the next free process. ``timeout_s`` counts from when it has one that is ready.

        Raises ScorerFailed when the scorer raised, passed its deadline or ended its process.
        """
        place = await self._free.get()
        try:
            return await place.score(Ask(scorer, conversation, timeout_s))
        finally:
            self._free.put_nowait(place)


class _Place:
    """One process, started when it is first needed and again after it was killed."""

    def __init__(self, scorers: Sequence[str]) -> None:
        self._scorers = scorers
        self._process: asyncio.subprocess.Process | None = None
        self._decoder = msgspec.msgpack.Decoder(Answer)

    async def score(self, ask: Ask) -> Score:
        answered = False
        try:
            process = self._process or await self._start()
            answer = await self._ask(process, ask)
            answered = True
        finally:
            if not answered:  # what it would say later must not be taken for the answer to the next question
                await self.stop()
        if answer.error:
            raise ScorerFailed(answer.error)
        return Score(answer.value, answer.extra)

    async def _ask(self, process: asyncio.subprocess.Process, ask: Ask) -> Answer:
        stdin = process.stdin
        assert stdin is not None
        try:
            async with asyncio.timeout(ask.timeout_s):
                body = msgspec.msgpack.encode(ask)
                stdin.write(LENGTH.pack(len(body)) + body)
                await stdin.drain()
                return await self._read(process)
        except TimeoutError:
            raise ScorerFailed(f"did not answer within {ask.timeout_s:g} s (reward.timeout_s)") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await process.wait()
            raise ScorerFailed(f"ended its process (exit code {code})") from None

    async def _start(self) -> asyncio.subprocess.Process:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rl_async.reward_loop.child",
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

    async def _read(self, process: asyncio.subprocess.Process) -> Answer:
        stdout = process.stdout
        assert stdout is not None
        (length,) = LENGTH.unpack(await stdout.readexactly(LENGTH.size))
        return self._decoder.decode(await stdout.readexactly(length))

    async def stop(self) -> None:
        """Kill the process, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        await process.wait()
