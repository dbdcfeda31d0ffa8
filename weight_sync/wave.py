"""Updates one group of engines in two phases: every engine receives every bucket, then every engine commits.

    probe -> init (a new group only) -> pause -> [wake weights] -> start -> bucket 0, 1, ... -> [leave] -> finish
          -> verify -> [wake kv_cache] -> resume

The steps in brackets are for engines that slept: the senders' copies leave their devices before the caches wake.
With staged updates the engines keep decoding while they receive, and ``finish`` loads:

    ... -> start -> bucket 0, 1, ... -> [leave] -> pause -> [wake weights] -> finish -> verify -> ...

A wave that fails before ``finish`` stops at once and leaves its engines paused: they hold mixed weights until a later
wave succeeds. From ``finish`` on, the failure of one engine does not affect the others.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol, TypeVar

import msgspec

from rl_async.concurrency import Overdue, in_daemon_thread, outcomes, within
from rl_async.errors import RanksLost, RlAsyncError, TrainerReplaced, WeightSyncError
from rl_async.messages import EngineRecord, Version
from rl_async.weight_sync.buckets import Bucket
from rl_async.weight_sync.protocol import EngineControl, InitInfo, UpdateInfo
from rl_async.weight_sync.sender import Needs
from rl_async.weight_sync.transports import Sender

T = TypeVar("T")

TAGS = ("weights", "kv_cache")
# The last stage that is noted of an engine that failed.
CUT_OFF = "cut off"
# An engine is slow if its requests take more than SLOW times as long as others', and that costs LATE_S in an update.
SLOW, LATE_S = 2.0, 0.5
# The shortest time between two notes about buckets of one engine.
BUCKET_NOTE_S = 1.0


class Group(Protocol):
    """The senders and the engines that receive. Methods block and raise WeightSyncError."""

    def init_info(self, member: int) -> InitInfo:
        """Describe how the engine with this number (from 0) joins."""
        ...

    def connect(self) -> None:
        """Form the group with all engines, which join at the same time."""
        ...

    def close(self) -> None:
        """Leave the group without waiting for its members; may be called twice."""
        ...


class Shipment(Protocol):
    """The buckets of one publication on their way to one group, by number from 0. Methods are those of a ``Sender``."""

    count: int

    def stage(self, number: int) -> UpdateInfo:
        """Prepare a bucket, or start sending it; return the manifest to give to the engines."""
        ...

    def send(self, number: int) -> None:
        """Transfer a staged bucket while the engines receive it."""
        ...

    def unstage(self) -> None:
        """Release the oldest staged bucket: no engine will read it any more."""
        ...

    def leave(self) -> None:
        """Move copies off the devices shared with engines, which have all loaded the last bucket."""
        ...

    def close(self) -> None:
        """Leave the group; may be called twice."""
        ...


class BucketShipment:
    """Buckets that one sender sends to every engine of a group."""

    def __init__(self, sender: Sender, buckets: Sequence[Bucket]) -> None:
        self._sender, self._buckets, self.count = sender, buckets, len(buckets)
        self.unstage, self.close = sender.unstage, sender.close

    def stage(self, number: int) -> UpdateInfo:
        """Stage a bucket; its manifest tells the size of the next."""
        later = self._buckets[number + 1].nbytes if number + 1 < self.count else 0
        return msgspec.structs.replace(self._sender.stage(self._buckets[number]), next_bytes=later)

    def send(self, number: int) -> None:
        """Transfer a staged bucket."""
        self._sender.send(self._buckets[number])

    def leave(self) -> None:
        """Do nothing: buckets are on the host before engines wake."""


class EngineFailed(WeightSyncError):
    """One engine failed in one phase. ``lost`` means that it did not answer, so the fault is its own."""

    def __init__(self, engine_id: str, phase: str, why: str, *, lost: bool) -> None:
        super().__init__(f"{engine_id} failed in {phase}: {why}")
        self.engine_id, self.lost = engine_id, lost


class RequestTimes:
    """The number of requests in an engine's latest update, and how long they took.

    An engine that stands still most of the time answers several requests at once in between, so all count alike, in
    whichever order they were slow.
    """

    def __init__(self) -> None:
        self.requests = 0
        self._earlier_s = self._sum_s = 0.0
        self._answered = True

    @property
    def request_s(self) -> float:
        """The mean of the latest update. An unanswered request, a lower bound, never lowers it."""
        mean_s = self._sum_s / self.requests if self.requests else self._earlier_s
        return mean_s if self._answered else max(mean_s, self._earlier_s)

    def begin(self) -> None:
        """Keep the measurements of the last update apart, and begin those of the next."""
        self._earlier_s = self.request_s
        self.requests, self._sum_s, self._answered = 0, 0.0, True

    def took(self, seconds: float, *, answered: bool) -> None:
        """Record a request. If unanswered, ``seconds`` is only a lower bound."""
        self.requests += 1
        self._sum_s += seconds
        self._answered = self._answered and answered


def slow_ones(members: Sequence["FleetMember"]) -> list["FleetMember"]:
    """Return the members whose requests would keep the others of an update waiting for more than LATE_S in all."""
    found = []
    for member in members:
        others = [other.times for other in members if other is not member]
        if others:
            usual, requests = median(p.request_s for p in others), median(p.requests for p in others)
            if requests * (member.times.request_s - SLOW * usual) > LATE_S:
                found.append(member)
    return found


@dataclass
class FleetMember:
    """An engine, and the state into which the coordinator has put it."""

    record: EngineRecord
    control: EngineControl
    # Times are in monotonic seconds.
    paused_at: float | None = None
    # It was told to resume, and has not answered: an interrupted request may still take effect.
    resuming: bool = False
    # Tags that are still to be woken. If None, an earlier trainer may have put the engine to sleep.
    asleep: set[str] | None = None
    # Length of the latest pause.
    pause_seconds: float = 0.0
    # The version that the engine acknowledged completely. A delta can start from it.
    held: Version | None = None
    # Asked for when the engine holds nothing. If ``needs`` is empty, the workers take whole tensors.
    workers: int = 1
    needs: tuple[Needs, ...] = ()
    # The latest request, and whether neither an answer nor an error has come.
    phase: str = "probe"
    unanswered: bool = False
    times: RequestTimes = field(default_factory=RequestTimes)
    # When a publication went on without it; None while it has the published version.
    behind_since: float | None = None
    # Called with each stage of an update, and with an empty stage at its end.
    note: Callable[[str], None] = lambda stage: None
    _noted: float = 0.0

    @property
    def engine_id(self) -> str:
        """Name of the engine in the registry."""
        return self.record.engine_id

    @property
    def places(self) -> tuple[Needs | None, ...]:
        """The needs of each worker. A worker without entry (None) needs everything."""
        return self.needs or (None,) * self.workers

    def serves(self, version: Version | None) -> bool:
        """Whether it has acknowledged this version completely and is not paused."""
        return version is not None and self.held == version and self.paused_at is None

    def enter(self, phase: str) -> None:
        """Begin a request, and note it. Buckets are noted at most every BUCKET_NOTE_S."""
        now, both = time.monotonic(), "bucket" in self.phase and "bucket" in phase
        self.phase = phase
        if not both or now - self._noted > BUCKET_NOTE_S:
            self._noted = now
            self.note(phase)


@dataclass
class WaveOutcome:
    """Result of a wave. Members in neither list were interrupted by another failure, or by the sender's."""

    done: list[FleetMember] = field(default_factory=list)
    failures: list[EngineFailed] = field(default_factory=list)
    sender_error: WeightSyncError | None = None
    # Whether deltas, or adapters without their base, were sent.
    delta: bool = False

    @property
    def clean(self) -> bool:
        """Whether neither an engine nor the sender failed."""
        return not self.failures and self.sender_error is None


