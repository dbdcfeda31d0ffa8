"""The registries of the store: readers of trained groups, engines with their versions, and payload shards.

    commit --> log (positions 1, 2, ... by step) --read--> consumers --acknowledge--> cursors

A consumer is a reader beside the trainer, by name, with a cursor that the journal keeps. A group is in the log from
its commit until the trainer has retired it and every consumer has acknowledged it. A group that the trainer retires
first is kept on the shelf, outside slots and admission's bytes, so that no consumer slows training. The shelf holds
``consumer_bytes``; beyond, its oldest groups are dropped, and counted for each consumer that missed them. Positions
in the log have no gaps, and a consumer's cursor is never below the log's first position less one.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

import msgspec

from rl_async import messages as m
from rl_async.configs.engines import ENGINES
from rl_async.transfer_queue import transitions as t
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.book import Book

MOST_CONSUMERS = 64
# Groups of one answer.
MOST_READ = 256
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One group of the log, with the step that trained it."""

    step: int
    group: int


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """A group on the shelf. ``nbytes`` counts its rows, its headers and its task."""

    task: m.Task
    headers: list[m.TrajectoryHeader]
    nbytes: int


class Cursor(msgspec.Struct):
    """A consumer has acknowledged all groups up to ``position``, or missed them: ``skipped`` of them in all."""

    position: int
    skipped: int = 0


class ConsumersState(msgspec.Struct, kw_only=True):
    """The dump of the consumers: log, shelf and cursors."""

    log: list[Entry] = []
    end: int = 0
    logged: int = 0
    shelf: dict[int, Kept] = {}
    cursors: dict[str, Cursor] = {}


