"""Scores finished trajectories: parts and weights, deadlines, limits. A scorer's failure marks the trajectory only."""

import asyncio
import time
from collections import deque
from types import TracebackType
from typing import Self

from rl_async.configs.schema import RewardConfig
from rl_async.messages import Task, Trajectory
from rl_async.reward_loop.api import Conversation, Score, ScorerFailed, to_score
from rl_async.reward_loop.pool import ProcessPool
from rl_async.reward_loop.scorers import ScorerSpec, describe, get_scorer

MINUTE_S = 60.0


class RewardService:
    """Use it as ``async with``. Raises ConfigError at once for scorers that do not exist or lack a package."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._terms = [(get_scorer(term.name), term.weight) for term in config.functions]
        blocking = [spec.name for spec, _ in self._terms if spec.place == "process"]
        self._pool = ProcessPool(blocking, config.processes)
        self._places = asyncio.Semaphore(config.max_concurrent)
        self._rate = RateLimit(config.per_minute, MINUTE_S)

    async def __aenter__(self) -> Self:
        await self._pool.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._pool.__aexit__(kind, error, trace)

    async def score(self, task: Task, trajectory: Trajectory) -> None:
        """Fill in the trajectory's ``reward``, ``reward_parts`` and ``timings["reward"]``.

        When a scorer fails, ``error`` names the scorer and what happened, and the trajectory is not ``scored``: its
        reward is 0 and no estimator learns from it.
        """
        began = time.monotonic()
        conversation = as_conversation(task, trajectory)
        outcomes = await asyncio.gather(*(self._term(spec, conversation) for spec, _ in self._terms))
        reward, errors = 0.0, list[str]()
        for (spec, weight), outcome in zip(self._terms, outcomes):
            if isinstance(outcome, str):
                errors.append(f"reward {spec.name}: {outcome}")
                continue
            reward += weight * outcome.value
            trajectory.reward_parts[spec.name] = outcome.value
            for key, value in outcome.extra.items():
                trajectory.reward_parts[f"{spec.name}/{key}"] = value
        trajectory.reward = 0.0 if errors else reward
        trajectory.scored = not errors
        trajectory.error = "; ".join(filter(None, [trajectory.error, *errors]))
        trajectory.timings["reward"] = time.monotonic() - began

    async def _term(self, spec: ScorerSpec, conversation: Conversation) -> Score | str:
        """One part of the reward, or why there is none."""
        try:
            if spec.place == "inline":
                return to_score(spec.function(conversation))
            async with self._places:
                await self._rate.wait()
                if spec.place == "process":
                    return await self._pool.score(spec.name, conversation, self._config.timeout_s)
                return await self._awaited(spec, conversation)
        except Exception as error:  # the user's code may raise anything; it belongs to this trajectory
            return describe(error)

    async def _awaited(self, spec: ScorerSpec, conversation: Conversation) -> Score:
        try:
            async with asyncio.timeout(self._config.timeout_s) as deadline:
                return to_score(await spec.function(conversation))
        except TimeoutError:
            if not deadline.expired():  # the function's own
                raise
            raise ScorerFailed(f"did not answer within {self._config.timeout_s:g} s (reward.timeout_s)") from None


def as_conversation(task: Task, trajectory: Trajectory) -> Conversation:
    """What scorers see of an episode."""
    said = [turn.text for turn in trajectory.turns if turn.role == "assistant"]
    return Conversation(
        data_source=task.data_source,
        solution_str=said[-1] if said else "",
        ground_truth=task.ground_truth,
        extra_info=task.extra,
        turns=trajectory.turns,
        finish_reason=trajectory.finish_reason,
    )


class RateLimit:
    """At most ``count`` starts within any ``period_s`` seconds; 0: no limit."""

    def __init__(self, count: int, period_s: float) -> None:
        self._count, self._period_s = count, period_s
        self._started: deque[float] = deque(maxlen=count or 1)
        self._turn = asyncio.Lock()

    async def wait(self) -> None:
        """Return when the next start is due, first come first served; at the latest after one period per start."""
        if not self._count:
            return
        async with self._turn:
            if len(self._started) == self._count:
                await asyncio.sleep(max(0.0, self._started[0] + self._period_s - time.monotonic()))
            self._started.append(time.monotonic())
