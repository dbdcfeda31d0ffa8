"""Rows of Harbor's tasks, for the environment `harbor:FOLDER`."""

from pathlib import Path

import msgspec

from rl_async.agent_loop.environments.adapters.harbor_task import read_task, task_folders
from rl_async.errors import DataError


def write_rows(folder: Path, out: Path) -> tuple[int, list[DataError]]:
    """Write a JSONL file with a row for each task in ``folder``; return their number, and why others were left out.

    Raises DataError if none is left.
    """
    rows, refused = list[bytes](), list[DataError]()
    for path in task_folders(folder):
        try:
            task = read_task(path)
        except DataError as error:
            refused.append(error)
            continue
        row = {
            "data_source": "harbor",
            "prompt": [{"role": "user", "content": task.instruction}],
            "reward_model": {"ground_truth": ""},
            "extra_info": {"index": len(rows), "task": task.name},
        }
        rows.append(msgspec.json.encode(row))
    if not rows:
        raise DataError(f"{folder}: no task of it can be played; the first one: {refused[0]}")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(b"\n".join(rows) + b"\n")
    return len(rows), refused
