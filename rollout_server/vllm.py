"""Client of one engine that speaks vLLM's HTTP dialect: vLLM itself, or the embedded engine.

Routes under /inference need vLLM's ``--enable-scale-out``, the control routes its development mode; start it with
``--logprobs-mode processed_logprobs``, so that log-probabilities are those of the sampling distribution.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any, Literal

import aiohttp
import msgspec

from rl_async.errors import EngineError, EngineLost, EngineRejected
from rl_async.messages import Version, VersionRun
from rl_async.rollout_server.api import EngineLoad, GenerateRequest, GenerateResult, PauseMode
from rl_async.rollout_server.parts import NOTHING, Unversioned, join
from rl_async.weight_sync.protocol import FinishBody, InitBody, InitInfo, UpdateBody, UpdateInfo

MIN_VERSION_HEADER = "X-Min-Weight-Version"
SLEEP_STATE = "vllm:engine_sleep_state"
LOAD = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
)
GENERATE = "/inference/v1/generate"
STREAM_INTERVAL = 16  # tokens per part of an answer: at most so many of a request are lost with its engine
KEEP_ALIVE_S = 4.0  # servers hang up on idle connections after 5 s; a request that meets that would be lost
REQUEST_PREFIX = "generate-tokens-"  # vLLM puts it before the ids of this route, and aborts only by the full id


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
    stream_interval: int = STREAM_INTERVAL


class _GenerateBody(msgspec.Struct):
    request_id: str
    token_ids: list[int]
    sampling_params: _SamplingBody
    stream: bool = True


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
    finish_reason: Literal["stop", "length", "abort"] | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None  # of all tokens so far; None: not told yet


class _Error(msgspec.Struct):
    message: str
    code: int = 500


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: _Error | None = None  # vLLM begins a stream before it has looked at the request


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
        """Sample once; the parts of ``stream`` as one."""
        done = NOTHING
        async for part in self.stream(request, session=session):
            done = join(done, part)
        return done

    async def stream(self, request: GenerateRequest, *, session: str = "") -> AsyncIterator[GenerateResult]:
        """Sample, and give every STREAM_INTERVAL tokens as soon as they are here; only the last part says how it ended.

        Raises EngineLost also when the engine is older than ``request.min_version`` (409).
        """
        held, ended = Unversioned(), False
        async with await self._ask(request) as response:
            try:
                async for event in _events(response.content):
                    choice = self._choice(event)
                    part = self._part(choice, held, request.min_version)
                    ended = choice.finish_reason is not None
                    if part is not None:
                        yield part
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise EngineLost(f"{self.url}{GENERATE}: {type(error).__name__}: {error}") from error
        if not ended:
            raise EngineLost(f"{self.url}{GENERATE}: the answer broke off")

    async def _ask(self, request: GenerateRequest) -> aiohttp.ClientResponse:
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
            return await self._open("POST", GENERATE, body, headers={**headers, "Connection": "keep-alive"})
        except EngineLost as error:
            if not _broke(error.__cause__):
                raise
            # The server may have closed the kept connection already. Sampling changes nothing, so it is asked again.
            return await self._open("POST", GENERATE, body, headers=headers)

    def _choice(self, raw: bytes) -> _Choice:
        chunk: _Chunk = self._decode(raw, _Chunk)
        if chunk.error is not None:
            raise self._failure(GENERATE, chunk.error.code, chunk.error.message)
        if len(chunk.choices) != 1:
            raise EngineRejected(f"{self.url} answered with {len(chunk.choices)} choices, not one")
        return chunk.choices[0]

    def _part(self, choice: _Choice, held: Unversioned, oldest: Version) -> GenerateResult | None:
        """What may be handed out now that ``choice`` has come."""
        logprobs = choice.logprobs.content if choice.logprobs is not None else []
        if len(logprobs) != len(choice.token_ids):
            raise EngineRejected(f"{self.url} answered without one log-probability per sampled token")
        held.add(choice.token_ids, [item.logprob for item in logprobs])
        if choice.weight_versions is None and choice.finish_reason is None:
            return None
        runs = [VersionRun(self._version(s.version), s.start, s.end) for s in choice.weight_versions or []]
        try:
            part = held.take(runs, choice.finish_reason)
        except ValueError as error:
            raise EngineRejected(f"{self.url} answered without the weight version of every token") from error
        if runs and runs[0].version < oldest:  # vLLM has no such gate, so it may have sampled
            raise EngineLost(f"{self.url} sampled with {runs[0].version}, older than {oldest}")
        return part

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

    async def start_update(self) -> None:
        """Begin a weight update. vLLM refuses while one is unfinished, and forgets that one only when it fails."""
        try:
            await self._call("POST", "/start_weight_update")
        except EngineLost as error:
            if "already active" not in str(error):
                raise
            with suppress(EngineLost):
                await self._call("POST", "/update_weights", {"update_info": {}})
            await self._call("POST", "/start_weight_update")

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
        states = await self._metrics()
        return any(value == 0 for key, value in states if key.startswith(SLEEP_STATE) and 'sleep_state="awake"' in key)

    async def load(self) -> EngineLoad:
        """How busy it is."""
        total = dict.fromkeys(LOAD, 0.0)
        for key, value in await self._metrics():
            name = key.partition("{")[0]
            if name in total:
                total[name] += value
        running, waiting, usage, preemptions = total.values()
        return EngineLoad(requests=int(running + waiting), cache_usage=usage, preemptions=int(preemptions))

    async def _metrics(self) -> list[tuple[str, float]]:
        """Name with labels, and value, of each line of its Prometheus text."""
        lines = (await self._call("GET", "/metrics")).decode().splitlines()
        pairs = [line.rsplit(None, 1) for line in lines if line.startswith("vllm:")]
        return [(key, float(value)) for key, value in pairs]

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
        async with await self._open(method, path, body, params=params, headers=headers) as response:
            try:
                return await response.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise EngineLost(f"{self.url}{path}: {type(error).__name__}: {error}") from error

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
            if response.status == 200:
                return response
            async with response:
                raw = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineLost(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        raise self._failure(path, response.status, raw[:500].decode(errors="replace"))

    def _failure(self, path: str, status: int, message: str) -> EngineError:
        """What an answer with this status means; 409: too old, another engine may do."""
        refused = 400 <= status < 500 and status != 409
        return (EngineRejected if refused else EngineLost)(f"{self.url}{path} answered {status}: {message}")

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


def _broke(error: BaseException | None) -> bool:
    """Whether a connection that was there broke before the answer's head came."""
    broke = isinstance(error, (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError))
    return broke and not isinstance(error, aiohttp.ClientConnectorError)


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The JSON of each server-sent event, to the end of the body: a connection is used again only if it was read."""
    rest = b""
    async for data in content.iter_any():  # not by line, which has a limit
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield line.removeprefix(b"data: ")
