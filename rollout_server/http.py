"""HTTP requests for engine clients of any dialect: one session, and EngineLost or EngineRejected for every failure."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from rl_async.errors import EngineError, EngineLost, EngineRejected, TrainerReplaced
from rl_async.files import UNDECODABLE
from rl_async.process.http_auth import bearer
from rl_async.rollout_server.api import LINEAGE_HEADER, PROCESS_HEADER, REPLACED

# Servers close idle connections after 5 s, and a request sent at that moment would be lost.
KEEP_ALIVE_S = 4.0
HEALTH_S = 5.0
# At most this many characters of an engine's message are shown.
SHOWN = 500
FAILURES = (aiohttp.ClientError, TimeoutError, OSError)


class EngineHttp:
    """Requests to one engine at ``url``, with an optional ``token``, which all requests but health probes need.

    ``timeout_s`` bounds each request; a caller with a shorter deadline cancels it.
    """

    def __init__(self, url: str, timeout_s: float | None, lineage: int | None = None, *, token: str = "") -> None:
        self.url = url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=5.0)
        # vLLM closes the connection after a 500, which the next request on it would notice too late.
        self._headers = {"Content-Type": "application/json", "Connection": "close", **bearer(token)}
        if lineage is not None:
            self._headers[LINEAGE_HEADER] = str(lineage)
        self._session: aiohttp.ClientSession | None = None

    async def call(
        self, method: str, path: str, body: Any = None, *, params: Any = None, headers: dict[str, str] | None = None
    ) -> bytes:
        """Send ``body`` as JSON and return the body of the response.

        Raises EngineRejected for 4xx answers other than 409, EngineLost for everything else that is not 200.
        """
        async with await self._open(method, path, body, params=params, headers=headers) as response:
            return await self._read(path, response)

    async def events(self, path: str, body: Any, headers: dict[str, str] | None = None) -> AsyncIterator[bytes]:
        """POST ``body`` and yield the JSON of each server-sent event, on a connection that the next request uses again.

        If the server has already closed the connection, the request is sent again on a new one, which is safe because
        sampling changes nothing. Raises as ``call`` does.
        """
        try:
            opened = await self._open("POST", path, body, headers={**(headers or {}), "Connection": "keep-alive"})
        except EngineLost as error:
            if not _connection_dropped(error.__cause__):
                raise
            opened = await self._open("POST", path, body, headers=headers)
        async with opened as response:
            try:
                # The connection can only be used again if the response is read to its end.
                rest = b""
                async for data in response.content.iter_any():
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        # The other lines are empty, or mark the end.
                        if line.startswith(b"data: {"):
                            yield line.removeprefix(b"data: ")
            except FAILURES as error:
                raise self._lost(path, error) from error

    def error_for(self, path: str, status: int, message: str) -> EngineError | TrainerReplaced:
        """Return the error for a response with this status.

        For 409 (weights too old) it is EngineLost, since another engine may be able to serve the request, and for 412
        TrainerReplaced.
        """
        told = f"{self.url}{path} answered {status}: {message[:SHOWN]}"
        if status == REPLACED:
            return TrainerReplaced(told)
        error = (EngineRejected if 400 <= status < 500 and status != 409 else EngineLost)(told)
        error.status = status
        return error

    async def _open(
        self, method: str, path: str, body: Any = None, *, params: Any = None, headers: dict[str, str] | None = None
    ) -> aiohttp.ClientResponse:
        """Return a response with status 200 and an unread body; the caller reads and closes it."""
        response = await self._send(method, path, body, params, headers)
        if response.status == 200:
            return response
        async with response:
            raw = await self._read(path, response)
        raise self.error_for(path, response.status, raw.decode(errors="replace"))

    async def _send(
        self, method: str, path: str, body: Any, params: Any, headers: dict[str, str] | None
    ) -> aiohttp.ClientResponse:
        """Return a response of any status with an unread body. Raises EngineLost if none arrives."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=self._timeout, connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            )
        data = None if body is None else msgspec.json.encode(body)
        sent = {**self._headers, **(headers or {})}
        try:
            return await self._session.request(method, self.url + path, data=data, params=params, headers=sent)
        except FAILURES as error:
            raise self._lost(path, error) from error

    async def _read(self, path: str, response: aiohttp.ClientResponse) -> bytes:
        try:
            return await response.read()
        except FAILURES as error:
            raise self._lost(path, error) from error

    def _lost(self, path: str, error: Exception) -> EngineLost:
        return EngineLost(f"{self.url}{path}: {type(error).__name__}: {error}")

    def decode(self, raw: bytes, kind: Any) -> Any:
        """Decode JSON as the struct ``kind``. Raises EngineLost if it does not fit."""
        try:
            return msgspec.json.decode(raw, type=kind)
        except UNDECODABLE as error:
            raise EngineLost(f"{self.url}: the answer is not a valid {kind.__name__.strip('_')}: {error}") from error

    async def healthy(self) -> bool:
        """Return whether ``/health`` answers 200 within HEALTH_S seconds."""
        try:
            async with asyncio.timeout(HEALTH_S):
                await self.call("GET", "/health")
        except (EngineLost, EngineRejected, TimeoutError):
            return False
        return True

    async def needs_token(self) -> bool:
        """Return whether the server refuses a request without a token. This client must not have one.

        Raises EngineLost if the server does not answer within HEALTH_S seconds.
        """
        try:
            async with asyncio.timeout(HEALTH_S), await self._send("GET", "/", None, None, None) as response:
                return response.status == 401
        except TimeoutError as error:
            raise self._lost("/", error) from error

    async def process(self) -> str:
        """Return the name of the process that answers at this moment, which only engines of this project give.

        Raises EngineLost if the server does not answer.
        """
        async with await self._send("GET", "/", None, None, None) as response:
            return response.headers.get(PROCESS_HEADER, "")

    async def close(self) -> None:
        """Close the connections; a later request opens new ones."""
        if self._session is not None:
            await self._session.close()
            self._session = None


def _connection_dropped(error: BaseException | None) -> bool:
    """Return whether an established connection broke before the head of the response arrived."""
    broke = isinstance(error, (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError))
    return broke and not isinstance(error, aiohttp.ClientConnectorError)
