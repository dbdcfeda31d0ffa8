"""The gateway's HTTP routes: leasing and ending episodes, and the policy's answers in each dialect."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from rl_async.agent_loop.gateway import anthropic, openai
from rl_async.agent_loop.gateway.chat import UNREADABLE, ChatRequest, Completion
from rl_async.agent_loop.gateway.episode import task_view
from rl_async.agent_loop.gateway.fields import UnobeyedFields
from rl_async.agent_loop.gateway.open_episodes import Ending, OpenEpisodes
from rl_async.agent_loop.gateway.responses.answers import ResponseHead
from rl_async.agent_loop.gateway.responses.requests import read_request as read_response_request
from rl_async.agent_loop.gateway.responses.stream import ResponseStream
from rl_async.configs.schema.rollout import GatewayConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import EngineLost, EngineRejected, QueueLost, RequestRefused
from rl_async.offload import off_loop
from rl_async.process.http_server import application, read_body

T = TypeVar("T")
MAX_WAIT_S = 60.0
TRAIN = "X-RL-Async-Train"  # header of a request; no: its answer is not trained on
Handler = Callable[[Request], Awaitable[Response]]


class Begin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``POST /episodes``: how long to wait for an episode."""

    wait_s: float = 20.0


class GiveBack(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``POST /episodes/give-back``: GROUP.SAMPLE.ATTEMPT and why."""

    episode: str
    error: str = "ended by hand"


class GatewayServer:
    """Routes over the episodes. ``app`` is the ASGI application."""

    def __init__(self, config: RunConfig, episodes: OpenEpisodes) -> None:
        self._config, self._episodes = config, episodes
        self._options = config.agent.gateway or GatewayConfig()
        self.fields = UnobeyedFields(self._options.unsupported)
        one = "/episodes/{id}"
        routes: dict[str, tuple[Handler, Callable[[RequestRefused], dict[str, Any]]]] = {
            "POST /episodes": (self.begin, openai.error_body),
            "GET /episodes": (self.listing, openai.error_body),
            "POST /episodes/give-back": (self.give_back, openai.error_body),
            f"POST {one}/heartbeat": (self.heartbeat, openai.error_body),
            f"POST {one}/reward": (self.end, openai.error_body),
            f"POST {one}/v1/chat/completions": (self.chat, openai.error_body),
            f"POST {one}/v1/responses": (self.responses, openai.error_body),
            f"GET {one}/v1/models": (self.models, openai.error_body),
            f"POST {one}/v1/messages": (self.messages, anthropic.error_body),
            "GET /health": (self.health, openai.error_body),
        }
        self.app = application({key: _guarded(handler, body) for key, (handler, body) in routes.items()})

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
        """List the open episodes, without their secret ids, for ``rl-async gateway ls``."""
        return _json(self._episodes.listing())

    async def give_back(self, request: Request) -> Response:
        """Fail an episode that is named as the listing does, for ``rl-async gateway end``."""
        named = await self._body(request, GiveBack)
        return _json((await self._episodes.give_back(named.episode, named.error))._asdict())

    async def chat(self, request: Request) -> Response:
        """Answer a chat completion request in OpenAI's dialect, streamed or not."""
        chat = await self._read(request, openai.read_request)
        done = await self._complete(request, chat)
        name, model = request.path_params["id"][:8], self._model(chat)
        if not chat.stream:
            return _json(openai.completion(done, name, model))
        events = [
            b"data: " + msgspec.json.encode(chunk) + b"\n\n"
            for chunk in openai.chunks(done, name, model, usage=chat.usage)
        ]
        return _stream([*events, b"data: [DONE]\n\n"])

    async def messages(self, request: Request) -> Response:
        """Answer a messages request in Anthropic's dialect, streamed or not."""
        chat = await self._read(request, anthropic.read_request)
        done = await self._complete(request, chat)
        name, model = request.path_params["id"][:8], self._model(chat)
        if not chat.stream:
            return _json(anthropic.message(done, name, model))
        return _stream(
            f"event: {event['type']}\ndata: ".encode() + msgspec.json.encode(event) + b"\n\n"
            for event in anthropic.events(done, name, model)
        )

    async def responses(self, request: Request) -> Response:
        """Answer a request in OpenAI's Responses dialect, streamed or not."""
        episode, body = self._episodes.get(request.path_params["id"]), await self._bytes(request)
        asked = await off_loop(len(body), read_response_request, body, episode.responses)
        done = await self._complete(request, asked.chat)
        head = ResponseHead(asked, request.path_params["id"][:8], done.number, self._model(asked.chat))
        answer = head.answer(done)
        if asked.body.store is not False:
            episode.responses.keep(head.id, asked.previous, [*asked.said, done.message], answer["output"])
        if not asked.chat.stream:
            return _json(answer)
        stream = ResponseStream(head)
        events = [*stream.begin(), *stream.end(done, done.message.reasoning, done.message.text)]
        return _stream(f"event: {e['type']}\ndata: ".encode() + msgspec.json.encode(e) + b"\n\n" for e in events)

    async def models(self, request: Request) -> Response:
        """List the only model of the run, for clients that check its name."""
        self._episodes.get(request.path_params["id"])
        return _json(openai.models([self._config.model.path]))

    async def health(self, request: Request) -> Response:
        """Answer health probes, with whether the run is over."""
        return _json({"finished": self._episodes.finished})

    def _model(self, chat: ChatRequest) -> str:
        return chat.model or self._config.model.path

    async def _read(self, request: Request, read: Callable[[bytes], ChatRequest]) -> ChatRequest:
        body = await self._bytes(request)
        return await off_loop(len(body), read, body)

    async def _body(self, request: Request, kind: type[T]) -> T:
        """Decode the JSON body; an empty one counts as ``{}``. Raises RequestRefused if it does not fit ``kind``."""
        try:
            return msgspec.json.decode(await self._bytes(request) or b"{}", type=kind)
        except UNREADABLE as error:
            raise RequestRefused(str(error), code="invalid_request") from error

    async def _bytes(self, request: Request) -> bytes:
        return await read_body(request, self._options.max_body_bytes, "agent.gateway.max_body_bytes")

    async def _complete(self, request: Request, chat: ChatRequest) -> Completion:
        episode = self._episodes.get(request.path_params["id"])
        self.fields.settle(episode.unobeyed(chat), request.headers.get("user-agent", ""))
        return await _unless_gone(request, episode.complete(chat, train=_trains(request)))


def _guarded(handler: Handler, error_body: Callable[[RequestRefused], dict[str, Any]]) -> Handler:
    """Turn errors into the route's dialect: a lost engine may be retried (503), a rejected request may not (400)."""

    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except RequestRefused as error:
            refusal = error
        except RecursionError:
            refusal = RequestRefused("the request is nested too deeply", code="invalid_request")
        except EngineRejected as error:
            refusal = RequestRefused(str(error), code="engine_rejected")
        except (EngineLost, QueueLost) as error:
            refusal = RequestRefused(str(error), code=type(error).__name__, status=503)
        return _json(error_body(refusal), refusal.status)

    return guarded


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


def _stream(events: Iterable[bytes]) -> Response:
    async def send() -> AsyncIterator[bytes]:
        for event in events:
            yield event

    return StreamingResponse(send(), media_type="text/event-stream")
