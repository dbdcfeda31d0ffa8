"""Tiny stand-ins for the roles, as processes: ``python roles.py KIND FOLDER [PORT] [--resume]``.

Each appends its pid to ``FOLDER/KIND.pids``. How it behaves is said by a file ``FOLDER/KIND.do``: lines of
``work``, ``exit CODE``, ``mute``, ``stubborn``, ``grandchild``, or for an engine ``once`` (it dies after its first
answer), ``stuck`` (it only answers probes) or ``open`` (it asks for no token), one for each start; the last one
counts for all that follow.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rl_async.process.role import watch_lifeline

if TYPE_CHECKING:  # it imports NumPy, which most of these processes do not need
    from rl_async.messages import Task

ADDRESS = "tcp://127.0.0.1:{}"


class NoTasks:
    """The queue of these tests hands out nothing."""

    def next(self, step: int = 0) -> "Task":
        from rl_async.messages import Task

        return Task(task_id="t", data_source="fake", prompt=[], ground_truth="")

    def cursor(self) -> bytes:
        return b""

    def seek(self, cursor: bytes) -> None:
        """There is only one place."""


def queue(folder: Path, port: int) -> None:
    import zmq

    from rl_async.transfer_queue.admission import QueueSettings
    from rl_async.transfer_queue.journal import SqliteJournal
    from rl_async.transfer_queue.server import QueueServer, bind, serve_requests
    from rl_async.transfer_queue.store import Feed, Store

    journal = SqliteJournal(folder, "fake")
    feed = Feed(journal.append)
    store = Store(QueueSettings(steps=1, batch_groups=1, group_size=2), NoTasks(), [], feed)
    recovered = journal.recover()
    store.recover(recovered.dump, recovered.transitions, 0.0)
    with zmq.Context() as context, bind(context, ADDRESS.format(port)) as socket:
        serve_requests(socket, QueueServer(store, journal, feed), journal.flush, lambda: False)


def answer_probes(port: int, what: list[str]) -> None:
    """Answer a health probe with 200, and any other GET as without a token."""
    import http.server

    class Healthy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/health" and "once" in what:
                os._exit(7)
            if self.path != "/health" and "stuck" in what:
                time.sleep(600)
            self.send_response(200 if self.path == "/health" or "open" in what else 401)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    http.server.ThreadingHTTPServer(("127.0.0.1", port), Healthy).serve_forever()


def trainer(folder: Path, port: int, resumed: bool) -> None:
    """Trains until ``FOLDER/go`` exists."""
    from rl_async.transfer_queue.client import SyncQueueClient

    with (folder / "trainer.resumed").open("a") as file:
        file.write(f"{resumed}\n")
    while not (folder / "go").exists():
        time.sleep(0.02)
    if (folder / "trainer.asked").exists():
        (folder / "trainer.saved").touch()
        sys.exit(143)
    with SyncQueueClient(ADDRESS.format(port), role="trainer", name="trainer") as client:
        client.finish()


def behaviour(folder: Path, kind: str, starts: int) -> list[str]:
    file = folder / f"{kind}.do"
    lines = file.read_text().splitlines() if file.exists() else ["work"]
    return lines[min(starts, len(lines)) - 1].split()


def main() -> None:
    watch_lifeline()
    kind, folder = sys.argv[1], Path(sys.argv[2])
    port = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    pids = folder / f"{kind}.pids"
    starts = len(pids.read_text().splitlines()) if pids.exists() else 0
    what = behaviour(folder, kind, starts + 1)
    # Not sys.exit(): Python drops what a handler raises in the callback of a weak reference, as in imports.
    signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in what else lambda *_: os._exit(0))
    if "saves" in what:  # a trainer in a step that ends when FOLDER/go exists
        signal.signal(signal.SIGTERM, lambda *_: (folder / "trainer.asked").touch())
    with pids.open("a") as file:  # whoever reads it may send signals from now on
        file.write(f"{os.getpid()}\n")
    print(f"{kind} has started", flush=True)
    if "grandchild" in what:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with (folder / "grandchild.pids").open("a") as file:
            file.write(f"{child.pid}\n")
    if kind == "queue":
        with (folder / "queue.relaunched").open("a") as file:
            file.write(f"{'--relaunched' in sys.argv}\n")
    if "exit" in what:
        print("error: the data is wrong" if what[-1] == "2" else "something broke", file=sys.stderr, flush=True)
        sys.exit(int(what[-1]))
    if "mute" in what:
        time.sleep(600)
    elif kind == "queue":
        queue(folder, port)
    elif kind in ("engine", "reward-model"):
        answer_probes(port, what)
    elif kind == "trainer":
        trainer(folder, port, "--resume" in sys.argv)
    else:
        time.sleep(600)


if __name__ == "__main__":
    main()
