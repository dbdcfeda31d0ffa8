"""The registries: engines with the weights that they confirmed, and payload shards with what is lost with one."""

import re
from collections.abc import Callable, Iterable, Sequence

import msgspec

from rl_async.configs.engines import ENGINES
from rl_async.messages import (
    Done,
    Elsewhere,
    EngineList,
    EngineRecord,
    Refused,
    RowKey,
    ShardList,
    ShardRecord,
    Swept,
    TrajectoryHeader,
    Version,
    media_sample,
)
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.state.book import Book
from rl_async.transfer_queue.state.consumers import Consumers
from rl_async.transfer_queue.state.transitions import (
    Effects,
    EngineChanged,
    EngineRemoved,
    EnginesChanged,
    ShardLost,
    ShardsChanged,
    Transition,
)

_URL = re.compile(r"https?://[^\s/]+(/\S*)?")


class Engines:
    """Engines by id. The revision grows with every change, publications included."""

    def __init__(self, change: Callable[[Transition], None]) -> None:
        self._change = change
        self._engines: dict[str, EngineRecord] = {}
        self._list: EngineList | None = None  # of this revision, once it was asked for
        self.revision = 0
        self.effects: Effects = {
            EnginesChanged: self.changed,
            EngineChanged: self.engine_changed,
            EngineRemoved: self.engine_removed,
        }

    def listed(self, published: Version) -> EngineList:
        """The registry as a reply, in order of registration: the same object until it changes. Not to be modified."""
        if self._list is None or self._list.published != published:
            engines = list(self._engines.values())
            self._list = EngineList(revision=self.revision, engines=engines, published=published)
        return self._list

    def register(self, engine_id: str, url: str, kind: str) -> Done | Refused:
        """Add an engine; the same again changes nothing. It gets no traffic before it confirms a version."""
        known = self._engines.get(engine_id)
        if kind not in ENGINES or not _URL.fullmatch(url):
            reason = f"engine {engine_id} at {url!r} of kind {kind!r}: give http://HOST:PORT and one of {list(ENGINES)}"
            return Refused(code="bad_engine", reason=reason)
        if known is None:
            self._set(EngineRecord(engine_id=engine_id, url=url, kind=kind))
        elif (known.url, known.kind) != (url, kind):
            return Refused(code="conflict", reason=f"engine {engine_id} is registered at {known.url} ({known.kind})")
        return Done()

    def remove(self, engine_id: str) -> Done:
        """Forget an engine; an unknown one is already forgotten."""
        if engine_id in self._engines:
            self._change(EngineRemoved(revision=self.revision + 1, engine_id=engine_id))
        return Done()

    def confirm(self, engine_id: str, version: Version) -> Done | Refused:
        """An engine serves ``version`` now. A late confirmation of an older one changes nothing."""
        known = self._engines.get(engine_id)
        if known is None:
            return Refused(code="unknown_engine", reason=f"engine {engine_id} is not registered")
        raised = _raised(known, version)
        if raised is not known:
            self._set(raised)
        return Done()

    def withdraw(self, engine_ids: Iterable[str]) -> Done:
        """Take engines out of traffic until they confirm a version again; unknown ones are passed over."""
        gone = [self._engines[name] for name in engine_ids if name in self._engines]
        for engine in gone:
            if engine.version is not None:
                self._set(msgspec.structs.replace(engine, version=None))
        return Done()

    def published(self, engine_ids: Iterable[str], version: Version) -> None:
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

    def _set(self, engine: EngineRecord) -> None:
        self._change(EngineChanged(revision=self.revision + 1, engine=engine))

    def _announce(self, records: Sequence[EngineRecord]) -> None:
        self._change(EnginesChanged(revision=self.revision + 1, engines=[*records]))

    def changed(self, event: EnginesChanged) -> None:
        """Apply the event: replace the registry."""
        self.revision, self._list = event.revision, None
        self._engines = {engine.engine_id: engine for engine in event.engines}

    def engine_changed(self, event: EngineChanged) -> None:
        """Apply the event: add the engine, or replace its record."""
        self.revision, self._list = event.revision, None
        self._engines[event.engine.engine_id] = event.engine

    def engine_removed(self, event: EngineRemoved) -> None:
        """Apply the event: forget the engine."""
        self.revision, self._list = event.revision, None
        self._engines.pop(event.engine_id, None)

    def dump(self) -> EnginesChanged:
        """The state, as the change that would lead to it."""
        return EnginesChanged(revision=self.revision, engines=[*self._engines.values()])


def _raised(engine: EngineRecord, version: Version) -> EngineRecord:
    """The record at ``version``; itself if it is there or beyond."""
    behind = engine.version is None or engine.version < version
    return msgspec.structs.replace(engine, version=version) if behind else engine


class ShardsState(msgspec.Struct, kw_only=True):
    """The registry; when each was heard of is not kept."""

    revision: int
    shards: list[ShardRecord]


