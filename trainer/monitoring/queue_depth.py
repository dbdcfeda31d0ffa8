"""Reports what the queue holds as metrics of a step."""

import logging
from typing import Protocol

from rl_async.messages import StatusReport

log = logging.getLogger("rl_async.trainer")


class StatusVerb(Protocol):
    """The one verb of the queue's blocking client that is used here."""

    def status(self) -> StatusReport: ...


class QueueDepth:
    """Reads the queue's status, and warns once if workers wait because it is full."""

    def __init__(self, queue: StatusVerb) -> None:
        self._queue = queue
        self._warned = False

    def depth(self) -> dict[str, float]:
        """Return the number of groups by state and the queue's counters, as metrics ``queue/...``."""
        status = self._queue.status()
        states = {
            "queue/ready_groups": status.ready,
            "queue/leased_groups": status.leased,
            "queue/slots_used": status.slots_used,
            "queue/max_staleness": status.max_staleness,
            "queue/payload_bytes": status.payload_bytes,
        }
        if status.counters.get("short_of_bytes") and not self._warned:
            self._warned = True
            log.warning(
                "queue is full (%d payload bytes), so workers are waiting; raise queue.max_bytes",
                status.payload_bytes,
            )
        counters = {f"queue/{name}": count for name, count in status.counters.items()}
        return {key: float(value) for key, value in (states | counters).items()}
