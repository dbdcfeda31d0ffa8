"""What a simulated run has used up, for runs in which one resource is short by construction."""

import msgspec
import pytest

from rl_async.launcher.capacity_simulation import (
    QUEUE_ROW_S,
    Costs,
    DeviceSplit,
    EpisodeShape,
    Saturation,
    Simulation,
    longest,
    saturation,
)
from rl_async.transfer_queue.admission import QueueSettings

COSTS = Costs(
    iteration_base_s=0.01, iteration_sequence_s=0.001, turn_s=0.0, train_token_s=1e-6, sync_s=0.0, other_s=0.0
)
ROWS = 16


def used(engines: int = 1, bound: int = 3, outside_s: float = 0.0, longest: int = 10, **changes: float) -> Saturation:
    """Of a run of 16 rows a step, all of ten tokens but one in seventeen."""
    episodes = [EpisodeShape(tokens=20, sampled=10, turns=1, outside_s=outside_s)] * ROWS
    episodes.append(EpisodeShape(tokens=20, sampled=longest, turns=1, outside_s=outside_s))
    layout = DeviceSplit(engines=engines, ranks=1, colocated=False, max_batch=8, concurrency=1000)
    settings = QueueSettings(steps=12, batch_groups=4, group_size=4, max_staleness=bound)
    costs = msgspec.structs.replace(COSTS, **changes)
    return saturation(costs, episodes, layout, bound, ROWS, 1, Simulation(settings, layout, costs, episodes).run())


def test_the_trainer_saturates_where_a_token_is_dear() -> None:
    found = used(engines=4, train_token_s=0.01)
    assert found.first == "trainer" and found.trainer == pytest.approx(1.0, abs=0.02)


def test_engines_saturate_where_too_few_of_them_have_full_batches() -> None:
    found = used()
    assert found.first == "engines" and found.engines == pytest.approx(1.0, abs=0.05)


def test_one_long_answer_bounds_a_step_that_may_not_go_on_without_it() -> None:
    found = used(engines=64, bound=0, longest=2000)
    assert found.first == "longest answer" and found.longest_answer == pytest.approx(1.0, abs=0.3)
    assert found.engines < 0.2


def test_slow_tools_and_slow_weights_are_named() -> None:
    assert used(engines=16, outside_s=5.0).first == "tools"
    assert used(engines=16, sync_s=5.0).first == "publication"


def test_the_queue_saturates_with_rows_that_cost_nobody_else_anything() -> None:
    found = used(engines=1000, iteration_base_s=1e-7, iteration_sequence_s=0.0, train_token_s=1e-9)
    assert found.first == "queue" and found.queue > 1  # a single process could not do it
    assert QUEUE_ROW_S * ROWS < 1


def test_the_longest_of_more_draws_is_longer() -> None:
    assert longest([1.0, 2.0], 1) == pytest.approx(1.5)
    assert longest([1.0, 2.0], 2) == pytest.approx(1.75)
    assert longest(range(100), 10_000) == pytest.approx(99)
