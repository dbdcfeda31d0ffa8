"""Sandboxes in namespaces of this machine's kernel, made by bwrap (Debian package bubblewrap)."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rl_async.configs.schema.reward import SandboxConfig
from rl_async.errors import ConfigError
from rl_async.sandbox.api import Language
from rl_async.sandbox.cgroup import ControlGroup, Place
from rl_async.sandbox.seccomp import system_call_filter
from rl_async.sandbox.workspace import ProcessWorkspace

INSTALL = "apt-get install bubblewrap"
CHECK_S, CHECKS = 60.0, 3
NOBODY = "65534"
FIRST_SIGNAL = 128  # an exit code above it is that of a process which a signal ended, as shells have it
SHARED_MEMORY_BYTES = 16 << 20  # /dev/shm, where semaphores are
# Memory of the first process and of the kernel for it; processes of bwrap and of what starts it.
OWN_BYTES = 64 << 20
OWN_PROCESSES = 8
PYTHON = os.path.realpath(sys.executable)
_TOP = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
FIRST_PROCESS = Path(__file__).with_name("inside.py")

# The kernel spares user 0 the limit on processes and lets it write below /proc/sys, in any namespace; so root becomes
# nobody first, who may not look into folders such as /root. Hence the folders are shown elsewhere, in a mount namespace
# of this process alone. The first argument is their number.
_BECOME_NOBODY = f"""
count=$1; shift
mount -t tmpfs -o mode=0755 none /sys || exit
while [ $((count -= 1)) -ge 0 ]; do
  mkdir /sys/$count && mount --bind "$1" /sys/$count || exit
  shift
