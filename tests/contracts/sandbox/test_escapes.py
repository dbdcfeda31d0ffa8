"""What a hostile program tries; every attempt fails, and the workspace goes on: docs/reference/sandbox.md."""

import asyncio
import os
import signal
import socket
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rl_async.configs.schema.reward import SandboxConfig
from rl_async.sandbox import Result, Sandbox, SandboxRefused, Workspace
from rl_async.sandbox.bubblewrap import Bubblewrap, find_place
from rl_async.sandbox.kinds import make_sandbox
from tests.contracts.sandbox.conftest import MEMORY_BYTES, SETTINGS, settings_of

WAIT_S = 60.0


async def python(workspace: Workspace, code: str, seconds: float | None = None) -> Result:
    """Run a program whose attempts raise what it catches; an error that it does not expect fails the test."""
    result = await workspace.run("python", code, seconds=seconds)
    assert result.limit or result.exit == 0, result.stderr.decode()
    return result


async def alive(workspace: Workspace) -> None:
    """Check that a program runs as before, and that nothing else does."""
    result = await workspace.run("bash", "set -- /proc/[0-9]*; echo $#")
    assert (result.stdout, result.exit) == (b"2\n", 0)  # process 1 and bash


async def test_a_fork_bomb_is_bounded_and_ends(workspace: Workspace) -> None:
    code = """
import os, time
made, refused = 0, False
try:
    for _ in range(200):
        if not os.fork():
            time.sleep(1000)
        made += 1
except BlockingIOError:
    refused = True
print(made, refused)
"""
    made, refused = (await python(workspace, code)).stdout.split()
    assert int(made) < SETTINGS.processes and refused == b"True"
    assert (
        await workspace.run("bash", "bomb() { bomb | bomb & }; bomb; while :; do :; done", seconds=2)
    ).limit == "seconds"
    threads = (
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()"
    )
    assert b"can't start new thread" in (await workspace.run("python", threads)).stderr
    await alive(workspace)


@pytest.mark.parametrize("place", ["/workspace", "/tmp", "/dev/shm"])
async def test_no_place_takes_more_than_its_size(workspace: Workspace, place: str) -> None:
    code = f"""
import errno
written = 0
try:
    for n in range(100_000):
        with open("{place}/" + str(n), "wb", buffering=0) as file:
            written += file.write(bytes(1 << 20))
except OSError as error:
    assert error.errno == errno.ENOSPC
print(written)
"""
    assert int((await python(workspace, code)).stdout) <= 16 << 20
    await workspace.run("bash", f"rm -rf {place}/*")
    await alive(workspace)


async def test_files_without_content_are_bounded(workspace: Workspace) -> None:
    result = await workspace.run("python", "n = 0\nwhile True:\n    open(str(n), 'w').close()\n    n += 1")
    assert result.limit == "files"


async def test_no_socket_leads_outside(workspace: Workspace, tmp_path: Path) -> None:
    name = f"rl-async-{uuid.uuid4()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as file,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        file.bind(str(tmp_path / "queue"))
        abstract.bind(f"\0{name}")
        file.listen()
        abstract.listen()
        places = [
            ("AF_INET", tcp.getsockname()),
            ("AF_INET", ("169.254.169.254", 80)),
            ("AF_INET", ("1.1.1.1", 53)),
            ("AF_UNIX", str(tmp_path / "queue")),
            ("AF_UNIX", f"\0{name}"),
        ]
        code = f"""
import socket
for family, place in {places!r}:
    try:
        socket.socket(getattr(socket, family)).connect(place)
        print("reached", place)
    except OSError as error:
        print("failed")
for family in (40, 17, 38, 31):  # VSOCK, PACKET, ALG, BLUETOOTH
    try:
        socket.socket(family, socket.SOCK_SEQPACKET)
        print("made", family)
    except PermissionError:
        print("failed")
"""
        assert (await python(workspace, code)).stdout.split() == [b"failed"] * 9