class Shards:
    """Payload shards by id. A shard that was lost never comes back under its id: it starts again with nothing."""

    def __init__(self, book: Book, change: Callable[[Transition], None], consumers: Consumers) -> None:
        self._book, self._change, self._consumers = book, change, consumers
        self._shards: dict[str, ShardRecord] = {}
        self._heard: dict[str, float] = {}
        self.revision = 0
        self.effects: Effects = {ShardsChanged: self.changed, ShardLost: self.shard_lost}

    def list(self) -> ShardList:
        """The registry of payload shards, as a reply."""
        return ShardList(
            revision=self.revision, replicas=self._book.settings.replicas, shards=list(self._shards.values())
        )

    def register(self, record: ShardRecord, now: float) -> Done | Refused:
        """A shard is ready; the same again changes nothing. Another of its name, which it replaces, is lost."""
        if not self._book.settings.replicas:
            return Refused(code="shards", reason="this queue keeps its payloads itself (queue.shards=0)")
        if record.shard_id not in self._shards:
            for shard_id in [key for key, other in self._shards.items() if other.name == record.name]:
                self._lose(shard_id)
            self._change(ShardsChanged(revision=self.revision + 1, shards=[*self._shards.values(), record]))
        self._heard[record.shard_id] = now
        return Done()

    def hear(self, shard_id: str, now: float) -> None:
        """Note a sign of life of a registered shard."""
        if shard_id in self._shards:
            self._heard[shard_id] = now

    def sweep(self, shard_id: str, groups: Sequence[int]) -> Swept | Refused:
        """Which of these groups are gone. Asking is no sign of life, since the question may have waited for long."""
        if shard_id not in self._shards:
            return Refused(
                code=wire.SHARD_LOST,
                reason=f"shard {shard_id} is not registered; it must start again without rows",
            )
        return Swept(
            gone=[group for group in groups if group not in self._book.groups and not self._consumers.keeps(group)]
        )

    def misplaced(self, headers: Sequence[TrajectoryHeader]) -> Refused | None:
        """The refusal of rows of one sample that no registered shard keeps; None if one does."""
        shards = headers[0].shards
        if any(header.shards != shards or header.nbytes <= 0 for header in headers):
            return Refused(code="rows", reason="the rows of a sample lie on the same shards, and none is empty")
        if any(shard_id in self._shards for shard_id in shards):
            return None
        return Refused(code=wire.SHARD_LOST, reason=f"of the shards {shards} none is known")

    def places(self, rows: Sequence[RowKey]) -> Elsewhere | Refused:
        """The attempts and shards that hold these rows."""
        attempts: list[int] = []
        shards: list[list[str]] = []
        for key in rows:
            header = self._header(key)
            if isinstance(header, Refused):
                return header
            attempts.append(header.attempt)
            shards.append([shard_id for shard_id in header.shards if shard_id in self._shards])
        urls = {shard_id: self._shards[shard_id].url for shard_id in {each for some in shards for each in some}}
        return Elsewhere(attempts=attempts, shards=shards, urls=urls)

    def _header(self, key: RowKey) -> TrajectoryHeader | Refused:
        group_id, index, segment = key
        group = self._book.groups.get(group_id)
        if index < 0:
            return self._medium(key)
        if group is None:
            headers = self._consumers.kept_headers(group_id, index)
        else:
            headers = group.samples[index].headers if 0 <= index < len(group.samples) else []
            if not headers and 0 <= index < len(group.samples):
                return Refused(code=wire.ROWS_LOST, reason=f"sample {index} of group {group_id} is generated again")
        if not 0 <= segment < len(headers):
            return Refused(code="unknown_row", reason=f"no row (group, sample, segment) {key}")
        return headers[segment]

    def _medium(self, key: RowKey) -> TrajectoryHeader | Refused:
        """A header that says where a medium is: beside the rows that refer to it, as attempt 0."""
        group_id, index, segment = key
        group = self._book.groups.get(group_id)
        headers = self._consumers.headers_of(group_id) if group is None else group.headers()
        for header in headers if segment == 0 else []:
            if index in map(media_sample, header.media) and not self._shards.keys().isdisjoint(header.shards):
                return msgspec.structs.replace(header, attempt=0)
        return Refused(code="unknown_row", reason=f"no medium {key}")

    def expire(self, now: float) -> None:
        """Remove the shards that were silent for the lease time."""
        for shard_id in [key for key, heard in self._heard.items() if now - heard >= self._book.settings.lease_s]:
            self._lose(shard_id)

    def forget_all(self) -> None:
        """Remove all shards: their processes are gone.

        If the run has shards since its relaunch alone, the rows that the queue kept itself are generated again, too:
        clients look for rows in shards only.
        """
        for shard_id in list(self._shards):
            self._lose(shard_id)
        if self._book.settings.replicas:
            self._lose("")

    def revive(self, now: float) -> None:
        """After a replay, which knows no times: every shard was heard of just now."""
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
            self._change(ShardLost(shard_id=shard_id, samples=samples))

    # --- what a change does -----------------------------------------------------------------------------------------

    def changed(self, event: ShardsChanged) -> None:
        """Apply the event: replace the registry."""
        self.revision = event.revision
        self._shards = {shard.shard_id: shard for shard in event.shards}

    def shard_lost(self, event: ShardLost) -> None:
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
        """Remove all shards after a fresh start, when the rows that they keep have no meaning any more."""
        self.revision += 1
        self._shards, self._heard = {}, {}

    # --- dump and load ----------------------------------------------------------------------------------------------

    def dump(self) -> ShardsState:
        """The state for a dump; equal for equal registries."""
        return ShardsState(revision=self.revision, shards=list(self._shards.values()))

    def load(self, state: ShardsState) -> None:
        """Restore a dumped state; only a new store can."""
        self.changed(ShardsChanged(revision=state.revision, shards=state.shards))
