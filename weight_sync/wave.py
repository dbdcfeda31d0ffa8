"""Updates one group of engines in two phases: every engine receives every bucket, then every engine commits.

    probe -> init (a new group only) -> pause -> [wake weights] -> start -> bucket 0, 1, ... -> finish -> verify
          -> [wake kv_cache] -> resume

With staged updates the engines keep decoding while they receive, and ``finish`` loads:

    ... -> start -> bucket 0, 1, ... -> pause -> [wake weights] -> finish -> verify -> [wake kv_cache] -> resume

A wave that fails before ``finish`` stops at once and leaves its engines paused: they hold mixed weights until a later
wave succeeds. From ``finish`` on, the failure of one engine does not affect the others.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, TypeVar

import msgspec

from rl_async.errors import RlAsyncError, TrainerReplaced, WeightSyncError
from rl_async.messages import EngineRecord, Version
from rl_async.threads import in_daemon_thread
from rl_async.weight_sync.buckets.buckets import Bucket
from rl_async.weight_sync.protocol import EngineControl, UpdateInfo
from rl_async.weight_sync.transports.interface import Sender

T = TypeVar("T")

TAGS = ("weights", "kv_cache")


class EngineFailed(WeightSyncError):
    """One engine failed in one phase. ``lost`` means that it did not answer, so the fault is its own."""

    def __init__(self, engine_id: str, phase: str, why: str, *, lost: bool) -> None:
        super().__init__(f"{engine_id} failed in {phase}: {why}")
        self.engine_id, self.lost = engine_id, lost


@dataclass
class FleetMember:
    """An engine, and the state into which the coordinator has put it."""

    record: EngineRecord
    control: EngineControl
    paused_at: float | None = None  # monotonic seconds
    asleep: set[str] | None = None  # tags to wake: weights, kv_cache; None: unknown, as an earlier trainer left it
    pause_seconds: float = 0.0  # length of its latest pause
    held: Version | None = None  # version that it acknowledged completely, from which a delta can start
    phase: str = "probe"  # of the latest request to it

    @property
    def engine_id(self) -> str:
        """Name of the engine in the registry."""
        return self.record.engine_id


@dataclass
class WaveOutcome:
    """Result of a wave. Members in neither list were interrupted by another failure, or by the sender's."""

    done: list[FleetMember] = field(default_factory=list)
    failures: list[EngineFailed] = field(default_factory=list)
    sender_error: WeightSyncError | None = None
    delta: bool = False  # deltas, or adapters without their base, were sent

    @property
    def clean(self) -> bool:
        """Whether neither an engine nor the sender failed."""
        return not self.failures and self.sender_error is None


async def call(member: FleetMember, phase: str, request: Awaitable[T], timeout_s: float) -> T:
    """Await one request to one engine. Raises EngineFailed, naming the phase, and TrainerReplaced as it is."""
    member.phase = phase
    try:
        async with asyncio.timeout(timeout_s):
            return await request
    except TimeoutError:
        raise EngineFailed(member.engine_id, phase, f"no answer within {timeout_s:g} s", lost=True) from None
    except TrainerReplaced:  # the engine is sound
        raise
    except RlAsyncError as error:
        raise EngineFailed(member.engine_id, phase, f"{type(error).__name__}: {error}", lost=False) from error


async def each(
    members: Sequence[FleetMember], action: Callable[[FleetMember], Coroutine[Any, Any, object]]
) -> tuple[list[FleetMember], list[EngineFailed]]:
    """Run ``action`` on all members concurrently; return the members that succeeded, and the failures."""
    results = await asyncio.gather(*(action(member) for member in members), return_exceptions=True)
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
        if await call(member, "probe", member.control.version(), timeout_s) != member.held:
            member.held = None

    return await each(members, ask)


async def connect(members: Sequence[FleetMember], sender: Sender, timeout_s: float) -> WaveOutcome:
    """Form the sender's group with all members; every engine joins while the sender connects."""
    connecting = asyncio.create_task(_sending(sender, sender.connect))

    async def join(member: FleetMember) -> None:
        info = sender.init_info(members.index(member))
        await call(member, "init", member.control.init_transfer(info), timeout_s)

    _, failures = await each(members, join)
    return WaveOutcome(failures=failures, sender_error=await connecting)


