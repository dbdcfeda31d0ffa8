"""Acts on a running run: ``rl-async queue ...``, ``rl-async engine list | add | remove`` and ``rl-async profile``.

A command of the queue sends a few requests on one connection, and prints text or JSON. An added engine is started and
supervised by the user. Like a restarted one it first gets the published weights from the trainer, and then requests. If
it fails it is cut off and not restarted. Trainer ranks are profiled, and the stacks of other processes sampled.
"""

import asyncio
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from rl_async.configs.derived import is_loopback
from rl_async.configs.engines import EngineKind
from rl_async.configs.load import load_resolved
from rl_async.errors import AccessDenied, EngineError, QueueLost, RlAsyncError, UserError
from rl_async.insight.diagnosis import ObservedEngine
from rl_async.insight.doctor import launcher_of
from rl_async.insight.show import reward_parts, reward_text
from rl_async.launcher.plan.planning import HOST
from rl_async.messages import (
    DeliveredGroup,
    EngineList,
    EngineRecord,
    GroupRecord,
    Inspection,
    Refused,
    Task,
    Trajectory,
)
from rl_async.process.http_auth import (
    TOKEN_FILE,
    UNAUTHORISED,
    make_tokens,
    read_token,
    run_token,
    token_file,
    token_from_environment,
)
from rl_async.process.role import heeded, printable, py_spy
from rl_async.process.run_files import (
    ENDPOINTS_FILE,
    PROFILES_FOLDER,
    Endpoints,
    ProcessRecord,
    read_endpoints,
    read_roster,
    read_stat,
    traces,
    write_endpoints,
    write_request,
)
from rl_async.rollout_server.http import EngineHttp
from rl_async.rollout_server.pool import connect
from rl_async.transfer_queue.admission import QueueSettings
from rl_async.transfer_queue.auth import client_keys
from rl_async.transfer_queue.book import State
from rl_async.transfer_queue.client import SyncQueueClient

POLL_S = 0.2
# py-spy may take this long to attach and to write its file.
ATTACH_S = 60.0

# A router over several engines is noticed unless it sends so many requests in a row to one of them.
ASKED = 8
LOOPBACK = (HOST, "localhost")
ADDED = "added-"

ANSWER_S = 5.0
# One request for trained groups waits at most this long.
TAIL_WAIT_S = 10.0


@contextmanager
def connected(run: str) -> Iterator[SyncQueueClient]:
    """Connect to the queue of a folder, or at an address. Raises UserError if it does not answer or refuses the key."""
    address = run if "://" in run else read_endpoints(Path(run)).queue
    config = Path(run) / "config.yaml"
    # A queue that is served without a run has neither config nor keys.
    keys = client_keys(load_resolved(config), Path(run), "operator") if config.is_file() else None
    try:
        with SyncQueueClient(address, role="person", name="queue-by-hand", timeout_s=ANSWER_S, keys=keys) as client:
            yield client
    except QueueLost as error:
        raise UserError(f"{run}: {error}; is it running?") from error
    except AccessDenied as error:
        raise UserError(f"{run}: {error}; give the run's folder, which has the keys") from error


def status(run: str, *, as_json: bool, every_s: float | None) -> int:
    """Print the state of the queue, once or every ``every_s`` seconds until Ctrl-C or the queue's end."""
    with connected(run) as queue:
        while True:
            report = queue.inspect()
            if as_json:
                print(msgspec.json.encode(report).decode(), flush=True)
            else:
                clear = "\x1b[H\x1b[2J" if every_s is not None and sys.stdout.isatty() else ""
                print(clear + inspection_text(report), flush=True)
            if every_s is None:
                return 0
            time.sleep(max(0.1, every_s))


def ls(run: str, *, state: str, as_json: bool) -> int:
    """Print the groups that the queue holds, all or those in one state."""
    with connected(run) as queue:
        groups: list[GroupRecord] = []
        more = True
        while more:
            page = queue.group_list(groups[-1].group_id if groups else -1, state=state)
            groups += page.groups
            more = page.more
    print("\n".join(msgspec.json.encode(g).decode() for g in groups) if as_json else groups_text(groups))
    return 0


