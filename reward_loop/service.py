"""Scores finished trajectories by the weighted scorers of the config; a failing scorer only marks its trajectory."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from rl_async.concurrency import gather_or_cancel
from rl_async.configs.derived.rewards import unbounded
from rl_async.configs.derived.sandbox import CODE_SCORER
from rl_async.configs.schema.reward import RewardConfig, RewardTerm
from rl_async.configs.schema.sandbox import SandboxConfig
from rl_async.extraction import behind_reasoning, extract
from rl_async.messages import Activity, Task, Trajectory
from rl_async.process.http_auth import run_token
from rl_async.reward_loop.api import ENVIRONMENT, Conversation, Score, ScorerUnreachable, to_score
from rl_async.reward_loop.limits import MINUTE_S, RateLimit
from rl_async.reward_loop.process_pool import ProcessPool
from rl_async.reward_loop.scorers.code import CodeScorer
from rl_async.reward_loop.scorers.judge import Judge
from rl_async.reward_loop.scorers.model import RewardModel
from rl_async.reward_loop.scorers.registry import ScorerSpec, describe, get_scorer
from rl_async.reward_loop.scorers.verdicts import Verdicts
from rl_async.sandbox.registry import make_sandbox
from rl_async.userload import is_user_reference

VERDICTS_FILE = "verdicts.sqlite"  # in the run folder
# Seconds between two lines about episodes that are not scored.
WARN_S = 60.0
# An outage of a judge or a reward model is waited out so long: less than trainer.batch_timeout_s by default.
OUTAGE_S = 240.0
AGAIN_S = 2.0

log = logging.getLogger("rl_async.rewards")


class RewardService:
    """An async context manager. Its constructor raises ConfigError for scorers that are missing or lack a dependency.

    ``model_url``: URL of the run's own reward model. ``folder``: the run folder, which has that model's
    token and the judge's verdicts. ``sandbox``: where the scorer ``code`` runs programs. ``read``: the reasoning and
    the answer of a turn, as the run's chat format reads its tokens, given those and the tokens before them.
    """

    def __init__(
        self,
        config: RewardConfig,
        *,
        model_url: str = "",
        folder: Path | None = None,
        sandbox: SandboxConfig = SandboxConfig(),  # noqa: B008  frozen
        read: Callable[[Sequence[int], Sequence[int]], tuple[str, str]] | None = None,
    ) -> None:
        self._config, self._read = config, read
        self._models: dict[str, RewardModel | Judge | CodeScorer] = {**_models(config, model_url, folder)}
        if CODE_SCORER in {term.name for term in config.functions}:
            self._models[CODE_SCORER] = CodeScorer(config.code, make_sandbox(sandbox))
        self._terms = [(self._spec(term.name), term) for term in config.functions]
        blocking, awaited = (
            [spec.name for spec, _ in self._terms if spec.place == place] for place in ("process", "awaited")
        )
        self._pool = ProcessPool(blocking, awaited, config.processes, config.process_bytes)
        self._warned = -math.inf
        self._slots = asyncio.Semaphore(config.max_concurrent)
        self._rate = RateLimit(config.per_minute, MINUTE_S)

    async def __aenter__(self) -> Self:
        await self._pool.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._pool.__aexit__(kind, error, trace)
        for model in self._models.values():
            await model.close()

    async def score(self, task: Task, trajectory: Trajectory, *others: Trajectory) -> None:
        """Fill in the trajectory's ``reward``, ``reward_parts``, ``reward_reasons`` and ``timings["reward"]``.

        When a scorer fails, or a reward is beyond ``reward.limit``, ``error`` names the scorer and what happened, and
        the trajectory is not ``scored``: its reward is 0 and no estimator learns from it. ``others`` are the rows of
        its episode without the last answer, which get the same score; their turns' rewards have the limit, too.
        """
        began, at = time.monotonic(), time.time()
        conversation = as_conversation(task, trajectory, self._said(trajectory))
        outcomes = await gather_or_cancel(*(self._extracted(spec, term, conversation) for spec, term in self._terms))
        reward, errors, limit = 0.0, list[str](), self._config.limit
        for (spec, term), outcome in zip(self._terms, outcomes):
            problem = outcome if isinstance(outcome, str) else unbounded({"its score": outcome.value}, limit)
            if isinstance(outcome, str) or problem:
                errors.append(f"reward {spec.name}: {problem}")
                continue
            reward += term.weight * outcome.value
            trajectory.reward_parts |= outcome.named(spec.name)
            trajectory.reward_reasons |= outcome.reasons(spec.name)
        if problem := unbounded({"the reward": reward}, limit) or _unbounded_turn([trajectory, *others], limit):
            errors.append(problem)
        trajectory.reward = 0.0 if errors else reward
        trajectory.scored = not errors
        if errors and time.monotonic() - self._warned > WARN_S:
            self._warned = time.monotonic()
            log.warning("episode %s is not scored: %s", trajectory.episode_id, "; ".join(errors))
        trajectory.error = "; ".join(filter(None, [trajectory.error, *errors]))
        seconds = trajectory.timings["reward"] = time.monotonic() - began
        trajectory.activities.append(Activity("reward", "", at, seconds))
        for row in others:
            row.reward, row.scored, row.error = trajectory.reward, trajectory.scored, trajectory.error
            row.reward_parts, row.reward_reasons = dict(trajectory.reward_parts), dict(trajectory.reward_reasons)

    def _spec(self, name: str) -> ScorerSpec:
        model = self._models.get(name)
        return get_scorer(name) if model is None else ScorerSpec(name, model.score, "served")

    def _said(self, trajectory: Trajectory) -> tuple[str, str] | None:
        """Return reasoning and answer of the last turn, read from its tokens; None without these or a reader."""
        last = next((turn for turn in reversed(trajectory.turns) if turn.role == "assistant"), None)
        if self._read is None or last is None or not trajectory.loss_mask[last.start : last.end].any():
            return None
        row = trajectory.token_ids.tolist()
        return self._read(row[last.start : last.end], row[: last.start])

    async def _extracted(self, spec: ScorerSpec, term: RewardTerm, conversation: Conversation) -> Score | str:
        """Score the part of the last turn that the term extracts; 0 if there is none, and the scorer is not asked.

        Whether something was found is recorded beside the score.
        """
        conversation = msgspec.structs.replace(conversation, solution_str=seen_by(term, conversation))
        if not term.extract:
            return await self._term(spec, conversation)
        try:
            found = await asyncio.to_thread(extract, conversation.solution_str, term.extract)
        except TimeoutError as error:
            return describe(error)
        if found is None:
            return Score(0.0, {"extracted": 0.0}, "nothing was extracted from the answer")
        outcome = await self._term(spec, msgspec.structs.replace(conversation, solution_str=found))
        if isinstance(outcome, str):
            return outcome
        return msgspec.structs.replace(outcome, extra=outcome.extra | {"extracted": 1.0})

    async def _term(self, spec: ScorerSpec, conversation: Conversation) -> Score | str:
        """Return one part of the reward, or the error as text."""
        try:
            if spec.place == "inline":
                return to_score(spec.function(conversation))
            if spec.place == "served":
                return await self._served(spec, conversation)
            async with self._slots:
                await self._rate.wait()
                if spec.place == "process":
                    return await self._pool.score(spec.name, conversation, self._config.timeout_s)
                return await self._pool.score_concurrently(spec.name, conversation, self._config.timeout_s)
        except Exception as error:  # only this trajectory fails
            return describe(error)

    async def _served(self, spec: ScorerSpec, conversation: Conversation) -> Score:
        """Ask a server. While one that has answered before does not, wait for it, at most OUTAGE_S.

        The worker plays no more than ``agent.concurrency`` episodes meanwhile, so the run waits with it.
        """
        began = time.monotonic()
        while True:
            try:
                return await spec.function(conversation)
            except ScorerUnreachable as error:
                now = time.monotonic()
                if now - began > OUTAGE_S:
                    raise
                if now - self._warned > WARN_S:
                    self._warned = now
                    log.warning("reward %s: %s; episodes wait for it, each at most %.0f s", spec.name, error, OUTAGE_S)
            await asyncio.sleep(AGAIN_S)


def _models(config: RewardConfig, model_url: str, folder: Path | None) -> dict[str, RewardModel | Judge]:
    """Make the scorers in use that ask a server; they have limits and deadlines of their own."""
    names = {term.name for term in config.functions}
    models: dict[str, RewardModel | Judge] = {}
    if "reward_model" in names and config.model is not None:
        token = run_token(folder, "engines") if folder is not None and not config.model.url else ""
        models["reward_model"] = RewardModel(config.model, model_url, token)
    if "judge" in names and config.judge is not None:
        file = folder / VERDICTS_FILE if folder is not None and config.judge.cache == "disk" else None
        models["judge"] = Judge(config.judge, Verdicts(file) if config.judge.cache != "none" else None)
    return models


def _unbounded_turn(rows: Sequence[Trajectory], limit: float) -> str | None:
    """Name the first turn of an episode's rows whose reward is beyond the limit; None if there is none."""
    for row in rows:
        turns = {f"the reward of turn {n}": t.reward for n, t in enumerate(row.turns) if t.reward is not None}
        if problem := unbounded(turns, limit):
            return problem
    return None