async def transfer(
    members: Sequence[FleetMember],
    sender: Sender,
    buckets: Sequence[Bucket],
    version: Version,
    timeout_s: float,
    *,
    staged: bool = False,
) -> WaveOutcome:
    """Update connected members, whatever state they are in, to ``version``. Each request has ``timeout_s``.

    Raises WeightSyncError only for a fault of this process, when a bucket cannot be staged.
    """
    for member in members:
        member.held = None  # until it has acknowledged this version completely
    _, failures = await each(members, lambda member: _prepare(member, timeout_s, staged))
    if failures:
        return WaveOutcome(failures=failures)
    outcome = await _all_buckets(members, sender, buckets, timeout_s)
    if not outcome.clean:
        return outcome
    done, failures = await each(members, lambda member: _commit(member, version, timeout_s))
    return WaveOutcome(done=done, failures=failures)


async def suspend(member: FleetMember, timeout_s: float) -> None:
    """Pause a member, keeping its requests, and make it release its device memory. Raises EngineFailed."""
    await _pause(member, timeout_s)
    if not await _asleep(member, timeout_s):
        await call(member, "sleep", member.control.sleep(2), timeout_s)
        member.asleep = set(TAGS)


async def _prepare(member: FleetMember, timeout_s: float, staged: bool) -> None:
    await _asleep(member, timeout_s)  # asked before the pause, which the request would lengthen
    if not staged:
        await _stop(member, timeout_s)
    await call(member, "start", member.control.start_update(staged), timeout_s)


async def _stop(member: FleetMember, timeout_s: float) -> None:
    """Pause the member and give it memory to load into."""
    await _pause(member, timeout_s)
    await _wake(member, "weights", timeout_s)


async def _pause(member: FleetMember, timeout_s: float) -> None:
    if member.paused_at is None:
        await call(member, "pause", member.control.pause("keep"), timeout_s)
        member.paused_at = time.monotonic()


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


async def _all_buckets(
    members: Sequence[FleetMember], sender: Sender, buckets: Sequence[Bucket], timeout_s: float
) -> WaveOutcome:
    """Send the buckets in order. While engines receive and load one, the next is staged and may already arrive."""
    staged = await _stage(sender, next(iter(buckets), None))
    for index, (bucket, ahead) in enumerate(zip_longest(buckets, buckets[1:])):
        if isinstance(staged, WeightSyncError):
            raise staged
        assert staged is not None  # a bucket was staged
        info = msgspec.structs.replace(staged, next_bytes=ahead.nbytes if ahead is not None else 0)
        phase = f"update, bucket {index + 1}/{len(buckets)}"
        outcome, staged = await asyncio.gather(
            _one_bucket(members, sender, bucket, info, phase, timeout_s), _stage(sender, ahead)
        )
        if not outcome.clean:
            return outcome
    return WaveOutcome()


async def _stage(sender: Sender, bucket: Bucket | None) -> UpdateInfo | WeightSyncError | None:
    """An error is returned, not raised: if the bucket before failed too, that one counts."""
    if bucket is None:
        return None
    try:
        return await asyncio.wrap_future(in_daemon_thread(lambda: sender.stage(bucket), "weight-transfer"))
    except WeightSyncError as error:
        return error


async def _one_bucket(
    members: Sequence[FleetMember], sender: Sender, bucket: Bucket, info: UpdateInfo, phase: str, timeout_s: float
) -> WaveOutcome:
    try:
        sending = asyncio.create_task(_sending(sender, lambda: sender.send(bucket)))
        _, failures = await each(members, lambda member: call(member, phase, member.control.update(info), timeout_s))
        return WaveOutcome(failures=failures, sender_error=await sending)
    finally:
        sender.unstage()


async def _commit(member: FleetMember, version: Version, timeout_s: float) -> None:
    await _stop(member, timeout_s)
    await call(member, "finish", member.control.finish_update(version), timeout_s)
    served = await call(member, "verify", member.control.version(), timeout_s)
    if served != version:
        raise EngineFailed(member.engine_id, "verify", f"it serves {served}, not {version}", lost=False)
    member.held = version
    await _wake(member, "kv_cache", timeout_s)
    await call(member, "resume", member.control.resume(), timeout_s)
    if member.paused_at is not None:
        member.pause_seconds = time.monotonic() - member.paused_at
        member.paused_at = None


async def _sending(sender: Sender, block: Callable[[], None]) -> WeightSyncError | None:
    """Run the sender's side in a thread. Return its error: only the engines' answers tell whose fault it is."""
    try:
        await asyncio.wrap_future(in_daemon_thread(block, "weight-transfer"))
    except WeightSyncError as error:
        sender.close()  # so that peers stop waiting for it
        return error
    return None