def peek(run: str, *, group: int, sample: int | None) -> int:
    """Print a group and one of its samples. Raises UserError if the queue does not hold it."""
    with connected(run) as queue:
        found = queue.peek(group)
        if isinstance(found, Refused):
            raise UserError(f"{run}: {found.reason}")
        here = sorted({header.sample for header in found.headers})
        if sample is None and not here:
            print(groups_text([found.group]))
            print("no sample of it is stored yet")
            return 0
        chosen = here[0] if sample is None else sample
        if chosen not in here:
            raise UserError(f"{run}: sample {chosen} of group {group} is not stored; stored are: {here or 'none'}")
        rows = queue.fetch([header.key for header in found.headers if header.sample == chosen])
    print(groups_text([found.group]))
    for row in rows:
        print(trajectory_text(row))
    return 0


def requeue(run: str, *, group: int) -> int:
    """Admit the task of a dead letter again. Raises UserError if the queue refuses."""
    with connected(run) as queue:
        answer = queue.requeue(group)
        if isinstance(answer, Refused):
            raise UserError(f"{run}: {answer.reason}")
    print(f"the task of group {group} is admitted as a new group as soon as a slot is free")
    return 0


def drain(run: str, *, undo: bool) -> int:
    """Stop admission or resume it, and print how many groups the queue still holds."""
    with connected(run) as queue:
        queue.drain(not undo)
        report = queue.status()
    left = f"{report.waiting} waiting, {report.leased} leased, {report.ready} ready, {report.reserved} reserved"
    print("groups are admitted again" if undo else f"admission is stopped; the queue holds: {left}")
    return 0


def tail(run: str, *, consumer: str, oldest: bool, forget: bool) -> int:
    """Print each trained group, from the consumer's position on, until Ctrl-C or the end of the run.

    A group is acknowledged when it is printed. Waits for the trainer; unblocked by a commit, or the end of the run.
    With ``forget``, only remove the consumer, so that the queue keeps nothing for it.
    """
    if forget:
        with connected(run) as queue:
            queue.unsubscribe(consumer)
        print(f"consumer {consumer} is removed")
        return 0
    skipped = 0
    with connected(run) as queue:
        queue.subscribe(consumer, oldest=oldest)
        while True:
            reply = queue.read(consumer, TAIL_WAIT_S)
            if reply.skipped > skipped:
                skipped = reply.skipped
                print(f"{skipped} groups were dropped before {consumer} read them", file=sys.stderr)
            for group in reply.groups:
                print(trained_line(group), flush=True)
            if reply.groups:
                queue.acknowledge(consumer, reply.groups[-1].position)
            if reply.finished:
                return 0


def export_rows(run: str, *, file: Path) -> int:
    """Export the stored rows. Raises UserError if the file cannot be written."""
    from rl_async.transfer_queue.parquet import export

    with connected(run) as queue:
        moved = export(queue, file)
    gone = f"; {moved.skipped} groups were removed meanwhile" if moved.skipped else ""
    print(f"wrote {moved.rows} rows of {moved.groups} groups to {file}{gone}")
    return 0


def import_rows(run: str, *, file: Path, kind: Literal["ready", "tasks"], timeout_s: float) -> int:
    """Import a file. Raises UserError naming the group that the queue refuses."""
    from rl_async.transfer_queue.parquet import import_ready, import_tasks

    with connected(run) as queue:
        moved = {"ready": import_ready, "tasks": import_tasks}[kind](queue, file, timeout_s)
    taken = f"{moved.groups} groups with {moved.rows} rows" if kind == "ready" else f"{moved.groups} tasks"
    skipped = f"; {moved.skipped} groups that are incomplete or of an evaluation were left out" if moved.skipped else ""
    print(f"the queue took {taken}{skipped}")
    return 0


