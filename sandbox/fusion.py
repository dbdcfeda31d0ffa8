"""Workspaces on a Sandbox Fusion server, by its HTTP API: ``POST /run_code``.

That server forgets a run's files, so a workspace is an archive here, which goes there and back with each run. The
server decides how programs are isolated, and which limits hold besides time, output and size.
"""

import asyncio
import base64
import io
import posixpath
import tarfile
import urllib.error
import urllib.request
from collections.abc import Sequence

import aiohttp
import msgspec

from rl_async.configs.schema.reward import SandboxConfig
from rl_async.errors import ConfigError
from rl_async.files import UNDECODABLE
from rl_async.sandbox.api import Language, Limit, Result, SandboxLost, SandboxRefused, refuse_top

ATTEMPTS, PAUSE_S = 4, 0.5
BUSY = (429, 502, 503, 504)
# Archives and the network take so long beyond the program's time.
GRACE_S = 30.0
CHECK_S = 60.0
# The exit code of `timeout -s KILL`.
KILLED = 128 + 9
_IN, _OUT, _PROGRAM = "rl-async-in.tar", "rl-async-out.tar", "rl-async-program"

# The archive is packed after a program that was ended, too, so that its files stay.
_SCRIPT = f"""
mkdir -p rl-async-workspace && tar -xf {_IN} -C rl-async-workspace || exit 125
cd rl-async-workspace
(ulimit -f %(blocks)d && exec timeout -s KILL %(seconds)f %(interpreter)s ../{_PROGRAM})
status=$?
ulimit -f $((3 * %(blocks)d))
tar -cf ../{_OUT} . > /dev/null 2>&1 < /dev/null || rm -f ../{_OUT}
exit $status
"""


class _Request(msgspec.Struct):
    code: str
    run_timeout: float
    memory_limit_MB: int
    files: dict[str, str] = {}
    fetch_files: list[str] = []
    stdin: str = ""
    language: str = "bash"


class _Ran(msgspec.Struct):
    status: str
    execution_time: float | None = None
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class _Response(msgspec.Struct):
    status: str
    message: str = ""
    run_result: _Ran | None = None
    files: dict[str, str] = {}


