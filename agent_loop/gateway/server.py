"""The gateway's process: HTTP routes that lease and end episodes, and the policy's answers in each dialect.

    engine ── tokens so far ──> Release ── settled text ──> a dialect's events ──> EventStream ──> client

Only text that no further token changes is sent, so what a client has read is always the beginning of the recorded
answer. The headers of an event stream are sent at once, and pings while nothing comes. ``serve`` is the composition
root: it connects the gateway to engines, reward service and queue.
"""

import asyncio
import contextlib
import functools
import re
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeVar

import msgspec
import uvloop
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rl_async import tracing
from rl_async.agent_loop.chat_formats.format import reasoning_and_answer
from rl_async.agent_loop.chat_formats.format_registry import load_format
from rl_async.agent_loop.gateway import anthropic, completions, openai, responses
from rl_async.agent_loop.gateway.chat import (
    ChatRequest,
    Completion,
    Event,
    UnobeyedFields,
    refuse_many_values,
    unreadable,
)
from rl_async.agent_loop.gateway.gateway_episode import Asked, GatewayEpisode, Release, task_view
from rl_async.agent_loop.gateway.open_episodes import Ending, OpenEpisodes
from rl_async.agent_loop.run_worker import cancel_on_signals
from rl_async.agent_loop.telemetry import SamplesCollector
from rl_async.concurrency import off_loop
from rl_async.configs.checks import gateway_problem
from rl_async.configs.load import load_resolved
from rl_async.configs.schema.rollout import GatewayConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import (
    EXIT_RESTART,
    ConfigError,
    EngineLost,
    EngineRejected,
    QueueLost,
    RequestRefused,
    RlAsyncError,
    UserError,
)
from rl_async.files import UNDECODABLE
from rl_async.process.http_auth import Access, run_token, token_file
from rl_async.process.http_server import application, hang_up_if_late, metrics_text, read_body, server_of, text_response
from rl_async.process.role import bind, run_role
from rl_async.process.run_files import Target, listed, read_endpoints
from rl_async.reward_loop.model_client import forget_api_keys
from rl_async.reward_loop.service import RewardService
from rl_async.rollout_server.pool import engine_pool
from rl_async.transfer_queue.auth.keys import client_keys
from rl_async.transfer_queue.client import QueueClient, SyncQueueClient

FAILURES = (RequestRefused, RecursionError, EngineRejected, EngineLost, QueueLost)


def refusal(error: Exception) -> RequestRefused:
    """Convert an error for the client, which may ask a lost engine again (503), but not repeat a bad request (400)."""
    if isinstance(error, RequestRefused):
        return error
    if isinstance(error, RecursionError):
        return RequestRefused("the request is nested too deeply", code="invalid_request")
    if isinstance(error, EngineRejected):
        return RequestRefused(str(error), code="engine_rejected")
    return RequestRefused(str(error), code=type(error).__name__, status=503)


_CHAT = "chat/completions, responses, completions and messages under an episode's base URL"
# Hints for paths that are not served, the first match counts.
_HINTS = (
    (r"/embeddings$", "the policy embeds nothing; use an embedding service of its own"),
    (r"/v1(beta|alpha)\d*/", f"Gemini's dialect is not served; use a client of OpenAI or Anthropic: {_CHAT}"),
    (r"/(images|audio|moderations|videos)(/|$)", f"the policy reads and writes text only: {_CHAT}"),
    (r"/responses/.+", "responses cannot be fetched or deleted; previous_response_id continues one"),
    (r"/(assistants|threads|conversations)(/|$)", f"use {_CHAT}, which keep the conversation's rows"),
    (r"/messages/batches", "batches are not served; send the messages one by one"),
    (r"/(files|batches|fine_tuning|vector_stores|uploads)(/|$)", f"nothing is stored here; use {_CHAT}"),
    (
        r"^/episodes/[^/]+/(chat/completions|responses|completions|models)",
        "the base URL of OpenAI's clients ends in /v1: `base_url` of the answer to POST /episodes",
    ),
    (r"^/v1/", "every episode has a base URL of its own: POST /episodes returns it"),
    (r"^/episodes/[^/]+/", f"served are {_CHAT}; POST /episodes/ID/reward ends the episode"),
    ("", "POST /episodes begins an episode, and returns its base URLs (docs/how-to/gateway.md)"),
)

