"""Client of one engine that speaks SGLang's HTTP dialect (0.5.23): the control routes of its native API.

SGLang stops at a token only where it may also stop at the model's own end of sequence, reports log-probabilities after
the temperature but before top-k, top-p and min-p, and takes weights from a torch process group. Routes, fields and the
states between them are those of ``sglang/srt/entrypoints/http_server.py`` and ``sglang/srt/managers``.
"""

import uuid
from collections.abc import AsyncGenerator, Sequence

from rl_async.errors import EngineLost, EngineRejected
from rl_async.messages import Version
from rl_async.rollout_server.answers import IncomingAnswer, ReadVersion, parse
from rl_async.rollout_server.api import EngineLoad, GenerateRequest, GenerateResult, PauseMode
from rl_async.rollout_server.http import EngineHttp
from rl_async.rollout_server.sglang.bodies import (
    Aborted,
    Answer,
    Checksums,
    GenerateBody,
    GroupBody,
    Loads,
    ModelInfo,
    Outcome,
    SamplingBody,
    UpdateBody,
    VersionBody,
)
from rl_async.weight_sync.protocol import InitInfo, UpdateInfo

GENERATE = "/generate"
NO_VERSION = "default"  # what SGLang calls weights that nobody named
NO_TOP_K = -1
BACKENDS = {"gloo": "gloo", "nccl": "nccl"}  # ours to torch's, which makes SGLang's side of the group
PAUSE_MODES = {"keep": "retract", "abort": "abort"}  # retract: caches are given up, and recomputed on resume


