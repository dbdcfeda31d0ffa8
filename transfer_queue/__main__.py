"""The transfer queue process: ``python -m rl_async.transfer_queue --run RUN --address ADDRESS``.

Opens the journal that the run's config names, recovers the store from it, and serves the socket until a signal.
"""

import contextlib
import logging
import signal
import sys
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path

import zmq

from rl_async import tracing
from rl_async.configs.derived import redis_of
from rl_async.configs.load import load_resolved
from rl_async.configs.schema.run import RunConfig, SqliteConfig
from rl_async.errors import ConfigError, JournalError
from rl_async.files import make_durable_folder
from rl_async.messages import Task
from rl_async.process.allocation import collect_rarely, reuse_freed_memory
from rl_async.process.http_server import exposed
from rl_async.process.role import add_run, heeded, role_parser, run_role
from rl_async.recording import Recording, task_of
from rl_async.transfer_queue.admission import QueueSettings
from rl_async.transfer_queue.auth import Authenticator, client_keys, is_file, server_keys
from rl_async.transfer_queue.chat_messages import Schemas, read_schemas
from rl_async.transfer_queue.dataset import NO_SCHEMAS, make_sources
from rl_async.transfer_queue.delivery import GrowingTaskList, TaskSource
from rl_async.transfer_queue.journal import Journal, MemoryJournal
from rl_async.transfer_queue.ledger import Ledger
from rl_async.transfer_queue.server import JournalRecorder, QueueLimits, QueueServer, bind, recover, serve_requests
from rl_async.transfer_queue.store import Feed, Store
from rl_async.transfer_queue.telemetry import QueueCollector, QueueTraces, traced_samples

log = logging.getLogger("rl_async.queue")


def run_queue(run: Path, address: str, *, relaunched: bool, stopped: threading.Event) -> None:
    """Serve the run's queue until ``stopped``.

    Raises UserError for a bad config, bad data, missing keys, a taken port, or a journal that cannot be read or
    written.
    """
    config = load_resolved(run / "config.yaml")
    keys = server_keys(config, run)
    source, eval_tasks = tasks_of(config, read_schemas(run))
    with (
        contextlib.closing(open_journal(config, run)) as journal,
        contextlib.closing(Ledger(run / "ledger.jsonl")) as ledger,
        zmq.Context() as context,
        contextlib.ExitStack() as stack,
    ):
        feed = Feed(journal.append, ledger.append)
        store = Store(QueueSettings.of(config), source, eval_tasks, feed)
        within = config.queue.journal == "sqlite" and not (config.queue.sqlite and config.queue.sqlite.folder)
        now = time.monotonic()
        count = recover(store, journal, ledger, now, clients_remain=not relaunched, within=within)
        log.info("%d transitions in the journal (%s)", count, journal.run_id)
        if relaunched:
            store.relaunch()
        recorder = JournalRecorder(store, journal, ledger)
        recorder.flush()
        stack.enter_context(tracing.traced(config.tracking.otlp_endpoint, run, "queue", config.tracking.traces_per_s))
        if tracing.now():
            store.book.traced = traced_samples
            feed.subscribe(QueueTraces())
        limits, auth = QueueLimits.of(config), None
        if not is_file(address):
            auth = stack.enter_context(Authenticator(context, keys.allowed, lambda: store.count("denied")))
        with bind(context, address, keys=keys, limits=limits) as socket, _metrics(config, run, address):
            log.info("listening on %s, closed to clients without a key", address)
            server = QueueServer(store, journal, feed, limits=limits, allowed=keys.allowed)
            collect_rarely()
            serve_requests(socket, server, recorder.flush, stopped.is_set, auth=auth)
    log.info("ended")


def _metrics(config: RunConfig, run: Path, address: str) -> AbstractContextManager[None]:
    """Answer Prometheus while the block runs, if ``tracking.prometheus`` is set."""
    if not config.tracking.prometheus:
        return contextlib.nullcontext()
    return exposed(True, run, "queue", "queue", QueueCollector(address, client_keys(config, run, "reader")))


def tasks_of(config: RunConfig, schemas: Schemas = NO_SCHEMAS) -> tuple[TaskSource, list[Task]]:
    """Return the training tasks, and the held-out tasks of one evaluation; a replay has recorded groups alone."""
    if config.rollout.replay:
        needed = config.trainer.steps * config.data.train_batch_groups
        return GrowingTaskList([task_of(group) for group in Recording(config.rollout.replay).groups[:needed]]), []
    return make_sources(config, schemas)


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and serve the queue; return the exit code."""
    parser = role_parser("transfer_queue", __doc__)
    add_run(parser)
    parser.add_argument("--address", required=True, help="where to listen: tcp://IP:PORT or ipc://FILE")
    parser.add_argument(
        "--relaunched",
        action="store_true",
        help="all other processes of the run are new, too: forget leases and engines of those that the journal knows",
    )
    arguments = parser.parse_args(argv)
    reuse_freed_memory()
    stopped = threading.Event()
    for number in heeded(signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    return run_role(
        "queue", lambda: run_queue(arguments.run, arguments.address, relaunched=arguments.relaunched, stopped=stopped)
    )


def open_journal(config: RunConfig, run: Path) -> Journal:
    """The journal that ``queue.journal`` names, held by this process alone.

    Raises JournalError if another process holds it, or if it cannot be read or written; ConfigError without the package
    that it needs.
    """
    match config.queue.journal:
        case "sqlite":
            from rl_async.transfer_queue.journal import SqliteJournal

            sqlite = config.queue.sqlite or SqliteConfig()
            folder = Path(sqlite.folder) / config.name if sqlite.folder else run
            try:
                make_durable_folder(folder)
            except OSError as error:
                raise JournalError(f"queue.sqlite.folder: {folder}: {error.strerror}") from error
            return SqliteJournal(folder, config.name, sqlite.synchronous)
        case "redis":
            try:
                from rl_async.transfer_queue.redis_journal import RedisJournal
            except ModuleNotFoundError as error:
                if error.name != "redis":
                    raise
                raise ConfigError("queue.journal=redis needs a package: pip install 'rl-async[redis]'") from error
            redis = redis_of(config)
            return RedisJournal(redis.url, config.name, replicas=redis.replicas)
    return MemoryJournal(config.name)


if __name__ == "__main__":
    sys.exit(main())
