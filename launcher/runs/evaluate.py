"""``rl-async eval``: one pass over the held-out tasks with the processes of a run but its trainer."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from rl_async.configs.schema.run import RunConfig
from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.errors import EXIT_SIGNAL, ConfigError, RlAsyncError
from rl_async.evaluation.summary import answers_of, summarize_with_total
from rl_async.launcher.evaluation.lines import write_lines
from rl_async.launcher.evaluation.tables import summary_table
from rl_async.launcher.folder.run_folder import checkpoints_beside, hold, next_folder
from rl_async.launcher.runs.launch import announce, log_into, make_ready, prepare
from rl_async.launcher.supervise.children import Interrupted
from rl_async.launcher.supervise.executor import ThisMachine
from rl_async.launcher.supervise.supervisor import Supervisor
from rl_async.launcher.watch.terminal import say
from rl_async.messages import EngineRecord, Reserved, Trajectory, Version
from rl_async.process.http_auth import run_token
from rl_async.process.private_folder import hold_private_folder
from rl_async.recording import write_trajectories
from rl_async.rollout_server.connect import connect
from rl_async.transfer_queue.auth.keys import client_keys
from rl_async.transfer_queue.client.async_client import QueueClient

EVAL_ID = 0
POLL_S = 5.0


class EvaluationTimeout(RlAsyncError):
    """The held-out tasks did not finish within trainer.batch_timeout_s; names what is missing."""


def evaluate(config: RunConfig, name_or_path: str, solved: float, jsonl: Path | None) -> int:
    """Evaluate ``model.path`` on ``data.eval_path``, print what came of it per data source, and return the exit code.

    An episode passes with a reward of ``solved`` or more. ``jsonl``: where to write the episodes.
    """
    if config.data.eval_path is None:
        raise ConfigError("data.eval_path: an evaluation needs held-out tasks")
    if not (model := Path(config.model.path)).exists():
        hint = checkpoints_beside(model) or "; an evaluation makes none (`rl-async sft` does)"
        raise ConfigError(f"model.path: no folder {model}{hint}")
    folder = next_folder(Path(config.launcher.run_dir), f"eval-{Path(name_or_path).stem}")
    config = without_training(msgspec.structs.replace(config, name=folder.name))
    console = Console()

    async def run() -> int:
        try:
            keys, trains = client_keys(config, folder, "operator"), client_keys(config, folder, "trainer")
            with Supervisor(planned, executor, folder, keys) as supervisor:
                await prepare(config, planned, supervisor, console)
                announce(config, folder, executor, console)
                async with QueueClient(supervisor.address, role="trainer", name="evaluation", keys=trains) as queue:
                    evaluation = EvaluationRun(queue, config, folder)
                    await supervisor.run(evaluation.run, evaluation.on_engine)
        except Interrupted as interruption:
            return EXIT_SIGNAL + interruption.number
        print_report(evaluation.result, solved, console)
        if jsonl is not None:
            write_lines(jsonl, evaluation.rows)
        say(console, f"run folder: {folder}")
        return 0

    with hold(folder), hold_private_folder(folder):
        planned, ports = make_ready(config, folder)
        executor = ThisMachine(ports, folder, planned.hosts)
        with log_into(folder):
            return asyncio.run(run())


def without_training(config: RunConfig) -> RunConfig:
    """Reduce the training groups, which the queue always admits too, to one small one that is played."""
    return msgspec.structs.replace(
        config,
        data=msgspec.structs.replace(config.data, train_batch_groups=1),
        rollout=msgspec.structs.replace(config.rollout, group_size=2, replay=""),
        queue=msgspec.structs.replace(config.queue, max_staleness=0),
        trainer=TrainerConfig(steps=1, minibatches=1, batch_timeout_s=config.trainer.batch_timeout_s),
        weight_sync=msgspec.structs.replace(config.weight_sync, every=1, adapters=False),
    )


class EvaluationRun:
    """One evaluation, which the supervisor runs in place of the trainer."""

    def __init__(self, queue: QueueClient, config: RunConfig, folder: Path) -> None:
        self._queue, self._timeout_s = queue, config.trainer.batch_timeout_s
        self._token = run_token(folder, "engines")
        self._trajectories = recorded_in(folder)
        self.result = Reserved(step=EVAL_ID, headers=[])
        self.rows: Sequence[Trajectory] = []

    async def on_engine(self, record: EngineRecord) -> None:
        """Send an update without buckets: the engine keeps the weights of ``model.path``, as version 0."""
        engine = connect(record.kind, record.url, token=self._token)
        try:
            await engine.pause("keep")
            await engine.start_update()
            await engine.finish_update(Version())
            await engine.resume()
        finally:
            await engine.close()
        await self._queue.publish(Version(), [record.engine_id])
        await self._queue.confirm(record.engine_id, Version())  # needed where another engine was published before

    async def run(self) -> None:
        """Request the evaluation, wait for its last trajectory, and write all of them into the run folder.

        Raises EvaluationTimeout; the time for which no agent program plays does not count.
        """
        await self._queue.evaluate(EVAL_ID)
        deadline = time.monotonic() + self._timeout_s
        while not isinstance(reply := await self._queue.eval_result(EVAL_ID, POLL_S), Reserved):
            if reply.unattended_s:  # nobody plays yet
                deadline = time.monotonic() + self._timeout_s
            if time.monotonic() > deadline:
                raise EvaluationTimeout(f"no result within trainer.batch_timeout_s={self._timeout_s:g}: {reply.why}")
        self.result = reply
        self.rows = await self._queue.fetch([header.key for header in reply.headers])
        await asyncio.to_thread(write_trajectories, self._trajectories, self.rows)


def recorded_in(folder: Path) -> Path:
    """Return the file of the evaluation's trajectories in its run folder."""
    return folder / "trajectories" / f"eval-{EVAL_ID:06d}.jsonl.gz"


def print_report(result: Reserved, solved: float, console: Console) -> None:
    """Print avg@k and pass@k by data source and role and over all, and how many episodes were not scored."""
    tasks = {group: (task.data_source, task.task_id) for group, task in result.tasks.items()}
    answers = answers_of(result.headers, tasks)
    console.print(summary_table(summarize_with_total(answers, solved), "held-out reward"))
    if failed := sum(not answer.scored for answer in answers):
        say(console, f"{failed} of {len(answers)} episodes could not be scored, and count as 0; their error says why")