class SandboxFusion:
    """Opens workspaces on the server at ``sandbox.url``. Raises ConfigError if it does not run a program."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._url = f"{config.url.rstrip('/')}/run_code"
        request = _Request("echo works", 10.0, _megabytes(config))
        post = urllib.request.Request(
            self._url, msgspec.json.encode(request), {"Content-Type": "application/json"}, method="POST"
        )
        try:
            with urllib.request.urlopen(post, timeout=CHECK_S) as answer:
                response = msgspec.json.decode(answer.read(1 << 20), type=_Response)
        except (OSError, ValueError, *UNDECODABLE) as error:
            raise ConfigError(f"sandbox.url: {self._url} does not answer as Sandbox Fusion does: {error}") from error
        if response.run_result is None or response.run_result.stdout != "works\n":
            raise ConfigError(f"sandbox.url: {self._url} does not run bash: {response.status} {response.message:.200}")

    async def open(self, *, top: Sequence[str] = ()) -> "FusionWorkspace":
        """Return an empty workspace; the server hears of it with its first program. ``top`` is refused."""
        refuse_top("sandbox_fusion", top)
        return FusionWorkspace(self._url, self._config)


class FusionWorkspace:
    """An archive, and the client of the server that runs programs in it."""

    def __init__(self, url: str, config: SandboxConfig) -> None:
        self._url, self._config = url, config
        self._session: aiohttp.ClientSession | None = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=config.timeout_s + GRACE_S)
        )
        self._archive = _empty()
        self._lock = asyncio.Lock()

    async def run(self, language: Language, code: str, *, stdin: bytes = b"", seconds: float | None = None) -> Result:
        """Run a program; the server gets input as text, so other bytes are refused."""
        c = self._config
        seconds = c.timeout_s if seconds is None else min(seconds, c.timeout_s)
        interpreter = {"python": "python3", "bash": "bash"}[language]
        script = _SCRIPT % {"blocks": c.workspace_bytes // 1024, "seconds": seconds, "interpreter": interpreter}
        try:
            text, program = stdin.decode(), code.encode()
        except UnicodeError as error:
            raise SandboxRefused(f"Sandbox Fusion takes text: {error}") from error
        async with self._lock:
            files = {_IN: _encoded(self._archive), _PROGRAM: _encoded(program)}
            request = _Request(script, seconds + GRACE_S / 2, _megabytes(c), files, [_OUT], text)
            response = await self._post(msgspec.json.encode(request))
            ran = response.run_result
            if ran is None or ran.status not in ("Finished", "TimeLimitExceeded"):
                raise SandboxLost(f"{self._url} did not finish a program: {response.status} {response.message:.200}")
            if _OUT not in response.files:
                raise SandboxRefused("the workspace could not be packed; what the program changed is lost")
            self._archive = _decoded(response.files[_OUT])
        return _result(ran, seconds, c.output_bytes)

    async def _post(self, body: bytes) -> _Response:
        """Post a run. It changes nothing there, so one that met a busy server is repeated."""
        most = 4 * self._config.workspace_bytes + 8 * self._config.output_bytes + (8 << 20)
        try:
            for attempt in range(1, ATTEMPTS + 1):
                if self._session is None:
                    raise SandboxLost("the workspace was closed")
                headers = {"Content-Type": "application/json"}
                async with self._session.post(self._url, data=body, headers=headers, allow_redirects=False) as answer:
                    if answer.status not in BUSY or attempt == ATTEMPTS:
                        raw = await _bounded(answer, most)
                        break
                await asyncio.sleep(PAUSE_S * 2**attempt)
            if answer.status != 200:
                raise SandboxLost(f"{self._url} answered {answer.status}: {raw[:200].decode(errors='replace')}")
            return msgspec.json.decode(raw, type=_Response)
        except (aiohttp.ClientError, TimeoutError, *UNDECODABLE) as error:
            raise SandboxLost(f"{self._url}: {type(error).__name__} {error}".strip()) from error

    async def put(self, path: str, data: bytes) -> None:
        """Add a file to the archive; unpacked, the last one of a name counts."""
        self._require_open()
        if len(data) + len(self._archive) > self._config.workspace_bytes:
            raise SandboxRefused(f"no space left for {path} (sandbox.workspace_bytes)")
        entry = tarfile.TarInfo(_inside(path))
        entry.size, entry.mode = len(data), 0o644
        buffer = io.BytesIO(self._archive)
        try:
            with tarfile.open(fileobj=buffer, mode="a") as archive:
                archive.addfile(entry, io.BytesIO(data))
        # A name that cannot be encoded is a ValueError.
        except (tarfile.TarError, ValueError) as error:
            raise SandboxRefused(f"{path!r} cannot be added to the workspace: {error}") from error
        self._archive = buffer.getvalue()

    async def get(self, path: str) -> bytes:
        """Read a file of the archive; links are not followed."""
        self._require_open()
        name = _inside(path)
        try:
            with tarfile.open(fileobj=io.BytesIO(self._archive)) as archive:
                found = [entry for entry in archive if posixpath.normpath(entry.name) == name]
                file = archive.extractfile(found[-1]) if found and found[-1].isreg() else None
                if file is None:
                    raise SandboxRefused(f"{path} is not a regular file of the workspace")
                return file.read()
        except tarfile.TarError as error:
            raise SandboxRefused(f"the workspace cannot be read: {error}") from error

    async def snapshot(self) -> bytes:
        """Return the archive."""
        self._require_open()
        return self._archive

    async def restore(self, snapshot: bytes) -> None:
        """Replace the archive; whether it is one, its first program will tell."""
        self._require_open()
        if not tarfile.is_tarfile(io.BytesIO(snapshot)):
            raise SandboxRefused("not a snapshot")
        self._archive = snapshot

    async def close(self) -> None:
        """Forget the archive. A program that runs is ended by the server's limit of time."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _require_open(self) -> None:
        if self._session is None:
            raise SandboxLost("the workspace was closed")


def _result(ran: _Ran, seconds: float, most: int) -> Result:
    stdout, stderr, took = (ran.stdout or "").encode(), (ran.stderr or "").encode(), ran.execution_time or 0.0
    # A program that reached the server's own limit of time has no exit code.
    code = KILLED if ran.return_code is None else ran.return_code
    limit: Limit = "seconds" if code == KILLED and took >= seconds else ""
    if len(stdout) + len(stderr) > most:
        stdout, limit = stdout[:most], "output"
        stderr = stderr[: most - len(stdout)]
    # Shells add 128 to the number of a signal.
    return Result(stdout, stderr, 128 - code if code > 128 else code, limit, took)


async def _bounded(answer: aiohttp.ClientResponse, most: int) -> bytes:
    raw = bytearray()
    async for piece in answer.content.iter_chunked(1 << 16):
        raw += piece
        if len(raw) > most:
            raise SandboxLost(f"the server answered with more than {most} bytes")
    return bytes(raw)


def _inside(path: str) -> str:
    name = posixpath.normpath(path)
    if name.startswith(("/", "..")) or name == ".":
        raise SandboxRefused(f"{path} leads out of the workspace")
    if "\0" in name:
        raise SandboxRefused(f"{path!r} has a zero byte")
    return name


def _megabytes(config: SandboxConfig) -> int:
    return config.memory_bytes >> 20


def _empty() -> bytes:
    buffer = io.BytesIO()
    tarfile.open(fileobj=buffer, mode="w").close()
    return buffer.getvalue()


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise SandboxLost(f"the server sent a file that is no base64: {error}") from error