async def call(member: FleetMember, phase: str, request: Awaitable[T], timeout_s: float) -> T:
    """Await one request to one engine. Raises EngineFailed, naming the phase, and TrainerReplaced as it is."""
    member.enter(phase)
    member.unanswered, began, answered = True, time.monotonic(), False
    try:
        answer = await within(timeout_s, request)
        answered = True
    except Overdue:
        raise EngineFailed(member.engine_id, phase, f"no answer within {timeout_s:g} s", lost=True) from None
    except TrainerReplaced:
        # The engine is sound.
        raise
    except RlAsyncError as error:
        member.unanswered = False
        raise EngineFailed(member.engine_id, phase, f"{type(error).__name__}: {error}", lost=False) from error
    finally:
        # Joining a group waits for all other engines, so it says nothing about this one.
        if phase != "init":
            member.times.took(time.monotonic() - began, answered=answered)
    member.unanswered = False
    return answer


async def each(
    members: Sequence[FleetMember], action: Callable[[FleetMember], Coroutine[Any, Any, object]]
) -> tuple[list[FleetMember], list[EngineFailed]]:
    """Run ``action`` on all members concurrently; return the members that succeeded, and the failures."""
    results = await outcomes(*(action(member) for member in members))
    done, failures = [], []
    for member, result in zip(members, results):
        if isinstance(result, EngineFailed):
            failures.append(result)
        elif isinstance(result, BaseException):
            raise result
        else:
            done.append(member)
    return done, failures


