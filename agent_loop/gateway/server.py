"""The gateway's HTTP routes: leasing and ending episodes, and the policy's answers in each dialect."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from rl_async.agent_loop.gateway import anthropic, openai
from rl_async.agent_loop.gateway.chat import ChatRequest, Completion
from rl_async.agent_loop.gateway.episode import task_view
from rl_async.agent_loop.gateway.open_episodes import Ending, OpenEpisodes
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import EngineLost, EngineRejected, QueueLost, RequestRefused

T = TypeVar("T")
MAX_WAIT_S = 60.0
Handler = Callable[[Request], Awaitable[Response]]


class Begin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``POST /episodes``: how long to wait for an episode."""

    wait_s: float = 20.0


class ClientGone(Exception):
    """The client closed its connection, so the request is cancelled."""


class GatewayServer:
    """Routes over the episodes. ``app`` is the ASGI application."""

    def __init__(self, config: RunConfig, episodes: OpenEpisodes) -> None:
        self._config, self._episodes = config, episodes
        one = "/episodes/{id}"
        routes: dict[str, tuple[Handler, Callable[[RequestRefused], dict[str, Any]]]] = {
            "POST /episodes": (self.begin, openai.error_body),
            f"POST {one}/reward": (self.end, openai.error_body),
            f"POST {one}/v1/chat/completions": (self.chat, openai.error_body),
            f"GET {one}/v1/models": (self.models, openai.error_body),
            f"POST {one}/v1/messages": (self.messages, anthropic.error_body),
            "GET /health": (self.health, openai.error_body),
        }
        self.app = Starlette(
            routes=[
                Route(key.split()[1], _guarded(handler, body), methods=[key.split()[0]])
                for key, (handler, body) in routes.items()
            ]
        )

    async def begin(self, request: Request) -> Response:
        """Lease an episode: 200 with its URL and task, or 503 with whether the run is over."""
        wait_s = min((await _body(request, Begin)).wait_s, MAX_WAIT_S)
        episode = await _unless_gone(request, self._episodes.begin(wait_s))
        if episode is None:
            return _json({"finished": self._episodes.finished}, 503)
        answer = {
            "episode_id": episode.id,
            "base_url": f"{request.base_url}episodes/{episode.id}/v1",
            "deadline_s": self._config.agent.episode_timeout_s,
            "task": task_view(episode),
        }
        return _json(answer)

    async def end(self, request: Request) -> Response:
        """End an episode with a reward, an error, or neither."""
        ending = await _body(request, Ending)
        return _json((await self._episodes.end(request.path_params["id"], ending))._asdict())

    async def chat(self, request: Request) -> Response:
        """Answer a chat completion request in OpenAI's dialect, streamed or not."""
        chat = openai.read_request(await request.body())
        done = await self._complete(request, chat)
        name, model = request.path_params["id"][:8], chat.model or self._config.model.path
        if not chat.stream:
            return _json(openai.completion(done, name, model))
        events = [
            b"data: " + msgspec.json.encode(chunk) + b"\n\n"
            for chunk in openai.chunks(done, name, model, usage=chat.usage)
        ]
        return _stream([*events, b"data: [DONE]\n\n"])

    async def messages(self, request: Request) -> Response:
        """Answer a messages request in Anthropic's dialect, streamed or not."""
        chat = anthropic.read_request(await request.body())
        done = await self._complete(request, chat)
        name, model = request.path_params["id"][:8], chat.model or self._config.model.path
        if not chat.stream:
            return _json(anthropic.message(done, name, model))
        return _stream(
            f"event: {event['type']}\ndata: ".encode() + msgspec.json.encode(event) + b"\n\n"
            for event in anthropic.events(done, name, model)
        )

    async def models(self, request: Request) -> Response:
        """List the only model of the run, for clients that check its name."""
        self._episodes.get(request.path_params["id"])
        return _json(openai.models([self._config.model.path]))

    async def health(self, request: Request) -> Response:
        """Answer health probes, with whether the run is over."""
        return _json({"finished": self._episodes.finished})

    async def _complete(self, request: Request, chat: ChatRequest) -> Completion:
        episode = self._episodes.get(request.path_params["id"])
        return await _unless_gone(request, episode.complete(chat))


def _guarded(handler: Handler, error_body: Callable[[RequestRefused], dict[str, Any]]) -> Handler:
    """Turn errors into the route's dialect: a lost engine may be retried (503), a rejected request may not (400)."""

    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except RequestRefused as error:
            refusal = error
        except EngineRejected as error:
            refusal = RequestRefused(str(error), code="engine_rejected")
        except (EngineLost, QueueLost) as error:
            refusal = RequestRefused(str(error), code=type(error).__name__, status=503)
        except ClientGone:
            return Response(status_code=499)
        return _json(error_body(refusal), refusal.status)

    return guarded


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Await the work; cancel it and raise ClientGone if the client disconnects first."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(request.receive())  # after the body, the only message is the disconnect
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        gone.cancel()


async def _body(request: Request, kind: type[T]) -> T:
    """Decode the JSON body; an empty one counts as ``{}``. Raises RequestRefused if it does not fit ``kind``."""
    try:
        return msgspec.json.decode(await request.body() or b"{}", type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise RequestRefused(str(error), code="invalid_request") from error


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _stream(events: Iterable[bytes]) -> Response:
    async def send() -> AsyncIterator[bytes]:
        for event in events:
            yield event

    return StreamingResponse(send(), media_type="text/event-stream")
