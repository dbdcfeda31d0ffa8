"""Sandboxes in namespaces of this machine's kernel, made by bwrap (Debian package bubblewrap).

``ProcessWorkspace``, which containers use too, is the outer end of a sandbox's socket; ``inside.py`` is the inner one.
What comes through it was made by untrusted code: lengths are checked first.

Namespaces and limits leave something open, such as memory that belongs to no process. A filter of system calls closes
it: a classic BPF program, the form that bwrap's ``--seccomp`` takes. It refuses by errno, so a program that tries
something harmlessly goes on. Where this process may make control groups, each sandbox gets one. It counts what a
sandbox holds whether or not a process shows it, such as pages of a shared mapping that are mapped no longer, tables of
pages, and buffers of pipes and sockets, and keeps it below a limit.
"""

import asyncio
import contextlib
import errno
import json
import logging
import os
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from rl_async.concurrency import outcomes, time_limit
from rl_async.configs.schema.reward import SandboxConfig
from rl_async.errors import ConfigError
from rl_async.files import UNDECODABLE
from rl_async.sandbox import Language, Limit, Result, SandboxLost, SandboxRefused

LENGTHS = struct.Struct(">II")
# A reply may take so long beyond a program's limit, and the reply to any other request so long in all.
GRACE_S = 30.0
MOST_HEADER = 4096
# The program is an argument, and the kernel takes none that is much longer.
LONGEST_PROGRAM = 120_000


class Reply(msgspec.Struct):
    """The answer of a sandbox's process 1. The first ``stdout`` bytes of the output are standard output."""

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
    """A workspace whose first process answers over a socket.

    ``interpreters`` are its commands that take ``-c CODE``, ``counted`` its descriptors of the files of its control
    group, empty without one.
    """

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
            async with time_limit(within_s):
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
        # The sandbox's first process dies with this one, and all others die with that.
        self._process.kill()


def _frame(header: bytes, body: bytes = b"") -> bytes:
    return LENGTHS.pack(len(header), len(body)) + header + body


# Calls by number, on x86_64 and aarch64.
# fmt: off
_REFUSED = {
    # These take memory that is charged to no process and so to no limit.
    "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186),
    # A page that this puts into a pipe keeps the whole huge page around it.
    "vmsplice": (278, 75),
    # These read and write other processes.
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    # These enter namespaces, or make them and mounts.
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    # These open large parts of the kernel that programs of this kind do not need.
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "fanotify_init": (300, 262),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "syslog": (103, 116),
    "personality": (135, 92), "kexec_load": (246, 104), "init_module": (175, 105), "finit_module": (313, 273),
}
# fmt: on
_SOCKET, _MMAP = (41, 198), (9, 222)
# Flags of mmap(2). Huge pages count in no process's memory and in no control group's.
_TYPE, _SHARED, _ANONYMOUS, _HUGE = 0x0F, 0x01, 0x20, 0x40000
# Network namespaces do not contain the others: AF_VSOCK, for one, reaches the host of a virtual machine.
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
# By machine: the column of its numbers above, and its AUDIT_ARCH_*.
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
# From this number on, x86_64 offers the same calls again, by other numbers.
_X32 = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _HAS, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
_NO_MEMORY = 0x00050000 | errno.ENOMEM
# Offsets in struct seccomp_data.
_NUMBER, _ARCH, _FIRST_ARGUMENT, _FOURTH_ARGUMENT = 0, 4, 16, 40


