"""The embedded engine with a fault in its HTTP server."""

from typing import Any
from unittest.mock import patch

from rl_async.rollout_server import __main__ as engine
from rl_async.rollout_server.embedded.server import Server
from tests.chaos.faults import Faulty


class FaultyServer(Server):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.app.add_middleware(Faulty)


if __name__ == "__main__":
    with patch.object(engine, "Server", FaultyServer):
        engine.main()