def seen_by(term: RewardTerm, conversation: Conversation) -> str:
    """Return the text of the last turn that a term of the reward works on (``reward.functions[].text``)."""
    raw = is_user_reference(term.name) if term.text == "auto" else term.text == "raw"
    return conversation.solution_str if raw else conversation.answer


def as_conversation(task: Task, trajectory: Trajectory, read: tuple[str, str] | None = None) -> Conversation:
    """Return what scorers get to see of an episode.

    ``read``: the reasoning and the answer of the last turn. Where a chat format found no reasoning, and without
    ``read``, the tags ``<think>`` and ``</think>`` separate the two.
    """
    said = [turn.text for turn in trajectory.turns if turn.role == "assistant"]
    prefix = f"{ENVIRONMENT}/"
    given = {k.removeprefix(prefix): v for k, v in trajectory.reward_parts.items() if k.startswith(prefix)}
    if ENVIRONMENT in trajectory.reward_parts:
        given["score"] = trajectory.reward_parts[ENVIRONMENT]
    reasoning, answer = read or ("", said[-1] if said else "")
    if not reasoning:
        reasoning, answer = behind_reasoning(answer)
    return Conversation(
        data_source=task.data_source,
        solution_str=said[-1] if said else "",
        reasoning=reasoning,
        answer=answer,
        ground_truth=task.ground_truth,
        extra_info=task.extra,
        turns=trajectory.turns,
        finish_reason=trajectory.finish_reason,
        environment=given,
    )
