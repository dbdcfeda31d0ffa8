"""Reward functions as a user writes them; the tests name them as path.py:name."""

import asyncio
import contextlib
import functools
import os
import sys
import time
from typing import Any


def verl_style(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    print("a scorer may print")
    right = data_source == "unit" and solution_str == ground_truth
    told = {"note": "words are not recorded", "reason": "but these are"}
    return {"score": float(right), "level": extra_info["level"], **told}


def count_turns(turns: list[Any]) -> int:
    return len(turns)


async def judge(solution_str: str, **others: Any) -> float:
    await asyncio.sleep(0)
    return 0.5 if solution_str and others["finish_reason"] == "stop" else 0.0


async def endless_judge(solution_str: str) -> float:
    await asyncio.sleep(3600)
    return 1.0


async def judge_out_of_reach(solution_str: str) -> float:
    raise TimeoutError("the judge's server is gone")


def hangs_on_request(solution_str: str) -> float:
    if solution_str == "hang":
        while True:
            time.sleep(60)
    return os.getpid()


async def says_its_reward(solution_str: str) -> float:
    return float(solution_str)


def hoards(solution_str: str) -> int:
    return len(bytearray(int(solution_str)))


def raises(solution_str: str) -> float:
    raise KeyError("missing")


def dies(solution_str: str) -> float:
    os._exit(7)


def nonsense(solution_str: str) -> str:
    return "good"


def asks_for_more(solution_str: str, weather: str) -> float:
    return 0.0


def sees_all(solution_str: str, answer: str, reasoning: str) -> float:
    return float((solution_str, answer, reasoning) == ("<think>41?</think>42", "42", "41?"))


async def cancelled(solution_str: str) -> float:
    raise asyncio.CancelledError("its own")


async def leaves(solution_str: str) -> float:
    sys.exit(3)


def leaves_too(solution_str: str) -> float:
    sys.exit(3)


async def swallows(solution_str: str) -> float:
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)


async def raises_half_a_character(solution_str: str) -> float:
    raise ValueError("\ud800")


def odd_keys(solution_str: str) -> dict[str, float]:
    return {"score": 1.0, "\ud800": 2.0}


def _decorated(function: Any) -> Any:
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    return call


@_decorated
async def decorated(solution_str: str) -> float:
    return 1.0


async def _hidden(solution_str: str) -> float:
    return 1.0


def hides_a_coroutine(solution_str: str) -> Any:
    return _hidden(solution_str)


class _Callable:
    async def __call__(self, solution_str: str) -> float:
        return 1.0


callable_object = _Callable()


def forks(solution_str: str) -> float:
    """Its child leaves by an exception that the server of scorers catches."""
    if (child := os.fork()) == 0:
        sys.exit(0)
    os.waitpid(child, 0)
    return float(solution_str)
