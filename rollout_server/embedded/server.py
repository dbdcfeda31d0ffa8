"""Serves the embedded engine over HTTP in vLLM's dialect, so that one client works with both.

Unknown sampling keys are refused. A request's samples are sent as server-sent events, part by part while they are
sampled. Starlette's StreamingResponse would open a task group for each answer, which for a short answer takes longer
than everything else that the server does. Metrics have vLLM's names, so that clients and dashboards can read both.
``serve`` is the engine's process: it makes model, thread and server.
"""

import asyncio
import base64
import io
import itertools
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
import torch
from msgspec import Meta
from prometheus_client.core import CounterMetricFamily, Metric
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from rl_async import tracing
from rl_async.concurrency import in_daemon_thread, to_the_end
from rl_async.configs.derived import adapter_way, compute_type
from rl_async.configs.load import load_resolved
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import DataError, EngineLost, UserError, WeightSyncError
from rl_async.files import UNDECODABLE
from rl_async.messages import Sampling, Version
from rl_async.model_files import read_object, weights_name
from rl_async.pictures import PictureProcessor
from rl_async.process.http_auth import Access
from rl_async.process.http_server import application, by_label, gauge, metrics_text, read_body, server_of, text_response
from rl_async.process.role import bind
from rl_async.rollout_server.api import LineageFence, PauseMode
from rl_async.rollout_server.embedded.core import (
    ATTENTION,
    SERVED_WITH_IMAGES,
    EngineCore,
    PlacedImage,
    Sequence,
    add_spans,
    capture_for,
    place_images,
)
from rl_async.rollout_server.embedded.engine_thread import EngineThread, quantize_layers
from rl_async.rollout_server.embedded.sampler import Grammars, Matcher
from rl_async.rollout_server.vllm.client import MIN_VERSION_HEADER, REQUEST_PREFIX, ImagePart
from rl_async.torch_shared import is_out_of_memory, pick_device
from rl_async.weight_sync.protocol import FinishUpdateBody, InitTransferBody, UpdateWeightsBody
from rl_async.weight_sync.receiver import AdapterLoader, WeightReceiver

# A generate request, with its images, has at most this many bytes.
MOST_BYTES = 1 << 27


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """The constraint on the answer: ``json`` is a JSON schema, as text."""

    json: str


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True):
    """``sampling_params`` of a generate request; values out of range are refused before they reach the engine."""

    max_tokens: int = 16
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    # Both 0 and -1 switch it off.
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    # The number of likeliest tokens that are told beside each sampled one.
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = 0
    # The number of samples.
    n: Annotated[int, Meta(ge=1)] = 1
    # The tokens in each part of a stream.
    stream_interval: Annotated[int, Meta(ge=1)] = 1
    structured_outputs: StructuredOutputs | None = None
    # The answer names the experts of tokens from this one on.
    routed_experts_prompt_start: Annotated[int, Meta(ge=0)] = 0


class GenerateBody(msgspec.Struct):
    """Request of ``POST /inference/v1/generate``, for ``n`` samples of one prompt."""

    token_ids: list[int]
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    # The images of the prompt, in the order of their positions.
    content_parts: list[ImagePart] | None = None
    request_id: str = ""
    stream: bool = False

    def sampling(self) -> Sampling:
        """Return the sampling parameters that determine the distribution of each token."""
        p = self.sampling_params
        return Sampling(p.temperature, p.top_p, max(p.top_k, 0), p.min_p)


class AbortBody(msgspec.Struct):
    """Request of ``POST /abort_requests``; without ids, all requests are aborted."""

    request_ids: list[str] | None = None


class CheckerBody(msgspec.Struct):
    """Request of ``POST /weight_checker``; vLLM's other actions are not served."""

    action: Literal["checksum"]


def why_stuck(sequences: Iterable[Sequence]) -> str:
    """Return the reason if one of the sequences cannot go on within its schema; empty if all can."""
    return next((f"structured_outputs: {sequence.stuck}" for sequence in sequences if sequence.stuck), "")


