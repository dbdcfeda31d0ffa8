"""Scoring: built-in scorers, users' scorers with every way to fail, weights and limits."""

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_async.agent_loop.dataset import open_rows, to_task
from rl_async.configs.schema import RewardConfig, RewardTerm
from rl_async.errors import ConfigError
from rl_async.messages import Sampling, Task, Trajectory, Turn
from rl_async.reward_loop.api import Score, ScorerFailed, to_score
from rl_async.reward_loop.service import RewardService

SCORERS = """
import os, time

def length(data_source, solution_str, ground_truth, extra_info):
    print("this must not disturb the answers")
    return {"score": len(solution_str), "words": len(solution_str.split()), "note": "x"}

def raises(data_source, solution_str, ground_truth, extra_info):
    raise KeyError("gold")

def sometimes_hangs(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "hang":
        time.sleep(600)
    return os.getpid()

def dies(data_source, solution_str, ground_truth, extra_info):
    os._exit(3)

def nonsense(data_source, solution_str, ground_truth, extra_info):
    return float("nan")

async def later(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "hang":
        import asyncio
        await asyncio.sleep(600)
    return float(extra_info["bonus"])
"""


@pytest.fixture
def scorers(tmp_path: Path) -> str:
    (tmp_path / "scorers.py").write_text(SCORERS)
    return str(tmp_path / "scorers.py")


def row(answer: str) -> Trajectory:
    return Trajectory(
        task_id="t",
        group_id=0,
        sample=0,
        attempt=0,
        episode_id="e",
        token_ids=np.zeros(1, np.int32),
        loss_mask=np.zeros(1, np.bool_),
        logprobs=np.zeros(1, np.float32),
        versions=[],
        sampling=Sampling(),
        reward=-1.0,
        turns=[Turn(role="user", text="?"), Turn(role="assistant", text=answer), Turn(role="tool", text="no")],
    )


def task(truth: str = "5", **extra: Any) -> Task:
    return Task(task_id="t", data_source="d", prompt=[], ground_truth=truth, extra=extra)


def config(*names: str, **changes: Any) -> RewardConfig:
    return RewardConfig(functions=tuple(RewardTerm(name=name) for name in names), **changes)


async def score(service: RewardService, answer: str, wanted: Task | None = None) -> Trajectory:
    scored = row(answer)
    await service.score(wanted or task(), scored)
    return scored


async def test_exact_answer_is_the_last_assistant_text() -> None:
    async with RewardService(RewardConfig()) as service:
        assert [(await score(service, text)).reward for text in (" 5\n", "6", "", "5 5")] == [1.0, 0.0, 0.0, 0.0]


async def test_the_reward_is_the_weighted_sum(scorers: str) -> None:
    terms = (RewardTerm(name="exact_answer", weight=2.0), RewardTerm(name=f"{scorers}:length", weight=0.5))
    async with RewardService(RewardConfig(functions=terms)) as service:
        scored = await score(service, "5")
    assert scored.reward == 2.5
    name = f"{scorers}:length"
    assert scored.reward_parts == {"exact_answer": 1.0, name: 1.0, f"{name}/words": 1.0}
    assert scored.timings["reward"] > 0


@pytest.mark.parametrize(
    ("name", "error"),
    [("raises", "raised KeyError: 'gold'"), ("dies", "its process died"), ("nonsense", "returned nan")],
)
async def test_a_failing_scorer_marks_its_trajectory(scorers: str, name: str, error: str) -> None:
    async with RewardService(config("exact_answer", f"{scorers}:{name}")) as service:
        scored = await score(service, "5")
        assert (scored.reward, scored.error) == (0.0, f"scorer {scorers}:{name}: {error}")
        assert service.failures == 1


async def test_a_hung_process_is_killed_and_replaced(scorers: str) -> None:
    async with RewardService(config(f"{scorers}:sometimes_hangs", timeout_s=3.0)) as service:
        first = await score(service, "x")
        hung, after = await asyncio.gather(score(service, "hang"), score(service, "x"))
        assert "no answer within 3 s" in hung.error
        assert hung.reward == 0.0
        assert after.error == ""
        assert after.reward != first.reward, "another process answers"
        with pytest.raises(ProcessLookupError):
            os.kill(int(first.reward), 0)
    with pytest.raises(ProcessLookupError):
        os.kill(int(after.reward), 0)


async def test_coroutine_scorers(scorers: str) -> None:
    async with RewardService(config(f"{scorers}:later", timeout_s=0.05)) as service:
        assert (await score(service, "x", task(bonus=0.25))).reward == 0.25
        assert "raised KeyError: 'bonus'" in (await score(service, "x")).error
        assert "no answer within 0.05 s" in (await score(service, "hang")).error


async def test_per_minute_spaces_the_starts(scorers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    async with RewardService(config(f"{scorers}:later", per_minute=60)) as service:
        monkeypatch.setattr("rl_async.reward_loop.service.asyncio.sleep", note)
        await asyncio.gather(*(score(service, "x", task(bonus=1)) for _ in range(4)))
    assert [round(wait) for wait in waits] == [0, 1, 2, 3]


async def test_max_concurrent(tmp_path: Path) -> None:
    (tmp_path / "count.py").write_text(
        "import asyncio\n"
        "running = most = 0\n"
        "async def count(data_source, solution_str, ground_truth, extra_info):\n"
        "    global running, most\n"
        "    running += 1\n"
        "    most = max(most, running)\n"
        "    await asyncio.sleep(0.01)\n"
        "    running -= 1\n"
        "    return most\n"
    )
    async with RewardService(config(f"{tmp_path}/count.py:count", max_concurrent=2)) as service:
        rows = await asyncio.gather(*(score(service, "x") for _ in range(6)))
    assert max(scored.reward for scored in rows) == 2


async def test_math_and_reasoning_gym() -> None:
    pytest.importorskip("math_verify")
    pytest.importorskip("reasoning_gym")
    rows = open_rows("reasoning_gym:chain_sum", seed=3)
    wanted = to_task(rows[5], "row 5", "t")
    async with RewardService(config("math", timeout_s=60.0)) as service:
        texts = [r"so it is \boxed{\frac{1}{2}}", "the answer is 0.5", r"\boxed{2}", "no idea"]
        scored = [await score(service, text, task("1/2")) for text in texts]
    assert [(r.reward, r.error) for r in scored] == [(1.0, ""), (1.0, ""), (0.0, ""), (0.0, "")]
    async with RewardService(config("reasoning_gym", timeout_s=60.0)) as service:
        assert (await score(service, wanted.ground_truth, wanted)).reward == 1.0
        assert (await score(service, "no", wanted)).reward < 1.0
        assert "does not come from reasoning_gym" in (await score(service, "5")).error


def test_unknown_scorers_are_refused_at_once(scorers: str) -> None:
    with pytest.raises(ConfigError, match="no scorer 'magic'; built in: exact_answer, math"):
        RewardService(config("magic"))
    with pytest.raises(ConfigError, match="has no 'nothing'"):
        RewardService(config(f"{scorers}:nothing"))


def test_what_scorers_may_return() -> None:
    assert to_score(True) == Score(1.0)
    assert to_score(np.float32(0.5)) == Score(0.5)
    assert to_score({"score": 1, "a": 2, "b": "x"}) == Score(1.0, {"a": 2.0})
    for bad in (None, "x", {"a": 1}, float("inf"), [1]):
        with pytest.raises(ScorerFailed, match="returned"):
            to_score(bad)
