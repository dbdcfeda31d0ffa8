"""Going on from a journal: the store is brought to where it was, and the ledger to what the journal says."""

import msgspec

from rl_async.errors import JournalError
from rl_async.transfer_queue.journal import Journal
from rl_async.transfer_queue.ledger import Ledger
from rl_async.transfer_queue.store import Store


def recover(store: Store, journal: Journal, ledger: Ledger, now: float) -> int:
    """Replay the journal into a new store and complete the ledger; returns how many transitions there were.

    Raises JournalError if what was recorded makes no sense, DataError if the tasks are not those it was recorded with.
    """
    dump, count, transitions = journal.recover()
    ledger.follow(journal.run_id, count)
    try:
        store.recover(dump, ledger.catch_up(transitions), now)
    except (msgspec.MsgspecError, LookupError) as error:
        raise JournalError(
            f"the journal of {journal.run_id} does not fit this version of the queue ({type(error).__name__}: {error}"
            "); finish the run with the version that began it, or move the journal away and go on with --resume"
        ) from error
    return ledger.count


class Recorder:
    """Journal and ledger, flushed together, and the journal compacted when steps were retired."""

    def __init__(self, store: Store, journal: Journal, ledger: Ledger) -> None:
        self._store, self._journal, self._ledger = store, journal, ledger

    def flush(self) -> None:
        """Make durable what happened, then write it down for people."""
        self._journal.flush()
        self._ledger.flush()
        if self._journal.outgrown:
            self._journal.compact(self._store.dump())
