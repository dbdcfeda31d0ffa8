"""Of failures that are alike, ever fewer get a line in the log."""

from rl_async.agent_loop.worker import FIRST_LINES, Repetitions, beginning


def test_of_failures_that_are_alike_ever_fewer_get_a_line() -> None:
    repetitions = Repetitions()
    told = [times for _ in range(20) if (times := repetitions.another("one"))]
    assert told == [*range(1, FIRST_LINES + 1), 4, 8, 16]
    assert repetitions.another("other") == 1


def test_errors_that_differ_in_numbers_begin_alike() -> None:
    assert beginning("sample 3.1 took 20 s") == beginning("sample 14.0 took 7 s") != beginning("sample 3.1 broke")
