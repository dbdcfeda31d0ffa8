"""A run over the record of another trains the same rows to the same numbers, without an engine."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import HARDLY_WARM, call, succeed

# tests/e2e/test_games.py trains a run again, too, and compares less.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]
STEPS = 3
SMALL = [
    *("data.train_batch_groups=2", "rollout.group_size=4", f"trainer.steps={STEPS}", "trainer.checkpoint_every=2"),
    *("eval.every=0", "eval.tasks=4", "queue.max_staleness=1", *HARDLY_WARM),
]
OTHERWISE = (  # metrics of what is not trained: times, places, and what engines and tools did meanwhile
    *("time", "sync", "tokens/per_s", "queue", "eval", "mismatch", "memory", "engine"),
    *("compute/tflops", "compute/mfu", "batch/bytes"),
)


def launch(home: Path, name: str, *more: str) -> None:
    succeed(home, "launch", "--mode", "disaggregated", "--config", "calculator", "--name", name, *SMALL, *more)


def lines(home: Path, name: str, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (home / "runs" / name / file).read_text().splitlines()]


def trained(home: Path, name: str) -> list[tuple[int, int, str]]:
    return [(row["step"], row["sample"], row["tokens_hash"]) for row in lines(home, name, "trained.jsonl")]


def test_a_run_is_trained_again_bit_by_bit(workplace: Path) -> None:
    launch(workplace, "before")
    # It publishes less often than the run before it: no engine is there to need the weights.
    launch(workplace, "again", "rollout.replay=runs/before", "weight_sync.every=2")
    assert trained(workplace, "again") == trained(workplace, "before")
    for then, now in zip(
        lines(workplace, "before", "metrics.jsonl"), lines(workplace, "again", "metrics.jsonl"), strict=True
    ):
        same = {key for key in then if not key.startswith(OTHERWISE)}
        assert {"loss/policy", "loss/grad_norm", "correction/kl", "reward/mean", "staleness/max"} <= same
        assert {key: then[key] for key in same} == {key: now.get(key) for key in same}
    assert "exactly once" in succeed(workplace, "audit", "runs/again")
    started = {process["name"] for process in json.loads((workplace / "runs" / "again" / "processes.json").read_text())}
    assert started == {"queue", "worker-0", "trainer-0"}
    refused = call(
        workplace, "launch", "--config", "calculator", *SMALL, "rollout.replay=runs/before", "trainer.steps=9"
    )
    assert refused.returncode == 2 and "rollout.replay" in refused.stderr
