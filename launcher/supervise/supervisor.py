"""The supervisor: starts the processes of a plan, restarts what may be restarted, ends everything.

The executor decides where they run: on this machine (``executor.ThisMachine``), or on Ray's nodes (``ray.executor``).

queue ──> payload shards
      ──> engines (healthy -> registered)  ──┐
      ──> reward model (healthy) ──> workers ├──> the trainer's end, or a role failing for good, or a signal
      ──> trainer ranks                      ┘              ──> everything is stopped
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rl_async.errors import EXIT_STOPPED, EXIT_USER, EngineLost, QueueLost
from rl_async.launcher.folder.tail import LineTail
from rl_async.launcher.plan.planning import Plan
from rl_async.launcher.plan.spec import ProcessSpec, fill
from rl_async.launcher.supervise.children import Children, Interrupted, StopHook
from rl_async.launcher.supervise.executor import Executor, url_of
from rl_async.launcher.supervise.process import Process, RoleFailed, describe_exit
from rl_async.launcher.supervise.roster import ProcessState
from rl_async.messages import EngineRecord, Status, StatusReport
from rl_async.process.run_files import Target, listed, write_targets
from rl_async.rollout_server.http import EngineHttp
from rl_async.transfer_queue.auth.keys import ClientKeys
from rl_async.transfer_queue.client import QueueClient

HEALTH_POLL_S = 0.2
REGISTRY_WAIT_S = 10.0
TRAINERS_SHARE = 0.8  # of launcher.stop_timeout_s

log = logging.getLogger("rl_async.launcher")
EngineHook = Callable[[EngineRecord], Awaitable[None]]
TroubleHook = Callable[[str], Awaitable[None]]  # what happened; called while every process is still as it was


class Supervisor:
    """Runs the processes of a plan. Use it as ``with``: signals are handled and processes live only inside."""

    def __init__(
        self,
        plan: Plan,
        executor: Executor,
        folder: Path,
        keys: ClientKeys | None = None,
        on_trouble: TroubleHook | None = None,
        on_stop: StopHook | None = None,
    ) -> None:
        self._plan, self._executor, self._folder, self._keys = plan, executor, folder, keys
        self._on_trouble, self._reported_restart = on_trouble, -1
        self._children = Children(executor, folder, plan.processes, on_stop)
        self._cut_off: dict[str, asyncio.Event] = {}  # by id of a registered engine
        self._client: QueueClient | None = None
        self._answered = asyncio.Event()  # the queue has, once
        self._scorable = asyncio.Event()  # the reward model, if the plan has one, answers

    def __enter__(self) -> Self:
        self._children.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._children.__exit__(kind, error, trace)

    @property
    def queue(self) -> QueueClient:
        """A client of the run's queue. Raises QueueLost outside ``run``."""
        if self._client is None:
            raise QueueLost("the queue is not running")
        return self._client

    @property
    def address(self) -> str:
        """The ZeroMQ address of the queue."""
        return fill(self._plan.queue_address, *self._executor.places())

    def states(self) -> Sequence[ProcessState]:
        """States of all processes that live as long as the run."""
        return list(self._children.states.values())

    @property
    def ended_at_once(self) -> bool:
        """Whether a second Ctrl-C ended the processes before they could save."""
        return self._children.ended_at_once

    async def status(self) -> StatusReport:
        """Ask the queue for its status. Raises QueueLost."""
        return await self.queue.status()

    async def allocate(self) -> None:
        """Find a place for every process. Raises what the executor's method does, and Interrupted on a signal."""
        await self._children.beside(self._executor.allocate())

    async def run_once(self, spec: ProcessSpec, report: Callable[[str], None]) -> None:
        """Run a process to its end, passing on its lines as they come.

        Raises UserError or RoleFailed if it fails, Interrupted on a signal.
        """
        child = await self._children.start(spec)
        await self._children.beside(self._follow(child, report))
        if child.returncode:
            self._children.give_up(child, child.returncode, 0)

    async def run(self, work: Callable[[], Awaitable[None]] | None = None, on_engine: EngineHook | None = None) -> None:
        """Start everything and return when the trainer, or instead of it ``work``, is done; no process is left then.

        ``on_engine`` is awaited for each engine after its registration. Raises UserError if a role ended because of a
        mistake of the user, RoleFailed if one failed for good, Interrupted on a signal.
        """
        asked = False
        try:
            async with QueueClient(self.address, role="launcher", name="launcher", keys=self._keys) as self._client:
                await self._children.start(self._plan.queue)
                await self._children.beside(
                    self._work(work or self._keep_trainers),
                    [
                        self._keep_queue(),
                        self._ask_queue(),
                        self._watch_registry(),
                        *(self._keep_shard(spec) for spec in self._plan.shards),
                        *(self._spare(spec, self._keep_engine(spec, on_engine)) for spec in self._plan.engines),
                        self._keep_reward_model(self._plan.reward_model),
                        *(self._spare(spec, self._keep_worker(spec)) for spec in self._plan.workers),
                    ],
                )
        except (RoleFailed, QueueLost) as error:
            await self._report_trouble(str(error).partition("\n")[0])
            raise
        except Interrupted:
            asked = True
            raise
        finally:
            await self._stop_all(asked)
            self._client = None

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

    async def _work(self, work: Callable[[], Awaitable[None]]) -> None:
        await self._answered.wait()
        await work()

    async def _ask_queue(self) -> None:
        """Wait for the queue's first answer. Its clients start then; engines, which take longer, start beside it."""
        await self.queue.exchange(Status(), timeout_s=self._plan.start_timeout_s)
        self._answered.set()

    async def _keep_queue(self) -> None:
        """Produces one running queue. Waits for its end, after which the run goes on if its journal survives.

        Without such a journal (``max_restarts`` is 0) the end of the queue ends the run, whose state is lost.
        """
        spec = self._plan.queue
        # Before it answers, its journal may not have what a first start makes it forget.
        again_new = replace(spec, restart_argv=spec.first_argv)
        while True:
            child, restarts = self._children[spec.name], self._children.states[spec.name].restarts
            code = await child.wait()
            restarts = await self._children.before_restart(spec, child, code, restarts)
            await self._children.start(spec if self._answered.is_set() else again_new, restarts=restarts)

    async def _keep_shard(self, spec: ProcessSpec) -> None:
        """Produces one running payload shard, which registers itself. Waits for its end. Runs until cancelled."""
        restarts = 0
        await self._answered.wait()
        while True:
            child = await self._children.start(spec, restarts=restarts)
            restarts = await self._children.before_restart(spec, child, await child.wait(), restarts)

    async def _spare(self, spec: ProcessSpec, kept: Coroutine[Any, Any, None]) -> None:
        """Keep an engine or a worker; when it has used up its restarts, the run goes on with the others of its role.

        Raises what ``kept`` does when none is left, and for another fault than too many ends.
        """
        try:
            await kept
        except RoleFailed as error:
            alike = [*self._plan.engines, *self._plan.workers]
            left = [s.name for s in alike if s.role == spec.role and self._children.states[s.name].state != "failed"]
            if self._children.states[spec.name].state != "failed" or not left:
                raise
            log.error("%s; the run goes on without it, with %s", str(error).partition("\n")[0], ", ".join(left))

    async def _keep_worker(self, spec: ProcessSpec) -> None:
        """Produces one running agent worker. Waits for its end; returns when the queue reports that the run is over.

        It starts when the queue answers, and the reward model, if there is one.
        """
        restarts = 0
        await self._answered.wait()
        await self._scorable.wait()
        while True:
            child = await self._children.start(spec, restarts=restarts)
            code = await child.wait()
            if code == 0 and (await self.status()).finished:
                self._children.set_state(spec.name, "ended", restarts)
                return
            restarts = await self._children.before_restart(spec, child, code, restarts)

    async def _keep_reward_model(self, spec: ProcessSpec | None) -> None:
        """Produces one healthy reward model, if the plan has one. Waits for its end. Runs until cancelled."""
        restarts = 0
        while spec is not None:
            child = await self._children.start(spec, restarts=restarts)
            self._children.set_state(spec.name, "starting", restarts)
            if await self._is_healthy(child, url_of(self._executor, spec.name)):
                self._children.set_state(spec.name, "running", restarts)
                self._scorable.set()
                target = Target.at(url_of(self._executor, spec.name), spec.role, spec.name)
                with listed(self._plan.prometheus, self._folder, target):
                    await child.wait()
            restarts = await self._children.before_restart(spec, child, await child.kill(), restarts)
        self._scorable.set()

    async def _keep_engine(self, spec: ProcessSpec, on_engine: EngineHook | None) -> None:
        """Produces one healthy, registered engine. Waits for its end, or for the registry to lose it."""
        restarts = 0
        while True:
            engine_id = f"{spec.name}.{restarts}" if restarts else spec.name
            child = await self._children.start(spec, restarts=restarts)
            url = url_of(self._executor, spec.name)
            self._children.set_state(spec.name, "starting", restarts)
            registered = await self._is_healthy(child, url)
            if not registered and child.returncode is None:
                await self._report_trouble(f"{spec.name} did not answer within {self._plan.start_timeout_s:g} s")
            if registered:
                await self._answered.wait()
                await self.queue.register_engine(engine_id, url, spec.engine_kind)
                cut_off = self._cut_off[engine_id] = asyncio.Event()
                if on_engine is not None:
                    await on_engine(EngineRecord(engine_id=engine_id, url=url, kind=spec.engine_kind))
                self._children.set_state(spec.name, "running", restarts)
                await self._until_gone(child, cut_off)
                del self._cut_off[engine_id]
            code = await child.kill()
            if registered:
                await self.queue.remove_engine(engine_id, f"its process ended: {describe_exit(code)}")
            restarts = await self._children.before_restart(spec, child, code, restarts)

    async def _is_healthy(self, child: Process, url: str) -> bool:
        """Whether the process answered its health probe before it ended and before the deadline.

        Raises RoleFailed if it serves requests that carry no token.
        """
        deadline = time.monotonic() + self._plan.start_timeout_s
        probe = EngineHttp(url, timeout_s=None)
        try:
            while child.returncode is None and time.monotonic() < deadline:
                closed = await self._asks_for_token(probe)
                if closed is False:
                    raise RoleFailed(f"{child.name} at {url} takes requests without the run's token")
                if closed:
                    return True
                await asyncio.sleep(HEALTH_POLL_S)
            return False
        finally:
            await probe.close()

    async def _asks_for_token(self, probe: EngineHttp) -> bool | None:
        """Whether a server refuses what carries no token; None while it does not answer, or no longer does."""
        if not await probe.healthy():
            return None
        try:
            return await probe.needs_token()
        except EngineLost:
            return None

    async def _until_gone(self, child: Process, cut_off: asyncio.Event) -> None:
        ended, lost = asyncio.ensure_future(child.wait()), asyncio.ensure_future(cut_off.wait())
        try:
            await asyncio.wait([ended, lost], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            lost.cancel()

    async def _watch_registry(self) -> None:
        """Consumes the registry; produces restarts of engines that others removed from it, and the list of all
        engines for Prometheus.

        Waits for a change, REGISTRY_WAIT_S at a time. Runs until cancelled.
        """
        revision = -1
        await self._answered.wait()
        while True:
            revision = (await self.queue.engines(revision, REGISTRY_WAIT_S)).revision
            ours = dict(self._cut_off)
            engines = (await self.queue.engines()).engines
            if self._plan.prometheus:
                targets = [Target.at(record.url, "engine", record.engine_id) for record in engines]
                write_targets(self._folder, "engines", targets)
            for engine_id in ours.keys() - {record.engine_id for record in engines}:
                log.warning("%s was cut off; its process is replaced", engine_id)
                ours[engine_id].set()

    async def _keep_trainers(self) -> None:
        """Produces all trainer ranks. Waits for all to end well, or for one to end badly: then all start again."""

        async def is_over() -> bool:
            return (await self.status()).finished

        async def report(failed: Process) -> None:
            code = failed.returncode or 0
            if code not in (0, EXIT_USER, *EXIT_STOPPED):
                await self._report_trouble(f"{failed.name} ended ({describe_exit(code)})")

        await self._children.keep_together(self._plan.trainers, is_over, report)

    # --- endings ----------------------------------------------------------------------------------------------------

    async def _report_trouble(self, what: str) -> None:
        """Call ``on_trouble`` while all processes are as they were; once until the trainer is started again."""
        restart = max((self._children.states[spec.name].restarts for spec in self._plan.trainers), default=0)
        if self._on_trouble is not None and restart != self._reported_restart:
            self._reported_restart = restart
            self._children.write_roster()
            await self._on_trouble(what)

    async def _stop_all(self, asked: bool) -> None:
        """End everything: trainers first, which save and need the queue for it; the queue last.

        If a signal ``asked`` for it, trainers end their step and save however long it takes, since a step may take
        minutes; a Ctrl-C, or the scheduler that sent the signal, ends them before. After a failure they have a share of
        the deadline, and what they leave of it is for the others.
        """
        timeout = self._plan.stop_timeout_s
        queue, shards = self._plan.queue.name, [spec.name for spec in self._plan.shards]
        trainers = [spec.name for spec in self._plan.trainers]
        others = [name for name in self._children.names if name not in (queue, *shards, *trainers)]
        if asked:
            await self._children.finish(trainers)
        began = time.monotonic()
        for names, share in ((trainers, TRAINERS_SHARE), (others, 1.0), (shards, 1.0), ([queue], 1.0)):
            await self._children.stop(names, max(0.0, began + share * timeout - time.monotonic()))
        self._children.mark_ended()
        write_targets(self._folder, "engines", [])
