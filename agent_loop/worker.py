"""The agent worker: leases groups, plays their samples, has them scored and puts the trajectories into the queue.

    queue --lease--> samples --episodes--> trajectories --reward--> put --> queue
                                 |  ^
                                 v  |
                               engines

``work`` is the process: it connects an ``AgentWorker`` to engines, reward service and queue. ``Repetitions`` thins out
the log lines of similar failures, here and in the gateway.
"""

import asyncio
import contextlib
import functools
import logging
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import uvloop

from rl_async import tracing
from rl_async.agent_loop import telemetry
from rl_async.agent_loop.chat_formats.format import ChatFormat, reasoning_and_answer
from rl_async.agent_loop.chat_formats.format_registry import load_format
from rl_async.agent_loop.environments.host_pool import HostedEnvironments
from rl_async.agent_loop.episode import AsRecorded, RecordedRunner
from rl_async.agent_loop.runner import EpisodeRunner
from rl_async.agent_loop.telemetry import SamplesCollector
from rl_async.agent_loop.tools.mcp_toolbox import forget_variables
from rl_async.agent_loop.tools.tool_registry import connect_servers
from rl_async.configs.derived import samples_per_group
from rl_async.configs.load import load_resolved
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import EXIT_SIGNAL, ConfigError, RlAsyncError
from rl_async.messages import Done, Leased, LeasedGroup, Refused, Renewed, SampleKey, Task, Trajectory, by_role
from rl_async.process.allocation import collect_rarely
from rl_async.process.http_auth import run_token
from rl_async.process.http_server import exposed
from rl_async.process.role import heeded
from rl_async.reward_loop.model_client import forget_api_keys
from rl_async.reward_loop.service import RewardService
from rl_async.rollout_server.api import Generator
from rl_async.rollout_server.pool import engine_pool
from rl_async.transfer_queue.auth import client_keys
from rl_async.transfer_queue.client import QueueClient
from rl_async.userload import raised_at, told

log = logging.getLogger("rl_async.agent_loop")


class SampleQueue(Protocol):
    """The agents' verbs of the transfer queue."""

    async def lease(self, max_groups: int, wait_s: float) -> Leased: ...
    async def renew(self, held: list[SampleKey]) -> Renewed: ...
    def put(self, *rows: Trajectory, media: Mapping[str, bytes] | None = None) -> Awaitable[Done | Refused]: ...
    async def fail(self, group_id: int, sample: int, attempt: int, error: str) -> Done | Refused: ...


class GatewayQueue(SampleQueue, Protocol):
    """A gateway's verbs: its leases say for how long no agent program has played or asked."""

    async def lease(self, max_groups: int, wait_s: float, *, idle_s: float | None = None) -> Leased: ...


class Runner(Protocol):
    """Plays the episodes of an agent worker."""

    async def run(self, group: LeasedGroup, sample: int, images: dict[str, bytes]) -> list[Trajectory]:
        """Return the rows of one sample, not scored yet, and add their images by hash to ``images``.

        Errors are reported to the queue.
        """
        ...


class RewardScorer(Protocol):
    """Fills in a trajectory's reward, and gives it to the other rows of its episode."""

    async def score(self, task: Task, trajectory: Trajectory, *others: Trajectory, alone: bool = True) -> None: ...

    async def compare(self, task: Task, episodes: Sequence[Sequence[Trajectory]]) -> None:
        """Add the part of the reward that compares episodes of a group."""
        ...


class Siblings:
    """The samples of one group, whose answers a judge compares once the last of them was played or has failed.

    Those that this lease lacks, since an earlier one has put them or plays them, are played once more, only to be
    compared with.

    ``spawn`` starts the comparison as a task, which the end of the run cancels.
    """

    def __init__(self, samples: int, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]) -> None:
        self._missing, self._complete, self._spawn = samples, asyncio.Event(), spawn
        self._rows: list[list[Trajectory]] = []
        self._comparing: asyncio.Task[None] | None = None

    def arrive(self, rows: list[Trajectory] | None) -> None:
        """Count a sample; one that failed has no rows."""
        self._missing -= 1
        self._rows += [rows] if rows else []
        if not self._missing:
            self._complete.set()

    async def compared(self, rewards: RewardScorer, task: Task) -> None:
        """Wait for all samples, and for the comparison of them, role by role, which the first caller starts."""
        await self._complete.wait()
        if self._comparing is None:
            self._comparing = self._spawn(self._compare(rewards, task))
        # Cancelling one sample must not cancel the others' comparison.
        await asyncio.shield(self._comparing)

    async def _compare(self, rewards: RewardScorer, task: Task) -> None:
        roles: dict[str, list[list[Trajectory]]] = {}
        for rows in self._rows:
            for those in by_role(rows):
                roles.setdefault(those[0].role, []).append(those)
        for episodes in roles.values():
            await rewards.compare(task, episodes)


