"""All episodes of a gateway: leased when agent programs ask, handed to the queue when they end, given up when late.

queue --lease--> samples --POST /episodes--> agent programs --reward--> rows --put--> queue
"""

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import msgspec

from rl_async.agent_loop.chat_formats.render import ChatRenderer
from rl_async.agent_loop.gateway.episode import GatewayEpisode, give_reward, share_reward
from rl_async.configs.schema.rollout import GatewayConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import RequestRefused
from rl_async.messages import Done, Leased, LeasedGroup, Refused, Task, Trajectory
from rl_async.rollout_server.api import Generator

log = logging.getLogger("rl_async.gateway")

LEASE_WAIT_S = 5.0
RENEWALS_PER_LEASE = 4
REMEMBERED = 4096  # ends, so that one posted twice is answered twice


class Queue(Protocol):
    """What a gateway needs of the transfer queue."""

    async def lease(self, max_groups: int, wait_s: float) -> Leased: ...
    async def renew(self) -> Done: ...
    def put(self, *rows: Trajectory) -> Awaitable[Done | Refused]: ...
    async def fail(self, group_id: int, sample: int, attempt: int, error: str) -> Done | Refused: ...


class Rewards(Protocol):
    """What a gateway needs of the reward service."""

    async def score(self, task: Task, trajectory: Trajectory) -> None: ...


