"""The checker of chaos runs accepts a good history and notices each kind of damage."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xxhash import xxh3_128_hexdigest

from tests.chaos.history import Expected, problems

EXPECTED = Expected(steps=2, groups=1, samples=2, staleness=1)
Lines = dict[str, list[dict[str, Any]]]  # by file


def history() -> Lines:
    """Step 0 was trained by lineage 0, step 1 by lineages 0 and 1: the run was killed and went on after step 0."""
    files: Lines = {"trained.jsonl": [], "metrics.jsonl": [], "ledger.jsonl": []}
    for group in (0, 1, 2):
        files["ledger.jsonl"].append({"event": "admit", "group": group, "partition": "train", "samples": 2})
    for lineage, step in ((0, 0), (0, 1), (1, 1)):
        files["metrics.jsonl"].append({"step": step, "lineage": lineage})
        files["ledger.jsonl"].append({"event": "reserve", "step": step, "groups": [step]})
        rows = files.setdefault(f"trajectories/step-{step:06d}-lineage{lineage}-rank0.jsonl.gz", [])
        for sample in (0, 1):
            tokens = [step, sample, 7]
            digest = xxh3_128_hexdigest(np.array(tokens, dtype="<i4").tobytes())
            key = {"step": step, "lineage": lineage, "group": step, "sample": sample, "segment": 0}
            files["trained.jsonl"].append(key | {"tokens_hash": digest})
            if (lineage, step) != (1, 1):  # a rollback trains what was put before
                files["ledger.jsonl"].append(
                    {"event": "put", "stored": [[step, sample, [digest]]]},
                )
            rows.append(
                {"group_id": step, "sample": sample, "segment": 0, "token_ids": tokens, "versions": [[[0, 0], 0, 2]]}
            )
    return files


def write(folder: Path, files: Lines) -> Path:
    (folder / "trajectories").mkdir()
    for name, lines in files.items():
        text = "".join(json.dumps(line) + "\n" for line in lines).encode()
        (folder / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return folder


def of_step_1(files: Lines) -> list[dict[str, Any]]:
    return files["trajectories/step-000001-lineage1-rank0.jsonl.gz"]


DAMAGE: dict[str, Callable[[Lines], object]] = {
    "a row was trained twice": lambda files: files["trained.jsonl"].append(files["trained.jsonl"][-1]),
    "a row was not trained": lambda files: files["trained.jsonl"].pop(),
    "a step was not trained": lambda files: files["trained.jsonl"].__delitem__(slice(2, None)),
    "a group was trained in two steps": lambda files: [row.update(group=0) for row in files["trained.jsonl"]],
    "an older lineage after a newer one": lambda files: files["trained.jsonl"][0].update(lineage=2),
    "no metrics": lambda files: files["metrics.jsonl"].pop(),
    "other tokens": lambda files: of_step_1(files)[0]["token_ids"].append(1),
    "too stale": lambda files: of_step_1(files)[0].update(versions=[[[0, -1], 0, 2]]),
    "a lost trajectory": lambda files: of_step_1(files).pop(),
    "an extra trajectory": lambda files: of_step_1(files).append(of_step_1(files)[0] | {"sample": 2}),
    "another batch was reserved": lambda files: files["ledger.jsonl"][-1].update(groups=[2]),
    "tokens that nobody announced": lambda files: files["ledger.jsonl"].__delitem__(-2),
    "forgotten groups": lambda files: files["ledger.jsonl"].extend(
        {"event": "admit", "group": group, "partition": "train", "samples": 2} for group in (3, 4)
    ),
}


def test_a_good_history_has_no_problems(tmp_path: Path) -> None:
    assert problems(write(tmp_path, history()), EXPECTED) == []


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_noticed(tmp_path: Path, damage: str) -> None:
    files = history()
    DAMAGE[damage](files)
    assert problems(write(tmp_path, files), EXPECTED) != []