# Some clients give up after a few seconds without a byte.
PING_S = 2.0
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Otherwise proxies collect the events.
    (b"x-accel-buffering", b"no"),
]


class AnswerStream(Protocol):
    """The events of one answer in one dialect: ``begin``, ``more`` for each piece of text, then ``end`` or ``fail``.

    If ``named``, the type of an event is sent as its name, too. ``last`` follows a whole answer.
    """

    @property
    def named(self) -> bool: ...
    @property
    def ping(self) -> bytes: ...
    @property
    def last(self) -> bytes: ...
    def begin(self) -> Iterator[Event]: ...
    def more(self, reasoning: str, text: str) -> Iterator[Event]: ...
    def end(self, done: Completion, reasoning: str, text: str) -> Iterator[Event]: ...
    def fail(self, error: RequestRefused) -> Iterator[Event]: ...


class EventStream(Response):
    """Sends an answer while ``work`` samples it. A client that hangs up cancels the work."""

    def __init__(
        self, stream: AnswerStream, release: Release, work: Callable[[], Awaitable[Completion]], ping_s: float
    ) -> None:
        super().__init__()
        self._stream, self._release, self._work, self._ping_s = stream, release, work, ping_s
        # Set when the answer is complete or the client is gone.
        self._over = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the answer is complete, has failed, or the client is gone."""
        working = asyncio.ensure_future(self._work())
        # After the body, the only message is the disconnect.
        gone = asyncio.ensure_future(receive())
        for task in (working, gone):
            task.add_done_callback(self._end)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            await _send(send, self._encode(self._stream.begin()))
            while not self._over:
                await _send(send, await self._next())
            if working.done():
                await _send(send, self._last(working))
                await _send(send, b"", more=False)
        finally:
            working.cancel()
            gone.cancel()

    def _end(self, _: object) -> None:
        self._over = True
        self._release.news.set()

    async def _next(self) -> bytes:
        """Wait for events; return a ping if none come for some time."""
        try:
            async with asyncio.timeout(self._ping_s):
                while True:
                    await self._release.news.wait()
                    self._release.news.clear()
                    events = self._encode(self._stream.more(*self._release.more()))
                    if events or self._over:
                        return events
        except TimeoutError:
            return self._stream.ping

    def _last(self, working: asyncio.Future[Completion]) -> bytes:
        try:
            done = working.result()
        except FAILURES as error:
            return self._encode(self._stream.fail(refusal(error)))
        return self._encode(self._stream.end(done, *self._release.rest(done.message))) + self._stream.last

    def _encode(self, events: Iterator[Event]) -> bytes:
        lines = bytearray()
        for event in events:
            if self._stream.named:
                lines += b"event: " + event["type"].encode() + b"\n"
            lines += b"data: " + msgspec.json.encode(event) + b"\n\n"
        return bytes(lines)


async def _send(send: Send, body: bytes, *, more: bool = True) -> None:
    if body or not more:
        await send({"type": "http.response.body", "body": body, "more_body": more})


T = TypeVar("T")
MAX_WAIT_S = 60.0
# A request with "no" in this header gets an answer that is not trained on.
TRAIN = "X-RL-Async-Train"
Handler = Callable[[Request], Awaitable[Response]]
_Route = tuple[Handler, Callable[[RequestRefused], dict[str, Any]]]


class Begin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``POST /episodes``: how long to wait for an episode."""

    wait_s: float = 20.0