async def probe(members: Sequence[FleetMember], timeout_s: float) -> tuple[list[FleetMember], list[EngineFailed]]:
    """Find the members that answer, before a group is formed: a dead member would make the others wait.

    A member that serves another version than it acknowledged was restarted and holds nothing.
    """

    async def ask(member: FleetMember) -> None:
        member.times.begin()
        if await call(member, "probe", member.control.version(), timeout_s) != member.held:
            member.held = None
        if member.held is None:
            member.workers = await call(member, "probe", member.control.workers(), timeout_s)
            member.needs = ()

    return await each(members, ask)


async def ask_needs(
    members: Sequence[FleetMember], shapes: Mapping[str, list[int]], timeout_s: float
) -> tuple[list[FleetMember], list[EngineFailed]]:
    """Find out which parts of tensors with these shapes the workers of each member need, unless that is known."""

    async def ask(member: FleetMember) -> None:
        if member.workers > 1 and not member.needs:
            found = await call(member, "probe", member.control.boxes(shapes), timeout_s)
            member.needs = tuple(
                {name: tuple(map(tuple, boxes)) for name, boxes in zip(shapes, of_worker, strict=True)}
                for of_worker in found or ()
            )

    return await each(members, ask)


def group_by_content(members: Sequence[FleetMember], base: Version | None, *, sliced: bool) -> list[list[FleetMember]]:
    """Partition members by the bytes they need: deltas on ``base`` or full weights and, if sliced, by worker needs."""
    groups: list[list[FleetMember]] = []
    for member in members:
        for group in groups:
            both_hold = base is None or (member.held == base) == (group[0].held == base)
            if both_hold and (not sliced or member.places == group[0].places):
                group.append(member)
                break
        else:
            groups.append([member])
    return groups


async def connect(members: Sequence[FleetMember], group: Group, timeout_s: float) -> WaveOutcome:
    """Form the group with all members; every engine joins while the senders connect."""
    connecting = asyncio.create_task(_sending(group, group.connect))

    async def join(member: FleetMember) -> None:
        info = group.init_info(members.index(member))
        await call(member, "init", member.control.init_transfer(info), timeout_s)

    try:
        _, failures = await each(members, join)
        return WaveOutcome(failures=failures, sender_error=await connecting)
    finally:
        connecting.cancel()


async def transfer(
    members: Sequence[FleetMember], shipment: Shipment, version: Version, timeout_s: float, *, staged: bool = False
) -> WaveOutcome:
    """Update connected members, in any state, to ``version``. Each request may take ``timeout_s``.

    Raises WeightSyncError only for a fault of the trainer: a bucket cannot be staged, or a rank that sends is lost.
    """
    for member in members:
        member.held = None
    # Staging the first bucket before the pause shortens the pause.
    info = await _stage(shipment, 0)
    if isinstance(info, WeightSyncError):
        raise info

    async def prepare(member: FleetMember) -> None:
        # Asked before the pause, which the request would lengthen.
        await _asleep(member, timeout_s)
        if not staged:
            await _stop(member, timeout_s)
        await call(member, "start", member.control.start_update(staged), timeout_s)

    _, failures = await each(members, prepare)
    if failures:
        return WaveOutcome(failures=failures)
    # While engines receive and load a bucket, the next is staged and may already arrive.
    for number in range(shipment.count):
        if isinstance(info, WeightSyncError):
            raise info
        assert info is not None
        staging = asyncio.create_task(_stage(shipment, number + 1))
        try:
            outcome = await _one_bucket(members, shipment, number, info, timeout_s)
            info = await staging
        finally:
            staging.cancel()
        if not outcome.clean:
            return outcome
    if any(member.asleep for member in members):
        await asyncio.wrap_future(in_daemon_thread(shipment.leave, "weight-transfer"))
    done, failures = await each(members, lambda member: _commit(member, version, timeout_s))
    return WaveOutcome(done=done, failures=failures)


