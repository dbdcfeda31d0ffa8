"""``rl-async eval``: one pass over the held-out tasks with the processes of a run but its trainer."""

import asyncio
import sys
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
from rl_async.launcher.folder.run_folder import hold, next_folder
from rl_async.launcher.plan.artifacts import checkpoints_beside
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
PROGRESS_S = 30.0  # between two lines that say how far it is
KEEP_S = 20.0  # to fetch and write what was finished, when it ends early


class EvaluationTimeout(RlAsyncError):
    """No further held-out task was finished within trainer.batch_timeout_s; names what is missing."""


def evaluate(config: RunConfig, name_or_path: str, solved: float, jsonl: Path | None) -> int:
    """Evaluate ``model.path`` on ``data.eval_path``, print what came of it per data source, and return the exit code.

    An episode passes with a reward of ``solved`` or more. ``jsonl``: where to write the episodes. If it ends early, by
    a signal or an error, the episodes that were complete are written and reported.
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
                say(console, f"run folder: {folder}")
                announce(config, folder, executor, console)
                async with QueueClient(supervisor.address, role="trainer", name="evaluation", keys=trains) as queue:
                    evaluation = EvaluationRun(queue, config, folder, console)
                    try:
                        await supervisor.run(evaluation.run, evaluation.on_engine)
                    finally:
                        write_and_tell(evaluation, solved, jsonl, console)
        except Interrupted as interruption:
            print("interrupted; every process has ended", file=sys.stderr)
            return EXIT_SIGNAL + interruption.number
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
    """One evaluation, which the supervisor runs in place of the trainer.

    ``rows`` are those of the episodes of ``result``, which is of all only if it ``ended``.
    """

    def __init__(self, queue: QueueClient, config: RunConfig, folder: Path, console: Console) -> None:
        self._queue, self._timeout_s, self._samples = queue, config.trainer.batch_timeout_s, config.eval.samples
        self._token, self._console = run_token(folder, "engines"), console
        self.trajectories = recorded_in(folder)
        self.result = Reserved(step=EVAL_ID, headers=[])
        self.rows: Sequence[Trajectory] = []
        self.ended = False

    @property
    def done(self) -> int:
        """How many episodes are complete."""
        return len({(header.group_id, header.sample) for header in self.result.headers})

    @property
    def count(self) -> int:
        """How many episodes there were to be."""
        return len(self.result.tasks) * self._samples

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

        If it is cancelled or fails, what was finished is kept. Raises EvaluationTimeout once no further task was
        finished within the deadline; the time for which no agent program plays does not count.
        """
        await self._queue.evaluate(EVAL_ID)
        try:
            await self._keep(await self._wait())
            self.ended = True
        except (asyncio.CancelledError, RlAsyncError):
            await self._keep_finished()
            raise

    async def _wait(self) -> Reserved:
        deadline, finished, told = 0.0, -1, time.monotonic()
        while not isinstance(reply := await self._queue.eval_result(EVAL_ID, POLL_S), Reserved):
            now = time.monotonic()
            if reply.unattended_s or reply.finished > finished:
                deadline, finished = now + self._timeout_s, max(finished, reply.finished)
            if now > deadline:
                limit = f"trainer.batch_timeout_s={self._timeout_s:g}"
                raise EvaluationTimeout(f"no further task was finished within {limit}: {reply.why}")
            if now - told >= PROGRESS_S:
                told = now
                say(self._console, f"{reply.finished} of {reply.groups} tasks")
        return reply

    async def _keep(self, result: Reserved) -> None:
        rows = await self._queue.fetch([header.key for header in result.headers])
        await asyncio.to_thread(write_trajectories, self.trajectories, rows)
        self.result, self.rows = result, rows

    async def _keep_finished(self) -> None:
        """Keep the episodes that are complete; if the queue no longer answers, that is told."""
        try:
            async with asyncio.timeout(KEEP_S):
                reply = await self._queue.eval_result(EVAL_ID, 0.0, so_far=True)
                if isinstance(reply, Reserved) and reply.headers:
                    await self._keep(reply)
        except (RlAsyncError, TimeoutError) as error:
            why = str(error) or f"no answer within {KEEP_S:g} s"
            say(self._console, f"the episodes that were complete could not be fetched: {why}")


def recorded_in(folder: Path) -> Path:
    """Return the file of the evaluation's trajectories in its run folder."""
    return folder / "trajectories" / f"eval-{EVAL_ID:06d}.jsonl.gz"


def write_and_tell(evaluation: EvaluationRun, solved: float, jsonl: Path | None, console: Console) -> None:
    """Write the rows to ``jsonl``, and print what came of them, and of how many if the evaluation ended early."""
    if evaluation.rows or evaluation.ended:
        if jsonl is not None:
            write_lines(jsonl, evaluation.rows)
        print_report(evaluation.result, solved, console)
    if not evaluation.ended:
        tell_early_end(evaluation.done, evaluation.count, [evaluation.trajectories, jsonl], console)


def tell_early_end(done: int, count: int, places: Sequence[Path | None], console: Console) -> None:
    """Say how many of ``count`` episodes are complete, and in which files."""
    if done:
        files = " and ".join(str(place) for place in places if place is not None)
        say(console, f"ended after {done} of {count} episodes; only these are counted, and kept in {files}")
    else:
        say(console, "ended before an episode was complete")


def print_report(result: Reserved, solved: float, console: Console) -> None:
    """Print avg@k and pass@k by data source and role and over all, and how many episodes were not scored."""
    tasks = {group: (task.data_source, task.task_id) for group, task in result.tasks.items()}
    answers = answers_of(result.headers, tasks)
    console.print(summary_table(summarize_with_total(answers, solved), "held-out reward"))
    if failed := sum(not answer.scored for answer in answers):
        say(console, f"{failed} of {len(answers)} episodes could not be scored, and count as 0; their error says why")
