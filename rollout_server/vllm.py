"""Client of one engine that speaks vLLM's HTTP dialect: vLLM itself, or the embedded engine.

Routes under /inference need vLLM's ``--enable-scale-out``, the control routes its development mode; start it with
``--logprobs-mode processed_logprobs``, so that log-probabilities are those of the sampling distribution.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

import aiohttp
import msgspec

from rl_async.errors import EngineLost, EngineRejected
from rl_async.messages import Version, VersionRun
from rl_async.rollout_server.api import GenerateRequest, GenerateResult, PauseMode
from rl_async.weight_sync.protocol import FinishBody, InitBody, InitInfo, UpdateBody, UpdateInfo

MIN_VERSION_HEADER = "X-Min-Weight-Version"
SLEEP_STATE = "vllm:engine_sleep_state"
GENERATE = "/inference/v1/generate"
KEEP_ALIVE_S = 4.0  # servers hang up on idle connections after 5 s; a request that meets that would be lost
REQUEST_PREFIX = "generate-tokens-"  # vLLM puts it before the ids of this route, and aborts only by the full id


class StaleConnection(EngineLost):
    """The connection broke before a byte of the answer came."""


class _SamplingBody(msgspec.Struct):
    """Every sampling key that is ever sent, each one explicitly: vLLM ignores unknown keys without a word, and fills in
    missing ones from the model's generation config."""

    max_tokens: int
    temperature: float
    logprobs: int
    stop_token_ids: list[int]
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    ignore_eos: bool = True  # whoever asks says where to stop, by stop_token_ids


class _GenerateBody(msgspec.Struct):
    request_id: str
    token_ids: list[int]
    sampling_params: _SamplingBody
    stream: bool = False


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob]


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: Literal["stop", "length", "abort"]
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class _WeightInfo(msgspec.Struct):
    weight_version: str | None = None


class _Checksums(msgspec.Struct):
    checksums: dict[str, str]


