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

from rl_async.concurrency import Overdue, end_other_tasks, in_daemon_thread, opened_in_thread, to_the_end, within
from rl_async.configs.schema.trainer import WeightSyncConfig
from rl_async.errors import RlAsyncError, TrainerReplaced, WeightSyncError
from rl_async.messages import EngineRecord, Version
from rl_async.weight_sync import buckets as adapters
from rl_async.weight_sync import transports, wave
from rl_async.weight_sync.buckets import Bucket, deltas, numbered
from rl_async.weight_sync.protocol import EngineControl, EngineDirectory, Hold, SyncReport
from rl_async.weight_sync.sender import RankShards, RankShipment
from rl_async.weight_sync.transports import TRANSPORTS, Sender, SenderSetup, Transport
from rl_async.weight_sync.wave import CUT_OFF, BucketShipment, EngineFailed, FleetMember, WaveOutcome

log = logging.getLogger("rl_async.weight_sync")

T = TypeVar("T")

# Buckets are weights that this rank has gathered; shards stay on the ranks that hold them, which send by themselves.
Weights = Sequence[Bucket] | RankShards
# Takes an engine's id, the version and the stage that its update enters.
NoteStage = Callable[[str, str, str], None]
Mode = Literal["colocated", "disaggregated"]

# A change of the registry whose notification is missed is noticed after this time.
POLL_S = 5.0
RETRY_S = 1.0
START_S = 60.0
CLOSE_S = 2.0
# At the end of a run a late engine has this long to finish its update.
FINISH_S = 20.0
# The other ranks wait in a collective, so they are told this often that a call still goes on.
MEET_S = 1.0


# --- the fleet


