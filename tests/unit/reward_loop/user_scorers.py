"""Reward functions as a user writes them; the tests name them as path.py:name."""

import asyncio
import contextlib
import functools
import os
import subprocess
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


def takes_a_moment(solution_str: str) -> float:
    time.sleep(0.3)
    return 1.0


async def stands_still_for_a_moment(solution_str: str) -> float:
    answer = asyncio.ensure_future(asyncio.sleep(0.3))
    await asyncio.sleep(0.01)
    if solution_str == "pause":
        time.sleep(1.7)  # noqa: ASYNC251  the process is to stand still
    await answer
    return 1.0


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


class _Exits(float):
    def __float__(self) -> float:
        sys.exit(4)


class _Sleeps(float):
    def __float__(self) -> float:
        time.sleep(3600)
        return 1.0


class _ErrorThatExits(Exception):
    def __str__(self) -> str:
        sys.exit(3)


class _Own(BaseException):
    pass


async def gives_what_exits(solution_str: str) -> float:
    return _Exits(1)


async def gives_what_sleeps(solution_str: str) -> float:
    return _Sleeps(1)


async def raises_what_exits(solution_str: str) -> float:
    raise _ErrorThatExits


def raises_what_exits_too(solution_str: str) -> float:
    raise _ErrorThatExits


def raises_its_own(solution_str: str) -> float:
    raise _Own("no Exception")


def is_interrupted(solution_str: str) -> float:
    raise KeyboardInterrupt


async def raises_a_group(solution_str: str) -> float:
    raise BaseExceptionGroup("several", [KeyboardInterrupt(), ValueError()])


async def ends_the_process(solution_str: str) -> float:
    os._exit(5)


async def stops_the_loop(solution_str: str) -> float:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0)
    return 1.0


async def cancels_all(solution_str: str) -> float:
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(3600)
    return 1.0


async def ends_the_loop_later(solution_str: str) -> float:
    asyncio.get_running_loop().call_soon(sys.exit)
    await asyncio.sleep(3600)
    return 1.0


async def swallows_all(solution_str: str) -> float:
    while True:
        try:
            await asyncio.sleep(3600)
        except:  # noqa: E722  the function under test is wrong
            continue


def reads_its_input(solution_str: str) -> float:
    return float(input())


def lets_a_program_read_its_input(solution_str: str) -> float:
    read = subprocess.run(["cat"], stdout=subprocess.PIPE, check=True).stdout
    return float(len(read))


def waits_for_a_child(solution_str: str) -> float:
    if (child := os.fork()) == 0:
        time.sleep(3600)
    os.waitpid(child, 0)
    return 1.0


def leaves_a_child_and_ends(solution_str: str) -> float:
    if os.fork() == 0:
        time.sleep(3600)
    os._exit(6)


async def blocks_on_request(solution_str: str) -> float:
    if solution_str == "block":
        time.sleep(3600)  # noqa: ASYNC251  the function under test is wrong
    return 1.0


async def forks_beside_the_loop(solution_str: str) -> float:
    if (child := os.fork()) == 0:
        return 9.0
    os.waitpid(child, 0)  # noqa: ASYNC222  the function under test is wrong
    return float(solution_str)


def writes_lines(solution_str: str) -> float:
    raise ValueError("one\ntwo\n" + "three" * 10**6)