def delta(sequence: Sequence, start: int, end: int) -> dict[str, object]:
    """Build an entry of ``choices`` for a running sequence: its samples from ``start`` to ``end`` (exclusive).

    The engine's thread may be appending samples, so nothing beyond ``end`` is read.
    """
    tokens, logprobs = sequence.sampled[start:end], sequence.logprobs[start:end]
    content: list[dict[str, object]] = [{"token_id": t, "logprob": p} for t, p in zip(tokens, logprobs, strict=True)]
    for item, likeliest in zip(content, sequence.likeliest[start:end], strict=False):
        item["top_logprobs"] = [{"token_id": t, "logprob": p} for t, p in likeliest]
    return {
        "index": sequence.index,
        "finish_reason": None,
        "token_ids": tokens,
        "logprobs": {"content": content},
        "weight_versions": [{"version": v, "start": s, "end": e} for v, s, e in sequence.spans(end)],
    }


def choice(sequence: Sequence, start: int = 0) -> dict[str, object]:
    """Build an entry of ``choices`` for a finished sequence: its samples from ``start`` on, and its finish reason."""
    return delta(sequence, start, len(sequence.logprobs)) | {
        "finish_reason": sequence.finish_reason,
        "stop_reason": sequence.tokens[-1] if sequence.finish_reason == "stop" else None,
        "routed_experts": _routes(sequence),
    }


def _routes(sequence: Sequence) -> str | None:
    """Return the recorded experts of the tokens from ``routed_from`` on as vLLM does: an .npy file in base64."""
    if sequence.routes is None:
        return None
    experts = sequence.routes[sequence.routed_from :].cpu().numpy()
    file = io.BytesIO()
    np.save(file, experts if experts.dtype == np.uint8 else experts.astype(np.uint16), allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def answer(sequences: list[Sequence], model: str) -> dict[str, object]:
    """Build the response to a generate request that is not streamed."""
    prompt, sampled = sequences[0].prompt_length, sum(len(sequence.logprobs) for sequence in sequences)
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": sequences[0].cached_tokens},
    }
    choices = [choice(sequence) for sequence in sequences]
    return {"request_id": sequences[0].request_id, "model": model, "usage": usage, "choices": choices}


HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]
END = b"data: [DONE]\n\n"

# Holds sequences that may have grown, and None once the client has disconnected.
SequenceEvents: TypeAlias = "asyncio.Queue[Sequence | None]"


