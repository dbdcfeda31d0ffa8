"""What engines do, as metrics of a step: asked beside the steps, never waited for."""

import asyncio
import threading
import time

import pytest

from rl_async.errors import EngineLost
from rl_async.messages import EngineList, EngineRecord, Version
from rl_async.rollout_server.api import EngineLoad, EngineTokens
from rl_async.trainer.monitoring import EngineLoads, Observation, engine_metrics


def load(running: int, sampled: int = 0, *, looked_up: int = 0, found: int = 0, preemptions: int = 0) -> EngineLoad:
    tokens = EngineTokens(prompt=2 * sampled, sampled=sampled, looked_up=looked_up, found=found)
    return EngineLoad(running=running, waiting=1, cache_usage=running / 10, preemptions=preemptions, tokens=tokens)


def test_state_is_summed_and_what_happened_is_divided_by_the_time() -> None:
    before = Observation(10.0, {"a": load(1, 100, looked_up=50, found=10), "b": load(2, 10)})
    now = Observation(12.0, {"a": load(3, 140, looked_up=90, found=30, preemptions=2), "b": load(5, 30)})
    assert engine_metrics(before, now) == {
        "engine/answering": 2,
        "engine/running": 8,
        "engine/waiting": 2,
        "engine/cache_usage": pytest.approx(0.4),
        "engine/preemptions": 2,
        "engine/prompt_tokens_per_s": 60,
        "engine/sampled_tokens_per_s": 30,
        "engine/prefix_hit_rate": 0.5,
    }


def test_an_engine_that_was_not_there_before_counts_in_the_state_alone() -> None:
    found = engine_metrics(
        Observation(0.0, {"a": load(1, 10)}), Observation(2.0, {"a": load(1, 12), "b": load(1, 999)})
    )
    assert (found["engine/running"], found["engine/sampled_tokens_per_s"]) == (2, 1)
    assert "engine/sampled_tokens_per_s" not in engine_metrics(Observation(0.0, {}), Observation(1.0, {"a": load(1)}))
    assert engine_metrics(Observation(0.0, {}), Observation(1.0, {})) == {}


def test_an_engine_that_counts_nothing_has_a_state_and_no_rates() -> None:
    bare = EngineLoad(running=1, waiting=0, cache_usage=0.5)
    found = engine_metrics(Observation(0.0, {"a": bare}), Observation(1.0, {"a": bare}))
    assert found.keys() == {"engine/answering", "engine/running", "engine/waiting", "engine/cache_usage"}


class Engine:
    """Answers when it is told to, or is lost."""

    def __init__(self, answered: threading.Event | None) -> None:
        self._answered = answered

    async def load(self) -> EngineLoad:
        if self._answered is None:
            raise EngineLost("gone")
        await asyncio.to_thread(self._answered.wait, 10)
        return load(4, int(time.monotonic() * 1e6))

    async def close(self) -> None:
        """Nothing is open."""


def test_a_step_waits_for_no_engine_and_a_lost_one_is_left_out() -> None:
    answered, clock = threading.Event(), [100.0]
    engines = {"slow": Engine(answered), "lost": Engine(None)}
    records = [EngineRecord(engine_id=name, url=name, kind="embedded") for name in engines]
    loads = EngineLoads(
        lambda: EngineList(revision=0, published=Version(), engines=records),
        lambda record: engines[record.url],
        lambda: clock[0],
    )
    assert loads.metrics() == {} and loads.metrics() == {}, "nothing has answered"
    answered.set()
    assert until_metrics(loads)["engine/answering"] == 1
    assert loads.metrics() == {}, "it is not asked again so soon"
    clock[0] += 5.0
    assert loads.metrics() == {}
    assert until_metrics(loads)["engine/sampled_tokens_per_s"] > 0


def until_metrics(loads: EngineLoads) -> dict[str, float]:
    """The next metrics, which must come in time."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if found := loads.metrics():
            return found
        time.sleep(0.01)
    raise AssertionError("no metrics came")
