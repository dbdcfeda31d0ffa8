"""Client of one engine that speaks vLLM's HTTP dialect: vLLM itself, or the embedded engine.

The server must be started as ``__main__.py`` does: ``--enable-scale-out`` for the routes under /inference, development
mode for the control routes, and ``--logprobs-mode processed_logprobs``, so that log-probabilities are those of the
sampling distribution.

Requests for one prompt that are made at the same moment, such as those of a group, are coalesced into one request for
several samples (``n``). They then cost one HTTP round trip, and the engine computes the prompt once. Callers see no
difference: each gets its own answer, in parts, and may leave before its end. The engine continues for the others, and
the request is aborted when all have left.
"""

import asyncio
import base64
import io
import re
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from rl_async import tracing
from rl_async.concurrency import to_the_end
from rl_async.configs.engines import STREAM_INTERVAL
from rl_async.errors import EngineError, EngineLost, EngineRejected, SchemaRejected
from rl_async.messages import Version
from rl_async.rollout_server.api import (
    EMPTY,
    EngineLoad,
    EngineTokens,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Image,
    IncomingAnswer,
    PauseMode,
    ReadVersion,
    join,
    parse_version,
)
from rl_async.rollout_server.http import EngineHttp
from rl_async.weight_sync.protocol import (
    Box,
    FinishUpdateBody,
    InitInfo,
    InitTransferBody,
    UpdateInfo,
    UpdateWeightsBody,
)


