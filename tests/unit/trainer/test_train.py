"""When the loop publishes."""

import pytest

from rl_async.configs.load.loader import load_config
from rl_async.trainer.train import publishes_after


@pytest.mark.parametrize(("overrides", "steps"), [([], [2, 4, 5]), (["rollout.replay=runs/before"], [1, 2, 3, 4, 5])])
def test_a_replay_announces_every_step_because_the_queue_waits_for_it(overrides: list[str], steps: list[int]) -> None:
    config = load_config(
        "calculator", ["trainer.steps=5", "weight_sync.every=2", "queue.max_staleness=1", *overrides],
        mode="disaggregated",
    )  # fmt: skip
    assert [step for step in range(1, 6) if publishes_after(config, step)] == steps
