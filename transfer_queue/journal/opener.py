"""Opens the journal that a run's configuration names."""

from pathlib import Path

from rl_async.configs.schema.run import RunConfig
from rl_async.errors import ConfigError, JournalError
from rl_async.files import make_durable_folder
from rl_async.transfer_queue.journal.interface import Journal
from rl_async.transfer_queue.journal.memory import MemoryJournal


def open_journal(config: RunConfig, run: Path) -> Journal:
    """The journal that ``queue.journal`` names, held by this process alone.

    Raises JournalError if another process holds it, or if it cannot be read or written; ConfigError without the package
    that it needs.
    """
    match config.queue.journal:
        case "sqlite":
            from rl_async.transfer_queue.journal.sqlite import SqliteJournal

            folder = Path(config.queue.journal_folder) / config.name if config.queue.journal_folder else run
            try:
                make_durable_folder(folder)
            except OSError as error:
                raise JournalError(f"queue.journal_folder: {folder}: {error.strerror}") from error
            return SqliteJournal(folder, config.name, config.queue.sqlite_synchronous)
        case "redis":
            try:
                from rl_async.transfer_queue.journal.redis import RedisJournal
            except ModuleNotFoundError as error:
                if error.name != "redis":
                    raise
                raise ConfigError("queue.journal=redis needs a package: pip install 'rl-async[redis]'") from error
            return RedisJournal(config.queue.redis_url, config.name, replicas=config.queue.redis_replicas)
    return MemoryJournal(config.name)
