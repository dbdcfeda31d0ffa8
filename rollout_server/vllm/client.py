"""Client of one engine that speaks vLLM's HTTP dialect: vLLM itself, or the embedded engine.

The server must be started as ``__main__.py`` does: ``--enable-scale-out`` for the routes under /inference, development
mode for the control routes, and ``--logprobs-mode processed_logprobs``, so that log-probabilities are those of the
sampling distribution.

Requests for one prompt that are made at the same moment are coalesced into one request for several samples (``n``), as
those of a group are. They then cost one HTTP round trip, and the engine, which gets them together, computes the prompt
once. Callers see no difference: each gets its own answer, in parts, and may leave before its end; the engine continues
for the others, and is told to stop when all have left.
"""

import asyncio
import base64
import io
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import TypeAlias

import msgspec
import numpy as np

from rl_async import tracing
from rl_async.concurrency import to_the_end
from rl_async.errors import EngineError, EngineLost, EngineRejected, SchemaRejected
from rl_async.messages import Version
from rl_async.rollout_server.api import (
    EMPTY,
    EngineLoad,
    EngineTokens,
    FinishReason,
    GenerateRequest,
    GenerateResult,
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
    """One of the coalesced requests, with the parts of its answer that its caller has not read yet."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.begun = self.ended = False  # the first part has arrived; all have
        self.over = False  # all parts have arrived, or the caller has left
        self._parts: asyncio.Queue[GenerateResult | BaseException | None] = asyncio.Queue()

    def add(self, part: GenerateResult) -> None:
        """Append a part of the answer."""
        self.begun = True
        self._parts.put_nowait(part)

    def end(self, error: BaseException | None = None) -> None:
        """End the answer, with ``error`` if it is incomplete. Does nothing when it is over already."""
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
    """Collects requests until the event loop has run everything that was ready, then passes them to ``send``.

    ``send`` gets at most ``max_size`` requests, which differ only in their ids. It adds the parts of each answer to its
    PendingRequest and ends it, and may raise EngineLost or EngineRejected for those that have not ended.
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
            if all(other.over for other in group) and not all(other.ended for other in group):
                task.cancel()  # else it reads the answer to its end, so that the connection can be used again

    def _join(self, pending: PendingRequest) -> tuple[Group, "asyncio.Task[None]"]:
        key = _coalescing_key(pending.request)
        if key in self._unsent and len(self._unsent[key][0]) < self._max_size:
            self._unsent[key][0].append(pending)
            return self._unsent[key]
        group: Group = [pending]
        task = asyncio.create_task(self._run(key, group))  # starts after everything that is ready now
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
            # The engine may not accept so many at once.
            await to_the_end(*map(self._send_separately, waiting))

    async def _send_separately(self, pending: PendingRequest) -> None:
        try:
            await self._send([pending])
        except EngineError as error:
            pending.end(error)


def _coalescing_key(request: GenerateRequest) -> Hashable:
    """Return a key that is equal for requests that may be coalesced: those that differ only in their ids.

    A request with its own seed is never coalesced, nor is a greedy one, of which vLLM refuses several samples, or one
    of an episode with a trace, since a request can name only one span.
    """
    unique = request.request_id if request.seed is not None or request.sampling.greedy else ""
    tokens, stops = tuple(request.token_ids), tuple(request.stop_token_ids)
    limits = request.max_tokens, request.min_version, request.routed_from
    return tokens, stops, request.sampling, limits, request.json_schema, request.traceparent, unique


def _end(group: Group, task: "asyncio.Task[None]") -> None:
    error = None if task.cancelled() else task.exception()
    for pending in group:
        pending.end(error or EngineLost("the answer broke off"))


MIN_VERSION_HEADER = "X-Min-Weight-Version"
SLEEP_STATE = "vllm:engine_sleep_state"
ROUTED_BY = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
PREEMPTIONS = "vllm:num_preemptions_total"
TOKENS = (  # as in EngineTokens
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
)
GENERATE = "/inference/v1/generate"
STREAM_INTERVAL = 16  # tokens per part of an answer, the most that are lost with an engine
_SCHEMA_WORDS = re.compile("grammar|schema|structured.?output", re.IGNORECASE)  # in what engines say about a schema
REQUEST_PREFIX = "generate-tokens-"  # vLLM puts it before the ids of GENERATE, and aborts only by the full id


class _StructuredOutputs(msgspec.Struct):
    """Masks of tokens; vLLM reads the schema as text or as an object."""

    json: str


class _SamplingBody(msgspec.Struct):
    """Every sampling key that we use, always sent: vLLM fills in missing ones from the model's generation config, and
    silently ignores unknown ones."""

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
    ignore_eos: bool = True  # the request names its stop tokens
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


class _WeightSpan(msgspec.Struct):
    version: str
    start: int
    end: int


class _StreamChoice(msgspec.Struct, kw_only=True):
    index: int = 0
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[_WeightSpan] | None = None  # of all tokens so far; None: not known yet
    routed_experts: str | None = None  # an .npy file in base64, with the last part


class _Error(msgspec.Struct):
    message: str
    code: int = 500


class _Chunk(msgspec.Struct):
    choices: list[_StreamChoice] = []
    error: _Error | None = None  # vLLM starts the stream before it has validated the request


class _WeightInfo(msgspec.Struct):
    weight_version: str | None = None


class _OfWorkers(msgspec.Struct):
    results: list[list[list[Box]] | None]


class _WorldSize(msgspec.Struct):
    world_size: int


class _Checksums(msgspec.Struct):
    checksums: dict[str, str]


class VllmEngine:
    """Client of one engine at ``url``. Methods raise EngineRejected for 4xx answers, SchemaRejected for those about a
    request's JSON schema, and EngineLost for any other failure.

    ``timeout_s`` bounds every call; a caller with a shorter deadline cancels it. ``read_version`` parses the engine's
    names of its weights; ``token`` is the run's. Up to ``max_coalesced`` requests for one prompt, made at the same
    moment, are sent as one; vLLM accepts no more than it decodes at once. With the ``lineage`` of a trainer, methods
    raise TrainerReplaced once the engine has heard of a newer one.
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
        """Sample once, joining the parts of ``stream``."""
        done = EMPTY
        async for part in self.stream(request, session=session):
            done = join(done, part)
        return done

    async def stream(self, request: GenerateRequest, *, session: str = "") -> AsyncGenerator[GenerateResult, None]:
        """Sample, yielding every STREAM_INTERVAL tokens as they arrive; only the last part has the finish reason.

        Raises EngineLost also when the engine's weights are older than ``request.min_version`` (409).
        """
        async with aclosing(self._coalescer.stream(request)) as parts:
            async for part in parts:
                yield part

    async def _send(self, group: Sequence[PendingRequest]) -> None:
        """Request one sample for each of ``group`` and distribute the answer: choice ``i`` goes to ``group[i]``.

        Raises SchemaRejected also for a 500 in place of the first token of an answer that must fit a schema: vLLM
        compiles schemas when it samples, and every other engine would fail, too.
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
        rest = b""
        async for data in self._http.stream(GENERATE, _body(request, len(group)), headers):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if not line.startswith(b"data: {"):  # an empty line, or the end
                    continue
                for choice in self._choices(line.removeprefix(b"data: "), len(group)):
                    pending, answer = group[choice.index], answers[choice.index]
                    logprobs = [item.logprob for item in choice.logprobs.content] if choice.logprobs else []
                    answer.add(choice.token_ids, logprobs)
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
        """Abort one request, or all of them; its waiting caller gets what was sampled so far."""
        body = {"request_ids": [REQUEST_PREFIX + request_id]} if request_id is not None else {}
        await self._http.call("POST", "/abort_requests", body)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop decoding: ``keep`` the requests (their caches are recomputed), ``wait`` for them, or ``abort`` them."""
        await self._http.call("POST", "/pause", params={"mode": mode})

    async def resume(self) -> None:
        """Continue decoding after ``pause``."""
        await self._http.call("POST", "/resume")

    async def workers(self) -> int:
        """Return how many workers hold parts of the weights."""
        return self._http.decode(await self._http.call("GET", "/get_world_size"), _WorldSize).world_size

    async def boxes(self, tensors: Mapping[str, list[int]]) -> list[list[list[Box]]] | None:
        """Return the parts of tensors that each worker needs; None while an unfinished update hides them."""
        body = {"method": "weight_boxes", "args": [msgspec.json.encode(tensors).decode()]}
        results = self._http.decode(await self._http.call("POST", "/collective_rpc", body), _OfWorkers).results
        return None if None in results else [boxes for boxes in results if boxes is not None]

    async def init_transfer(self, init: InitInfo) -> None:
        """Join a weight-transfer group with all workers, leaving any earlier one."""
        await self._http.call("POST", "/init_weight_transfer_engine", InitTransferBody(init))

    async def start_update(self, staged: bool = False) -> None:
        """Begin a weight update. ``staged``: the engine keeps decoding, and loads the buckets in ``finish_update``.

        vLLM refuses a second update while one is active, and drops an active one only when it fails, so an update left
        unfinished is made to fail first.
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
        """Receive and load the bucket that ``info`` describes."""
        await self._http.call("POST", "/update_weights", UpdateWeightsBody(info))

    async def finish_update(self, version: Version) -> None:
        """End the update: all buckets were sent, and the weights are now ``version``."""
        await self._http.call("POST", "/finish_weight_update", FinishUpdateBody(str(version)))

    async def version(self) -> Version | None:
        """Return the version that the engine serves; None before its first update."""
        info = self._http.decode(await self._http.call("GET", "/weight_info"), _WeightInfo)
        if info.weight_version is None or info.weight_version == "default":
            return None
        return parse_version(self.url, info.weight_version, self._read_version)

    async def checksums(self) -> dict[str, str]:
        """Return the engine's checksum of each loaded tensor, by name; vLLM's begin with the worker's place."""
        raw = await self._http.call("POST", "/weight_checker", {"action": "checksum"})
        return self._http.decode(raw, _Checksums).checksums

    async def sleep(self, level: int) -> None:
        """Free device memory: level 1 the KV cache, level 2 the weights too. Requests are kept (vLLM's default is to
        abort them)."""
        await self._http.call("POST", "/sleep", params={"level": str(level), "mode": "keep"})

    async def wake(self, tags: Sequence[str]) -> None:
        """Take back the memory that ``sleep`` freed; ``tags`` are ``weights``, ``kv_cache`` or both."""
        await self._http.call("POST", "/wake_up", params=[("tags", tag) for tag in tags])

    async def is_sleeping(self) -> bool:
        """Return whether the engine has freed device memory and not taken all of it back.

        Read from the metrics, since vLLM's ``/is_sleeping`` is true of a paused engine too, which waking would resume.
        """
        states = await self._metrics()
        return any(value == 0 for key, value in states if key.startswith(SLEEP_STATE) and 'sleep_state="awake"' in key)

    async def load(self) -> EngineLoad:
        """Read the engine's load from its metrics.

        Raises EngineRejected if it lacks one by which requests are routed, as another version may have renamed it. Of
        what is only counted, an engine that lacks a part counts nothing.
        """
        total: dict[str, float] = {}
        for key, value in await self._metrics():
            name = key.partition("{")[0]
            total[name] = total.get(name, 0.0) + value
        if absent := [name for name in ROUTED_BY if name not in total]:
            raise EngineRejected(f"{self.url}/metrics lacks {', '.join(absent)}; is this version of vLLM supported?")
        running, waiting, usage = (total[name] for name in ROUTED_BY)
        counts = [int(total[name]) for name in TOKENS if name in total]
        return EngineLoad(
            running=int(running),
            waiting=int(waiting),
            cache_usage=usage,
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
        """Return whether the engine answers its health probe in time."""
        return await self._http.healthy()

    async def close(self) -> None:
        """Close the connections to the engine."""
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
            structured_outputs=_StructuredOutputs(request.json_schema) if request.json_schema else None,
            routed_experts_prompt_start=request.routed_from,
        ),
    )
