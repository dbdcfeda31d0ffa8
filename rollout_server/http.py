"""The HTTP side of engine clients, whatever their dialect: one session, and every failure as one of our two errors."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from rl_async.errors import EngineError, EngineLost, EngineRejected

KEEP_ALIVE_S = 4.0  # servers hang up on idle connections after 5 s; a request that meets that would be lost
HEALTH_S = 5.0
FAILURES = (aiohttp.ClientError, TimeoutError, OSError)


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
        async with await self._open(method, path, body, params=params, headers=headers) as response:
            return await self._whole(path, response)

    async def sample(self, path: str, body: Any, headers: dict[str, str] | None = None) -> AsyncIterator[bytes]:
        """As ``call`` with POST, piece by piece, on a connection that is kept.

        If the server had closed it already it is asked once more, on a new one: sampling changes nothing.
        """
        try:
            opened = await self._open("POST", path, body, headers={**(headers or {}), "Connection": "keep-alive"})
        except EngineLost as error:
            if not _broke(error.__cause__):
                raise
            opened = await self._open("POST", path, body, headers=headers)
        async with opened as response:
            try:
                async for data in response.content.iter_any():  # to its end, else the connection is not used again
                    yield data
            except FAILURES as error:
                raise self._lost(path, error) from error

    def failure(self, path: str, status: int, message: str) -> EngineError:
        """What an answer with this status means; 409: too old, another engine may do."""
        refused = 400 <= status < 500 and status != 409
        return (EngineRejected if refused else EngineLost)(f"{self.url}{path} answered {status}: {message}")

    async def _open(
        self, method: str, path: str, body: Any = None, *, params: Any = None, headers: dict[str, str] | None = None
    ) -> aiohttp.ClientResponse:
        """The answer's head, if its status is 200; the caller reads and closes it."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=self._timeout, connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            )
        data = None if body is None else msgspec.json.encode(body)
        # vLLM hangs up after it answered 500, which a next request on the same connection would learn too late.
        sent = {"Content-Type": "application/json", "Connection": "close", **(headers or {})}
        try:
            response = await self._session.request(method, self.url + path, data=data, params=params, headers=sent)
        except FAILURES as error:
            raise self._lost(path, error) from error
        if response.status == 200:
            return response
        async with response:
            raw = await self._whole(path, response)
        raise self.failure(path, response.status, raw[:500].decode(errors="replace"))

    async def _whole(self, path: str, response: aiohttp.ClientResponse) -> bytes:
        try:
            return await response.read()
        except FAILURES as error:
            raise self._lost(path, error) from error

    def _lost(self, path: str, error: Exception) -> EngineLost:
        return EngineLost(f"{self.url}{path}: {type(error).__name__}: {error}")

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


def _broke(error: BaseException | None) -> bool:
    """Whether a connection that was there broke before the answer's head came."""
    broke = isinstance(error, (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError))
    return broke and not isinstance(error, aiohttp.ClientConnectorError)