done
exec setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups --inh-caps=-all --bounding-set=-all "$@"
"""


class Bubblewrap:
    """Opens workspaces, each in a bwrap of its own and in a control group at ``place``.

    Without one, memory that no process shows counts nowhere, so the means to hold such are refused.

    Raises ConfigError without bwrap or where the kernel refuses it.
    """

    def __init__(self, config: SandboxConfig, place: Place | None = None) -> None:
        self._config, self._place = config, place
        self._filter, self._first = system_call_filter(shared=place is not None), FIRST_PROCESS.read_bytes()
        self._folders = list(_folders(config.packages))
        needed = ["bwrap", *(["unshare", "setpriv", "mount"] if os.geteuid() == 0 else [])]
        if missing := [name for name in needed if shutil.which(name) is None]:
            raise ConfigError(f"sandbox.kind: bubblewrap needs {', '.join(missing)}; install it: {INSTALL}")
        self._check()

    async def open(self, *, top: Sequence[str] = ()) -> ProcessWorkspace:
        """Start an empty workspace; ``top`` are links at its root."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = self._start(theirs, stderr=None, top=top)
        reader, writer = await asyncio.open_connection(sock=ours)
        interpreters: dict[Language, str] = {"python": PYTHON, "bash": "bash"}
        return ProcessWorkspace(process, reader, writer, self._config, interpreters, process.counted)

    def _check(self) -> None:
        """Start a sandbox whose socket ends at once; it ends well if everything that it needs is there.

        One that something killed says nothing about that, so another one is tried.
        """
        for left in reversed(range(CHECKS)):
            code, said = self._trial()
            if code == 0:
                return
            if not left or 0 < code < FIRST_SIGNAL:
                raise ConfigError(
                    f"sandbox.kind: bubblewrap cannot make a sandbox here: exit code {code}, {said!r}; it needs "
                    "unprivileged user namespaces, or root with CAP_SYS_ADMIN (docs/reference/sandbox.md), and nothing "
                    "runs without"
                )

    def _trial(self) -> tuple[int, str]:
        """Start a sandbox and let it end; return its exit code and its last words."""
        ours, theirs = socket.socketpair()
        with theirs:
            ours.close()
            process = self._start(theirs, stderr=subprocess.PIPE)
        try:
            _, said = process.bwrap.communicate(timeout=CHECK_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return 1, f"no answer within {CHECK_S:g} s"
        finally:
            code = process.wait()
        return code, said.decode(errors="replace").strip()[-500:]

    def _start(self, control: socket.socket, *, stderr: int | None, top: Sequence[str] = ()) -> "_Bwrap":
        """Start bwrap. It dies with the thread that called this, which is the one of the event loop."""
        c = self._config
        most = c.memory_bytes + c.workspace_bytes + SHARED_MEMORY_BYTES + OWN_BYTES
        group = ControlGroup(self._place, most, c.processes + OWN_PROCESSES) if self._place else None
        texts = [_readable(text) for text in (self._filter, self._first)]
        counted = group.files if group else []
        try:
            bwrap = subprocess.Popen(
                [*(group.command if group else ()), *self._command(*texts, top=top)],
                stdin=control.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=[*texts, *counted],
                env={"PATH": os.environ.get("PATH", os.defpath)},
                cwd="/",
            )
        finally:
            for fd in [*texts, *counted]:
                os.close(fd)
        return _Bwrap(bwrap, group, counted)

    def _command(self, filter_fd: int, first_fd: int, *, top: Sequence[str]) -> list[str]:
        shown = self._folders
        if not os.geteuid():
            before = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _BECOME_NOBODY, "sh"]
            before += [str(len(shown)), *shown]
            shown = [f"/sys/{len(shown) - 1 - place}" for place in range(len(shown))]
        else:
            before = []
        binds = [part for source, folder in zip(shown, self._folders) for part in ("--ro-bind", source, folder)]
        return [
            *before,
            *("bwrap", "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"),
            *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
            *("--unshare-cgroup-try", "--disable-userns", "--seccomp", str(filter_fd)),
            *("--uid", "1000", "--gid", "1000", "--hostname", "sandbox"),
            *("--ro-bind", "/usr", "/usr", *_top_folders()),
            *("--ro-bind-try", "/etc/alternatives", "/etc/alternatives"),
            *("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"),
            *binds,
            *("--perms", "0444", "--ro-bind-data", str(first_fd), "/inside.py"),
            *("--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev"),
            # A shared mapping of /dev/zero is an anonymous one by another name; those of /dev/full cannot be mapped.
            *(() if self._place else ("--dev-bind", "/dev/full", "/dev/zero")),
            *("--size", str(SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
            *("--size", str(self._config.workspace_bytes), "--tmpfs", "/workspace"),
            *("--symlink", "workspace/.tmp", "/tmp"),
            *(part for name in top for part in ("--symlink", f"workspace/{name}", f"/{name}")),
            *("--chdir", "/workspace", "--remount-ro", "/"),
            *(part for name, value in self._environment().items() for part in ("--setenv", name, value)),
            *(PYTHON, "-I", "-S", "/inside.py"),
        ]

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": f"{os.path.dirname(PYTHON)}:/usr/local/bin:/usr/bin:/bin",
            "HOME": "/workspace",
            "USER": "sandbox",
            "LANG": "C.UTF-8",
            "PYTHONPATH": ":".join(self._config.packages),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",  # else each library starts a thread per core, against the limit on processes
        }


class _Bwrap:
    """A bwrap that runs, and its control group. ``counted``: the group's files, as the sandbox has them."""

    def __init__(self, bwrap: subprocess.Popen[bytes], group: ControlGroup | None, counted: list[int]) -> None:
        self.bwrap, self._group, self.counted = bwrap, group, counted

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and remove the group. Raises subprocess.TimeoutExpired."""
        code = self.bwrap.wait(timeout)
        if self._group:
            self._group.remove()
        return code

    def kill(self) -> None:
        """End it, and with it the sandbox."""
        if self._group:
            self._group.kill()
        self.bwrap.kill()


def _readable(text: bytes) -> int:
    """Return the end of a pipe from which ``text``, which must fit into one, can be read."""
    reading, writing = os.pipe()
    with open(writing, "wb", buffering=0) as pipe:
        pipe.write(text)
    return reading


def _folders(packages: tuple[str, ...]) -> Iterator[str]:
    """Yield the folders to show besides the system's: this Python's own, and ``packages``."""
    if not Path(sys.base_prefix).is_relative_to("/usr"):
        yield os.path.realpath(sys.base_prefix)
    for folder in packages:
        if not os.path.isabs(folder) or not os.path.isdir(folder) or os.path.realpath(folder) == "/":
            raise ConfigError(f"sandbox.packages: {folder} is not the absolute path of a folder")
        yield folder


def _top_folders() -> Iterator[str]:
    """Yield options for /bin, /lib and so on, which are links into /usr on most systems."""
    for name in _TOP:
        if os.path.islink(f"/{name}"):
            yield from ("--symlink", os.readlink(f"/{name}"), f"/{name}")
        elif os.path.isdir(f"/{name}"):
            yield from ("--ro-bind", f"/{name}", f"/{name}")
