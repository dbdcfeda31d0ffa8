"""``rl-async launch``: runs a checked config to its end, or prints its plan (``--dry-run``).

Also presents the token of a Ray cluster, serves the page beside the run (``tracking.view``), and, when the user asks
the run to stop, reports the pending work and the steps that stopping at once would lose.
"""

import asyncio
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, MutableMapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from rl_async.accelerators import count_gpus
from rl_async.agent_loop.chat_formats.format import ChatFormat
from rl_async.agent_loop.episode import check_recording
from rl_async.configs.schema.run import RunConfig
from rl_async.errors import EXIT_FAILED, EXIT_SIGNAL, RlAsyncError, UserError
from rl_async.insight.doctor import REPORT_FILE as DIAGNOSIS
from rl_async.insight.doctor import write_report
from rl_async.insight.live_view import View, show_progress
from rl_async.insight.tail import last_record
from rl_async.installation import commit
from rl_async.launcher.plan.artifacts import needs_data, needs_model, needs_preparation
from rl_async.launcher.plan.machine import (
    MachineRecord,
    check_engines,
    checkpoint_bytes,
    plan_here,
    settle_here,
    with_weight_way,
    write_machine,
)
from rl_async.launcher.plan.memory import STAGES, model_size
from rl_async.launcher.plan.planning import Plan, assign_ports, endpoints
from rl_async.launcher.plan.trials import write_tool_schemas
from rl_async.launcher.run_folder import (
    begun,
    clear_unused,
    create,
    hold,
    hold_unnamed,
    note_sources,
    removed_on_failure,
    saved,
)
from rl_async.launcher.runs.rehearsal import Findings, check_printed
from rl_async.launcher.sources import Fetched
from rl_async.launcher.supervisor import Executor, Interrupted, Lifeline, Supervisor, ThisMachine
from rl_async.process.http_auth import make_tokens, token_file
from rl_async.process.private_folder import hold_private_folder
from rl_async.process.role import LIFELINE_FD, own_module, say, steady_file
from rl_async.process.run_files import Beat, DeviceBudget, MemoryBudget, read_beats, write_budget, write_endpoints
from rl_async.transfer_queue.auth import client_keys, provide_keys

_CONNECT = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False)"
_CONNECT_S = 60.0


def present_token(environment: MutableMapping[str, str], home: Path, wants_token: Callable[[], bool]) -> bool:
    """Have Ray present this user's token if the cluster requires one; return whether it does.

    Ray 2.60 presents a token to a cluster that it found by itself, but to a given address only if RAY_AUTH_MODE says
    so. A cluster without authentication accepts a client that presents a token, and then cancels its actors. Therefore
    ``wants_token`` is called if there is a token and RAY_AUTH_MODE is unset. Call this before Ray is imported, since
    Ray reads the variable once.
    """
    if "RAY_AUTH_MODE" not in environment:
        named = environment.get("RAY_AUTH_TOKEN") or environment.get("RAY_AUTH_TOKEN_PATH")
        if named or (home / ".ray" / "auth_token").is_file():
            environment["RAY_AUTH_MODE"] = "token" if wants_token() else "disabled"
    return environment.get("RAY_AUTH_MODE", "").lower() == "token"


def refuses_without_token(address: str) -> bool:
    """Whether the cluster at ``address``, by default that of RAY_ADDRESS or this machine, requires a token.

    Also True if no client can connect for another reason; Ray then reports it to the client with the token. Takes about
    a second, and four if the cluster refuses.
    """
    # Ray reads the variable once per process, so this needs another process.
    environment = os.environ | {"RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-P", "-c", _CONNECT, address or "auto"]
    try:
        return subprocess.run(command, env=environment, capture_output=True, timeout=_CONNECT_S).returncode != 0
    except subprocess.TimeoutExpired:
        return True


NOT_IN_A_STEP = ("starting", "waiting for a batch")