# The function of each command that connects to a queue, and its options, which are its parameters too.
ACTIONS: dict[str, tuple[Callable[..., int], tuple[str, ...]]] = {
    "status": (status, ("as_json", "every_s")),
    "ls": (ls, ("state", "as_json")),
    "peek": (peek, ("group", "sample")),
    "requeue": (requeue, ("group",)),
    "drain": (drain, ("undo",)),
    "tail": (tail, ("consumer", "oldest", "forget")),
    "export": (export_rows, ("file",)),
    "import": (import_rows, ("file", "kind", "timeout_s")),
}


# --- a queue without a run --------------------------------------------------------------------------------------------


def serve(settings: QueueSettings, tasks: str | None, folder: Path | None, port: int, metrics_port: int) -> int:
    """Serve a queue without a run until SIGINT or SIGTERM. Raises UserError."""
    from rl_async.transfer_queue.server import serve_standalone
    from rl_async.transfer_queue.telemetry import serve_metrics

    stopped = threading.Event()
    for number in heeded(signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())

    def listening(address: str) -> None:
        stack.enter_context(serve_metrics(metrics_port, address, token))
        if folder is not None:
            write_endpoints(folder, Endpoints(queue=address))
            # Another program may get the port later, so the address must not remain.
            stack.callback((folder / ENDPOINTS_FILE).unlink, missing_ok=True)
        print(f"listening on {address}", flush=True)

    if not 0 <= port < 1 << 16:
        raise UserError(f"--port: {port} is not a port; give 1 to 65535, or 0 for a free one")
    if folder is not None:
        if (folder / "config.yaml").exists():
            raise UserError(f"{folder} is the folder of a run, whose queue `rl-async launch` serves; choose another")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the folder {folder}: {error.strerror}") from error
    token = _metrics_token(folder) if metrics_port else ""
    with ExitStack() as stack:
        serve_standalone(
            settings,
            _tasks(tasks),
            address=f"tcp://{HOST}:{port or '*'}",
            folder=folder,
            listening=listening,
            stopped=stopped.is_set,
        )
    return 0


def _metrics_token(folder: Path | None) -> str:
    """Return the token for scrapes, from the keys in ``folder``, which are made if missing, or from the environment."""
    if folder is not None:
        make_tokens(folder / "keys")
        return run_token(folder, "metrics")
    if token := token_from_environment():
        return token
    raise UserError(f"--metrics-port: give a FOLDER, or set {TOKEN_FILE} to the file with the token of scrapes")


def _tasks(path: str | None) -> list[Task]:
    if path is None:
        return []
    from rl_async.transfer_queue.dataset import open_rows, to_task
    from rl_async.transfer_queue.images import folder_of

    rows = open_rows(path)
    if rows.generated:
        raise UserError(f"--tasks: {path} is infinite; write the rows that you need into a file")
    stem, folder = Path(path).stem, folder_of(path)
    return [to_task(row, f"{path}, row {n}", f"{stem}:{n}", folder) for n, row in enumerate(rows)]


# --- text -------------------------------------------------------------------------------------------------------------


