"""Learning rates by optimizer step."""

import pytest

from rl_async.configs.schema.trainer import TrainerConfig
from rl_async.trainer.backend import learning_rate_factor


def test_linear_decay_ends_with_the_last_optimizer_step_of_all_epochs() -> None:
    factor = learning_rate_factor(TrainerConfig(steps=5, minibatches=2, epochs=3, schedule="linear"))
    assert [factor(0), factor(15), factor(30), factor(31)] == pytest.approx([1.0, 0.5, 0.0, 0.0])


def test_cosine_decay_is_half_way_in_the_middle_and_warm_up_rises_from_its_first_step() -> None:
    factor = learning_rate_factor(TrainerConfig(steps=5, minibatches=2, schedule="cosine", warmup_steps=4))
    assert [factor(0), factor(3), factor(7), factor(10)] == pytest.approx([0.25, 1.0, 0.5, 0.0])