class Consumers:
    """Readers by name. A verb decides and emits a transition; the methods named in the past tense apply it."""

    def __init__(self, book: Book, change: Callable[[t.Transition], None]) -> None:
        self._book, self._change = book, change
        # By position, and the positions by group.
        self._log: dict[int, Entry] = {}
        self._places: dict[int, int] = {}
        # The position of the newest entry.
        self._end = 0
        # The first step that was never in the log.
        self.logged = 0
        # By group, oldest first. A plain dict would pass all deleted entries on the way to its first one.
        self._shelf: OrderedDict[int, Kept] = OrderedDict()
        self._kept_bytes = 0
        self._cursors: dict[str, Cursor] = {}
        self.effects: t.Effects = {
            t.Subscribed: self.subscribed,
            t.Acknowledged: self.acknowledged,
            t.Unsubscribed: self.unsubscribed,
            t.Missed: self.missed,
        }

    # --- verbs ------------------------------------------------------------------------------------------------------

    def subscribe(self, consumer: str, oldest: bool) -> m.Subscription | m.Refused:
        """Make a consumer, unless it exists, that reads from the newest or the ``oldest`` group of the log on."""
        if consumer not in self._cursors:
            if not _NAME.fullmatch(consumer):
                reason = f"consumer {consumer!r}: a name has 1 to 100 letters, digits, and the characters . _ -"
                return m.Refused(code="bad_name", reason=reason)
            if len(self._cursors) >= MOST_CONSUMERS:
                reason = f"there are {MOST_CONSUMERS} consumers; unsubscribe one of: {', '.join(sorted(self._cursors))}"
                return m.Refused(code="full", reason=reason)
            position = self._first - 1 if oldest else self._end
            self._change(t.Subscribed(consumer=consumer, position=position))
        cursor = self._cursors[consumer]
        return m.Subscription(position=cursor.position, skipped=cursor.skipped)

    def read(self, consumer: str, after: int, max_groups: int) -> m.Delivered | m.Refused:
        """The groups after ``after`` or the cursor, the later of the two, in order of training."""
        cursor = self._cursors.get(consumer)
        if cursor is None:
            return self._unknown(consumer)
        if after > self._end:
            return self._beyond(after)
        start = max(after, cursor.position) + 1
        stop = min(self._end + 1, start + max(1, min(max_groups, MOST_READ)))
        groups = [self._delivered(position) for position in range(start, stop)]
        finished = self._book.finished and start > self._end
        return m.Delivered(groups=groups, skipped=cursor.skipped, finished=finished)

    def acknowledge(self, consumer: str, position: int) -> m.Done | m.Refused:
        """Move the consumer's cursor to ``position``; an earlier position changes nothing."""
        cursor = self._cursors.get(consumer)
        if cursor is None:
            return self._unknown(consumer)
        if position > self._end:
            return self._beyond(position)
        if position > cursor.position:
            freed = self._read_by_all({**self._positions(), consumer: position})
            self._change(t.Acknowledged(consumer=consumer, position=position, freed=freed))
        return m.Done()

    def unsubscribe(self, consumer: str) -> m.Done:
        """Forget a consumer and the groups that were kept for it alone; an unknown one is already forgotten."""
        if consumer in self._cursors:
            left = {name: at for name, at in self._positions().items() if name != consumer}
            self._change(t.Unsubscribed(consumer=consumer, freed=self._read_by_all(left)))
        return m.Done()

    def divide(self, retired: Sequence[int]) -> tuple[list[int], list[int]]:
        """Split groups that the trainer retires into those to forget and those to keep for consumers."""
        lowest = min(self._positions().values(), default=self._end)
        read: list[int] = []
        unread: list[int] = []
        for group in retired:
            (unread if self._places[group] > lowest else read).append(group)
        return read, unread

    def trim(self) -> None:
        """Drop the oldest groups of a shelf that is too full."""
        excess, freed = self._kept_bytes - self._book.settings.consumer_bytes, list[int]()
        for group, kept in self._shelf.items():
            if excess <= 0:
                break
            excess -= kept.nbytes
            freed.append(group)
        if freed:
            self._change(t.Missed(freed=freed))

    def records(self) -> list[m.ConsumerRecord]:
        """Name, position and backlog of each consumer, for inspection."""
        return [
            m.ConsumerRecord(name=name, position=at.position, behind=self._end - at.position, skipped=at.skipped)
            for name, at in sorted(self._cursors.items())
        ]

    @property
    def kept_bytes(self) -> int:
        """Bytes of the groups on the shelf."""
        return self._kept_bytes

    def keeps(self, group: int) -> bool:
        """Whether the group is on the shelf."""
        return group in self._shelf

    def task_of(self, group: int) -> m.Task | None:
        """Return the task of a group on the shelf, and None for others."""
        kept = self._shelf.get(group)
        return None if kept is None else kept.task

    def headers_of(self, group: int) -> list[m.TrajectoryHeader]:
        """Headers of the rows of a group on the shelf."""
        kept = self._shelf.get(group)
        return [] if kept is None else kept.headers

    def kept_samples(self) -> list[m.TrajectoryHeader]:
        """The first header of each sample on the shelf."""
        return [header for kept in self._shelf.values() for header in kept.headers if header.segment == 0]

    @property
    def _first(self) -> int:
        return self._end - len(self._log) + 1

    def _positions(self) -> dict[str, int]:
        return {name: cursor.position for name, cursor in self._cursors.items()}

    def _read_by_all(self, positions: dict[str, int]) -> list[int]:
        """The groups on the shelf that every consumer has read if their cursors are at these positions.

        The shelf is in the order of positions, so that the walk ends at the first unread group.
        """
        lowest = min(positions.values(), default=self._end)
        return list(takewhile(lambda group: self._places[group] <= lowest, self._shelf))

    def _delivered(self, position: int) -> m.DeliveredGroup:
        entry = self._log[position]
        kept = self._shelf.get(entry.group)
        if kept is None:
            group = self._book.groups[entry.group]
            kept = Kept(group.task, group.headers(), 0)
        return m.DeliveredGroup(
            position=position, step=entry.step, group_id=entry.group, task=kept.task, headers=kept.headers
        )

    def _beyond(self, position: int) -> m.Refused:
        reason = f"the newest position is {self._end}, and {position} was given, perhaps by a queue before this one"
        return m.Refused(code="bad_position", reason=reason)

    def _unknown(self, consumer: str) -> m.Refused:
        known = ", ".join(sorted(self._cursors)) or "none"
        return m.Refused(code="unknown_consumer", reason=f"no consumer {consumer!r}; subscribed: {known}")

    # --- effects ----------------------------------------------------------------------------------------------------

    def subscribed(self, event: t.Subscribed) -> None:
        self._cursors[event.consumer] = Cursor(event.position)

    def acknowledged(self, event: t.Acknowledged) -> None:
        self._cursors[event.consumer].position = event.position
        self._forget(event.freed)

    def unsubscribed(self, event: t.Unsubscribed) -> None:
        del self._cursors[event.consumer]
        self._forget(event.freed)

    def missed(self, event: t.Missed) -> None:
        """Apply `Missed`: move consumers that have not read these groups past them."""
        last = self._places[event.freed[-1]]
        for cursor in self._cursors.values():
            if cursor.position < last:
                self._skip(cursor, last)
        self._forget(event.freed)

    def committed(self, batches: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Append the batches from the step ``logged`` on to the log.

        A rollback appends no batch again: its groups are the same, with the same rows.
        """
        for step, groups in batches:
            self.logged = step + 1
            for group in groups:
                self._end += 1
                self._log[self._end] = Entry(step, group)
                self._places[group] = self._end

    def retired(self, event: t.Retired) -> None:
        """Apply `Retired`: drop groups from the log, or keep them on the shelf; they are still in the book."""
        for group_id in event.shelved:
            group = self._book.groups[group_id]
            headers = group.headers()
            words = len(msgspec.msgpack.encode((group.task, headers)))
            self._keep(group_id, Kept(group.task, headers, words + sum(header.nbytes for header in headers)))
        self._forget(event.groups)

    def lost(self, group: int, sample: int) -> None:
        """Drop a sample that was lost with its payload shard; consumers get the group without it."""
        kept = self._shelf[group]
        gone = sum(header.nbytes for header in kept.headers if header.sample == sample)
        left = [header for header in kept.headers if header.sample != sample]
        self._shelf[group] = Kept(kept.task, left, kept.nbytes - gone)
        self._kept_bytes -= gone

    def rolled_back(self, event: t.RolledBack) -> None:
        """Apply `RolledBack`: a queue that starts over has no earlier rows, so consumers skip to the end of the log."""
        if not event.fresh:
            return
        for cursor in self._cursors.values():
            self._skip(cursor, self._end)
        self._log.clear()
        self._places.clear()
        self._shelf.clear()
        self._kept_bytes, self.logged = 0, event.step

    def _skip(self, cursor: Cursor, position: int) -> None:
        self._book.counters["consumers_missed"] += position - cursor.position
        cursor.skipped += position - cursor.position
        cursor.position = position

    def _keep(self, group: int, kept: Kept) -> None:
        self._shelf[group] = kept
        self._kept_bytes += kept.nbytes

    def _forget(self, groups: Sequence[int]) -> None:
        for group in groups:
            position = self._places.pop(group, None)
            if position is not None:
                del self._log[position]
            kept = self._shelf.pop(group, None)
            if kept is not None:
                self._kept_bytes -= kept.nbytes

    # --- dump and load ----------------------------------------------------------------------------------------------

    def dump(self) -> ConsumersState:
        """The state for a dump; equal for equal consumers."""
        return ConsumersState(
            log=[self._log[position] for position in range(self._first, self._end + 1)],
            end=self._end,
            logged=self.logged,
            shelf=dict(self._shelf),
            cursors={name: self._cursors[name] for name in sorted(self._cursors)},
        )

    def load(self, state: ConsumersState) -> None:
        self._end, self.logged, self._cursors = state.end, state.logged, state.cursors
        first = state.end - len(state.log) + 1
        self._log = dict(enumerate(state.log, first))
        self._places = {entry.group: position for position, entry in self._log.items()}
        for group, kept in state.shelf.items():
            self._keep(group, kept)


_URL = re.compile(r"https?://[^\s/]+(/\S*)?")


class Engines:
    """Engines by id. The revision grows with every change, publications included."""

    def __init__(self, change: Callable[[t.Transition], None]) -> None:
        self._change = change
        self._engines: dict[str, m.EngineRecord] = {}
        # The reply for this revision, made at the first request.
        self._list: m.EngineList | None = None
        self.revision = 0
        self.effects: t.Effects = {
            t.EnginesChanged: self.changed,
            t.EngineChanged: self.engine_changed,
            t.EngineRemoved: self.engine_removed,
        }

    def listed(self, published: m.Version) -> m.EngineList:
        """The registry as a reply, in order of registration: the same object until it changes. Not to be modified."""
        if self._list is None or self._list.published != published:
            engines = list(self._engines.values())
            self._list = m.EngineList(revision=self.revision, engines=engines, published=published)
        return self._list

    def register(self, engine_id: str, url: str, kind: str) -> m.Done | m.Refused:
        """Add an engine, unless it is registered. It gets no traffic before it confirms a version."""
        known = self._engines.get(engine_id)
        if kind not in ENGINES or not _URL.fullmatch(url):
            reason = f"engine {engine_id} at {url!r} of kind {kind!r}: give http://HOST:PORT and one of {list(ENGINES)}"
            return m.Refused(code="bad_engine", reason=reason)
        if known is None:
            self._set(m.EngineRecord(engine_id=engine_id, url=url, kind=kind))
        elif (known.url, known.kind) != (url, kind):
            return m.Refused(code="conflict", reason=f"engine {engine_id} is registered at {known.url} ({known.kind})")
        return m.Done()

    def remove(self, engine_id: str) -> m.Done:
        """Forget an engine; an unknown one is already forgotten."""
        if engine_id in self._engines:
            self._change(t.EngineRemoved(revision=self.revision + 1, engine_id=engine_id))
        return m.Done()

    def confirm(self, engine_id: str, version: m.Version) -> m.Done | m.Refused:
        """Record that an engine serves ``version``. A late confirmation of an older one changes nothing."""
        known = self._engines.get(engine_id)
        if known is None:
            return m.Refused(code="unknown_engine", reason=f"engine {engine_id} is not registered")
        raised = _raised(known, version)
        if raised is not known:
            self._set(raised)
        return m.Done()

    def withdraw(self, engine_ids: Iterable[str]) -> m.Done:
        """Take engines out of traffic until they confirm a version again; unknown ones are passed over."""
        gone = [self._engines[name] for name in engine_ids if name in self._engines]
        for engine in gone:
            if engine.version is not None:
                self._set(msgspec.structs.replace(engine, version=None))
        return m.Done()

    def published(self, engine_ids: Iterable[str], version: m.Version) -> None:
        """Record that these engines confirmed the published ``version``; engines removed meanwhile are passed over."""
        serving = set(engine_ids)
        self._announce(
            [_raised(engine, version) if engine.engine_id in serving else engine for engine in self._engines.values()]
        )

    def unpublished(self) -> None:
        """Announce a new revision after a rollback: no version is published any more."""
        self._announce(list(self._engines.values()))

    def forget_all(self) -> None:
        """Remove all engines: their processes are gone."""
        if self._engines:
            self._announce([])

    def _set(self, engine: m.EngineRecord) -> None:
        self._change(t.EngineChanged(revision=self.revision + 1, engine=engine))

    def _announce(self, records: Sequence[m.EngineRecord]) -> None:
        self._change(t.EnginesChanged(revision=self.revision + 1, engines=[*records]))

    def changed(self, event: t.EnginesChanged) -> None:
        self.revision, self._list = event.revision, None
        self._engines = {engine.engine_id: engine for engine in event.engines}

    def engine_changed(self, event: t.EngineChanged) -> None:
        self.revision, self._list = event.revision, None
        self._engines[event.engine.engine_id] = event.engine

    def engine_removed(self, event: t.EngineRemoved) -> None:
        self.revision, self._list = event.revision, None
        self._engines.pop(event.engine_id, None)

    def dump(self) -> t.EnginesChanged:
        """The state, as the transition that would lead to it."""
        return t.EnginesChanged(revision=self.revision, engines=[*self._engines.values()])


def _raised(engine: m.EngineRecord, version: m.Version) -> m.EngineRecord:
    """The record with ``version``, or unchanged if its version is not older."""
    behind = engine.version is None or engine.version < version
    return msgspec.structs.replace(engine, version=version) if behind else engine


class ShardsState(msgspec.Struct, kw_only=True):
    """The registry, without the times of signs of life."""

    revision: int
    shards: list[m.ShardRecord]


class Shards:
    """Payload shards by id. A lost shard never comes back under its id: it starts again without rows."""

    def __init__(self, book: Book, change: Callable[[t.Transition], None], consumers: Consumers) -> None:
        self._book, self._change, self._consumers = book, change, consumers
        self._shards: dict[str, m.ShardRecord] = {}
        self._heard: dict[str, float] = {}
        self.revision = 0
        self.effects: t.Effects = {t.ShardsChanged: self.changed, t.ShardLost: self.shard_lost}

    def list(self) -> m.ShardList:
        """The registry of payload shards, as a reply."""
        return m.ShardList(
            revision=self.revision, replicas=self._book.settings.replicas, shards=list(self._shards.values())
        )

    def register(self, record: m.ShardRecord, now: float) -> m.Done | m.Refused:
        """Add a shard, unless it is registered. It replaces another of its name, which is lost."""
        if not self._book.settings.replicas:
            return m.Refused(code="shards", reason="this queue keeps its payloads itself (queue.shards=0)")
        if record.shard_id not in self._shards:
            for shard_id in [key for key, other in self._shards.items() if other.name == record.name]:
                self._lose(shard_id)
            self._change(t.ShardsChanged(revision=self.revision + 1, shards=[*self._shards.values(), record]))
        self._heard[record.shard_id] = now
        return m.Done()

    def hear(self, shard_id: str, now: float) -> None:
        """Note a sign of life of a registered shard."""
        if shard_id in self._shards:
            self._heard[shard_id] = now

    def sweep(self, shard_id: str, groups: Sequence[int]) -> m.Swept | m.Refused:
        """Say which of these groups are gone. A parked request does not count as a sign of life."""
        if shard_id not in self._shards:
            return m.Refused(
                code=wire.SHARD_LOST, reason=f"shard {shard_id} is not registered; it must start again without rows"
            )
        return m.Swept(
            gone=[group for group in groups if group not in self._book.groups and not self._consumers.keeps(group)]
        )

    def misplaced(self, headers: Sequence[m.TrajectoryHeader]) -> m.Refused | None:
        """Refuse the rows of a sample that no registered shard keeps."""
        shards = headers[0].shards
        if any(header.shards != shards or header.nbytes <= 0 for header in headers):
            return m.Refused(code="rows", reason="the rows of a sample lie on the same shards, and none is empty")
        if any(shard_id in self._shards for shard_id in shards):
            return None
        return m.Refused(code=wire.SHARD_LOST, reason=f"of the shards {shards} none is known")

    def places(self, rows: Sequence[m.RowKey]) -> m.Elsewhere | m.Refused:
        """The attempts and shards that hold these rows."""
        attempts: list[int] = []
        shards: list[list[str]] = []
        for key in rows:
            header = self._header(key)
            if isinstance(header, m.Refused):
                return header
            attempts.append(header.attempt)
            shards.append([shard_id for shard_id in header.shards if shard_id in self._shards])
        urls = {shard_id: self._shards[shard_id].url for shard_id in {each for some in shards for each in some}}
        return m.Elsewhere(attempts=attempts, shards=shards, urls=urls)

    def _header(self, key: m.RowKey) -> m.TrajectoryHeader | m.Refused:
        group_id, index, segment = key
        group = self._book.groups.get(group_id)
        if index < 0:
            return self._medium(key)
        if group is None:
            headers = [header for header in self._consumers.headers_of(group_id) if header.sample == index]
        else:
            headers = group.samples[index].headers if 0 <= index < len(group.samples) else []
            if not headers and 0 <= index < len(group.samples):
                return m.Refused(code=wire.ROWS_LOST, reason=f"sample {index} of group {group_id} is generated again")
        if not 0 <= segment < len(headers):
            return m.Refused(code="unknown_row", reason=f"no row (group, sample, segment) {key}")
        return headers[segment]

    def _medium(self, key: m.RowKey) -> m.TrajectoryHeader | m.Refused:
        """A header with the shards of a medium: those of the rows that refer to it, as attempt 0."""
        group_id, index, segment = key
        group = self._book.groups.get(group_id)
        headers = self._consumers.headers_of(group_id) if group is None else group.headers()
        for header in headers if segment == 0 else []:
            if index in map(m.media_sample, header.media) and not self._shards.keys().isdisjoint(header.shards):
                return msgspec.structs.replace(header, attempt=0)
        return m.Refused(code="unknown_row", reason=f"no medium {key}")

    def expire(self, now: float) -> None:
        """Remove the shards that were silent for the lease time."""
        for shard_id in [key for key, heard in self._heard.items() if now - heard >= self._book.settings.lease_s]:
            self._lose(shard_id)

    def forget_all(self) -> None:
        """Remove all shards: their processes are gone.

        If the run has had shards only since its relaunch, the rows that the queue kept itself are generated again, too:
        clients look for rows in shards only.
        """
        for shard_id in list(self._shards):
            self._lose(shard_id)
        if self._book.settings.replicas:
            self._lose("")

    def revive(self, now: float) -> None:
        """Restart all times after a replay, which has none: every shard was heard of just now."""
        self._heard = dict.fromkeys(self._shards, now)

    def _lose(self, shard_id: str) -> None:
        left = self._shards.keys() - {shard_id}
        here = [
            (group.group_id, index, sample.headers[0])
            for group in self._book.groups.values()
            for index, sample in enumerate(group.samples)
            if sample.here
        ]
        here += [(header.group_id, header.sample, header) for header in self._consumers.kept_samples()]
        samples = [(group, index) for group, index, header in here if left.isdisjoint(header.shards)]
        if shard_id or samples:
            self._change(t.ShardLost(shard_id=shard_id, samples=samples))

    # --- effects ----------------------------------------------------------------------------------------------------

    def changed(self, event: t.ShardsChanged) -> None:
        self.revision = event.revision
        self._shards = {shard.shard_id: shard for shard in event.shards}

    def shard_lost(self, event: t.ShardLost) -> None:
        """Apply `ShardLost`: remove the shard; samples without another copy wait again."""
        self.revision += 1
        self._shards.pop(event.shard_id, None)
        self._heard.pop(event.shard_id, None)
        for group_id, index in event.samples:
            if group_id in self._book.groups:
                self._book.lost(self._book.groups[group_id], index)
            else:
                self._consumers.lost(group_id, index)
        self._book.counters["shards_lost"] += bool(event.shard_id)
        self._book.counters["samples_lost"] += len(event.samples)

    def clear(self) -> None:
        """Remove all shards after a fresh start, which gives the ids of their rows to others."""
        self.revision += 1
        self._shards, self._heard = {}, {}

    # --- dump and load ----------------------------------------------------------------------------------------------

    def dump(self) -> ShardsState:
        """The state for a dump; equal for equal registries."""
        return ShardsState(revision=self.revision, shards=list(self._shards.values()))

    def load(self, state: ShardsState) -> None:
        self.changed(t.ShardsChanged(revision=state.revision, shards=state.shards))