class PendingRequest:
    """One of several coalesced requests, with the parts of its answer that its caller has not read yet.

    It has ``begun`` when the first part has arrived, and ``ended`` when all have. It is ``over`` when it has ended or
    its caller has left.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.begun = self.ended = False
        self.over = False
        self._parts: asyncio.Queue[GenerateResult | BaseException | None] = asyncio.Queue()

    def add(self, part: GenerateResult) -> None:
        """Append a part of the answer."""
        self.begun = True
        self._parts.put_nowait(part)

    def end(self, error: BaseException | None = None) -> None:
        """End the answer, with ``error`` if it is incomplete; do nothing if it is already over."""
        if not self.over:
            self.over = self.ended = True
            self._parts.put_nowait(error)

    async def parts(self) -> AsyncGenerator[GenerateResult, None]:
        """Yield the parts as they arrive. Raises the error that the answer ended with."""
        while (part := await self._parts.get()) is not None:
            if isinstance(part, BaseException):
                raise part
            yield part


Group: TypeAlias = list[PendingRequest]
SendGroup: TypeAlias = Callable[[Sequence[PendingRequest]], Awaitable[None]]


class Coalescer:
    """Collects requests until the event loop has run all tasks that were ready, then passes them to ``send``.

    ``send`` gets at most ``max_size`` requests, which differ only in their ids. It adds the parts of each answer to its
    PendingRequest and ends it; EngineLost or EngineRejected from it goes to those that have not ended.
    """

    def __init__(self, send: SendGroup, max_size: int) -> None:
        self._send, self._max_size = send, max_size
        self._unsent: dict[Hashable, tuple[Group, asyncio.Task[None]]] = {}

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[GenerateResult, None]:
        """Yield the parts of the answer to ``request``. Raises EngineLost or EngineRejected."""
        pending = PendingRequest(request)
        group, task = self._join(pending)
        try:
            async for part in pending.parts():
                yield part
        finally:
            pending.over = True
            # If all answers have ended, the task reads on to the end of the response, and the connection can be reused.
            if all(other.over for other in group) and not all(other.ended for other in group):
                task.cancel()

    def _join(self, pending: PendingRequest) -> tuple[Group, "asyncio.Task[None]"]:
        key = _coalescing_key(pending.request)
        if key in self._unsent and len(self._unsent[key][0]) < self._max_size:
            self._unsent[key][0].append(pending)
            return self._unsent[key]
        group: Group = [pending]
        # The task starts after all tasks that are ready now.
        task = asyncio.create_task(self._run(key, group))
        self._unsent[key] = group, task
        task.add_done_callback(lambda done: _end(group, done))
        return group, task

    async def _run(self, key: Hashable, group: Group) -> None:
        if self._unsent[key][0] is group:
            del self._unsent[key]
        try:
            await self._send(group)
        except EngineRejected as error:
            if isinstance(error, SchemaRejected) or len(group) == 1 or any(pending.begun for pending in group):
                raise
            waiting = [pending for pending in group if not pending.over]
            # The engine may not accept this many samples at once.
            await to_the_end(*map(self._send_separately, waiting))

    async def _send_separately(self, pending: PendingRequest) -> None:
        try:
            await self._send([pending])
        except EngineError as error:
            pending.end(error)


def _coalescing_key(request: GenerateRequest) -> Hashable:
    """Return a key that is equal for requests that may be coalesced: those that differ only in their ids.

    Requests with a seed are never coalesced, nor are greedy ones, since vLLM refuses several greedy samples, nor those
    of different traced episodes, since a request can name only one span.
    """
    unique = request.request_id if request.seed is not None or request.sampling.greedy else ""
    tokens, stops = tuple(request.token_ids), tuple(request.stop_token_ids)
    images = tuple((image.sha256, image.position) for image in request.images)
    limits = request.max_tokens, request.min_version, request.routed_from
    return tokens, images, stops, request.sampling, limits, request.json_schema, request.traceparent, unique


def _end(group: Group, task: "asyncio.Task[None]") -> None:
    error = None if task.cancelled() else task.exception()
    for pending in group:
        pending.end(error or EngineLost("the answer broke off"))


MIN_VERSION_HEADER = "X-Min-Weight-Version"
SLEEP_STATE = "vllm:engine_sleep_state"
ROUTED_BY = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
PREEMPTIONS = "vllm:num_preemptions_total"
# The metrics of the fields of EngineTokens, in their order.
TOKENS = (
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
)
GENERATE = "/inference/v1/generate"
# Messages of engines about a schema contain one of these words.
_SCHEMA_WORDS = re.compile("grammar|schema|structured.?output", re.IGNORECASE)
# vLLM prefixes the ids of GENERATE with this, and aborts only by the full id.
REQUEST_PREFIX = "generate-tokens-"


class _StructuredOutputs(msgspec.Struct):
    """The schema for masks of tokens, as text; vLLM would also accept an object."""

    json: str


class _SamplingBody(msgspec.Struct):
    """All sampling keys in use, always sent, since vLLM takes missing ones from the model's generation config.

    It silently ignores unknown keys.
    """

    max_tokens: int
    temperature: float
    logprobs: int
    stop_token_ids: list[int]
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    n: int
    structured_outputs: _StructuredOutputs | None
    routed_experts_prompt_start: int
    # The request names its stop tokens.
    ignore_eos: bool = True
    stream_interval: int = STREAM_INTERVAL


class ImagePart(msgspec.Struct, kw_only=True):
    """An image of a prompt in vLLM's dialect; ``uuid``, its hash, is vLLM's key to it in caches.

    ``position`` is ours, and that of ``api.Image``. vLLM ignores it and searches the prompt for the image's tokens.
    """

    type: Literal["image_url"] = "image_url"
    # data:MIME;base64,BYTES
    url: str
    uuid: str
    position: int

    @classmethod
    def of(cls, image: Image) -> "ImagePart":
        data = base64.b64encode(image.data).decode()
        return cls(url=f"data:{image.mime};base64,{data}", uuid=image.sha256, position=image.position)

    def image(self) -> Image:
        """Return the image. Raises ValueError unless it is a data URL whose bytes have the hash ``uuid``."""
        head, _, data = self.url.partition(",")
        if not (head.startswith("data:") and head.endswith(";base64")):
            raise ValueError(f"content_parts: url must be a data URL in base64, not {self.url!r:.80}")
        mime = head.removeprefix("data:").removesuffix(";base64")
        image = Image.of(base64.b64decode(data, validate=True), mime, self.position)
        if image.sha256 != self.uuid:
            raise ValueError(f"content_parts: uuid {self.uuid!r:.80} is not the SHA-256 of the image, {image.sha256}")
        return image


class _GenerateBody(msgspec.Struct):
    request_id: str
    token_ids: list[int]
    sampling_params: _SamplingBody
    content_parts: list[ImagePart] | None
    stream: bool = True


class _Alternative(msgspec.Struct):
    """A likely token; older versions of vLLM give its text alone."""

    logprob: float
    token_id: int = -1


class _Logprob(msgspec.Struct):
    logprob: float
    top_logprobs: list[_Alternative] = []

    def alternatives(self) -> list[tuple[int, float]]:
        """Return the likeliest tokens, likeliest first; vLLM puts the sampled one before the others."""
        known = [(one.token_id, one.logprob) for one in self.top_logprobs if one.token_id >= 0]
        return sorted(known, key=lambda one: -one[1])


class _Logprobs(msgspec.Struct):
    content: list[_Logprob]


class _WeightSpan(msgspec.Struct):
    version: str
    start: int
    end: int


class _StreamChoice(msgspec.Struct, kw_only=True):
    index: int = 0
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: _Logprobs | None = None
    # The versions of all tokens so far, or None if they are not known yet.
    weight_versions: list[_WeightSpan] | None = None
    # An .npy file in base64, which comes with the last part.
    routed_experts: str | None = None


class _Error(msgspec.Struct):
    message: str
    code: int = 500


class _Chunk(msgspec.Struct):
    choices: list[_StreamChoice] = []
    # vLLM starts the stream before it has validated the request, so errors arrive here.
    error: _Error | None = None


class _WeightInfo(msgspec.Struct):
    weight_version: str | None = None


class _OfWorkers(msgspec.Struct):
    results: list[list[list[Box]] | None]


class _WorldSize(msgspec.Struct):
    world_size: int


class _Checksums(msgspec.Struct):
    checksums: dict[str, str]


class VllmEngine:
    """The `EngineControl` of one engine at ``url``. Methods raise EngineRejected for 4xx responses, SchemaRejected for
    those about a request's JSON schema, and EngineLost for any other failure.

    ``timeout_s`` bounds every call; a caller with a shorter deadline cancels it. ``read_version`` parses the engine's
    names of its weights; ``token`` is the run's. Up to ``max_coalesced`` requests for one prompt, made at the same
    moment, are sent as one; vLLM accepts no more than it decodes at once. With the ``lineage`` of a trainer, methods
    raise TrainerReplaced once the engine has seen a newer lineage.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float | None = 600.0,
        read_version: ReadVersion = Version.parse,
        max_coalesced: int = 1,
        lineage: int | None = None,
        *,
        token: str = "",
    ) -> None:
        self._http, self._read_version = EngineHttp(url, timeout_s, lineage, token=token), read_version
        self.url = self._http.url
        self._coalescer = Coalescer(self._send, max_coalesced)

    async def generate(self, request: GenerateRequest, *, session: str = "") -> GenerateResult:
        """Sample once, and join the parts of ``stream``."""
        done = EMPTY
        async for part in self.stream(request, session=session):
            done = join(done, part)
        return done

    async def stream(self, request: GenerateRequest, *, session: str = "") -> AsyncGenerator[GenerateResult, None]:
        """Sample, and yield parts of STREAM_INTERVAL tokens as they arrive; only the last one has the finish reason.

        Raises EngineLost also if the engine's weights are older than ``request.min_version`` (409).
        """
        async with aclosing(self._coalescer.stream(request)) as parts:
            async for part in parts:
                yield part

    async def _send(self, group: Sequence[PendingRequest]) -> None:
        """Request one sample for each of ``group`` and distribute the answer: choice ``i`` goes to ``group[i]``.

        For a request with a schema, also raises SchemaRejected for a 500 in place of the first token: vLLM compiles
        schemas when it samples, and every other engine would fail, too.
        """
        try:
            await self._read(group)
        except EngineError as error:
            failed = error.status == 500 and not any(pending.begun for pending in group)
            named = isinstance(error, EngineRejected) and _SCHEMA_WORDS.search(str(error))
            if group[0].request.json_schema and (failed or named):
                raise SchemaRejected(str(error)) from error
            raise

    async def _read(self, group: Sequence[PendingRequest]) -> None:
        request = group[0].request
        answers = [IncomingAnswer(self.url, request, self._read_version) for _ in group]
        headers = {MIN_VERSION_HEADER: str(request.min_version)}
        headers |= {tracing.HEADER: request.traceparent} if request.traceparent else {}
        async for data in self._http.events(GENERATE, _body(request, len(group)), headers):
            for choice in self._choices(data, len(group)):
                pending, answer = group[choice.index], answers[choice.index]
                content = choice.logprobs.content if choice.logprobs else []
                asked = [item.alternatives() for item in content] if request.alternatives else []
                answer.add(choice.token_ids, [item.logprob for item in content], asked)
                ended = choice.finish_reason is not None
                if ended or choice.weight_versions is not None:
                    experts = self._experts(choice.routed_experts)
                    pending.add(answer.part(choice.weight_versions or [], choice.finish_reason or "abort", experts))
                if ended:
                    pending.end()

    def _choices(self, raw: bytes, count: int) -> list[_StreamChoice]:
        chunk: _Chunk = self._http.decode(raw, _Chunk)
        if chunk.error is not None:
            raise self._http.error_for(GENERATE, chunk.error.code, chunk.error.message)
        if not chunk.choices or any(not 0 <= choice.index < count for choice in chunk.choices):
            numbers = ", ".join(str(choice.index) for choice in chunk.choices) or "none"
            raise EngineRejected(f"{self.url} answered with choices {numbers}, but {count} were requested")
        return chunk.choices

    def _experts(self, encoded: str | None) -> np.ndarray | None:
        if encoded is None:
            return None
        try:
            experts: np.ndarray = np.load(io.BytesIO(base64.b64decode(encoded, validate=True)), allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise EngineRejected(f"{self.url} answered with experts that are no .npy file: {error}") from error
        return experts

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request, or all of them; waiting callers get the tokens sampled so far."""
        body = {"request_ids": [REQUEST_PREFIX + request_id]} if request_id is not None else {}
        await self._http.call("POST", "/abort_requests", body)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop decoding: ``keep`` the requests and recompute their caches, ``wait`` for them, or ``abort`` them."""
        await self._http.call("POST", "/pause", params={"mode": mode})

    async def resume(self) -> None:
        await self._http.call("POST", "/resume")

    async def workers(self) -> int:
        return self._http.decode(await self._http.call("GET", "/get_world_size"), _WorldSize).world_size

    async def boxes(self, tensors: Mapping[str, list[int]]) -> list[list[list[Box]]] | None:
        """Return the parts of tensors that each worker needs; None while an unfinished update hides them."""
        body = {"method": "weight_boxes", "args": [msgspec.json.encode(tensors).decode()]}
        results = self._http.decode(await self._http.call("POST", "/collective_rpc", body), _OfWorkers).results
        return None if None in results else [boxes for boxes in results if boxes is not None]

    async def init_transfer(self, init: InitInfo) -> None:
        await self._http.call("POST", "/init_weight_transfer_engine", InitTransferBody(init))

    async def start_update(self, staged: bool = False) -> None:
        """Begin a weight update. If ``staged``, the engine keeps decoding, and loads the buckets in ``finish_update``.

        vLLM refuses a second update while one is active, and only drops an active one when it fails, so an unfinished
        update is made to fail first.
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
        await self._http.call("POST", "/update_weights", UpdateWeightsBody(info))

    async def finish_update(self, version: Version) -> None:
        await self._http.call("POST", "/finish_weight_update", FinishUpdateBody(str(version)))

    async def version(self) -> Version | None:
        info = self._http.decode(await self._http.call("GET", "/weight_info"), _WeightInfo)
        if info.weight_version is None or info.weight_version == "default":
            return None
        return parse_version(self.url, info.weight_version, self._read_version)

    async def checksums(self) -> dict[str, str]:
        """Return the engine's checksum of each loaded tensor, by name; vLLM's names begin with the worker's place."""
        raw = await self._http.call("POST", "/weight_checker", {"action": "checksum"})
        return self._http.decode(raw, _Checksums).checksums

    async def sleep(self, level: int) -> None:
        """Free device memory: level 1 the KV cache, level 2 the weights too. Requests are kept, not aborted as by
        vLLM's default."""
        await self._http.call("POST", "/sleep", params={"level": str(level), "mode": "keep"})

    async def wake(self, tags: Sequence[str]) -> None:
        await self._http.call("POST", "/wake_up", params=[("tags", tag) for tag in tags])

    async def is_sleeping(self) -> bool:
        """Return whether any device memory that ``sleep`` freed is still free.

        Read from the metrics, since vLLM's ``/is_sleeping`` is also true for a paused engine, which waking would
        resume.
        """
        states = await self._metrics()
        return any(value == 0 for key, value in states if key.startswith(SLEEP_STATE) and 'sleep_state="awake"' in key)

    async def load(self) -> EngineLoad:
        """Read the engine's load from its metrics.

        Raises EngineRejected if a metric for routing is missing, since another version may have renamed it. The token
        counts are None unless all are present.
        """
        total: dict[str, float] = {}
        copies: Counter[str] = Counter()
        for key, value in await self._metrics():
            name = key.partition("{")[0]
            total[name] = total.get(name, 0.0) + value
            copies[name] += 1
        if absent := [name for name in ROUTED_BY if name not in total]:
            raise EngineRejected(f"{self.url}/metrics lacks {', '.join(absent)}; is this version of vLLM supported?")
        running, waiting, usage = (total[name] for name in ROUTED_BY)
        counts = [int(total[name]) for name in TOKENS if name in total]
        return EngineLoad(
            running=int(running),
            waiting=int(waiting),
            cache_usage=usage / copies[ROUTED_BY[2]],
            preemptions=int(total[PREEMPTIONS]) if PREEMPTIONS in total else None,
            tokens=EngineTokens(**dict(zip(EngineTokens.__struct_fields__, counts)))
            if len(counts) == len(TOKENS)
            else None,
        )

    async def _metrics(self) -> list[tuple[str, float]]:
        """Parse the Prometheus text into (name with labels, value)."""
        lines = (await self._http.call("GET", "/metrics")).decode().splitlines()
        pairs = [line.rsplit(None, 1) for line in lines if line.startswith("vllm:")]
        return [(key, float(value)) for key, value in pairs]

    async def health(self) -> bool:
        return await self._http.healthy()

    async def close(self) -> None:
        await self._http.close()


def _body(request: GenerateRequest, samples: int) -> _GenerateBody:
    sampling = request.sampling
    return _GenerateBody(
        request_id=request.request_id,
        token_ids=request.token_ids,
        content_parts=[ImagePart.of(image) for image in request.images] or None,
        sampling_params=_SamplingBody(
            max_tokens=request.max_tokens,
            temperature=sampling.temperature,
            logprobs=request.alternatives,
            stop_token_ids=request.stop_token_ids,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=request.seed,
            n=samples,
            structured_outputs=_StructuredOutputs(request.json_schema) if request.json_schema else None,
            routed_experts_prompt_start=request.routed_from,
        ),
    )
