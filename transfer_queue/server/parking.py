"""Long polls that wait for the store to change: by verb, by connection and by deadline, each found without a search."""

import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

from rl_async.transfer_queue.server.serving import Incoming
from rl_async.transfer_queue.server.verbs import Verb


class _Parked(NamedTuple):
    incoming: Incoming[Any]
    deadline: float


class Parking:
    """The parked requests of all connections. A request that comes again takes the place of its first copy."""

    def __init__(self, verbs: Sequence[Verb]) -> None:
        self._parked: dict[Verb, dict[bytes, _Parked]] = {verb: {} for verb in verbs if verb.wakes}
        self._of: dict[bytes, set[tuple[Verb, bytes]]] = {}  # by connection; ids may repeat among verbs
        # By deadline, also of requests that are gone; the number keeps verbs from being compared.
        self._deadlines: list[tuple[float, int, Verb, bytes]] = []
        self._added = 0

    def add(self, verb: Verb, incoming: Incoming[Any], deadline: float) -> None:
        """Park a request until ``deadline`` at the latest."""
        if (before := self._parked[verb].get(incoming.request_id)) is not None:
            self.remove(verb, before.incoming)
        self._parked[verb][incoming.request_id] = _Parked(incoming, deadline)
        self._of.setdefault(incoming.identity, set()).add((verb, incoming.request_id))
        self._added += 1
        heapq.heappush(self._deadlines, (deadline, self._added, verb, incoming.request_id))

    def remove(self, verb: Verb, incoming: Incoming[Any]) -> None:
        """Forget a parked request."""
        del self._parked[verb][incoming.request_id]
        own = self._of[incoming.identity]
        own.discard((verb, incoming.request_id))
        if not own:
            del self._of[incoming.identity]

    def waking(self, changed: set[Any]) -> list[tuple[Verb, list[Incoming[Any]]]]:
        """The verbs that one of these transitions concerns, with their parked requests, if there are any."""
        return [
            (verb, [waiting.incoming for waiting in parked.values()])
            for verb, parked in self._parked.items()
            if parked and not changed.isdisjoint(verb.wakes)
        ]

    def due(self, now: float) -> list[tuple[Verb, Incoming[Any]]]:
        """The requests whose deadline has come; they stay parked until they are removed."""
        due = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, verb, request_id = heapq.heappop(self._deadlines)
            waiting = self._parked[verb].get(request_id)
            if waiting is not None and waiting.deadline <= now:
                due.append((verb, waiting.incoming))
        return due

    def holds(self, verb: Verb, request_id: bytes) -> bool:
        """Whether the request is parked."""
        return request_id in self._parked[verb]

    def forget(self, identity: bytes) -> None:
        """Forget all that a connection waits for."""
        for verb, request_id in self._of.pop(identity, ()):
            del self._parked[verb][request_id]