def stop_text(folder: Path, began: float, number: int) -> str:
    """Describe how the run in ``folder``, started at ``began``, will end after the signal ``number``."""
    # Heartbeats of an earlier start may remain.
    beats = [beat for beat in read_beats(folder) if beat.since >= began]
    return describe_stop(
        beats[0] if beats else None,
        last_record(folder / "metrics.jsonl").get("time/train_s"),
        saved(folder),
        time.time(),
        "Ctrl-C again" if number == signal.SIGINT else "Ctrl-C",
    )


def describe_stop(beat: Beat | None, train_s: float | None, saved: int, now: float, key: str) -> str:
    """Describe the end of a run from its trainer's last heartbeat and the training time of its last step.

    ``saved`` counts the steps in the newest checkpoint; ``key`` ends the run at once.
    """
    completed = 0 if beat is None else beat.step if beat.phase in NOT_IN_A_STEP else beat.step + 1
    if beat is None or beat.phase == "starting" or completed == 0:
        return "stopping; no step has begun"
    last = completed - 1
    if completed <= saved:
        return f"stopping; step {last} is saved"
    left = ""
    if beat.phase == "training" and train_s is not None:
        left = f", about {max(0.0, train_s - (now - beat.since)):.0f} s"
    lost = f"{completed - saved} step" if completed == saved + 1 else f"{completed - saved} steps"
    return f"stopping after step {last}{left}, and saving; {key} ends now, losing {lost}"


PAGE_END_S = 5.0
PAGE_LOG = "view.log"


async def serve_beside(folder: Path, tell: Callable[[str], None]) -> None:
    """Serve the page on the run in ``folder`` until cancelled; call ``tell`` with its address.

    Raises UserError if the page's process ends by itself.
    """
    with Lifeline() as lifeline, (folder / "logs" / PAGE_LOG).open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *own_module("launcher.cli", "view", str(folder)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env={**os.environ, LIFELINE_FD: str(lifeline.read_end)},
            pass_fds=(lifeline.read_end,),
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            address = (await process.stdout.readline()).decode().strip()
            if address:
                tell(address)
            code = await process.wait()
            raise UserError(f"tracking.view: the page ended with exit code {code}; see {folder / 'logs' / PAGE_LOG}")
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), PAGE_END_S)
            with suppress(ProcessLookupError):
                process.kill()


DIAGNOSIS_S = 30.0
CONNECT_S = 5.0
# Relative to the run folder.
LOG = Path("logs", "launcher.log")


def launch(
    config: RunConfig, folder: Path, *, resume: bool = False, unnamed: bool = False, fetched: Fetched | None = None
) -> int:
    """Train and show the run; return the exit code. An ``unnamed`` run may move to another free folder.

    Raises UserError or RoleFailed.
    """
    with held(config, folder, unnamed=unnamed, resume=resume) as (config, folder), hold_private_folder(folder):
        config, machine = settle_here(config, folder)
        config, machine = with_weight_way(config, machine, model_size(config), count_gpus(), one_host=True)
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
    """Train on the nodes of the Ray cluster at ``address``, as ``launch`` does here. Also raises NoRoom."""
    if find_spec("ray") is None:
        raise UserError("--launcher ray: Ray is not installed here; run `python -m pip install 'rl-async[ray]'`")
    check_reachable(address)
    present_token(os.environ, Path.home(), lambda: refuses_without_token(address))
    from rl_async.launcher.ray_nodes import RayNodes, connected

    with held(config, folder, unnamed=unnamed, resume=resume) as (config, folder), connected(address) as cluster:
        config, machine = settle_here(cluster.at_home(config), folder, cluster.gpus, cluster.measure)
        config, machine = with_weight_way(
            config, machine, model_size(config), cluster.gpus, one_host=False, host_bytes=cluster.host_bytes
        )
        planned = plan_here(config, folder, resume=resume, gpus=cluster.gpus)
        _make_folder(config, folder, planned)
        note_sources(folder, fetched or {})
        note_machine(folder, machine)
        with log_into(folder), naming_deletion(folder):
            return asyncio.run(_run(config, folder, planned, RayNodes(cluster, config, planned, folder)))


