"""The admission ledger ``RUN/ledger.jsonl``: one JSON object per line, appended and never rewritten.

It says which groups exist and what became of them, independently of the trainer's ``trained.jsonl``;
``audit.py`` compares the two.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from rl_async.lines import append_lines
from rl_async.transfer_queue.transitions import (
    Admitted,
    BatchCommitted,
    BatchReserved,
    DeadLettered,
    GroupDropped,
    GroupReady,
    RolledBack,
    RunFinished,
    SampleStored,
    Transition,
)


class Ledger:
    """Writes what became of groups, and the hashes of each sample's tokens as its producer announced them.

    Each line is one write, so a killed queue tears none; one torn by a full disk is cut off by the next queue.
    """

    def __init__(self, path: Path) -> None:
        self._file = append_lines(path, buffering=0)

    def append(self, transition: Transition) -> None:
        """Write the transition if it belongs into the ledger."""
        line = _LINES.get(type(transition))
        if line is not None:
            self._file.write(msgspec.json.encode(line(transition)) + b"\n")

    def close(self) -> None:
        self._file.close()


def _admit(event: Admitted) -> dict[str, Any]:
    return {
        "event": "admit",
        "group": event.group,
        "task": event.task.task_id,
        "partition": event.partition,
        "samples": event.samples,
    }


def _put(event: SampleStored) -> dict[str, Any]:
    return {
        "event": "put",
        "group": event.headers[0].group_id,
        "sample": event.headers[0].sample,
        "tokens_sha256": [header.tokens_sha256 for header in event.headers],  # by segment
    }


def _resume(event: RolledBack) -> dict[str, Any]:
    return {
        "event": "resume",
        "step": event.step,
        "lineage": event.lineage,
        "fresh": event.fresh,
        "next_group": event.next_group,
        "readmitted": [group.group for group in event.readmitted],
    }


_LINES: dict[type[Transition], Callable[[Any], dict[str, Any]]] = {
    Admitted: _admit,
    SampleStored: _put,
    GroupReady: lambda event: {"event": "ready", "group": event.group},
    BatchReserved: lambda event: {"event": "reserve", "step": event.step, "groups": event.groups},
    BatchCommitted: lambda event: {"event": "commit", "step": event.step},
    GroupDropped: lambda event: {"event": "drop", "group": event.group, "reason": event.reason},
    DeadLettered: lambda event: {"event": "dead_letter", "group": event.group, "error": event.error},
    RolledBack: _resume,
    RunFinished: lambda event: {"event": "finish"},
}
