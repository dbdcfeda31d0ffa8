"""The HTTP side of engine clients, whatever their dialect: one session, and every failure as one of our two errors."""

import asyncio
from typing import Any

import aiohttp
import msgspec

from rl_async.errors import EngineLost, EngineRejected

KEEP_ALIVE_S = 4.0  # servers hang up on idle connections after 5 s; a request that meets that would be lost
HEALTH_S = 5.0


class StaleConnection(EngineLost):
    """The connection broke before a byte of the answer came."""


class EngineHttp:
    """Requests to one engine at ``url``. ``timeout_s`` bounds each; a caller with a shorter deadline cancels it."""

    def __init__(self, url: str, timeout_s: float | None) -> None:
        self.url = url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=5.0)
        self._session: aiohttp.ClientSession | None = None

    async def call(
        self, method: str, path: str, body: Any = None, *, params: Any = None, headers: dict[str, str] | None = None
    ) -> bytes:
        """The answer's body; ``body`` is sent as JSON.

        Raises EngineRejected for 4xx answers but 409, EngineLost for everything else that is not 200.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=self._timeout, connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            )
        data = None if body is None else msgspec.json.encode(body)
        # vLLM hangs up after it answered 500, which a next request on the same connection would learn too late.
        sent = {"Content-Type": "application/json", "Connection": "close", **(headers or {})}
        try:
            async with self._session.request(
                method, self.url + path, data=data, params=params, headers=sent
            ) as response:
                raw = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            connected = not isinstance(error, aiohttp.ClientConnectorError)
            broken = isinstance(error, (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError))
            kind = StaleConnection if connected and broken else EngineLost
            raise kind(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        if response.status == 200:
            return raw
        text = f"{self.url}{path} answered {response.status}: {raw[:500].decode(errors='replace')}"
        if 400 <= response.status < 500 and response.status != 409:
            raise EngineRejected(text)
        raise EngineLost(text)

    async def sample(self, path: str, body: Any, headers: dict[str, str] | None = None) -> bytes:
        """As ``call`` with POST, on a connection that is kept. If the server had closed it already it is asked once
        more: sampling changes nothing."""
        try:
            return await self.call("POST", path, body, headers={**(headers or {}), "Connection": "keep-alive"})
        except StaleConnection:
            return await self.call("POST", path, body, headers=headers)

    def decode(self, raw: bytes, kind: Any) -> Any:
        """``raw`` as the struct ``kind``. Raises EngineLost if it is something else."""
        try:
            return msgspec.json.decode(raw, type=kind)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise EngineLost(f"{self.url} answered what is not {kind.__name__.strip('_')}: {error}") from error

    async def healthy(self) -> bool:
        """Whether ``/health`` answers 200 within 5 s."""
        try:
            async with asyncio.timeout(HEALTH_S):
                await self.call("GET", "/health")
        except (EngineLost, EngineRejected, TimeoutError):
            return False
        return True

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None
