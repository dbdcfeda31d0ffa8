"""While this process stands still, deadlines hardly run: answers that wait are read before a timer gives them up."""

import asyncio
import re
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rl_async import concurrency
from rl_async.agent_loop.environments.session import call_user
from rl_async.concurrency import time_limit, within
from rl_async.errors import EnvironmentFailed
from rl_async.reward_loop.service import RewardService
from tests.unit.reward_loop.outside import score
from tests.unit.reward_loop.test_service import config
from tests.unit.rl_async.test_processes import package_sources

LOOK_S = 0.1
LIMIT_S = 1.5
# How long the answer takes, and how long the process stands still meanwhile.
ANSWER_S, PAUSE_S = 0.3, 1.7


async def in_block(seconds: float, work: Awaitable[object]) -> object:
    async with time_limit(seconds):
        return await work


async def in_environment(seconds: float, work: Awaitable[object]) -> object:
    async def reset() -> object:
        return await work

    return await call_user("reset()", reset, timeout_s=seconds)


Limited = Callable[[float, Awaitable[object]], Awaitable[object]]
LIMITED: list[Limited] = [within, in_block, in_environment]


@pytest.mark.parametrize("limited", LIMITED)
async def test_a_pause_counts_little(monkeypatch: pytest.MonkeyPatch, limited: Limited) -> None:
    monkeypatch.setattr(concurrency, "LOOK_S", LOOK_S)
    answer = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(ANSWER_S, answer.set_result, "in time")
    waiting = asyncio.ensure_future(limited(LIMIT_S, answer))
    await asyncio.sleep(0.01)
    time.sleep(PAUSE_S)  # noqa: ASYNC251  the process is to stand still
    assert await waiting == "in time"


@pytest.mark.parametrize("limited", LIMITED)
@pytest.mark.usefixtures("simulated_time")
async def test_the_whole_limit_counts_without_a_pause(limited: Limited) -> None:
    began = time.monotonic()
    with pytest.raises((TimeoutError, EnvironmentFailed)):
        await limited(7.25, asyncio.sleep(3600))
    assert time.monotonic() - began == pytest.approx(7.25, abs=0.01)
    assert await limited(7.25, asyncio.sleep(7.0, "in time")) == "in time"


@pytest.mark.usefixtures("simulated_time")
async def test_a_block_stays_in_its_task_and_may_have_no_limit() -> None:
    async with time_limit(None) as limit:
        await asyncio.sleep(3600)
        assert limit.when() is None
    with pytest.raises(TimeoutError):
        async with time_limit(0.0) as limit:
            await asyncio.sleep(1)
    assert limit.expired()
    task = asyncio.current_task()
    async with time_limit(5.0):
        assert asyncio.current_task() is task
    # No timer is left that would cancel the task after its block.
    await asyncio.sleep(60)


async def test_a_process_that_scores_has_no_timer_that_a_pause_would_let_run_out() -> None:
    """The kernel's timers go on while a process is stopped, and kill it when it is continued."""
    async with RewardService(config(f"{__file__}:alarm_s")) as service:
        scored = await score(service, "any")
    assert (scored.reward, scored.error) == (0.0, "")


def alarm_s(**conversation: Any) -> float:
    return signal.getitimer(signal.ITIMER_REAL)[0]


# A wait that only asks again, an answer that others miss as well, or a report of what does not answer.
COSTS_NOTHING = {
    "agent_loop/gateway/open_episodes.py": 1,
    "agent_loop/gateway/server.py": 1,
    "insight/doctor.py": 3,
    "launcher/runs/evaluate.py": 2,
    "launcher/runs/launch.py": 2,
    "rollout_server/http.py": 2,
    "rollout_server/pool.py": 3,
    "trainer/publishing.py": 1,
    "weight_sync/coordinator.py": 1,
}


def test_no_other_deadline_of_a_coroutine_counts_pauses() -> None:
    root, found = Path(concurrency.__file__).parents[1], dict[str, int]()
    for file in package_sources():
        calls = re.findall(r"asyncio\.(?:timeout|timeout_at|wait_for)\(", file.read_text())
        if calls:
            found[str(file.relative_to(root))] = len(calls)
    assert found == COSTS_NOTHING
