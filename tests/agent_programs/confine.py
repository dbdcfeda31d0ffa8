"""Runs an agent program where it can write to its workspace only, and reach no port but the gateway's.

    python confine.py BASE_URL CLIENTS -- PROGRAM...

Bubblewrap gives it a network of its own, in which a forwarder listens where the gateway does outside. The user's home
is an empty folder of the episode, and HIDDEN folders are empty, too, but for CLIENTS, the folder of the installed
programs, this repository and the interpreters that they need. Any other file that the user may read stays readable, and
Unix sockets in other folders can be reached.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
READABLE = Path(__file__).parents[2]  # also where it lies under a hidden folder
HIDDEN = tuple(Path(path) for path in ("/tmp", "/run", "/var/run", "/var/tmp"))


def main() -> int:
    """Run the program confined; its exit code."""
    if sys.argv[1] == "inside":
        return inside(int(sys.argv[2]), sys.argv[3], sys.argv[4:])
    url, clients, _, *program = sys.argv[1:]
    port, folder = urlsplit(url).port, Path.cwd().parent  # which `rl-async play` made for this episode
    home = folder / "home"
    socket = str(folder / "gateway")

    def outward() -> Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        return asyncio.open_connection("127.0.0.1", port)

    in_background(lambda serve: asyncio.start_unix_server(serve, socket), outward)
    hidden = [path for path in HIDDEN if path.is_dir() and not path.is_symlink()]
    kept = dict.fromkeys((clients, str(READABLE), *interpreters(clients, [*hidden, Path.home()])))
    readable = [word for path in kept for word in ("--ro-bind", path, path)]
    command = [
        *("bwrap", "--unshare-all", "--die-with-parent", "--new-session"),
        *("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"),
        *(word for path in hidden for word in ("--tmpfs", str(path))),
        *("--bind", str(home), str(Path.home())),  # Codex's own sandbox refuses a home in /tmp
        *readable,
        *("--bind", str(folder), str(folder), "--chdir", str(Path.cwd()), "--"),
        *(sys.executable, "-I", __file__, "inside", str(port), socket, *program),
    ]
    return subprocess.run(command).returncode


def interpreters(clients: str, hidden: Sequence[Path]) -> list[str]:
    """Return the folders below hidden ones, outside READABLE and ``clients``, that hold Python and Node."""
    named = (sys.executable, os.path.join(clients, "bin", "python"), shutil.which("python3"), shutil.which("node"))
    begun = [Path(path) for path in named if path is not None and os.path.exists(path)]
    prefixes = [
        prefix
        for path in begun
        for prefix in (path.parents[1], path.parents[1].resolve(), path.resolve().parents[1])
        if not {READABLE, Path(clients)} & set(prefix.parents)  # a link in them cannot be mounted over
    ]
    return [str(prefix) for prefix in prefixes if set(hidden) & set(prefix.parents)]


def inside(port: int, socket: str, program: list[str]) -> int:
    """Forward from the gateway's port to ``socket`` while the program runs; its exit code."""

    def outward() -> Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        return asyncio.open_unix_connection(socket)

    in_background(lambda serve: asyncio.start_server(serve, "127.0.0.1", port), outward)
    return subprocess.run(program).returncode


def in_background(listen: Callable[..., Awaitable[asyncio.Server]], connect: Connect) -> None:
    """Forward connections from a thread for as long as the process lives; returns when it listens."""
    listening = threading.Event()

    async def run() -> None:
        server = await listen(lambda reader, writer: forward(reader, writer, connect))
        listening.set()
        await server.serve_forever()

    threading.Thread(target=lambda: asyncio.run(run()), daemon=True).start()
    if not listening.wait(30):
        sys.exit("confine: cannot listen")


async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connect: Connect) -> None:
    """Copy both ways until both ends have closed."""
    try:
        far_reader, far_writer = await connect()
    except OSError:
        writer.close()
        return
    await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
        writer.write_eof()
    except OSError:  # the other end hung up
        writer.close()


if __name__ == "__main__":
    sys.exit(main())