class VllmEngine:
    """One engine at ``url``. Methods raise EngineRejected for 4xx answers, EngineLost for everything that fails.

    ``timeout_s`` bounds every call; a caller with a shorter deadline cancels it.
    """

    def __init__(self, url: str, timeout_s: float | None = 600.0) -> None:
        self.url = url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=5.0)
        self._session: aiohttp.ClientSession | None = None

    async def generate(self, request: GenerateRequest, *, session: str = "") -> GenerateResult:
        """Sample once. Raises EngineLost also when the engine is older than ``request.min_version`` (409)."""
        sampling = request.sampling
        body = _GenerateBody(
            request_id=request.request_id,
            token_ids=request.token_ids,
            sampling_params=_SamplingBody(
                max_tokens=request.max_tokens,
                temperature=sampling.temperature,
                logprobs=0,  # the sampled token's only
                stop_token_ids=request.stop_token_ids,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                seed=request.seed,
            ),
        )
        headers = {MIN_VERSION_HEADER: str(request.min_version)}
        try:
            raw = await self._call("POST", GENERATE, body, headers={**headers, "Connection": "keep-alive"})
        except StaleConnection:  # the server had closed it already; sampling changes nothing, so it may be asked again
            raw = await self._call("POST", GENERATE, body, headers=headers)
        choices = self._decode(raw, _Answer).choices
        if len(choices) != 1:
            raise EngineRejected(f"{self.url} answered with {len(choices)} choices, not one")
        choice = choices[0]
        if choice.logprobs is None or len(choice.logprobs.content) != len(choice.token_ids):
            raise EngineRejected(f"{self.url} answered without one log-probability per sampled token")
        versions = [VersionRun(self._version(s.version), s.start, s.end) for s in choice.weight_versions or []]
        if [run.start for run in versions] + [len(choice.token_ids)] != [0] + [run.end for run in versions]:
            raise EngineRejected(f"{self.url} answered without the weight version of every token")
        if versions and versions[0].version < request.min_version:  # vLLM has no such gate, so it may have sampled
            raise EngineLost(f"{self.url} sampled with {versions[0].version}, older than {request.min_version}")
        return GenerateResult(
            token_ids=choice.token_ids,
            logprobs=[item.logprob for item in choice.logprobs.content],
            versions=versions,
            finish_reason=choice.finish_reason,
        )

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request, or all."""
        body = {"request_ids": [REQUEST_PREFIX + request_id]} if request_id is not None else {}
        await self._call("POST", "/abort_requests", body)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop decoding: keep requests (their caches are recomputed), wait for them, or abort them."""
        await self._call("POST", "/pause", params={"mode": mode})

    async def resume(self) -> None:
        """Go on decoding."""
        await self._call("POST", "/resume")

    async def init_transfer(self, init: InitInfo) -> None:
        """Join a weight-transfer group."""
        await self._call("POST", "/init_weight_transfer_engine", InitBody(init))

    async def start_update(self, staged: bool = False) -> None:
        """Begin a weight update. ``staged``: buckets are kept for ``finish``, so it may go on decoding.

        vLLM refuses while one is unfinished, and forgets that one only when it fails.
        """
        start = ("POST", "/start_weight_update")
        params = {"staged": "true"} if staged else None
        try:
            await self._call(*start, params=params)
        except EngineLost as error:
            if "already active" not in str(error):
                raise
            with suppress(EngineLost):
                await self._call("POST", "/update_weights", {"update_info": {}})
            await self._call(*start, params=params)

    async def update(self, info: UpdateInfo) -> None:
        """Receive one bucket."""
        await self._call("POST", "/update_weights", UpdateBody(info))

    async def finish_update(self, version: Version) -> None:
        """All buckets were sent; the weights are ``version``."""
        await self._call("POST", "/finish_weight_update", FinishBody(str(version)))

    async def version(self) -> Version | None:
        """The version that the engine serves; None before its first update."""
        info = self._decode(await self._call("GET", "/weight_info"), _WeightInfo)
        if info.weight_version is None or info.weight_version == "default":
            return None
        return self._version(info.weight_version)

    async def checksums(self) -> dict[str, str]:
        """A checksum per loaded tensor."""
        raw = await self._call("POST", "/weight_checker", {"action": "checksum"})
        return self._decode(raw, _Checksums).checksums

    async def sleep(self, level: int) -> None:
        """Free device memory: 1 the KV cache, 2 the weights too. Requests are kept; vLLM would abort them by itself."""
        await self._call("POST", "/sleep", params={"level": str(level), "mode": "keep"})

    async def wake(self, tags: Sequence[str]) -> None:
        """Take memory back for ``weights`` and/or ``kv_cache``."""
        await self._call("POST", "/wake_up", params=[("tags", tag) for tag in tags])

    async def is_sleeping(self) -> bool:
        """Whether it gave up device memory and has not taken all of it back.

        Read from the metrics: to ``/is_sleeping`` vLLM says yes also when it is only paused, and waking it would then
        resume it.
        """
        lines = (await self._call("GET", "/metrics")).decode().splitlines()
        awake = [line for line in lines if line.startswith(SLEEP_STATE) and 'sleep_state="awake"' in line]
        return any(float(line.rsplit(None, 1)[1]) == 0 for line in awake)

    async def health(self) -> bool:
        """Whether the engine answers its probe within 5 s."""
        try:
            async with asyncio.timeout(5.0):
                await self._call("GET", "/health")
        except (EngineLost, EngineRejected, TimeoutError):
            return False
        return True

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _call(
        self, method: str, path: str, body: Any = None, *, params: Any = None, headers: dict[str, str] | None = None
    ) -> bytes:
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

    def _decode(self, raw: bytes, kind: Any) -> Any:
        try:
            return msgspec.json.decode(raw, type=kind)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise EngineLost(f"{self.url} answered what is not {kind.__name__.strip('_')}: {error}") from error

    def _version(self, text: str) -> Version:
        try:
            return Version.parse(text)
        except ValueError as error:
            raise EngineLost(f"{self.url} serves weights {text!r} that this run did not send") from error
