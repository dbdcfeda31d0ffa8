"""Reward functions as a user writes them; the tests name them as path.py:name."""

import asyncio
import os
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
