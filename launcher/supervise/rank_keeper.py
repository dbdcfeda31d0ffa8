"""Runs trainer ranks without a queue or engines, and starts them again when one is lost."""

import asyncio
import logging
import signal
from collections.abc import Sequence
from pathlib import Path

from rl_async.errors import EXIT_FAILED, EXIT_USER
from rl_async.launcher.plan.planning import RENDEZVOUS
from rl_async.launcher.plan.ports import PortWish, assign_ports
from rl_async.launcher.plan.spec import ProcessSpec
from rl_async.launcher.supervise.process import Child, Lifeline, describe_exit, failure
from rl_async.launcher.supervise.supervisor import FIRST_BACKOFF_S, LONGEST_BACKOFF_S, Interrupted

log = logging.getLogger("rl_async.launcher")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def keep_ranks(specs: Sequence[ProcessSpec], folder: Path, stop_timeout_s: float) -> None:
    """Run all ranks to their end. Waits for all to end well, or for one to end badly: then all start again.

    Unblocked by a rank's end, or a signal. A first signal asks the ranks to save and end, and they are killed after
    ``stop_timeout_s``; a second one kills them at once. Raises UserError if a rank ended because of a mistake of the
    user, RoleFailed if one failed for good, Interrupted on a signal. No rank is left when it returns or raises.
    """
    children: list[Child] = []
    caught = asyncio.Queue[int]()
    signals: list[int] = []

    def on_signal(number: int) -> None:
        signals.append(number)
        caught.put_nowait(number)
        if len(signals) > 1:
            for child in children:
                child.kill_now()

    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        with Lifeline() as lifeline:
            try:
                await _until_done(specs, folder, lifeline, children, caught)
            finally:
                await asyncio.gather(*(child.stop(stop_timeout_s) for child in children))
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


async def _until_done(
    specs: Sequence[ProcessSpec], folder: Path, lifeline: Lifeline, children: list[Child], caught: "asyncio.Queue[int]"
) -> None:
    restarts = 0
    (folder / "stacks").mkdir(exist_ok=True)
    while True:
        ports = assign_ports([PortWish(RENDEZVOUS)])
        children.clear()
        for spec in specs:
            children.append(await _start(spec, ports, folder, lifeline))
        failed = await _first_failure(children, caught)
        if failed is None:
            return
        for child in children:
            await child.kill()
        code = failed.returncode or 0
        if code in (EXIT_USER, EXIT_FAILED) or restarts >= specs[0].max_restarts:
            raise failure(failed, code, restarts)
        log.warning("%s ended (%s); all ranks start again", failed.name, describe_exit(code))
        await asyncio.sleep(min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2**restarts))
        restarts += 1


async def _start(spec: ProcessSpec, ports: dict[str, int], folder: Path, lifeline: Lifeline) -> Child:
    files = folder / "logs" / f"{spec.name}.log", folder / "stacks" / f"{spec.name}.txt"
    child = await Child.start(spec.name, spec.command(ports), spec.environment(ports), files[0], lifeline, files[1])
    log.info("%s started, pid %d", spec.name, child.pid)
    return child


async def _first_failure(children: Sequence[Child], caught: "asyncio.Queue[int]") -> Child | None:
    """None when all ended with 0. Raises Interrupted on a signal."""
    signalled = asyncio.ensure_future(caught.get())
    pending = {asyncio.ensure_future(child.wait()): child for child in children}
    try:
        while pending:
            done, _ = await asyncio.wait([*pending, signalled], return_when=asyncio.FIRST_COMPLETED)
            if signalled in done:
                raise Interrupted(signalled.result())
            for task in done:
                child = pending.pop(task)
                if child.returncode:
                    return child
        return None
    finally:
        for task in (signalled, *pending):
            task.cancel()
