"""Files the trainer appends to, ``trained``, ``refused`` and ``evaluations.jsonl``, and the lineage."""

import errno
import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from rl_async.errors import TrainerReplaced, UserError
from rl_async.files import UNDECODABLE, append_durably, append_lines, last_line, replace_file
from rl_async.messages import RowKey, Trajectory
from rl_async.recording import TrainedRow
from rl_async.transfer_queue.ledger import newest_lineage

LINEAGE = "lineage"

log = logging.getLogger("rl_async.trainer")


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
    """Reads which version a line of ``evaluations.jsonl`` is about."""

    step: float = msgspec.field(name="eval/step", default=-1.0)


def is_evaluated(run: Path, step: int) -> bool:
    """Whether the result of the evaluation of a version is recorded."""
    path = run / "evaluations.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # what has no end was torn
    return any(msgspec.json.decode(line, type=_Evaluated).step == step for line in lines)


def next_lineage(run: Path, resuming: bool) -> int:
    """Return the lineage of this trainer process: 0 for a new run, one more than the last after each resume.

    It is kept in the file ``lineage`` of the run folder, not in the checkpoint: two crashes after one checkpoint make
    two lineages. Where that file is lost or damaged, the run's records tell the last one. Raises UserError if they are
    lost, too.
    """
    lineage = _last_lineage(run) + 1 if resuming else 0
    replace_file(run / LINEAGE, f"{lineage}\n".encode(), durable=True)
    return lineage


def _last_lineage(run: Path) -> int:
    """Return the newest lineage that trained the run; -1 if none did."""
    told = _written_lineage(run)
    recorded = max(newest_lineage(run / "ledger.jsonl"), _trained_lineage(run / "trained.jsonl"))
    if told is None and recorded < 0:
        raise UserError(
            f"{run / LINEAGE} is damaged, and neither ledger.jsonl nor trained.jsonl has the number that it held; "
            "write a number into it that is higher than the number of times that the run was resumed"
        )
    if told is None or told < recorded:
        log.warning("%s is lost or damaged; the run's records say %d", run / LINEAGE, recorded)
    return max(recorded, -1 if told is None else told)


def _written_lineage(run: Path) -> int | None:
    """Return what the file says; -1 without one, None if that is no number."""
    try:
        text = (run / LINEAGE).read_bytes().strip()
    except FileNotFoundError:
        return -1
    return int(text) if text.isdigit() else None


def _trained_lineage(path: Path) -> int:
    """Return the lineage of the newest whole line of ``trained.jsonl``, whose lineages never fall; -1 without one."""
    with suppress(*UNDECODABLE):
        return msgspec.json.decode(last_line(path), type=_OfLineage).lineage
    return -1


class _OfLineage(msgspec.Struct):
    lineage: int


def require_newest(run: Path, lineage: int) -> None:
    """Raise TrainerReplaced if a trainer of a newer lineage than this one has resumed the run.

    Raises OSError if that cannot be known.
    """
    newest = _written_lineage(run)
    if newest is None or newest < 0:
        raise OSError(errno.EIO, "damaged or lost, so a newer trainer may have resumed the run", str(run / LINEAGE))
    if newest > lineage:
        raise TrainerReplaced(f"{run}: the trainer of lineage {lineage} was replaced by one of lineage {newest}")