class SglangEngine:
    """One engine at ``url``. Methods raise EngineRejected for 4xx answers and for what SGLang cannot do, EngineLost for
    everything that fails.

    ``timeout_s`` bounds every call; a caller with a shorter deadline cancels it. ``read_version`` reads the names of
    weights that the engine answers.
    """

    def __init__(self, url: str, timeout_s: float | None = 600.0, read_version: ReadVersion = Version.parse) -> None:
        self._http, self._read_version = EngineHttp(url, timeout_s), read_version
        self.url = self._http.url
        self._running: dict[str, str] = {}  # SGLang's id of each request that this client waits for
        self._group = ""  # the weight-transfer group that this client made the engine join
        self._asleep: set[str] = set()

    async def generate(self, request: GenerateRequest, *, session: str = "") -> GenerateResult:
        """Sample once. Raises EngineLost also when the engine was older than ``request.min_version``.

        Raises EngineRejected for truncating samplers: the log-probabilities would be those of another distribution.
        """
        if request.sampling.truncating:
            raise EngineRejected(
                "SGLang's log-probabilities are those before top_p, top_k and min_p cut tokens off; use top_p=1, "
                "top_k=0 and min_p=0, or another kind of engine"
            )
        # New for each attempt: SGLang refuses an id until it has noticed that an earlier client hung up. Of one length:
        # it also aborts all ids that the given one is a prefix of.
        rid = f"{request.request_id};{uuid.uuid4().hex}"
        self._running[request.request_id] = rid
        try:
            raw = b"".join([data async for data in self._http.sample(GENERATE, _body(rid, request))])
        finally:
            self._running.pop(request.request_id, None)
        return self._result(request, self._http.decode(raw, Answer))

    async def stream(self, request: GenerateRequest, *, session: str = "") -> AsyncGenerator[GenerateResult, None]:
        """As ``generate``, in one part: SGLang tells which weights sampled which tokens only at the end."""
        yield await self.generate(request, session=session)

    async def abort(self, request_id: str | None = None) -> None:
        """Abort one request that this client sent, or all. One that has ended already is none."""
        if request_id is None:
            await self._http.call("POST", "/abort_request", {"abort_all": True})
        elif request_id in self._running:
            await self._http.call("POST", "/abort_request", {"rid": self._running[request_id]})

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop decoding: keep requests (their caches are recomputed) or abort them.

        Raises EngineRejected for ``wait``: SGLang has no pause that lets running requests finish.
        """
        if mode not in PAUSE_MODES:
            raise EngineRejected(f"SGLang cannot pause with mode {mode!r}; it can: {', '.join(PAUSE_MODES)}")
        await self._http.call("POST", "/pause_generation", {"mode": PAUSE_MODES[mode]})

    async def resume(self) -> None:
        """Go on decoding."""
        await self._http.call("POST", "/continue_generation", {})

    async def init_transfer(self, init: InitInfo) -> None:
        """Join a weight-transfer group, leaving the earlier one, and one of the same name that another trainer left."""
        if init.backend not in BACKENDS:
            raise EngineRejected(f"SGLang takes weights by {' or '.join(BACKENDS)}, not by {init.backend}")
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
        """Begin a weight update. SGLang refuses while one is unfinished, so that one is ended first.

        Raises EngineRejected for ``staged``: SGLang loads what it receives.
        """
        if staged:
            raise EngineRejected("SGLang cannot keep weights aside; weight_sync.staged needs other engines")
        try:
            await self._control("/begin_weight_update", {})
        except EngineRejected as error:
            if "already open" not in str(error):
                raise
            await self._control("/end_weight_update", {})
            await self._control("/begin_weight_update", {})

    async def update(self, info: UpdateInfo) -> None:
        """Receive one bucket. SGLang knows no checksums; that of ``info`` is not verified.

        Raises EngineRejected for what SGLang cannot put together: pieces of a parameter, and deltas.
        """
        if not self._group:
            raise EngineRejected("an update before the transfer was initialised")
        if info.starts or info.numels:
            raise EngineRejected(
                "SGLang takes whole parameters only; the largest must fit into weight_sync.bucket_bytes"
            )
        if info.kind == "delta" or info.hold != "no":
            raise EngineRejected("SGLang keeps no copy of its weights; weight_sync.delta needs other engines")
        body = UpdateBody(names=info.names, dtypes=info.dtype_names, shapes=info.shapes, group_name=self._group)
        await self._control("/update_weights_from_distributed", body)

    async def finish_update(self, version: Version) -> None:
        """All buckets were sent; the weights are ``version``. No cache of the old ones is kept.

        The engine must be paused: SGLang flushes no cache while requests run.
        """
        await self._control("/end_weight_update", {})
        await self._http.call("POST", "/flush_cache")
        await self._control("/update_weight_version", VersionBody(new_version=str(version)))

    async def version(self) -> Version | None:
        """The version that the engine serves; None before its first update."""
        name = self._http.decode(await self._http.call("GET", "/model_info"), ModelInfo).weight_version
        return None if name is None or name == NO_VERSION else parse(self.url, name, self._read_version)

    async def checksums(self) -> dict[str, str]:
        """A checksum per loaded tensor."""
        raw = await self._control("/weights_checker", {"action": "checksum"})
        ranks = self._http.decode(raw, Checksums).ranks
        return {name: value for rank in ranks for name, value in rank.checksums.items()}

    async def sleep(self, level: int) -> None:
        """Free device memory: 1 the KV cache, 2 the weights too. The engine must be paused."""
        tags = ["kv_cache"] if level == 1 else ["kv_cache", "weights"]
        await self._http.call("POST", "/release_memory_occupation", {"tags": tags})
        self._asleep |= set(tags)

    async def wake(self, tags: Sequence[str]) -> None:
        """Take memory back for ``weights`` and/or ``kv_cache``. What is awake is not asked for: SGLang would end."""
        asleep = [tag for tag in tags if tag in self._asleep]
        if asleep:
            await self._http.call("POST", "/resume_memory_occupation", {"tags": asleep})
            self._asleep -= set(asleep)

    async def is_sleeping(self) -> bool:
        """Whether this client put the engine to sleep and has not woken it. SGLang itself does not tell."""
        return bool(self._asleep)

    async def load(self) -> EngineLoad:
        """How busy it is. SGLang tells how many requests it has put back and not resumed, which stands for how many it
        ever put back."""
        raw = await self._http.call("GET", "/v1/loads", params={"include": "core,queues"})
        loads = self._http.decode(raw, Loads).loads
        return EngineLoad(
            requests=sum(load.num_running_reqs + load.num_waiting_reqs for load in loads),
            cache_usage=max((load.token_usage for load in loads), default=0.0),
            preemptions=sum(load.queues.retracted for load in loads if load.queues is not None),
        )

    async def health(self) -> bool:
        """Whether the engine answers its probe within 5 s."""
        return await self._http.healthy()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def _leave(self, group: str) -> None:
        try:
            await self._control("/destroy_weights_update_group", {"group_name": group})
        except EngineRejected as error:
            if "does not exist" not in str(error):
                raise

    async def _control(self, path: str, body: object) -> bytes:
        """POST to a route that answers ``{"success", "message"}``. Raises EngineRejected, with the message."""
        raw = await self._http.call("POST", path, body)
        outcome = self._http.decode(raw, Outcome)
        if not outcome.success:
            raise EngineRejected(f"{self.url}{path}: {outcome.message}")
        return raw

    def _result(self, request: GenerateRequest, answer: Answer) -> GenerateResult:
        meta = answer.meta_info
        if isinstance(meta.finish_reason, Aborted) and meta.finish_reason.status_code is not None:
            rejected = 400 <= meta.finish_reason.status_code < 500
            kind = EngineRejected if rejected else EngineLost
            raise kind(f"{self.url} aborted with {meta.finish_reason.status_code}: {meta.finish_reason.message}")
        sampled = meta.output_token_logprobs or []
        if [token for _, token, _ in sampled] != answer.output_ids:
            raise EngineRejected(f"{self.url} answered without one log-probability per sampled token")
        incoming = IncomingAnswer(self.url, request, self._read_version)
        incoming.add(answer.output_ids, [logprob for logprob, _, _ in sampled])
        spans = [span for span in meta.weight_versions or [] if span.end > span.start]
        return incoming.part(spans, meta.finish_reason.name)


def _body(rid: str, request: GenerateRequest) -> GenerateBody:
    sampling = request.sampling
    return GenerateBody(
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