class SequenceStream:
    """An ASGI response. ``abort`` is called with each sequence that is unfinished when the client disconnects.

    The head is sent with the first part, since by itself it would only wake the client.
    """

    def __init__(self, sequences: list[Sequence], events: SequenceEvents, abort: Callable[[Sequence], object]) -> None:
        self._events, self._abort = events, abort
        # The number of tokens sent for each sequence whose last part was not sent yet.
        self._sent = dict.fromkeys(sequences, 0)
        # Whether the head was sent.
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send parts until all sequences are finished or the client disconnects."""
        # After the request's body, the only message is the disconnect.
        disconnect = asyncio.ensure_future(receive())
        disconnect.add_done_callback(lambda _: self._events.put_nowait(None))
        try:
            while self._sent:
                # A dict serves as an ordered set.
                changed = {await self._events.get(): None}
                while not self._events.empty():
                    changed[self._events.get_nowait()] = None
                if None in changed:
                    return
                if stuck := why_stuck(sequence for sequence in changed if sequence):
                    await self._send(send, {"error": {"message": stuck, "code": 400}}, more=False)
                    return
                if parts := [part for sequence in changed if sequence and (part := self._part(sequence))]:
                    await self._send(send, {"choices": parts}, more=bool(self._sent))
        finally:
            disconnect.cancel()
            for sequence in self._sent:
                if sequence.finish_reason is None:
                    self._abort(sequence)

    def _part(self, sequence: Sequence) -> dict[str, object] | None:
        """Build the entry for the unsent tokens, or return None if all were sent."""
        start = self._sent.get(sequence)
        if start is None:
            return None
        finished = sequence.finish_reason is not None
        # The engine's thread appends a token before its log-probability, so all of these have tokens.
        count = len(sequence.logprobs)
        if finished:
            del self._sent[sequence]
            return choice(sequence, start)
        self._sent[sequence] = count
        return delta(sequence, start, count) if count > start else None

    async def _send(self, send: Send, event: dict[str, object], *, more: bool) -> None:
        """Send an event, with the head before the first one and the end mark after the last one."""
        body = b"data: " + msgspec.json.encode(event) + (b"\n\n" if more else b"\n\n" + END)
        if not self._begun:
            self._begun = True
            length = [] if more else [(b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": [*HEADERS, *length]})
        await send({"type": "http.response.body", "body": body, "more_body": more})


class EngineCollector:
    """Collects the engine's metrics for Prometheus while it works: requests, cache, tokens and sleep state."""

    def __init__(self, engine: EngineThread) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        core = self._engine.core
        held = sum(len(sequence.tokens) for sequence in list(core.running)) / core.cache_tokens
        yield gauge("vllm:num_requests_running", "Sequences that are decoded.", len(core.running))
        yield gauge("vllm:num_requests_waiting", "Sequences that wait.", len(core.waiting) + len(core.held))
        yield gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", held)
        yield gauge("rl_async:kv_cache_bytes", "Bytes of the KV cache.", core.cache_bytes)
        yield CounterMetricFamily("vllm:generation_tokens", "Tokens sampled.", core.sampled_tokens)
        yield CounterMetricFamily("vllm:prompt_tokens", "Tokens of prompts.", core.prompt_tokens)
        yield CounterMetricFamily("vllm:num_preemptions", "Sequences whose cache was dropped.", core.preemptions)
        yield CounterMetricFamily("vllm:prefix_cache_queries", "Prompt tokens looked up.", core.prompt_tokens)
        yield CounterMetricFamily("vllm:prefix_cache_hits", "Prompt tokens found in the cache.", core.cached_tokens)
        awake = {"awake": float(not self._engine.asleep)}
        yield by_label("sleep_state", "vllm:engine_sleep_state", "1 in the state that the engine is in.", awake)


def _placed(core: EngineCore, ids: list[int], parts: list[ImagePart]) -> tuple[PlacedImage, ...]:
    return place_images(core.pictures, ids, [part.image() for part in parts])


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _error(status: int, message: str) -> Response:
    kind = {400: "BadRequestError", 409: "ConflictError"}.get(status, "InternalServerError")
    return _json({"error": {"message": message, "type": kind, "code": status}}, status)


