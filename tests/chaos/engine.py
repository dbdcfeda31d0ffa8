"""The embedded engine with a fault in its HTTP server."""

import sys
from typing import Any
from unittest.mock import patch

from rl_async.rollout_server.__main__ import main
from rl_async.rollout_server.embedded import server
from rl_async.rollout_server.embedded.server import EngineServer
from tests.chaos.faults import Faulty


class FaultyServer(EngineServer):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.app.add_middleware(Faulty)


if __name__ == "__main__":
    with patch.object(server, "EngineServer", FaultyServer):
        sys.exit(main())
