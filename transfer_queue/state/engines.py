"""The registry of engines: where they are and which weights they confirmed."""

from collections.abc import Callable, Iterable

import msgspec

from rl_async.messages import Done, EngineRecord, Refused, Version
from rl_async.transfer_queue.state.transitions import EnginesChanged, Transition


class Engines:
    """Engines by id. The revision grows with every change, publications included."""

    def __init__(self, change: Callable[[Transition], None]) -> None:
        self._change = change
        self._engines: dict[str, EngineRecord] = {}
        self.revision = 0

    def records(self) -> list[EngineRecord]:
        """Copies, in order of registration."""
        return [msgspec.structs.replace(engine) for engine in self._engines.values()]

    def register(self, engine_id: str, url: str, kind: str) -> Done | Refused:
        """Add an engine; the same again changes nothing. It gets no traffic before it confirms a version."""
        known = self._engines.get(engine_id)
        if known is None:
            self._announce([*self.records(), EngineRecord(engine_id=engine_id, url=url, kind=kind)])
        elif (known.url, known.kind) != (url, kind):
            return Refused(code="conflict", reason=f"engine {engine_id} is registered at {known.url} ({known.kind})")
        return Done()

    def remove(self, engine_id: str) -> Done:
        """Forget an engine; an unknown one is already forgotten."""
        if engine_id in self._engines:
            self._announce([engine for engine in self.records() if engine.engine_id != engine_id])
        return Done()

    def confirm(self, engine_id: str, version: Version) -> Done | Refused:
        """An engine serves ``version`` now. A late confirmation of an older one changes nothing."""
        if engine_id not in self._engines:
            return Refused(code="unknown_engine", reason=f"engine {engine_id} is not registered")
        raised = self._raised({engine_id}, version)
        if raised != list(self._engines.values()):
            self._announce(raised)
        return Done()

    def published(self, engine_ids: Iterable[str], version: Version) -> None:
        """All of these confirmed ``version``, and it was published. One that has gone meanwhile is passed over."""
        self._announce(self._raised(set(engine_ids), version))

    def unpublished(self) -> None:
        """No version counts any more."""
        self._announce(self.records())

    def forget_all(self) -> None:
        """The processes that were engines are gone."""
        if self._engines:
            self._announce([])

    def _raised(self, engine_ids: set[str], version: Version) -> list[EngineRecord]:
        """The records with these engines at ``version``, unless they are beyond it."""
        records = self.records()
        for engine in records:
            if engine.engine_id in engine_ids and (engine.version is None or engine.version < version):
                engine.version = version
        return records

    def _announce(self, records: list[EngineRecord]) -> None:
        self._change(EnginesChanged(revision=self.revision + 1, engines=records))

    def changed(self, event: EnginesChanged) -> None:
        """The registry is what the event says."""
        self.revision = event.revision
        self._engines = {engine.engine_id: engine for engine in event.engines}

    def dump(self) -> EnginesChanged:
        """The state, as the change that would lead to it."""
        return EnginesChanged(revision=self.revision, engines=self.records())
