"""The warm start's learning rate follows what the model can do."""

from rl_async.trainer.finetune.warm_start import Plateau


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
