"""A control group of the kernel for each sandbox, where this process may make some.

It counts what a sandbox holds whether or not a process shows it, such as pages of a shared mapping that are mapped no
longer, tables of pages, and buffers of pipes and sockets, and keeps it below a limit.
"""

import contextlib
import logging
import os
import secrets
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

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
            # Its use, what of that is files, and how often the kernel killed for its limit.
            names = (version.usage, "memory.stat", version.events)
            self.files = [os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC) for name in names]
        except OSError:
            self._folder.rmdir()
            raise

    @property
    def command(self) -> list[str]:
        """The words in front of a command with which it begins in this group."""
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
    """Return where this process may make groups; None if nowhere. Removes groups that killed owners left there."""
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
            # Either is elsewhere where this process is in no part of the groups that are mounted.
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
