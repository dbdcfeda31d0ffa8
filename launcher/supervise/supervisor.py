"""The supervisor: starts the processes of a plan, restarts what may be restarted, ends everything.

Where they run is the executor's business: beside it (``executor.ThisMachine``), or on Ray's nodes (``on_ray.Nodes``).

queue ──> payload shards
      ──> engines (healthy -> registered)  ──┐
      ──> reward model (healthy) ──> workers ├──> the trainer's end, or a role failing for good, or a signal
      ──> trainer ranks                      ┘              ──> everything is stopped
"""

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from rl_async.errors import EXIT_FAILED, EXIT_USER, QueueLost
from rl_async.launcher.folder.tail import LineTail
from rl_async.launcher.plan.planning import Plan
from rl_async.launcher.plan.spec import ProcessSpec
from rl_async.launcher.supervise.executor import Executor, url_of
from rl_async.launcher.supervise.process import Process, RoleFailed, describe_exit, failure
from rl_async.launcher.supervise.roster import ProcessState, Roster
from rl_async.messages import EngineRecord, Status, StatusReport
from rl_async.rollout_server.http import EngineHttp
from rl_async.transfer_queue.auth.keys import ClientKeys
from rl_async.transfer_queue.client.async_client import QueueClient

HEALTH_POLL_S = 0.2
REGISTRY_WAIT_S = 10.0
FIRST_BACKOFF_S = 0.2
LONGEST_BACKOFF_S = 5.0
TRAINERS_SHARE = 0.8  # of launcher.stop_timeout_s

log = logging.getLogger("rl_async.launcher")
EngineHook = Callable[[EngineRecord], Awaitable[None]]
TroubleHook = Callable[[str], Awaitable[None]]  # what happened; called while every process is still as it was


