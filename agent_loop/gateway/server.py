"""The gateway's process: leases and ends episodes on request, and gives the policy's answers in each dialect.

    queue ── lease ──> samples ── POST /episodes ──> agent programs ── reward ──> rows ── put ──> queue
    engine ── tokens so far ──> Release ── settled text ──> a dialect's events ──> EventStream ──> client

``OpenEpisodes`` holds the episodes: put into the queue at their end, failed at a deadline. Only text that no further
token changes is sent, so what a client has read is always the beginning of the recorded answer. The headers of an event
stream are sent at once, and pings while nothing comes. ``serve`` is the composition root: it connects the gateway to
engines, reward service and queue.
"""

import asyncio
import contextlib
import functools
import logging
import re
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import uvloop
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rl_async import tracing
from rl_async.agent_loop import telemetry
from rl_async.agent_loop.chat_formats.format import ChatFormat, reasoning_and_answer
from rl_async.agent_loop.chat_formats.format_registry import load_format
from rl_async.agent_loop.gateway import anthropic, openai, responses
from rl_async.agent_loop.gateway.chat import (
    ChatRequest,
    Completion,
    Event,
    UnobeyedFields,
    refuse_many_values,
    unreadable,
)
from rl_async.agent_loop.gateway.gateway_episode import Asked, GatewayEpisode, Release, give_reward, task_view
from rl_async.agent_loop.telemetry import SamplesCollector
from rl_async.agent_loop.worker import GatewayQueue, Repetitions, RewardScorer, beginning, cancel_on_signals
from rl_async.concurrency import LOOK_S, off_loop
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
from rl_async.messages import Done, Leased, LeasedGroup, Refused, SampleKey
from rl_async.process.http_auth import Access, run_token, token_file
from rl_async.process.http_server import application, hang_up_if_late, metrics_text, read_body, server_of, text_response
from rl_async.process.role import bind, run_role
from rl_async.process.run_files import Target, listed, read_endpoints
from rl_async.reward_loop.model_client import forget_api_keys
from rl_async.reward_loop.service import RewardService
from rl_async.rollout_server.api import StreamingGenerator
from rl_async.rollout_server.pool import engine_pool
from rl_async.transfer_queue.auth import client_keys
from rl_async.transfer_queue.client import QueueClient, SyncQueueClient

log = logging.getLogger("rl_async.gateway")

LEASE_WAIT_S = 5.0
# Shells exit with these codes if a signal ended their command.
SHELL_SIGNALS = range(129, 193)
RENEWALS_PER_LEASE = 4
# So many ended episodes are remembered, so that ending one again gets the same answer.
REMEMBERED = 4096
FAILURES = (RequestRefused, RecursionError, EngineRejected, EngineLost, QueueLost)


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the agent program ended, as its caller saw it. Reward functions get it as ``extra_info["program"]``."""

    exit_code: int
    output: str = ""


class Ending(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an agent program ends its episode. Without a reward, the run's reward functions score it.

    An ``error``, even an empty one, fails the episode. ``reasons`` are texts for people, by the names of parts and
    ``reward``. A client that repeats a request, since no answer came, sends the same ``idempotency_key``.
    """

    reward: float | None = None
    parts: dict[str, float] = {}
    reasons: dict[str, str] = {}
    error: str | msgspec.UnsetType = msgspec.UNSET
    idempotency_key: str = ""
    program: Program | None = None


class Ended(NamedTuple):
    """The outcome of ending an episode, which the agent program gets as JSON.

    If this request was too late, ``rows`` and ``reward`` are those of the earlier end.
    """

    accepted: bool
    reason: str
    rows: int
    reward: float | None


class Record(NamedTuple):
    """How an episode ended: the answer to the request that ended it, in words for later ones, and its key."""

    answer: Ended
    how: str
    idempotency_key: str

    def answer_again(self, ending: Ending) -> Ended:
        """Return the same answer for the same request, and for another one that it came too late."""
        if ending.idempotency_key and ending.idempotency_key == self.idempotency_key:
            return self.answer
        return self.answer._replace(accepted=False, reason=f"the episode had ended: {self.how}")


