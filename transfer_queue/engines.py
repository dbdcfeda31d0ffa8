"""The registry of engines: where they are and which weights they confirmed."""

from collections.abc import Iterable

import msgspec

from rl_async.messages import Done, EngineRecord, Refused, Version
from rl_async.transfer_queue.book import Book
from rl_async.transfer_queue.transitions import EnginesChanged


class Engines:
    """Engines by id. The revision grows with every change, publications included."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._engines: dict[str, EngineRecord] = {}
        self.revision = 0

    def records(self) -> list[EngineRecord]:
        """Copies, in order of registration."""
        return [msgspec.structs.replace(engine) for engine in self._engines.values()]

    def register(self, engine_id: str, url: str, kind: str) -> Done | Refused:
        """Add an engine; the same again changes nothing. It gets no traffic before it confirms a version."""
        known = self._engines.get(engine_id)
        if known is None:
            self._engines[engine_id] = EngineRecord(engine_id=engine_id, url=url, kind=kind)
            self._changed()
        elif (known.url, known.kind) != (url, kind):
            return Refused(code="conflict", reason=f"engine {engine_id} is registered at {known.url} ({known.kind})")
        return Done()

    def remove(self, engine_id: str) -> Done:
        """Forget an engine; an unknown one is already forgotten."""
        if self._engines.pop(engine_id, None) is not None:
            self._changed()
        return Done()

    def confirm(self, engine_id: str, version: Version) -> Done | Refused:
        """An engine serves ``version`` now. A late confirmation of an older one changes nothing."""
        if engine_id not in self._engines:
            return Refused(code="unknown_engine", reason=f"engine {engine_id} is not registered")
        if self._raise(engine_id, version):
            self._changed()
        return Done()

    def published(self, engine_ids: Iterable[str], version: Version) -> None:
        """All of these confirmed ``version``, and it was published. One that has gone meanwhile is passed over."""
        for engine_id in engine_ids:
            self._raise(engine_id, version)
        self._changed()

    def unpublished(self) -> None:
        """No version counts any more."""
        self._changed()

    def _raise(self, engine_id: str, version: Version) -> bool:
        engine = self._engines.get(engine_id)
        if engine is None or (engine.version is not None and engine.version >= version):
            return False
        engine.version = version
        return True

    def _changed(self) -> None:
        self.revision += 1
        self._book.emit(EnginesChanged(revision=self.revision, engines=self.records()))
