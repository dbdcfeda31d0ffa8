"""Executes ``rl-async queue ...``: sends a few requests on one connection, and prints text or JSON."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from rl_async.configs.load import load_resolved
from rl_async.errors import AccessDenied, QueueLost, UserError
from rl_async.insight.show import reward_parts, reward_text
from rl_async.insight.terminal import printable
from rl_async.launcher.plan.planning import HOST
from rl_async.messages import DeliveredGroup, GroupRecord, Inspection, Refused, Task, Trajectory
from rl_async.process.http_auth import TOKEN_FILE, make_tokens, run_token, token_from_environment
from rl_async.process.role import heeded
from rl_async.process.run_files import ENDPOINTS_FILE, Endpoints, read_endpoints, write_endpoints
from rl_async.transfer_queue.admission import QueueSettings
from rl_async.transfer_queue.auth.keys import client_keys
from rl_async.transfer_queue.book import State
from rl_async.transfer_queue.client import SyncQueueClient

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
