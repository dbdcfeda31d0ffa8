"""uvicorn on a thread of this process."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import uvicorn

from rl_async.process.role import bind

START_S = 60.0


class Served:
    """uvicorn on a thread. ``make`` builds the server on its event loop; ``beside`` runs there too."""

    def __init__(self, make: Callable[[], tuple[uvicorn.Server, Any]]) -> None:
        self._make = make
        self._listener = bind("127.0.0.1", 0, "port")
        self.port = int(self._listener.getsockname()[1])
        self.crashed: list[BaseException] = []
        self._ready = threading.Event()
        self._server: uvicorn.Server | None = None
        self._thread = threading.Thread(target=self._main, name="served")
        self._thread.start()
        if not self._ready.wait(START_S):
            raise RuntimeError("the server did not start")
        if self.crashed:
            raise self.crashed[0]

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self.crashed.append(error)
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._server, beside = self._make()
        self._listener.listen(1024)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(beside()) if beside else None
            self._ready.set()
            await group.create_task(self._server.serve(sockets=[self._listener]))
            if task is not None:
                task.cancel()

    def stop(self) -> None:
        """End it. Raises what it died of."""
        if self._server is not None:
            self._server.should_exit = True
        self._thread.join(START_S)
        if self._thread.is_alive():
            raise RuntimeError("the server hangs")
        if self.crashed:
            raise self.crashed[0]