def system_call_filter(machine: str | None = None, *, shared: bool = True) -> bytes:
    """Return the filter for this machine. Without ``shared`` no memory is shared by anonymous mappings: a page of one
    that no process shows any more is held all the same, and only a control group counts it.

    Raises ConfigError for a machine whose system calls are not known here.
    """
    machine = machine or os.uname().machine
    if machine not in _MACHINES:
        raise ConfigError(f"sandbox.kind: bubblewrap and container work on {' and '.join(_MACHINES)}, not on {machine}")
    column, arch = _MACHINES[machine]
    numbers = sorted(call[column] for call in _REFUSED.values())
    refusal = [(_RETURN, 0, 0, _REFUSE)]
    program = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        *refusal,
    ]
    for number in numbers:
        program += [(_EQUAL, 0, 1, number), *refusal]
    refused = () if shared else (_SHARED | _ANONYMOUS,)
    program += [(_EQUAL, 0, len(refused) + 5, _MMAP[column]), (_LOAD, 0, 0, _FOURTH_ARGUMENT)]
    program += [(_HAS, len(refused) + 2, 0, _HUGE), (_AND, 0, 0, _TYPE | _ANONYMOUS)]
    program += [(_EQUAL, len(refused) - place, 0, flags) for place, flags in enumerate(refused)]
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _NO_MEMORY)]
    program += [(_EQUAL, 0, len(_FAMILIES) + 2, _SOCKET[column]), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    program += [(_EQUAL, len(_FAMILIES) - place, 0, family) for place, family in enumerate(_FAMILIES)]
    program += [*refusal, (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


log = logging.getLogger("rl_async.sandbox")

NAME = "rl-async"
# The kernel has so long to end the processes of a sandbox whose first one has ended.
GONE_S = 5.0


class Version(NamedTuple):
    """The names of a group's files: version 2 of control groups, or the memory controller of version 1."""

    usage: str
    limit: str
    with_swap: str
    swap: str
    events: str


V2 = Version("memory.current", "memory.max", "", "memory.swap.max", "memory.events")
V1 = Version("memory.usage_in_bytes", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "", "memory.oom_control")


class Place(NamedTuple):
    """A group below which others can be made."""

    folder: Path
    version: Version


class ControlGroup:
    """A group of at most ``memory_bytes``, none of them swapped out, and ``processes``. Raises OSError."""

    def __init__(self, place: Place, memory_bytes: int, processes: int) -> None:
        self._folder = place.folder / f"{NAME}-{os.getpid()}-{secrets.token_hex(8)}"
        self._folder.mkdir()
        try:
            version = place.version
            self._write(version.limit, memory_bytes)
            if version.with_swap and (self._folder / version.with_swap).exists():
                self._write(version.with_swap, memory_bytes)
            if version.swap and (self._folder / version.swap).exists():
                self._write(version.swap, 0)
            if (self._folder / "pids.max").exists():
                self._write("pids.max", processes)
            # They tell its use of memory, the share of files in that, and how often the kernel killed for its limit.
            names = (version.usage, "memory.stat", version.events)
            self.files = [os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC) for name in names]
        except OSError:
            self._folder.rmdir()
            raise

    @property
    def command(self) -> list[str]:
        """The words that, in front of a command, start it in this group."""
        return ["/bin/sh", "-c", 'echo 0 > "$0" && exec "$@"', str(self._folder / "cgroup.procs")]

    def kill(self) -> None:
        """Kill all processes in it, where the kernel can (version 2, Linux 5.14)."""
        with contextlib.suppress(FileNotFoundError):
            self._write("cgroup.kill", 1)

    def remove(self) -> None:
        """Remove it; its processes have ended, or are about to."""
        deadline = time.monotonic() + GONE_S
        while True:
            try:
                return self._folder.rmdir()
            except FileNotFoundError:
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    log.warning("cannot remove the control group %s: %s", self._folder, error.strerror)
                    return
            time.sleep(0.01)

    def _write(self, name: str, value: int) -> None:
        # Opened as it is, since such a file is not made.
        fd = os.open(self._folder / name, os.O_WRONLY)
        try:
            os.write(fd, str(value).encode())
        finally:
            os.close(fd)


def find_place() -> Place | None:
    """Return a place where this process may make groups, or None. Removes groups that killed owners left there."""
    for place in _candidates(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text()):
        if _works(place):
            for left in place.folder.glob(f"{NAME}-*-*"):
                if not Path("/proc", left.name.split("-")[2]).exists():
                    # Another opener may have removed it, or it has processes after all.
                    with contextlib.suppress(OSError):
                        left.rmdir()
            return place
    return None


def _candidates(own: str, mounts: str) -> list[Place]:
    """Return this process's group and the one above it, of either version; ``own`` and ``mounts`` as proc(5) has them.

    A group of version 2 that has processes divides no memory among groups below it, but the one above it may.
    """
    groups = [line.split(":", 2) for line in own.splitlines()]
    found = []
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        root, mounted = before.split(" ")[3:5]
        for _, controllers, path in groups:
            if kind == "cgroup2" and not controllers:
                version = V2
            elif kind == "cgroup" and "memory" in options.split(",") and "memory" in controllers.split(","):
                version = V1
            else:
                continue
            # The mount may show a part of the groups that this process is outside of.
            if ".." not in Path(path).parts and Path(path).is_relative_to(root):
                folder = Path(mounted, os.path.relpath(path, root))
                found += [Place(each, version) for each in (folder, folder.parent) if each.is_relative_to(mounted)]
    return found


def _works(place: Place) -> bool:
    """Try a group with a process in it."""
    try:
        group = ControlGroup(place, 64 << 20, 16)
    except OSError:
        return False
    for fd in group.files:
        os.close(fd)
    done = subprocess.run([*group.command, "true"], stderr=subprocess.DEVNULL)
    group.remove()
    return done.returncode == 0


INSTALL = "apt-get install bubblewrap"
CHECK_S, CHECKS = 60.0, 3
NOBODY = "65534"
# Shells add the number of the signal that ended a process to this.
FIRST_SIGNAL = 128
# The size of /dev/shm, where semaphores are.
SHARED_MEMORY_BYTES = 16 << 20
# A sandbox needs these besides its programs: memory for its first process, and processes for bwrap and its wrappers.
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
            # Otherwise each library starts a thread per core, which counts against the limit on processes.
            "OMP_NUM_THREADS": "1",
        }


class _Bwrap:
    """A bwrap that runs, and its control group. ``counted`` are the sandbox's descriptors of the group's files."""

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
    """Return the reading end of a pipe that holds ``text``, which must fit into one."""
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