def inspection_text(report: Inspection) -> str:
    """Format the queue's status: progress, groups by state, rates, counters, dead letters, consumers."""
    status = report.status
    counts = dict(
        zip(State, (status.waiting, status.leased, status.ready, status.reserved, status.committed), strict=True)
    )
    flags = [word for word, on in (("draining", report.draining), ("finished", status.finished)) if on]
    lines = [
        ", ".join(
            [
                "nothing published" if status.published.step < 0 else f"version {status.published} published",
                f"{status.slots_used} of {status.slots} slots used",
                f"{status.admitted} groups admitted",
                f"{status.workers} workers",
                f"{nbytes(status.payload_bytes)} held",
                *([f"{report.submitted} submitted tasks wait"] if report.submitted else []),
                *flags,
            ]
        ),
        f"{'state':12}{'groups':>8}{'oldest':>10}",
    ]
    for state, count in counts.items():
        lines.append(f"{state:12}{count:8}{seconds(report.ages_s.get(state)):>10}".rstrip())
    lease = report.oldest_lease
    if lease is not None:
        lines.append(f"oldest lease: group {lease.group_id}, with {lease.worker} for {seconds(lease.age_s)}")
    rates = report.rates
    lines.append(
        f"per second, over the last minute: {rates['groups_ready']:.2f} groups ready, {rates['groups_reserved']:.2f} "
        f"reserved, {rates['rows']:.2f} rows, {nbytes(rates['bytes'])}"
    )
    if report.shards:
        lines.append("payload shards: " + ", ".join(f"{shard.shard_id} at {shard.url}" for shard in report.shards))
    counted = ", ".join(f"{name} {count}" for name, count in sorted(status.counters.items()) if count)
    lines += [f"counters: {counted}"] if counted else []
    lines += [f"dead letter: group {d.group_id}, task {d.task.task_id}: {d.error}" for d in report.dead_letters]
    for record in report.consumers:
        lost = f", {record.skipped} were dropped before it read them" if record.skipped else ""
        lines.append(f"consumer {record.name}: {record.position} groups done, {record.behind} to read{lost}")
    lines += [f"kept for consumers only: {nbytes(report.kept_bytes)}"] if report.kept_bytes else []
    return printable("\n".join(lines))


def trained_line(group: DeliveredGroup) -> str:
    """Encode one group as JSON; lists have an entry per row, ordered by sample and segment."""
    line = {
        "position": group.position,
        "step": group.step,
        "group": group.group_id,
        "task": group.task.task_id,
        "source": group.task.source,
        "samples": [header.sample for header in group.headers],
        "rewards": [header.reward for header in group.headers],
        "tokens": [header.tokens for header in group.headers],
        "finish_reasons": [header.finish_reason for header in group.headers],
    }
    return msgspec.json.encode(line).decode()


def groups_text(groups: Sequence[GroupRecord]) -> str:
    """Format groups as a table, one line each."""
    lines = [f"{'group':>14} {'state':10}{'here':>8}{'age':>10}{'bytes':>10}  {'task':24}workers"]
    for group in groups:
        lines.append(
            f"{group.group_id:>14} {group.state:10}{f'{group.here}/{group.samples}':>8}{seconds(group.age_s):>10}"
            f"{nbytes(group.nbytes):>10}  {group.task_id:24}{', '.join(group.workers)}".rstrip()
        )
    return printable("\n".join(lines))


def trajectory_text(row: Trajectory) -> str:
    """Format one row: its reward, the versions that sampled it, and its turns."""
    parts = ", ".join(f"{name} {value:g}" for name, value in row.reward_parts.items())
    versions = ", ".join(f"{run.version} for tokens {run.start} to {run.end}" for run in row.versions)
    lines = [
        f"group {row.group_id}, sample {row.sample}, segment {row.segment} of episode {row.episode_id}, "
        f"attempt {row.attempt}",
        f"reward {row.reward:g}{f' ({parts})' if parts else ''}{'' if row.scored else ', not scored'}, "
        f"{len(row.token_ids)} tokens, {int(row.loss_mask.sum())} sampled, ended by {row.finish_reason}",
        f"versions (of sampled tokens): {versions or 'none'}",
    ]
    lines += [*reward_parts(row), *([f"error: {row.error}"] if row.error else [])]
    for turn in row.turns:
        lines.append(f"--- {turn.role}{'' if turn.reward is None else f', {reward_text(turn.reward, turn.reason)}'}")
        lines.append(turn.text)
        for call in turn.tool_calls:
            lines.append(f"  {call.name}({call.arguments}) -> {call.error or call.result}")
    return printable("\n".join(lines))


