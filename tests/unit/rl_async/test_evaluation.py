"""Estimates against enumeration, closed forms and published tables, and what an evaluation comes to."""

import itertools
import math
import statistics
from itertools import combinations, product

import pytest

from rl_async.evaluation import (
    EXACT,
    Answer,
    mean_change_of,
    mean_of,
    paired_p,
    pass_at,
    summarize,
    summarize_with_total,
    wilson,
)


@pytest.mark.parametrize(("samples", "passed", "k"), [(5, 2, 1), (5, 2, 3), (4, 0, 2), (4, 4, 4), (6, 3, 4)])
def test_pass_at_k_counts_the_subsets_with_a_pass(samples: int, passed: int, k: int) -> None:
    subsets = list(combinations([True] * passed + [False] * (samples - passed), k))
    assert pass_at(k, samples, passed) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_wilson_against_published_values() -> None:
    """Newcombe (1998), Statistics in Medicine 17, table I, method 3."""
    for passed, trials, low, high in [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)]:
        assert wilson(passed / trials, trials) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(("count", "quantile"), [(4, 3.182), (6, 2.571), (11, 2.228), (31, 2.042)])
def test_means_of_other_numbers_than_shares_have_students_interval(count: int, quantile: float) -> None:
    values = [float(n) for n in range(-1, count - 1)]
    mean, half = statistics.mean(values), quantile * statistics.stdev(values) / math.sqrt(count)
    assert mean_of(values) == pytest.approx((mean, mean - half, mean + half), rel=2e-3)


@pytest.mark.parametrize("values", [[1.0], [1.0, 0.0], [0.5, 0.5, 0.5]])
def test_changes_that_do_not_show_how_they_vary_have_a_wide_interval(values: list[float]) -> None:
    mean, low, high = mean_change_of(values)
    assert low < 0 < mean and high - low > 0.7 and -1 <= low <= mean <= high <= 1
    assert mean_change_of([5.0] * 3) == (5.0, -math.inf, math.inf)


@pytest.mark.parametrize("tasks", [32, 64])
def test_the_fewer_tasks_changed_the_narrower_is_the_interval(tasks: int) -> None:
    found = [mean_change_of([1.0] * changed + [0.0] * (tasks - changed)) for changed in range(4)]
    widths = [high - low for _, low, high in found]
    assert widths == sorted(set(widths))
    assert found[0] == pytest.approx((0.0, -1.96 / (tasks + 2), 1.96 / (tasks + 2)), rel=1e-4)


@pytest.mark.parametrize(("better", "worse"), [(0.02, 0.02), (0.1, 0.0), (0.2, 0.1), (0.5, 0.5), (0.9, 0.05)])
def test_the_interval_of_a_change_covers_the_true_one(better: float, worse: float) -> None:
    """The chance, summed over all outcomes of 30 tasks, that the interval has the true mean change."""
    tasks, covered = 30, 0.0
    for up in range(tasks + 1):
        for down in range(tasks + 1 - up):
            _, low, high = mean_change_of([1.0] * up + [-1.0] * down + [0.0] * (tasks - up - down))
            ways = math.comb(tasks, up) * math.comb(tasks - up, down)
            chance = ways * better**up * worse**down * max(0.0, 1 - better - worse) ** (tasks - up - down)
            covered += chance * (low <= better - worse <= high)
    assert covered > 0.93


@pytest.mark.parametrize("changes", [[0.5, -0.25, 0.75, 0.0, 0.25], [1.0] * 5, [0.0, 0.0], [], [0.1, 0.2, -0.3]])
def test_few_changes_are_tested_exactly(changes: list[float]) -> None:
    flips = [abs(sum(s * c for s, c in zip(signs, changes))) for signs in product([1, -1], repeat=len(changes))]
    assert paired_p(changes) == pytest.approx(sum(flip >= abs(sum(changes)) - 1e-9 for flip in flips) / len(flips))


@pytest.mark.parametrize(("better", "worse"), [(30, 10), (12, 10), (25, 5)])
def test_many_changes_of_one_size_agree_with_the_sign_test(better: int, worse: int) -> None:
    """Where all changes are of one size, the randomization test is the two-sided sign test."""
    count = better + worse
    assert count > EXACT
    tail = sum(math.comb(count, k) for k in range(worse + 1)) / 2**count
    found = paired_p([1.0] * better + [-1.0] * worse)
    assert found == pytest.approx(min(1.0, 2 * tail), abs=4 * math.sqrt(tail / 16384) + 1 / 16384)
    assert found == paired_p([1.0] * better + [-1.0] * worse)


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
