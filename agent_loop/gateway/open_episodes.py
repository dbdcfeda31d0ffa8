"""All open episodes of a gateway: leased on request, put into the queue at their end, failed at a deadline.

queue --lease--> samples --POST /episodes--> agent programs --reward--> rows --put--> queue
"""

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from rl_async.agent_loop import telemetry
from rl_async.agent_loop.chat_formats.format import ChatFormat
from rl_async.agent_loop.gateway.gateway_episode import GatewayEpisode, give_reward
from rl_async.agent_loop.worker import GatewayQueue, Repetitions, RewardScorer, beginning
from rl_async.configs.schema.rollout import GatewayConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import RequestRefused, UserError
from rl_async.messages import Done, Leased, LeasedGroup, Refused, SampleKey
from rl_async.rollout_server.api import StreamingGenerator

log = logging.getLogger("rl_async.gateway")

LEASE_WAIT_S = 5.0
# Shells exit with these codes if a signal ended their command.
SHELL_SIGNALS = range(129, 193)
RENEWALS_PER_LEASE = 4
# So many ended episodes are remembered, so that ending one again gets the same answer.
REMEMBERED = 4096


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
            await asyncio.sleep(min(1.0, limit / 4, idle / 4))
            now = time.monotonic()
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
