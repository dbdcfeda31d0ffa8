"""The embedded engine's HTTP application, in vLLM's dialect, so that one client works with both."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from rl_async import tracing
from rl_async.concurrency import to_the_end
from rl_async.errors import EngineLost, WeightSyncError
from rl_async.files import UNDECODABLE
from rl_async.messages import Version
from rl_async.process.http_server import application, metrics_text, read_body, text_response
from rl_async.rollout_server.api import PauseMode
from rl_async.rollout_server.embedded import dialect, spans
from rl_async.rollout_server.embedded.engine_thread import EngineThread, checksums
from rl_async.rollout_server.embedded.grammars import Grammars, Matcher
from rl_async.rollout_server.embedded.load import EngineCollector
from rl_async.rollout_server.embedded.sequence import Sequence
from rl_async.rollout_server.embedded.stream import SequenceEvents, SequenceStream
from rl_async.rollout_server.fence import LineageFence
from rl_async.rollout_server.vllm.client import MIN_VERSION_HEADER, REQUEST_PREFIX
from rl_async.weight_sync.protocol import FinishUpdateBody, InitTransferBody, UpdateWeightsBody
from rl_async.weight_sync.receiver import WeightReceiver


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _error(status: int, message: str) -> Response:
    kind = {400: "BadRequestError", 409: "ConflictError"}.get(status, "InternalServerError")
    return _json({"error": {"message": message, "type": kind, "code": status}}, status)


class EngineServer:
    """HTTP routes of one engine. ``app`` is the ASGI application."""

    def __init__(self, engine: EngineThread, model_name: str) -> None:
        """``model_name``: the folder of the model, in which its tokenizer is."""
        self.engine, self.model_name = engine, model_name
        self._grammars = Grammars(model_name, engine.core.vocab_size)
        self._receiver = WeightReceiver(engine.load_weights, engine.core.device)
        self._threads = torch.get_num_threads()
        self._update_active = False
        self._mixed = False  # an update was started, and none has finished since
        self._transfer = asyncio.Lock()  # the receiver handles one call at a time
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
        """Answer 400 for a bad body, 409 for a failed weight transfer, which only this request is told of, and 503 once
        the engine has stopped."""

        async def guarded(request: Request) -> Response:
            try:
                return await handler(request)
            except (*UNDECODABLE, ValueError) as error:
                return _error(400, str(error))
            except WeightSyncError as error:
                return _error(409, str(error))
            except EngineLost as error:
                return _error(503, str(error))

        return guarded

    async def generate(self, request: Request) -> Response | SequenceStream:
        """Sample; 409 if the weights are older than the request accepts, 400 if it can never be served."""
        body = msgspec.json.decode(await read_body(request), type=dialect.GenerateBody)
        core = self.engine.core
        if (refusal := core.refusal(body.token_ids, body.sampling_params.max_tokens)) is not None:
            return _error(400, refusal)
        if body.sampling_params.n > core.max_batch:
            return _error(400, f"n must be at most {core.max_batch}, the number of sequences decoded at once")
        if (wanted := request.headers.get(MIN_VERSION_HEADER)) is not None and not self._serves(wanted):
            return _error(409, f"the weights are {core.version}, older than {wanted}")
        loop = asyncio.get_running_loop()
        events: SequenceEvents = asyncio.Queue()

        def post(sequence: Sequence) -> None:
            loop.call_soon_threadsafe(events.put_nowait, sequence)

        matcher = await self._matcher(body.sampling_params)
        sequences = self._sequences(body, post, matcher, request.headers.get(tracing.HEADER, ""))
        self.engine.submit(*sequences)
        if body.stream:
            return SequenceStream(sequences, events, self.engine.abort)
        if not await self._until_finished(request, sequences, events):
            return _error(400, "the client disconnected")
        if stuck := dialect.stuck(sequences):
            return _error(400, stuck)
        return _json(dialect.answer(sequences, self.model_name))

    async def _matcher(self, params: dialect.SamplingParams) -> Matcher | None:
        """Compile the schema that the samples must fit, if there is one. Raises ValueError if it cannot be served."""
        if params.structured_outputs is None:
            return None
        stops = frozenset(params.stop_token_ids)
        return await asyncio.to_thread(self._grammars.matcher, params.structured_outputs.json, stops)

    def _sequences(
        self, body: dialect.GenerateBody, post: Callable[[Sequence], None], matcher: Matcher | None, traceparent: str
    ) -> list[Sequence]:
        """Make one sequence per requested sample; sample i has the seed of the request plus i, as in vLLM."""
        params = body.sampling_params
        name = REQUEST_PREFIX + (body.request_id or f"unnamed-{next(self._numbers)}")

        def deliver(sequence: Sequence) -> None:
            spans.finished(sequence)
            post(sequence)

        return [
            Sequence(
                request_id=name,
                index=index,
                tokens=list(body.token_ids),
                sampling=body.sampling(),
                max_tokens=params.max_tokens,
                stop_token_ids=frozenset(params.stop_token_ids),
                seed=None if params.seed is None else params.seed + index,
                deliver=deliver if traceparent else post,
                progress=post if body.stream else None,
                stream_interval=params.stream_interval,
                matcher=None if matcher is None else matcher.copy(),
                routed_from=params.routed_experts_prompt_start,
                traceparent=traceparent,
            )
            for index in range(params.n)
        ]

    async def _until_finished(self, request: Request, sequences: list[Sequence], events: SequenceEvents) -> bool:
        """Wait for the sequences, and abort them if the client disconnects. Returns whether it is still connected."""
        disconnect = asyncio.ensure_future(request.receive())  # after the body, the only message is the disconnect
        disconnect.add_done_callback(lambda _: events.put_nowait(None))
        try:
            for _ in sequences:
                if await events.get() is None:
                    await to_the_end(*(asyncio.wrap_future(self.engine.abort(s)) for s in sequences))
                    return False
        finally:
            disconnect.cancel()
        return True

    def _serves(self, wanted: str) -> bool:
        current = self.engine.core.version
        return current != "default" and Version.parse(current) >= Version.parse(wanted)

    async def abort(self, request: Request) -> Response:
        raw = await read_body(request)
        ids = msgspec.json.decode(raw, type=dialect.AbortBody).request_ids if raw else None
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
        """Run a call of the receiver in a thread, which would else keep the one thread that decoding has at times."""

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
        msgspec.json.decode(await read_body(request), type=dialect.CheckerBody)
        current = await asyncio.wrap_future(self.engine.call(lambda: checksums(self.engine.core.model)))
        return _json({"checksums": current})

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
        """Report the engine's load to Prometheus and to our clients, under vLLM's names."""
        return text_response(self._metrics_text())