async def drain(member: FleetMember, timeout_s: float) -> None:
    """Pause a member. It returns its requests with the tokens so far, for others to continue. Raises EngineFailed."""
    # A wave that failed may have paused it together with its requests, so a paused member is paused again.
    if not member.asleep:
        await call(member, "pause", member.control.pause("abort"), timeout_s)
        member.paused_at, member.resuming = member.paused_at or time.monotonic(), False


async def suspend(member: FleetMember, timeout_s: float) -> None:
    """Pause a member, keeping its requests, and make it release its device memory. Raises EngineFailed.

    A wave that failed may have woken a member's weights alone, which it then releases again.
    """
    await _pause(member, timeout_s)
    if await _asleep(member, timeout_s) != set(TAGS):
        await call(member, "sleep", member.control.sleep(2), timeout_s)
        member.asleep = set(TAGS)
    member.note("asleep")


async def _stop(member: FleetMember, timeout_s: float) -> None:
    """Pause the member and give it memory to load into."""
    await _pause(member, timeout_s)
    await _wake(member, "weights", timeout_s)


async def _pause(member: FleetMember, timeout_s: float) -> None:
    if member.paused_at is None or member.resuming:
        await call(member, "pause", member.control.pause("keep"), timeout_s)
        member.paused_at, member.resuming = member.paused_at or time.monotonic(), False


async def _asleep(member: FleetMember, timeout_s: float) -> set[str]:
    """Return the tags to wake. An engine can outlive the trainer that put it to sleep, so a new trainer asks it."""
    if member.asleep is None:
        sleeping = await call(member, "is_sleeping", member.control.is_sleeping(), timeout_s)
        member.asleep = set(TAGS) if sleeping else set()
    return member.asleep


async def _wake(member: FleetMember, tag: str, timeout_s: float) -> None:
    asleep = await _asleep(member, timeout_s)
    if tag in asleep:
        await call(member, f"wake {tag}", member.control.wake([tag]), timeout_s)
        asleep.discard(tag)


async def _stage(shipment: Shipment, number: int) -> UpdateInfo | WeightSyncError | None:
    """Return the manifest of a bucket, or the error: if the previous bucket failed too, that failure counts."""
    if number == shipment.count:
        return None
    try:
        return await asyncio.wrap_future(in_daemon_thread(lambda: shipment.stage(number), "weight-transfer"))
    except WeightSyncError as error:
        return error


async def _one_bucket(
    members: Sequence[FleetMember], shipment: Shipment, number: int, info: UpdateInfo, timeout_s: float
) -> WaveOutcome:
    phase = f"update, bucket {number + 1}/{shipment.count}"
    sending = asyncio.create_task(_sending(shipment, lambda: shipment.send(number)))
    try:
        _, failures = await each(members, lambda member: call(member, phase, member.control.update(info), timeout_s))
        return WaveOutcome(failures=failures, sender_error=await sending)
    finally:
        sending.cancel()
        shipment.unstage()


async def _commit(member: FleetMember, version: Version, timeout_s: float) -> None:
    await _stop(member, timeout_s)
    await call(member, "finish", member.control.finish_update(version), timeout_s)
    served = await call(member, "verify", member.control.version(), timeout_s)
    if served != version:
        raise EngineFailed(member.engine_id, "verify", f"it serves {served}, not {version}", lost=False)
    member.held, member.behind_since = version, None
    await _wake(member, "kv_cache", timeout_s)
    member.resuming = True
    await call(member, "resume", member.control.resume(), timeout_s)
    member.resuming = False
    if member.paused_at is not None:
        member.pause_seconds = time.monotonic() - member.paused_at
        member.paused_at = None
    member.note("")


async def _sending(sender: Group | Shipment, block: Callable[[], None]) -> WeightSyncError | None:
    """Run the senders' side in a thread. Return its error: only the engines' answers tell whose fault it is.

    Raises RanksLost, since no engine is to blame for it.
    """
    try:
        await asyncio.wrap_future(in_daemon_thread(block, "weight-transfer"))
    except RanksLost:
        raise
    except WeightSyncError as error:
        # Closing makes the peers stop waiting for it.
        sender.close()
        return error
    return None
