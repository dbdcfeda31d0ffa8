"""Files the trainer appends to, ``trained``, ``refused`` and ``evaluations.jsonl``, and the lineage."""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from rl_async.errors import TrainerReplaced
from rl_async.files import append_durably, append_lines, replace_file
from rl_async.messages import RowKey, Trajectory
from rl_async.recording import TrainedRow


class RefusedRow(msgspec.Struct, frozen=True):
    """A row that came to ``rank`` with other tokens than were announced, one line of ``refused.jsonl``."""

    lineage: int
    step: int
    group: int
    sample: int
    segment: int
    tokens_hash: str  # of what came
    rank: int


def append_trained(path: Path, lineage: int, step: int, rows: Iterable[Trajectory]) -> None:
    """Append one line per row and force them to disk, before the queue is told that the batch was trained."""
    _append(path, lineage, [TrainedRow(lineage, step, *row.key, row.tokens_hash()) for row in rows])


def append_refused(path: Path, lineage: int, step: int, rank: int, tokens_hash: Mapping[RowKey, str]) -> None:
    """Append one line per row that came to a rank with other tokens than were announced."""
    _append(path, lineage, [RefusedRow(lineage, step, *key, digest, rank) for key, digest in tokens_hash.items()])


def _append(path: Path, lineage: int, rows: Iterable[msgspec.Struct]) -> None:
    append_durably(path, b"".join(msgspec.json.encode(row) + b"\n" for row in rows), lineage)


def append_evaluation(path: Path, lineage: int, metrics: Mapping[str, float]) -> None:
    """Append the result of one evaluation to ``path``, one JSON object with its lineage and time."""
    with append_lines(path) as file:
        file.write(msgspec.json.encode({"lineage": lineage, "time": time.time(), **metrics}) + b"\n")


class _Evaluated(msgspec.Struct):
    """A line of ``evaluations.jsonl``."""

    step: float = msgspec.field(name="eval/step", default=-1.0)


def is_evaluated(run: Path, step: int) -> bool:
    """Whether the result of the evaluation of a version is recorded."""
    path = run / "evaluations.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # what has no end was torn
    return any(msgspec.json.decode(line, type=_Evaluated).step == step for line in lines)


def next_lineage(run: Path, resuming: bool) -> int:
    """Return the lineage of this trainer process: 0 for a new run, one more than the last after each resume.

    It is kept in the file ``lineage`` of the run folder, not in the checkpoint: two crashes after one checkpoint make
    two lineages.
    """
    path = run / "lineage"
    lineage = int(path.read_text()) + 1 if resuming and path.exists() else 0
    replace_file(path, f"{lineage}\n".encode(), durable=True)
    return lineage


def require_newest(run: Path, lineage: int) -> None:
    """Raise TrainerReplaced if a trainer of a newer lineage than this one has resumed the run."""
    newest = int((run / "lineage").read_text())
    if newest > lineage:
        raise TrainerReplaced(f"{run}: the trainer of lineage {lineage} was replaced by one of lineage {newest}")
