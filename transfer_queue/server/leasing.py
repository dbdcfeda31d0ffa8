"""Who was given leases, and by which request: so that repeated, late and undelivered requests lose no groups."""

import logging
from collections import OrderedDict
from typing import Any

from rl_async.messages import Lease, Leased
from rl_async.transfer_queue.state.delivery import Delivery

log = logging.getLogger("rl_async.queue")

REMEMBERED = 4096  # newest requests, and workers


class Leasing:
    """Leases groups to requests and remembers which connections got them, for the newest REMEMBERED requests."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._sent_to: OrderedDict[bytes, set[bytes]] = OrderedDict()  # connections by request
        self._empty: OrderedDict[bytes, None] = OrderedDict()  # requests that were answered with nothing
        self._served: OrderedDict[str, int] = OrderedDict()  # turn in which each worker last got groups
        self._turn = 0

    def turn(self, worker: str) -> int:
        """The turn in which the worker last got groups; 0 if it did not."""
        return self._served.get(worker, 0)

    def lease(self, request_id: bytes, identity: bytes, request: Lease, now: float, *, last: bool) -> Leased | None:
        """Groups for the request; None if there are none yet, unless it is the ``last`` try.

        A request that was answered with nothing gets nothing again: its worker may have gone on to the next one and
        would never hear of groups that a late copy of it was given.
        """
        if request_id in self._empty:
            return Leased(groups=[])
        reply = self._delivery.lease(request.worker, request.max_groups, now, request_id, request.task)
        if self._delivery.granted(request_id):
            self._turn += 1
            _remember(self._served, request.worker, self._turn)
            self._sent_to.setdefault(request_id, set()).add(identity)
            _trim(self._sent_to)
            return reply
        if not reply.finished and not last:
            return None
        _remember(self._empty, request_id, None)
        return reply

    def undelivered(self, request_id: bytes, identity: bytes) -> None:
        """Take back the leases of an answer that reached none of the connections that asked for it."""
        sent_to = self._sent_to.get(request_id, set())
        sent_to.discard(identity)
        if request_id in self._sent_to and not sent_to:
            del self._sent_to[request_id]
            log.info("an answer with leases reached no worker; the leases are taken back")
            self._delivery.undelivered(request_id)


def _remember(memory: "OrderedDict[Any, Any]", key: Any, value: Any) -> None:
    """Store ``value`` under ``key`` as the newest entry."""
    memory.pop(key, None)
    memory[key] = value
    _trim(memory)


def _trim(memory: "OrderedDict[Any, Any]") -> None:
    if len(memory) > REMEMBERED:
        memory.popitem(last=False)
