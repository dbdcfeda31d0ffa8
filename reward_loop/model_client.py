"""Requests to models behind HTTP: judges, users, opponents, endpoints and reward models.

A ``Poster`` posts JSON with limits on concurrency and rate, a deadline, and retries after named errors. tenacity would
not shorten it: Retry-After, the rate limit before each attempt and the last failure in the error of the deadline would
need a wait function and two hooks, which are longer than the loop. aiolimiter would not replace ``RateLimit``: its
leaky bucket lets up to twice the count start within one period. API keys come from environment variables that the
config names, and are stored nowhere."""

import asyncio
import logging
import math
import os
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
import msgspec

from rl_async.concurrency import Overdue, within
from rl_async.configs.schema.rollout import ServedModelConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError
from rl_async.files import UNDECODABLE
from rl_async.reward_loop.api import ScorerFailed, ScorerUnreachable

log = logging.getLogger("rl_async.reward_loop")


def read_api_key(variable: str, key: str) -> str:
    """Read an API key from the environment; empty if no variable is named. Raises ConfigError, naming ``key``."""
    if not variable:
        return ""
    if not (value := os.environ.get(variable)):
        raise ConfigError(f"{key}: the environment has no {variable}; export it first")
    return value


def api_key_variables(config: RunConfig) -> list[str]:
    """List the variables that hold the keys of the outside servers that a run's workers ask."""
    speakers = (config.agent.user, *config.agent.opponents.values(), config.eval.endpoint)
    sections = (config.reward.judge, config.reward.model, *speakers)
    return [section.api_key_env for section in sections if section is not None and section.api_key_env]


def forget_api_keys(config: RunConfig) -> None:
    """Remove the keys from this process's environment once they are read, so that tools and scorers that run in
    processes of their own do not inherit them."""
    for variable in api_key_variables(config):
        os.environ.pop(variable, None)


MINUTE_S = 60.0


