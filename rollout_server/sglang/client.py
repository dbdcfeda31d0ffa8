"""Client of one engine that speaks SGLang's native HTTP API (0.5.23), and the bodies of its routes.

SGLang honours stop tokens only if it may also stop at the model's own end of sequence, reports log-probabilities after
the temperature but before top-k, top-p and min-p, and receives weights through a torch process group. Routes, fields
and states are those of ``sglang/srt/entrypoints/http_server.py`` and ``sglang/srt/managers``.
"""

import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import ClassVar

import msgspec

from rl_async.accelerators import accelerator_here
from rl_async.errors import EngineLost, EngineRejected, SchemaRejected
from rl_async.messages import Version
from rl_async.rollout_server.api import (
    EMPTY,
    EngineLoad,
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
from rl_async.weight_sync.protocol import InitInfo, InitTransferBody, UpdateInfo, UpdateWeightsBody


class SamplingBody(msgspec.Struct):
    """All keys that affect sampling, always sent, so that no default of the server applies.

    SGLang refuses unknown keys here. ``ignore_eos`` also disables ``stop_token_ids``.
    """

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop_token_ids: list[int]
    ignore_eos: bool
    sampling_seed: int | None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    # The answer includes the stop token.
    no_stop_trim: bool = True
    n: int = 1
    # The first token is sent at once, then as many at a time.
    stream_interval: int = 64


class SampleBody(msgspec.Struct):
    """Request of ``POST /generate``, one sample of one prompt."""

    rid: str
    input_ids: list[int]
    sampling_params: SamplingBody
    return_logprob: bool = True
    # Log-probabilities of sampled tokens only.
    logprob_start_len: int = -1
    stream: bool = True


class GroupBody(msgspec.Struct):
    """Request of ``POST /init_weights_update_group``, which joins the torch process group for weights."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str


class BeginBody(msgspec.Struct):
    """Request of ``POST /begin_weight_update``.

    By default a draft model would be loaded, too, from the policy's tensors.
    """

    selector: str = "target"


class BucketBody(msgspec.Struct):
    """Request of ``POST /update_weights_from_distributed``: one broadcast of uint8 with consecutive tensors.

    The cache is flushed once, after the last bucket, and no request is aborted. ``selector`` is that of ``BeginBody``.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str
    load_format: str = "flattened_bucket"
    selector: str = "target"
    flush_cache: bool = False
    abort_all_requests: bool = False


class VersionBody(msgspec.Struct):
    """Request of ``POST /update_weight_version``, which by default aborts all requests."""

    new_version: str
    abort_all_requests: bool = False


class ControlReply(msgspec.Struct):
    """Reply of the control routes. A refusal also has status 200, but ``success`` is false."""

    success: bool
    message: str = ""


class ModelInfo(msgspec.Struct):
    """Reply of ``GET /model_info``; unknown fields are ignored."""

    weight_version: str | None = None


class ServerInfo(msgspec.Struct):
    """Reply of ``GET /server_info``; unknown fields are ignored."""

    tp_size: int
    enable_lora: bool = False


class SleepReply(msgspec.Struct):
    """Reply of ``GET /is_sleeping``, which our start of the server adds."""

    is_sleeping: bool


class RankChecksums(msgspec.Struct):
    """Checksums of one worker's tensors, by name."""

    checksums: dict[str, str]


class ChecksumReply(msgspec.Struct):
    """Reply of ``POST /weights_checker``, one entry per worker."""

    ranks: list[RankChecksums]


class WeightSpan(msgspec.Struct):
    """The weights named ``version`` sampled the tokens from ``start`` to ``end`` (exclusive)."""

    version: str
    start: int
    end: int


class Stopped(msgspec.Struct, tag_field="type", tag="stop"):
    """Finish reason: the last token is a stop token."""

    name: ClassVar[FinishReason] = "stop"


class Full(msgspec.Struct, tag_field="type", tag="length"):
    """Finish reason: ``max_new_tokens`` were sampled, or the context is full."""

    name: ClassVar[FinishReason] = "length"


class Aborted(msgspec.Struct, tag_field="type", tag="abort"):
    """Finish reason: the request was aborted. An error sets the status."""

    message: str | None = None
    status_code: int | None = None
    name: ClassVar[FinishReason] = "abort"


class MetaInfo(msgspec.Struct):
    """Log-probabilities of an event's tokens, the number of tokens so far, and the name of the weights in use when the
    event was made. Only the last event has a finish reason, and the versions of all tokens."""

    completion_tokens: int
    weight_version: str
    finish_reason: Stopped | Full | Aborted | None = None
    # For each token its log-probability, id and text.
    output_token_logprobs: list[tuple[float, int, str | None]] | None = None
    weight_versions: list[WeightSpan] | None = None


class StreamError(msgspec.Struct):
    """Why a reply ends after its status 200 was sent, and the status that it would have had."""

    message: str
    code: int


class SampleEvent(msgspec.Struct):
    """One event of the reply of ``POST /generate``: the tokens sampled since the one before, or an error."""

    output_ids: list[int] = []
    meta_info: MetaInfo | None = None
    error: StreamError | None = None


class QueueCounts(msgspec.Struct):
    """Requests that a scheduler has put back into its queue (retracted)."""

    retracted: int = 0


class SchedulerLoad(msgspec.Struct):
    """Load of one scheduler: ``LoadSnapshot`` in ``sglang/srt/managers/load_snapshot.py``.

    ``token_usage`` is the used share of the KV cache, 0 to 1.
    """

    num_running_reqs: int
    num_waiting_reqs: int
    token_usage: float
    queues: QueueCounts | None = None


class LoadReply(msgspec.Struct):
    """Reply of ``GET /v1/loads``, one entry per scheduler."""

    loads: list[SchedulerLoad]


GENERATE = "/generate"
# SGLang's name for the weights that it started with.
NO_VERSION = "default"
NO_TOP_K = -1
# Torch's backend for each transport.
BACKENDS = {"gloo": "gloo", "nccl": accelerator_here().collectives}
# Retracted requests lose their caches, which are recomputed on resume.
PAUSE_MODES = {"keep": "retract", "abort": "abort"}


class SglangEngine:
    """The `EngineControl` of one engine at ``url``. Methods raise EngineRejected for 4xx responses and for features
    that SGLang lacks, EngineLost for any other failure.

    ``timeout_s`` bounds every call; a caller with a shorter deadline cancels it. ``read_version`` parses the engine's
    names of its weights; ``token`` is the run's.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float | None = 600.0,
        read_version: ReadVersion = Version.parse,
        lineage: int | None = None,
        *,
        token: str = "",
    ) -> None:
        self._http, self._read_version = EngineHttp(url, timeout_s, lineage, token=token), read_version
        self.url = self._http.url
        # SGLang's ids of the requests in flight, by their own ids.
        self._running: dict[str, str] = {}
        # The weight-transfer group that this client made the engine join.
        self._group = ""
        # Whether the engine takes adapters alone, by ``adapters.py``.
        self._adapters = False

    async def generate(self, request: GenerateRequest, *, session: str = "") -> GenerateResult:
        """Sample once, and join the parts of ``stream``."""
        done = EMPTY
        async for part in self.stream(request, session=session):
            done = join(done, part)
        return done

    async def stream(self, request: GenerateRequest, *, session: str = "") -> AsyncGenerator[GenerateResult, None]:
        """Sample, and yield parts as they arrive, as far as their versions are certain; the last has the finish reason.

        SGLang reports the versions of all tokens at the end, and with every event the version of that moment. Several
        tokens in one event may be older than its version, so only those between two events of one version have it for
        sure. Tokens after an update of the weights are held back until the end, which must confirm those yielded.

        Raises EngineLost also if the engine's weights are older than ``request.min_version``, EngineRejected also for
        a server without --incremental-streaming-output, whose every event repeats all tokens.

        Raises EngineRejected for truncating samplers, since SGLang reports log-probabilities before the truncation, and
        SchemaRejected for JSON schemas, since it is started without the tokenizer that they need. Prompts with images
        are rejected, since it decodes their ids to text and tokenises that again (``load_mm_data`` in
        ``sglang/srt/multimodal/processors/base_processor.py``), so that other ids would be sampled from than trained.
        """
        if request.images:
            raise EngineRejected(
                f"SGLang tokenises prompts with images again, so it cannot serve the {len(request.images)} images of "
                f"request {request.request_id}; use rollout.engine: vllm or embedded"
            )
        if request.json_schema:
            raise SchemaRejected("SGLang, which serves token ids without a tokenizer, cannot follow a JSON schema")
        if request.sampling.truncating:
            raise EngineRejected(
                "SGLang reports log-probabilities of the distribution before top_p, top_k and min_p truncate it; use "
                "top_p=1, top_k=0 and min_p=0, or another kind of engine"
            )
        # The id is unique per attempt, since SGLang refuses a known id until it notices that an earlier client has
        # disconnected. Its suffix has a fixed length, since aborting an id also aborts all ids that begin with it.
        rid = f"{request.request_id};{uuid.uuid4().hex}"
        self._running[request.request_id] = rid
        try:
            async with aclosing(self._parts(rid, request)) as parts:
                async for part in parts:
                    yield part
        finally:
            self._running.pop(request.request_id, None)

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request that this client has in flight, or all of the engine's."""
        if request_id is None:
            await self._http.call("POST", "/abort_request", {"abort_all": True})
        elif request_id in self._running:
            await self._http.call("POST", "/abort_request", {"rid": self._running[request_id]})

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop decoding: ``keep`` the requests (their caches are recomputed) or ``abort`` them.

        With adapters requests are aborted, too, since each keeps its adapters; their callers continue them.

        Raises EngineRejected for ``wait``, since SGLang cannot let running requests finish first.
        """
        if mode not in PAUSE_MODES:
            raise EngineRejected(f"SGLang cannot pause with mode {mode!r}; it can: {', '.join(PAUSE_MODES)}")
        sent = "abort" if self._adapters else PAUSE_MODES[mode]
        await self._http.call("POST", "/pause_generation", {"mode": sent})

    async def resume(self) -> None:
        await self._http.call("POST", "/continue_generation", {})

    async def workers(self) -> int:
        """Return the number of processes that receive: SGLang's tensor-parallel ranks, or the server for adapters."""
        info = self._http.decode(await self._http.call("GET", "/server_info"), ServerInfo)
        self._adapters = info.enable_lora
        return 1 if self._adapters else info.tp_size

    async def boxes(self, tensors: Mapping[str, list[int]]) -> None:
        """Return None, since SGLang's workers take whole tensors."""

    async def init_transfer(self, init: InitInfo) -> None:
        """Join a weight-transfer group; first leave the earlier one, and one of this name left by another trainer."""
        if self._adapters:
            if init.backend == "nccl":
                raise EngineRejected("SGLang's server receives adapters on the host; use weight_sync.way=gloo")
            await self._http.call("POST", "/init_weight_transfer_engine", InitTransferBody(init))
            return
        if init.backend not in BACKENDS:
            raise EngineRejected(f"SGLang receives weights by {' or '.join(BACKENDS)}, not by {init.backend}")
        if init.store:
            raise EngineRejected("SGLang joins groups at an address only; name it in rollout.engine, or take it away")
        for name in {self._group, init.group_name} - {""}:
            await self._leave(name)
        self._group = ""
        body = GroupBody(
            master_address=init.master_address,
            master_port=init.master_port,
            rank_offset=init.rank_offset,
            world_size=init.world_size,
            group_name=init.group_name,
            backend=BACKENDS[init.backend],
        )
        await self._control("/init_weights_update_group", body)
        self._group = init.group_name

    async def start_update(self, staged: bool = False) -> None:
        """Begin a weight update; first end an unfinished one, since SGLang refuses a second.

        Raises EngineRejected for ``staged``, since SGLang loads buckets as they arrive.
        """
        if staged:
            raise EngineRejected("SGLang cannot stage weights; weight_sync.way=staged needs another kind of engine")
        if self._adapters:
            await self._http.call("POST", "/start_weight_update")
            return
        try:
            await self._control("/begin_weight_update", BeginBody())
        except EngineRejected as error:
            if "already open" not in str(error):
                raise
            await self._control("/end_weight_update", {})
            await self._control("/begin_weight_update", BeginBody())

    async def update(self, info: UpdateInfo) -> None:
        """Receive one bucket. SGLang has no checksums, so that of ``info`` is not verified.

        Raises EngineRejected for pieces of a parameter, deltas, and buckets to hold, which SGLang cannot load.
        """
        if self._adapters:
            await self._http.call("POST", "/update_weights", UpdateWeightsBody(info))
            return
        if not self._group:
            raise EngineRejected("weight update: init_transfer has not been called")
        if info.starts or info.numels:
            raise EngineRejected(
                "SGLang loads whole parameters only: the largest must fit into weight_sync.bucket_bytes"
            )
        if info.kind == "delta" or info.hold != "no":
            raise EngineRejected("SGLang keeps no copy of its weights for weight_sync.way=delta; use another engine")
        body = BucketBody(names=info.names, dtypes=info.dtype_names, shapes=info.shapes, group_name=self._group)
        await self._control("/update_weights_from_distributed", body)

    async def finish_update(self, version: Version) -> None:
        """End the update after the last bucket: name the weights ``version`` and flush caches of the old ones.

        The engine must be paused, since SGLang refuses to flush its cache while requests run.
        """
        if self._adapters:
            await self._http.call("POST", "/finish_weight_update")
        else:
            await self._control("/end_weight_update", {})
            await self._http.call("POST", "/flush_cache")
        await self._control("/update_weight_version", VersionBody(new_version=str(version)))

    async def version(self) -> Version | None:
        name = self._http.decode(await self._http.call("GET", "/model_info"), ModelInfo).weight_version
        return None if name is None or name == NO_VERSION else parse_version(self.url, name, self._read_version)

    async def checksums(self) -> dict[str, str]:
        """Return the engine's checksum of each loaded tensor; names begin with the worker's number."""
        raw = await self._control("/weights_checker", {"action": "checksum", "selector": "target"})
        ranks = self._http.decode(raw, ChecksumReply).ranks
        return {f"tp{i}:{name}": value for i, rank in enumerate(ranks) for name, value in rank.checksums.items()}

    async def sleep(self, level: int) -> None:
        """Free device memory: level 1 the KV cache, level 2 the weights too. The engine must be paused."""
        tags = ["kv_cache"] if level == 1 else ["kv_cache", "weights"]
        await self._http.call("POST", "/release_memory_occupation", {"tags": tags})

    async def wake(self, tags: Sequence[str]) -> None:
        """Allocate again the memory that ``sleep`` freed; ``tags`` are ``weights``, ``kv_cache`` or both."""
        await self._http.call("POST", "/resume_memory_occupation", {"tags": list(tags)})

    async def is_sleeping(self) -> bool:
        """Return whether any device memory that ``sleep`` freed is still free, by the middleware of ``__main__.py``."""
        return self._http.decode(await self._http.call("GET", "/is_sleeping"), SleepReply).is_sleeping

    async def load(self) -> EngineLoad:
        """Read the engine's load. SGLang reports waiting preempted requests, but does not count preemptions."""
        raw = await self._http.call("GET", "/v1/loads", params={"include": "core,queues"})
        loads = self._http.decode(raw, LoadReply).loads
        return EngineLoad(
            running=sum(load.num_running_reqs for load in loads),
            waiting=sum(load.num_waiting_reqs for load in loads),
            cache_usage=max((load.token_usage for load in loads), default=0.0),
            preempted=sum(load.queues.retracted for load in loads if load.queues is not None),
        )

    async def health(self) -> bool:
        return await self._http.healthy()

    async def close(self) -> None:
        await self._http.close()

    async def _leave(self, group: str) -> None:
        try:
            await self._control("/destroy_weights_update_group", {"group_name": group})
        except EngineRejected as error:
            if "does not exist" not in str(error):
                raise

    async def _control(self, path: str, body: object) -> bytes:
        """POST to a route with a ControlReply. Raises EngineRejected, with its message, if it failed."""
        raw = await self._http.call("POST", path, body)
        reply = self._http.decode(raw, ControlReply)
        if not reply.success:
            raise EngineRejected(f"{self.url}{path}: {reply.message}")
        return raw

    async def _parts(self, rid: str, request: GenerateRequest) -> AsyncGenerator[GenerateResult, None]:
        incoming = IncomingAnswer(self.url, request, self._read_version)
        # Tokens received, and tokens yielded, all of which the weights of this name sampled.
        received, yielded, version = 0, 0, ""
        async for data in self._http.events(GENERATE, _body(rid, request)):
            event: SampleEvent = self._http.decode(data, SampleEvent)
            if event.error is not None:
                raise self._http.error_for(GENERATE, event.error.code, event.error.message)
            if event.meta_info is None:
                raise EngineLost(f"{self.url} answered with tokens and nothing about them")
            meta, end = event.meta_info, event.meta_info.finish_reason
            if isinstance(end, Aborted) and end.status_code is not None:
                kind = EngineRejected if 400 <= end.status_code < 500 else EngineLost
                raise kind(f"{self.url} aborted with {end.status_code}: {end.message}")
            # The event of a request that is aborted while it waits repeats the last token, and all log-probabilities.
            tokens = event.output_ids[: max(0, meta.completion_tokens - received)]
            if len(tokens) < len(event.output_ids) and not isinstance(end, Aborted):
                raise EngineRejected(f"{self.url} repeats tokens; start it with --incremental-streaming-output")
            sampled = (meta.output_token_logprobs or [])[: len(tokens)]
            if [token for _, token, _ in sampled] != tokens:
                raise EngineRejected(f"{self.url} answered without one log-probability per sampled token")
            incoming.add(tokens, [logprob for logprob, _, _ in sampled])
            certain = yielded == received and (meta.weight_version == version or received + len(tokens) == 1)
            received += len(tokens)
            if end is not None:
                spans = [span for span in meta.weight_versions or [] if span.end > span.start]
                if yielded and not (spans and spans[0].version == version and spans[0].end >= yielded):
                    raise EngineLost(f"{self.url} named {version} for {yielded} tokens, and others at the end")
                yield incoming.part(spans, end.name)
                return
            if certain and tokens:
                yielded, version = received, meta.weight_version
                yield incoming.part([WeightSpan(version, 0, received)], "abort")
        raise EngineLost(f"{self.url} ended its answer without a finish reason")


def _body(rid: str, request: GenerateRequest) -> SampleBody:
    sampling = request.sampling
    return SampleBody(
        rid=rid,
        input_ids=request.token_ids,
        sampling_params=SamplingBody(
            max_new_tokens=request.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=NO_TOP_K,
            min_p=sampling.min_p,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=not request.stop_token_ids,
            sampling_seed=request.seed,
        ),
    )