@contextmanager
def held(config: RunConfig, folder: Path, *, unnamed: bool, resume: bool) -> Iterator[tuple[RunConfig, Path]]:
    """Keep other launchers out of a run while the block runs; yield its config and folder.

    Unless it is to ``resume``, a start of the same name that made no sample leaves nothing but its logs.
    """
    if unnamed:
        with hold_unnamed(config, folder) as own:
            yield own
    else:
        with hold(folder):
            if not resume and clear_unused(folder):
                print(f"{folder} was started before and made no sample: starting it again", flush=True)
            yield config, folder


def note_machine(folder: Path, machine: MachineRecord) -> None:
    """Record in the run's folder its machine and the choices made for it, and print the choices."""
    write_machine(folder, msgspec.structs.replace(machine, commit=commit()))
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
    with removed_on_failure(folder):
        create(config, folder)
        write_budget(folder, planned.memory)
        write_tool_schemas(config, folder)
        make_tokens(folder / "keys")
        provide_keys(config, folder)


def check_reachable(address: str) -> None:
    """Raise UserError if nothing listens at HOST:PORT; Ray itself would retry for minutes."""
    host, colon, port = address.rpartition(":")
    if not (colon and port.isdigit()) or "/" in host:
        # Only this form of address can be checked here.
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--address {address}: no Ray cluster answers there ({error}); start one with `ray start --head`"
        ) from error


@contextmanager
def log_into(folder: Path) -> Iterator[None]:
    """Write the launcher's own log into a file, since on the terminal it would disrupt the live view."""
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
    """Replace an error of the block by a UserError that names the folder, if the folder was deleted meanwhile.

    The run's processes may have recreated the folder, but not the launcher's log and the config.
    """
    try:
        yield
    except (RlAsyncError, OSError) as error:
        if (folder / LOG).exists() or (folder / "config.yaml").exists():
            raise
        raise UserError(f"the folder of the run was deleted while it ran: {folder}; start it anew") from error


async def prepare(config: RunConfig, folder: Path, planned: Plan, supervisor: Supervisor, console: Console) -> None:
    """Make missing data and a missing model in a separate process, and show its lines and its progress.

    Then check the chat format, since engines may take minutes to start before a worker does, and that it prints all of
    every prompt. Raises ConfigError and DataError.
    """
    if planned.prepare is not None and needs_preparation(config):
        async with shown(show_progress(folder, planned.prepare.name, console)):
            await supervisor.run_once(planned.prepare, lambda line: say(console, line))
    await asyncio.to_thread(check_chat, config)
    await asyncio.to_thread(check_printed, config)


def check_chat(config: RunConfig) -> None:
    """Raise ConfigError if the model's chat format does not suit the config, or a recording to replay is unusable.

    A model that is not a folder here cannot be checked. Workers also check it, and the embedded engine starts as fast
    as they do, so with that engine a check here would only cost time.
    """
    agent, replay = config.agent, config.rollout.replay
    asks = agent.tools or agent.environment or agent.mcp or agent.chat_format != "auto"
    wants = replay or (asks and config.rollout.engine != "embedded")
    chat: ChatFormat | None = None
    if wants and Path(config.model.path).is_dir():
        # Imported only here, since it imports Transformers, which takes seconds.
        from rl_async.agent_loop.chat_formats.format_registry import load_format

        chat = load_format(config.model.path, agent)
    if replay:
        size = model_size(config)
        check_recording(config, chat, size.vocab if size else None)


