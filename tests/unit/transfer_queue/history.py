"""The model for random histories of the queue: sizes and rows, the batch of each step, and other readers."""

import msgspec
from hypothesis import strategies as st

from rl_async.messages import (
    ConsumerRecord,
    Delivered,
    Done,
    LeasedGroup,
    Refused,
    Reserved,
    Subscription,
    Task,
    TrajectoryHeader,
    Version,
    VersionRun,
)
from rl_async.transfer_queue.admission import QueueSettings
from rl_async.transfer_queue.client import chosen
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
from tests.support.queue import stale, twice

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


class Batches:
    """Members and rows by step."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self.members: dict[int, list[int]] = {}
        self.rows: dict[int, list[TrajectoryHeader]] = {}
        self._saved: dict[int, list[int]] = {}
        self._same_rows = True  # batches seen before come with the same trajectories, not only the same members

    def save(self) -> None:
        """A checkpoint has what was reserved so far."""
        self._saved = dict(self.members)

    def start_over(self) -> None:
        """The queue starts from the checkpoint, which has no rows and nothing of what was reserved later."""
        self.members = dict(self._saved)
        self._same_rows = False

    def reserved(self, step: int, batch: Reserved, tasks: dict[int, Task], seen: Announced) -> None:
        """The batch of a step that is not trained yet."""
        members = sorted({header.group_id for header in batch.headers})
        assert len(members) == BATCH and sorted(batch.tasks) == members
        rows = [(g, s, i) for g in members for s in range(GROUP) for i in range(segments(g, s))]
        assert [header.key for header in batch.headers] == rows
        assert all(task == tasks[group] for group, task in batch.tasks.items())
        for header in batch.headers:
            assert not stale(step, min(run.version.step for run in header.versions), self._bound)
        assert twice({**self.members, step: members}) == []
        assert self.members.setdefault(step, members) == members
        if self._same_rows and step in self.rows:
            self._check_rows(step, batch, seen)
        self.rows[step] = batch.headers

    def reserved_again(self, step: int, batch: Reserved, seen: Announced) -> None:
        """The same question once more, by the same trainer, which has not trained the step."""
        self._check_rows(step, batch, seen)
        self.rows[step] = batch.headers

    def trained_before(self, step: int, batch: Reserved, seen: Announced) -> None:
        """What was lost of a batch that was trained is missing, and nobody needs it."""
        kept = {header.key for header in batch.headers}
        assert all(header.key in kept or header.key[:2] in seen.lost() for header in self.rows[step])

    def _check_rows(self, step: int, batch: Reserved, seen: Announced) -> None:
        """Only what went with a shard comes as another attempt."""
        for old, new in zip(self.rows[step], batch.headers, strict=True):
            assert old == new or ((new.group_id, new.sample) in seen.lost() and new.attempt > old.attempt)


def record(store: Store, name: str) -> ConsumerRecord:
    """What the queue says of a consumer."""
    (found,) = [found for found in store.inspect(0.0, {}).consumers if found.name == name]
    return found


def refused(answer: object, code: str) -> bool:
    """Whether the answer says so."""
    return isinstance(answer, Refused) and answer.code == code


class Readers:
    """Consumers of one queue by name."""

    def __init__(self) -> None:
        self._began: dict[str, int] = {}  # positions
        self._groups: dict[str, list[int]] = {}  # acknowledged, in order

    @property
    def names(self) -> list[str]:
        """Those that there are."""
        return sorted(self._began)

    def subscribe(self, store: Store, name: str, oldest: bool) -> None:
        """One more, unless it exists."""
        answer = store.consumers.subscribe(name, oldest)
        assert isinstance(answer, Subscription)
        self._began.setdefault(name, answer.position)
        self._groups.setdefault(name, [])
        assert store.consumers.subscribe(name, not oldest) == answer

    def unsubscribe(self, store: Store, name: str) -> None:
        """One less."""
        del self._began[name], self._groups[name]
        assert store.consumers.unsubscribe(name) == store.consumers.unsubscribe(name) == Done()
        assert refused(store.consumers.read(name, -1, 1), "unknown_consumer")

    def read(
        self,
        store: Store,
        name: str,
        seen: Announced,
        batches: Batches,
        tasks: dict[int, Task],
        *,
        count: int,
        acknowledged: int,
        ahead: int,
    ) -> None:
        """Read ``count`` groups from ``ahead`` of its place on, and acknowledge some of them."""
        position, behind = record(store, name).position, record(store, name).behind
        if ahead > behind:
            assert refused(store.consumers.read(name, position + ahead, count), "bad_position")
        after = position + min(ahead, behind)
        reply = store.consumers.read(name, after, count)
        assert isinstance(reply, Delivered) and len(reply.groups) <= count
        here, lost = seen.groups_with_rows(), seen.lost()
        for place, group in enumerate(reply.groups, start=max(after, position) + 1):
            assert group.position == place and group.group_id in here
            kept = [h for h in batches.rows[group.step] if (h.group_id, h.sample) not in lost]
            kept = [h for h in kept if h.group_id == group.group_id]
            assert [h for h in group.headers if (h.group_id, h.sample) not in lost] == kept
            assert group.task == tasks[group.group_id]
        for group in reply.groups[:acknowledged] if ahead <= 0 else []:
            for _ in range(2):
                assert store.consumers.acknowledge(name, group.position) == Done()
            assert group.group_id not in self._groups[name], "every group comes once"
            self._groups[name].append(group.group_id)

    def read_to_the_end(self, store: Store, name: str, seen: Announced, batches: Batches) -> None:
        """Every group that was trained since it subscribed, and was not given up, has come once."""
        self.miss_only_what_is_counted(store)
        groups = self._groups[name]
        reply = store.consumers.read(name, -1, 1 << 20)
        assert isinstance(reply, Delivered) and {group.group_id for group in reply.groups} <= seen.groups_with_rows()
        groups += [group.group_id for group in reply.groups]
        assert len(groups) == len(set(groups))
        end = record(store, name).position + record(store, name).behind
        assert len(groups) + reply.skipped == end - self._began[name]
        trained = [group for step in range(STEPS) for group in batches.members[step]]
        assert set(groups) <= set(trained) and groups == sorted(groups, key=trained.index)
        since = trained[len(trained) - len(groups) :]
        assert reply.skipped or set(since) == set(groups), "only what was given up is missing"
        if reply.groups:
            assert store.consumers.acknowledge(name, reply.groups[-1].position) == Done()
            assert store.consumers.read(name, -1, 1) == Delivered(groups=[], skipped=reply.skipped)
        assert refused(store.consumers.acknowledge(name, STEPS * BATCH + 1), "bad_position")

    def miss_only_what_is_counted(self, store: Store) -> None:
        """What holds at any time."""
        for name in self.names:
            found = record(store, name)
            assert found.position == self._began[name] + len(self._groups[name]) + found.skipped and found.behind >= 0
