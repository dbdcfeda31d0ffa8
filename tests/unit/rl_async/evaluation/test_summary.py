"""One implementation says what an evaluation comes to, whoever asks."""

import itertools
import math

import pytest

from rl_async.evaluation import Answer, summarize, summarize_with_total


def test_a_total_is_added_to_several_sources_alone() -> None:
    one = [Answer("a", "t", 1.0)]
    assert summarize_with_total(one, 1.0) == summarize(one, 1.0)
    several = [*one, Answer("b", "t", 0.0)]
    *sources, total = summarize_with_total(several, 1.0)
    assert sources == summarize(several, 1.0)
    assert (total.source, total.tasks, total.average.value) == ("all", 2, 0.5), "tasks of the same name are two"


def test_the_roles_of_a_task_count_once_in_the_total() -> None:
    """Of a zero-sum game each role wins half the time, and one of both roles always."""
    games = [
        Answer("g", f"t{task}", float(won), role)
        for task in range(200)
        for role, won in (("first", task % 2), ("second", 1 - task % 2))
    ]
    *_, total = summarize_with_total(games, 1.0)
    assert (total.tasks, total.episodes, total.average.value) == (200, 200, 0.5)
    assert {k: found.value for k, found in total.passed.items()} == {1: 0.5}


@pytest.mark.parametrize("weights", [*itertools.permutations((0.7, 0.2, 0.1)), (0.1,) * 10])
def test_a_perfect_answer_passes_whatever_its_weights_round_to(weights: tuple[float, ...]) -> None:
    (line,) = summarize([Answer("s", "t", sum(weights)), Answer("s", "t", sum(weights) - 1e-6)], 1.0)
    assert line.passed[1].value == 0.5


def test_metrics_have_each_estimate_with_its_interval_and_nothing_that_is_no_number() -> None:
    (line,) = summarize([Answer("s", "t", 1.0), Answer("s", "t", 3.0), Answer("s", "u", 5.0)], 3.0)
    metrics = line.metrics()
    assert math.isinf(line.average.high)
    assert metrics.keys() == {"s/tasks", "s/samples", "s/avg", "s/pass@1", "s/pass@1/low", "s/pass@1/high"}
    assert (metrics["s/samples"], metrics["s/avg"], metrics["s/pass@1"]) == (1.0, 3.5, 0.75)


def test_a_source_without_a_name_has_one_as_a_metric() -> None:
    (line,) = summarize([Answer("", "t", 1.0)], 1.0)
    assert line.metrics()["unnamed/avg"] == 1.0