def announce(config: RunConfig, folder: Path, executor: Executor, console: Console) -> None:
    """Write ``endpoints.json``, and print the address of an optional gateway."""
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

    keys, began = client_keys(config, folder, "operator"), time.time()

    def on_stop(number: int) -> None:
        say(console, stop_text(folder, began, number))

    supervisor = Supervisor(planned, executor, folder, keys, on_trouble, on_stop)
    try:
        with supervisor:
            await prepare(config, folder, planned, supervisor, console)
            await supervisor.children.beside(executor.allocate())
            say(console, f"run folder: {folder}")
            if kept := saved(folder):
                say(console, f"resumed from the checkpoint of version {kept}")
            announce(config, folder, executor, console)
            states = supervisor.children.states
            view = View(config, folder, states.values, lambda: supervisor.queue, console)
            async with AsyncExitStack() as beside:
                await beside.enter_async_context(shown(view.run()))
                if config.tracking.view:
                    page = serve_beside(folder, lambda address: say(console, f"page: {address}"))
                    await beside.enter_async_context(shown(page))
                await supervisor.run()
    except Interrupted as interruption:
        _print_summary(console, view)
        lost = unsaved(folder)
        again = "no sample was made, so the same command starts it again"
        hint = f"continue with --resume --name {folder.name}" if begun(folder) else again
        print(f"interrupted; every process has ended; {lost}{hint}", file=sys.stderr)
        return EXIT_FAILED if lost and not supervisor.children.ended_at_once else EXIT_SIGNAL + interruption.number
    _print_summary(console, view)
    return 0


def unsaved(folder: Path) -> str:
    """Name the trained steps that no checkpoint has, and the first step of a resumed run; empty if all are saved."""
    trained = int(last_record(folder / "metrics.jsonl").get("step", -1)) + 1
    kept = saved(folder)
    if trained <= kept:
        return ""
    steps = f"step {kept} is" if trained == kept + 1 else f"steps {kept} to {trained - 1} are"
    return f"{steps} in no checkpoint (logs/trainer-0.log says why), so that a resumed run begins at step {kept}; "


async def _diagnose(folder: Path, why: str, console: Console) -> None:
    """Print the findings on a run in trouble, and write the whole diagnosis into the run folder.

    If the diagnosis itself fails, that is logged and has no other effect.
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


def dry_run(
    config: RunConfig, folder: Path, findings: Findings, *, resume: bool = False, verbose: bool = False
) -> None:
    """Check the files, ports and devices of a run, and print it, with what its rehearsal found, on one screen.

    ``verbose`` adds the memory by stage and the command lines. Raises UserError if the run could not start, for example
    for a missing file, a taken port or a missing GPU.
    """
    config, machine = settle_here(config, folder)
    config, machine = with_weight_way(config, machine, model_size(config), count_gpus(), one_host=True)
    planned = plan_here(config, folder, resume=resume)
    # Raises UserError if a configured port is taken.
    assign_ports([wish for wish in planned.ports if wish.port])
    console = Console()
    for label, text in [*outline(config), *findings.lines]:
        first, *more = text.split("\n")
        for line in (f"{label:<12}{first}", *(f"{'':<12}{line}" for line in more)):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(plan_table(planned))
    if verbose:
        for table in memory_tables(planned.memory):
            console.print(table)
    for line in (*machine.lines, *plan_notes(config, folder, planned, verbose=verbose)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def outline(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield labels and texts: the model, the algorithm and the batch of a step."""
    algorithm, data, trainer = config.algorithm, config.data, config.trainer
    yield "model", config.model.path
    stale = config.queue.max_staleness
    bound = "on-policy" if stale == 0 else f"at most {stale} step{'s' * (stale > 1)} off-policy"
    kl = f", KL penalty {algorithm.kl.coef:g}" if algorithm.kl.coef > 0 else ""
    critic = ", with a critic" if config.critic is not None else ""
    formulas = f"loss {algorithm.loss}, correction {algorithm.correction}"
    if algorithm.uses_rewards:
        formulas = f"advantage {algorithm.advantage}, {formulas}"
    yield "algorithm", f"{formulas}{kl}{critic}; {bound}"
    if teacher := algorithm.teacher:
        served = [f"{endpoint.model} at {endpoint.url}" for endpoint in teacher.endpoints.values()]
        where = " and ".join([*teacher.paths.values(), *served]) or "the policy itself"
        where += " with a hint" if teacher.hint is not None else ""
        alone = "beside the rewards" if teacher.rewards else "in place of rewards"
        yield "teacher", f"{where}, divergence {teacher.divergence}, weight {teacher.coef:g}, {alone}"
    tasks, answers = data.train_batch_groups, config.rollout.group_size
    yield (
        "step",
        f"{tasks} tasks x {answers} answers = {tasks * answers} episodes, trained in {trainer.minibatches} "
        f"mini-batch{'es' * (trainer.minibatches > 1)}; {trainer.steps} steps, learning rate {trainer.learning_rate:g}",
    )


