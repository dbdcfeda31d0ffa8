"""Executes ``rl-async queue ...``: one connection, a few requests, text or JSON on standard output."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from rl_async.configs.load import load_resolved
from rl_async.errors import AccessDenied, QueueLost, UserError
from rl_async.launcher.cli.queue.text import groups_text, inspection_text, trained_line, trajectory_text
from rl_async.launcher.plan.ports import HOST
from rl_async.messages import GroupRecord, Refused, Task
from rl_async.process.http_auth import TOKEN_FILE, make_tokens, run_token, token_from_environment
from rl_async.process.role import heeded
from rl_async.process.run_files import ENDPOINTS_FILE as ENDPOINTS
from rl_async.process.run_files import Endpoints, read_endpoints, write_endpoints
from rl_async.transfer_queue.admission import QueueSettings
from rl_async.transfer_queue.auth.keys import client_keys
from rl_async.transfer_queue.client import SyncQueueClient

ANSWER_S = 5.0
TAIL_WAIT_S = 10.0  # of one request
CLEAR = "\x1b[H\x1b[2J"


@contextmanager
def connected(run: str) -> Iterator[SyncQueueClient]:
    """Connect to the queue of a folder, or at an address. Raises UserError if none answers there, or it needs a key."""
    address = run if "://" in run else read_endpoints(Path(run)).queue
    config = Path(run) / "config.yaml"  # a queue that is served without a run has neither config nor keys
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
                clear = CLEAR if every_s is not None and sys.stdout.isatty() else ""
                print(clear + inspection_text(report), flush=True)
            if every_s is None:
                return 0
            time.sleep(max(0.1, every_s))


def ls(run: str, state: str, *, as_json: bool) -> int:
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


def peek(run: str, group: int, sample: int | None) -> int:
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


def requeue(run: str, group: int) -> int:
    """Admit the task of a dead letter again. Raises UserError if the queue refuses."""
    with connected(run) as queue:
        answer = queue.requeue(group)
        if isinstance(answer, Refused):
            raise UserError(f"{run}: {answer.reason}")
    print(f"the task of group {group} is admitted as a new group as soon as a slot is free")
    return 0


def drain(run: str, *, on: bool) -> int:
    """Stop admission or resume it, and print what is left."""
    with connected(run) as queue:
        queue.drain(on)
        report = queue.status()
    left = f"{report.waiting} waiting, {report.leased} leased, {report.ready} ready, {report.reserved} reserved"
    print(f"admission is stopped; the queue holds: {left}" if on else "groups are admitted again")
    return 0


def tail(run: str, consumer: str, *, oldest: bool) -> int:
    """Print each group that is trained, from the consumer's place on; ends with Ctrl-C or the run.

    A group is acknowledged when it is printed. Waits for the trainer; unblocked by a commit, or the end of the run.
    """
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


def forget(run: str, consumer: str) -> int:
    """Remove a consumer, so that the queue keeps nothing for it."""
    with connected(run) as queue:
        queue.unsubscribe(consumer)
    print(f"consumer {consumer} is removed")
    return 0


def write(run: str, file: Path) -> int:
    """Export the stored rows. Raises UserError if the file cannot be written."""
    from rl_async.transfer_queue.parquet import export

    with connected(run) as queue:
        moved = export(queue, file)
    gone = f"; {moved.skipped} groups were removed meanwhile" if moved.skipped else ""
    print(f"wrote {moved.rows} rows of {moved.groups} groups to {file}{gone}")
    return 0


def bring(run: str, file: Path, kind: Literal["ready", "tasks"], timeout_s: float) -> int:
    """Import a file. Raises UserError naming the group that the queue refuses."""
    from rl_async.transfer_queue.parquet import import_ready, import_tasks

    with connected(run) as queue:
        moved = {"ready": import_ready, "tasks": import_tasks}[kind](queue, file, timeout_s)
    what = f"{moved.groups} groups with {moved.rows} rows" if kind == "ready" else f"{moved.groups} tasks"
    skipped = f"; {moved.skipped} groups that are incomplete or of an evaluation were left out" if moved.skipped else ""
    print(f"the queue took {what}{skipped}")
    return 0


def _metrics_token(folder: Path | None) -> str:
    """Return the token for scrapes: from ``folder``, where it is made if it is missing, or from the environment."""
    if folder is not None:
        make_tokens(folder / "keys")
        return run_token(folder, "metrics")
    if token := token_from_environment():
        return token
    raise UserError(f"--metrics-port: give a FOLDER, or set {TOKEN_FILE} to the file with the token of scrapes")


def serve(settings: QueueSettings, tasks: str | None, folder: Path | None, port: int, metrics_port: int) -> int:
    """Serve a queue without a run until SIGINT or SIGTERM. Raises UserError as ``serve_standalone`` does."""
    from rl_async.transfer_queue.server import serve_standalone
    from rl_async.transfer_queue.telemetry import serve_metrics

    stopped = threading.Event()
    for number in heeded(signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())

    def listening(address: str) -> None:
        stack.enter_context(serve_metrics(metrics_port, address, token))
        if folder is not None:
            write_endpoints(folder, Endpoints(queue=address))
            stack.callback((folder / ENDPOINTS).unlink, missing_ok=True)  # the port may be reused
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


def _tasks(path: str | None) -> list[Task]:
    if path is None:
        return []
    from rl_async.transfer_queue.dataset import open_rows, to_task

    rows = open_rows(path)
    if rows.generated:
        raise UserError(f"--tasks: {path} is infinite; write the rows that you need into a file")
    return [to_task(row, f"{path}, row {n}", f"{Path(path).stem}:{n}") for n, row in enumerate(rows)]
