"""``rl-async eval --endpoint``: plays and scores the held-out tasks as a run does, but with a model behind a URL.

An agent worker plays them in this process. No engine, trainer or transfer queue runs.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console

from rl_async.agent_loop.endpoint import Endpoint, MessageLines
from rl_async.agent_loop.episode import policy_sampling
from rl_async.agent_loop.run_worker import cancel_on_signals, runner_and_rewards
from rl_async.agent_loop.tools.tool_registry import task_tools
from rl_async.agent_loop.worker import AgentWorker
from rl_async.configs.schema.rollout import EndpointConfig
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import EXIT_SIGNAL, ConfigError, EngineError, RlAsyncError
from rl_async.evaluation import failed_row
from rl_async.insight.terminal import say
from rl_async.launcher.plan.machine import check_api_keys
from rl_async.launcher.plan.planning import serves_reward_model
from rl_async.launcher.run_folder import create, hold_unnamed, next_folder
from rl_async.launcher.runs.evaluate import EVAL_ID, PROGRESS_S, Outcome
from rl_async.launcher.runs.launch import log_into
from rl_async.launcher.runs.prepare import prepare_data
from rl_async.messages import Done, Leased, LeasedGroup, Renewed, Reserved, SampleKey, Task, Trajectory, Version
from rl_async.rollout_server.api import GenerateRequest
from rl_async.transfer_queue.dataset import held_out_tasks

# A conversation's limit in bytes, which is never reached: the endpoint itself limits tokens.
UNBOUNDED = 1 << 30


def evaluate_endpoint(
    config: RunConfig, endpoint: EndpointConfig, name_or_path: str, solved: float, jsonl: Path | None
) -> int:
    """Evaluate a served model on ``data.eval_path``, as ``evaluate`` does for a folder; return the exit code.

    Episodes played before SIGINT, SIGTERM or an error are written and reported. Raises ConfigError, before any episode,
    if the endpoint does not answer a first request, and RlAsyncError, after writing all files, if no episode was
    scored.
    """
    _require_playable(config)
    folder = next_folder(Path(config.launcher.run_dir), f"eval-{Path(name_or_path).stem}")
    model = msgspec.structs.replace(config.model, path=endpoint.model)
    config = msgspec.structs.replace(config, name=folder.name, model=model)
    console = Console()
    prepare_data(config, lambda line: say(console, line))
    samples = HeldOutSamples(held_out_tasks(config), config)
    with hold_unnamed(config, folder) as (config, folder):
        try:
            code = asyncio.run(_play_and_tell(config, endpoint, samples, folder, console))
        finally:
            outcome = Outcome(config.eval.samples, console)
            outcome.rows, outcome.whole = samples.rows, samples.done == samples.count
            headers = [row.header() for row in outcome.rows]
            outcome.result = Reserved(step=EVAL_ID, headers=headers, tasks=samples.tasks)
            # The folder is made once the endpoint has answered; before that there is nothing to report.
            if outcome.rows or folder.is_dir():
                outcome.record(folder)
                outcome.tell(solved, jsonl)
                say(console, f"run folder: {folder}")
    if code == 0 and not any(row.scored for row in outcome.rows):
        raise RlAsyncError(f"no episode could be scored; the error of the last one: {outcome.rows[-1].error}")
    return code or outcome.exit_code


def _require_playable(config: RunConfig) -> None:
    """Raise ConfigError if the evaluation needs a part of a run that an endpoint cannot replace."""
    if config.data.eval_path is None:
        raise ConfigError("data.eval_path: an evaluation needs held-out tasks")
    if config.agent.gateway is not None:
        raise ConfigError("agent.gateway: agent programs ask an endpoint themselves; set agent.gateway=null")
    if serves_reward_model(config):
        raise ConfigError("reward.model.url: a run starts its reward model itself; give the URL of one that runs")
    check_api_keys(config)


async def play(
    config: RunConfig,
    endpoint: EndpointConfig,
    samples: "HeldOutSamples",
    folder: Path,
    tell: Callable[[str], None] | None = None,
) -> None:
    """Play and score all samples; the run folder is made once the endpoint has answered.

    ``tell`` is called with the first failure of a request that is retried. Raises ConfigError if the endpoint does not
    answer a first request, or for a mistake in the config.
    """
    async with AsyncExitStack() as stack:
        subject = Endpoint(endpoint, tell)
        stack.push_async_callback(subject.close)
        await _try(subject, config, endpoint, samples.tasks[0])
        create(config, folder)
        stack.enter_context(log_into(folder))
        config = msgspec.structs.replace(
            config,
            agent=msgspec.structs.replace(config.agent, max_tokens=UNBOUNDED, past_reasoning="keep"),
            # The worker leases a group for each ``group_size`` free slots, and a retried group has only one sample.
            rollout=msgspec.structs.replace(config.rollout, max_model_len=UNBOUNDED, group_size=1),
        )
        playing = runner_and_rewards(config, MessageLines(), subject, folder, logs=folder / "logs", owner="evaluation")
        runner, rewards = await stack.enter_async_context(playing)
        await AgentWorker(samples, runner, rewards, config).run()


async def _try(subject: Endpoint, config: RunConfig, endpoint: EndpointConfig, task: Task) -> None:
    """Send a first request with the task's tools, so that a wrong key or name, or a server without tools, is reported
    once and not by every episode. Tools of MCP servers and environments are not known yet."""
    chat, tools = MessageLines(), [tool.schema for tool in task_tools(config, task)]
    request = GenerateRequest(
        request_id="first",
        token_ids=chat.prompt([{"role": "user", "content": "Say OK."}], tools),
        sampling=policy_sampling(config, "eval"),
        max_tokens=config.rollout.max_tokens,
        stop_token_ids=chat.stop_token_ids,
    )
    try:
        await subject.generate(request, session="first")
    except EngineError as error:
        raise ConfigError(f"a first request for {endpoint.model} was not answered: {error}") from None


async def _play_and_tell(
    config: RunConfig, endpoint: EndpointConfig, samples: "HeldOutSamples", folder: Path, console: Console
) -> int:
    """Play all samples, or until SIGINT or SIGTERM, and print the progress from time to time. Return the exit code."""
    received = cancel_on_signals()
    playing = asyncio.create_task(play(config, endpoint, samples, folder, partial(say, console)))
    try:
        while not (await asyncio.wait([playing], timeout=PROGRESS_S))[0]:
            say(console, f"{samples.done} of {samples.count} episodes")
        await playing
    except asyncio.CancelledError:
        if not received:
            raise
        playing.cancel()
        await asyncio.wait([playing])
        return EXIT_SIGNAL + received[0]
    return 0


class HeldOutSamples:
    """A `SampleQueue` of the held-out tasks that keeps the rows, in the order of tasks and samples.

    A sample that fails ``queue.max_attempts`` times gets an unscored row with the last error.
    """

    def __init__(self, tasks: Sequence[Task], config: RunConfig) -> None:
        self.tasks = dict(enumerate(tasks))
        self._sampling, self._max_attempts = policy_sampling(config, "eval"), config.queue.max_attempts
        samples = config.eval.samples
        self.count = len(tasks) * samples
        self._waiting = deque(self._group(group, 0, list(range(samples))) for group in self.tasks)
        self._rows: dict[tuple[int, int], Sequence[Trajectory]] = {}
        self._changed = asyncio.Event()

    @property
    def done(self) -> int:
        """The number of samples that were played or have failed for good."""
        return len(self._rows)

    @property
    def rows(self) -> list[Trajectory]:
        """The rows of all finished samples."""
        return [row for key in sorted(self._rows) for row in self._rows[key]]

    async def lease(self, max_groups: int, wait_s: float) -> Leased:
        """Return samples to play and, once all are done, that the evaluation is finished."""
        if not self._waiting and self.done < self.count:
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
        groups = [self._waiting.popleft() for _ in range(min(max_groups, len(self._waiting)))]
        return Leased(groups=groups, finished=self.done == self.count)

    async def renew(self, held: list[SampleKey]) -> Renewed:
        """Do nothing, since there is only one worker."""
        return Renewed()

    async def put(self, *rows: Trajectory, media: Mapping[str, bytes] | None = None) -> Done:
        """Keep the rows of a sample."""
        for row in rows:
            _forget_tokens(row)
        self._finish(rows)
        return Done()

    async def fail(self, group_id: int, sample: int, attempt: int, error: str) -> Done:
        """Queue the sample again, or keep its error after the last attempt."""
        if attempt + 1 < self._max_attempts:
            self._waiting.append(self._group(group_id, attempt + 1, [sample]))
            self._changed.set()
        else:
            self._finish([self._failed(self._group(group_id, attempt, [sample]), error)])
        return Done()

    def _finish(self, rows: Sequence[Trajectory]) -> None:
        self._rows[rows[0].group_id, rows[0].sample] = rows
        self._changed.set()

    def _group(self, group_id: int, attempt: int, samples: list[int]) -> LeasedGroup:
        return LeasedGroup(
            group_id=group_id,
            partition="eval",
            attempt=attempt,
            samples=samples,
            task=self.tasks[group_id],
            min_version=Version(),
        )

    def _failed(self, group: LeasedGroup, error: str) -> Trajectory:
        (sample,) = group.samples
        return failed_row(group.task, group.group_id, sample, error, attempt=group.attempt, sampling=self._sampling)


def _forget_tokens(row: Trajectory) -> None:
    """Reduce a row to its conversation: its tokens were only the bytes of the messages."""
    row.token_ids, row.loss_mask, row.logprobs = _nothing(np.int32), _nothing(np.bool_), _nothing(np.float32)
    row.versions = []
    for turn in row.turns:
        turn.start = turn.end = 0


def _nothing(kind: type[np.generic]) -> np.ndarray:
    return np.array([], kind)
