"""The processes that a launcher keeps: started, restarted with a backoff, listed in a file, ended on a signal."""

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from rl_async.concurrency import outcomes, to_the_end
from rl_async.errors import EXIT_FAILED, EXIT_STOPPED, EXIT_USER
from rl_async.launcher.plan.spec import ProcessSpec
from rl_async.launcher.supervise.executor import Executor
from rl_async.launcher.supervise.process import Process, describe_exit, failure, said_last
from rl_async.launcher.supervise.roster import FILE, ProcessState, Roster
from rl_async.process.role import NO_ROOM, heeded, ignore_alone

FIRST_BACKOFF_S = 0.2
LONGEST_BACKOFF_S = 5.0
ROSTER_AGAIN_S = 1.0
# After so long a process has its restarts forgiven: a run of weeks must not end by some that lie days apart.
HEALTHY_S = 6 * 3600.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

log = logging.getLogger("rl_async.launcher")
StopHook = Callable[[int], None]  # the number of the signal that asks the run to end


class Interrupted(Exception):
    """A signal asked the run to end. ``number`` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Children:
    """The newest process of each name. Use it as ``with``: signals are handled and processes live only inside.

    A first signal calls ``on_stop`` and raises Interrupted in ``beside``, so that the owner can end the processes in
    order. A Ctrl-C after it kills them all; other signals may be repeated, as schedulers do. Signals that this process
    was started to ignore, as by ``nohup``, stay ignored. ``states`` has the processes of ``lasting``, which live as
    long as the run.
    """

    def __init__(
        self, executor: Executor, folder: Path, lasting: Iterable[ProcessSpec], on_stop: StopHook | None = None
    ) -> None:
        self.executor = executor
        self.states = {spec.name: ProcessState(spec.name, "waiting") for spec in lasting}
        self._newest: dict[str, Process] = {}
        # When the newest process of each name began, in monotonic seconds.
        self._began: dict[str, float] = {}
        self._roster = Roster(folder)
        self._roster_again: asyncio.TimerHandle | None = None
        self._on_stop = on_stop
        # Whether a second Ctrl-C ended the processes.
        self.ended_at_once = False
        self._signals: list[int] = []
        self._signalled = asyncio.Event()

    def __enter__(self) -> Self:
        self.executor.open()
        self._heeded = heeded(*SIGNALS)
        ignore_alone(signal.SIGTERM)
        for number in self._heeded:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in self._heeded:
            asyncio.get_running_loop().remove_signal_handler(number)
        if self._roster_again is not None:
            self._roster_again.cancel()
        self._kill_now()
        self.executor.close()

    def __getitem__(self, name: str) -> Process:
        return self._newest[name]

    async def start(self, spec: ProcessSpec, *, restarts: int = 0) -> Process:
        """Start a process for the first time, or again after ``restarts - 1`` earlier restarts."""
        child = await self.executor.start(spec, restarts=restarts)
        self._newest[spec.name], self._began[spec.name] = child, time.monotonic()
        self._roster.add(spec, child)
        self.set_state(spec.name, "running", restarts)
        log.info("%s started, pid %d%s", spec.name, child.pid, f" on {child.host}" if child.host else "")
        return child

    async def before_restart(self, spec: ProcessSpec, child: Process, code: int, restarts: int) -> int:
        """Wait, longer each time, and return the new number of restarts; earlier ones are forgiven after HEALTHY_S.

        Raises what ``give_up`` does if the process must not be started again.
        """
        if time.monotonic() - self._began[spec.name] > HEALTHY_S:
            restarts = 0
        if code in (EXIT_USER, EXIT_FAILED) or restarts >= spec.max_restarts:
            self.give_up(child, code, restarts)
        said = said_last(child.output()) or "it wrote nothing"
        log.warning("%s ended (%s), starting it again; it said last: %s", spec.name, describe_exit(code), said)
        self.set_state(spec.name, "restarting", restarts)
        await asyncio.sleep(min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(restarts, 16)))
        return restarts + 1

    def give_up(self, child: Process, code: int, restarts: int) -> NoReturn:
        """Record that a process failed. Raises UserError if it named a mistake of the user, else RoleFailed."""
        self.set_state(child.name, "failed", restarts)
        raise failure(child, code, restarts)

    async def keep_together(
        self,
        specs: Sequence[ProcessSpec],
        is_over: Callable[[], Awaitable[bool]] | None = None,
        on_failure: Callable[[Process], Awaitable[None]] | None = None,
    ) -> None:
        """Run all ranks to their end. If one ends badly, or before ``is_over``, kill the others and start all again.

        ``on_failure`` is awaited with the rank that ended while the others still run. Raises what ``give_up`` does.
        """
        restarts = 0
        while True:
            ranks = [await self.start(spec, restarts=restarts) for spec in specs]
            failed = await self._first_failure(ranks)
            if failed is None and (is_over is None or await is_over()):
                return
            failed = failed or ranks[0]
            if on_failure is not None:
                await on_failure(failed)
            for child in ranks:
                if child is not failed:
                    await child.kill()
            restarts = await self.before_restart(specs[ranks.index(failed)], failed, failed.returncode or 0, restarts)

    async def _first_failure(self, ranks: Sequence[Process]) -> Process | None:
        """Wait until all ranks have ended with 0, or as asked, and return None; or until one failed, and return it."""
        pending = {asyncio.ensure_future(child.wait()): child for child in ranks}
        try:
            while pending:
                done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    child = pending.pop(task)
                    self.set_state(child.name, "ended", self.states[child.name].restarts)
                    if task.result() not in (0, *EXIT_STOPPED):
                        return child
            return None
        finally:
            for task in pending:
                task.cancel()

    async def beside(self, main: Awaitable[None], keepers: Sequence[Coroutine[Any, Any, None]] = ()) -> None:
        """Run ``main`` to its end beside ``keepers``, whose errors end it. Raises Interrupted on a signal.

        Waits until all of them have ended or were cancelled.
        """
        main_task = asyncio.ensure_future(main)
        tasks = [main_task, *(asyncio.create_task(keeper) for keeper in (*keepers, self._watch_signals()))]
        pending = set(tasks)
        try:
            while not main_task.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in pending:
                task.cancel()
            # The first error is already being raised.
            await outcomes(*tasks)

    async def stop(self, names: Iterable[str], timeout_s: float) -> None:
        """Send SIGTERM to the named processes at once, and kill those that have not ended after ``timeout_s``."""
        children = [self._newest[name] for name in names if name in self._newest]
        await to_the_end(*(child.stop(timeout_s) for child in children))

    async def finish(self, names: Iterable[str]) -> None:
        """Send SIGTERM to ranks and wait until all have ended, or until one fails, without which the others cannot."""
        ranks = [self._newest[name] for name in names if name in self._newest]
        asked = [asyncio.create_task(child.stop(None)) for child in ranks]
        try:
            await self._first_failure(ranks)
        finally:
            for task in asked:
                task.cancel()
            await outcomes(*asked)

    def mark_ended(self) -> None:
        """Record that no process is left; those that failed keep that state."""
        for name, state in self.states.items():
            if state.state != "failed":
                self.set_state(name, "ended", state.restarts)

    @property
    def names(self) -> list[str]:
        """Names of all processes that were ever started."""
        return list(self._newest)

    def set_state(self, name: str, state: str, restarts: int) -> None:
        """Record the state of a process; one that is not among ``lasting`` has none."""
        if name in self.states:
            self.states[name] = ProcessState(name, state, restarts)
            self.write_roster()

    def write_roster(self) -> None:
        """Bring ``processes.json`` up to date. While there is no room for it, that is logged and tried again.

        The file only shows others what this process knows: a run does not end because it is old for a while.
        """
        if self._roster_again is not None:
            self._roster_again.cancel()
        try:
            self._roster.write(self.states)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            log.warning("%s: %s; trying again", error.filename or FILE, error.strerror)
            self._roster_again = asyncio.get_running_loop().call_later(ROSTER_AGAIN_S, self.write_roster)

    async def _watch_signals(self) -> None:
        await self._signalled.wait()
        raise Interrupted(self._signals[0])

    def _on_signal(self, number: int) -> None:
        self._signals.append(number)
        if self._signalled.is_set():
            if number == signal.SIGINT:
                self.ended_at_once = True
                self._kill_now()
            return
        self._signalled.set()
        if self._on_stop is not None:
            self._on_stop(number)

    def _kill_now(self) -> None:
        for child in self._newest.values():
            child.kill_now()


async def keep_ranks(
    specs: Sequence[ProcessSpec], executor: Executor, folder: Path, stop_timeout_s: float, on_stop: StopHook
) -> None:
    """Run trainer ranks without a queue or engines, and start them again when one is lost.

    A first signal calls ``on_stop`` and asks the ranks to end their step and to save, which has no deadline; a Ctrl-C
    after it kills them. Raises what ``Children.give_up`` does, and Interrupted on a signal. No rank is left when it
    returns or raises.
    """
    with Children(executor, folder, specs, on_stop) as children:
        try:
            await children.beside(children.keep_together(specs))
        except Interrupted:
            await children.finish(children.names)
            raise
        finally:
            await children.stop(children.names, stop_timeout_s)
            children.mark_ended()