class Interrupted(Exception):
    """A signal asked the run to end. ``number`` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Supervisor:
    """Runs the processes of a plan. Use it as ``with``: signals are handled and processes live only inside."""

    def __init__(
        self,
        plan: Plan,
        executor: Executor,
        folder: Path,
        keys: ClientKeys | None = None,
        on_trouble: TroubleHook | None = None,
    ) -> None:
        self._plan, self._folder, self._keys = plan, folder, keys
        self._executor = executor
        self._on_trouble = on_trouble
        self._roster, self._troubled = Roster(folder), False
        self._children: dict[str, Process] = {}
        self._states = {spec.name: ProcessState(spec.name, "waiting") for spec in plan.processes}
        self._cut_off: dict[str, asyncio.Event] = {}  # by id of a registered engine
        self._client: QueueClient | None = None
        self._scorable = asyncio.Event()  # the reward model, if the plan has one, answers
        self._signals: list[int] = []
        self._signalled = asyncio.Event()

    def __enter__(self) -> Self:
        self._executor.open()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().remove_signal_handler(number)
        for child in self._children.values():
            child.kill_now()
        self._executor.close()

    @property
    def queue(self) -> QueueClient:
        """A client of the run's queue. Raises QueueLost outside ``run``."""
        if self._client is None:
            raise QueueLost("the queue is not running")
        return self._client

    @property
    def address(self) -> str:
        """Where the queue listens."""
        ports, _ = self._executor.places()
        return f"tcp://{self._plan.queue_host}:{ports['queue']}"

    def states(self) -> Sequence[ProcessState]:
        """All processes that live as long as the run."""
        return list(self._states.values())

    async def status(self) -> StatusReport:
        """What the queue holds. Raises QueueLost."""
        return await self.queue.status()

    async def settle(self) -> None:
        """Have places found for all processes. Raises what the executor's does, and Interrupted on a signal."""
        await self._first(self._executor.settle(), [self._watch_signals()])

    async def run_once(self, spec: ProcessSpec, report: Callable[[str], None]) -> None:
        """Run a process to its end, passing on its lines as they come.

        Raises UserError or RoleFailed if it fails, Interrupted on a signal.
        """
        child = await self._start(spec)
        await self._first(self._follow(child, report), [self._watch_signals()])
        if child.returncode:
            self._give_up(child, child.returncode, 0)

    async def run(self, work: Callable[[], Awaitable[None]] | None = None, on_engine: EngineHook | None = None) -> None:
        """Start everything and return when the trainer, or instead of it ``work``, is done; then nothing runs any more.

        ``on_engine`` is awaited for each engine after its registration. Raises UserError if a role ended because of a
        mistake of the user, RoleFailed if one failed for good, Interrupted on a signal.
        """
        try:
            async with QueueClient(self.address, role="launcher", name="launcher", keys=self._keys) as self._client:
                await self._start(self._plan.queue)
                await self._first(self._until_answered(), [self._keep_queue(), self._watch_signals()])
                await self._first(
                    work() if work else self._keep_trainers(),
                    [
                        self._keep_queue(),
                        self._watch_signals(),
                        self._watch_registry(),
                        *(self._keep_shard(spec) for spec in self._plan.shards),
                        *(self._keep_engine(spec, on_engine) for spec in self._plan.engines),
                        self._keep_reward_model(self._plan.reward_model),
                        *(self._keep_worker(spec) for spec in self._plan.workers),
                    ],
                )
        except (RoleFailed, QueueLost) as error:
            await self._trouble(str(error).partition("\n")[0])
            raise
        finally:
            await self._stop_all()
            self._client = None

    async def _first(self, main: Awaitable[None], keepers: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Run ``main`` to its end beside ``keepers``, whose errors end it. Waits for all of them to be cancelled."""
        main_task = asyncio.ensure_future(main)
        tasks = [main_task, *(asyncio.create_task(keeper) for keeper in keepers)]
        pending = set(tasks)
        try:
            while not main_task.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # the first error is already on its way

    async def _start(self, spec: ProcessSpec, *, restarts: int = 0) -> Process:
        child = await self._executor.start(spec, restarts=restarts)
        self._children[spec.name] = child
        self._roster.add(spec, child)
        self._set_state(spec.name, "running", restarts)
        log.info("%s started, pid %d%s", spec.name, child.pid, f" on {child.host}" if child.host else "")
        return child

    async def _follow(self, child: Process, report: Callable[[str], None]) -> None:
        lines = LineTail(child.log, child.log_start)
        ended = False
        while not ended:
            ended = child.returncode is not None  # before reading, so that the last lines are not missed
            for line in lines.read():
                report(line.decode(errors="replace"))
            await asyncio.sleep(0 if ended else HEALTH_POLL_S)
        await child.wait()

    # --- the roles --------------------------------------------------------------------------------------------------

    async def _until_answered(self) -> None:
        await self.queue.exchange(Status(), timeout_s=self._plan.start_timeout_s)

    async def _keep_queue(self) -> None:
        """Produces one running queue. Waits for its end, after which the run goes on if its journal outlives it.

        Without such a journal (``max_restarts`` is 0) the end of the queue ends the run: what it knew is nowhere else.
        """
        spec = self._plan.queue
        while True:
            child, restarts = self._children[spec.name], self._states[spec.name].restarts
            code = await child.wait()
            await self._start(spec, restarts=await self._before_restart(spec, child, code, restarts))

    async def _keep_shard(self, spec: ProcessSpec) -> None:
        """Produces one running payload shard, which registers itself. Waits for its end. Runs until cancelled."""
        restarts = 0
        while True:
            child = await self._start(spec, restarts=restarts)
            restarts = await self._before_restart(spec, child, await child.wait(), restarts)

    async def _keep_worker(self, spec: ProcessSpec) -> None:
        """Produces one running agent worker. Waits for its end; returns when the queue says that the run is over.

        It starts when there is somebody to score its trajectories.
        """
        restarts = 0
        await self._scorable.wait()
        while True:
            child = await self._start(spec, restarts=restarts)
            code = await child.wait()
            if code == 0 and (await self.status()).finished:
                self._set_state(spec.name, "ended", restarts)
                return
            restarts = await self._before_restart(spec, child, code, restarts)

    async def _keep_reward_model(self, spec: ProcessSpec | None) -> None:
        """Produces one healthy reward model, if the plan has one. Waits for its end. Runs until cancelled."""
        restarts = 0
        while spec is not None:
            child = await self._start(spec, restarts=restarts)
            self._set_state(spec.name, "starting", restarts)
            if await self._is_healthy(child, url_of(self._executor, spec.name)):
                self._set_state(spec.name, "running", restarts)
                self._scorable.set()
                await child.wait()
            restarts = await self._before_restart(spec, child, await child.kill(), restarts)
        self._scorable.set()

    async def _keep_engine(self, spec: ProcessSpec, on_engine: EngineHook | None) -> None:
        """Produces one healthy, registered engine. Waits for its end, or for the registry to lose it."""
        restarts = 0
        while True:
            engine_id = f"{spec.name}.{restarts}" if restarts else spec.name
            child = await self._start(spec, restarts=restarts)
            url = url_of(self._executor, spec.name)
            self._set_state(spec.name, "starting", restarts)
            registered = await self._is_healthy(child, url)
            if not registered and child.returncode is None:
                await self._trouble(f"{spec.name} did not answer within {self._plan.start_timeout_s:g} s")
            if registered:
                await self.queue.register_engine(engine_id, url, spec.engine_kind)
                cut_off = self._cut_off[engine_id] = asyncio.Event()
                if on_engine is not None:
                    await on_engine(EngineRecord(engine_id=engine_id, url=url, kind=spec.engine_kind))
                self._set_state(spec.name, "running", restarts)
                await self._until_gone(child, cut_off)
                del self._cut_off[engine_id]
            code = await child.kill()
            if registered:
                await self.queue.remove_engine(engine_id, f"its process ended: {describe_exit(code)}")
            restarts = await self._before_restart(spec, child, code, restarts)

    async def _is_healthy(self, child: Process, url: str) -> bool:
        """Whether the process answered its health probe before it ended and before the deadline."""
        deadline = time.monotonic() + self._plan.start_timeout_s
        probe = EngineHttp(url, timeout_s=None)
        try:
            while child.returncode is None and time.monotonic() < deadline:
                if await probe.healthy():
                    return True
                await asyncio.sleep(HEALTH_POLL_S)
            return False
        finally:
            await probe.close()

    async def _until_gone(self, child: Process, cut_off: asyncio.Event) -> None:
        ended, lost = asyncio.ensure_future(child.wait()), asyncio.ensure_future(cut_off.wait())
        try:
            await asyncio.wait([ended, lost], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            lost.cancel()

    async def _watch_registry(self) -> None:
        """Consumes the registry; produces restarts of engines that somebody else took out of it.

        Waits for a change, REGISTRY_WAIT_S at a time. Runs until cancelled.
        """
        revision = -1
        while True:
            revision = (await self.queue.engines(revision, REGISTRY_WAIT_S)).revision
            ours = dict(self._cut_off)
            listed = {record.engine_id for record in (await self.queue.engines()).engines}
            for engine_id in ours.keys() - listed:
                log.warning("%s was cut off; its process is replaced", engine_id)
                ours[engine_id].set()

    async def _keep_trainers(self) -> None:
        """Produces all trainer ranks. Waits for all to end well, or for one to end badly: then all start again."""
        restarts = 0
        while True:
            self._troubled = False
            children = [await self._start(spec, restarts=restarts) for spec in self._plan.trainers]
            failed = await self._until_trained(children)
            if failed is None:
                return
            await self._trouble(f"{failed.name} ended ({describe_exit(failed.returncode or 0)})", failed.returncode)
            for child in children:
                if child is not failed:
                    await child.kill()
            code = failed.returncode or 0
            spec = self._plan.trainers[children.index(failed)]
            restarts = await self._before_restart(spec, failed, code, restarts)

    async def _until_trained(self, ranks: Sequence[Process]) -> Process | None:
        """None when all ranks ended with 0 and the run is over; else the rank that ended otherwise."""
        pending = {asyncio.ensure_future(child.wait()): child for child in ranks}
        try:
            while pending:
                done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    child = pending.pop(task)
                    self._set_state(child.name, "ended", self._states[child.name].restarts)
                    if task.result() != 0:
                        return child
        finally:
            for task in pending:
                task.cancel()
        return None if (await self.status()).finished else ranks[0]

    # --- endings ----------------------------------------------------------------------------------------------------

    async def _before_restart(self, spec: ProcessSpec, child: Process, code: int, restarts: int) -> int:
        """Wait a little longer each time, and count. Raises if the process must not be started again."""
        if code in (EXIT_USER, EXIT_FAILED) or restarts >= spec.max_restarts:
            self._give_up(child, code, restarts)
        log.warning("%s ended (%s); starting it again", spec.name, describe_exit(code))
        self._set_state(spec.name, "restarting", restarts)
        await asyncio.sleep(min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2**restarts))
        return restarts + 1

    def _give_up(self, child: Process, code: int, restarts: int) -> NoReturn:
        self._set_state(child.name, "failed", restarts)
        raise failure(child, code, restarts)

    async def _trouble(self, why: str, code: int | None = None) -> None:
        """Let ``on_trouble`` look while all is as it was: once until the trainer starts again, at no user's mistake."""
        if self._on_trouble is not None and not self._troubled and code not in (0, EXIT_USER):
            self._troubled = True
            self._roster.write(self._states)
            await self._on_trouble(why)

    async def _watch_signals(self) -> None:
        await self._signalled.wait()
        raise Interrupted(self._signals[0])

    def _on_signal(self, number: int) -> None:
        """The first signal stops the run cleanly; a second one kills everything."""
        self._signals.append(number)
        self._signalled.set()
        if len(self._signals) > 1:
            for child in self._children.values():
                child.kill_now()

    async def _stop_all(self) -> None:
        """End everything within the deadline: trainers first, which save and need the queue for it; the queue last.

        What is left when the trainers have ended, or used up their share, is for the others.
        """
        began, timeout = time.monotonic(), self._plan.stop_timeout_s
        queue, shards = self._plan.queue.name, [spec.name for spec in self._plan.shards]
        trainers = [spec.name for spec in self._plan.trainers]
        others = [name for name in self._children if name not in (queue, *shards, *trainers)]
        for names, share in ((trainers, TRAINERS_SHARE), (others, 1.0), (shards, 1.0), ([queue], 1.0)):
            left = max(0.0, began + share * timeout - time.monotonic())
            children = [self._children[name] for name in names if name in self._children]
            await asyncio.gather(*(child.stop(left) for child in children))
        for name, state in self._states.items():
            if state.state != "failed":
                self._set_state(name, "ended", state.restarts)

    def _set_state(self, name: str, state: str, restarts: int) -> None:
        if name in self._states:
            self._states[name] = ProcessState(name, state, restarts)
            self._roster.write(self._states)