class RateLimit:
    """Allows at most ``count`` starts within any ``period_s`` seconds; a ``count`` of 0 means no limit."""

    def __init__(
        self,
        count: int,
        period_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._count, self._period_s, self._clock, self._sleep = count, period_s, clock, sleep
        self._started: deque[float] = deque(maxlen=count or 1)
        self._turn = asyncio.Lock()

    async def wait(self) -> None:
        """Wait until the next start is allowed, in order of arrival; at most one period per start ahead."""
        if not self._count:
            return
        async with self._turn:
            if len(self._started) == self._count:
                await self._sleep(max(0.0, self._started[0] + self._period_s - self._clock()))
            self._started.append(self._clock())


class Message(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None


class Choice(msgspec.Struct):
    message: Message
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    total_tokens: int = 0


class Completion(msgspec.Struct):
    """A chat completion with at least one choice."""

    choices: list[Choice]
    usage: Usage | None = None

    @property
    def tokens(self) -> int:
        """How many tokens the server counted, prompt included."""
        return self.usage.total_tokens if self.usage else 0


def read_completion(raw: bytes, url: str) -> Completion:
    """Decode the answer of ``url``. Raises ScorerFailed unless it is a completion with at least one choice."""
    try:
        completion = msgspec.json.decode(raw, type=Completion)
    except UNDECODABLE as error:
        raise ScorerFailed(f"{url} did not answer with a chat completion: {error}") from error
    if not completion.choices:
        raise ScorerFailed(f"{url} did not answer with a chat completion: it has no choices")
    return completion


CONNECT_S = 5.0
LONGEST_BACKOFF_S = 30.0
TOO_MANY = 429
# Errors quote so many characters of an answer.
SHOWN = 300
# The server could not be reached; the second tuple adds connections that were lost or cut off.
REFUSED = (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError)
RETRIED = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)


class _Retryable(Exception):
    """A failed attempt that is worth a retry.

    ``pause_s`` is the server's Retry-After. ``refused`` is set if the server could not be reached.
    """

    def __init__(self, reason: str, pause_s: float = 0.0, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.pause_s, self.refused = pause_s, refused


class Poster:
    """Posts to one ``url``. ``section`` is the config section whose keys its errors name.

    ``api_key`` is sent as a bearer token and struck out of every error, which may end up in the run folder. A server
    that never answered and refuses connections gets ``attempts_to_reach`` attempts, if that is fewer. ``tell`` is
    called with the first failure that is retried.
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
        attempts_to_reach: int | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.url = url
        self._attempts_to_reach, self._tell = attempts_to_reach or attempts, tell
        # Whether the server has answered, with any status.
        self._answered = False
        # When the server last gave what it was asked for, in monotonic seconds.
        self._served_at = -math.inf
        self._section, self._timeout_s, self._attempts, self._backoff_s = section, timeout_s, attempts, backoff_s
        self._slots = asyncio.Semaphore(max_concurrent)
        self._rate = RateLimit(per_minute, MINUTE_S)
        self._api_key = api_key
        self._session: aiohttp.ClientSession | None = None

    async def post(self, body: Any, headers: Mapping[str, str] | None = None) -> bytes:
        """Post ``body`` with ``headers`` and return the answer.

        The deadline starts once there is a free slot and the rate allows the first attempt; requests waited for have
        deadlines of their own. Raises ScorerFailed at the deadline, after the last attempt, and for errors that are not
        retried, which includes any status but 200, 429 and 5xx; at the first two ScorerUnreachable if the server has
        answered before, and nobody since.
        """
        data = msgspec.json.encode(body)
        failures = [""]
        async with self._slots:
            await self._rate.wait()
            began = time.monotonic()
            try:
                return await within(self._timeout_s, self._retry(data, headers or {}, failures, began))
            except Overdue:
                last = f"; before that: {failures[0]}" if failures[0] else ""
                limit = f"{self._timeout_s:g} s ({self._section}.timeout_s)"
                raise self._lost(f"{self.url} did not answer within {limit}{last}", began) from None

    async def _retry(self, data: bytes, headers: Mapping[str, str], failures: list[str], began: float) -> bytes:
        """Attempt until one succeeds; ``failures`` gets the last failure. The request began at ``began``."""
        attempt = 0
        while True:
            attempt += 1
            try:
                return await self._attempt(data, headers)
            except _Retryable as failure:
                failures[0] = str(failure)
                attempts = self._attempts
                if failure.refused and not self._answered:
                    attempts = min(attempts, self._attempts_to_reach)
                if attempt >= attempts:
                    raise self._lost(f"{failure} (attempt {attempt} of {attempts})", began) from None
                if self._tell is not None:
                    self._tell(f"{failure}; asking again")
                    self._tell = None
                pause_s = min(LONGEST_BACKOFF_S, self._backoff_s * 2 ** (attempt - 1))
                # Many conversations fail together; without jitter they would retry together.
                pause_s = max(failure.pause_s, pause_s * random.uniform(0.75, 1.25))
                log.info("%s; attempt %d of %d in %.1f s", failure, attempt + 1, attempts, pause_s)
                await asyncio.sleep(pause_s)
                await self._rate.wait()

    def _lost(self, why: str, began: float) -> ScorerFailed:
        """Return the error of a request. If others were answered since it began, the fault is its own."""
        return ScorerUnreachable(why) if -math.inf < self._served_at < began else ScorerFailed(why)

    async def _attempt(self, data: bytes, more: Mapping[str, str]) -> bytes:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                connector=aiohttp.TCPConnector(limit=0),
            )
        headers = {"Content-Type": "application/json", **more}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        try:
            # A redirect is not followed: it would carry conversations to a server that nobody configured.
            async with self._session.post(self.url, data=data, headers=headers, allow_redirects=False) as response:
                self._answered = True
                raw = await response.read()
        except RETRIED as error:
            text = self._without_key(f"{self.url}: {type(error).__name__}: {error}")
            raise _Retryable(text, refused=isinstance(error, REFUSED)) from error
        except aiohttp.ClientError as error:
            raise ScorerFailed(self._without_key(f"{self.url}: {type(error).__name__}: {error}")) from error
        if response.status == 200:
            self._served_at = time.monotonic()
            return raw
        shown = self._without_key(raw.decode(errors="replace"))[:SHOWN]
        text = f"{self.url} answered {response.status}: {shown}"
        if response.status == TOO_MANY or response.status >= 500:
            # Retry-After may also be a date; the backoff applies then.
            after = response.headers.get("Retry-After", "")
            raise _Retryable(text, float(after) if after.isdecimal() else 0.0)
        raise ScorerFailed(text)

    def _without_key(self, text: str) -> str:
        return text.replace(self._api_key, "***") if self._api_key else text

    async def close(self) -> None:
        """Close the connections to the server."""
        if self._session is not None:
            await self._session.close()
            self._session = None


def poster_of(
    config: ServedModelConfig,
    url: str,
    section: str,
    api_key: str,
    *,
    attempts_to_reach: int | None = None,
    tell: Callable[[str], None] | None = None,
) -> Poster:
    """Return the poster of chat requests to the model behind the base URL ``url``."""
    return Poster(
        f"{url.rstrip('/')}/chat/completions",
        section=section,
        timeout_s=config.timeout_s,
        attempts=config.attempts,
        backoff_s=config.backoff_s,
        max_concurrent=config.max_concurrent,
        api_key=api_key,
        attempts_to_reach=attempts_to_reach,
        tell=tell,
    )