class Fleet:
    """Keeps every registered engine at the last published version.

    ``sync`` names its transport (not auto). The disk transport creates a subfolder of ``sync.folder`` for each group of
    engines. ``sync.timeout_s`` is the deadline of each request to an engine; transfers get half of it, so an engine
    that only waits for a dead peer still answers in time. ``engine_wait_s`` is how long a publication waits for a first
    engine. ``host`` is the address of this process as engines reach it; engines on its machine meet it in files of the
    folder ``stores`` instead. ``note`` is called at each stage of an engine's update, and with an empty stage at its
    end. ``shares`` tells whether an engine is on the trainer's devices.
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
            transports.delete_files(Path(sync.folder))
        self._directory, self._connect, self._engine_wait_s = directory, connect, engine_wait_s
        self._note, self._shares = note, shares
        self._lock = asyncio.Lock()
        self._catching_up: asyncio.Task[None] | None = None
        # Calls of the trainer that hold the lock or wait for it. They go before late engines.
        self._before_late = 0
        self._members: dict[str, FleetMember] = {}
        self._revision = -1
        # The latest version and its weights are kept for late engines, either as buckets or as shards.
        self._version: Version | None = None
        self._buckets: Sequence[Bucket] = ()
        self._shards: RankShards | None = None
        # While publishing, engines that hold ``_base`` need only deltas against it, or adapters without their base.
        self._base: Version | None = None
        self._deltas: Sequence[Bucket] = ()
        # The most that the workers of one engine have received since a publication began.
        self._most_bytes = 0
        self._suspended = self._deferred = False
        # By engine ids. A group is reused as long as its engines stay.
        self._groups: dict[tuple[str, ...], Sender | RankShipment] = {}
        self._generations = itertools.count()

    async def publish(self, version: Version, weights: Weights, *, wake: bool = True) -> SyncReport:
        """Bring all registered engines to ``version``, suspended ones only with ``wake``. Those that fail are cut off.

        Raises WeightSyncError when no engine took the weights within ``engine_wait_s``. Raises TrainerReplaced when an
        engine or the directory serves a newer trainer, and RanksLost when a rank that sends is gone; no engine is cut
        off then.
        """
        async with self._before_late_engines():
            if wake:
                self._suspended = False
            began = time.monotonic()
            self._deferred, self._most_bytes = False, 0
            await self._take(version, weights)
            done, failures, waited = await self._bring_up_all(began + self._engine_wait_s)
            self._base, self._deltas = None, ()
            if self._shards is not None:
                await _in_thread(self._shards.seal)
            engines = [member.engine_id for member in done]
            await self._directory.publish(version, engines)
            # Engines on the trainer's devices paused for a whole step, so the others count where some exist.
            overlapped = [member for member in done if not self._shares(member.record)]
            return SyncReport(
                version=version,
                seconds=time.monotonic() - began,
                waiting_seconds=waited,
                pause_seconds=max(member.pause_seconds for member in overlapped or done),
                nbytes=self._most_bytes,
                engines=engines,
                failures=[str(failure) for failure in failures],
            )

    @asynccontextmanager
    async def _before_late_engines(self) -> AsyncIterator[None]:
        """Hold the lock, interrupting catch-up. Engines that it was updating stay paused until the next publication."""
        self._before_late += 1
        try:
            if self._catching_up is not None:
                self._catching_up.cancel()
            async with self._lock:
                yield
        finally:
            self._before_late -= 1

    async def suspend(self) -> None:
        """Pause the engines on the trainer's devices, and release their memory until the next ``publish``.

        Their requests move to the other engines, and stay in a fleet without others.
        """
        async with self._before_late_engines():
            self._suspended = True
            await self._refresh()
            await self._put_to_sleep()

    async def defer_late(self) -> None:
        """Wait for the late engines that are being updated, and update no others before the next publication.

        The weights that would be sent to them may change until then.
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
        while self._groups:
            self._groups.popitem()[1].close()
        for member in self._members.values():
            await member.control.close()
        self._members.clear()

    async def _put_to_sleep(self) -> None:
        """Suspend the engines on the trainer's devices that are awake.

        If other engines serve, these return their requests with the tokens so far, and leave the registry so that new
        requests go elsewhere.
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
        """Keep the weights to send, with deltas or adapters for engines that hold the previous version."""
        self._base, self._deltas = None, ()
        if isinstance(weights, RankShards):
            self._version, self._buckets, self._shards = version, (), weights
            await _in_thread(lambda: weights.begin(version, self._hold))
            return
        addressed = numbered(weights, version, self._hold)
        if self._version not in (None, version):
            base, old = self._version, self._buckets
            added = adapters.adapter_buckets(addressed)
            # Adapters beside the engines' own base are everything that there is to send.
            if 0 < len(added) < len(addressed):
                self._base, self._deltas = base, added
            elif self._sync.delta and not added:
                self._deltas = await _in_thread(lambda: list(deltas(addressed, old, str(base))))
                self._base = base
        self._version, self._buckets, self._shards = version, addressed, None

    async def _bring_up_all(self, deadline: float) -> tuple[list[FleetMember], list[EngineFailed], float]:
        """Update the registered engines; if none is left, wait until ``deadline`` for others to register.

        Returns the engines that took the weights, the failures, and the seconds without any engine.
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
        """Return the members that a publication waits for. Slow ones catch up after it, while the others serve.

        A member that is behind for weight_sync.sync_timeout_s is waited for again, and then serves or is cut off.
        Engines on the trainer's devices hold memory that it needs back, so they are always waited for.
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

        A slow member delays the others of its group. At the deadline, members with an unanswered request are cut off if
        others have answered, and the rest are retried one by one with the same deadline. If all or none have answered,
        the delay may be this side's, and all are retried.
        """
        done: list[FleetMember] = []
        # Deal the members to groups of nearly equal size.
        waves = [group for i in range(self._sync.waves) if (group := list(members[i :: self._sync.waves]))]
        kept = {tuple(member.engine_id for member in group) for group in waves}
        # An engine is in one group at a time. While a slow one catches up, the others' group stays for the next
        # publication, which need not form it again.
        now = {member.engine_id for member in members}
        for ids in self._groups.keys() - kept:
            if not now.isdisjoint(ids) or not self._members.keys() >= set(ids):
                self._groups.pop(ids).close()

        async def update_waves() -> None:
            for group in waves:
                await self._bring_up(group, done, failures, keep_group=True)

        if await self._in_time(update_waves()):
            return done
        rest = self._unfinished(members, done, failures)
        unanswered = [member for member in rest if member.unanswered]
        if len(unanswered) < len(rest) or len(rest) == 1:
            await self._fail_late(unanswered, failures)
            rest = self._unfinished(members, done, failures)
        if not rest:
            return done
        log.warning("version %s to each alone: %s", self._version, ", ".join(member.engine_id for member in rest))
        if not await self._in_time(to_the_end(*(self._bring_up([m], done, failures, keep_group=False) for m in rest))):
            await self._fail_late(self._unfinished(members, done, failures), failures)
        return done

    async def _in_time(self, work: Awaitable[object]) -> bool:
        """Return whether the work ended within weight_sync.sync_timeout_s; cancel it otherwise."""
        try:
            await within(self._sync.sync_timeout_s, work)
        except Overdue:
            return False
        return True

    def _unfinished(
        self, members: Sequence[FleetMember], done: list[FleetMember], failures: Sequence[EngineFailed]
    ) -> list[FleetMember]:
        """Add the members that serve the version to ``done``; return those that neither serve it nor have failed."""
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
                # The next publication includes every engine.
                return
            await self._refresh()
            if self._suspended:
                # An engine that registered meanwhile would take the trainer's memory.
                await self._put_to_sleep()
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
        """Update late engines and confirm each to the registry. Runs as a task, which a publication cancels."""
        for member in await self._bring_up_in_time(late, []):
            await self._directory.confirm(member.engine_id, version)
            log.info("%s caught up with version %s", member.engine_id, version)

    async def _bring_up(
        self, members: Sequence[FleetMember], done: list[FleetMember], failures: list[EngineFailed], *, keep_group: bool
    ) -> None:
        """Send the weights until each member serves them (added to ``done``) or is cut off (added to ``failures``).

        The first attempt updates all members that need the same bytes as one group. If it lost some, the rest try once
        more in a new group. After that, or if nobody is clearly at fault, each member is updated alone, so that a
        failure is its own. Deltas, and copies on shared devices, are used in the first attempt only.
        """
        pending, silent = await wave.probe(members, self._timeout_s)
        if self._shards is not None:
            pending, mute = await wave.ask_needs(pending, self._shards.shapes, self._timeout_s)
            silent += mute
        await self._cut_off(silent)
        failures += silent
        grouped, rounds = True, 0
        while pending:
            if rounds:
                await self._clear_devices()
            waves = [[member] for member in pending]
            if grouped:
                waves = wave.group_by_content(pending, self._base, sliced=self._shards is not None)
            outcomes = await to_the_end(*(self._one_wave(w, keep_group and grouped) for w in waves))
            culprits = [f for w, outcome in zip(waves, outcomes) for f in await self._culprits(w, outcome)]
            await self._cut_off(culprits)
            failures += culprits
            finished = [member for outcome in outcomes for member in outcome.done]
            done += finished
            settled = {member.engine_id for member in finished} | {failure.engine_id for failure in culprits}
            pending = [member for member in pending if member.engine_id not in settled]
            grouped = bool(culprits) and rounds == 0
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
        """Prepare to send to members that need the same bytes."""
        if self._shards is not None:
            shards, places = self._shards, members[0].places
            return await opened_in_thread(lambda: shards.shipment(len(members), places), "weights")
        workers, name = tuple(member.workers for member in members), f"weights-{next(self._generations)}"
        folder, nbytes = Path(self._sync.folder), self._sync.bucket
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
        if outcome.done:
            workers = max(member.workers for member in members)
            sent = group.nbytes if isinstance(group, RankShipment) else workers * sum(b.nbytes for b in buckets)
            self._most_bytes = max(self._most_bytes, sent)
        return outcome

    async def _culprits(self, members: Sequence[FleetMember], outcome: WaveOutcome) -> list[EngineFailed]:
        """Return the failures that are the engine's own fault.

        In a group of one every failure is the engine's own, unless a delta was sent. In a larger group it is the
        engine's own only if it no longer answers: an error that a live engine reports may come from a peer that died.
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

                def note(stage: str, engine_id: str = engine_id) -> None:
                    self._note(engine_id, str(self._version), stage)

                self._members[engine_id] = FleetMember(record, self._connect(record), note=note)

    async def _cut_off(self, failures: Sequence[EngineFailed]) -> None:
        """Remove failed engines from the registry, so that no request reaches them; the launcher replaces them."""
        if failures:
            await self._clear_devices()
        for failure in failures:
            if failure.engine_id not in self._members:
                # The deadline of the whole update passed while it was being cut off.
                continue
            log.error("cut off: %s", failure)
            self._members[failure.engine_id].note(CUT_OFF)
            await self._directory.remove_engine(failure.engine_id, str(failure))
            await self._members.pop(failure.engine_id).control.close()

    async def _clear_devices(self) -> None:
        """Move the ranks' copies off the engines' devices: an engine that starts takes all its memory at once."""
        if self._shards is not None:
            await _in_thread(self._shards.leave)


async def _in_thread(work: Callable[[], T]) -> T:
    return await asyncio.wrap_future(in_daemon_thread(work, "weights"))


# --- the trainer's interface


class WeightCoordinator:
    """Publishes weights from rank 0 of the trainer, and keeps late engines caught up in the background.

    ``open_directory`` and ``connect`` are called on the coordinator's own event loop, because sockets belong to the
    loop that they are created on. ``sync``, ``engine_wait_s``, ``host``, ``note``, ``shares`` and ``stores`` are as
    for ``Fleet``. The constructor blocks until the directory is open and raises what opening it raised.

    A publication may take longer than a collective may. So during each call that all ranks make, ``meet`` is called
    with True every MEET_S, and with False at the end: the other ranks (``IdleCoordinator``) meet this one.
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
        self._thread = threading.Thread(target=self._run, name="weight-coordinator", daemon=True)
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

    def publish(self, version: Version, weights: Weights, *, wake: bool = True) -> SyncReport:
        """Bring all engines to ``version`` and record it in the directory; keep the weights for late engines.

        Suspended engines take part only with ``wake``. Engines that fail are cut off and named in the report. Raises
        WeightSyncError when none is left and none registers in time, QueueLost when the directory is gone, RanksLost
        when a rank that sends is. Each request to an engine has its own deadline.
        """
        return self._with_ranks(self._fleet.publish(version, weights, wake=wake))

    def suspend(self) -> None:
        """Pause the engines on the trainer's devices and release their memory until the next ``publish``."""
        self._with_ranks(self._fleet.suspend())

    def defer_late(self) -> None:
        """Wait for the late engines that are being updated, and update no others before the next publication."""
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
        finally:
            self._stop_loop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _with_ranks(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for the work, and meet the other ranks meanwhile. After an error they are not met: this rank ends.

        Raises TrainerReplaced if the catch-up loop has met it, WeightSyncError if a bug has ended the loop.
        """
        if self._catching_up.done():
            work.close()
            error = self._catching_up.exception()
            if isinstance(error, TrainerReplaced):
                raise error
            raise WeightSyncError("the task that updates late engines has ended unexpectedly") from error
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
            # Without effect unless this wait was interrupted.
            future.cancel()

    def _stop_loop(self) -> None:
        """Stop the loop once its tasks have ended. One whose tasks do not end goes on in its daemon thread."""

        async def stop() -> None:
            await end_other_tasks()
            self._loop.stop()

        asyncio.run_coroutine_threadsafe(stop(), self._loop)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()


# --- how training and generation share devices


class EngineUpdater(Protocol):
    """The coordinator as a phase uses it. All ranks make the same calls, which return when rank 0 has done the work."""

    def publish(self, version: Version, weights: Weights, *, wake: bool = True) -> SyncReport:
        """Bring all engines to ``version``. With ``wake``, suspended ones too, which continue their requests."""
        ...

    def suspend(self) -> None:
        """Pause the engines on the trainer's devices, and take their device memory. Their requests move to others."""
        ...

    def defer_late(self) -> None:
        """Serve no late engine until the next publication; return when none is being served."""
        ...


class IdleCoordinator:
    """Stands in for the coordinator on every rank but 0: waits for rank 0, which talks to the engines.

    ``meet`` is a collective that returns on every rank whether rank 0 still works. It is repeated, so that rank 0 may
    take longer than a single collective may.
    """

    def __init__(self, meet: Callable[[bool], bool]) -> None:
        self._meet = meet

    def publish(self, version: Version, weights: Weights, *, wake: bool = True) -> SyncReport:
        """Wait until rank 0 has published; return an empty report."""
        self._wait_for_rank_0()
        return SyncReport(
            version=version, seconds=0.0, waiting_seconds=0.0, pause_seconds=0.0, nbytes=0, engines=[], failures=[]
        )

    def suspend(self) -> None:
        """Wait until rank 0 has suspended the engines."""
        self._wait_for_rank_0()

    def defer_late(self) -> None:
        """Wait until rank 0 updates no late engine."""
        self._wait_for_rank_0()

    def _wait_for_rank_0(self) -> None:
        while self._meet(False):
            pass


class Phase(Protocol):
    """One trainer step from the devices' point of view. All ranks make the same calls."""

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

    Requests in flight stay in their engines during training and continue with the new weights. ``offload`` is called
    with whether the engines sleep: the copy of the weights to send may then stay on the device until their caches wake.
    """

    def __init__(
        self,
        updater: EngineUpdater,
        barrier: Callable[[], None],
        onload: Callable[[], None],
        offload: Callable[[bool], None],
    ) -> None:
        self._updater, self._barrier, self._onload, self._offload = updater, barrier, onload, offload
        self._engines_asleep = False

    def before_train(self) -> None:
        """Put the engines to sleep, then move the models onto the device."""
        self._updater.suspend()
        self._onload()
        self._engines_asleep = True

    def after_train(self, version: Version, weights: Weights) -> SyncReport:
        """Move the trainer's models off all devices; then the engines wake and take the weights.

        Buckets leave the device too: next to the engines it has no memory for all weights, which one rank has gathered.
        """
        self._offload(self._engines_asleep)
        self._engines_asleep = False
        moved = weights if isinstance(weights, RankShards) else [bucket.offloaded() for bucket in weights]
        self._barrier()
        return self._updater.publish(version, moved)


class Lending:
    """Engines have devices of their own; further ones run on the trainer's devices while it waits for a batch.

        withdraw, pause, sleep the lent engines ──> onload ──> train ──> worth it?
            yes: serve no late engine ──> offload ──> publish to all; lent engines wake and join the pool
            no:  publish to the others; the trainer's models stay, and the lent engines sleep on

    Lending is worth it if the trainer's devices last idled for longer than the switch takes there and back. Only one
    direction is measured; the other is assumed to take as long. Rank 0 decides (``agree``).
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
        """Take lent devices back."""
        began = self._clock()
        self._idle_s = began - self._published_at
        if self._lent:
            self._turns.before_train()
            self._switch_s, self._lent = self._clock() - began, False

    def after_train(self, version: Version, weights: Weights) -> SyncReport:
        """Publish, and lend the devices if that is worth it.

        A late engine may still be receiving the previous weights, from copies on all ranks that offloading overwrites.
        So no rank goes on before rank 0 has deferred late engines.
        """
        self._lent = self._agree(self._idle_s >= 2 * self._switch_s)
        if self._lent:
            self._updater.defer_late()
            report = self._turns.after_train(version, weights)
        else:
            report = self._updater.publish(version, weights, wake=False)
        self._published_at = self._clock()
        return report


def shares_devices(mode: Mode) -> Callable[[EngineRecord], bool]:
    """Return a test for engines on the trainer's devices: all of them if colocated, otherwise those on lent devices."""
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
    """Return the phase of a mode. A disaggregated trainer may lend its devices.

    ``onload`` and ``offload`` move this rank's models; both must be idempotent. ``TakeTurns`` explains the argument of
    ``offload``. ``agree`` returns rank 0's argument on all ranks.
    """
    turns = TakeTurns(updater, barrier, onload, offload)
    if mode == "colocated":
        return turns
    return Lending(updater, turns, agree) if lends else Overlapped(updater)
