"""Publishes weights: from the trainer's call to engines that serve a version, with late engines caught up.

    phase (on every rank) ──> WeightCoordinator (rank 0: a thread with an event loop) ──> Fleet ──> wave.py

``Fleet`` keeps every registered engine at the published version: it publishes, brings late engines up to date and cuts
off failed ones; a lock serialises publication, suspension and catch-up. ``WeightCoordinator`` is the trainer's blocking
interface to it. A phase says how training and generation share devices: side by side; in turns; or both, with further
engines on devices that the trainer lends. The trainer calls a phase and never asks which.

before_train ──> train ──> export the weights ──> after_train        on every rank, in this order, every step
"""

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import wait
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeVar

from rl_async.concurrency import Overdue, in_daemon_thread, opened_in_thread, to_the_end, within
from rl_async.configs.schema.trainer import WeightSyncConfig
from rl_async.errors import RlAsyncError, TrainerReplaced, WeightSyncError
from rl_async.messages import EngineRecord, Version
from rl_async.weight_sync import buckets as adapters
from rl_async.weight_sync import wave
from rl_async.weight_sync.buckets import Bucket, deltas, numbered
from rl_async.weight_sync.protocol import EngineControl, EngineDirectory, Hold, SyncReport
from rl_async.weight_sync.sender import RankShards, RankShipment
from rl_async.weight_sync.transports import disk
from rl_async.weight_sync.transports.interface import TRANSPORTS, Sender, SenderSetup, Transport
from rl_async.weight_sync.wave import CUT_OFF, BucketShipment, EngineFailed, FleetMember, WaveOutcome

log = logging.getLogger("rl_async.weight_sync")

T = TypeVar("T")

Weights = Sequence[Bucket] | RankShards  # gathered here, or where they are
NoteStage = Callable[[str, str, str], None]  # engine, version, stage

POLL_S = 5.0  # longest delay before a change of the registry is noticed if its notification is missed
RETRY_S = 1.0


