"""The agent worker: leases groups, plays their samples, has them scored, hands the trajectories over.

queue --lease--> samples --episodes--> trajectories --reward--> put --> queue
                             |  ^
                             v  |
                           engines
"""

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from typing import Any, Protocol

from rl_async.agent_loop.episodes.runner import EpisodeRunner
from rl_async.errors import EpisodeTimeout, RlAsyncError
from rl_async.messages import Done, Leased, LeasedGroup, Refused, Task, Trajectory

log = logging.getLogger("rl_async.agent_loop")

LEASE_WAIT_S = 5.0
RENEWALS_PER_LEASE = 4


class Queue(Protocol):
    """What a worker needs of the transfer queue."""

    async def lease(self, max_groups: int, wait_s: float) -> Leased: ...
    async def renew(self) -> Done: ...
    def put(self, trajectory: Trajectory, /) -> Awaitable[Done | Refused]: ...
    async def fail(self, group_id: int, sample: int, attempt: int, error: str) -> Done | Refused: ...


class Rewards(Protocol):
    """What a worker needs of the reward service."""

    async def score(self, task: Task, trajectory: Trajectory) -> None: ...


class AgentWorker:
    """Plays up to ``concurrency`` conversations at once, on one event loop."""

    def __init__(
        self,
        queue: Queue,
        runner: EpisodeRunner,
        rewards: Rewards,
        *,
        concurrency: int,
        group_size: int,
        lease_s: float,
        episode_timeout_s: float,
    ) -> None:
        self._queue, self._runner, self._rewards = queue, runner, rewards
        self._concurrency, self._group_size, self._lease_s = concurrency, group_size, lease_s
        self._episode_timeout_s = episode_timeout_s
        self._places = asyncio.Semaphore(concurrency)
        self._unfinished = 0  # samples leased and not handed over
        self._less_work = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.put = self.failed = self.refused = 0

    async def run(self) -> None:
        """Work until the queue says that the run is over.

        Raises an ExceptionGroup with QueueLost or ProtocolError when the queue is gone; what goes wrong with one
        sample is reported to the queue instead.
        """
        async with asyncio.TaskGroup() as group:
            self._spawn(group, self._renew(), "renew")
            await self._lease(group)
            for task in self._tasks:
                task.cancel()
        log.info("%d trajectories handed over, %d failed, %d refused", self.put, self.failed, self.refused)

    async def _lease(self, tasks: asyncio.TaskGroup) -> None:
        """Start the samples of leased groups.

        Consumes leases; produces one task per sample. Waits for a free place, then for work; unblocked by a
        conversation's end and by the queue's answer, at most LEASE_WAIT_S later. Ends when the run is over.
        """
        while True:
            while self._unfinished >= self._concurrency:
                self._less_work.clear()
                await self._less_work.wait()
            groups = max(1, (self._concurrency - self._unfinished) // self._group_size)
            leased = await self._queue.lease(groups, LEASE_WAIT_S)
            if leased.finished:
                return
            for group in leased.groups:
                for sample in group.samples:
                    self._unfinished += 1
                    self._spawn(tasks, self._play(group, sample), f"sample {group.group_id}.{sample}")

    async def _renew(self) -> None:
        """Keep the leases. Consumes and produces nothing; waits for the clock; ended by cancellation."""
        while True:
            await asyncio.sleep(self._lease_s / RENEWALS_PER_LEASE)
            await self._queue.renew()

    async def _play(self, group: LeasedGroup, sample: int) -> None:
        """One sample, from the lease to the queue's receipt."""
        try:
            async with self._places:
                row = await self._trajectory(group, sample)
                if isinstance(row, Trajectory):
                    reply = await self._queue.put(row)
                    self.put += 1
                else:
                    reply = await self._queue.fail(group.group_id, sample, group.attempt, row)
                    self.failed += 1
            if isinstance(reply, Refused):
                self.refused += 1
                log.info("sample %d.%d is no longer wanted: %s", group.group_id, sample, reply.reason)
        finally:
            self._unfinished -= 1
            self._less_work.set()

    async def _trajectory(self, group: LeasedGroup, sample: int) -> Trajectory | str:
        """A scored trajectory, or why there is none."""
        try:
            row = await self._episode(group, sample)
            await self._rewards.score(group.task, row)
            return row
        except RlAsyncError as error:
            log.warning("sample %d.%d of task %s: %s", group.group_id, sample, group.task.task_id, error)
            return f"{type(error).__name__}: {error}"
        # Loops and environments are the user's code and may raise anything. The queue counts it and gives up on the
        # group when it happens again and again, with this text.
        except Exception as error:
            log.exception("sample %d.%d of task %s", group.group_id, sample, group.task.task_id)
            return f"{type(error).__name__}: {error}"

    async def _episode(self, group: LeasedGroup, sample: int) -> Trajectory:
        """Play it. Raises EpisodeTimeout when the loop or the environment, which are the user's code, do not end."""
        try:
            async with asyncio.timeout(self._episode_timeout_s) as deadline:
                return await self._runner.run(group, sample)
        except TimeoutError:
            if not deadline.expired():  # the user's own
                raise
            raise EpisodeTimeout(f"no end within {self._episode_timeout_s:g} s (agent.episode_timeout_s)") from None

    def _spawn(self, group: asyncio.TaskGroup, work: Coroutine[Any, Any, None], name: str) -> None:
        task = group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