async def test_proc_shows_nothing_of_others(workspace: Workspace) -> None:
    code = """
import os
print(*(name for name in os.listdir("/proc") if name.isdigit() and int(name) not in (1, os.getpid())))
places = ["environ", "mem", "maps", "auxv", "stack", "cwd/x", "root/x", "fd/0"]
for place in [*("/proc/1/" + place for place in places), "/proc/kcore", "/proc/kmsg"]:
    try:
        if open(place, "rb").read(1):  # Docker shows empty files
            print("read", place)
    except OSError:
        pass
for place in ["/proc/sys/kernel/core_pattern", "/proc/sys/vm/drop_caches", "/proc/sysrq-trigger", "/proc/1/oom_adj"]:
    try:
        open(place, "w")
        print("wrote", place)
    except OSError:
        pass
"""
    assert (await python(workspace, code)).stdout.strip() == b""


async def test_links_lead_nowhere(workspace: Workspace, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    await workspace.run(
        "bash", f"ln -s {tmp_path}/secret e; ln -s /root/secret a; ln -s /proc/1/environ b; ln -s /etc c; ln -s ../.. d"
    )
    for path in ("a", "b", "c/ld.so.cache", "d/usr/bin/env", "../etc/ld.so.cache", "/etc/ld.so.cache", "/dev/zero"):
        with pytest.raises(SandboxRefused):
            await workspace.get(path)
        with pytest.raises(SandboxRefused):
            await workspace.put(path, b"changed")
    with pytest.raises(SandboxRefused):
        await workspace.get("e")  # the sandbox's own /tmp has no such file
    assert b"secret" not in (await workspace.snapshot()).replace(b"/secret", b"")
    assert (tmp_path / "secret").read_text() == "secret"
    await alive(workspace)


async def test_sparse_files_do_not_swell_a_snapshot(workspace: Workspace) -> None:
    await workspace.run("bash", "for n in 1 2 3 4 5; do truncate -s 4M $n; done")
    with pytest.raises(SandboxRefused):
        await workspace.snapshot()
    await workspace.run("bash", "truncate -s 1T big; rm -f 1 2 3 4 5")
    assert len(await workspace.snapshot()) < 1 << 20  # a file has at most the workspace's size


async def test_signals_do_not_reach_the_first_process(workspace: Workspace) -> None:
    for name in ("KILL", "INT", "TERM", "STOP", "HUP", "SEGV"):
        await workspace.run("bash", f"kill -{name} 1; kill -{name} $PPID")
        await alive(workspace)
    await workspace.run("python", "import os\nos.kill(-1, 9)")
    await alive(workspace)


async def test_a_gigabyte_of_output_is_cut(workspace: Workspace) -> None:
    for stream in ("", " >&2"):
        result = await workspace.run("bash", f"yes | head -c 1000000000{stream}")
        assert result.limit == "output"
        assert len(result.stdout) + len(result.stderr) == SETTINGS.output_bytes
    peak = await workspace.run("bash", "grep VmHWM /proc/1/status")
    assert int(peak.stdout.split()[1]) < 100_000  # kB
    assert len((await workspace.run("bash", f"head -c {SETTINGS.output_bytes} /dev/zero")).stdout) == 100_000


async def test_memory_is_bounded(workspace: Workspace) -> None:
    alone = "try:\n    bytearray(1 << 30)\nexcept MemoryError:\n    print('refused')"
    assert (await python(workspace, alone)).stdout == b"refused\n"
    together = f"""
import os, time
for _ in range(8):
    if not os.fork():
        block = bytearray({MEMORY_BYTES // 4})
        for at in range(0, len(block), 4096):
            block[at] = 1
        time.sleep(1000)
time.sleep(1000)
"""
    assert (await workspace.run("python", together)).limit == "memory"
    await alive(workspace)


HIDE = f"""
import ctypes, mmap, os, time
madvise = ctypes.CDLL(None).madvise
madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
DONTNEED = 4
for _ in range(8):
    if not os.fork():
        try:
            block = mmap.mmap(FILE, {MEMORY_BYTES // 4})
        except OSError:
            os.write(1, b"refused\\n")
            os._exit(1)
        place = ctypes.addressof(ctypes.c_char.from_buffer(block))
        for at in range(0, len(block), 1 << 20):
            ctypes.memset(place + at, 1, 1 << 20)
            madvise(place + at, 1 << 20, DONTNEED)
        time.sleep(1000)
for _ in range(8):
    os.wait()
"""


@pytest.mark.parametrize("file", ["-1", "os.open('/dev/zero', os.O_RDWR)"])
@pytest.mark.parametrize("grouped", [True, False])
async def test_memory_that_no_process_shows_is_counted_or_refused(grouped: bool, file: str) -> None:
    """The pages of a shared mapping are held by it, whoever drops them: 512 MiB here, under a limit of 256."""
    settings, place = settings_of("bubblewrap"), find_place()
    if grouped and place is None:
        pytest.skip("`systemd-run --user --scope -p Delegate=yes` runs tests in a control group that can be divided")
    workspace = await Bubblewrap(settings, place if grouped else None).open()
    result = await workspace.run("python", HIDE.replace("FILE", file))
    assert result.limit == "memory" if grouped else result.stdout == b"refused\n" * 8
    await alive(workspace)
    await workspace.close()


FILL = """
import os, socket, time
def pair():
    if not TCP:
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        return socket.create_connection(server.getsockname()), server.accept()[0]
kept = []
for _ in range(8):
    if not os.fork():
        while True:
            try:
                kept += pair()
            except OSError:
                time.sleep(1000)
            for end in kept[-2:]:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
                end.setblocking(False)
                try:
                    while end.send(bytes(1 << 16)):
                        pass
                except OSError:
                    pass
for _ in range(8):
    os.wait()
"""


@pytest.mark.parametrize("tcp", [True, False])
async def test_buffers_of_sockets_count_without_a_control_group(tcp: bool) -> None:
    workspace = await Bubblewrap(settings_of("bubblewrap")).open()
    assert (await workspace.run("python", FILL.replace("TCP", str(tcp)))).limit == "memory"
    await alive(workspace)
    await workspace.close()


async def test_memory_that_belongs_to_no_process_is_refused(workspace: Workspace) -> None:
    code = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
try:
    os.memfd_create("x")
    print("memfd_create")
except PermissionError:
    pass
for name, arguments in {"shmget": (0, 4096, 0o1600), "msgget": (0, 0o1600), "semget": (0, 1, 0o1600)}.items():
    if getattr(libc, name)(*arguments) >= 0 or ctypes.get_errno() != errno.EPERM:
        print(name)
"""
    assert (await python(workspace, code)).stdout == b""


async def test_processor_time_is_bounded(settings: SandboxConfig) -> None:
    workspace = await make_sandbox(msgspec.structs.replace(settings, cpu_s=1)).open()
    ignoring = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    for code in ("while True: pass", ignoring):
        assert (await workspace.run("python", code)).limit == "cpu"
    await workspace.close()


async def test_a_program_that_waits_forever_ends(workspace: Workspace) -> None:
    assert (await workspace.run("bash", "trap '' TERM INT; while :; do sleep 1; done", seconds=1)).limit == "seconds"
    await alive(workspace)


async def test_nothing_outside_is_written(workspace: Workspace) -> None:
    code = f"""
import os
for folder in ["/", "/usr", "/usr/bin", "/etc", "/dev", "/proc", "/lib", "/root", {os.path.dirname(sys.base_prefix)!r},
               {sys.base_prefix!r}, {os.path.dirname(os.__file__)!r}, "/home", "/var", "/run", "/mnt", "/sys"]:
    try:
        open(folder + "/x", "w")
        print("wrote", folder)
    except OSError:
        pass
for path in ["/inside.py", os.__file__, "/usr/bin/env"]:
    for attempt in (lambda: open(path, "r+"), lambda: os.unlink(path), lambda: os.chmod(path, 0o777)):
        try:
            attempt()
            print("changed", path)
        except OSError:
            pass
"""
    assert (await python(workspace, code)).stdout == b""
    assert (await workspace.run("bash", "mount -o remount,rw / || mount -t tmpfs x /usr || umount /proc/sys")).exit != 0


async def test_keys_and_environment_stay_outside(
    settings: SandboxConfig, sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = uuid.uuid4().hex
    (tmp_path / f"{token}.key").write_text(token)
    monkeypatch.setenv("SOME_API_KEY", token)
    workspace = await sandbox.open()
    result = await workspace.run("bash", f"env; cat {tmp_path}/*; find / -xdev -name '*{token}*'; cat /proc/*/environ")
    assert token.encode() not in result.stdout and b"API_KEY" not in result.stdout
    if settings.kind == "bubblewrap":  # a container has the image's
        result = await workspace.run(
            "bash", "ls /root/.[a-z]* /home /run /var /sys /opt /etc/passwd /etc/shadow | grep -v ^$"
        )
        allowed = {part.encode() for part in Path(sys.base_prefix).parts}  # the way to this Python may show
        assert {line.rstrip(b":").rpartition(b"/")[2] for line in result.stdout.splitlines()} <= allowed
    assert (await workspace.run("bash", "ls /proc/self/fd")).stdout.split() == [b"0", b"1", b"2", b"3"]  # ls opens one
    await workspace.close()


async def test_no_rights_are_gained(workspace: Workspace) -> None:
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for attempt in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0]), lambda: os.chroot("/"),
                lambda: os.mknod("disk", 0o60600, os.makedev(8, 0)), lambda: os.nice(-5)):
    try:
        attempt()
        print("did", attempt.__code__.co_names)
    except OSError:
        pass
for name, arguments in {"unshare": (0x10000000,), "setns": (0, 0), "mount": (b"x", b"/tmp", b"tmpfs", 0, 0)}.items():
    if getattr(libc, name)(*arguments) == 0:
        print("did", name)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(*(status[name].strip() for name in ("CapEff", "CapPrm", "CapBnd", "NoNewPrivs", "Seccomp")))
"""
    none = b"0" * 16
    assert (await python(workspace, code)).stdout.split() == [none, none, none, b"1", b"2"]
    user = (await workspace.run("bash", "id -u")).stdout
    copied = await workspace.run(
        "bash", "cp /bin/bash b && chmod 4755 b && ./b -p -c 'id -u'; unshare -Ur true; su -c id"
    )
    assert copied.stdout == user != b"0\n"


async def test_other_processes_cannot_be_traced(workspace: Workspace) -> None:
    code = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
PTRACE_ATTACH = 16
if libc.ptrace(PTRACE_ATTACH, 1, 0, 0) != -1 or ctypes.get_errno() != errno.EPERM:
    print("traced")
if libc.process_vm_readv(1, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != errno.EPERM:
    print("read")
"""
    assert (await python(workspace, code)).stdout == b""


def running(mark: str) -> list[int]:
    """The processes of this machine that have ``mark`` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and mark.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:  # it has ended
            continue
    return found


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110  the kernel tells nobody
            await asyncio.sleep(0.05)


async def test_daemons_die_with_their_program(sandbox: Sandbox) -> None:
    workspace = await sandbox.open()
    mark = f"10000.{uuid.uuid4().int % 10**9:09}"
    daemon = f"(trap '' HUP TERM; setsid setsid sleep {mark} < /dev/null > /dev/null 2>&1 &) &"
    await workspace.run("bash", f"{daemon} sleep 0.2")
    assert running(mark) == []
    waiting = asyncio.create_task(workspace.run("bash", f"{daemon} sleep 1000"))
    await until(lambda: running(mark))
    await workspace.close()
    assert running(mark) == []
    await asyncio.gather(waiting, return_exceptions=True)


OWNER = """
import asyncio, sys
import msgspec
from rl_async.configs.schema.reward import SandboxConfig
from rl_async.sandbox.kinds import make_sandbox

async def main():
    config = msgspec.json.decode(sys.argv[1], type=SandboxConfig)
    workspace = await make_sandbox(config).open()
    await workspace.put("file", b"content")
    await workspace.run("bash", f"(setsid sleep {sys.argv[2]} &); sleep 1000", seconds=1000)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_nothing_is_left_of_a_killed_owner(settings: SandboxConfig, number: signal.Signals) -> None:
    size, mark = (4 << 20) + 4096 * (uuid.uuid4().int % 10**6), f"10000.{uuid.uuid4().int % 10**9:09}"
    given = msgspec.json.encode(msgspec.structs.replace(settings, workspace_bytes=size, timeout_s=1000.0)).decode()
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", OWNER, given, mark)
    try:
        await until(lambda: len(running(mark)) > 1)  # the owner and its daemon
        assert len(running(str(size))) > 1  # the owner and its bwrap
        owner.send_signal(number)
        await owner.wait()
    finally:
        if owner.returncode is None:
            owner.kill()
    await until(lambda: not running(mark) and not running(str(size)))

    def cleared() -> bool:
        # Each opener looks for a place, and so removes groups of killed owners, once their processes are reaped, too.
        place = find_place()
        return place is None or not list(place.folder.glob(f"rl-async-{owner.pid}-*"))

    await until(cleared)
