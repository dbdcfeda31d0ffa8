"""``rl-async view``: serve the page until it is interrupted."""

import asyncio
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from rl_async.launcher.view.access import OPEN, PageAccess, SecurityHeaders
from rl_async.launcher.view.runs import ViewedRuns
from rl_async.launcher.view.server import ViewServer
from rl_async.process.http_server import server_of
from rl_async.process.role import bind, heeded, watch_lifeline

HOST = "127.0.0.1"


def serve(places: Sequence[Path], port: int) -> None:
    """Serve the runs in ``places`` on the loopback interface; port 0 takes a free one.

    Prints the address to open. Raises UserError for a place without runs, and if the port is taken.
    """
    watch_lifeline()
    runs = ViewedRuns(places)
    listener = bind(HOST, port, "--port")
    listener.listen()
    access = PageAccess(secrets.token_urlsafe(32), listener.getsockname()[1])
    print(f"http://{HOST}:{listener.getsockname()[1]}{OPEN}{access.token}", flush=True)
    print("only this machine can open it; Ctrl-C ends it", file=sys.stderr)

    async def run() -> None:
        server = ViewServer(runs, access)
        http, ended_by = server_of(SecurityHeaders(server.application()), access), list[int]()

        def hang_up() -> None:
            ended_by.append(signal.SIGHUP)
            http.should_exit = True

        # Uvicorn does so for SIGINT and SIGTERM; an exception in a handler would be taken for one of a request.
        for number in heeded(signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, hang_up)
        try:
            await http.serve(sockets=[listener])
        finally:
            server.close()
        if ended_by:
            raise SystemExit(128 + signal.SIGHUP)

    for number in heeded(signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    asyncio.run(run())


def _end(number: int, frame: FrameType | None) -> None:
    """Leave through ``finally``, which a signal alone would not."""
    raise SystemExit(128 + number)
