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
from rl_async.threads import in_daemon_thread
from rl_async.weight_sync import wave
from rl_async.weight_sync.buckets import adapters
from rl_async.weight_sync.buckets.buckets import Bucket
from rl_async.weight_sync.buckets.delta import deltas
from rl_async.weight_sync.buckets.numbering import numbered
from rl_async.weight_sync.options import PLAIN, SyncOptions
from rl_async.weight_sync.protocol import Backend, EngineControl, EngineDirectory, SyncReport
from rl_async.weight_sync.transports import disk
from rl_async.weight_sync.transports.interface import SENDERS, Sender
from rl_async.weight_sync.wave import EngineFailed, FleetMember, WaveOutcome

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
        options: SyncOptions = PLAIN,
    ) -> None:
        self._options = options
        if transport == "disk":
            disk.clear(options.folder)
        self._directory, self._connect, self._transport = directory, connect, transport
        self._timeout_s, self._engine_wait_s = timeout_s, engine_wait_s
        self._lock = asyncio.Lock()
        self._members: dict[str, FleetMember] = {}
        self._revision = -1
        self._version: Version | None = None  # the last one published, kept with its buckets for late engines
        self._buckets: Sequence[Bucket] = ()
        self._base: Version | None = None  # during a publication: who holds it needs the following alone
        self._deltas: Sequence[Bucket] = ()  # or adapters
        self._sent = 0  # bytes, in the latest transfer that went well
        self._suspended = False
        self._groups: dict[tuple[str, ...], Sender] = {}  # by members in order; reused while they stay the same
        self._generations = itertools.count()

    async def publish(self, version: Version, buckets: Sequence[Bucket]) -> SyncReport:
        """Bring all registered engines to ``version``; those that fail are cut off.

        Raises WeightSyncError when no engine took the weights within ``engine_wait_s``.
        """
        began = time.monotonic()
        async with self._lock:
            await self._take(version, buckets)
            self._suspended = False
            done, failures, waited = await self._bring_up_all(began + self._engine_wait_s)
            self._base, self._deltas = None, ()
            engines = [member.engine_id for member in done]
            await self._directory.publish(version, engines)
        return SyncReport(
            version=version,
            seconds=time.monotonic() - began,
            waiting_seconds=waited,
            pause_seconds=max(member.pause_seconds for member in done),
            nbytes=self._sent,
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
        self._close_groups()
        for member in self._members.values():
            await member.control.close()
        self._members.clear()

    async def _take(self, version: Version, buckets: Sequence[Bucket]) -> None:
        """Make these the weights to send; where some engine may hold the last ones, adapters alone, or deltas."""
        addressed = numbered(buckets, version, self._options.hold)
        self._base, self._deltas = None, ()
        if self._version not in (None, version):
            base, old = self._version, self._buckets
            if added := adapters.adapter_buckets(addressed):
                self._base, self._deltas = base, added
            elif self._options.delta:
                self._deltas = await asyncio.wrap_future(
                    in_daemon_thread(lambda: list(deltas(addressed, old, str(base))), "weight-deltas")
                )
                self._base = base
        self._version, self._buckets = version, addressed

    async def _bring_up_all(self, deadline: float) -> tuple[list[FleetMember], list[EngineFailed], float]:
        """All registered engines, wave after wave; if none is left, those that register before ``deadline``.

        Returns who took the weights, who failed, and the seconds in which nobody was there.
        """
        failures: list[EngineFailed] = []
        waited = 0.0
        await self._refresh()
        while True:
            if self._members:
                done = await self._bring_up_in_time(list(self._members.values()), failures)
                if done:
                    return done, failures, waited
            alone = time.monotonic()
            left = deadline - alone
            if left <= 0:
                why = "; ".join(map(str, failures)) or "none was registered"
                raise WeightSyncError(f"no engine took version {self._version} in {self._engine_wait_s:g} s: {why}")
            await self._refresh(after=self._revision, wait_s=min(left, POLL_S))
            waited += time.monotonic() - alone

    async def _bring_up_in_time(self, members: list[FleetMember], failures: list[EngineFailed]) -> list[FleetMember]:
        """The members in waves, one after another. Those that are not done at the deadline are cut off."""
        done: list[FleetMember] = []
        waves = _split(members, self._options.waves)
        self._close_groups(but=waves)
        try:
            async with asyncio.timeout(self._options.sync_timeout_s):
                for group in waves:
                    await self._bring_up(group, done, failures, keep_group=True)
        except TimeoutError:
            why = f"not done within weight_sync.sync_timeout_s={self._options.sync_timeout_s:g} s"
            settled = {m.engine_id for m in done} | {failure.engine_id for failure in failures}
            late = [EngineFailed(m.engine_id, m.phase, why, lost=False) for m in members if m.engine_id not in settled]
            await self._cut_off(late)
            failures += late
        return done

    async def _catch_up(self) -> None:
        async with self._lock:
            if self._version is None or self._suspended:
                return  # the publication to come includes every engine
            await self._refresh()
            late = [member for member in self._members.values() if member.record.version != self._version]
            for member in late:
                done: list[FleetMember] = []
                await self._bring_up([member], done, [], keep_group=False)
                if done:
                    await self._directory.confirm(member.engine_id, self._version)
                    log.info("%s caught up with version %s", member.engine_id, self._version)

    async def _bring_up(
        self, members: Sequence[FleetMember], done: list[FleetMember], failures: list[EngineFailed], *, keep_group: bool
    ) -> None:
        """Send the weights until each member serves them (and is in ``done``) or is cut off (and in ``failures``).

        First all together, who holds the base of the deltas apart from who does not. If some were lost, the others
        together again in a new group. After that, or if nobody stands out as the culprit, each alone: whoever fails
        then has failed by itself. Deltas are tried once.
        """
        pending, silent = await wave.probe(members, self._timeout_s)
        await self._cut_off(silent)
        failures += silent
        together, rounds = True, 0
        while pending:
            waves = _by_base(pending, self._base) if together else [[member] for member in pending]
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

    async def _one_wave(self, members: Sequence[FleetMember], keep_group: bool) -> WaveOutcome:
        """Connect if the group is new, then transfer. A group that failed in any way is never used again."""
        ids = tuple(member.engine_id for member in members)
        sender = self._groups.pop(ids, None) if keep_group else None
        new = sender is None
        if sender is None:
            name = f"weights-{next(self._generations)}"
            sender = SENDERS[self._transport](len(members), name, self._timeout_s / 2, self._options)
        outcome = WaveOutcome(sender_error=WeightSyncError("interrupted"))
        try:
            outcome = await self._through(sender, members, new)
        finally:
            if keep_group and outcome.clean:
                self._groups[ids] = sender
            else:
                sender.close()
        for problem in (*outcome.failures, outcome.sender_error):
            if problem is not None:
                log.warning("version %s to %s: %s", self._version, ", ".join(ids), problem)
        return outcome

    async def _through(self, sender: Sender, members: Sequence[FleetMember], new: bool) -> WaveOutcome:
        """One transfer, of deltas or adapters if all members hold their base; its failure is held against nobody."""
        assert self._version is not None
        if new:
            met = await wave.connect(members, sender, self._timeout_s)
            if not met.clean:
                return met
        delta = self._base is not None and all(member.held == self._base for member in members)
        buckets = self._deltas if delta else self._buckets
        outcome = await wave.transfer(
            members, sender, buckets, self._version, self._timeout_s, staged=self._options.staged
        )
        outcome.delta = delta
        if outcome.done:
            self._sent = sum(bucket.nbytes for bucket in buckets)
        return outcome

    async def _culprits(self, members: Sequence[FleetMember], outcome: WaveOutcome) -> list[EngineFailed]:
        """The failures for which the engine itself answers.

        Alone with the sender every failure is its own. Among others it is if the engine no longer answers: an error
        that a living engine reports may come from a peer that died.
        """
        if len(members) == 1 and not outcome.delta:
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
                self._members[engine_id] = FleetMember(record, self._connect(record))

    async def _cut_off(self, failures: Sequence[EngineFailed]) -> None:
        """Remove failed engines from the registry, so that nobody asks them again; the launcher replaces them."""
        for failure in failures:
            if failure.engine_id not in self._members:
                continue  # the deadline of the whole update struck while it was being cut off
            log.error("cut off: %s", failure)
            await self._directory.remove_engine(failure.engine_id, str(failure))
            await self._members.pop(failure.engine_id).control.close()

    def _close_groups(self, but: Sequence[Sequence[FleetMember]] = ()) -> None:
        """Close the kept groups that are none of these."""
        kept = {tuple(member.engine_id for member in group) for group in but}
        for ids in self._groups.keys() - kept:
            self._groups.pop(ids).close()


def _split(members: Sequence[FleetMember], waves: int) -> list[list[FleetMember]]:
    """Deal ``members`` to at most ``waves`` non-empty groups of nearly equal size."""
    return [group for i in range(waves) if (group := list(members[i::waves]))]


def _by_base(members: Sequence[FleetMember], base: Version | None) -> list[list[FleetMember]]:
    """Separate members that hold ``base`` from those that do not; without a base, keep all in one group."""
    if base is None:
        return [list(members)]
    holders = [member for member in members if member.held == base]
    others = [member for member in members if member.held != base]
    return [group for group in (holders, others) if group]