class OpenEpisodes:
    """The open episodes by their secret ids. ``run`` must run beside the server."""

    def __init__(
        self,
        config: RunConfig,
        chat: ChatFormat,
        generator: StreamingGenerator,
        queue: GatewayQueue,
        rewards: RewardScorer,
    ) -> None:
        self._config, self._chat, self._generator = config, chat, generator
        self._queue, self._rewards = queue, rewards
        self._options = config.agent.gateway or GatewayConfig()
        self._open: dict[str, GatewayEpisode] = {}
        self._ended: OrderedDict[str, Record] = OrderedDict()
        # Samples that are leased and not requested yet.
        self._samples: deque[tuple[LeasedGroup, int]] = deque()
        # Notified of samples, waiting requests and the end of the run.
        self._changed = asyncio.Condition()
        self._waiting = 0
        self._last_request = self._last_attended = time.monotonic()
        self.finished = False
        self._failures = Repetitions()
        self._told_left_out = False
        self.put = self.failed = self.refused = 0

    # --- the loops --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until the queue reports the end of the run.

        Raises an ExceptionGroup with QueueLost or ProtocolError if the queue is gone.
        """
        async with asyncio.TaskGroup() as group:
            others = [group.create_task(work) for work in (self._renew(), self._reap(), self._lease())]
            # An empty lease tells the queue whether programs are there, and learns of the end of the run.
            while not self.finished:
                self._take(await self._queue.lease(0, LEASE_WAIT_S, idle_s=self.unattended_s(time.monotonic())))
                await self._notify()
            for task in others:
                task.cancel()
        log.info("%d episodes put, %d failed, %d refused by the queue", self.put, self.failed, self.refused)

    async def _lease(self) -> None:
        """Lease a group whenever more programs wait than there are samples.

        Consumes leases; produces samples. Waits for a request, then for work; unblocked by ``begin`` and by the queue's
        reply, at most LEASE_WAIT_S later. Cancelled only at the end of the run: if a lease's reply were lost, the queue
        would believe that its samples are being played.
        """
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._waiting > len(self._samples))
            self._take(await self._queue.lease(1, LEASE_WAIT_S, idle_s=0.0))
            await self._notify()

    def _take(self, leased: Leased) -> None:
        self.finished = self.finished or leased.finished
        self._samples += [(group, sample) for group in leased.groups for sample in group.samples]

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _renew(self) -> None:
        """Renew the leases until cancelled; fail samples that were leased to another worker. Waits for the clock."""
        while True:
            await asyncio.sleep(self._config.queue.lease_s / RENEWALS_PER_LEASE)
            playing = [(episode.group, episode.sample) for episode in self._open.values()]
            held = [sample_key(*sample) for sample in [*self._samples, *playing]]
            if gone := set((await self._queue.renew(held)).gone):
                self._samples = deque(waiting for waiting in self._samples if sample_key(*waiting) not in gone)
                for episode in list(self._open.values()):
                    ends = episode.closed or episode.ending.locked()
                    if sample_key(episode.group, episode.sample) in gone and not ends:
                        await self._fail(episode, "another worker plays this sample by now")

    @property
    def held(self) -> int:
        """Samples that are leased and have not ended."""
        return len(self._samples) + len(self._open)

    async def _reap(self) -> None:
        """Fail episodes that do not end or whose programs are silent, and samples that no program requests.

        Runs until cancelled. Consumes episodes and samples past their deadline; produces failures. Waits for the clock.
        """
        limit, idle = self._config.agent.episode_timeout_s, self._options.idle_timeout_s
        while True:
            began, pause = time.monotonic(), min(1.0, limit / 4, idle / 4)
            await asyncio.sleep(pause)
            now = time.monotonic()
            if (held_up_s := now - began - pause - LOOK_S) > 0:
                self._last_request = min(now, self._last_request + held_up_s)
                self._last_attended = min(now, self._last_attended + held_up_s)
                for episode in self._open.values():
                    episode.excuse(held_up_s, now)
            for episode in list(self._open.values()):
                late = self._late(episode, now)
                if late and not (episode.closed or episode.ending.locked()):
                    await self._fail(episode, f"EpisodeTimeout: {late}")
            forgotten = now - self._last_request > limit and not self._waiting
            if forgotten or self.unattended_s(now) > idle:
                while self._samples:
                    group, sample = self._samples.popleft()
                    await self._queue.fail(group.group_id, sample, group.attempt, "no agent program requested it")

    def _late(self, episode: GatewayEpisode, now: float) -> str:
        """Describe the deadline that the episode has passed, or return an empty text."""
        limit, idle = self._config.agent.episode_timeout_s, self._options.idle_timeout_s
        if now - episode.began > limit:
            return f"episode did not finish within {limit:g} s (agent.episode_timeout_s)"
        if episode.idle_s(now) > idle:
            return f"its program sent no request and no heartbeat for {idle:g} s (agent.gateway.idle_timeout_s)"
        return ""

    # --- what people see and do -------------------------------------------------------------------------------------

    def unattended_s(self, now: float) -> float:
        """Return for how many seconds no program has played or asked for an episode."""
        return 0.0 if self._open or self._waiting else now - self._last_attended

    def listing(self) -> dict[str, Any]:
        """Return the open episodes and who waits for whom."""
        now = time.monotonic()
        return {
            "episodes": [episode.summary(now) for episode in self._open.values()],
            "programs_waiting": self._waiting,
            "samples_waiting": len(self._samples),
            "unattended_s": self.unattended_s(now),
            "finished": self.finished,
        }

    async def give_back(self, name: str, error: str) -> Ended:
        """Fail the open episode that the listing calls ``name``. Raises RequestRefused for an unknown name."""
        for episode in self._open.values():
            if episode.name == name:
                return await self.end(episode.id, Ending(error=error), by="rl-async gateway end")
        raise RequestRefused(f"there is no open episode {name[:80]!r}", code="unknown_episode", status=404)

    # --- what agent programs do -------------------------------------------------------------------------------------

    async def begin(self, wait_s: float) -> GatewayEpisode | None:
        """Return an episode to play, or None if none came within ``wait_s`` or the run is ``finished``."""
        self._last_request = time.monotonic()
        async with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait_for(lambda: self._samples or self.finished)
            except TimeoutError:
                return None
            finally:
                self._waiting -= 1
                self._last_attended = time.monotonic()
            if not self._samples:
                return None
            group, sample = self._samples.popleft()
        self._last_request = time.monotonic()
        try:
            episode = GatewayEpisode(
                group,
                sample,
                config=self._config,
                chat=self._chat,
                generator=self._generator,
                max_answers=self._options.max_answers,
            )
        # The task names tools that do not exist, or unlisted code.
        except UserError as error:
            self._log_failure(group, sample, str(error))
            await self._queue.fail(group.group_id, sample, group.attempt, f"{type(error).__name__}: {error}")
            self.failed += 1
            return None
        self._open[episode.id] = episode
        return episode

    def get(self, episode_id: str) -> GatewayEpisode:
        """Return an open episode. Raises RequestRefused for an unknown id."""
        episode = self._open.get(episode_id)
        if episode is None:
            known = episode_id in self._ended
            raise RequestRefused(
                "this episode has ended" if known else "there is no such episode, or it has ended",
                code="episode_ended" if known else "unknown_episode",
                status=404,
            )
        return episode

    async def end(self, episode_id: str, ending: Ending, by: str = "the agent program") -> Ended:
        """End an episode; one that has ended accepts nothing else. If it raises RequestRefused, it stays open."""
        _check(ending)
        if episode_id in self._ended:
            return self._ended[episode_id].answer_again(ending)
        episode = self.get(episode_id)
        async with episode.ending:
            if episode_id in self._ended:
                return self._ended[episode_id].answer_again(ending)
            # It is being failed right now.
            if episode.closed:
                raise RequestRefused("this episode has ended", code="episode_ended", status=404)
            if ending.error is not msgspec.UNSET:
                why = ending.error or "no reason given"
                return await self._fail(episode, f"{by}: {why}", ending.idempotency_key)
            if why := self._to_give_back(episode, ending.program):
                given_back = Ended(False, f"it is played again: {why}", 0, None)
                return await self._fail(episode, why, ending.idempotency_key, given_back)
            return await self._put(episode, ending)

    def _to_give_back(self, episode: GatewayEpisode, program: Program | None) -> str:
        """Return why a program's failure is not the policy's, or "" if it may be, or the program did not fail.

        Replaying failures that may be the policy's would train on the successes alone.
        """
        if program is None or not program.exit_code:
            return ""
        how = f"the program ended with {program.exit_code}"
        if self._options.give_back == "all" or program.exit_code in self._options.give_back:
            return f"{how} (agent.gateway.give_back)"
        if program.exit_code < 0 or program.exit_code in SHELL_SIGNALS:
            return f"{how}, by a signal"
        return f"{how} after its last request had failed: {episode.lost}" if episode.lost else ""

    async def _put(self, episode: GatewayEpisode, ending: Ending) -> Ended:
        rows, last = episode.trajectories(None if ending.program is None else ending.program.output)
        if not rows:
            raise RequestRefused(
                'the episode has no answer to train on; request one, or fail the episode with {"error": "..."}',
                code="no_answers",
                status=409,
            )
        if ending.reward is not None:
            give_reward(rows, ending.reward, ending.parts, ending.reasons, self._config.reward.limit)
        task = episode.group.task
        if ending.program is not None:
            task = msgspec.structs.replace(task, extra=task.extra | {"program": msgspec.to_builtins(ending.program)})
            for row in rows if ending.program.exit_code else ():
                row.error = f"its program ended with {ending.program.exit_code}"
        telemetry.played(episode.trace, episode.group, episode.traced_from, time.monotonic() - episode.began)
        with _closing(episode):
            with telemetry.of_reward(episode.trace, rows[last]):
                if ending.reward is None:
                    await self._rewards.score(task, rows[last], *rows[:last], *rows[last + 1 :])
            for row in rows:
                row.traced = bool(episode.trace)
            reply = await self._queue.put(*rows, media=episode.images)
        self.put += 1
        for kind, tokens in episode.sampled.items():
            telemetry.CONVERSATIONS.labels(kind).inc(tokens)
        if episode.sampled["left_out"] and not self._told_left_out:
            self._told_left_out = True
            log.info(
                "%s: a conversation of %d sampled tokens is not trained: it began after the main one had ended, or "
                "agent.gateway.untrained names it (logged once; rl_async_agent_conversation_tokens counts them)",
                episode.name,
                episode.sampled["left_out"],
            )
        reward = rows[last].reward if rows[last].scored else None
        how = "no reward function could score it" if reward is None else f"with reward {reward:g}"
        return self._close(episode, reply, Ended(True, "", len(rows), reward), how, ending.idempotency_key)

    async def _fail(
        self,
        episode: GatewayEpisode,
        error: str,
        idempotency_key: str = "",
        answer: Ended = Ended(True, "", 0, None),  # noqa: B008  immutable
    ) -> Ended:
        self._log_failure(episode.group, episode.sample, error)
        telemetry.played(episode.trace, episode.group, episode.traced_from, time.monotonic() - episode.began, error)
        with _closing(episode):
            reply = await self._queue.fail(episode.group.group_id, episode.sample, episode.group.attempt, error)
        self.failed += 1
        return self._close(episode, reply, answer, error, idempotency_key)

    def _log_failure(self, group: LeasedGroup, sample: int, error: str) -> None:
        """Log why a sample failed, unless enough failures began alike, except for numbers."""
        times = self._failures.another(beginning(error))
        if times == 1:
            log.warning("sample %d.%d: %s", group.group_id, sample, error)
        elif times:
            log.warning("sample %d.%d: %s (%d times)", group.group_id, sample, error, times)

    def _close(
        self, episode: GatewayEpisode, reply: Done | Refused, answer: Ended, how: str, idempotency_key: str
    ) -> Ended:
        if isinstance(reply, Refused):
            self.refused += 1
            answer, how = answer._replace(accepted=False, reason=reply.reason), reply.reason
        self._open.pop(episode.id, None)
        self._last_attended = time.monotonic()
        self._ended[episode.id] = Record(answer, how, idempotency_key)
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        return answer


def sample_key(group: LeasedGroup, sample: int) -> SampleKey:
    """Return the name of an attempt at a sample."""
    return group.group_id, sample, group.attempt


def _check(ending: Ending) -> None:
    """Raise RequestRefused for an ending that says two things at once."""
    details = ending.parts or ending.reasons
    if ending.error is not msgspec.UNSET and (ending.reward is not None or details):
        raise RequestRefused(
            "reward and error exclude each other: post the reward if the episode is to be trained on, the error if it "
            "is to be played again",
            code="invalid_request",
            param="error",
        )
    if details and ending.reward is None:
        raise RequestRefused("parts or reasons were given without a reward", code="invalid_request", param="reward")


@contextmanager
def _closing(episode: GatewayEpisode) -> Iterator[None]:
    """Refuse further requests of the episode; if the block fails, reopen it, so that its end may be posted again."""
    episode.closed = True
    try:
        yield
    except BaseException:
        episode.closed = False
        raise


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
        chat, prompt = await self._read(request, openai.read_prompt)
        asked = await self._prepare(request, chat, prompt)
        name, model = _short(request), self._model(chat)
        if chat.stream:
            return self._stream(request, asked, openai.CompletionStream(asked.number, name, model, usage=chat.usage))
        return _json(openai.continuation(await self._answer(request, asked), name, model))

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
        self, request: Request, asked: Asked, stream: AnswerStream, keep: Callable[[Completion], None] = lambda _: None
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
