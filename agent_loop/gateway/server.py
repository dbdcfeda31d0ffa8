"""The gateway's HTTP routes: leasing and ending episodes, and the policy's answers in each dialect."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from rl_async.agent_loop.gateway.dialects import anthropic, completions, openai
from rl_async.agent_loop.gateway.dialects.chat import ChatRequest, Completion, unreadable
from rl_async.agent_loop.gateway.dialects.completions import CompletionStream
from rl_async.agent_loop.gateway.dialects.fields import UnobeyedFields
from rl_async.agent_loop.gateway.dialects.responses_answers import ResponseHead, ResponseStream
from rl_async.agent_loop.gateway.dialects.responses_requests import read_request as read_response_request
from rl_async.agent_loop.gateway.dialects.streams import ChatStream, MessageStream
from rl_async.agent_loop.gateway.episode import Asked, GatewayEpisode, task_view
from rl_async.agent_loop.gateway.event_stream import PING_S, AnswerStream, EventStream
from rl_async.agent_loop.gateway.open_episodes import Ending, OpenEpisodes
from rl_async.agent_loop.gateway.refusals import FAILURES, instead, refusal
from rl_async.agent_loop.metrics import SamplesCollector
from rl_async.concurrency import off_loop
from rl_async.configs.schema.rollout import GatewayConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import RequestRefused
from rl_async.files import UNDECODABLE
from rl_async.process.http_server import application, hang_up_if_late, metrics_text, read_body, text_response

T = TypeVar("T")
MAX_WAIT_S = 60.0
TRAIN = "X-RL-Async-Train"  # header of a request; no: its answer is not trained on
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
        self._metrics_text = metrics_text(SamplesCollector(episodes, lambda: episodes.held))
        routes: dict[str, _Route] = {
            "POST /episodes": (self.begin, openai.error_body),
            "GET /episodes": (self.listing, openai.error_body),
            "POST /episodes/give-back": (self.give_back, openai.error_body),
            "POST /episodes/{id}/heartbeat": (self.heartbeat, openai.error_body),
            "POST /episodes/{id}/reward": (self.end, openai.error_body),
            "GET /health": (self.health, openai.error_body),
            "GET /metrics": (self.metrics, openai.error_body),
        }
        for base in ("/episodes/{id}/v1", "/episodes/{id}/v1/v1"):  # some clients append /v1 to a URL that has it
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
        """List the open episodes, without their secret ids, and what was ignored, for ``rl-async gateway ls``."""
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
            return self._stream(request, asked, ChatStream(asked.number, name, model, usage=chat.usage))
        return _json(openai.completion(await self._answer(request, asked), name, model))

    async def completions(self, request: Request) -> Response:
        """Continue a bare prompt in OpenAI's oldest dialect, streamed or not."""
        chat, prompt = await self._read(request, completions.read_request)
        asked = await self._prepare(request, chat, prompt)
        name, model = _short(request), self._model(chat)
        if chat.stream:
            return self._stream(request, asked, CompletionStream(asked.number, name, model, usage=chat.usage))
        return _json(completions.completion(await self._answer(request, asked), name, model))

    async def messages(self, request: Request) -> Response:
        """Answer a messages request in Anthropic's dialect, streamed or not."""
        chat = await self._read(request, anthropic.read_request)
        asked = await self._prepare(request, chat)
        name, model = _short(request), self._model(chat)
        if chat.stream:
            tokens = len(asked.prompt.given)
            return self._stream(request, asked, MessageStream(asked.number, name, model, tokens))
        return _json(anthropic.message(await self._answer(request, asked), name, model))

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a messages request's prompt."""
        chat = await self._read(request, anthropic.read_count)
        return _json({"input_tokens": await self._episode(request).count(chat)})

    async def responses(self, request: Request) -> Response:
        """Answer a request in OpenAI's Responses dialect, streamed or not."""
        kept = self._episode(request).responses
        wanted = await self._read(request, lambda body: read_response_request(body, kept))
        asked = await self._prepare(request, wanted.chat)
        head = ResponseHead(wanted, _short(request), asked.number, self._model(wanted.chat))

        def keep(done: Completion) -> None:
            if wanted.body.store is not False:
                kept.keep(head.id, wanted.previous, [*wanted.said, done.message], head.output(done))

        if wanted.chat.stream:
            return self._stream(request, asked, ResponseStream(head), keep)
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
    way_out = f"use {allowed}" if allowed else instead(request.url.path)
    told = RequestRefused(
        f"{request.method} {request.url.path[:200]} is not served: {way_out}",
        code="method_not_allowed" if allowed else "not_found",
        status=error.status_code,
    )
    answer = _json(_dialect(request).error_body(told), told.status)
    answer.headers.update(error.headers or {})
    return answer


def _dialect(request: Request) -> ModuleType:
    """Return the dialect of a request for what several have."""
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
    gone = asyncio.ensure_future(request.receive())  # after the body, the only message is the disconnect
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
