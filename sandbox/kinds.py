"""The kinds of sandboxes by name, users' own, and containers, made by the command line of Docker or Podman.

The first process of a container is ours (``inside.py``), given as an argument, and answers over the standard input and
output that the command connects to it. It ends with them, and with it the container, which is then removed.
"""

import asyncio
import base64
import secrets
import socket
import subprocess
from collections.abc import Callable, Sequence

from rl_async.configs.schema.reward import SandboxConfig
from rl_async.errors import ConfigError
from rl_async.sandbox.api import Sandbox, refuse_top
from rl_async.sandbox.bubblewrap import (
    FIRST_PROCESS,
    OWN_BYTES,
    SHARED_MEMORY_BYTES,
    Bubblewrap,
    ProcessWorkspace,
    find_place,
    system_call_filter,
)
from rl_async.sandbox.fusion import SandboxFusion
from rl_async.userload import is_user_reference, load_user_object

CHECK_S = 120.0
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# The size of file systems that are there because programs expect them, and stay empty.
SMALL = 1 << 16
# These exist also where a user without privileges has only 65,536 numbers for the users of containers.
USERS = range(10_000, 60_000)


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
