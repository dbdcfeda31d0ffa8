"""A cache of verdicts by a hash of the request: in memory, or in a file that all workers and a resumed run share."""

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rl_async.errors import UserError

T = TypeVar("T")
LOCK_S = 10.0  # another worker's write takes milliseconds


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A judge's ``score``, within the range that its prompt states, and its reason."""

    reason: str
    score: float


class Verdicts:
    """An SQLite table; ``path`` None: in memory. Raises UserError if the file is not an SQLite database.

    Its calls run in one thread: a write waits for the disk, and for other workers' writes.
    """

    def __init__(self, path: Path | None) -> None:
        self._thread = ThreadPoolExecutor(1, "verdicts")
        try:
            self._db = sqlite3.connect(
                path or ":memory:", timeout=LOCK_S, check_same_thread=False, isolation_level=None
            )
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("CREATE TABLE IF NOT EXISTS verdicts (request TEXT PRIMARY KEY, score REAL, reason TEXT)")
        except sqlite3.DatabaseError as error:
            raise UserError(f"{path}: cannot hold the judge's verdicts ({error}); delete it to ask again") from error

    async def get(self, request: str) -> Verdict | None:
        """Return the stored verdict on the request with that hash; None if there is none."""
        row = await self._run(self._get, request)
        return None if row is None else Verdict(score=row[0], reason=row[1])

    async def put(self, request: str, verdict: Verdict) -> None:
        """Store a verdict, unless the request already has one."""
        await self._run(self._put, request, verdict)

    async def close(self) -> None:
        """Close the database and end its thread."""
        await self._run(self._db.close)
        self._thread.shutdown()

    async def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _get(self, request: str) -> tuple[float, str] | None:
        found = self._db.execute("SELECT score, reason FROM verdicts WHERE request = ?", (request,)).fetchone()
        return None if found is None else (float(found[0]), str(found[1]))

    def _put(self, request: str, verdict: Verdict) -> None:
        self._db.execute("INSERT OR IGNORE INTO verdicts VALUES (?, ?, ?)", (request, verdict.score, verdict.reason))
