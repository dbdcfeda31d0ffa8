"""The parts of a server that vLLM has from 0.32 on, for older ones: above all the version behind each token.

Weights change only while an engine is paused, after its last step has ended, so a token's version is the one that was
held when its step ended. vLLM's engine core stamps the outputs of each step with the monotonic clock, which all
processes of a machine share; ``WeightVersions`` notes on the same clock when updates finished. Outputs that the server
reads late, behind an update, thus keep their version.

``__main__.py`` calls ``register`` where ``private_names.TOKEN_VERSIONS`` are missing.
"""

import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterable
from operator import itemgetter
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse

from rl_async.files import UNDECODABLE
from rl_async.process.http_auth import App, Receive, Scope, Send
from rl_async.weight_sync.protocol import FinishUpdateBody

# Times in seconds of the monotonic clock, ascending, and the version from then on; that of the model's folder as vLLM
# calls it.
HELD: list[tuple[float, str]] = [(0.0, "default")]


class WeightVersions:
    """An ASGI middleware that notes each finished update's version, and answers what such a vLLM cannot.

    These are ``/weight_info`` and ``/weight_checker``, as in vLLM 0.32.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or pass the request on. The update counts once vLLM has answered 200."""
        match (scope.get("method"), scope.get("path")):
            case ("GET", "/weight_info"):
                await JSONResponse({"weight_version": HELD[-1][1]})(scope, receive, send)
            case ("POST", "/weight_checker"):
                found = await scope["app"].state.engine_client.collective_rpc("weight_checksums")
                await JSONResponse({"checksums": {k: v for worker in found for k, v in worker.items()}})(
                    scope, receive, send
                )
            case ("POST", "/finish_weight_update"):
                await self._finish(scope, receive, send)
            case _:
                await self._app(scope, receive, send)

    async def _finish(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).body()
        try:
            version = msgspec.json.decode(body, type=FinishUpdateBody).weight_version
        except UNDECODABLE as error:
            return await JSONResponse({"error": str(error)}, 400)(scope, receive, send)

        async def again() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        async def note(message: Any) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                HELD.append((time.monotonic(), version))
            await send(message)

        await self._app(scope, again, note)


class Tokens(list[int]):
    """Sampled tokens of one part of an answer, and the versions of all tokens of the answer so far.

    vLLM appends the next part to one that waits to be sent. These vLLMs send nothing for a part without tokens, so the
    last one, whose finish reason has to be sent, is true.
    """

    def __init__(self, tokens: Iterable[int], versions: list[dict[str, Any]], *, last: bool) -> None:
        super().__init__(tokens)
        self.versions, self._last = versions, last

    def __bool__(self) -> bool:
        return self._last or len(self) > 0

    def extend(self, later: Iterable[int]) -> None:
        """Append the next part, whose versions are those of both."""
        super().extend(later)
        if isinstance(later, Tokens):
            self.versions, self._last = later.versions, later._last


class Samples(list[Any]):
    """The outputs of a part; their number is that of all samples of the request, as these vLLMs take it for."""

    def __init__(self, outputs: Iterable[Any], total: int) -> None:
        super().__init__(outputs)
        self._total = total

    def __len__(self) -> int:
        return self._total


def register() -> None:
    """Patch vLLM: streams name the versions of tokens in every part, and metrics tell an engine that is half awake."""
    from vllm.entrypoints.scale_out.token_in_token_out import serving
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

    process, make = OutputProcessor.process_outputs, RequestState._new_completion_output
    stream, wake = serving.ServingTokens.serve_tokens_stream_generator, AsyncLLM.wake_up

    def noting(processor: Any, outputs: Any, timestamp: float, *arguments: Any, **named: Any) -> Any:
        version = HELD[bisect_right(HELD, timestamp, key=itemgetter(0)) - 1][1]
        for output in outputs:
            state = processor.request_states.get(output.request_id)
            if state is not None and output.new_token_ids:
                starts = state.__dict__.setdefault("rl_async_starts", [])
                if not starts or starts[-1][0] != version:
                    starts.append((version, state.detokenizer.num_output_tokens()))
        return process(processor, outputs, timestamp, *arguments, **named)

    def with_versions(state: Any, *arguments: Any, **named: Any) -> Any:
        output = make(state, *arguments, **named)
        starts, sampled = getattr(state, "rl_async_starts", []), state.detokenizer.num_output_tokens()
        ends = [start for _, start in starts[1:]] + [sampled]
        spans = [{"version": v, "start": start, "end": end} for (v, start), end in zip(starts, ends, strict=False)]
        output.weight_versions = spans
        output.token_ids = Tokens(output.token_ids, spans, last=output.finish_reason is not None)
        return output

    def to_client(handler: Any, request: Any, results: Any, *arguments: Any) -> Any:
        return stream(handler, request, _counted(results, request.sampling_params.n), *arguments)

    async def wake_up(server: Any, tags: Any = None) -> Any:
        answer = await wake(server, tags)
        if server.logger_manager is not None and await server.engine_core.is_sleeping_async():
            server.logger_manager.record_sleep_state(1, 1)
        return answer

    OutputProcessor.process_outputs, RequestState._new_completion_output = noting, with_versions
    serving.ServingTokens.serve_tokens_stream_generator, AsyncLLM.wake_up = to_client, wake_up
    if hasattr(serving, "GenerateResponseStreamChoice"):
        _send_versions(serving)


def _send_versions(serving: Any) -> None:
    class Choice(serving.GenerateResponseStreamChoice):
        """A choice in a part of a stream."""

        weight_versions: list[dict[str, Any]] | None = None

        def __init__(self, **named: Any) -> None:
            super().__init__(**named | {"weight_versions": named["token_ids"].versions})

    class Part(serving.GenerateStreamResponse):
        """A part of a stream, which would otherwise be written without the fields of ``Choice``."""

        choices: list[Choice]

    serving.GenerateResponseStreamChoice, serving.GenerateStreamResponse = Choice, Part


async def _counted(results: AsyncIterator[Any], samples: int) -> AsyncIterator[Any]:
    async for result in results:
        result.outputs = Samples(result.outputs, samples)
        yield result
