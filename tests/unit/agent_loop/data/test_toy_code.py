"""The task of writing functions: its hidden tests tell whole answers from those without the limit."""

import json
import random
from typing import Any

from rl_async.agent_loop.toy_tasks import demonstrate_code, program, sample_code
from rl_async.reward_loop.api import Conversation
from rl_async.reward_loop.scorers.code import last_program
from rl_async.reward_loop.scorers.code_tests import parse_tests


def share(answer: str, truth: str) -> float:
    """The share of hidden tests that the answer's function passes; these functions need no sandbox."""
    names: dict[str, Any] = {}
    source = last_program(answer)
    assert source is not None
    exec(source, names)
    cases = json.loads(truth)
    passed = [names["f"](*given) == expected for given, expected in zip(cases["inputs"], cases["outputs"], strict=True)]
    return sum(passed) / len(passed)


def test_only_the_whole_function_passes_all_tests() -> None:
    source = random.Random(1)
    for _ in range(200):
        sample = sample_code(source)
        assert len(parse_tests(Conversation(data_source="code", solution_str="", ground_truth=sample.answer))) == 3
        assert share(program(sample.state["limited"]), sample.answer) == 1
        assert 0 < share(program(sample.state["expression"]), sample.answer) < 1


def test_demonstrations_are_programs_and_seldom_right() -> None:
    source, shares = random.Random(2), []
    for _ in range(300):
        sample = sample_code(source)
        (turn,) = demonstrate_code(sample, source)
        shares.append(share(turn["content"], sample.answer))
    assert 0.05 < shares.count(1.0) / len(shares) < 0.25
    assert 0.3 < sum(shares) / len(shares) < 0.5