class Ending(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an agent program ends its episode; nothing at all: the run's reward functions score it."""

    reward: float | None = None
    parts: dict[str, float] = {}
    error: str = ""


class Ended(NamedTuple):
    """What became of an ended episode."""

    accepted: bool
    reason: str
    rows: int
    reward: float | None

    def body(self) -> dict[str, Any]:
        """What the agent program is told."""
        return self._asdict()


class OpenEpisodes:
    """Use ``run`` beside the server. Episodes are named by their secret ids."""

    def __init__(
        self, config: RunConfig, renderer: ChatRenderer, generator: Generator, queue: Queue, rewards: Rewards
    ) -> None:
        self._config, self._renderer, self._generator = config, renderer, generator
        self._queue, self._rewards = queue, rewards
        self._options = config.agent.gateway or GatewayConfig()
        self._open: dict[str, GatewayEpisode] = {}
        self._ended: OrderedDict[str, Ended] = OrderedDict()
        self._samples: deque[tuple[LeasedGroup, int]] = deque()  # leased, and nobody has asked for them yet
        self._changed = asyncio.Condition()  # of samples, of who waits for them, or the end of the run
        self._waiting = 0
        self._asked = time.monotonic()
        self.finished = False
        self.put = self.failed = self.refused = 0

    # --- the loops --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until the queue says that the run is over.

        Raises an ExceptionGroup with QueueLost or ProtocolError when the queue is gone.
        """
        async with asyncio.TaskGroup() as group:
            others = [group.create_task(work) for work in (self._renew(), self._reap(), self._lease())]
            while not self.finished:
                self._take(await self._queue.lease(0, LEASE_WAIT_S))  # asks for nothing but the end
                await self._notify()
            for task in others:
                task.cancel()
        log.info("%d episodes handed over, %d failed, %d refused", self.put, self.failed, self.refused)

    async def _lease(self) -> None:
        """Lease a group whenever more programs wait than there are samples.

        Consumes leases; produces samples. Waits for a program to ask, then for work; unblocked by ``begin`` and by the
        queue's answer, at most LEASE_WAIT_S later. Ended by cancellation at the end of the run, not before: of a lease
        whose answer nobody reads, the queue would think that its samples are played.
        """
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._waiting > len(self._samples))
            self._take(await self._queue.lease(1, LEASE_WAIT_S))
            await self._notify()

    def _take(self, leased: Leased) -> None:
        self.finished = self.finished or leased.finished
        self._samples += [(group, sample) for group in leased.groups for sample in group.samples]

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _renew(self) -> None:
        """Keep the leases. Consumes and produces nothing; waits for the clock; ended by cancellation."""
        while True:
            await asyncio.sleep(self._config.queue.lease_s / RENEWALS_PER_LEASE)
            await self._queue.renew()

    async def _reap(self) -> None:
        """Give up what nobody ends, and samples that nobody asks for.

        Consumes episodes and samples past their deadline; produces failures. Waits for the clock; ended by
        cancellation.
        """
        limit = self._config.agent.episode_timeout_s
        while True:
            await asyncio.sleep(min(1.0, limit / 4))
            now = time.monotonic()
            for episode in [e for e in self._open.values() if now - e.began > limit]:
                if not (episode.closed or episode.ending.locked()):  # else its end is on its way
                    await self._fail(episode, f"EpisodeTimeout: no end within {limit:g} s (agent.episode_timeout_s)")
            if now - self._asked > limit and not self._waiting:
                while self._samples:
                    group, sample = self._samples.popleft()
                    await self._queue.fail(group.group_id, sample, group.attempt, "no agent program asked for it")

    # --- what agent programs do -------------------------------------------------------------------------------------

    async def begin(self, wait_s: float) -> GatewayEpisode | None:
        """An episode to play; None if there was none within ``wait_s``, or if the run is over (``finished``)."""
        self._asked = time.monotonic()
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
            if not self._samples:
                return None
            group, sample = self._samples.popleft()
        self._asked = time.monotonic()
        episode = GatewayEpisode(
            group,
            sample,
            config=self._config,
            renderer=self._renderer,
            generator=self._generator,
            max_answers=self._options.max_answers,
        )
        self._open[episode.id] = episode
        return episode

    def get(self, episode_id: str) -> GatewayEpisode:
        """An open episode. Raises RequestRefused if there is none of this id."""
        episode = self._open.get(episode_id)
        if episode is None:
            known = episode_id in self._ended
            raise RequestRefused(
                "this episode has ended" if known else "there is no such episode, or it has ended",
                code="episode_ended" if known else "unknown_episode",
                status=404,
            )
        return episode

    async def end(self, episode_id: str, ending: Ending) -> Ended:
        """End an episode; the same answer however often it is asked. Raises RequestRefused, and it stays open."""
        if episode_id in self._ended:
            return self._ended[episode_id]
        episode = self.get(episode_id)
        async with episode.ending:
            if episode_id in self._ended:
                return self._ended[episode_id]
            if episode.closed:  # given up at this moment
                raise RequestRefused("this episode has ended", code="episode_ended", status=404)
            if ending.error:
                return await self._fail(episode, f"the agent program: {ending.error}")
            return await self._hand_over(episode, ending)

    async def _hand_over(self, episode: GatewayEpisode, ending: Ending) -> Ended:
        rows, last = episode.trajectories()
        if not rows:
            raise RequestRefused(
                'the episode has no answer to train on; ask for one, or give it up with {"error": "..."}',
                code="no_answers",
                status=409,
            )
        if ending.reward is not None:
            give_reward(rows, ending.reward, ending.parts)
        elif ending.parts:
            raise RequestRefused("parts of a reward need the reward", code="invalid_request", param="reward")
        with _closing(episode):
            if ending.reward is None:
                await self._rewards.score(episode.group.task, rows[last])
                share_reward(rows, rows[last])
            reply = await self._queue.put(*rows)
        self.put += 1
        return self._close(episode, reply, len(rows), rows[last].reward if rows[last].scored else None)

    async def _fail(self, episode: GatewayEpisode, error: str) -> Ended:
        log.warning("sample %d.%d: %s", episode.group.group_id, episode.sample, error)
        with _closing(episode):
            reply = await self._queue.fail(episode.group.group_id, episode.sample, episode.group.attempt, error)
        self.failed += 1
        return self._close(episode, reply, 0, None)

    def _close(self, episode: GatewayEpisode, reply: Done | Refused, rows: int, reward: float | None) -> Ended:
        reason = reply.reason if isinstance(reply, Refused) else ""
        self.refused += bool(reason)
        self._open.pop(episode.id, None)
        ended = self._ended[episode.id] = Ended(not reason, reason, rows, reward)
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        return ended


@contextmanager
def _closing(episode: GatewayEpisode) -> Iterator[None]:
    """It takes no more requests; if the block fails it does again, and its end may be posted again."""
    episode.closed = True
    try:
        yield
    except BaseException:
        episode.closed = False
        raise
