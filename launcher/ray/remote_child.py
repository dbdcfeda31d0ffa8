"""A process on another node, controlled through its keeper. Imports nothing from Ray."""

import asyncio
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from rl_async.errors import RlAsyncError
from rl_async.launcher.ray.keeper import ORPHANED_S, Output, Started
from rl_async.launcher.supervise.process import TAIL_LINES, tail_of

WATCH_S = 2.0
ANSWER_S = 10.0
RETRY_S = 0.5
LOST_S = ORPHANED_S + 10.0  # without an answer: by then the keeper, if it lives, has killed the process


class KeeperGone(RlAsyncError):
    """The keeper or its node has ended."""


class KeeperSilent(RlAsyncError):
    """The keeper did not answer in time, and may answer a later call."""


class KeeperClient(Protocol):
    """Calls the methods of one keeper, over whatever connects it to the launcher."""

    async def ask(self, method: str, *arguments: Any, timeout_s: float = ANSWER_S) -> Any:
        """Call a method of the keeper. Raises UserError as it does, KeeperGone, or KeeperSilent after ``timeout_s``."""
        ...

    def tell(self, method: str) -> None:
        """Call a method of the keeper without waiting for its answer."""
        ...


class RemoteChild:
    """A process with a keeper. Its output is copied into ``log`` on the launcher's node; see ``process.Child``."""

    def __init__(self, name: str, client: KeeperClient, started: Started, host: str, log: Path) -> None:
        self.name, self.host, self.log = name, host, log
        self.pid, self.started = started.pid, started.started
        self.lost = False  # its keeper is gone
        log.touch()  # it may be read from now on
        self.log_start = log.stat().st_size
        self._client, self._offset, self._code = client, started.offset, None
        self._following = asyncio.create_task(self._follow())

    _code: int | None

    @property
    def returncode(self) -> int | None:
        """None while it runs. Negative: the signal that killed it; SIGKILL stands also for a lost node."""
        return self._code

    async def wait(self) -> int:
        """Wait until it has ended and its output was copied. Has no deadline, as for a local process."""
        await asyncio.shield(self._following)
        assert self._code is not None
        return self._code

    async def stop(self, timeout_s: float | None) -> int:
        """Send SIGTERM to the process, and kill it after ``timeout_s``; None: wait until it has ended."""
        if self._code is None and timeout_s is None:
            self._client.tell("stop")
        elif self._code is None and timeout_s is not None:
            with suppress(KeeperGone, KeeperSilent):  # then the loop below finds that it is lost
                await self._client.ask("stop", timeout_s, timeout_s=timeout_s + ANSWER_S)
        return await self.wait()

    async def kill(self) -> int:
        """Kill the process and everything that it started."""
        if self._code is None:
            with suppress(KeeperGone, KeeperSilent):
                await self._client.ask("kill")
        return await self.wait()

    def kill_now(self) -> None:
        """Kill the process without waiting until it has ended."""
        if self._code is None:
            self._client.tell("kill")

    def forget(self) -> None:
        """Stop following the process, without ending it."""
        self._following.cancel()

    def output(self) -> str:
        """Return the end of what this process wrote."""
        return tail_of(self.log, self.log_start)

    def tail(self) -> str:
        """Return the last lines that this process wrote."""
        return "\n".join(self.output().splitlines()[-TAIL_LINES:])

    async def _follow(self) -> None:
        """Consumes the keeper's answers; produces the log and the exit code.

        Waits for the keeper, ANSWER_S each time. Unblocked by output, by the process's end, or by a keeper that is gone
        or was silent for LOST_S.
        """
        last_answer = time.monotonic()
        with self.log.open("ab", buffering=0) as file:
            while self._code is None:
                try:
                    answer: Output = await self._client.ask("watch", self._offset, WATCH_S)
                except KeeperSilent as error:
                    if time.monotonic() - last_answer < LOST_S:
                        await asyncio.sleep(RETRY_S)
                        continue
                    self._lose(file.write, error)
                    return
                except KeeperGone as error:
                    self._lose(file.write, error)
                    return
                last_answer = time.monotonic()
                file.write(answer.data)
                self._offset += len(answer.data)
                self._code = answer.code

    def _lose(self, write: Any, error: RlAsyncError) -> None:
        write(f"[launcher] {self.name} was lost with its node: {error}\n".encode())
        self.lost, self._code = True, -signal.SIGKILL