def nbytes(count: float) -> str:
    """Format bytes in a unit of suitable size."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def seconds(age: float | None) -> str:
    """Format an age in seconds; empty for None."""
    return "" if age is None else f"{age:.1f} s"


def engine_table(engines: EngineList, seen: Sequence[ObservedEngine], processes: Sequence[ProcessRecord]) -> str:
    """Format the engines and their observed speeds as a table, one line each.

    Below it are the failed engines among the run's ``processes``, which are not restarted.
    """
    lines = [f"{'engine':24}{'kind':10}{'version':12}{'answers in':>12}{'tokens/s':>10}  url"]
    for engine, found in zip(engines.engines, seen, strict=True):
        version = "none yet" if engine.version is None else str(engine.version)
        answers = f"{found.answer_s:.2f} s" if found.answers else "never"
        speed = "" if found.tokens_per_s is None else f"{found.tokens_per_s:.0f}"
        lines.append(f"{engine.engine_id:24}{engine.kind:10}{version:12}{answers:>12}{speed:>10}  {engine.url}")
    failed = [process.name for process in processes if process.role == "engine" and process.state == "failed"]
    lines += [f"{name:24}failed and is not started again: logs/{name}.log" for name in failed]
    return "\n".join([*lines, f"published: version {engines.published}"])


def add_engine(run: Path, url: str, kind: EngineKind, wait_s: float) -> EngineRecord:
    """Register the engine at ``url`` and wait until it has confirmed the published weights.

    Raises UserError if the run is not running, if no engine of this kind answers there, if it refuses the run's token
    or accepts requests without, if it is a router over several engines, if the run has it already, or if it was cut off
    or has no weights after ``wait_s``.
    """
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None or parts.port is None:
        raise UserError(f"{url}: give the engine's address as http://HOST:PORT")
    if parts.hostname not in LOOPBACK and is_loopback(load_resolved(run / "config.yaml").queue.host):
        raise UserError(
            f"{url}: an address on this machine is needed, http://{HOST}:PORT: this run's weights travel on it only"
        )
    asyncio.run(_check_engine(url, kind, token_file(run, "engines")))
    # Names are not reused, since each stands for one process.
    engine_id = f"{ADDED}{parts.port}-{secrets.token_hex(2)}"
    with connected(str(run)) as queue:
        known = queue.engines()
        for engine in known.engines:
            if _place(engine.url) == _place(url):
                raise UserError(f"{url}: the run has it already, as {engine.engine_id}")
        queue.register_engine(engine_id, url.rstrip("/"), kind)
        deadline = time.monotonic() + wait_s
        while True:
            left = deadline - time.monotonic()
            known = queue.engines(after=known.revision, wait_s=max(0.0, min(left, ANSWER_S)))
            record = next((engine for engine in known.engines if engine.engine_id == engine_id), None)
            if record is not None and record.version is not None:
                return record
            if record is None or left <= 0:
                queue.remove_engine(engine_id, "it took no weights")
                what = "was cut off" if record is None else f"took no weights within {wait_s:g} s"
                raise UserError(f"{url}: the engine {what}; {run}/logs/trainer-0.log says why. It was removed again")


def _place(url: str) -> tuple[str | None, int | None]:
    parts = urlsplit(url)
    return HOST if parts.hostname in LOOPBACK else parts.hostname, parts.port


def remove_engine(run: Path, engine_id: str) -> None:
    """Remove an engine. Its requests move to other engines, with the tokens sampled so far.

    Raises UserError if the run does not have this engine, or started it itself.
    """
    with connected(str(run)) as queue:
        known = [engine.engine_id for engine in queue.engines().engines]
        if engine_id not in known:
            raise UserError(f"no engine {engine_id}; there are: {', '.join(known) or 'none'}")
        if not engine_id.startswith(ADDED):
            raise UserError(f"{engine_id} belongs to the launcher, which would restart it; set rollout.engines instead")
        queue.remove_engine(engine_id, "removed by hand")


async def _check_engine(url: str, kind: EngineKind, file: Path) -> None:
    """Raise UserError unless an engine of this kind answers at ``url``, and only to the run's token."""
    token = read_token(file)
    client, stranger = connect(kind, url, timeout_s=ANSWER_S, token=token), EngineHttp(url, ANSWER_S)
    asking = EngineHttp(url, ANSWER_S, token=token)
    start = f"start it with {TOKEN_FILE}={file} in its environment, or, if it is an embedded one, with --run"
    try:
        if not await client.health():
            raise UserError(f"{url}: no {kind} engine answers GET /health there within {ANSWER_S:g} s")
        if not await stranger.needs_token():
            raise UserError(f"{url}: the engine takes requests without a token; {start}")
        await client.load()
        if (found := len({await asking.process() for _ in range(ASKED)})) > 1:
            raise UserError(
                f"{url}: requests there reach {found} engines in turn, so weights and pauses would miss all but one of "
                "them; add each engine by its own address"
            )
    except EngineError as error:
        if error.status == UNAUTHORISED[0]:
            raise UserError(f"{url}: the engine does not take this run's token; {start}") from error
        raise UserError(f"{url}: not usable as an engine of the kind {kind}, see --engine: {error}") from error
    finally:
        await client.close()
        await stranger.close()
        await asking.close()


