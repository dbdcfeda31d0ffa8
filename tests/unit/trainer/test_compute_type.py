"""The measurement of a processor's rates, on a clock that the test sets."""

from collections.abc import Callable, Iterator

import pytest

from rl_async.trainer.compute_type import TOKENS, TRIES, measure_rates

HIDDEN, INNER = 8, 24
OPERATIONS = 3 * 2 * TOKENS * HIDDEN * INNER


def clock_of(durations: list[float]) -> Callable[[], float]:
    """A clock on which the products take these seconds, one after another; more of them than that fail."""

    def times() -> Iterator[float]:
        now = 0.0
        for seconds in durations:
            yield now
            now += seconds
            yield now

    return times().__next__


def test_types_alternate_and_count_with_their_fastest_try() -> None:
    float32, bfloat16 = [9.0, 3.0, 2.0, 4.0, 5.0, 6.0], [8.0, 7.0, 6.0, 1.0, 5.0, 4.0]
    durations = [seconds for pair in zip(float32, bfloat16, strict=True) for seconds in pair]
    assert len(float32) == 1 + TRIES
    rates = measure_rates(HIDDEN, INNER, clock_of(durations))
    assert rates == pytest.approx({"float32": OPERATIONS / 2e9, "bfloat16": OPERATIONS / 1e9})


def test_a_type_that_is_much_slower_is_tried_once() -> None:
    rates = measure_rates(HIDDEN, INNER, clock_of([1.0, 4.1, *[0.5] * TRIES]))
    assert rates == pytest.approx({"float32": OPERATIONS / 0.5e9, "bfloat16": OPERATIONS / 4.1e9})


def test_a_slow_first_try_of_a_few_milliseconds_is_no_verdict() -> None:
    durations = [0.001, 0.09, *[0.001, 0.0005] * TRIES]
    rates = measure_rates(HIDDEN, INNER, clock_of(durations))
    assert rates["bfloat16"] == pytest.approx(2 * rates["float32"])