class GiveBack(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``POST /episodes/give-back``: GROUP.SAMPLE.ATTEMPT and why."""

    episode: str
    error: str = "ended by hand"


class GatewayServer:
    """Routes over the episodes. ``app`` is the ASGI application."""

    def __init__(self, config: RunConfig, episodes: OpenEpisodes, ping_s: float = PING_S) -> None:
        self._config, self._episodes, self._ping_s = config, episodes, ping_s
        self._options = config.agent.gateway or GatewayConfig()
        self.fields = UnobeyedFields(self._options.unsupported)
        self._metrics_text = metrics_text(SamplesCollector(episodes))
        routes: dict[str, _Route] = {
            "POST /episodes": (self.begin, openai.error_body),
            "GET /episodes": (self.listing, openai.error_body),
            "POST /episodes/give-back": (self.give_back, openai.error_body),
            "POST /episodes/{id}/heartbeat": (self.heartbeat, openai.error_body),
            "POST /episodes/{id}/reward": (self.end, openai.error_body),
            "GET /health": (self.health, openai.error_body),
            "GET /metrics": (self.metrics, openai.error_body),
        }
        # Some clients append /v1 to a URL that has it.
        for base in ("/episodes/{id}/v1", "/episodes/{id}/v1/v1"):
            routes |= {
                f"POST {base}/chat/completions": (self.chat, openai.error_body),
                f"POST {base}/responses": (self.responses, openai.error_body),
                f"POST {base}/completions": (self.completions, openai.error_body),
                f"POST {base}/messages": (self.messages, anthropic.error_body),
                f"POST {base}/messages/count_tokens": (self.count_tokens, anthropic.error_body),
                f"GET {base}/models": (self.models, openai.error_body),
                f"GET {base}/models/{{model:path}}": (self.model, openai.error_body),
            }
        self.app = application({key: _guarded(handler, body) for key, (handler, body) in routes.items()})
        self.app.add_exception_handler(HTTPException, _not_served)

    async def begin(self, request: Request) -> Response:
        """Lease an episode: 200 with its URL and task, or 503 with whether the run is over."""
        wait_s = min((await self._body(request, Begin)).wait_s, MAX_WAIT_S)
        episode = await _unless_gone(request, self._episodes.begin(wait_s))
        if episode is None:
            return _json({"finished": self._episodes.finished}, 503)
        answer = {
            "episode_id": episode.id,
            "base_url": f"{request.base_url}episodes/{episode.id}/v1",
            "anthropic_base_url": f"{request.base_url}episodes/{episode.id}",
            "deadline_s": self._config.agent.episode_timeout_s,
            "idle_timeout_s": self._options.idle_timeout_s,
            "task": task_view(episode),
        }
        return _json(answer)

    async def end(self, request: Request) -> Response:
        """End an episode with a reward, an error, or neither."""
        ending = await self._body(request, Ending)
        return _json((await self._episodes.end(request.path_params["id"], ending))._asdict())

    async def heartbeat(self, request: Request) -> Response:
        """Note that the program of an episode lives; the answer says how long the episode may still take."""
        episode = self._episodes.get(request.path_params["id"])
        episode.heard()
        left_s = self._config.agent.episode_timeout_s - (time.monotonic() - episode.began)
        return _json({"deadline_s": max(0.0, left_s)})

    async def listing(self, request: Request) -> Response:
        """List the open episodes without their secret ids, and ignored fields, for ``rl-async gateway ls``."""
        return _json(self._episodes.listing() | {"ignored": self.fields.listing()})

    async def give_back(self, request: Request) -> Response:
        """Fail an episode that is named as the listing does, for ``rl-async gateway end``."""
        named = await self._body(request, GiveBack)
        return _json((await self._episodes.give_back(named.episode, named.error))._asdict())

    async def metrics(self, request: Request) -> Response:
        """Answer Prometheus."""
        return text_response(self._metrics_text())

    async def chat(self, request: Request) -> Response:
        """Answer a chat completion request in OpenAI's dialect, streamed or not."""
        chat = await self._read(request, openai.read_request)
        asked = await self._prepare(request, chat)
        name, model = _short(request), self._model(chat)
        if chat.stream:
            return self._stream(request, asked, openai.ChatStream(asked.number, name, model, usage=chat.usage))
        return _json(openai.completion(await self._answer(request, asked), name, model))

    async def completions(self, request: Request) -> Response:
        """Continue a bare prompt in OpenAI's oldest dialect, streamed or not."""
        chat, prompt = await self._read(request, completions.read_request)
        asked = await self._prepare(request, chat, prompt)
        name, model = _short(request), self._model(chat)
        if chat.stream:
            return self._stream(
                request, asked, completions.CompletionStream(asked.number, name, model, usage=chat.usage)
            )
        return _json(completions.completion(await self._answer(request, asked), name, model))

    async def messages(self, request: Request) -> Response:
        """Answer a messages request in Anthropic's dialect, streamed or not."""
        chat = await self._read(request, anthropic.read_request)
        asked = await self._prepare(request, chat)
        name, model = _short(request), self._model(chat)
        if chat.stream:
            tokens = len(asked.prompt.given)
            return self._stream(request, asked, anthropic.MessageStream(asked.number, name, model, tokens))
        return _json(anthropic.message(await self._answer(request, asked), name, model))

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a messages request's prompt."""
        chat = await self._read(request, anthropic.read_count)
        return _json({"input_tokens": await self._episode(request).count(chat)})

    async def responses(self, request: Request) -> Response:
        """Answer a request in OpenAI's Responses dialect, streamed or not."""
        kept = self._episode(request).responses
        wanted = await self._read(request, lambda body: responses.read_request(body, kept))
        asked = await self._prepare(request, wanted.chat)
        head = responses.ResponseHead(wanted, _short(request), asked.number, self._model(wanted.chat))

        def keep(done: Completion) -> None:
            if wanted.body.store is not False:
                kept.keep(head.id, wanted.previous, [*wanted.said, done.message], head.output(done))

        if wanted.chat.stream:
            return self._stream(request, asked, responses.ResponseStream(head), keep)
        done = await self._answer(request, asked)
        keep(done)
        return _json(head.answer(done))

    async def models(self, request: Request) -> Response:
        """List the only model of the run, for clients that check its name."""
        self._episode(request)
        return _json(_dialect(request).models([self._config.model.path]))

    async def model(self, request: Request) -> Response:
        """Describe a model by the name that a client uses for it; the gateway accepts any."""
        self._episode(request)
        return _json(_dialect(request).model_entry(request.path_params["model"]))

    async def health(self, request: Request) -> Response:
        """Answer health probes, with whether the run is over."""
        return _json({"finished": self._episodes.finished})

    def _model(self, chat: ChatRequest) -> str:
        return chat.model or self._config.model.path

    def _episode(self, request: Request) -> GatewayEpisode:
        return self._episodes.get(request.path_params["id"])

    async def _read(self, request: Request, read: Callable[[bytes], T]) -> T:
        body = await self._bytes(request)
        return await off_loop(len(body), read, body)

    async def _body(self, request: Request, kind: type[T]) -> T:
        """Decode the JSON body; an empty one counts as ``{}``. Raises RequestRefused if it does not fit ``kind``."""
        body = await self._bytes(request) or b"{}"
        await off_loop(len(body), refuse_many_values, body)
        try:
            return await off_loop(len(body), msgspec.json.decode, body, type=kind)
        except UNDECODABLE as error:
            raise unreadable(error) from error

    async def _bytes(self, request: Request) -> bytes:
        return await read_body(request, self._options.max_body_bytes, "agent.gateway.max_body_bytes")

    async def _prepare(self, request: Request, chat: ChatRequest, bare: str | list[int] | None = None) -> Asked:
        episode = self._episode(request)
        _trains(request)
        self.fields.settle(await episode.unobeyed(chat), request.headers.get("user-agent", ""))
        return await _unless_gone(request, episode.prepare(chat, bare))

    async def _answer(self, request: Request, asked: Asked) -> Completion:
        return await _unless_gone(request, self._episode(request).answer(asked, train=_trains(request)))

    def _stream(
        self,
        request: Request,
        asked: Asked,
        stream: AnswerStream,
        keep: Callable[[Completion], None] = lambda _: None,
    ) -> Response:
        episode = self._episode(request)
        release = episode.release(asked)

        async def work() -> Completion:
            done = await episode.answer(asked, train=_trains(request), release=release)
            keep(done)
            return done

        return EventStream(stream, release, work, self._ping_s)


def _guarded(handler: Handler, error_body: Callable[[RequestRefused], dict[str, Any]]) -> Handler:
    """Turn errors into the route's dialect."""

    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except FAILURES as error:
            told = refusal(error)
        return hang_up_if_late(_json(error_body(told), told.status))

    return guarded


def _not_served(request: Request, error: Exception) -> Response:
    """Answer requests for other paths, and by other methods, in the dialect that they seem to be of."""
    assert isinstance(error, HTTPException)
    allowed = (error.headers or {}).get("Allow")
    hint = next(text for pattern, text in _HINTS if re.search(pattern, request.url.path))
    way_out = f"use {allowed}" if allowed else hint
    told = RequestRefused(
        f"{request.method} {request.url.path[:200]} is not served: {way_out}",
        code="method_not_allowed" if allowed else "not_found",
        status=error.status_code,
    )
    answer = _json(_dialect(request).error_body(told), told.status)
    answer.headers.update(error.headers or {})
    return answer


def _dialect(request: Request) -> ModuleType:
    """Return the dialect of a request to a path that several dialects share."""
    theirs = "anthropic-version" in request.headers or "/messages" in request.url.path
    return anthropic if theirs else openai


def _short(request: Request) -> str:
    """Return the part of the episode's secret id that may be in the ids of answers."""
    return str(request.path_params["id"])[:8]


def _trains(request: Request) -> bool:
    """Whether the answer is to be trained on. Raises RequestRefused for a header that says neither yes nor no."""
    word = request.headers.get(TRAIN, "yes").lower()
    if word not in ("yes", "no"):
        raise RequestRefused(f"{TRAIN}: {word[:80]} is neither yes nor no", code="invalid_request", param=TRAIN)
    return word == "yes"


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Await the work; cancel it and raise ClientDisconnect if the client disconnects first."""
    working = asyncio.ensure_future(work)
    # After the body, the only message is the disconnect.
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        gone.cancel()


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


# A running queue answers a probe within this time.
ANSWER_S = 5.0
# Agent programs have so long to learn that the run is over.
LINGER_S = 10.0


async def run_gateway(
    config: RunConfig, listener: socket.socket, access: Access, queue_address: str, *, folder: Path, reward_model: str
) -> None:
    """Serve until the run is over or SIGTERM or SIGINT arrives.

    Raises UserError for names in the config that do not exist, and an ExceptionGroup with QueueLost or ProtocolError if
    the queue is gone.
    """
    cancel_on_signals()
    async with contextlib.AsyncExitStack() as stack:
        pool = engine_pool(config.rollout, run_token(folder, "engines"))
        chat = load_format(config.model.path, config.agent)
        read = functools.partial(reasoning_and_answer, chat)
        service = RewardService(config.reward, model_url=reward_model, folder=folder, sandbox=config.sandbox, read=read)
        rewards = await stack.enter_async_context(service)
        forget_api_keys(config)
        client = QueueClient(queue_address, role="agent", name="gateway", keys=client_keys(config, folder, "worker"))
        queue = await stack.enter_async_context(client)
        stack.push_async_callback(pool.close)
        episodes = OpenEpisodes(config, chat, pool, queue, rewards)
        server = server_of(GatewayServer(config, episodes).app, access)
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(pool.watch(queue), name="engine registry")
            # uvicorn takes the signals over while it serves, and raises them again at its end.
            serving = group.create_task(server.serve(sockets=[listener]), name="server")
            await episodes.run()
            await asyncio.wait([serving], timeout=LINGER_S)
            server.should_exit = True
            await serving
            watching.cancel()


def serve(run: Path, queue: str, reward_model: str, host: str, port: int) -> None:
    """Run a gateway of the run in ``run`` until it is over. Raises UserError, and the errors of ``run_gateway``."""
    config = load_resolved(run / "config.yaml")
    if problem := gateway_problem(config):
        raise ConfigError(problem)
    host = host or (config.agent.gateway or GatewayConfig()).host
    access = Access.of_run(run, "gateway", (host, *config.launcher.http_hosts))
    listener = bind(host, port, "agent.gateway")
    listener.listen()
    address, number = listener.getsockname()[:2]
    print(f"gateway: http://{address}:{number} (token: {token_file(run, 'gateway')})", flush=True)
    traced = tracing.traced(config.tracking.otlp_endpoint, run, "gateway")
    # Other gateways may be attached to the run.
    target = Target(f"{address}:{number}", "gateway", f"gateway-{number}")
    with traced, listed(config.tracking.prometheus, run, target), contextlib.suppress(asyncio.CancelledError):
        uvloop.run(run_gateway(config, listener, access, queue, folder=run, reward_model=reward_model))


def attach(run: Path, host: str, port: int) -> int:
    """Run a gateway beside the processes of a run that is going on; the exit code."""

    def work() -> None:
        places = read_endpoints(run)
        keys = client_keys(load_resolved(run / "config.yaml"), run, "worker")
        probe = SyncQueueClient(places.queue, role="agent", name="gateway-probe", timeout_s=ANSWER_S, keys=keys)
        try:
            with probe as queue:
                queue.status()
        except QueueLost as error:
            raise UserError(f"{run} is not running: its queue at {places.queue} does not answer") from error
        serve(run, places.queue, places.reward_model, host, port)

    return run_role("gateway", work, {RlAsyncError: EXIT_RESTART})
