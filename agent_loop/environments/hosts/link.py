"""A host's process, as its worker sees it: started, called, and ended with all that it started."""

import asyncio
import contextlib
import itertools
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rl_async.agent_loop.environments.hosts import wire
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import EnvironmentFailed
from rl_async.files import UNDECODABLE
from rl_async.process import guard
from rl_async.process.kernel import kill_marked
from rl_async.process.role import own_module

T = TypeVar("T")

MODULE = "agent_loop.environments.hosts.process"
GRACE_S = 30.0  # past a call's deadline, which the host itself holds, and for the end of a process
MARK = "RL_ASYNC_ENVIRONMENTS_FOLDER"  # a variable of a host and of what it starts, of another value for each
START_S = 180.0  # importing what an environment needs from a slow disk takes a minute


class HostLink:
    """One process. ``lost`` is called once, with the reason, when it has ended, however it did."""

    def __init__(self, number: int, log_path: Path, lost: Callable[[str], None]) -> None:
        self._number, self._log_path, self._lost = number, log_path, lost
        self._calls: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._numbers = itertools.count(1)
        self._folder = Path(tempfile.gettempdir()) / f"rl-async-environments-{os.urandom(8).hex()}"  # the guard's
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._why = ""  # we ended it

    async def start(self, config: RunConfig) -> wire.Welcome:
        """Start the process and wait until it can be called.

        Raises ConfigError for an environment that cannot be made, and EnvironmentFailed if the process ends.
        """
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        guarded = ["-I", "-S", guard.__file__, str(os.getpid()), str(self._folder), *own_module(MODULE)]
        with theirs, self._log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *guarded,
                stdin=theirs.fileno(),
                stdout=log,
                stderr=log,
                env=os.environ | {MARK: str(self._folder), "TMPDIR": str(self._folder)},
                start_new_session=True,
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.write(wire.frame(wire.Setup(config)))
        try:
            async with asyncio.timeout(START_S):
                first = msgspec.msgpack.decode(await wire.read_frame(reader), type=wire.Reply)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise EnvironmentFailed(await self._ended()) from None
        except TimeoutError:
            self.kill(f"did not start within {START_S:g} s")
            raise EnvironmentFailed(await self._ended()) from None
        if isinstance(first, wire.Failure):
            raise wire.error_of(first)
        assert isinstance(first, wire.Welcome)
        self._reading = asyncio.create_task(self._read(reader), name=f"environment host {self._number}")
        return first

    async def call(self, request: type[Any], *arguments: Any, answer: type[T], within_s: float) -> T:
        """Send a request and return its answer; a caller that is cancelled cancels the call in the host, too.

        Raises what the host raised. Raises EnvironmentFailed if the host is lost, or is silent for GRACE_S after the
        deadline that it holds itself: then nothing in it can be trusted to end, and it is killed.
        """
        if self._writer is None or self._reading is None or self._reading.done():
            raise EnvironmentFailed(f"environment host {self._number} has ended")
        number = next(self._numbers)
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(request(number, *arguments))
            async with asyncio.timeout(within_s + GRACE_S):
                return msgspec.msgpack.decode(await future, type=answer)
        except TimeoutError:
            self.kill(f"was killed: it had not answered {request.__name__} within {within_s:g} s")
            raise EnvironmentFailed(f"environment host {self._number} {self._why}") from None
        except asyncio.CancelledError:
            self._send(wire.Cancel(number))
            raise
        finally:
            del self._calls[number]

    def _send(self, request: wire.Request) -> None:
        assert self._writer is not None
        frame = wire.frame(request)
        if not self._writer.is_closing():  # else its end is known soon, and answers all calls
            self._writer.write(frame)

    def kill(self, why: str) -> None:
        """End the process and all that it started, soon."""
        self._why = self._why or why
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    async def close(self) -> None:
        """Let the process end by itself, else kill it, and wait for the end of all that it started."""
        self._why = self._why or "was closed"
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            await self._ended()
        if self._reading is not None:
            await asyncio.wait([self._reading])

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hand answers to those who wait for them, until the process ends. Waits for the host."""
        replies = msgspec.msgpack.Decoder(wire.Reply)
        try:
            while True:
                self._settle(replies.decode(await wire.read_frame(reader)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # its end
        except (*UNDECODABLE, ValueError) as error:
            self.kill(f"was killed: it sent what cannot be read: {error}")
        assert self._writer is not None
        self._writer.close()
        reason = await self._ended()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EnvironmentFailed(reason))
        self._lost(reason)

    def _settle(self, reply: wire.Reply) -> None:
        assert not isinstance(reply, wire.Welcome)
        future = self._calls.get(reply.call)
        if future is None or future.done():
            return  # nobody waits any more
        if isinstance(reply, wire.Failure):
            future.set_exception(wire.error_of(reply))
        else:
            future.set_result(reply.value)

    async def _ended(self) -> str:
        """Wait for the end of the process and all that it started; return what to tell whoever needed it."""
        assert self._process is not None
        try:
            async with asyncio.timeout(GRACE_S):
                code = await self._process.wait()
        except TimeoutError:
            self.kill("did not end")
            code = await self._process.wait()
        if code < 0:  # the guard was killed
            await asyncio.to_thread(self._sweep)
        how = self._why or ("was killed" if code == KILLED else f"ended with {code}")
        return f"environment host {self._number} {how}; its log is {self._log_path}"

    def _sweep(self) -> None:
        """Do what the guard could not, since it was killed."""
        kill_marked(MARK, str(self._folder))
        shutil.rmtree(self._folder, ignore_errors=True)


KILLED = 256 - 9  # as the guard reports SIGKILL
