"""Files the trainer writes: ``trained``, ``refused``, ``evaluations.jsonl``, ``trajectories/`` and the lineage."""

import gzip
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rl_async.errors import TrainerReplaced
from rl_async.files import append_durably, append_lines, make_durable_folder, replace_file, written_whole
from rl_async.messages import Explanation, RowKey, Trajectory


class TrainedRow(msgspec.Struct, frozen=True):
    """One trained row, one line of ``trained.jsonl``."""

    lineage: int
    step: int
    group: int
    sample: int
    segment: int
    tokens_sha256: str


class RefusedRow(msgspec.Struct, frozen=True):
    """A row that came to ``rank`` with other tokens than were announced, one line of ``refused.jsonl``."""

    lineage: int
    step: int
    group: int
    sample: int
    segment: int
    tokens_sha256: str  # of what came
    rank: int


def append_trained(path: Path, lineage: int, step: int, rows: Iterable[Trajectory]) -> None:
    """Append one line per row and force them to disk, before the queue is told that the batch was trained."""
    _append(path, lineage, [TrainedRow(lineage, step, *row.key, row.tokens_sha256()) for row in rows])


def append_refused(path: Path, lineage: int, step: int, rank: int, tokens_sha256: Mapping[RowKey, str]) -> None:
    """Append one line per row that came to a rank with other tokens than were announced."""
    _append(path, lineage, [RefusedRow(lineage, step, *key, digest, rank) for key, digest in tokens_sha256.items()])


def _append(path: Path, lineage: int, rows: Iterable[msgspec.Struct]) -> None:
    append_durably(path, b"".join(msgspec.json.encode(row) + b"\n" for row in rows), lineage)


def append_evaluation(path: Path, lineage: int, metrics: Mapping[str, float]) -> None:
    """Append the result of one evaluation to ``path``, one JSON object with its lineage and time."""
    with append_lines(path) as file:
        file.write(msgspec.json.encode({"lineage": lineage, "time": time.time(), **metrics}) + b"\n")


def write_trajectories(
    path: Path, rows: Sequence[Trajectory], explanations: Sequence[Explanation] | None = None
) -> None:
    """Write rows as compressed JSON lines, atomically and durably. Floats keep every bit.

    ``explanations``, one per row, are added as ``correction``, which readers of trajectories skip.
    Read them with ``import gzip, json`` and ``rows = [json.loads(line) for line in gzip.open(path, "rt")]``.
    """
    make_durable_folder(path.parent)
    with written_whole(path, durable=True) as temporary, gzip.open(temporary, "wb", compresslevel=1) as file:
        for number, row in enumerate(rows):
            line = msgspec.structs.asdict(row)
            if explanations is not None:
                line["correction"] = explanations[number]
            file.write(msgspec.json.encode(line, enc_hook=_array_to_list) + b"\n")


def read_trajectories(path: Path) -> list[Trajectory]:
    """Read the rows of a file that ``write_trajectories`` wrote, without the explanations."""
    with gzip.open(path, "rb") as file:
        rows = [msgspec.json.decode(line, type=Trajectory, dec_hook=_list_to_array) for line in file]
    for row in rows:
        row.token_ids = row.token_ids.astype(np.int32)
        row.loss_mask = row.loss_mask.astype(bool)
        row.logprobs = row.logprobs.astype(np.float32)
    return rows


def _array_to_list(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise NotImplementedError(f"cannot encode {type(value).__name__}")


def _list_to_array(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        return np.asarray(value, dtype=np.float64)  # exact for int32, bool and float32, to which the caller narrows it
    raise NotImplementedError(f"cannot decode {kind}")


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
