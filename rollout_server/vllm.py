"""Client of one engine that speaks vLLM's HTTP dialect: vLLM itself, or the embedded engine.

Routes under /inference need vLLM's ``--enable-scale-out``, the control routes its development mode; start it with
``--logprobs-mode processed_logprobs``, so that log-probabilities are those of the sampling distribution.
"""

from collections.abc import Sequence
from contextlib import suppress

import msgspec

from rl_async.errors import EngineLost, EngineRejected
from rl_async.messages import Version
from rl_async.rollout_server.answers import ReadVersion, checked, parse
from rl_async.rollout_server.api import FinishReason, GenerateRequest, GenerateResult, PauseMode
from rl_async.rollout_server.http import EngineHttp
from rl_async.weight_sync.protocol import FinishBody, InitBody, InitInfo, UpdateBody, UpdateInfo

MIN_VERSION_HEADER = "X-Min-Weight-Version"
SLEEP_STATE = "vllm:engine_sleep_state"
GENERATE = "/inference/v1/generate"
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
    finish_reason: FinishReason
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

    ``timeout_s`` bounds every call; a caller with a shorter deadline cancels it. ``read_version`` reads the names of
    weights that the engine answers.
    """

    def __init__(self, url: str, timeout_s: float | None = 600.0, read_version: ReadVersion = Version.parse) -> None:
        self._http, self._read_version = EngineHttp(url, timeout_s), read_version
        self.url = self._http.url

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
        raw = await self._http.sample(GENERATE, body, headers={MIN_VERSION_HEADER: str(request.min_version)})
        choices = self._http.decode(raw, _Answer).choices
        if len(choices) != 1:
            raise EngineRejected(f"{self.url} answered with {len(choices)} choices, not one")
        choice = choices[0]
        return checked(
            self.url,
            request,
            token_ids=choice.token_ids,
            logprobs=[item.logprob for item in choice.logprobs.content] if choice.logprobs is not None else [],
            spans=choice.weight_versions or [],
            finish_reason=choice.finish_reason,
            read_version=self._read_version,
        )

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
        await self._http.call("POST", "/init_weight_transfer_engine", InitBody(init))

    async def start_update(self) -> None:
        """Begin a weight update. vLLM refuses while one is unfinished, and forgets that one only when it fails."""
        try:
            await self._http.call("POST", "/start_weight_update")
        except EngineLost as error:
            if "already active" not in str(error):
                raise
            with suppress(EngineLost):
                await self._http.call("POST", "/update_weights", {"update_info": {}})
            await self._http.call("POST", "/start_weight_update")

    async def update(self, info: UpdateInfo) -> None:
        """Receive one bucket."""
        await self._http.call("POST", "/update_weights", UpdateBody(info))

    async def finish_update(self, version: Version) -> None:
        """All buckets were sent; the weights are ``version``."""
        await self._http.call("POST", "/finish_weight_update", FinishBody(str(version)))

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
        lines = (await self._http.call("GET", "/metrics")).decode().splitlines()
        awake = [line for line in lines if line.startswith(SLEEP_STATE) and 'sleep_state="awake"' in line]
        return any(float(line.rsplit(None, 1)[1]) == 0 for line in awake)

    async def health(self) -> bool:
        """Whether the engine answers its probe within 5 s."""
        return await self._http.healthy()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()
