"""Scores finished trajectories by the weighted scorers of the config; a failing scorer only marks its trajectory.

Users' functions, and scorers that block, run in the processes of a ``ProcessPool``; one that misses its deadline is
killed and replaced.
"""

import asyncio
import itertools
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from rl_async.concurrency import Overdue, gather_or_cancel, time_limit, to_the_end, within
from rl_async.configs.derived import CODE_SCORER, unbounded
from rl_async.configs.schema.reward import CodeConfig, RewardConfig, RewardTerm, SandboxConfig
from rl_async.extraction import behind_reasoning, extract
from rl_async.files import UNDECODABLE
from rl_async.messages import Activity, Task, Trajectory
from rl_async.process.http_auth import run_token
from rl_async.process.role import own_module
from rl_async.reward_loop.api import (
    ENVIRONMENT,
    MOST_REASON,
    Conversation,
    Score,
    ScorerFailed,
    ScorerUnreachable,
    to_score,
)
from rl_async.reward_loop.model_client import MINUTE_S, RateLimit
from rl_async.reward_loop.scorer_process import LENGTH, Mode, ScoreReply, ScoreRequest, missed
from rl_async.reward_loop.scorers.code import CodeScorer
from rl_async.reward_loop.scorers.judge import Judge, Verdicts
from rl_async.reward_loop.scorers.reward_model import RewardModel
from rl_async.reward_loop.scorers.scorer_registry import ScorerSpec, describe, get_scorer
from rl_async.sandbox.kinds import make_sandbox
from rl_async.userload import is_user_reference

log = logging.getLogger("rl_async.rewards")

# Starting Python and importing a scorer's modules may take so long.
START_S = 60.0
# The last bytes of an ended process are read for so long, since its children may keep its socket open.
LAST_BYTES_S = 0.5
# So long after a deadline, an event loop must have reported that it gave up the coroutine.
UNBLOCK_S = 1.0


class ProcessPool:
    """A fixed number of processes that score one conversation at a time each, and one for all coroutines."""

    def __init__(self, blocking: Sequence[str], awaited: Sequence[str], processes: int) -> None:
        self._processes = [_OneByOne(blocking) for _ in range(processes)]
        self._free: asyncio.LifoQueue[_OneByOne] = asyncio.LifoQueue()
        for process in self._processes:
            self._free.put_nowait(process)
        self.concurrent = _Concurrent(awaited)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await to_the_end(self.concurrent.stop(), *(process.stop() for process in self._processes))

    async def score(self, scorer: str, conversation: Conversation, timeout_s: float) -> Score:
        """Score in the next free process. The deadline ``timeout_s`` starts once that process is ready.

        Raises ScorerFailed if the scorer raised, missed the deadline or ended its process.
        """
        process = await self._free.get()
        try:
            return await process.score(ScoreRequest(0, scorer, conversation, timeout_s))
        finally:
            self._free.put_nowait(process)


class _Channel:
    """A running process with the socket to it. Its process group is its own, so that its children end with it."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process, self.writer = process, writer
        self._reader = reader
        self._decoder = msgspec.msgpack.Decoder(ScoreReply)

    @classmethod
    async def start(cls, mode: Mode, scorers: Sequence[str]) -> Self:
        """Start a process. Raises ScorerFailed if it is not ready within START_S."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *own_module("reward_loop.scorer_process", str(theirs.fileno()), mode, *scorers),
                stdin=asyncio.subprocess.DEVNULL,
                # What a scorer prints goes to the log.
                stdout=2,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        channel = cls(process, *await asyncio.open_connection(sock=ours))
        ready = False
        try:
            async with time_limit(START_S):
                await channel.read()
            ready = True
        except TimeoutError:
            raise ScorerFailed(f"its process was not ready within {START_S:g} s") from None
        except asyncio.IncompleteReadError:
            code = await process.wait()
            raise ScorerFailed(f"its process did not start (exit code {code}); its log says why") from None
        finally:
            if not ready:
                await channel.kill()
        return channel

    def write(self, request: ScoreRequest) -> None:
        body = msgspec.msgpack.encode(request)
        self.writer.write(LENGTH.pack(len(body)) + body)

    async def read(self) -> ScoreReply:
        """Return the next reply. Raises IncompleteReadError if the process ends, also while children of it live on."""
        reading, ending = asyncio.ensure_future(self._frame()), asyncio.ensure_future(self.process.wait())
        try:
            await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await asyncio.wait({reading}, timeout=LAST_BYTES_S)
            if not reading.done():
                raise asyncio.IncompleteReadError(b"", None)
            return reading.result()
        except ConnectionError:
            raise asyncio.IncompleteReadError(b"", None) from None
        # A function has written into the socket: no later reply can be trusted either.
        except UNDECODABLE:
            await self.kill()
            raise asyncio.IncompleteReadError(b"", None) from None
        finally:
            reading.cancel()
            ending.cancel()

    async def _frame(self) -> ScoreReply:
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        return self._decoder.decode(await self._reader.readexactly(length))

    async def kill(self) -> None:
        """Kill the process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()
        self.writer.close()


class _OneByOne:
    """A process that is started when first needed, and again after it was killed."""

    def __init__(self, scorers: Sequence[str]) -> None:
        self._scorers = scorers
        self._channel: _Channel | None = None

    async def score(self, request: ScoreRequest) -> Score:
        answered = False
        try:
            if self._channel is None:
                self._channel = await _Channel.start("process", self._scorers)
            reply = await self._exchange(self._channel, request)
            answered = True
        finally:
            # A late reply must not be taken for the reply to the next request.
            if not answered:
                await self.stop()
        return reply.score()

    async def _exchange(self, channel: _Channel, request: ScoreRequest) -> ScoreReply:
        channel.write(request)
        try:
            return await within(request.timeout_s, channel.read())
        except Overdue:
            raise ScorerFailed(missed(request.timeout_s)) from None
        except asyncio.IncompleteReadError:
            code = await channel.process.wait()
            raise ScorerFailed(f"ended its process (exit code {code})") from None

    async def stop(self) -> None:
        """Kill the process if it runs; the next request starts another."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.kill()