class Fleet:
    """Keeps every registered engine at the last published version.

    ``sync`` names its transport (not auto) and, for disk, the folder, in which each group of engines gets a folder of
    its own. ``sync.timeout_s`` is the deadline of each request to an engine; transfers get half of it, so an engine
    that only waits for a dead peer still answers in time. ``engine_wait_s`` is how long a publication waits for a first
    engine, ``host`` the address of this process as engines reach it, ``stores`` the folder in whose files they meet it
    instead if they are on its machine. ``note`` is told each stage that an update of an
    engine enters, with its id and the version; empty: the update is over. ``shares`` says which engines are on the
    trainer's devices.
    """

    def __init__(
        self,
        directory: EngineDirectory,
        connect: Callable[[EngineRecord], EngineControl],
        sync: WeightSyncConfig,
        engine_wait_s: float,
        host: str = "127.0.0.1",
        note: NoteStage = lambda engine, version, stage: None,
        shares: Callable[[EngineRecord], bool] = lambda record: True,
        stores: Path | None = None,
    ) -> None:
        assert sync.transport != "auto", "the caller resolves the transport"
        self._sync, self._timeout_s, self._host, self._stores = sync, sync.timeout_s, host, stores
        self._transport: Transport = TRANSPORTS[sync.transport]
        self._hold: Hold = "stage" if sync.staged else "keep" if sync.delta else "no"
        if sync.transport == "disk":
            disk.clear(Path(sync.folder))
        self._directory, self._connect, self._engine_wait_s = directory, connect, engine_wait_s
        self._note, self._shares = note, shares
        self._lock = asyncio.Lock()
        self._catching_up: asyncio.Task[None] | None = None
        self._before_late = 0  # publications and the like that wait for the lock or have it
        self._members: dict[str, FleetMember] = {}
        self._revision = -1
        self._version: Version | None = None  # the last one published, kept with its buckets for late engines
        self._buckets: Sequence[Bucket] = ()
        self._base: Version | None = None  # while publishing: engines that hold this version need only ``_deltas``
        self._deltas: Sequence[Bucket] = ()  # deltas against ``_base``, or adapters without their base
        self._shards: RankShards | None = None  # what is sent instead of ``_buckets``, if the ranks send by themselves
        self._sent = 0  # bytes of the latest successful transfer
        self._suspended = self._deferred = False
        self._groups: dict[tuple[str, ...], Sender | RankShipment] = {}  # by engine ids, reused while these stay
        self._generations = itertools.count()

    async def publish(self, version: Version, weights: Weights) -> SyncReport:
        """Bring all registered engines to ``version``; suspended ones wake up. Those that fail are cut off.

        Raises WeightSyncError when no engine took the weights within ``engine_wait_s``. Raises TrainerReplaced when an
        engine or the directory serves a newer trainer, and RanksLost when a rank that sends is gone; no engine is cut
        off then.
        """
        async with self._first():
            self._suspended = False
            return await self._publish(version, weights)

    async def publish_beside(self, version: Version, weights: Weights) -> SyncReport:
        """Bring the engines that are not suspended to ``version``; otherwise as ``publish``."""
        async with self._first():
            return await self._publish(version, weights)

    @asynccontextmanager
    async def _first(self) -> AsyncIterator[None]:
        """Hold the lock, before late engines; those that are being updated stay paused until the next publication."""
        self._before_late += 1
        try:
            if self._catching_up is not None:
                self._catching_up.cancel()
            async with self._lock:
                yield
        finally:
            self._before_late -= 1

    async def _publish(self, version: Version, weights: Weights) -> SyncReport:
        began = time.monotonic()
        self._deferred = False
        await self._take(version, weights)
        done, failures, waited = await self._bring_up_all(began + self._engine_wait_s)
        self._base, self._deltas = None, ()
        if self._shards is not None:
            await _in_thread(self._shards.seal)
        engines = [member.engine_id for member in done]
        await self._directory.publish(version, engines)
        alone = [member for member in done if not self._shares(member.record)]  # the others paused for a whole step
        return SyncReport(
            version=version,
            seconds=time.monotonic() - began,
            waiting_seconds=waited,
            pause_seconds=max(member.pause_seconds for member in alone or done),
            nbytes=self._sent,
            engines=engines,
            failures=[str(failure) for failure in failures],
        )

    async def suspend(self) -> None:
        """Pause the engines on the trainer's devices, and release their memory until the next ``publish``.

        Their requests move to the other engines; without any they are kept.
        """
        async with self._first():
            self._suspended = True
            await self._refresh()
            await self._put_to_sleep()

    async def defer_late(self) -> None:
        """Bring no late engine up to date before the next publication; those under way are brought to their end.

        What they would be served from may change then.
        """
        async with self._lock:
            self._deferred = True

    async def keep_caught_up(self) -> None:
        """Bring engines that register late to the last published weights.

        Consumes changes of the registry. Produces engines at the published version, confirmed to the registry. Waits
        for a change (deadline: POLL_S) and for the lock. Unblocked by the launcher registering an engine. Runs until
        cancelled; an error is logged with its engine and phase, and the loop continues. TrainerReplaced ends it.
        """
        revision = -1
        while True:
            try:
                revision = (await self._directory.engines(after=revision, wait_s=POLL_S)).revision
                await self._catch_up()
            except TrainerReplaced:
                raise
            except RlAsyncError as error:
                log.error("bringing late engines up to date: %s: %s", type(error).__name__, error)
                await asyncio.sleep(RETRY_S)

    async def idle(self, timeout_s: float) -> None:
        """Wait until no engine is being updated, at most ``timeout_s``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._lock:
                pass

    async def close(self) -> None:
        """Close the connections to the engines; the engines keep serving."""
        self._close_groups()
        for member in self._members.values():
            await member.control.close()
        self._members.clear()

    async def _put_to_sleep(self) -> None:
        """Suspend the engines on the trainer's devices that are awake.

        If there are others, requests are given up, with their tokens; those that still come move with the registry.
        """
        here = [member for member in self._members.values() if self._shares(member.record)]
        if len(here) < len(self._members):
            here, failures = await wave.each(here, lambda member: wave.drain(member, self._timeout_s))
            await self._cut_off(failures)
            await self._directory.withdraw([member.engine_id for member in here])
        _, failures = await wave.each(here, lambda member: wave.suspend(member, self._timeout_s))
        await self._cut_off(failures)

    def _awake(self) -> list[FleetMember]:
        return [member for member in self._members.values() if not (self._suspended and self._shares(member.record))]

    async def _take(self, version: Version, weights: Weights) -> None:
        """Make these the weights to send, and prepare the smaller form for engines that hold the previous version."""
        self._base, self._deltas = None, ()
        if isinstance(weights, RankShards):
            self._version, self._buckets, self._shards = version, (), weights
            await _in_thread(lambda: weights.begin(version, self._hold))
            return
        addressed = numbered(weights, version, self._hold)
        if self._version not in (None, version):
            base, old = self._version, self._buckets
            if added := adapters.adapter_buckets(addressed):
                self._base, self._deltas = base, added
            elif self._sync.delta:
                self._deltas = await _in_thread(lambda: list(deltas(addressed, old, str(base))))
                self._base = base
        self._version, self._buckets, self._shards = version, addressed, None

    async def _bring_up_all(self, deadline: float) -> tuple[list[FleetMember], list[EngineFailed], float]:
        """Update the registered engines, wave after wave; if none is left, those that register before ``deadline``.

        Returns the engines that took the weights, the failures, and the seconds in which no engine was registered.
        """
        failures: list[EngineFailed] = []
        waited = 0.0
        await self._refresh()
        ahead = self._without_slow(self._awake())
        while True:
            members, ahead = ahead or self._awake(), []
            if members and (done := await self._bring_up_in_time(members, failures)):
                return done, failures, waited
            idle_since = time.monotonic()
            left = deadline - idle_since
            if left <= 0:
                why = "; ".join(map(str, failures)) or "none was registered"
                raise WeightSyncError(f"no engine took version {self._version} within {self._engine_wait_s:g} s: {why}")
            await self._clear_devices()
            await self._refresh(after=self._revision, wait_s=min(left, POLL_S))
            waited += time.monotonic() - idle_since

    def _without_slow(self, members: list[FleetMember]) -> list[FleetMember]:
        """Return the members that a publication waits for: those that are slow catch up after it, while others serve.

        One that has not caught up for weight_sync.sync_timeout_s is waited for again, and then serves or is cut off.
        Engines on the trainer's devices hold memory that it needs back, and are always waited for.
        """
        now, late = time.monotonic(), []
        for member in wave.slow_ones(members):
            since = member.behind_since or now
            if self._shares(member.record) or now - since > self._sync.sync_timeout_s:
                continue
            member.behind_since = since
            late.append(member)
            log.warning(
                "version %s goes on without %s, which needs %.2g s for a request of an update, and catches up later",
                *(self._version, member.engine_id, member.times.request_s),
            )
        return [member for member in members if member not in late]

    async def _bring_up_in_time(self, members: list[FleetMember], failures: list[EngineFailed]) -> list[FleetMember]:
        """Update the members in waves, each of them within weight_sync.sync_timeout_s.

        One that is slow keeps the others of its group waiting. So at the deadline those that owe an answer are cut off
        if others have given theirs, and the rest has the same time once more, each alone. So have all if all owe one,
        or none does, as when this side was slow.
        """
        done: list[FleetMember] = []
        waves = _split(members, self._sync.waves)
        self._close_groups(but=waves)

        async def one_after_another() -> None:
            for group in waves:
                await self._bring_up(group, done, failures, keep_group=True)

        if await self._in_time(one_after_another()):
            return done
        rest = self._settle(members, done, failures)
        owing = [member for member in rest if member.unanswered]
        if len(owing) < len(rest) or len(rest) == 1:
            await self._fail_late(owing, failures)
            rest = self._settle(members, done, failures)
        if not rest:
            return done
        log.warning("version %s to each alone: %s", self._version, ", ".join(member.engine_id for member in rest))

        async def each_alone() -> None:
            await to_the_end(*(self._bring_up([m], done, failures, keep_group=False) for m in rest))

        if not await self._in_time(each_alone()):
            await self._fail_late(self._settle(members, done, failures), failures)
        return done

    async def _in_time(self, work: Awaitable[None]) -> bool:
        """Do the work; whether it was done within weight_sync.sync_timeout_s."""
        try:
            await within(self._sync.sync_timeout_s, work)
        except Overdue:
            return False
        return True

    def _settle(
        self, members: Sequence[FleetMember], done: list[FleetMember], failures: Sequence[EngineFailed]
    ) -> list[FleetMember]:
        """Add the members that serve the version to ``done``, and return those that neither do nor have failed."""
        failed = {failure.engine_id for failure in failures}
        done += [m for m in members if m not in done and m.serves(self._version) and m.engine_id not in failed]
        settled = failed | {member.engine_id for member in done}
        return [member for member in members if member.engine_id not in settled]

    async def _fail_late(self, late: Sequence[FleetMember], failures: list[EngineFailed]) -> None:
        why = f"not done within weight_sync.sync_timeout_s={self._sync.sync_timeout_s:g} s"
        found = [EngineFailed(member.engine_id, member.phase, why, lost=False) for member in late]
        await self._cut_off(found)
        failures += found

    async def _catch_up(self) -> None:
        async with self._lock:
            if self._version is None:
                return  # the next publication includes every engine
            await self._refresh()
            if self._suspended:
                await self._put_to_sleep()  # one that came meanwhile would take the trainer's memory
            if self._deferred:
                return
            late = [member for member in self._awake() if member.record.version != self._version]
            if late and not self._before_late:
                self._catching_up = asyncio.create_task(self._bring_up_late(late, self._version))
                try:
                    await asyncio.wait([self._catching_up])
                finally:
                    task, self._catching_up = self._catching_up, None
                    task.cancel()
                    await asyncio.wait([task])
                if not task.cancelled():
                    task.result()

    async def _bring_up_late(self, late: list[FleetMember], version: Version) -> None:
        """Update late engines together, and confirm each to the registry. A publication that begins cancels it."""
        for member in await self._bring_up_in_time(late, []):
            await self._directory.confirm(member.engine_id, version)
            log.info("%s caught up with version %s", member.engine_id, version)

    async def _bring_up(
        self, members: Sequence[FleetMember], done: list[FleetMember], failures: list[EngineFailed], *, keep_group: bool
    ) -> None:
        """Send the weights until each member serves them (and is in ``done``) or is cut off (and in ``failures``).

        The first attempt takes all members together that get the same bytes. If it lost some, the rest try once more
        together, in a new group. After that, or if the attempt failed without a clear culprit, each is updated alone,
        so that a failure is its own. Deltas are tried once, and so is what ranks keep on shared devices.
        """
        pending, silent = await wave.probe(members, self._timeout_s)
        if self._shards is not None:
            pending, mute = await wave.ask_needs(pending, self._shards.shapes, self._timeout_s)
            silent += mute
        await self._cut_off(silent)
        failures += silent
        together, rounds = True, 0
        while pending:
            if rounds:
                await self._clear_devices()
            alike = wave.alike(pending, self._base, sliced=self._shards is not None)
            waves = alike if together else [[member] for member in pending]
            outcomes = await to_the_end(*(self._one_wave(w, keep_group and together) for w in waves))
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
        """Update one group: connect if it is new, then transfer. A group that failed in any way is not reused."""
        ids = tuple(member.engine_id for member in members)
        group = self._groups.pop(ids, None) if keep_group else None
        if isinstance(group, RankShipment) and group.needs != members[0].places:
            group.close()
            group = None
        new = group is None
        if group is None:
            group = await self._new_group(members)
        outcome = WaveOutcome(sender_error=WeightSyncError("interrupted"))
        try:
            outcome = await self._through(group, members, new)
        finally:
            if keep_group and outcome.clean:
                self._groups[ids] = group
            else:
                group.close()
        for problem in (*outcome.failures, outcome.sender_error):
            if problem is not None:
                log.warning("version %s to %s: %s", self._version, ", ".join(ids), problem)
        return outcome

    async def _new_group(self, members: Sequence[FleetMember]) -> Sender | RankShipment:
        """Prepare to send to members that are alike: from every rank, or what was gathered here."""
        if self._shards is not None:
            shards, places = self._shards, members[0].places
            return await opened_in_thread(lambda: shards.shipment(len(members), places), "weights")
        workers, name = tuple(member.workers for member in members), f"weights-{next(self._generations)}"
        folder, nbytes = Path(self._sync.folder), self._sync.bucket_bytes
        timeout_s = self._timeout_s / 2
        setup = SenderSetup(workers, name, timeout_s, self._host, folder, nbytes, self._stores)
        return self._transport.sender(setup)

    async def _through(self, group: Sender | RankShipment, members: Sequence[FleetMember], new: bool) -> WaveOutcome:
        """Run one transfer; send deltas or adapters without their base if all members hold the base."""
        assert self._version is not None
        delta = self._base is not None and all(member.held == self._base for member in members)
        buckets = self._deltas if delta else self._buckets
        if new:
            met = await wave.connect(members, group, self._timeout_s)
            if not met.clean:
                return met
        shipment = group if isinstance(group, RankShipment) else BucketShipment(group, buckets)
        outcome = await wave.transfer(members, shipment, self._version, self._timeout_s, staged=self._sync.staged)
        outcome.delta = delta
        if outcome.done and isinstance(group, RankShipment):
            self._sent = group.nbytes
        elif outcome.done:
            self._sent = max(member.workers for member in members) * sum(bucket.nbytes for bucket in buckets)
        return outcome

    async def _culprits(self, members: Sequence[FleetMember], outcome: WaveOutcome) -> list[EngineFailed]:
        """Return the failures that are the engine's own fault.

        In a group of one every failure is the engine's own, unless a delta was sent. In a larger group it is only if
        the engine no longer answers, since an error that a live engine reports may come from a peer that died.
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
        """Bring the members up to date with the registry: connect to new engines, drop removed ones."""
        listing = await self._directory.engines(after=after, wait_s=wait_s)
        self._revision = listing.revision
        records = {record.engine_id: record for record in listing.engines}
        for engine_id in self._members.keys() - records.keys():
            await self._members.pop(engine_id).control.close()
        for engine_id, record in records.items():
            if engine_id in self._members:
                self._members[engine_id].record = record
            else:
                self._members[engine_id] = FleetMember(record, self._connect(record), note=self._noting(engine_id))

    def _noting(self, engine_id: str) -> Callable[[str], None]:
        return lambda stage: self._note(engine_id, str(self._version), stage)

    async def _cut_off(self, failures: Sequence[EngineFailed]) -> None:
        """Remove failed engines from the registry, so that no request reaches them; the launcher replaces them."""
        if failures:
            await self._clear_devices()
        for failure in failures:
            if failure.engine_id not in self._members:
                continue  # the deadline of the whole update passed while it was being cut off
            log.error("cut off: %s", failure)
            self._members[failure.engine_id].note(CUT_OFF)
            await self._directory.remove_engine(failure.engine_id, str(failure))
            await self._members.pop(failure.engine_id).control.close()

    async def _clear_devices(self) -> None:
        """Have what ranks keep on engines' devices leave them: an engine that starts takes all its memory at once."""
        if self._shards is not None:
            await _in_thread(self._shards.leave)

    def _close_groups(self, but: Sequence[Sequence[FleetMember]] = ()) -> None:
        """Close every kept group that is not among ``but``."""
        kept = {tuple(member.engine_id for member in group) for group in but}
        for ids in self._groups.keys() - kept:
            self._groups.pop(ids).close()


