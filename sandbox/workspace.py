"""The outer end of a sandbox's socket. What comes through it was made by untrusted code: lengths are checked first."""

import asyncio
import contextlib
import json
import struct
import subprocess
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from rl_async.concurrency import outcomes
from rl_async.configs.schema.reward import SandboxConfig
from rl_async.files import UNDECODABLE
from rl_async.sandbox.api import Language, Limit, Result, SandboxLost, SandboxRefused

LENGTHS = struct.Struct(">II")
GRACE_S = 30.0  # past the limit of a program, and for everything else
MOST_HEADER = 4096
LONGEST_PROGRAM = 120_000  # bytes; the kernel takes no longer argument


class Reply(msgspec.Struct):
    """What process 1 of a sandbox answers; ``stdout``: how many bytes of the output are that."""

    refused: str = ""
    exit: int = 0
    limit: Limit = ""
    seconds: float = 0.0
    stdout: int = 0


class Running(Protocol):
    """The process that a sandbox is, or that runs one: it ends with the sandbox, and killing it ends the sandbox."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        ...

    def kill(self) -> None: ...


class ProcessWorkspace:
    """A workspace whose first process answers over a socket. ``interpreters``: its commands that take ``-c CODE``.
    ``counted``: its numbers for the open files of its control group, if it has one."""

    def __init__(
        self,
        process: Running,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        config: SandboxConfig,
        interpreters: dict[Language, str],
        counted: Sequence[int] = (),
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self._config, self._interpreters, self._counted = config, interpreters, counted
        self._lock = asyncio.Lock()
        self._requests: set[asyncio.Task[tuple[Reply, bytes]]] = set()
        # An archive has a header for each file, and a few blocks at its end.
        self._most_snapshot = 2 * config.workspace_bytes + (1 << 20)

    async def run(self, language: Language, code: str, *, stdin: bytes = b"", seconds: float | None = None) -> Result:
        """Run a program and wait for its end. If the caller is cancelled, the program is ended."""
        if len(code.encode(errors="replace")) > LONGEST_PROGRAM:
            raise SandboxRefused(f"the program has more than {LONGEST_PROGRAM} bytes; write parts of it to files")
        c = self._config
        seconds = c.timeout_s if seconds is None else min(seconds, c.timeout_s)
        limits: dict[str, Any] = {"seconds": seconds, "cpu": c.cpu_s, "processes": c.processes}
        limits |= {"memory": c.memory_bytes, "output": c.output_bytes, "workspace": c.workspace_bytes}
        limits["counted"] = self._counted
        request = {"do": "run", "argv": [self._interpreters[language], "-c", code], "limits": limits}
        reply, output = await self._ask(request, stdin, most=c.output_bytes, within_s=seconds + GRACE_S)
        cut = reply.stdout
        return Result(output[:cut], output[cut:], reply.exit, reply.limit, reply.seconds)

    async def put(self, path: str, data: bytes) -> None:
        """Write a file."""
        await self._ask({"do": "put", "path": path}, data)

    async def get(self, path: str) -> bytes:
        """Read a file."""
        most = self._config.workspace_bytes
        return (await self._ask({"do": "get", "path": path, "most": most}, most=most))[1]

    async def snapshot(self) -> bytes:
        """Return an archive of the folder, which is safe to keep and to restore, but not to unpack elsewhere."""
        most = self._config.workspace_bytes
        return (await self._ask({"do": "snapshot", "most": most}, most=self._most_snapshot))[1]

    async def restore(self, snapshot: bytes) -> None:
        """Replace the folder's content by that of an archive."""
        await self._ask({"do": "restore"}, snapshot)

    async def close(self) -> None:
        """End everything in the sandbox: its first process ends with the socket, and the kernel ends the others."""
        self._writer.transport.abort()
        await outcomes(*self._requests)
        try:
            await asyncio.to_thread(self._process.wait, GRACE_S)
        except subprocess.TimeoutExpired:
            self._end()
            await asyncio.to_thread(self._process.wait)

    async def _ask(
        self, request: dict[str, Any], body: bytes = b"", *, most: int = 0, within_s: float = GRACE_S
    ) -> tuple[Reply, bytes]:
        """Send a request and return its reply. A cancelled one is ended and its reply awaited all the same, unless the
        caller is cancelled again, which loses the workspace."""
        async with self._lock:
            if self._writer.is_closing():
                raise SandboxLost("the workspace was closed")
            self._writer.write(_frame(json.dumps(request).encode(), body))
            task = asyncio.create_task(self._reply(most, within_s))
            self._requests.add(task)
            task.add_done_callback(self._requests.discard)
            try:
                reply, data = await asyncio.shield(task)
            except asyncio.CancelledError:
                self._writer.write(_frame(b'{"do":"end"}'))
                with contextlib.suppress(SandboxLost):
                    await task
                raise
        if reply.refused:
            raise SandboxRefused(reply.refused)
        return reply, data

    async def _reply(self, most: int, within_s: float) -> tuple[Reply, bytes]:
        """Read the reply to the request that was written last."""
        try:
            async with asyncio.timeout(within_s):
                await self._writer.drain()
                lengths = LENGTHS.unpack(await self._reader.readexactly(LENGTHS.size))
                if lengths[0] > MOST_HEADER or lengths[1] > most:
                    raise SandboxLost(f"it announced {lengths[1]} bytes, more than the {most} that may come")
                text, data = [await self._reader.readexactly(length) for length in lengths]
                return msgspec.json.decode(text, type=Reply), data
        except asyncio.CancelledError:
            self._end()
            raise
        except (OSError, asyncio.IncompleteReadError, TimeoutError, *UNDECODABLE, SandboxLost) as error:
            self._end()
            reason = str(error) if isinstance(error, SandboxLost) else f"{type(error).__name__} {error}".strip()
            raise SandboxLost(f"the sandbox is lost, and with it the workspace: {reason}") from error

    def _end(self) -> None:
        """Give the sandbox up: its socket is out of step, or its first process is gone or hangs."""
        self._writer.transport.abort()
        self._process.kill()  # the first process dies with it, and with that all others


def _frame(header: bytes, body: bytes = b"") -> bytes:
    return LENGTHS.pack(len(header), len(body)) + header + body
