"""What must hold in every schedule, whatever struck."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, NoReturn

from rl_async.messages import DeliveredGroup, Leased, Refused, Reply, Taken, TrajectoryHeader
from rl_async.transfer_queue.admission import QueueSettings
from rl_async.transfer_queue.delivery import NO_SIGNAL
from rl_async.transfer_queue.store import Store
from rl_async.transfer_queue.transitions import (
    BatchCommitted,
    BatchReserved,
    DeadLettered,
    GroupDropped,
    Missed,
    RolledBack,
)
from tests.simulation.surroundings import Disk
from tests.support.queue import Sample, lost, stale, twice

Tokens = list[str]  # by segment


class Broken(AssertionError):
    """A rule does not hold."""


class Checkpoint(NamedTuple):
    """What the trainer goes back to."""

    step: int = 0
    queue: bytes = b""
    batches: Mapping[int, list[TrajectoryHeader]] = MappingProxyType({})


@dataclass
class Record:
    """What a consumer has of one queue's groups, and where it stands."""

    began: int
    position: int = 0
    skipped: int = 0
    groups: dict[int, tuple[int, int]] = field(default_factory=dict)  # (step, group) by position

    def __post_init__(self) -> None:
        self.position = self.began


class Rules:
    """Remembers what clients were told and did."""

    def __init__(self, settings: QueueSettings) -> None:
        self._settings = settings
        self._holders: dict[tuple[int, int, int], str] = {}  # by group, sample and attempt
        self._puts: set[tuple[str, ...]] = set()
        self._taken: dict[Sample, Tokens] = {}
        self._batches: dict[int, list[TrajectoryHeader]] = {}
        self._trained: dict[int, dict[Sample, Tokens]] = {}  # by step, of the history that survives
        self._generated_again: set[int] = set()  # steps whose batches the checkpoint knew, but not their rows
        self._disk = ""

    def broken(self, rule: str) -> NoReturn:
        """Raise Broken."""
        raise Broken(rule)

    def _check(self, holds: bool, rule: str) -> None:
        if not holds:
            raise Broken(rule)

    # --- workers ----------------------------------------------------------------------------------------------------

    def silent(self, worker: str, seconds: float) -> None:
        """A lease ends for silence only if the queue has listened for the time of a lease."""
        self._check(seconds >= self._settings.lease_s, f"{worker}'s leases ended after {seconds:.3f} s of silence")

    def leased(self, worker: str, reply: Leased) -> None:
        """Every lease belongs to one worker."""
        for group in reply.groups:
            for sample in group.samples:
                holder = self._holders.setdefault((group.group_id, sample, group.attempt), worker)
                place = f"attempt {group.attempt} at sample {sample} of group {group.group_id}"
                self._check(holder == worker, f"one lease, one worker: {place} went to {holder} and {worker}")

    def put(self, headers: Sequence[TrajectoryHeader]) -> None:
        """A worker hands over a sample."""
        self._puts.add(tuple(header.tokens_hash for header in headers))

    def answered(self, samples: Sequence[Sequence[TrajectoryHeader]], reply: Reply) -> None:
        """What was answered as taken must be trained with these tokens."""
        self._check(isinstance(reply, Taken) and len(reply.refused) == len(samples), f"a put was answered {reply}")
        assert isinstance(reply, Taken)
        for headers, refused in zip(samples, reply.refused):
            first = headers[0]
            if isinstance(refused, Refused):
                self._check(refused.code == "fenced", f"a put is taken or fenced, not {refused}")
                continue
            tokens = [header.tokens_hash for header in headers]
            before = self._taken.setdefault((first.group_id, first.sample), tokens)
            self._check(before == tokens, f"one sample was taken twice: {before} and {tokens}")

    # --- trainer ----------------------------------------------------------------------------------------------------

    def reserved(self, step: int, headers: list[TrajectoryHeader]) -> None:
        """A step has one batch, complete, and with the same members whenever it is asked for."""
        groups = sorted({header.group_id for header in headers})
        wanted = [
            (group, sample, segment)
            for group in groups
            for sample in range(self._settings.group_size)
            for segment in range(1 + (group + sample) % 2)
        ]
        self._check(len(groups) == self._settings.batch_groups, f"batch {step} has the groups {groups}")
        self._check([header.key for header in headers] == wanted, f"batch {step} is not complete")
        before = self._batches.get(step, headers)
        members = sorted({header.group_id for header in before})
        self._check(groups == members, f"same batch whenever it is reserved: step {step} had {members}, has {groups}")
        same = before == headers or step in self._generated_again
        self._check(same, f"step {step} has the same members with other rows")
        self._generated_again.discard(step)
        self._batches[step] = headers

    def trained(self, step: int, headers: Sequence[TrajectoryHeader], rows: Sequence[bytes]) -> None:
        """Nothing twice, nothing too old, nothing but what was put."""
        batch: dict[Sample, Tokens] = {}
        groups = {at: {group for group, _ in samples} for at, samples in self._trained.items()}
        again = twice({**groups, step: {header.group_id for header in headers}})
        self._check(not again, f"no group is trained twice: {again}")
        for header, row in zip(headers, rows, strict=True):
            name = f"sample {header.sample} of group {header.group_id}"
            oldest = min(run.version.step for run in header.versions)
            bound = self._settings.max_staleness
            self._check(
                not stale(step, oldest, bound), f"staleness of {name} at step {step}: {step - oldest} > {bound}"
            )
            self._check(row.decode() == header.tokens_hash, f"{name} has the header of other tokens")
            batch.setdefault((header.group_id, header.sample), []).append(header.tokens_hash)
        for key, tokens in batch.items():
            self._check(tuple(tokens) in self._puts, f"{key} was trained with {tokens}, which nobody put")
            taken = self._taken.get(key, tokens)
            self._check(taken == tokens, f"taken {taken}, trained {tokens}")
            worker, _, attempt = tokens[0].split(":")
            holder = self._holders.get((*key, int(attempt)), worker)
            self._check(holder == worker, f"{key} is of {worker}, but {holder} had the lease")
        self._trained[step] = batch

    def checkpoint(self, step: int, queue: bytes) -> Checkpoint:
        """What is durable from now on."""
        return Checkpoint(step, queue, dict(self._batches))

    def disk_lost(self) -> None:
        """What was taken is lost, and leases count again."""
        self._holders.clear()
        self._taken.clear()

    def resumed(self, saved: Checkpoint, disk: str) -> None:
        """The history behind the checkpoint is void; a queue that lost its disk knows only what the checkpoint has."""
        self._trained = {step: batch for step, batch in self._trained.items() if step < saved.step}
        if disk != self._disk:
            self._disk = disk
            self._batches = {step: batch for step, batch in saved.batches.items() if step >= saved.step}
            self._generated_again = set(self._batches)

    # --- other readers ----------------------------------------------------------------------------------------------

    def consumed(self, record: Record, group: DeliveredGroup, rows: Sequence[str]) -> None:
        """A consumer takes one group more, with the rows that were put."""
        tokens = [header.tokens_hash for header in group.headers]
        self._check(list(rows) == tokens, f"group {group.group_id} was delivered with other rows")
        trained = self._trained.get(group.step, {})
        known = [token for (of, _), each in sorted(trained.items()) if of == group.group_id for token in each]
        self._check(not known or known == tokens, f"delivered {tokens}, trained {known}")
        record.groups[group.position] = (group.step, group.group_id)
        record.position = group.position

    def _everything_consumed(self, record: Record, disk: Disk) -> None:
        """Each group that this queue saw trained came once, in order, or was given up and counted.

        One that came and was given up before it was acknowledged counts, too.
        """
        given_up: set[int] = set()
        log: list[tuple[int, int]] = []
        batches: dict[int, list[int]] = {}
        logged = 0
        for event in disk.history:
            match event:
                case BatchReserved(step=step, groups=groups):
                    batches[step] = groups
                case BatchCommitted(step=step) if step >= logged:
                    logged = step + 1
                    log += [(step, group) for group in batches[step]]
                case RolledBack(fresh=True, step=step):
                    logged = step
                    given_up |= {group for _, group in log}
                case Missed(freed=freed):
                    given_up |= set(freed)
        missing = 0
        for position, entry in enumerate(log, start=1):
            if position > record.began:
                missing += position not in record.groups
                self._check(position in record.groups or entry[1] in given_up, f"{entry} never came, nor was given up")
                came = record.groups.get(position, entry)
                self._check(came == entry, f"position {position} is {entry}, and {came} was delivered")
        self._check(missing <= record.skipped, f"{missing} groups never came, {record.skipped} were counted")

    # --- the end ----------------------------------------------------------------------------------------------------

    def ended(self, store: Store, disk: Disk, recovered: bytes, now: float, record: Record | None) -> None:
        """Everything was driven to the end: nothing is lost, nothing is left over."""
        if record is not None:
            self._everything_consumed(record, disk)
        steps = self._settings.steps
        self._check(sorted(self._trained) == list(range(steps)), f"trained the steps {sorted(self._trained)}")
        self._check(recovered == store.dump(), "a replay gives the store that was there")
        trained = {key: tokens for batch in self._trained.values() for key, tokens in batch.items()}
        given_up = self._given_up(store, disk, now)
        missing = lost(self._taken.items(), trained, given_up.__contains__)
        self._check(not missing, f"what was taken is trained or given up: {missing}")
        both = {group for group, _ in trained} & given_up
        self._check(not both, f"the groups {both} were given up and trained")
        self._nothing_left(store, disk, now)

    def _given_up(self, store: Store, disk: Disk, now: float) -> set[int]:
        """Groups given up, each for a reason that was counted."""
        groups: set[int] = set()
        reasons: Counter[str] = Counter()
        committed = False
        for event in disk.history:
            match event:
                case GroupDropped(group=group, reason=reason):
                    groups.add(group)
                    reasons["refilled" if reason == NO_SIGNAL else "dropped"] += 1
                case DeadLettered(group=group):
                    groups.add(group)
                    reasons["dead_letters"] += 1
                case BatchCommitted():
                    committed = True
                case RolledBack(fresh=True):
                    self._check(not committed, "a queue that has its journal takes nothing from a checkpoint")
        counters = store.status(now).counters
        counted = {name: counters.get(name, 0) for name in ("refilled", "dropped", "dead_letters")}
        self._check(all(reasons[name] == n for name, n in counted.items()), f"given up {reasons}, counted {counted}")
        return groups

    def _nothing_left(self, store: Store, disk: Disk, now: float) -> None:
        status = store.status(now)
        left = (status.slots_used, status.waiting, status.leased, status.ready, status.reserved, status.payload_bytes)
        self._check(not any(left), f"slots, waiting, leased, ready, reserved, bytes at the end: {left}")
        self._check(not disk.rows, f"payloads of the groups {sorted(disk.rows)} were never freed")
