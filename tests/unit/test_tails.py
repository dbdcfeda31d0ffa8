"""The simulated runs of ``benchmarks.tails``: their clock, their engines, and what must hold of every row."""

import asyncio
import time

import pytest

from benchmarks.tails.clock import SimulatedLoop
from benchmarks.tails.engines import ITERATION_S, Engine, iteration_s
from benchmarks.tails.run import Arm, simulate
from rl_async.errors import RlAsyncError
from rl_async.messages import Sampling, Version, VersionRun
from rl_async.rollout_server.api import GenerateRequest, GenerateResult


def request(name: str) -> GenerateRequest:
    return GenerateRequest(request_id=name, token_ids=[1], sampling=Sampling(), max_tokens=100, stop_token_ids=[])


async def answer(engine: Engine, name: str) -> GenerateResult:
    (part,) = [part async for part in engine.stream(request(name), session=name)]
    return part


def test_simulated_time_takes_none() -> None:
    async def sleeps() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    began = time.monotonic()
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        assert runner.run(sleeps()) == pytest.approx(3600)
    assert time.monotonic() - began < 60


def test_a_simulated_run_that_has_stopped_says_so() -> None:
    async def waits() -> None:
        await asyncio.Event().wait()

    loop = SimulatedLoop()
    task = loop.create_task(waits())
    with pytest.raises(RlAsyncError):
        loop.run_until_complete(task)
    loop._jumping.now = 0.0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()


def test_two_sequences_share_an_engine_and_go_on_with_the_next_weights() -> None:
    async def play() -> tuple[float, GenerateResult]:
        loop = asyncio.get_running_loop()
        engine = Engine({"short": 10, "long": 30}.__getitem__)
        answers = [asyncio.create_task(answer(engine, name)) for name in ("short", "long")]
        await answers[0]
        engine.pause()
        await asyncio.sleep(5.0)
        engine.resume(Version(0, 1))
        long = await answers[1]
        assert engine.sampled == pytest.approx(40)
        return loop.time(), long

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        took, long = runner.run(play())
    assert took == pytest.approx(10 * iteration_s(2) + 5.0 + 20 * iteration_s(1))
    assert iteration_s(2) > iteration_s(1) > ITERATION_S
    assert long.versions == [VersionRun(Version(0, 0), 0, 10), VersionRun(Version(0, 1), 10, 30)]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["wait", "drop", "mask"])
def test_a_simulated_run_keeps_its_bound_and_is_no_faster_than_the_ideal_one(policy: str) -> None:
    arm = Arm(max_staleness=1, on_straggler=policy)
    outcome, ideal_s = simulate(arm, steps=4, train=1.0)
    assert outcome.oldest <= 1
    if policy == "wait":
        assert outcome.seconds_per_step >= ideal_s * 0.999
    assert (outcome.masked > 0) == (policy == "mask")
    assert (outcome.wasted > 0.02) == (policy == "drop")
