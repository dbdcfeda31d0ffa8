"""What random histories of the queue are made of: their sizes, rows of samples, and what the queue announced."""

import msgspec
from hypothesis import strategies as st

from rl_async.messages import LeasedGroup, Task, TrajectoryHeader, Version, VersionRun
from rl_async.transfer_queue.admission import QueueSettings
from rl_async.transfer_queue.conversations import chosen
from rl_async.transfer_queue.delivery import NO_SIGNAL
from rl_async.transfer_queue.journal.journal import freed_by
from rl_async.transfer_queue.store import Store
from rl_async.transfer_queue.transitions import (
    Admitted,
    DeadLettered,
    GroupDropped,
    SamplesStored,
    ShardLost,
    Transition,
    TransitionType,
)

STEPS, BATCH, GROUP, LEASE_S = 6, 2, 2, 10.0


@st.composite
def queue_settings(draw: st.DrawFn) -> QueueSettings:
    """Of a short run, with any policy."""
    bound = draw(st.sampled_from([0, 1, 4]))
    return QueueSettings(
        steps=STEPS,
        batch_groups=BATCH,
        group_size=GROUP,
        max_staleness=bound,
        on_straggler=draw(st.sampled_from(["wait", "drop"])),
        lease_s=LEASE_S,
        max_attempts=3,
        max_refills=draw(st.sampled_from([0, 1, 3])),
        replicas=draw(st.sampled_from([0, 1, 2])),
        sampling=draw(st.sampled_from(["fifo", "freshest", "priority", "quota"])),
        slack=min(draw(st.sampled_from([0, 1, 2])), bound),
        window=draw(st.sampled_from([0, 0, BATCH, BATCH + 1])),
        consumer_bytes=draw(st.sampled_from([0, 1000, 1 << 20])),
        weights={"easy": ((0, 1.0),), "hard": ((0, 2.0), (STEPS, 0.0))},
    )


def segments(group_id: int, sample: int) -> int:
    """Rows of a sample: one, or two of every third."""
    return 2 if (group_id + sample) % 3 == 0 else 1


def headers(store: Store, group: LeasedGroup, sample: int, version: Version) -> list[TrajectoryHeader]:
    """Of the rows of a sample of this version's tokens, on the shards that are to keep it."""
    registry = store.shards.list()
    shards = [shard.shard_id for shard in chosen(group.group_id, registry.shards, registry.replicas)]
    return [
        TrajectoryHeader(
            group_id=group.group_id,
            sample=sample,
            attempt=group.attempt,
            partition=group.partition,
            episode_id="",
            segment=segment,
            tokens=1,
            sampled=1,
            reward=float(sample) if group.group_id % 3 == 0 else 1.0,  # two groups of three teach nothing
            scored=group.group_id % 3 < 2,
            finish_reason="stop",
            versions=[VersionRun(version, 0, 1)],
            tokens_hash="",
            nbytes=3,
            shards=shards,
        )
        for segment in range(segments(group.group_id, sample))
    ]


class Announced:
    """All transitions of one queue in order, and what follows from them."""

    def __init__(self) -> None:
        self.transitions: list[Transition] = []

    def recorded(self, start: int) -> list[Transition]:
        """Those from ``start`` on, as they come back from a journal."""
        encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
        return [decode(encode(transition), type=TransitionType) for transition in self.transitions[start:]]

    def admitted(self) -> list[Admitted]:
        """Training groups."""
        return [event for event in self.transitions if isinstance(event, Admitted) and event.partition == "train"]

    def tasks(self) -> dict[int, Task]:
        """By group, as they were admitted."""
        return {event.group: event.task for event in self.admitted()}

    def given_up(self) -> list[int]:
        """Groups that were dropped or dead-lettered."""
        return [event.group for event in self.transitions if isinstance(event, GroupDropped | DeadLettered)]

    def refilled(self) -> list[int]:
        """Groups that were dropped for want of signal."""
        dropped = [event for event in self.transitions if isinstance(event, GroupDropped)]
        return [event.group for event in dropped if event.reason == NO_SIGNAL]

    def lost(self) -> set[tuple[int, int]]:
        """Samples that went with their shards: (group, sample)."""
        return {sample for event in self.transitions if isinstance(event, ShardLost) for sample in event.samples}

    def groups_with_rows(self) -> set[int]:
        """What a journal holds."""
        here: set[int] = set()
        for event in self.transitions:
            if isinstance(event, SamplesStored):
                here |= {headers[0].group_id for headers in event.samples}
            freed = freed_by(event)
            here = set() if freed is None else here - set(freed)
        return here
