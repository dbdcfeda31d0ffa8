"""Posts JSON to a server outside: places, rate, deadline, and another attempt after named errors."""

import asyncio
import logging
import random
from typing import Any

import aiohttp
import msgspec

from rl_async.reward_loop.api import ScorerFailed
from rl_async.reward_loop.limits import MINUTE_S, RateLimit

CONNECT_S = 5.0
LONGEST_BACKOFF_S = 30.0
TOO_MANY = 429
SHOWN = 300  # characters of an answer that go into an error
AGAIN = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)  # the connection was refused, lost or cut off

log = logging.getLogger("rl_async.reward_loop")


class _TryAgain(Exception):
    """This attempt failed in a way that may pass. ``pause_s``: what the server asked for (Retry-After)."""

    def __init__(self, reason: str, pause_s: float = 0.0) -> None:
        super().__init__(reason)
        self.pause_s = pause_s


class Poster:
    """Posts to one ``url``. ``section`` is the config section whose keys its errors name.

    ``api_key`` is sent as a bearer token and struck out of every error, which may end up in the run folder.
    """

    def __init__(
        self,
        url: str,
        *,
        section: str,
        timeout_s: float,
        attempts: int,
        backoff_s: float,
        max_concurrent: int,
        per_minute: int = 0,
        api_key: str = "",
    ) -> None:
        self.url = url
        self._section, self._timeout_s, self._attempts, self._backoff_s = section, timeout_s, attempts, backoff_s
        self._places = asyncio.Semaphore(max_concurrent)
        self._rate = RateLimit(per_minute, MINUTE_S)
        self._api_key = api_key
        self._session: aiohttp.ClientSession | None = None

    async def post(self, body: Any) -> bytes:
        """The answer to ``body``. The deadline counts from when there is a place and the rate allows the first attempt.

        Waits for both as long as the requests before it take, which have deadlines of their own. Raises ScorerFailed
        for any other status than 200, for errors that attempts do not mend, and at the deadline.
        """
        data = msgspec.json.encode(body)
        said = [""]
        async with self._places:
            await self._rate.wait()
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._persist(data, said)
            except TimeoutError:
                last = f"; before that: {said[0]}" if said[0] else ""
                limit = f"{self._timeout_s:g} s ({self._section}.timeout_s)"
                raise ScorerFailed(f"{self.url} did not answer within {limit}{last}") from None

    async def _persist(self, data: bytes, said: list[str]) -> bytes:
        """Attempt after attempt; ``said`` holds the last one's failure."""
        for attempt in range(1, self._attempts + 1):
            try:
                return await self._attempt(data)
            except _TryAgain as failure:
                said[0] = str(failure)
                if attempt == self._attempts:
                    break
                pause_s = min(LONGEST_BACKOFF_S, self._backoff_s * 2 ** (attempt - 1))
                # Many conversations fail together; were their pauses equal, they would come back together.
                pause_s = max(failure.pause_s, pause_s * random.uniform(0.75, 1.25))
                log.info("%s; attempt %d of %d in %.1f s", failure, attempt + 1, self._attempts, pause_s)
                await asyncio.sleep(pause_s)
                await self._rate.wait()
        raise ScorerFailed(f"{said[0]} (attempt {self._attempts} of {self._attempts})")

    async def _attempt(self, data: bytes) -> bytes:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                connector=aiohttp.TCPConnector(limit=0),
            )
        headers = {"Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        try:
            # A redirect is not followed: it would carry conversations to a server that nobody configured.
            async with self._session.post(self.url, data=data, headers=headers, allow_redirects=False) as response:
                raw = await response.read()
        except AGAIN as error:
            raise _TryAgain(self._without_key(f"{self.url}: {type(error).__name__}: {error}")) from error
        except aiohttp.ClientError as error:
            raise ScorerFailed(self._without_key(f"{self.url}: {type(error).__name__}: {error}")) from error
        if response.status == 200:
            return raw
        shown = self._without_key(raw.decode(errors="replace"))[:SHOWN]
        text = f"{self.url} answered {response.status}: {shown}"
        if response.status == TOO_MANY or response.status >= 500:
            raise _TryAgain(text, _seconds(response.headers.get("Retry-After", "")))
        raise ScorerFailed(text)

    def _without_key(self, text: str) -> str:
        return text.replace(self._api_key, "***") if self._api_key else text

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


def _seconds(retry_after: str) -> float:
    """Retry-After in its form of whole seconds; its other form, a date, is left to the backoff."""
    return float(retry_after) if retry_after.isdecimal() else 0.0
