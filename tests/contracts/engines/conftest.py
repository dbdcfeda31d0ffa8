"""Clients of a module's engine, which are closed also when their test fails: else another test is blamed for them."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, Protocol

import pytest

from rl_async.rollout_server.vllm.client import VllmEngine
from tests.contracts.engines.engine_peers import Peer


class Connect(Protocol):
    """Makes a client with the run's token; settings are those of ``VllmEngine``."""

    def __call__(self, **settings: Any) -> VllmEngine: ...


@pytest.fixture
async def connect(peer: Peer) -> AsyncIterator[Connect]:
    """Make clients of ``peer``, and close them with the test."""
    async with AsyncExitStack() as closing:

        def make(**settings: Any) -> VllmEngine:
            client = peer.client(**settings)
            closing.push_async_callback(client.close)
            return client

        yield make