def _split(members: Sequence[FleetMember], waves: int) -> list[list[FleetMember]]:
    """Deal ``members`` to at most ``waves`` non-empty groups of nearly equal size."""
    return [group for i in range(waves) if (group := list(members[i::waves]))]


async def _in_thread(work: Callable[[], T]) -> T:
    return await asyncio.wrap_future(in_daemon_thread(work, "weights"))


START_S = 60.0
CLOSE_S = 2.0
FINISH_S = 20.0  # for the update of a late engine that is under way when the run is over
# How often the other ranks, which wait in a collective, are told that a call still goes on.
MEET_S = 1.0


class WeightCoordinator:
    """Publishes weights from rank 0 of the trainer, and keeps late engines caught up in the background.

    ``open_directory`` and ``connect`` are called on the coordinator's own event loop, because sockets belong to the
    loop on which they are created. ``sync``, ``engine_wait_s``, ``host``, ``note``, ``shares`` and ``stores`` are as
    for ``Fleet``. The constructor blocks until the directory is open and raises what opening it raised.

    A publication may take longer than a collective may. So ``meet`` is called with True every MEET_S while a call that
    all ranks make alike lasts, and with False at its end: the other ranks (``phases.IdleCoordinator``) meet this one.
    """

    def __init__(
        self,
        open_directory: Callable[[], AbstractAsyncContextManager[EngineDirectory]],
        connect: Callable[[EngineRecord], EngineControl],
        sync: WeightSyncConfig,
        engine_wait_s: float = 180.0,
        host: str = "127.0.0.1",
        note: NoteStage = lambda engine, version, stage: None,
        shares: Callable[[EngineRecord], bool] = lambda record: True,
        stores: Path | None = None,
        meet: Callable[[bool], object] = lambda more: None,
    ) -> None:
        self._meet = meet
        self._exits = AsyncExitStack()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weight-coordinator", daemon=True)
        self._thread.start()

        async def start() -> tuple[Fleet, asyncio.Task[None]]:
            directory = await self._exits.enter_async_context(open_directory())
            fleet = Fleet(directory, connect, sync, engine_wait_s, host, note, shares, stores)
            return fleet, asyncio.create_task(fleet.keep_caught_up(), name="catch-up")

        try:
            self._fleet, self._catching_up = self._wait(start(), START_S)
        except BaseException:
            self._stop_loop()
            raise

    def publish(self, version: Version, weights: Weights) -> SyncReport:
        """Bring all engines to ``version`` and record it in the directory; keep the weights for late engines.

        Engines that fail are cut off and named in the report. Raises WeightSyncError when none is left and none
        registers in time, QueueLost when the directory is gone, RanksLost when a rank that sends is. Each request to an
        engine has its own deadline.
        """
        self._check_catch_up()
        return self._with_ranks(self._fleet.publish(version, weights))

    def publish_beside(self, version: Version, weights: Weights) -> SyncReport:
        """Publish as ``publish`` does, but suspended engines sleep on."""
        self._check_catch_up()
        return self._with_ranks(self._fleet.publish_beside(version, weights))

    def suspend(self) -> None:
        """Pause the engines on the trainer's devices and release their memory until the next ``publish``."""
        self._check_catch_up()
        self._with_ranks(self._fleet.suspend())

    def defer_late(self) -> None:
        """Let late engines wait for the next publication, and one that is being updated end before this returns."""
        self._check_catch_up()
        self._with_ranks(self._fleet.defer_late())

    def finish(self) -> None:
        """Stop catching up, once the engine under way is up to date or after FINISH_S: the run is over."""

        async def stop() -> None:
            await self._fleet.idle(FINISH_S)
            self._catching_up.cancel()

        self._wait(stop())

    def close(self) -> None:
        """Stop catching up at once, and close the connections.

        The engines keep serving, but for one that was cut short: it holds mixed weights, and stays paused.
        """

        async def stop() -> None:
            self._catching_up.cancel()
            await asyncio.wait([self._catching_up])
            await self._fleet.close()
            await self._exits.aclose()

        try:
            self._wait(stop(), CLOSE_S)
        except TimeoutError:
            log.warning("the weight coordinator did not close within %g s and is left behind", CLOSE_S)
        self._stop_loop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_catch_up(self) -> None:
        """Raise TrainerReplaced if the catch-up loop has met it, WeightSyncError if a bug has ended the loop."""
        if not self._catching_up.done():
            return
        error = self._catching_up.exception()
        if isinstance(error, TrainerReplaced):
            raise error
        raise WeightSyncError("the task that updates late engines has ended unexpectedly") from error

    def _with_ranks(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for the work, and meet the other ranks meanwhile. After an error they are not met: this rank ends."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while wait([future], MEET_S).not_done:
                self._meet(True)
            result = future.result()
        finally:
            # Without effect unless this wait was interrupted.
            future.cancel()
        self._meet(False)
        return result

    def _wait(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        finally:
            future.cancel()  # no effect unless this wait was interrupted

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        with suppress(RuntimeError):  # still running: it is a daemon thread and ends with the process
            self._loop.close()


Mode = Literal["colocated", "disaggregated"]


class EngineUpdater(Protocol):
    """What a phase needs of the coordinator. All ranks call each method alike, and return when rank 0 has done it."""

    def publish(self, version: Version, weights: Weights) -> SyncReport:
        """Bring all engines to ``version``; suspended ones wake up and continue their requests."""
        ...

    def publish_beside(self, version: Version, weights: Weights) -> SyncReport:
        """Bring the engines to ``version`` that are not suspended."""
        ...

    def suspend(self) -> None:
        """Pause the engines on the trainer's devices, and take their device memory. Their requests move to others."""
        ...

    def defer_late(self) -> None:
        """Serve no late engine until the next publication; return when none is being served."""
        ...


class IdleCoordinator:
    """Stands in for the coordinator on every rank but 0, which has no engines to talk to: waits for rank 0.

    ``meet`` is a collective that returns on every rank whether rank 0 is still at it, so that rank 0 may take longer
    than a single collective may.
    """

    def __init__(self, meet: Callable[[bool], bool]) -> None:
        self._meet = meet

    def publish(self, version: Version, weights: Weights) -> SyncReport:
        """Wait until rank 0 has published; return an empty report."""
        self._until_rank_0_is_done()
        return SyncReport(
            version=version, seconds=0.0, waiting_seconds=0.0, pause_seconds=0.0, nbytes=0, engines=[], failures=[]
        )

    def publish_beside(self, version: Version, weights: Weights) -> SyncReport:
        """Wait until rank 0 has published; return an empty report."""
        return self.publish(version, weights)

    def suspend(self) -> None:
        """Wait until rank 0 has suspended the engines."""
        self._until_rank_0_is_done()

    def defer_late(self) -> None:
        """Wait until rank 0 serves no late engine."""
        self._until_rank_0_is_done()

    def _until_rank_0_is_done(self) -> None:
        while self._meet(False):
            pass


class Phase(Protocol):
    """One trainer step from the devices' point of view. All ranks call both methods alike."""

    def before_train(self) -> None:
        """Return when this rank may use its device for training. Idempotent."""
        ...

    def after_train(self, version: Version, weights: Weights) -> SyncReport:
        """Publish the weights, including the initial ones before any training.

        Raises what WeightCoordinator.publish raises.
        """
        ...


class Overlapped:
    """Engines and trainer have devices of their own: generation pauses only while weights are transferred."""

    def __init__(self, updater: EngineUpdater) -> None:
        self._updater = updater

    def before_train(self) -> None:
        """Do nothing: the trainer's devices are always its own."""

    def after_train(self, version: Version, weights: Weights) -> SyncReport:
        """Publish while the trainer's models stay on their devices."""
        return self._updater.publish(version, weights)


class TakeTurns:
    """Engines and trainer share devices.

        pause, sleep ──> onload ──> train ──> offload ──> wake(weights) ──> transfer ──> wake(kv_cache) ──> resume

    Requests in flight stay in their engines during training and continue with the new weights. ``offload`` is told
    whether the engines sleep: then the weights that travel may wait on the device until their caches wake.
    """

    def __init__(
        self,
        updater: EngineUpdater,
        barrier: Callable[[], None],
        onload: Callable[[], None],
        offload: Callable[[bool], None],
    ) -> None:
        self._updater, self._barrier, self._onload, self._offload = updater, barrier, onload, offload
        self._asleep = False  # whether the engines are, which they are not at the start

    def before_train(self) -> None:
        """Put the engines to sleep, then move the models onto the device.

        Every rank waits for rank 0, which alone knows when the engines sleep.
        """
        self._updater.suspend()
        self._onload()
        self._asleep = True

    def after_train(self, version: Version, weights: Weights) -> SyncReport:
        """Move the trainer's models off all devices; then the engines wake and take the weights.

        Buckets, which one rank has gathered, leave its device too: all the weights would be too much for it.
        """
        self._offload(self._asleep)
        self._asleep = False
        moved = weights if isinstance(weights, RankShards) else [bucket.offloaded() for bucket in weights]
        self._barrier()
        return self._updater.publish(version, moved)


class Lending:
    """Engines have devices of their own; further ones run on the trainer's devices while it waits for a batch.

        withdraw, pause, sleep the lent engines ──> onload ──> train ──> worth it?
            yes: serve no late engine ──> offload ──> publish to all; lent engines wake and join the pool
            no:  publish to the others; the trainer's models stay, and the lent engines sleep on

    It is worth it if the trainer's devices last idled for longer than the switch takes there and back. The way back is
    taken to be as long as the way there, which is measured. Rank 0 decides (``agree``).
    """

    def __init__(
        self,
        updater: EngineUpdater,
        turns: TakeTurns,
        agree: Callable[[bool], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._updater, self._turns, self._agree, self._clock = updater, turns, agree, clock
        self._lent = False
        self._switch_s = self._idle_s = 0.0
        self._published_at = clock()

    def before_train(self) -> None:
        """Take the devices back, if they are lent."""
        began = self._clock()
        self._idle_s = began - self._published_at
        if self._lent:
            self._turns.before_train()
            self._switch_s, self._lent = self._clock() - began, False

    def after_train(self, version: Version, weights: Weights) -> SyncReport:
        """Publish, and lend the devices if that is worth it.

        An engine of the trainer's own that came late may still be sent the weights before these, from copies on all
        ranks that offloading overwrites. No rank goes on before rank 0 has deferred it.
        """
        self._lent = self._agree(self._idle_s >= 2 * self._switch_s)
        if self._lent:
            self._updater.defer_late()
        publish = self._turns.after_train if self._lent else self._updater.publish_beside
        report = publish(version, weights)
        self._published_at = self._clock()
        return report


def shares_devices(mode: Mode) -> Callable[[EngineRecord], bool]:
    """Return which engines are on the trainer's devices: colocated all of them, else those that run on lent ones."""
    return (lambda record: True) if mode == "colocated" else (lambda record: record.is_lent)


def build_phase(
    mode: Mode,
    updater: EngineUpdater,
    *,
    lends: bool,
    agree: Callable[[bool], bool],
    barrier: Callable[[], None],
    onload: Callable[[], None],
    offload: Callable[[bool], None],
) -> Phase:
    """Return the phase of a mode, in which the trainer ``lends`` its devices or not. ``onload`` and ``offload`` move
    this rank's models; both must be idempotent. For what ``offload`` is told see ``TakeTurns``. ``agree`` returns what
    rank 0 gives it, on all ranks."""
    turns = TakeTurns(updater, barrier, onload, offload)
    if mode == "colocated":
        return turns
    return Lending(updater, turns, agree) if lends else Overlapped(updater)
