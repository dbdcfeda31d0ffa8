"""The warm start's learning rate follows what the model can do."""

from rl_async.configs.schema.data import WarmStartConfig
from rl_async.trainer.finetune.warm_start import Plateau, next_check


def scales(rewards: list[float]) -> list[float]:
    plateau, seen = Plateau(), []
    for reward in rewards:
        plateau.observe(reward)
        seen.append(plateau.scale)
    return seen


def test_waiting_for_the_model_to_copy_keeps_the_learning_rate() -> None:
    assert scales([0.0, 0.1, 0.05, 0.1, 0.0, 0.1, 0.08]) == [1.0] * 7


def test_hovering_below_the_gate_halves_it_each_time() -> None:
    assert scales([0.5, 0.4, 0.5, 0.45, 0.6, 0.5, 0.5, 0.6]) == [1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.25]


def test_copying_that_appears_late_starts_with_the_full_rate() -> None:
    assert scales([0.1, 0.1, 0.1, 0.1, 0.1, 0.8, 0.7, 0.7]) == [1.0] * 8


def test_the_next_check_is_the_first_step_at_which_the_reward_is_measured() -> None:
    config = WarmStartConfig(demos_path="d", out="o", min_steps=200, check_every=50, max_steps=320)
    for step, check in ((1, 200), (200, 200), (201, 250), (250, 250), (301, 320)):
        assert next_check(step, config) == check
