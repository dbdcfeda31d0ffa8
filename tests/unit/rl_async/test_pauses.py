"""While this process stands still, deadlines hardly run: answers that wait are read before a timer gives them up."""

import ast
import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rl_async import concurrency
from rl_async.agent_loop.environments.session import call_user
from rl_async.concurrency import time_limit, within
from rl_async.errors import EnvironmentFailed, QueueLost
from rl_async.messages import Done, Refused, Status
from rl_async.reward_loop.service import RewardService
from rl_async.transfer_queue import wire
from rl_async.transfer_queue.client import QueueClient
from tests.unit.reward_loop.outside import score
from tests.unit.reward_loop.test_service import config
from tests.unit.rl_async.test_processes import package_sources

LOOK_S = 0.1
LIMIT_S = 1.5
# How long the answer takes, and how long the process stands still meanwhile.
ANSWER_S, PAUSE_S = 0.3, 1.7


async def answers() -> str:
    """Take ANSWER_S of the time when this process runs."""
    for _ in range(30):
        await asyncio.sleep(ANSWER_S / 30)
    return "in time"


async def in_block(seconds: float, work: Awaitable[object]) -> object:
    async with time_limit(seconds):
        return await work


async def in_environment(seconds: float, work: Awaitable[object]) -> object:
    async def reset() -> object:
        return await work

    return await call_user("reset()", reset, timeout_s=seconds)


async def of_queue(seconds: float, work: Awaitable[object], first: Refused | None = None) -> object:
    """The queue's client, with an answer that comes when the work is done; ``first`` is answered then, if given."""
    client = QueueClient("tcp://127.0.0.1:1", role="person", name="test", timeout_s=seconds, patience_s=60.0)
    # Nothing is sent, so that the answers are the test's.
    sent = asyncio.Queue[None]()
    client._send = lambda frames: sent.put_nowait(None)  # type: ignore[method-assign]

    async def answer() -> object:
        await sent.get()
        found = await work
        for reply in (first, Done()):
            if reply is not None:
                ((request_id, pending),) = client._pending.items()
                pending.answer.set_result(wire.ReplyMessage(request_id, reply, []))
                if reply is first:
                    await sent.get()
        return found

    async with asyncio.TaskGroup() as tasks:
        answering = tasks.create_task(answer())
        await client.exchange(Status())
    return answering.result()


async def of_busy_queue(seconds: float, work: Awaitable[object]) -> object:
    return await of_queue(seconds, work, Refused(code=wire.BUSY, reason="as many clients as it takes"))


Limited = Callable[[float, Awaitable[object]], Awaitable[object]]
LIMITED: list[Limited] = [within, in_block, in_environment, of_queue, of_busy_queue]


@pytest.mark.parametrize("limited", LIMITED)
async def test_a_pause_counts_little(monkeypatch: pytest.MonkeyPatch, limited: Limited) -> None:
    monkeypatch.setattr(concurrency, "LOOK_S", LOOK_S)
    waiting = asyncio.ensure_future(limited(LIMIT_S, answers()))
    await asyncio.sleep(0.01)
    time.sleep(PAUSE_S)  # noqa: ASYNC251  the process is to stand still
    assert await waiting == "in time"


@pytest.mark.parametrize("limited", LIMITED)
@pytest.mark.usefixtures("simulated_time")
async def test_the_whole_limit_counts_without_a_pause(limited: Limited) -> None:
    began = time.monotonic()
    with pytest.raises((TimeoutError, EnvironmentFailed, BaseExceptionGroup)) as failed:
        await limited(7.25, asyncio.sleep(3600))
    if isinstance(failed.value, BaseExceptionGroup):
        assert failed.group_contains(QueueLost)
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


# Waits that only ask again, answers that others miss as well, and reports of what is silent.
COSTS_NOTHING = """
    ANSWER_S ANSWER_S SPEED_S+ANSWER_S DIAGNOSIS_S FETCH_S HEALTH_S HEALTH_S None
    min(progress.remaining_s,BACKOFF_S) process.wait(),PAGE_END_S self._ping_s self._timeout_s timeout_s
    wait_s wait_s within_s
"""


def test_no_other_deadline_of_a_coroutine_counts_pauses() -> None:
    found = list[str]()
    for file in package_sources():
        text = file.read_text()
        if "asyncio.timeout" in text or "asyncio.wait_for" in text:
            calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
            found += [
                ",".join(map(ast.unparse, call.args)).replace(" ", "")
                for call in calls
                if ast.unparse(call.func) in ("asyncio.timeout", "asyncio.timeout_at", "asyncio.wait_for")
            ]
    assert sorted(found) == sorted(COSTS_NOTHING.split())
