"""``rl-async launch``: from a checked config to a finished run."""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from rl_async.agent_loop.chat_formats.format import ChatFormat
from rl_async.agent_loop.recorded import check_recording
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import EXIT_FAILED, EXIT_SIGNAL, RlAsyncError, UserError
from rl_async.launcher.doctor.report import FILE as DIAGNOSIS
from rl_async.launcher.doctor.report import write_report
from rl_async.launcher.folder.run_folder import begun, create, hold, hold_unnamed, note_sources, saved
from rl_async.launcher.folder.tail import last_record
from rl_async.launcher.plan.artifacts import needs_preparation
from rl_async.launcher.plan.machine import check_engines, plan_here, settle_here
from rl_async.launcher.plan.memory import model_size
from rl_async.launcher.plan.planning import Plan, endpoints
from rl_async.launcher.plan.ports import assign_ports
from rl_async.launcher.plan.processor import MachineRecord, write_machine
from rl_async.launcher.plan.tool_schemas import write_tool_schemas
from rl_async.launcher.ray.authentication import present_token, refuses_without_token
from rl_async.launcher.runs.page_beside import serve_beside
from rl_async.launcher.sources.fetch import Fetched
from rl_async.launcher.supervise.children import Interrupted
from rl_async.launcher.supervise.executor import Executor, ThisMachine
from rl_async.launcher.supervise.supervisor import Supervisor
from rl_async.launcher.watch.stop_notice import StopNotice
from rl_async.launcher.watch.terminal import say
from rl_async.launcher.watch.view import View
from rl_async.process.http_auth import make_tokens, token_file
from rl_async.process.private_folder import hold_private_folder
from rl_async.process.role import steady_file
from rl_async.process.run_files import write_budget, write_endpoints
from rl_async.transfer_queue.auth.keys import client_keys, provide_keys

DIAGNOSIS_S = 30.0
CONNECT_S = 5.0
LOG = Path("logs", "launcher.log")  # in the run folder


def launch(
    config: RunConfig, folder: Path, *, resume: bool = False, unnamed: bool = False, fetched: Fetched | None = None
) -> int:
    """Train and show the run; the exit code. ``unnamed``: ``folder`` was chosen, and may be another that is free.

    Raises UserError or RoleFailed.
    """
    with held(config, folder, unnamed) as (config, folder), hold_private_folder(folder):
        config, machine = settle_here(config, folder)
        planned, ports = make_ready(config, folder, resume=resume)
        note_sources(folder, fetched or {})
        note_machine(folder, machine)
        with log_into(folder), naming_deletion(folder):
            return asyncio.run(_run(config, folder, planned, ThisMachine(ports, folder, planned.hosts)))


def launch_on_ray(
    config: RunConfig,
    folder: Path,
    address: str,
    *,
    resume: bool = False,
    unnamed: bool = False,
    fetched: Fetched | None = None,
) -> int:
    """Train on the nodes of the Ray cluster at ``address``; the exit code. Raises NoRoom, and what ``launch`` does."""
    if find_spec("ray") is None:
        raise UserError("--launcher ray: Ray is not installed here; run `python -m pip install 'rl-async[ray]'`")
    check_reachable(address)
    present_token(os.environ, Path.home(), lambda: refuses_without_token(address))
    from rl_async.launcher.ray.executor import RayNodes, connected

    with held(config, folder, unnamed) as (config, folder), connected(address) as cluster:
        config, machine = settle_here(cluster.at_home(config), folder, cluster.gpus, cluster.measure)
        planned = plan_here(config, folder, resume=resume, gpus=cluster.gpus)
        _make_folder(config, folder, planned)
        note_sources(folder, fetched or {})
        note_machine(folder, machine)
        with log_into(folder), naming_deletion(folder):
            return asyncio.run(_run(config, folder, planned, RayNodes(cluster, config, planned, folder)))


@contextmanager
def held(config: RunConfig, folder: Path, unnamed: bool) -> Iterator[tuple[RunConfig, Path]]:
    """Keep other launchers out of a run while the block runs; the config and the folder that it has."""
    if unnamed:
        with hold_unnamed(config, folder) as own:
            yield own
    else:
        with hold(folder):
            yield config, folder


def note_machine(folder: Path, machine: MachineRecord) -> None:
    """Keep in the run's folder which machine it starts on and what was chosen for it, and print the choices."""
    write_machine(folder, machine)
    for line in machine.lines:
        print(line, flush=True)


def make_ready(config: RunConfig, folder: Path, *, resume: bool = False) -> tuple[Plan, dict[str, int]]:
    """Check this machine, assign ports and create the run folder. Raises UserError before anything is created."""
    if not config.rollout.replay:
        check_engines(config, on_gpus=True)
    planned = plan_here(config, folder, resume=resume)
    ports = assign_ports(planned.ports)
    _make_folder(config, folder, planned)
    return planned, ports


def _make_folder(config: RunConfig, folder: Path, planned: Plan) -> None:
    create(config, folder)
    write_budget(folder, planned.memory)
    write_tool_schemas(config, folder)
    make_tokens(folder / "keys")
    provide_keys(config, folder)


def check_reachable(address: str) -> None:
    """Raise UserError if nothing listens at HOST:PORT; Ray itself would retry for minutes."""
    host, colon, port = address.rpartition(":")
    if not (colon and port.isdigit()) or "/" in host:
        return  # another form of address, or none
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--address {address}: no Ray cluster answers there ({error}); start one with `ray start --head`"
        ) from error


