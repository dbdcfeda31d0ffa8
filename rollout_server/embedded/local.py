"""The embedded engine inside this process, as a Generator without a server: for the warm start's greedy check."""

import asyncio
import itertools

from torch import nn

from rl_async.errors import EngineLost, EngineRejected, SchemaRejected
from rl_async.messages import Version, VersionRun
from rl_async.rollout_server.api import GenerateRequest, GenerateResult
from rl_async.rollout_server.embedded.core import EngineCore
from rl_async.rollout_server.embedded.engine_thread import EngineThread
from rl_async.rollout_server.embedded.sequence import Sequence


class LocalEngine:
    """Samples from the current weights of ``model``; close it before the model is trained further."""

    def __init__(self, model: nn.Module, *, max_batch: int, max_length: int) -> None:
        # The model's weights may change between two requests, unannounced.
        core = EngineCore(model, max_batch=max_batch, max_length=max_length, reuse_prefixes=False)
        self._engine = EngineThread(core, self._crashed)
        self._waiting: set[asyncio.Future[Sequence]] = set()
        self._numbers = itertools.count()

    async def generate(self, request: GenerateRequest, *, session: str) -> GenerateResult:
        """Sample a continuation, as ``api.Generator`` says; every token carries version 0.0."""
        if (refusal := self._engine.core.refusal(request.token_ids, request.max_tokens)) is not None:
            raise EngineRejected(refusal)
        if request.json_schema:
            raise SchemaRejected("without a server the engine follows no JSON schema")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Sequence] = loop.create_future()
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)

        def deliver(done: Sequence) -> None:
            loop.call_soon_threadsafe(_resolve, future, done)

        sequence = Sequence(
            request_id=f"{request.request_id}-{next(self._numbers)}",
            tokens=list(request.token_ids),
            sampling=request.sampling,
            max_tokens=request.max_tokens,
            stop_token_ids=frozenset(request.stop_token_ids),
            seed=request.seed,
            deliver=deliver,
        )
        self._engine.submit(sequence)
        try:
            done = await future
        except asyncio.CancelledError:
            self._engine.abort(sequence)
            raise
        assert done.finish_reason is not None
        return GenerateResult(
            token_ids=done.sampled,
            logprobs=done.logprobs,
            versions=[VersionRun(Version(), 0, len(done.logprobs))],
            finish_reason=done.finish_reason,
        )

    def close(self) -> None:
        """Stop the engine's thread, dropping requests in flight."""
        self._engine.stop()

    def _crashed(self, error: Exception) -> None:
        for future in list(self._waiting):
            lost = EngineLost(f"the engine failed: {error}")
            future.get_loop().call_soon_threadsafe(_fail, future, lost)


def _resolve(future: "asyncio.Future[Sequence]", done: Sequence) -> None:
    if not future.done():
        future.set_result(done)


def _fail(future: "asyncio.Future[Sequence]", error: EngineLost) -> None:
    if not future.done():
        future.set_exception(error)