def plan_table(planned: Plan) -> Table:
    """Lay out a plan as a table with one row per process."""
    ports = {wish.name: str(wish.port) if wish.port else "free" for wish in planned.ports}
    table = Table(title=f"{planned.mode}, weights by {planned.transport}", title_justify="left")
    for heading in ("process", "device", "port", "memory", "restarts"):
        table.add_column(heading, justify="left" if heading in ("process", "device") else "right")
    for spec in planned.processes:
        memory = "unknown" if spec.memory_bytes is None else f"{spec.memory_bytes / 2**30:.2f} GiB"
        table.add_row(spec.name, spec.device, ports.get(spec.name, ""), memory, str(spec.max_restarts))
    return table


def memory_tables(budget: MemoryBudget) -> list[Table]:
    """Lay out the memory of devices by stage and process, in GiB; devices with equal budgets share a table."""
    alike: dict[tuple[tuple[str, ...], ...], list[DeviceBudget]] = {}
    for device in budget.devices:
        alike.setdefault(tuple(memory_rows(device)), []).append(device)
    return [_memory_table([device.device for device in devices], devices[0]) for devices in alike.values()]


def _memory_table(names: list[str], device: DeviceBudget) -> Table:
    limit = "" if device.limit is None else f", {_gib(device.limit)} GiB to plan with"
    table = Table(title=f"memory of {', '.join(names)}{limit}", title_justify="left")
    for heading in ("stage", "who", "GiB", "of these"):
        table.add_column(heading, justify="right" if heading == "GiB" else "left")
    for stage, *row in memory_rows(device):
        if stage:
            table.add_section()
        table.add_row(stage, *row)
    return table


def memory_rows(device: DeviceBudget) -> list[tuple[str, ...]]:
    """Return rows of stage, holder, GiB and the parts of at least 5 MiB, with equal processes in one row and the sum of
    a device in another. Only the first row of a stage names it."""
    rows: list[tuple[str, ...]] = []
    for stage in STAGES:
        first = len(rows)
        alike: Counter[tuple[str, str, str]] = Counter()
        for holder in device.holders:
            parts = holder.stages[stage].items()
            shown = ", ".join(f"{part} {_gib(nbytes)}" for part, nbytes in parts if nbytes >= 5 << 20)
            alike[holder.role, _gib(holder.total(stage)), shown] += 1
        for (role, total, shown), count in alike.items():
            rows.append(("", role if count == 1 else f"{role}, each of {count}", total, shown))
        if len(device.holders) > 1:
            rows.append(("", "together", _gib(device.total(stage)), ""))
        rows[first] = (stage, *rows[first][1:])
    return rows


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f}"


def plan_notes(config: RunConfig, folder: Path, planned: Plan, *, verbose: bool) -> list[str]:
    """Return the lines below the table: memory, folder, files that are made first, and the command lines."""
    known = [spec.memory_bytes for spec in planned.processes if spec.memory_bytes is not None]
    notes = [f"memory in all, at most about: {sum(known) / 2**30:.1f} GiB{'' if verbose else ' (--verbose: by stage)'}"]
    if verbose:
        notes += [f"{spec.name}: {shlex.join(['python', *spec.argv[1:]])}" for spec in planned.processes]
    notes.append(f"run folder: {folder}")
    if needed := checkpoint_bytes(config, folder, model_size(config)):
        notes.append(f"disk for checkpoints: at least {needed / 2**30:.2f} GiB")
    if needs_data(config):
        notes.append(f"made first: {config.data.make} data for {config.data.path}")
    if needs_model(config):
        notes.append(f"made first: a warm-started model in {config.model.path}")
    notes.append("dry run: nothing was started")
    return notes