def profile_steps(run: Path, steps: int, timeout_s: float) -> list[Path]:
    """Have every trainer rank record its next ``steps``; return the traces of all steps and ranks.

    Raises UserError if the run is not live, RlAsyncError if it ends early or takes longer than ``timeout_s``.
    """
    _require_live(run)
    wanted, before = steps * load_resolved(run / "config.yaml").trainer.ranks, traces(run)
    write_request(run, steps)
    deadline = time.monotonic() + timeout_s
    while len(found := [file for file, at in traces(run).items() if before.get(file) != at]) < wanted:
        if launcher_of(run) is None:
            raise RlAsyncError(f"{run} has ended, with {len(found)} of {wanted} profiles written")
        if time.monotonic() > deadline:
            raise RlAsyncError(
                f"{len(found)} of {wanted} profiles were written within {timeout_s:g} s (--timeout); `rl-async doctor "
                f"{run}` says what the ranks wait for"
            )
        time.sleep(POLL_S)
    return sorted(found)


def sample_process(run: Path, name: str, seconds: float) -> Path:
    """Sample the Python stacks of one process of the run with py-spy; return the file, for https://speedscope.app.

    Raises UserError if py-spy is not installed or the process does not run here, RlAsyncError if py-spy fails.
    """
    tool = py_spy()
    if tool is None:
        raise UserError("--process: py-spy is not installed; run `python -m pip install py-spy`")
    _require_live(run)
    here = {
        record.name: record.pid
        for record in read_roster(run)
        if not record.host and read_stat(record.pid).started == record.started
    }
    if name not in here:
        raise UserError(f"--process: no process {name} of {run} runs on this machine; there are {', '.join(here)}")
    (run / PROFILES_FOLDER).mkdir(exist_ok=True)
    file = run / PROFILES_FOLDER / f"{name}.speedscope.json"
    command = [tool, "record", "--pid", str(here[name]), "--duration", f"{max(1, round(seconds))}"]
    # Idle threads are sampled too, since some processes mostly wait.
    command += ["--nonblocking", "--idle"]
    try:
        done = subprocess.run(
            [*command, "--format", "speedscope", "--output", str(file)],
            capture_output=True,
            text=True,
            timeout=seconds + ATTACH_S,
        )
    except subprocess.TimeoutExpired as error:
        raise RlAsyncError(f"py-spy did not end within {ATTACH_S:g} s after its {seconds:g} s") from error
    if done.returncode != 0:
        raise RlAsyncError(f"py-spy could not sample {name} (pid {here[name]}): {done.stderr.strip()[-500:]}")
    return file


def _require_live(run: Path) -> None:
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run} is not the folder of a run")
    if launcher_of(run) is None:
        raise UserError(f"{run} does not run; set trainer.profile.steps for a run that you start")
