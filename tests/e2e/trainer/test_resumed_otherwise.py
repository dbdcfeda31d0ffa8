"""A run that is resumed again and again, each time with other settings, takes what docs/explanation/trainer.md says."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rl_async.configs.load import load_resolved
from tests.e2e.command import HARDLY_WARM, call, succeed
from tests.e2e.small_runs import metrics

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]
# Rewards that differ within each group, so that none is without a signal.
REWARDS = """
import itertools
_count = itertools.count()
def turns(solution_str): return float(next(_count) % 2)
"""
START = [
    "data.train_batch_groups=4",
    "rollout.group_size=2",
    "trainer.schedule=constant",
    "trainer.checkpoint_every=1",
    "eval.every=0",
    "eval.tasks=4",
    *HARDLY_WARM,
]


def at(row: dict[str, float], **wanted: float) -> bool:
    """Whether a step's metrics have these values, named with two underscores for a slash."""
    return all(row[name.replace("__", "/")] == value for name, value in wanted.items())


def evaluated(run: Path) -> list[float]:
    return [json.loads(line)["eval/step"] for line in (run / "evaluations.jsonl").read_text().splitlines()]


def test_each_setting_that_may_change_is_followed_from_the_next_step_on(workplace: Path) -> None:
    (workplace / "rewards.py").write_text(REWARDS)
    run = workplace / "runs" / "run"
    launch = ["launch", "--config", "calculator", "--name", "run"]
    succeed(workplace, *launch, "--mode", "disaggregated", *START, "trainer.steps=1")

    def resumed(*changes: str, mode: Sequence[str] = ()) -> dict[str, Any]:
        """Resume for one more step, with changes that the run keeps from then on; the step's metrics."""
        steps = len(metrics(workplace, "run")) + 1
        succeed(workplace, *launch, "--resume", *mode, *changes, f"trainer.steps={steps}")
        rows = metrics(workplace, "run")
        assert [row["step"] for row in rows] == list(range(steps))
        assert load_resolved(run / "config.yaml", changes) == load_resolved(run / "config.yaml")
        return rows[-1]

    assert at(resumed("data.train_batch_groups=2", "trainer.minibatches=1"), batch__episodes=4.0)
    assert at(resumed("data.train_batch_groups=4", "trainer.ranks=2"), batch__episodes=8.0)
    changed = resumed(
        *("reward.functions=[{name: rewards.py:turns}]", "agent.max_turns=1", "agent.tools=[]"),
        *("rollout.max_tokens=8", "data.shuffle=false", "trainer.ranks=1"),
    )
    # Groups that the queue kept are trained as they are.
    assert at(changed, batch__episodes=8.0)
    fresh = resumed("queue.max_staleness=0", "algorithm.shaping.dynamic_sampling=true")
    assert at(fresh, staleness__max=0.0, reward__mean=0.5, reward__groups_without_signal=0.0)
    trained = resumed(
        *("algorithm.loss=gspo", "algorithm.correction=decoupled_token_is", "algorithm.advantage=rloo"),
        *("trainer.schedule=cosine", "trainer.learning_rate=1e-4", "trainer.warmup_steps=0"),
        *("trainer.weight_decay=0.1", "algorithm.kl.coef=0.1"),
    )
    assert trained["loss/grad_norm"] > 0 and trained["rollout/response_tokens_mean"] <= 8
    sent = resumed(
        *("weight_sync.transport=disk", "weight_sync.delta=true", "weight_sync.bucket_bytes=65536"),
        *("rollout.engines=2", "rollout.max_batch_size=64", "rollout.request_timeout_s=50", "queue.shards=1"),
    )
    assert at(sent, sync__engines=2.0, sync__failures=0.0)
    last = resumed(
        *("model.dtype=float32", "weight_sync.transport=auto", "weight_sync.delta=false", "rollout.engines=1"),
        *("eval.every=1", "eval.tasks=2", "queue.shards=0", "queue.journal=memory"),
        mode=("--mode", "colocated"),
    )
    assert at(last, sync__failures=0.0) and evaluated(run)[-1] == len(metrics(workplace, "run"))
    assert "ok" in succeed(workplace, "audit", "runs/run")
    refused = call(workplace, *launch, "--resume", "rollout.group_size=4", "trainer.steps=99")
    assert refused.returncode == 2 and "rollout.group_size" in refused.stderr