class EngineServer:
    """HTTP routes of one engine. ``app`` is the ASGI application."""

    def __init__(self, engine: EngineThread, model_name: str, loads_adapters: bool = False) -> None:
        """Serve ``engine``; ``model_name`` is the folder of its model and tokenizer.

        An engine that ``loads_adapters`` keeps the weights of that folder and takes adapters alone.
        """
        self.engine, self.model_name = engine, model_name
        self._grammars = Grammars(model_name, engine.core.vocab_size)
        adapters = None
        if loads_adapters:
            # The files are read before the first update asks for the name.
            base = in_daemon_thread(lambda: weights_name(Path(model_name)), "weights-name")
            adapters = AdapterLoader(base.result, engine.load_adapters)
        self._receiver = WeightReceiver(engine.load_weights, engine.core.device, adapters)
        self._threads = torch.get_num_threads()
        self._update_active = False
        # Whether an update has begun to change weights and none has finished since.
        self._mixed = False
        # The receiver handles one call at a time.
        self._transfer = asyncio.Lock()
        self._numbers = itertools.count()
        self._metrics_text = metrics_text(EngineCollector(engine))
        routes: dict[str, Callable[[Request], Any]] = {
            "POST /inference/v1/generate": self.generate,
            "POST /abort_requests": self.abort,
            "POST /pause": self.pause,
            "POST /resume": self.resume,
            "GET /is_paused": self.is_paused,
            "POST /init_weight_transfer_engine": self.init_transfer,
            "POST /start_weight_update": self.start_update,
            "POST /update_weights": self.update,
            "POST /finish_weight_update": self.finish_update,
            "GET /weight_info": self.weight_info,
            "GET /get_world_size": self.world_size,
            "POST /weight_checker": self.weight_checker,
            "POST /sleep": self.sleep,
            "POST /wake_up": self.wake,
            "GET /health": self.health,
            "GET /load": self.load,
            "GET /metrics": self.metrics,
        }
        self.app = application(
            {key: self._guarded(handler) for key, handler in routes.items()}, middleware=[Middleware(LineageFence)]
        )

    def _guarded(self, handler: Callable[[Request], Any]) -> Callable[[Request], Any]:
        """Answer 400 for a bad body, 409 for a failed weight transfer, and 503 once the engine has stopped."""

        async def guarded(request: Request) -> Response:
            try:
                return await handler(request)
            except (*UNDECODABLE, ValueError, DataError) as error:
                return _error(400, str(error))
            except WeightSyncError as error:
                return _error(409, str(error))
            except EngineLost as error:
                return _error(503, str(error))

        return guarded

    async def generate(self, request: Request) -> Response | SequenceStream:
        """Sample; 409 if the weights are older than the request accepts, 400 if it can never be served."""
        body = msgspec.json.decode(await read_body(request, MOST_BYTES), type=GenerateBody)
        core = self.engine.core
        if (refusal := core.refusal(body.token_ids, body.sampling_params.max_tokens)) is not None:
            return _error(400, refusal)
        if body.sampling_params.n > core.max_batch:
            return _error(400, f"n must be at most {core.max_batch}, the number of sequences decoded at once")
        wanted, current = request.headers.get(MIN_VERSION_HEADER), core.version
        if wanted is not None and (current == "default" or Version.parse(current) < Version.parse(wanted)):
            return _error(409, f"the weights are {current}, older than {wanted}")
        images: tuple[PlacedImage, ...] = ()
        if body.content_parts:
            images = await asyncio.to_thread(_placed, core, body.token_ids, body.content_parts)
        loop = asyncio.get_running_loop()
        events: SequenceEvents = asyncio.Queue()

        def post(sequence: Sequence) -> None:
            loop.call_soon_threadsafe(events.put_nowait, sequence)

        matcher = await self._matcher(body.sampling_params)
        sequences = self._sequences(body, images, post, matcher, request.headers.get(tracing.HEADER, ""))
        self.engine.submit(*sequences)
        if body.stream:
            return SequenceStream(sequences, events, self.engine.abort)
        if not await self._until_finished(request, sequences, events):
            return _error(400, "the client disconnected")
        if stuck := why_stuck(sequences):
            return _error(400, stuck)
        return _json(answer(sequences, self.model_name))

    async def _matcher(self, params: SamplingParams) -> Matcher | None:
        """Compile the schema of the samples; None without a schema. Raises ValueError if it cannot be served."""
        if params.structured_outputs is None:
            return None
        stops = frozenset(params.stop_token_ids)
        return await asyncio.to_thread(self._grammars.matcher, params.structured_outputs.json, stops)

    def _sequences(
        self,
        body: GenerateBody,
        images: tuple[PlacedImage, ...],
        post: Callable[[Sequence], None],
        matcher: Matcher | None,
        traceparent: str,
    ) -> list[Sequence]:
        """Make one sequence per requested sample. As in vLLM, the seed of sample i is the request's plus i."""
        params = body.sampling_params
        name = REQUEST_PREFIX + (body.request_id or f"unnamed-{next(self._numbers)}")

        def deliver(sequence: Sequence) -> None:
            add_spans(sequence)
            post(sequence)

        return [
            Sequence(
                request_id=name,
                index=index,
                tokens=list(body.token_ids),
                images=images,
                sampling=body.sampling(),
                max_tokens=params.max_tokens,
                stop_token_ids=frozenset(params.stop_token_ids),
                seed=None if params.seed is None else params.seed + index,
                deliver=deliver if traceparent else post,
                progress=post if body.stream else None,
                stream_interval=params.stream_interval,
                matcher=None if matcher is None else matcher.copy(),
                routed_from=params.routed_experts_prompt_start,
                alternatives=params.logprobs or 0,
                traceparent=traceparent,
            )
            for index in range(params.n)
        ]

    async def _until_finished(self, request: Request, sequences: list[Sequence], events: SequenceEvents) -> bool:
        """Wait for the sequences; if the client disconnects, abort them and return False."""
        # After the body, the only message is the disconnect.
        disconnect = asyncio.ensure_future(request.receive())
        disconnect.add_done_callback(lambda _: events.put_nowait(None))
        try:
            for _ in sequences:
                if await events.get() is None:
                    await to_the_end(*(asyncio.wrap_future(self.engine.abort(s)) for s in sequences))
                    return False
        finally:
            disconnect.cancel()
        return True

    async def abort(self, request: Request) -> Response:
        raw = await read_body(request)
        ids = msgspec.json.decode(raw, type=AbortBody).request_ids if raw else None
        futures = [self.engine.abort(i) for i in ids] if ids is not None else [self.engine.abort(None)]
        counts = await to_the_end(*map(asyncio.wrap_future, futures))
        return _json({"aborted": sum(counts)})

    async def pause(self, request: Request) -> Response:
        mode = msgspec.convert(request.query_params.get("mode", "abort"), PauseMode)
        await asyncio.wrap_future(self.engine.pause(mode))
        return _json({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        """Continue decoding; 409 after an unfinished update, whose weights belong to no version."""
        if self._mixed:
            return _error(409, "a weight update was started and did not finish; finish one before resuming")
        await asyncio.wrap_future(self.engine.resume())
        return _json({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        return _json({"is_paused": self.engine.paused})

    async def init_transfer(self, request: Request) -> Response:
        body = msgspec.json.decode(await read_body(request), type=InitTransferBody)
        async with self._transfer:
            await self._receive(self._receiver.init, body.init_info)
        return _json({"message": "initialised"})

    async def start_update(self, request: Request) -> Response:
        staged = request.query_params.get("staged") == "true"
        if not (staged or self._stopped()):
            return _error(400, "pause the engine before an update: it would sample from mixed weights")
        self._receiver.start()
        self._update_active, self._mixed = True, self._mixed or not staged
        return _json({"message": "started"})

    async def update(self, request: Request) -> Response:
        body = msgspec.json.decode(await read_body(request), type=UpdateWeightsBody)
        if not self._update_active:
            return _error(409, "no weight update was started")
        if body.update_info.hold != "stage" and not self._stopped():
            return _error(400, "pause the engine first: only buckets to stage are accepted while it decodes")
        async with self._transfer:
            try:
                await self._receive(self._receiver.update, body.update_info)
            except WeightSyncError:
                self._update_active = False
                raise
        return _json({"message": "loaded"})

    async def finish_update(self, request: Request) -> Response:
        body = msgspec.json.decode(await read_body(request), type=FinishUpdateBody)
        Version.parse(body.weight_version)
        if not self._update_active:
            return _error(409, "no weight update was started")
        if not self._stopped():
            return _error(400, "pause the engine before finishing an update: it would sample from mixed weights")
        self._mixed = True
        async with self._transfer:
            await self._receive(self._receiver.finish)
        await asyncio.wrap_future(self.engine.set_version(body.weight_version))
        self._update_active = self._mixed = False
        return _json({"message": "finished"})

    async def _receive(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call the receiver in a thread with its own number of torch threads, since decoding may have set it to one."""

        def run() -> None:
            torch.set_num_threads(self._threads)
            call(*arguments)

        await asyncio.to_thread(run)

    def _stopped(self) -> bool:
        return self.engine.paused or self.engine.asleep

    async def weight_info(self, request: Request) -> Response:
        return _json({"weight_version": self.engine.core.version})

    async def world_size(self, request: Request) -> Response:
        return _json({"world_size": 1})

    async def weight_checker(self, request: Request) -> Response:
        msgspec.json.decode(await read_body(request), type=CheckerBody)
        return _json({"checksums": await asyncio.wrap_future(self.engine.checksums())})

    async def sleep(self, request: Request) -> Response:
        level = request.query_params.get("level", "1")
        if level not in ("1", "2"):
            return _error(400, f"level must be 1 or 2, not {level!r}")
        await asyncio.wrap_future(self.engine.sleep(int(level)))
        return _json({"status": "asleep"})

    async def wake(self, request: Request) -> Response:
        await asyncio.wrap_future(self.engine.wake(request.query_params.getlist("tags")))
        return _json({"status": "awake"})

    async def health(self, request: Request) -> Response:
        return Response(status_code=200)

    async def load(self, request: Request) -> Response:
        return _json({"server_load": self.engine.core.unfinished})

    async def metrics(self, request: Request) -> Response:
        """Report the engine's load to Prometheus and to clients, under vLLM's names."""
        return text_response(self._metrics_text())


log = logging.getLogger("rl_async.engine")


def load_model(config: RunConfig) -> torch.nn.Module:
    """Load the model of ``model.path`` onto its device, quantised as configured. Raises UserError if that fails."""
    # Transformers would look for a missing folder on the Hub.
    if not Path(config.model.path).is_dir():
        raise UserError(f"model.path: there is no folder {config.model.path}")
    file = Path(config.model.path) / "config.json"
    stored = read_object(file, "model.path") if file.is_file() else {}
    loader = AutoModelForImageTextToText if stored.get("model_type") in SERVED_WITH_IMAGES else AutoModelForCausalLM
    device, dtype = pick_device(config.model.device), getattr(torch, compute_type(config.model))
    try:
        model: Any = loader.from_pretrained(
            config.model.path, dtype=dtype, attn_implementation=ATTENTION, trust_remote_code=False, use_safetensors=True
        )
    except (OSError, ValueError) as error:
        # Transformers adds paragraphs of advice after the first line.
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"model.path: cannot load a causal LM from {config.model.path}: {reason}") from error
    model = model.to(device).eval()
    if config.rollout.quantization != "none":
        quantize_layers(model, config.rollout.quantization)
    return model


def _crash(error: Exception) -> None:
    """End the process, which the launcher replaces; if it ran out of memory, log the remedy."""
    if is_out_of_memory(error):
        log.error("out of memory: lower rollout.cache_bytes or rollout.max_batch_size (docs/how-to/memory.md)")
    os._exit(1)


def serve(run: Path, index: int, host: str, port: int, cache_bytes: int | None, decode: str | None) -> None:
    """Serve as engine ``index`` of a run until SIGTERM. Raises UserError for an unusable config, model or address.

    ``cache_bytes`` bounds its KV cache, by default as configured. ``decode`` is an argument of ``capture_for``.
    """
    # Also ends the process while the model loads. While uvicorn serves, it handles the signal and re-raises it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    config = load_resolved(run / "config.yaml")
    access = Access.of_run(run, "engines", (host, *config.launcher.http_hosts))
    # Otherwise the launcher's OMP_NUM_THREADS applies.
    if config.launcher.threads is not None:
        torch.set_num_threads(config.launcher.threads)
    torch.manual_seed(config.seed + 10_000 + index)
    listener = bind(host, port, "rollout.port")
    model, rollout = load_model(config), config.rollout
    core = EngineCore(
        model,
        max_batch=rollout.max_batch_size,
        max_length=rollout.max_model_len,
        cache_bytes=cache_bytes or (rollout.cpu_cache_bytes if model.device.type == "cpu" else rollout.cache_bytes),
        min_iteration_s=config.debug.min_iteration_s if config.debug else 0.0,
        record_routes=config.trainer.router_replay != "never",
        pictures=PictureProcessor.load(config.model.path),
        capture=capture_for(decode, next(model.parameters()).device),
    )
    engine = EngineThread(core, on_crash=_crash)
    server = EngineServer(engine, config.model.path, adapter_way(config) == "load")
    dtype, used = str(model.dtype).removeprefix("torch."), listener.getsockname()[1]
    log.info("serving %s in %s on %s port %d", config.model.path, dtype, host, used)
    try:
        with tracing.traced(config.tracking.otlp_endpoint, run, f"engine-{index}"):
            server_of(server.app, access).run(sockets=[listener])
    finally:
        engine.stop()