@contextmanager
def log_into(folder: Path) -> Iterator[None]:
    """Write the launcher's own log into a file; on the terminal it would disrupt the live view."""
    log = logging.getLogger("rl_async")
    file = steady_file(folder / LOG)
    handler = logging.StreamHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    level, propagate = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate
        file.close()


@contextmanager
def naming_deletion(folder: Path) -> Iterator[None]:
    """Raise UserError, naming the folder, in place of an error of the block if the folder was deleted meanwhile.

    The run's processes may have made the folder again, but nobody makes the launcher's log and the config again.
    """
    try:
        yield
    except (RlAsyncError, OSError) as error:
        if (folder / LOG).exists() or (folder / "config.yaml").exists():
            raise
        raise UserError(f"the folder of the run was deleted while it ran: {folder}; start it anew") from error


async def prepare(config: RunConfig, planned: Plan, supervisor: Supervisor, console: Console) -> None:
    """Make missing data and a missing model in a process of its own, and print its lines.

    Raises ConfigError if the model's chat format does not go with the config and engines would take minutes to start
    before a worker says so.
    """
    if planned.prepare is not None and needs_preparation(config):
        await supervisor.run_once(planned.prepare, lambda line: say(console, line))
    await asyncio.to_thread(check_chat, config)


def check_chat(config: RunConfig) -> None:
    """Raise ConfigError if the model's chat format does not go with the config or with what it replays, or if that
    is not whole; a model elsewhere is unknown.

    Workers check it, too. The embedded engine is there as soon as they are: here the check would only delay them.
    """
    agent, replay = config.agent, config.rollout.replay
    asks = agent.tools or agent.environment or agent.mcp or agent.chat_format != "auto"
    wants = replay or (asks and config.rollout.engine != "embedded")
    chat: ChatFormat | None = None
    if wants and Path(config.model.path).is_dir():
        from rl_async.agent_loop.chat_formats.format_registry import (
            load_format,  # imports Transformers, which takes seconds
        )

        chat = load_format(config.model.path, agent)
    if replay:
        size = model_size(config)
        check_recording(config, chat, size.vocab if size else None)


def announce(config: RunConfig, folder: Path, executor: Executor, console: Console) -> None:
    """Write ``endpoints.json``, and print the address of the gateway if there is one."""
    places = endpoints(config, folder, *executor.places())
    write_endpoints(folder, places)
    if places.gateway:
        token = token_file(folder, "gateway")
        say(console, f"gateway: {places.gateway} (token: {token})")


async def _run(config: RunConfig, folder: Path, planned: Plan, executor: Executor) -> int:
    console = Console()
    view: View | None = None

    async def on_trouble(why: str) -> None:
        await _diagnose(folder, why, console)

    keys, notice = client_keys(config, folder, "operator"), StopNotice(folder)

    def on_stop(number: int) -> None:
        say(console, notice.text(number))

    supervisor = Supervisor(planned, executor, folder, keys, on_trouble, on_stop)
    try:
        with supervisor:
            await prepare(config, planned, supervisor, console)
            await supervisor.allocate()
            say(console, f"run folder: {folder}")
            if kept := saved(folder):
                say(console, f"resumed from the checkpoint of version {kept}")
            announce(config, folder, executor, console)
            view = View(config, folder, supervisor.states, supervisor.status, console)
            async with AsyncExitStack() as beside:
                await beside.enter_async_context(shown(view.run()))
                if config.tracking.view:
                    page = serve_beside(folder, lambda address: say(console, f"page: {address}"))
                    await beside.enter_async_context(shown(page))
                await supervisor.run()
    except Interrupted as interruption:
        _print_summary(console, view)
        lost = unsaved(folder)
        hint = f"continue with --resume --name {folder.name}" if begun(folder) else "there is nothing to continue"
        print(f"interrupted; every process has ended; {lost}{hint}", file=sys.stderr)
        return EXIT_FAILED if lost and not supervisor.ended_at_once else EXIT_SIGNAL + interruption.number
    _print_summary(console, view)
    return 0


def unsaved(folder: Path) -> str:
    """Say which steps were trained and are in no checkpoint, and where a resumed run begins; empty if all are."""
    trained = int(last_record(folder / "metrics.jsonl").get("step", -1)) + 1
    kept = saved(folder)
    if trained <= kept:
        return ""
    steps = f"step {kept} is" if trained == kept + 1 else f"steps {kept} to {trained - 1} are"
    return f"{steps} in no checkpoint (logs/trainer-0.log says why), so that a resumed run begins at step {kept}; "


async def _diagnose(folder: Path, why: str, console: Console) -> None:
    """Print the findings on a run in trouble, and write the whole diagnosis into the run folder.

    If the diagnosis itself fails, that is logged, and the run continues as without it.
    """
    log = logging.getLogger("rl_async.launcher")
    try:
        async with asyncio.timeout(DIAGNOSIS_S):
            verdict = await asyncio.to_thread(write_report, folder, why)
    except (RlAsyncError, OSError, TimeoutError) as error:
        log.error("%s, and the diagnosis failed: %r", why, error)
        return
    log.warning("%s; %s", why, verdict)
    say(console, f"{why}\n{verdict}\nthe whole diagnosis: {folder / DIAGNOSIS}")


@asynccontextmanager
async def shown(view: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a view while the block runs. A view that fails is reported and does not end the run."""
    task = asyncio.create_task(view)
    task.add_done_callback(_report_failure)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def _report_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logging.getLogger("rl_async.launcher").error("the view failed", exc_info=error)
        print(f"the view failed ({error!r}); the run continues, see metrics.jsonl and logs/", file=sys.stderr)


def _print_summary(console: Console, view: View | None) -> None:
    if view is not None:
        say(console, view.summary())
