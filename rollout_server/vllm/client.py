"""Client of one engine that speaks vLLM's HTTP dialect: vLLM itself, or the embedded engine.

Routes under /inference need vLLM's ``--enable-scale-out``, the control routes its development mode; start it with
``--logprobs-mode processed_logprobs``, so that log-probabilities are those of the sampling distribution.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress

import msgspec

from rl_async.errors import EngineLost, EngineRejected
from rl_async.messages import Version
from rl_async.rollout_server.answers import IncomingAnswer, ReadVersion, parse
from rl_async.rollout_server.api import EngineLoad, FinishReason, GenerateRequest, GenerateResult, PauseMode
from rl_async.rollout_server.http import EngineHttp
from rl_async.rollout_server.parts import NOTHING, join
from rl_async.rollout_server.vllm.together import Asked, Together
from rl_async.weight_sync.protocol import FinishUpdateBody, InitInfo, InitTransferBody, UpdateInfo, UpdateWeightsBody

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
    n: int
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


class _Choice(msgspec.Struct, kw_only=True):
    index: int = 0
    token_ids: list[int]
    finish_reason: FinishReason | None = None
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

    ``timeout_s`` bounds every call; a caller with a shorter deadline cancels it. ``read_version`` reads the names of
    weights that the engine answers. Up to ``together`` requests for one prompt, made at the same moment, are sent as
    one; vLLM takes no more than it decodes at once.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float | None = 600.0,
        read_version: ReadVersion = Version.parse,
        together: int = 1,
    ) -> None:
        self._http, self._read_version = EngineHttp(url, timeout_s), read_version
        self.url = self._http.url
        self._together = Together(self._sample, together)

    async def generate(self, request: GenerateRequest, *, session: str = "") -> GenerateResult:
        """Sample once; the parts of ``stream`` as one."""
        done = NOTHING
        async for part in self.stream(request, session=session):
            done = join(done, part)
        return done

    async def stream(self, request: GenerateRequest, *, session: str = "") -> AsyncGenerator[GenerateResult, None]:
        """Sample, and give every STREAM_INTERVAL tokens as soon as they are here; only the last part says how it ended.

        Raises EngineLost also when the engine is older than ``request.min_version`` (409).
        """
        async with aclosing(self._together.ask(request)) as parts:
            async for part in parts:
                yield part

    async def _sample(self, group: Sequence[Asked]) -> None:
        """The answer to requests that differ in their ids alone: choice ``i`` of it is for the ``i``-th."""
        request = group[0].request
        answers = [IncomingAnswer(self.url, request, self._read_version) for _ in group]
        headers = {MIN_VERSION_HEADER: str(request.min_version)}
        rest = b""
        async for data in self._http.sample(GENERATE, _body(request, len(group)), headers):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if not line.startswith(b"data: {"):  # an empty line, or the end
                    continue
                for choice in self._choices(line.removeprefix(b"data: "), len(group)):
                    asked, answer = group[choice.index], answers[choice.index]
                    logprobs = [item.logprob for item in choice.logprobs.content] if choice.logprobs else []
                    answer.add(choice.token_ids, logprobs)
                    ended = choice.finish_reason is not None
                    if ended or choice.weight_versions is not None:
                        asked.add(answer.part(choice.weight_versions or [], choice.finish_reason or "abort"))
                    if ended:
                        asked.end()

    def _choices(self, raw: bytes, wanted: int) -> list[_Choice]:
        chunk: _Chunk = self._http.decode(raw, _Chunk)
        if chunk.error is not None:
            raise self._http.failure(GENERATE, chunk.error.code, chunk.error.message)
        if not chunk.choices or any(not 0 <= choice.index < wanted for choice in chunk.choices):
            numbers = ", ".join(str(choice.index) for choice in chunk.choices) or "none"
            raise EngineRejected(f"{self.url} answered with choices {numbers}; {wanted} were asked for")
        return chunk.choices

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request, or all."""
        body = {"request_ids": [REQUEST_PREFIX + request_id]} if request_id is not None else {}
        await self._http.call("POST", "/abort_requests", body)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop decoding: keep requests (their caches are recomputed), wait for them, or abort them."""
        await self._http.call("POST", "/pause", params={"mode": mode})

    async def resume(self) -> None:
        """Go on decoding."""
        await self._http.call("POST", "/resume")

    async def init_transfer(self, init: InitInfo) -> None:
        """Join a weight-transfer group."""
        await self._http.call("POST", "/init_weight_transfer_engine", InitTransferBody(init))

    async def start_update(self, staged: bool = False) -> None:
        """Begin a weight update. ``staged``: buckets are kept for ``finish``, so it may go on decoding.

        vLLM refuses while one is unfinished, and forgets that one only when it fails.
        """
        start = ("POST", "/start_weight_update")
        params = {"staged": "true"} if staged else None
        try:
            await self._http.call(*start, params=params)
        except EngineLost as error:
            if "already active" not in str(error):
                raise
            with suppress(EngineLost):
                await self._http.call("POST", "/update_weights", {"update_info": {}})
            await self._http.call(*start, params=params)

    async def update(self, info: UpdateInfo) -> None:
        """Receive one bucket."""
        await self._http.call("POST", "/update_weights", UpdateWeightsBody(info))

    async def finish_update(self, version: Version) -> None:
        """All buckets were sent; the weights are ``version``."""
        await self._http.call("POST", "/finish_weight_update", FinishUpdateBody(str(version)))

    async def version(self) -> Version | None:
        """The version that the engine serves; None before its first update."""
        info = self._http.decode(await self._http.call("GET", "/weight_info"), _WeightInfo)
        if info.weight_version is None or info.weight_version == "default":
            return None
        return parse(self.url, info.weight_version, self._read_version)

    async def checksums(self) -> dict[str, str]:
        """A checksum per loaded tensor."""
        raw = await self._http.call("POST", "/weight_checker", {"action": "checksum"})
        return self._http.decode(raw, _Checksums).checksums

    async def sleep(self, level: int) -> None:
        """Free device memory: 1 the KV cache, 2 the weights too. Requests are kept; vLLM would abort them by itself."""
        await self._http.call("POST", "/sleep", params={"level": str(level), "mode": "keep"})

    async def wake(self, tags: Sequence[str]) -> None:
        """Take memory back for ``weights`` and/or ``kv_cache``."""
        await self._http.call("POST", "/wake_up", params=[("tags", tag) for tag in tags])

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
        lines = (await self._http.call("GET", "/metrics")).decode().splitlines()
        pairs = [line.rsplit(None, 1) for line in lines if line.startswith("vllm:")]
        return [(key, float(value)) for key, value in pairs]

    async def health(self) -> bool:
        """Whether the engine answers its probe within 5 s."""
        return await self._http.healthy()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()


def _body(request: GenerateRequest, samples: int) -> _GenerateBody:
    sampling = request.sampling
    return _GenerateBody(
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
            n=samples,
        ),
    )
