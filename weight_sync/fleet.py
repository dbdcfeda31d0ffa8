"""All engines and the weights they should serve: publication, catch-up of late engines, cutting off failed ones.

Runs on one event loop; a lock keeps publication, suspension and catch-up apart. ``coordinator.py`` gives it a thread.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence

from rl_async.errors import RlAsyncError, WeightSyncError
from rl_async.messages import EngineRecord, Version
from rl_async.weight_sync import wave
from rl_async.weight_sync.buckets import Bucket
from rl_async.weight_sync.protocol import Backend, EngineControl, EngineDirectory, SyncReport
from rl_async.weight_sync.transport import SENDERS, Sender
from rl_async.weight_sync.wave import EngineFailed, Member, Outcome

log = logging.getLogger("rl_async.weight_sync")

POLL_S = 5.0  # the longest that a change of the registry waits for us, should its notification be missed
RETRY_S = 1.0


class Fleet:
    """Keeps every registered engine at the last published version.

    ``timeout_s`` is the deadline of each request to an engine; transfers get half of it, so that an engine which only
    waits for a dead peer still answers in time. ``engine_wait_s`` is how long a publication waits for a first engine.
    """

    def __init__(
        self,
        directory: EngineDirectory,
        connect: Callable[[EngineRecord], EngineControl],
        transport: Backend,
        timeout_s: float,
        engine_wait_s: float,
    ) -> None:
        self._directory, self._connect, self._transport = directory, connect, transport
        self._timeout_s, self._engine_wait_s = timeout_s, engine_wait_s
        self._lock = asyncio.Lock()
        self._members: dict[str, Member] = {}
        self._revision = -1
        self._version: Version | None = None  # the last one published, kept with its buckets for late engines
        self._buckets: Sequence[Bucket] = ()
        self._suspended = False
        self._group: tuple[list[str], Sender] | None = None  # its members in order; reused while they stay the same
        self._generations = itertools.count()

    async def publish(self, version: Version, buckets: Sequence[Bucket]) -> SyncReport:
        """Bring all registered engines to ``version``; those that fail are cut off.

        Raises WeightSyncError when no engine took the weights within ``engine_wait_s``.
        """
        began = time.monotonic()
        async with self._lock:
            self._version, self._buckets, self._suspended = version, buckets, False
            done, failures = await self._bring_up_all(began + self._engine_wait_s)
            engines = [member.engine_id for member in done]
            await self._directory.publish(version, engines)
        return SyncReport(
            version=version,
            seconds=time.monotonic() - began,
            pause_seconds=max(member.pause_seconds for member in done),
            nbytes=sum(bucket.nbytes for bucket in buckets),
            engines=engines,
            failures=[str(failure) for failure in failures],
        )

    async def suspend(self) -> None:
        """Pause all engines, keeping their requests, and take their device memory, until the next publication."""
        async with self._lock:
            self._suspended = True
            await self._refresh()
            members = list(self._members.values())
            _, failures = await wave.each(members, lambda member: wave.suspend(member, self._timeout_s))
            await self._cut_off(failures)

    async def keep_caught_up(self) -> None:
        """Give the last published weights to engines that come late.

        Consumes changes of the registry. Produces engines at the published version, confirmed to the registry. Waits
        for a change (deadline: POLL_S) and for the lock. Unblocked by the launcher registering an engine. Runs until
        cancelled; an error names its engine and phase in the log, and the loop goes on.
        """
        revision = -1
        while True:
            try:
                revision = (await self._directory.engines(after=revision, wait_s=POLL_S)).revision
                await self._catch_up()
            except RlAsyncError as error:
                log.error("catch-up: %s: %s", type(error).__name__, error)
                await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """Close the connections to the engines; the engines keep serving."""
        self._take_group([])
        for member in self._members.values():
            await member.control.close()
        self._members.clear()

    async def _bring_up_all(self, deadline: float) -> tuple[list[Member], list[EngineFailed]]:
        """All registered engines; if none is left, those that register before ``deadline``."""
        failures: list[EngineFailed] = []
        await self._refresh()
        while True:
            if self._members:
                done, failed = await self._bring_up(list(self._members.values()), keep_group=True)
                failures += failed
                if done:
                    return done, failures
            left = deadline - time.monotonic()
            if left <= 0:
                why = "; ".join(map(str, failures)) or "none was registered"
                raise WeightSyncError(f"no engine took version {self._version} in {self._engine_wait_s:g} s: {why}")
            await self._refresh(after=self._revision, wait_s=min(left, POLL_S))

    async def _catch_up(self) -> None:
        async with self._lock:
            if self._version is None or self._suspended:
                return  # the publication to come includes every engine
            await self._refresh()
            late = [member for member in self._members.values() if member.record.version != self._version]
            for member in late:
                done, _ = await self._bring_up([member], keep_group=False)
                if done:
                    await self._directory.confirm(member.engine_id, self._version)
                    log.info("%s caught up with version %s", member.engine_id, self._version)

    async def _bring_up(
        self, members: Sequence[Member], *, keep_group: bool
    ) -> tuple[list[Member], list[EngineFailed]]:
        """Send the weights until each member serves them or is cut off.

        First all together. If some were lost, the others together again in a new group. After that, or if nobody
        stands out as the culprit, each alone: whoever fails then has failed by itself.
        """
        pending, failures = await wave.probe(members, self._timeout_s)
        await self._cut_off(failures)
        done: list[Member] = []
        together, rounds = True, 0
        while pending:
            waves = [pending] if together else [[member] for member in pending]
            outcomes = await asyncio.gather(*(self._one_wave(w, keep_group and together) for w in waves))
            culprits = [f for w, outcome in zip(waves, outcomes) for f in await self._culprits(w, outcome)]
            await self._cut_off(culprits)
            failures += culprits
            finished = [member for outcome in outcomes for member in outcome.done]
            done += finished
            settled = {member.engine_id for member in finished} | {failure.engine_id for failure in culprits}
            pending = [member for member in pending if member.engine_id not in settled]
            together = bool(culprits) and rounds == 0
            rounds += 1
        return done, failures

    async def _one_wave(self, members: Sequence[Member], keep_group: bool) -> Outcome:
        """Connect if the group is new, then transfer. A group that failed in any way is never used again."""
        assert self._version is not None
        ids = [member.engine_id for member in members]
        sender = self._take_group(ids) if keep_group else None
        outcome = Outcome()
        if sender is None:
            name = f"weights-{next(self._generations)}"
            sender = SENDERS[self._transport](len(members), name, self._timeout_s / 2)
            outcome = await wave.connect(members, sender, self._timeout_s)
        if outcome.clean:
            outcome = await wave.transfer(members, sender, self._buckets, self._version, self._timeout_s)
        for problem in (*outcome.failures, outcome.sender_error):
            if problem is not None:
                log.warning("version %s to %s: %s", self._version, ", ".join(ids), problem)
        if keep_group and outcome.clean:
            self._group = (ids, sender)
        else:
            sender.close()
        return outcome

    async def _culprits(self, members: Sequence[Member], outcome: Outcome) -> list[EngineFailed]:
        """The failures for which the engine itself answers.

        Alone with the sender every failure is its own. Among others it is if the engine no longer answers: an error
        that a living engine reports may come from a peer that died.
        """
        if len(members) == 1:
            if outcome.failures or outcome.done:
                return outcome.failures
            return [EngineFailed(members[0].engine_id, "transfer", f"{outcome.sender_error}", lost=False)]
        silent = {failure.engine_id for failure in outcome.failures if failure.lost}
        suspects = {failure.engine_id for failure in outcome.failures} - silent
        _, dead = await wave.probe([m for m in members if m.engine_id in suspects], self._timeout_s)
        silent |= {failure.engine_id for failure in dead}
        return [failure for failure in outcome.failures if failure.engine_id in silent]

    async def _refresh(self, after: int = -1, wait_s: float = 0.0) -> None:
        """Make the members those of the registry."""
        listing = await self._directory.engines(after=after, wait_s=wait_s)
        self._revision = listing.revision
        records = {record.engine_id: record for record in listing.engines}
        for engine_id in self._members.keys() - records.keys():
            await self._members.pop(engine_id).control.close()
        for engine_id, record in records.items():
            if engine_id in self._members:
                self._members[engine_id].record = record
            else:
                self._members[engine_id] = Member(record, self._connect(record))

    async def _cut_off(self, failures: Sequence[EngineFailed]) -> None:
        """Remove failed engines from the registry, so that nobody asks them again; the launcher replaces them."""
        for failure in failures:
            log.error("cut off: %s", failure)
            member = self._members.pop(failure.engine_id)
            await self._directory.remove_engine(failure.engine_id, str(failure))
            await member.control.close()

    def _take_group(self, ids: list[str]) -> Sender | None:
        """The kept group if it is one of exactly these members; any other is closed."""
        kept, self._group = self._group, None
        if kept is not None and kept[0] != ids:
            kept[1].close()
            return None
        return kept[1] if kept is not None else None
