"""One implementation says what an evaluation comes to, whoever asks."""

import math

from rl_async.evaluation.summary import Answer, summarize, summarize_with_total


def test_a_total_is_added_to_several_sources_alone() -> None:
    one = [Answer("a", "t", 1.0)]
    assert summarize_with_total(one, 1.0) == summarize(one, 1.0)
    several = [*one, Answer("b", "t", 0.0)]
    *sources, total = summarize_with_total(several, 1.0)
    assert sources == summarize(several, 1.0)
    assert (total.source, total.tasks, total.average.value) == ("all", 2, 0.5), "tasks of the same name are two"


def test_metrics_have_each_estimate_with_its_interval_and_nothing_that_is_no_number() -> None:
    (line,) = summarize([Answer("s", "t", 1.0), Answer("s", "t", 3.0), Answer("s", "u", 5.0)], 3.0)
    metrics = line.metrics()
    assert math.isinf(line.average.high)
    assert metrics.keys() == {"s/tasks", "s/samples", "s/avg", "s/pass@1", "s/pass@1/low", "s/pass@1/high"}
    assert (metrics["s/samples"], metrics["s/avg"], metrics["s/pass@1"]) == (1.0, 3.5, 0.75)


def test_a_source_without_a_name_has_one_as_a_metric() -> None:
    (line,) = summarize([Answer("", "t", 1.0)], 1.0)
    assert line.metrics()["unnamed/avg"] == 1.0