LEASE_WAIT_S = 5.0
RENEWALS_PER_LEASE = 4
# The pause before a lease grows from the first to the longest while samples only fail.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
# The queue refuses a sample with these codes if it has leased it again or rolled it back.
OUTDATED = ("fenced", "unknown_group")


class Pauses:
    """Backs off before the next lease while samples only fail, so that a broken loop does not burn through the tasks.

    The pause doubles after each lease whose samples all failed.
    """

    def __init__(self) -> None:
        self._put = self._failed = 0
        self._pause_s = 0.0

    def after(self, put: int, failed: int) -> float:
        """Return the pause, given how many samples were put and failed in all."""
        if put > self._put:
            self._pause_s = 0.0
        elif failed > self._failed:
            self._pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause_s))
        pause_s = self._pause_s if failed > self._failed and put == self._put else 0.0
        self._put, self._failed = put, failed
        return pause_s


class AgentWorker:
    """Plays up to ``agent.concurrency`` conversations at once, on one event loop."""

    def __init__(self, queue: SampleQueue, runner: Runner, rewards: RewardScorer, config: RunConfig) -> None:
        self._queue, self._runner, self._rewards = queue, runner, rewards
        self._agent, self._lease_s, self._group_size = config.agent, config.queue.lease_s, samples_per_group(config)
        self._replays = bool(config.rollout.replay)
        judged = any(term.name == "judge" for term in config.reward.functions)
        self._compares = judged and config.reward.judge is not None and config.reward.judge.compare
        self._slots = asyncio.Semaphore(config.agent.concurrency)
        # Samples that are leased and neither put nor failed.
        self._held: list[SampleKey] = []
        # Samples that are played only to be compared with.
        self._opposing = 0
        self._playing: dict[SampleKey, asyncio.Task[list[Trajectory] | str]] = {}
        # Tasks that are cancelled because another worker has the lease now.
        self._taken_back: set[asyncio.Task[list[Trajectory] | str]] = set()
        self._less_work = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pauses = Pauses()
        self._failures = Repetitions()
        self.put = self.failed = self.refused = 0

    @property
    def held(self) -> int:
        """Samples that are leased and have not ended."""
        return len(self._held)

    async def run(self) -> None:
        """Work until the queue reports the end of the run.

        Raises an ExceptionGroup with QueueLost or ProtocolError if the queue is gone. An error in one sample is
        reported to the queue instead. In a replay it ends the run, since the next group must not take the place.
        """
        async with asyncio.TaskGroup() as group:
            self._spawn(group, self._renew(), "renew")
            await self._lease(group)
            for task in self._tasks:
                task.cancel()
        log.info("%d trajectories put, %d samples failed, %d refused by the queue", self.put, self.failed, self.refused)

    async def _lease(self, tasks: asyncio.TaskGroup) -> None:
        """Start the samples of leased groups.

        Consumes leases; produces one task per sample. Waits for a free slot, for the clock while samples only fail,
        then for work; unblocked by the end of a conversation, at most LONGEST_PAUSE_S later, and by the queue's reply,
        at most LEASE_WAIT_S later. Ends when the run is over.
        """
        while True:
            while (room := self._agent.concurrency - len(self._held) - self._opposing) <= 0:
                self._less_work.clear()
                await self._less_work.wait()
            if pause_s := self._pauses.after(self.put, self.failed):
                await asyncio.sleep(pause_s)
            leased = await self._queue.lease(max(1, room // self._group_size), LEASE_WAIT_S)
            if leased.finished:
                return
            for group in leased.groups:
                compared = self._compares and group.partition == "train"
                spawn = functools.partial(self._spawn, tasks, name=f"comparison {group.group_id}")
                others = set(range(self._group_size)) - set(group.samples) if compared else set()
                siblings = Siblings(len(group.samples) + len(others), spawn) if compared else None
                for other in others:
                    assert siblings is not None
                    self._opposing += 1
                    self._spawn(tasks, self._oppose(group, other, siblings), f"opponent {group.group_id}.{other}")
                for sample in group.samples:
                    self._held.append((group.group_id, sample, group.attempt))
                    self._spawn(tasks, self._play(group, sample, siblings), f"sample {group.group_id}.{sample}")

    async def _renew(self) -> None:
        """Renew the leases until cancelled; stop samples that were leased to another worker. Waits for the clock."""
        while True:
            await asyncio.sleep(self._lease_s / RENEWALS_PER_LEASE)
            for key in (await self._queue.renew(list(self._held))).gone:
                if (playing := self._playing.get(key)) is not None:
                    self._taken_back.add(playing)
                    playing.cancel()

    async def _play(self, group: LeasedGroup, sample: int, siblings: Siblings | None) -> None:
        """Play one sample and put all its rows, or report its failure; do neither if the queue has taken it back.

        With ``siblings`` it waits for them in between, without a slot, which they may need.
        """
        key, images, rows = (group.group_id, sample, group.attempt), dict[str, bytes](), None
        try:
            async with self._slots:
                try:
                    rows = await self._played(key, group, sample, images)
                finally:
                    if siblings is not None:
                        siblings.arrive(rows if isinstance(rows, list) else None)
                if siblings is None:
                    await self._hand_in(group, sample, rows, images)
            if siblings is not None:
                if isinstance(rows, list):
                    await siblings.compared(self._rewards, group.task)
                await self._hand_in(group, sample, rows, images)
        finally:
            self._held.remove(key)
            self._less_work.set()

    async def _oppose(self, group: LeasedGroup, sample: int, siblings: Siblings) -> None:
        """Play a sample of the group that this lease lacks, for the judge to compare its answer; put nothing."""
        rows = None
        try:
            async with self._slots:
                rows = await self._rows(group, sample, {})
        finally:
            siblings.arrive(rows if isinstance(rows, list) else None)
            self._opposing -= 1
            self._less_work.set()

    async def _hand_in(
        self, group: LeasedGroup, sample: int, rows: list[Trajectory] | str | None, images: Mapping[str, bytes]
    ) -> None:
        """Put a sample's rows, or report the failure that they are; do neither with None."""
        if rows is None:
            self.refused += 1
            log.info("sample %d.%d was stopped: another worker plays it by now", group.group_id, sample)
            return
        reply = None
        if not isinstance(rows, str):
            try:
                reply = await self._queue.put(*rows, media=images)
                self.put += 1
            # A text that a user's loop put into them.
            except UnicodeEncodeError as error:
                rows = f"a text of its rows cannot be sent: {error}"
        if isinstance(rows, str):
            reply = await self._queue.fail(group.group_id, sample, group.attempt, rows)
            self.failed += 1
        if isinstance(reply, Refused):
            self.refused += 1
            log.info("sample %d.%d was refused: %s", group.group_id, sample, reply.reason)
            if self._replays and reply.code not in OUTDATED:
                raise ConfigError(f"rollout.replay: the queue refused a recorded sample: {reply.reason}")

    async def _played(
        self, key: SampleKey, group: LeasedGroup, sample: int, images: dict[str, bytes]
    ) -> list[Trajectory] | str | None:
        """Return the result of ``_rows``, or None if the queue took the sample back meanwhile."""
        playing = self._playing[key] = asyncio.create_task(self._rows(group, sample, images))
        try:
            await asyncio.wait([playing])
        finally:
            self._playing.pop(key, None)
            if not playing.done():
                playing.cancel()
                await asyncio.wait([playing])
        if playing in self._taken_back:
            self._taken_back.remove(playing)
            return None
        return "CancelledError: raised by the episode" if playing.cancelled() else playing.result()

    async def _rows(self, group: LeasedGroup, sample: int, images: dict[str, bytes]) -> list[Trajectory] | str:
        """Return the sample's scored rows, or the error as text. In a replay, raises the error."""
        trace = group.trace(sample)
        try:
            with telemetry.of_agent(trace, group, group.task.agent or self._agent.loop):
                rows = await self._runner.run(group, sample, images)
            for *others, last in by_role(rows):
                with telemetry.of_reward(trace, last):
                    alone = not self._compares or group.partition != "train"
                    await self._rewards.score(group.task, last, *others, alone=alone)
            for row in rows:
                row.traced = bool(trace)
            return rows
        except RlAsyncError as error:
            if self._replays:
                raise
            self._log_failure(group, sample, error)
            return told(error)
        # Loops and environments are the user's code and may raise anything. The queue counts failures and dead-letters
        # a group that keeps failing, with this text.
        except Exception as error:
            if self._replays:
                raise
            self._log_failure(group, sample, error)
            return told(error)

    def _log_failure(self, group: LeasedGroup, sample: int, error: Exception) -> None:
        """Log why a sample failed, unless enough similar failures were logged: errors of one class from one line.

        This project's own errors must also begin alike, except for numbers, since one line raises many. The first
        foreign error of a kind is logged with its traceback.
        """
        kind, known = f"{type(error).__name__} in {raised_at(error)}", isinstance(error, RlAsyncError)
        name = f"sample {group.group_id}.{sample} of task {group.task.task_id}"
        times = self._failures.another(kind + (beginning(str(error)) if known else ""))
        if times == 1 and not known:
            log.exception(name)
        elif times == 1:
            log.warning("%s: %s", name, error)
        elif times:
            log.log(logging.WARNING if known else logging.ERROR, "%s: %r (%s, %d times)", name, error, kind, times)

    def _spawn(self, group: asyncio.TaskGroup, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


# So many failures of each kind are all logged, and so many kinds are counted.
FIRST_LINES, KINDS = 3, 1000


class Repetitions:
    """Counts failures by kind, to log the first few of each and then each power of two.

    Beyond KINDS kinds the counts start over.
    """

    def __init__(self) -> None:
        self._times = Counter[str]()

    def another(self, kind: str) -> int:
        """Count a failure; return the count of its kind if it is worth a line, else 0."""
        if len(self._times) > KINDS:
            self._times.clear()
        self._times[kind] += 1
        times = self._times[kind]
        return times if times <= FIRST_LINES or times.bit_count() == 1 else 0


def beginning(text: str) -> str:
    """Return the beginning of an error without numbers, which errors raised by one line of code share."""
    return re.sub(r"\d+", "", text)[:80]


@contextlib.asynccontextmanager
async def runner_and_rewards(
    config: RunConfig,
    chat: ChatFormat,
    generator: Generator,
    folder: Path,
    *,
    logs: Path,
    owner: str,
    reward_model: str = "",
) -> AsyncIterator[tuple[EpisodeRunner, RewardService]]:
    """Hold the episode runner and the reward service. Tool servers and environment hosts log to files in ``logs`` that
    are named after ``owner``.

    The API keys that the config names are read from the environment and removed from it. Raises UserError if a name in
    the config does not exist.
    """
    async with contextlib.AsyncExitStack() as stack:
        toolbox = await stack.enter_async_context(connect_servers(config.agent, logs, owner))
        forget_variables(config.agent.mcp)
        hosted = HostedEnvironments(config, logs, owner) if config.agent.environment_hosts else None
        runner = EpisodeRunner(config, chat, generator, toolbox, hosted)
        stack.push_async_callback(runner.close)
        read = functools.partial(reasoning_and_answer, chat)
        service = RewardService(config.reward, model_url=reward_model, folder=folder, sandbox=config.sandbox, read=read)
        rewards = await stack.enter_async_context(service)
        forget_api_keys(config)
        # The hosts start last, so that they do not inherit the API keys.
        if hosted is not None:
            await stack.enter_async_context(hosted)
        yield runner, rewards


async def run_worker(config: RunConfig, index: int, address: str, *, folder: Path, reward_model: str = "") -> None:
    """Run one worker until the run is over. ``reward_model`` is the URL of the run's own reward model.

    With ``rollout.replay`` it puts recorded episodes into the queue and needs no engine. Raises UserError for names in
    the config that do not exist, and an ExceptionGroup with QueueLost or ProtocolError if the queue is gone.
    """
    owner = f"agent-{index}"
    client = QueueClient(address, role="agent", name=owner, keys=client_keys(config, folder, "worker"))
    if config.rollout.replay:
        async with client as queue:
            await AgentWorker(queue, RecordedRunner(config), AsRecorded(), config).run()
        return
    async with contextlib.AsyncExitStack() as stack:
        pool = engine_pool(config.rollout, run_token(folder, "engines"))
        chat, logs = load_format(config.model.path, config.agent), folder / "logs"
        playing = runner_and_rewards(config, chat, pool, folder, logs=logs, owner=owner, reward_model=reward_model)
        runner, rewards = await stack.enter_async_context(playing)
        queue = await stack.enter_async_context(client)
        stack.push_async_callback(pool.close)
        worker = AgentWorker(queue, runner, rewards, config)
        # Hundreds of episodes at once are many objects: looking for cycles took a third of the processor time. Users'
        # code may make cycles that hold much.
        collect_rarely(older=5)
        collector = SamplesCollector(worker, pool)
        stack.enter_context(exposed(config.tracking.prometheus, folder, "worker", f"worker-{index}", collector))
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(pool.watch(queue), name="engine registry")
            await worker.run()
            watching.cancel()


def cancel_on_signals() -> list[int]:
    """Cancel the current task on SIGTERM or SIGINT; the returned list then gets the signal's number."""
    task, received = asyncio.current_task(), list[int]()
    assert task is not None

    def cancel(number: int) -> None:
        received.append(number)
        task.cancel()

    for number in heeded(signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, cancel, number)
    return received


def work(folder: Path, index: int, queue: str, reward_model: str) -> None:
    """Run one worker of the run in ``folder``. Raises SystemExit on a signal, and the errors of ``run_worker``."""
    config = load_resolved(folder / "config.yaml")

    async def until_signalled() -> int:
        received = cancel_on_signals()
        try:
            await run_worker(config, index, queue, folder=folder, reward_model=reward_model)
        except asyncio.CancelledError:
            if not received:
                raise
            return EXIT_SIGNAL + received[0]
        return 0

    with tracing.traced(config.tracking.otlp_endpoint, folder, f"agent-{index}"):
        code = uvloop.run(until_signalled())
    if code:
        sys.exit(code)
