"""Recovery from a journal: restores the store, and completes the ledger by what the journal says."""

import time
from collections.abc import Callable, Iterable, Iterator

from rl_async.errors import JournalError
from rl_async.transfer_queue.journal.interface import Journal
from rl_async.transfer_queue.reports.ledger import Ledger
from rl_async.transfer_queue.state.store import Store
from rl_async.transfer_queue.state.transitions import Transition
from rl_async.undecodable import UNDECODABLE

SLOWEST_OF_S = 60.0


def recover(
    store: Store, journal: Journal, ledger: Ledger, now: float, *, clients_remain: bool = False, within: bool = False
) -> int:
    """Replay the journal into a new store and complete the ledger; returns how many transitions there were.

    The ledger is on the disk before the journal records anything more: without its name there, nothing would go on. A
    journal that is ``within`` the run's folder is this run's: a lost ledger is written again from it.

    Raises JournalError if what was recorded makes no sense, is another run's of the same name, or ends before the
    ledger does and ``clients_remain`` who were told what is lost, or if the ledger is lost and the journal no longer
    has all that it said; DataError if the tasks are not those it was recorded with.
    """
    dump, dumped, transitions = journal.recover()
    lost = ledger.is_empty and within
    if lost and dump:
        raise JournalError(
            "ledger.jsonl is lost, and the journal no longer has the beginning of what it said, which the audit needs: "
            "put the file back, or move the journal away and continue from the newest checkpoint with --resume"
        )
    known = ledger.follow(journal.run_id, dumped) or lost
    try:
        recorded = _of_this_run(dump, transitions, known, journal.run_id)
        store.recover(dump, ledger.catch_up(recorded, may_cut=not clients_remain), now)
    except (*UNDECODABLE, LookupError, ValueError) as error:
        raise JournalError(
            f"the journal of {journal.run_id} does not fit this version of the queue ({type(error).__name__}: {error}"
            "); finish the run with the version that began it, or move the journal away and continue with --resume"
        ) from error
    ledger.force()
    return ledger.count


def _of_this_run(dump: bytes, transitions: Iterable[Transition], known: bool, run_id: str) -> Iterator[Transition]:
    """The transitions; raises JournalError if there are any and the ledger never followed this journal."""
    empty = not dump
    for transition in transitions:
        empty = False
        if known:
            yield transition
    if not empty and not known:
        raise JournalError(
            f"the journal is that of {run_id}, which ledger.jsonl in this run folder does not mention: is it "
            "another run of the same name? Choose another name, or move that journal away (a run that moves to another "
            "host takes its folder along)"
        )


class JournalRecorder:
    """Flushes journal and ledger together, and compacts the journal when it has outgrown the state."""

    def __init__(
        self, store: Store, journal: Journal, ledger: Ledger, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._journal, self._ledger, self._clock = store, journal, ledger, clock
        self._slowest_at = -SLOWEST_OF_S

    def flush(self) -> None:
        """Make durable what happened, then write it down for people. The status has the slowest flush of a while."""
        began = self._clock()
        self._flush()
        now = self._clock()
        if now - began >= self._store.flush_s or now - self._slowest_at >= SLOWEST_OF_S:
            self._store.flush_s, self._slowest_at = now - began, now

    def _flush(self) -> None:
        self._journal.flush()
        self._ledger.flush()
        if self._journal.outgrown:
            self._ledger.compacting()
            self._journal.compact(self._store.dump())