class _BlockedByAnother(Exception):
    """The process was killed because of another conversation."""


class _Concurrent:
    """The process of coroutine functions, whose event loop serves many requests at once; started when first needed.

    It is replaced when it ends, and killed when its event loop is blocked: when it does not give up a coroutine within
    UNBLOCK_S of its deadline. The other requests are then sent to its successor, for the time that they have left.
    """

    def __init__(self, scorers: Sequence[str]) -> None:
        self._scorers = scorers
        self._numbers = itertools.count()
        self._starting = asyncio.Lock()
        self._channel: _Channel | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._blocked: _Channel | None = None
        self._waiting = dict[int, asyncio.Future[ScoreReply]]()

    async def score(self, scorer: str, conversation: Conversation, timeout_s: float) -> Score:
        """Score by a coroutine function. The deadline ``timeout_s`` starts once the process is ready.

        Raises ScorerFailed if the scorer raised or missed the deadline, or a coroutine ended the process.
        """
        left = timeout_s
        while True:
            channel = await self._running()
            began = asyncio.get_running_loop().time()
            try:
                return (await self._exchange(channel, scorer, conversation, left, timeout_s)).score()
            except _BlockedByAnother:
                left -= asyncio.get_running_loop().time() - began

    async def _running(self) -> _Channel:
        async with self._starting:
            if self._receiving is not None and self._receiving.done():
                await self.stop()
            if self._channel is None:
                self._channel = await _Channel.start("awaited", self._scorers)
                self._receiving = asyncio.create_task(self._receive(self._channel))
            return self._channel

    async def _exchange(
        self, channel: _Channel, scorer: str, conversation: Conversation, left_s: float, timeout_s: float
    ) -> ScoreReply:
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        reply = self._waiting[number] = loop.create_future()
        channel.write(ScoreRequest(number, scorer, conversation, left_s))
        try:
            return await within(left_s, reply)
        except asyncio.CancelledError:
            self._waiting.pop(number, None)
            channel.write(ScoreRequest(number, scorer, None, left_s))
            raise
        except Overdue:
            # In two halves, so that the answer that came during a pause of this process is read before the second.
            half = UNBLOCK_S / 2
            loop.call_later(half, loop.call_later, half, self._end_if_blocked, channel, number)
            raise ScorerFailed(missed(timeout_s)) from None

    def _end_if_blocked(self, channel: _Channel, number: int) -> None:
        if number in self._waiting and channel is self._channel:
            self._blocked = channel
            with suppress(ProcessLookupError):
                os.killpg(channel.process.pid, signal.SIGKILL)

    async def _receive(self, channel: _Channel) -> None:
        """Consumes replies and hands each to its request; runs until the process ends, which fails all requests."""
        try:
            while True:
                reply = await channel.read()
                if (waiting := self._waiting.pop(reply.number, None)) is not None and not waiting.done():
                    waiting.set_result(reply)
        except asyncio.IncompleteReadError:
            code = await channel.process.wait()
            lost, self._waiting = self._waiting, {}
            for waiting in lost.values():
                if not waiting.done():
                    reason = f"ended its process, or another coroutine in it did (exit code {code})"
                    blocked = channel is self._blocked
                    waiting.set_exception(_BlockedByAnother() if blocked else ScorerFailed(reason))

    async def stop(self) -> None:
        """Kill the process if it runs; the next request starts another."""
        channel, self._channel = self._channel, None
        receiving, self._receiving = self._receiving, None
        if channel is not None:
            await channel.kill()
        if receiving is not None:
            await receiving


