"""Finds the checkpoint from which a fine-tuning run continues, and drops what was logged after it."""

from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from rl_async.files import append_lines, replace_file
from rl_async.trainer.checkpoints.folder import drop_unfinished, newest_whole, read_state
from rl_async.trainer.monitoring.records import next_lineage


def resume_point(folder: Path) -> tuple[int, int]:
    """Return the step of the newest whole checkpoint, 0 if there is none, and a new lineage. A collective.

    Rank 0 deletes the log lines of later steps, which are trained again.
    """
    chosen = torch.zeros(2, dtype=torch.int64)
    if dist.get_rank() == 0:
        root = folder / "checkpoints"
        drop_unfinished(root)
        newest = newest_whole(root)
        step = 0 if newest is None else read_state(newest).step
        keep_lines(folder / "metrics.jsonl", "step", step - 1)
        keep_lines(folder / "evaluations.jsonl", "eval/step", step if step else -1)
        chosen = torch.tensor([step, next_lineage(folder, True)])
    dist.broadcast(chosen, 0)
    step, lineage = chosen.tolist()
    return step, lineage


def keep_lines(path: Path, key: str, highest: int) -> None:
    """Keep only the JSON lines whose ``key`` is at most ``highest``. No process may be writing the file."""
    if not path.exists():
        return
    append_lines(path).close()
    lines = path.read_bytes().splitlines(keepends=True)
    replace_file(path, b"".join(line for line in lines if msgspec.json.decode(line)[key] <= highest), durable=True)
