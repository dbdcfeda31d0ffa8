"""Reports what the queue holds as metrics of a step."""

import logging
from typing import Protocol

from rl_async.messages import FAILED, StatusReport

log = logging.getLogger("rl_async.trainer")


class StatusVerb(Protocol):
    """The one verb of the queue's blocking client that is used here."""

    def status(self) -> StatusReport: ...


class QueueDepth:
    """Reads the queue's status, and warns once if workers wait because it is full."""

    def __init__(self, queue: StatusVerb) -> None:
        self._queue = queue
        self._warned = False
        self._counted = queue.status().counters

    def depth(self) -> dict[str, float]:
        """Return the number of groups by state and the queue's counters, as metrics ``queue/...``, and how many
        attempts at training samples have failed since the call before, by cause, as ``rollout/failed_attempts``."""
        status = self._queue.status()
        failed = {
            f"rollout/failed_attempts/{name.removeprefix(FAILED)}": max(0, count - self._counted.get(name, 0))
            for name, count in status.counters.items()
            if name.startswith(FAILED)
        }
        self._counted = status.counters
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
        counters = {f"queue/{name}": n for name, n in status.counters.items() if not name.startswith(FAILED)}
        failed["rollout/failed_attempts"] = sum(failed.values())
        return {key: float(value) for key, value in (states | counters | failed).items()}