# The scorers that refuse a ground truth that they cannot read.
JUDGES_TRUTH = ("exact_answer", "math", CODE_SCORER)
# The file in the run folder that holds the judge's verdicts.
VERDICTS_FILE = "verdicts.sqlite"
# Seconds between two lines about episodes that are not scored.
WARN_S = 60.0
# How long to wait out an outage of a judge or a reward model: less than trainer.batch_timeout_s by default.
OUTAGE_S = 240.0
AGAIN_S = 2.0


class RewardService:
    """An async context manager. Its constructor raises ConfigError for scorers that are missing or lack a dependency.

    ``model_url`` is the URL of the run's own reward model; ``folder``, the run folder, holds that model's token and the
    judge's verdicts. The scorer ``code`` runs programs in ``sandbox``. ``read`` splits a turn into reasoning and answer
    as the run's chat format does, given its tokens and the tokens before them.
    """

    def __init__(
        self,
        config: RewardConfig,
        *,
        model_url: str = "",
        folder: Path | None = None,
        sandbox: SandboxConfig | None = None,
        read: Callable[[Sequence[int], Sequence[int]], tuple[str, str]] | None = None,
    ) -> None:
        self._config, self._read = config, read
        self._models: dict[str, RewardModel | Judge | CodeScorer] = {**_models(config, model_url, folder)}
        if CODE_SCORER in {term.name for term in config.functions}:
            self._models[CODE_SCORER] = CodeScorer(config.code or CodeConfig(), make_sandbox(sandbox))
        served = {name: ScorerSpec(name, model.score, "served") for name, model in self._models.items()}
        # Asked once the other answers of the group are there, if it compares answers.
        self._judge = self._models.get("judge") if config.judge is not None and config.judge.compare else None
        self._terms = [(served.get(term.name) or get_scorer(term.name), term) for term in config.functions]
        blocking, awaited = (
            [spec.name for spec, _ in self._terms if spec.place == place] for place in ("process", "awaited")
        )
        self._pool = ProcessPool(blocking, awaited, config.processes)
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

    async def score(self, task: Task, trajectory: Trajectory, *others: Trajectory, alone: bool = True) -> None:
        """Fill in the trajectory's ``reward``, ``reward_parts``, ``reward_reasons`` and ``timings["reward"]``.

        When a scorer fails, or a reward is beyond ``reward.limit``, ``error`` names the scorer and the problem, and
        the trajectory is not ``scored``: its reward is 0 and no estimator learns from it. ``others`` are the rows of
        its episode without the last answer, which get the same score; their turns' rewards have the limit, too.

        A judge that compares answers takes the ground truth for the other one. With ``alone`` false it is left out
        until ``compare`` is called.
        """
        began, at = time.monotonic(), time.time()
        conversation = as_conversation(task, trajectory, self._said(trajectory))
        terms = [(spec, term) for spec, term in self._terms if alone or self._judge is None or spec.name != "judge"]
        outcomes = await gather_or_cancel(*(self._extracted(spec, term, conversation) for spec, term in terms))
        reward, errors, limit = 0.0, list[str](), self._config.limit
        answered = [turn for turn in trajectory.turns if turn.role == "assistant"]
        for (spec, term), outcome in zip(terms, outcomes):
            problem = outcome if isinstance(outcome, str) else unbounded({"its score": outcome.value}, limit)
            if isinstance(outcome, str) or problem:
                errors.append(f"reward {spec.name}: {problem}")
                continue
            # An episode of several rows gets all of it at its end.
            for turn, part in zip(answered if not others else [], outcome.turns):
                turn.reward = (turn.reward or 0.0) + term.weight * part
                reward -= term.weight * part
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

    async def compare(self, task: Task, episodes: Sequence[Sequence[Trajectory]]) -> None:
        """Add the judge's part to the rewards of a group's episodes, which ``score`` left out.

        The last row of an episode has the answer. The part is the mean preference over the other answers. An episode
        that could not be compared is not scored.
        """
        term = next(term for spec, term in self._terms if spec.name == "judge")
        said = [as_conversation(task, rows[-1], self._said(rows[-1])) for rows in episodes]
        said = [msgspec.structs.replace(each, solution_str=seen_by(term, each)) for each in said]
        known = [place for place, rows in enumerate(episodes) if rows[-1].scored]
        pairs = [(one, other) for one in known for other in known if one < other]
        found = await gather_or_cancel(*(self._preference(said[one], said[other].solution_str) for one, other in pairs))
        for place in known:
            preferred = [
                (score.value if place == one else 1 - score.value, score.reason)
                for (one, other), score in zip(pairs, found, strict=True)
                if place in (one, other) and isinstance(score, Score)
            ]
            failed = [
                score for pair, score in zip(pairs, found, strict=True) if place in pair and isinstance(score, str)
            ]
            last = episodes[place][-1]
            if preferred:
                part = sum(value for value, _ in preferred) / len(preferred)
                last.reward += term.weight * part
                last.reward_parts["judge"] = part
                last.reward_reasons["judge"] = "\n".join(reason for _, reason in preferred)[:MOST_REASON]
            else:
                why = failed[0] if failed else "no other answer of its group was there to compare it with"
                last.reward, last.scored = 0.0, False
                last.error = "; ".join(filter(None, [last.error, f"reward judge: {why}"]))
            for row in episodes[place][:-1]:
                row.reward, row.scored, row.error = last.reward, last.scored, last.error
                row.reward_parts, row.reward_reasons = dict(last.reward_parts), dict(last.reward_reasons)

    async def _preference(self, conversation: Conversation, other: str) -> Score | str:
        """Return how far the judge prefers an answer to another, or the error as text."""
        judge = self._judge
        assert isinstance(judge, Judge)
        try:
            return await self._served("judge", lambda: judge.prefer(conversation, other))
        # As for every scorer: whatever is raised fails this comparison alone.
        except Exception as error:
            return describe(error)

    def _said(self, trajectory: Trajectory) -> tuple[str, str] | None:
        """Read the reasoning and the answer of the last turn from its tokens; None without tokens or a reader."""
        last = next((turn for turn in reversed(trajectory.turns) if turn.role == "assistant"), None)
        if self._read is None or last is None or not trajectory.loss_mask[last.start : last.end].any():
            return None
        row = trajectory.token_ids.tolist()
        return self._read(row[last.start : last.end], row[: last.start])

    async def _extracted(self, spec: ScorerSpec, term: RewardTerm, conversation: Conversation) -> Score | str:
        """Score the part of the last turn that the term extracts. Without such a part, return 0, and skip the scorer
        unless it may refuse the ground truth, which no answer can change.

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
            if term.name in JUDGES_TRUTH:
                outcome = await self._term(spec, msgspec.structs.replace(conversation, solution_str=""))
                if isinstance(outcome, str):
                    return outcome
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
                return await self._served(spec.name, lambda: spec.function(conversation))
            async with self._slots:
                await self._rate.wait()
                if spec.place == "process":
                    return await self._pool.score(spec.name, conversation, self._config.timeout_s)
                return await self._pool.concurrent.score(spec.name, conversation, self._config.timeout_s)
        # A scorer may raise anything, which fails this trajectory alone.
        except Exception as error:
            return describe(error)

    async def _served(self, name: str, ask: Callable[[], Awaitable[Score]]) -> Score:
        """Ask a server. While one that has answered before does not, wait for it, at most OUTAGE_S.

        The worker plays no more than ``agent.concurrency`` episodes meanwhile, so the run waits with it.
        """
        began = time.monotonic()
        while True:
            try:
                return await ask()
            except ScorerUnreachable as error:
                now = time.monotonic()
                if now - began > OUTAGE_S:
                    raise
                if now - self._warned > WARN_S:
                    self._warned = now
                    log.warning("reward %s: %s; episodes wait for it, each at most %.0f s", name, error, OUTAGE_S)
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
    """Return the problem of the first turn whose reward is beyond the limit, or None."""
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
    """Convert an episode for scorers.

    ``read`` is the reasoning and the answer of the last turn by the model's chat format. Tags such as ``<think>``
    separate the two without it, and reasoning that begins again behind the format's own.
    """
    said = [turn.text for turn in trajectory.turns if turn.role == "assistant"]
    prefix = f"{ENVIRONMENT}/"
    given = {k.removeprefix(prefix): v for k, v in trajectory.reward_parts.items() if k.startswith(prefix)}
    if ENVIRONMENT in trajectory.reward_parts:
        given["score"] = trajectory.reward_parts[ENVIRONMENT]
    reasoning, answer = read or ("", said[-1] if said else "")
    further, answer = behind_reasoning(answer)
    reasoning = "\n".join(filter(None, [reasoning, further]))
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
