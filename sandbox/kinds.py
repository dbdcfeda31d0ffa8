"""The kinds of sandboxes by name: users' own, containers, and workspaces on a Sandbox Fusion server.

Containers are made by the command line of Docker or Podman. The first process of a container is ours (``inside.py``),
given as an argument, and answers over the standard input and output that the command connects to it. It ends with
them, and with it the container, which is then removed.

Sandbox Fusion has an HTTP API, ``POST /run_code``. That server forgets a run's files, so a workspace is an archive
here, which goes there and back with each run. The server decides how programs are isolated, and which limits hold
besides time, output and size.
"""

import asyncio
import base64
import io
import posixpath
import secrets
import socket
import subprocess
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence

import aiohttp
import msgspec

from rl_async.configs.schema.reward import SandboxConfig
from rl_async.errors import ConfigError
from rl_async.files import UNDECODABLE
from rl_async.sandbox import Language, Limit, Result, Sandbox, SandboxLost, SandboxRefused, refuse_top
from rl_async.sandbox.bubblewrap import (
    FIRST_PROCESS,
    OWN_BYTES,
    SHARED_MEMORY_BYTES,
    Bubblewrap,
    ProcessWorkspace,
    find_place,
    system_call_filter,
)
from rl_async.userload import is_user_reference, load_user_object

ATTEMPTS, PAUSE_S = 4, 0.5
BUSY = (429, 502, 503, 504)
# Archives and the network take so long beyond the program's time.
GRACE_S = 30.0
SERVER_CHECK_S = 60.0
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
CHECK_S = 120.0
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# The size of file systems that are there because programs expect them, and stay empty.
SMALL = 1 << 16
# These exist also where a user without privileges has only 65,536 numbers for the users of containers.
USERS = range(10_000, 60_000)


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
            with urllib.request.urlopen(post, timeout=SERVER_CHECK_S) as answer:
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


class Containers:
    """Opens workspaces, each a container of its own from ``sandbox.image``.

    Raises ConfigError if the command is missing, or makes no container whose Python can serve.
    """

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._program = (FIRST_PROCESS.read_text(), base64.b64encode(system_call_filter()).decode())
        self._check()

    async def open(self, *, top: Sequence[str] = ()) -> ProcessWorkspace:
        """Start an empty workspace. Its root is the image's, so ``top`` is refused."""
        refuse_top("container", top)
        ours, theirs = socket.socketpair()
        with theirs:
            container = _Container(self._config, self._program, theirs)
        reader, writer = await asyncio.open_connection(sock=ours)
        return ProcessWorkspace(container, reader, writer, self._config, {"python": "python3", "bash": "bash"})

    def _check(self) -> None:
        """Start a container whose input ends at once; it ends well if everything that it needs is there."""
        command, image = self._config.command, self._config.image
        try:
            done = subprocess.run(
                _run(self._config, _name(), self._program),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=CHECK_S,
            )
        except OSError as error:
            raise ConfigError(f"sandbox.command: cannot start {command[0]}: {error.strerror}; install it") from error
        except subprocess.TimeoutExpired:
            raise ConfigError(f"sandbox.command: {command[0]} made no container within {CHECK_S:g} s") from None
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").strip()[-500:]
            raise ConfigError(
                f"sandbox.kind: {command[0]} makes no container of {image!r} here: exit code {done.returncode}, "
                f"{said!r}; the image must be on this machine (`{command[0]} pull {image}`) and have python3 and bash"
            )


class _Container:
    """The command that runs a container. A ProcessWorkspace waits for it and kills it in place of the container."""

    def __init__(self, config: SandboxConfig, program: tuple[str, str], control: socket.socket) -> None:
        self._command, self._name = config.command, _name()
        both = control.fileno()
        self._client = subprocess.Popen(_run(config, self._name, program), stdin=both, stdout=both)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; a container that it left behind is ended and removed."""
        code = self._client.wait(timeout)
        if code != 0:
            # Podman's rm alone would wait for the first process to end by itself.
            for words in (["kill"], ["rm", "--force"]):
                command = [*self._command, *words, self._name]
                subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=CHECK_S)
        return code

    def kill(self) -> None:
        """End the command, and by ``wait`` the container."""
        self._client.kill()


def _name() -> str:
    return f"rl-async-sandbox-{secrets.token_hex(8)}"


def _run(config: SandboxConfig, name: str, program: tuple[str, str]) -> list[str]:
    """Return the command that runs a container and removes it after its end."""
    workspace, user = config.workspace_bytes, secrets.choice(USERS)
    # Single processes are limited as in other sandboxes; these limits hold the container as a whole.
    memory = 2 * (config.memory_bytes + workspace) + OWN_BYTES
    folders = [part for folder in config.packages for part in ("--volume", f"{folder}:{folder}:ro")]
    environment = {
        "PATH": PATH,
        "HOME": "/workspace",
        "USER": "sandbox",
        "LANG": "C.UTF-8",
        "PYTHONPATH": ":".join(config.packages),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    return [
        *(*config.command, "run", "--rm", "--interactive", "--pull", "never", "--name", name, "--log-driver", "none"),
        *("--network", "none", "--hostname", "sandbox", "--user", f"{user}:{user}", "--cap-drop", "ALL"),
        *("--security-opt", "no-new-privileges", "--read-only", "--workdir", "/workspace"),
        *("--memory", str(memory), "--memory-swap", str(memory), "--pids-limit", str(config.processes + 8)),
        *("--ulimit", f"nproc={config.processes + 1}:{config.processes + 1}", "--ulimit", "nofile=256:256"),
        *("--ulimit", "core=0:0", "--shm-size", str(SHARED_MEMORY_BYTES)),
        *("--tmpfs", f"/workspace:rw,exec,nosuid,nodev,size={workspace},mode=1777"),
        *("--tmpfs", f"/tmp:rw,exec,nosuid,nodev,size={workspace},mode=1777"),
        *("--tmpfs", f"/run:ro,size={SMALL}", "--tmpfs", f"/var/tmp:ro,size={SMALL}"),
        *folders,
        *("--entrypoint", "env", config.image, "-i", *(f"{key}={value}" for key, value in environment.items())),
        *("python3", "-I", "-S", "-c", *program),
    ]


KINDS: dict[str, Callable[[SandboxConfig], Sandbox]] = {
    "bubblewrap": lambda config: Bubblewrap(config, find_place()),
    "container": Containers,
    "sandbox_fusion": SandboxFusion,
}


def make_sandbox(given: SandboxConfig | None) -> Sandbox:
    """Return the config's sandbox, one of ours or the user's class ``path.py:name``, made from the config.

    Without a config its defaults hold.
    Raises ConfigError where there is none or it cannot work: nothing runs without one.
    """
    config = given or SandboxConfig()
    if is_user_reference(config.kind):
        made: Sandbox = load_user_object(config.kind, "sandbox.kind")(config)
        return made
    if config.kind not in KINDS:
        raise ConfigError(f"sandbox.kind: no sandbox {config.kind!r}; built in: {', '.join(KINDS)}; or path.py:class")
    return KINDS[config.kind](config)
