"""Routing, the version gate, and what happens to requests when engines are lost. Engines are handwritten fakes."""

import asyncio
import json
import math
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from rl_async.agent_loop.episode import kept_alternatives, policy_sampling
from rl_async.configs.load import load_config
from rl_async.errors import ConfigError, EngineLost, EngineRejected, ProtocolError, QueueLost, QueueReplaced
from rl_async.messages import EngineList, EngineRecord, Sampling, Version, VersionRun
from rl_async.rollout_server import json_schemas, pool
from rl_async.rollout_server import pool as pool_module
from rl_async.rollout_server.api import (
    DROPPED,
    LINEAGE_HEADER,
    MOST_ALTERNATIVES,
    REPLACED,
    TIES,
    EngineLoad,
    GenerateRequest,
    GenerateResult,
    Image,
    IncomingAnswer,
    LineageFence,
)
from rl_async.rollout_server.json_schemas import beyond_bounds, problem, without_unknown_formats
from rl_async.rollout_server.pool import (
    CANDIDATES,
    EVIDENCE,
    LATE_S,
    EnginePool,
    OpenMembers,
    PoolMember,
    Router,
    connect,
)
from rl_async.rollout_server.sglang.client import SglangEngine
from rl_async.rollout_server.vllm.client import VllmEngine

Behaviour = Callable[[GenerateRequest], GenerateResult | Iterator[GenerateResult]]


class FakeEngine:
    """Answers as its behaviour does, after ``hold`` is set; a behaviour that returns several parts is streamed."""

    def __init__(self, name: str, behaviour: Behaviour) -> None:
        self.name, self.behaviour = name, behaviour
        self.seen: list[GenerateRequest] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.asked = asyncio.Event()
        self.closed = False
        self.asleep = False
        self.silent = False

    async def stream(self, request: GenerateRequest, *, session: str) -> AsyncGenerator[GenerateResult, None]:
        self.seen.append(request)
        self.asked.set()
        await self.hold.wait()
        answer = self.behaviour(request)
        for part in [answer] if isinstance(answer, GenerateResult) else answer:
            yield part

    async def load(self) -> EngineLoad:
        if self.silent:
            raise EngineLost("no answer")
        return EngineLoad(running=0, waiting=0, cache_usage=0.0)

    async def is_sleeping(self) -> bool:
        return self.asleep

    async def close(self) -> None:
        self.closed = True


def result(tokens: int, version: Version, reason: str = "stop", first: int = 0) -> GenerateResult:
    return GenerateResult(
        token_ids=list(range(first, first + tokens)),
        logprobs=[-0.5] * tokens,
        versions=[VersionRun(version, 0, tokens)],
        finish_reason=reason,  # type: ignore[arg-type]
    )


V1 = Version(0, 1)


def request(version: Version = V1, max_tokens: int = 8) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        token_ids=[1, 2],
        sampling=Sampling(),
        max_tokens=max_tokens,
        stop_token_ids=[],
        min_version=version,
    )


def registry(revision: int = 1, **versions: Version | None) -> EngineList:
    records = [EngineRecord(engine_id=n, url=n, kind="embedded", version=v) for n, v in versions.items()]
    return EngineList(revision=revision, engines=records, published=Version())


def make_pool(timeout_s: float = 5.0, **behaviours: Behaviour) -> tuple[EnginePool, dict[str, FakeEngine]]:
    engines: dict[str, FakeEngine] = {}

    def connect(record: EngineRecord) -> FakeEngine:
        engines[record.engine_id] = FakeEngine(record.engine_id, behaviours[record.engine_id])
        return engines[record.engine_id]

    return EnginePool(connect, timeout_s, 8), engines


def lose(_: GenerateRequest) -> GenerateResult:
    raise EngineLost("connection reset")


@pytest.mark.usefixtures("simulated_time")
async def test_engines_without_the_version_get_no_traffic() -> None:
    pool, engines = make_pool(old=lose, new=lambda r: result(3, Version(0, 1)), none=lose)
    pool.update(registry(old=Version(0, 0), new=Version(0, 1), none=None))
    for _ in range(4):
        assert len((await pool.generate(request(), session="s")).token_ids) == 3
    assert not engines["old"].seen
    assert not engines["none"].seen


@pytest.mark.usefixtures("simulated_time")
def test_of_many_engines_those_with_a_new_version_are_not_slow_beside_faster_ones_without_it() -> None:
    router: Router[FakeEngine] = Router()
    members = []
    for number in range(CANDIDATES + 2):
        is_new = number >= CANDIDATES
        record = EngineRecord(engine_id=f"{number}", url="", kind="embedded", version=V1 if is_new else Version())
        members.append(PoolMember(record, FakeEngine(f"{number}", lose), 8))
        for _ in range(2 * EVIDENCE):
            members[-1].pace.hear(1, 0.2 if is_new else 0.02, 0.0)
    old = router.choose(members, request(Version()), "s", 0.0)
    assert old is not None
    router.ended(old, 60.0)
    new = router.choose(members, request(V1), "t", 0.1, members, waited_s=0.0)
    assert new is not None and new.serves(V1, 0.1)


@pytest.mark.usefixtures("simulated_time")
async def test_waiters_are_woken_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, engines = make_pool(a=lambda r: result(1, V1))
    pool.update(registry(a=V1))
    engines["a"].hold.clear()
    tried = []
    choose = pool._router.choose
    monkeypatch.setattr(pool._router, "choose", lambda *given: tried.append(given[2]) or choose(*given))
    tasks = [asyncio.create_task(pool.generate(request(), session=str(i))) for i in range(60)]
    await asyncio.sleep(0.1)
    assert len(tried) == 60
    engines["a"].hold.set()
    await asyncio.gather(*tasks)
    assert tried[60:] == [str(i) for i in range(10, 60)], "ten had found room at once"


@pytest.mark.usefixtures("simulated_time")
async def test_room_at_an_old_engine_goes_to_waiters_that_accept_its_version() -> None:
    pool, engines = make_pool(old=lambda r: result(1, Version(0, 0)), new=lambda r: result(1, V1))
    pool.update(registry(old=Version(0, 0), new=V1))
    for engine in engines.values():
        engine.hold.clear()
    full = [asyncio.create_task(pool.generate(request(Version()), session=f"o{i}")) for i in range(20)]
    await asyncio.sleep(0.01)
    first = asyncio.create_task(pool.generate(request(V1), session="first in line"))
    second = asyncio.create_task(pool.generate(request(Version()), session="second in line"))
    await asyncio.sleep(0.01)
    engines["old"].hold.set()
    async with asyncio.timeout(30):
        await second
    assert not first.done() and not engines["new"].hold.is_set()
    engines["new"].hold.set()
    await asyncio.gather(first, *full)


async def batches_take(number: int, at_once: int, pool: EnginePool, **pace_s: float) -> float:
    """Sample so many batches of 20 tokens an answer, one after another; the seconds that it took."""
    pool.update(registry(**dict.fromkeys(pace_s, V1)))
    began = time.monotonic()
    for batch in range(number):
        answers = [pool.generate(request(max_tokens=20), session=f"{batch}.{n}") for n in range(at_once)]
        await asyncio.gather(*answers)
    return time.monotonic() - began


def paced(pace_s: Mapping[str, float]) -> tuple[EnginePool, dict[str, FakeEngine]]:
    """Engines that need so many seconds for each token of an answer, however many answers they sample."""

    class Paced(FakeEngine):
        async def stream(self, request: GenerateRequest, *, session: str) -> AsyncGenerator[GenerateResult, None]:
            self.seen.append(request)
            for reason in ("abort", "length"):
                await asyncio.sleep(request.max_tokens / 2 * pace_s[self.name])
                yield result(request.max_tokens // 2, V1, reason)

    engines: dict[str, FakeEngine] = {}

    def connect(record: EngineRecord) -> FakeEngine:
        return engines.setdefault(record.engine_id, Paced(record.engine_id, lose))

    return EnginePool(connect, 60.0, 8), engines


@pytest.mark.usefixtures("simulated_time")
@pytest.mark.parametrize("at_once", [8, 30], ids=["with room", "more than the fast one has room for"])
async def test_an_engine_that_is_ten_times_slower_does_not_slow_the_other_one_down(at_once: int) -> None:
    alone, _ = paced({"fast": 0.02})
    best = await batches_take(30, at_once, alone, fast=0.02)
    pool, _ = paced({"fast": 0.02, "slow": 0.2})
    both = await batches_take(30, at_once, pool, fast=0.02, slow=0.2)
    # An answer of the slow engine takes 4 s: those of the first batch, and those by which it is measured again, which
    # take a twentieth of the time.
    assert both < 1.05 * best + 2 * 4.0


@pytest.mark.usefixtures("simulated_time")
async def test_a_slow_engine_that_recovers_is_used_again() -> None:
    pace_s = {"fast": 0.02, "slow": 0.2}
    pool, engines = paced(pace_s)
    await batches_take(20, 8, pool, **pace_s)
    pace_s["slow"] = 0.02
    # It is measured after 20 times the 4 s that its last answer took, and then again after 20 s each, until what it
    # was weighs less than what it is.
    await asyncio.sleep(20 * 4.0)
    for _ in range(4):
        await batches_take(1, 8, pool, **pace_s)
        await asyncio.sleep(20.0)
    engines["slow"].seen.clear()
    await batches_take(20, 8, pool, **pace_s)
    assert len(engines["slow"].seen) >= 20 * 8 / 4, "half, if nothing else counted"


@pytest.mark.usefixtures("simulated_time")
async def test_a_lost_request_is_replayed_elsewhere() -> None:
    pool, engines = make_pool(a=lose, b=lambda r: result(2, Version(0, 1)))
    pool.update(registry(a=Version(0, 1), b=Version(0, 1)))
    for _ in range(3):
        assert (await pool.generate(request(), session="s")).finish_reason == "stop"
    assert len(engines["a"].seen) <= 1, "an engine that failed is set aside"
    assert (await pool.generate(request(), session="s")).engine == "b"


@pytest.mark.usefixtures("simulated_time")
async def test_it_waits_for_an_engine_that_comes_back() -> None:
    pool, _ = make_pool(a=lose, b=lambda r: result(2, Version(0, 1)))
    pool.update(registry(a=Version(0, 1)))
    task = asyncio.create_task(pool.generate(request(), session="s"))
    await asyncio.sleep(0.05)
    pool.update(registry(b=Version(0, 1)))
    assert (await task).finish_reason == "stop"


@pytest.mark.usefixtures("simulated_time")
async def test_an_expired_request_names_the_known_engines() -> None:
    pool, _ = make_pool(timeout_s=0.2, a=lose)
    pool.update(registry(a=Version(0, 0)))
    with pytest.raises(EngineLost, match=r"version 0\.1.*rollout\.request_timeout_s.*a at 0\.0"):
        await pool.generate(request(), session="s")


@pytest.mark.usefixtures("simulated_time")
async def test_time_in_which_the_engine_sleeps_does_not_count() -> None:
    pool, engines = make_pool(timeout_s=0.1, a=lambda r: result(3, V1))
    pool.update(registry(a=V1))
    engine = engines["a"]
    engine.hold.clear()
    engine.asleep = True
    waiting = asyncio.create_task(pool.generate(request(), session="s"))
    await asyncio.sleep(0.35)
    assert not waiting.done()
    engine.asleep = False
    engine.hold.set()
    assert len((await waiting).token_ids) == 3
    assert len(engine.seen) == 1, "it was asked once"


@pytest.mark.usefixtures("simulated_time")
async def test_a_request_times_out_on_an_engine_that_hangs_awake() -> None:
    pool, engines = make_pool(timeout_s=0.1, a=lambda r: result(3, V1))
    pool.update(registry(a=V1))
    engine = engines["a"]
    engine.hold.clear()
    async with asyncio.timeout(30):
        with pytest.raises(EngineLost, match=r"rollout\.request_timeout_s"):
            await pool.generate(request(), session="s")


@pytest.mark.usefixtures("simulated_time")
async def test_a_rejected_request_is_not_replayed() -> None:
    def refuse(_: GenerateRequest) -> GenerateResult:
        raise EngineRejected("prompt too long")

    pool, engines = make_pool(a=refuse, b=refuse)
    pool.update(registry(a=Version(0, 1), b=Version(0, 1)))
    with pytest.raises(EngineRejected):
        await pool.generate(request(), session="s")
    assert len(engines["a"].seen) + len(engines["b"].seen) == 1


@pytest.mark.usefixtures("simulated_time")
async def test_tokens_sampled_before_an_abort_are_kept() -> None:
    answers = [result(3, Version(0, 1), "abort"), result(2, Version(0, 2), "stop", first=3)]
    pool, engines = make_pool(a=lambda r: answers.pop(0))
    pool.update(registry(a=Version(0, 1)))
    got = await pool.generate(request(), session="s")
    assert got.token_ids == [0, 1, 2, 3, 4]
    assert len(got.logprobs) == 5
    assert got.versions == [VersionRun(Version(0, 1), 0, 3), VersionRun(Version(0, 2), 3, 5)]
    assert engines["a"].seen[1].token_ids == [1, 2, 0, 1, 2]
    assert engines["a"].seen[1].max_tokens == 5


def broken_after(parts: int) -> Behaviour:
    """Streams parts of two tokens, then breaks off."""

    def behave(request: GenerateRequest) -> Iterator[GenerateResult]:
        for number in range(parts):
            yield result(2, V1, "abort", first=2 * number)
        raise EngineLost("connection reset")

    return behave


@pytest.mark.usefixtures("simulated_time")
async def test_tokens_sampled_before_an_engine_was_lost_are_kept() -> None:
    pool, engines = make_pool(a=broken_after(3))
    pool.update(registry(a=V1))
    images = [Image.of(b"a drawing", "image/png", 1)]
    asking = asyncio.create_task(pool.generate(msgspec.structs.replace(request(), images=images), session="s"))
    await engines["a"].asked.wait()
    engines["b"] = FakeEngine("b", lambda r: result(2, Version(0, 2), "stop", first=6))
    pool._connect = lambda record: engines["b"]
    pool.update(registry(2, a=V1, b=Version(0, 2)))
    got = await asking
    assert got.token_ids == list(range(8))
    assert got.versions == [VersionRun(V1, 0, 6), VersionRun(Version(0, 2), 6, 8)]
    (asked,) = engines["b"].seen
    assert (asked.token_ids, asked.max_tokens, asked.images) == ([1, 2, *range(6)], 2, images)


@pytest.mark.usefixtures("simulated_time")
async def test_an_answer_within_a_schema_is_begun_elsewhere_but_not_continued() -> None:
    asked = msgspec.structs.replace(request(), json_schema="{}")
    pool, engines = make_pool(a=broken_after(0), b=lambda r: result(3, V1))
    pool.update(registry(a=V1))
    asking = asyncio.create_task(pool.generate(asked, session="s"))
    await engines["a"].asked.wait()
    pool.update(registry(2, a=V1, b=V1))
    assert (await asking).token_ids == [0, 1, 2] and engines["b"].seen == [asked]
    pool, engines = make_pool(a=broken_after(2), b=lambda r: result(3, V1))
    pool.update(registry(a=V1))
    asking = asyncio.create_task(pool.generate(asked, session="s"))
    await engines["a"].asked.wait()
    pool.update(registry(2, a=V1, b=V1))
    with pytest.raises(EngineLost):
        await asyncio.wait_for(asking, 2)
    assert engines["b"].seen == []


@pytest.mark.usefixtures("simulated_time")
async def test_a_complete_answer_without_its_finish_reason_is_not_requested_again() -> None:
    pool, engines = make_pool(a=broken_after(4))
    pool.update(registry(a=V1))
    got = await pool.generate(request(), session="s")
    assert (got.token_ids, got.finish_reason) == (list(range(8)), "length")
    assert len(engines["a"].seen) == 1


@pytest.mark.usefixtures("simulated_time")
async def test_nothing_is_sampled_after_a_stop_token_whose_finish_reason_was_lost() -> None:
    pool, engines = make_pool(a=broken_after(2))
    pool.update(registry(a=V1))
    asked = msgspec.structs.replace(request(), stop_token_ids=[3])
    got = await pool.generate(asked, session="s")
    assert (got.token_ids, got.finish_reason) == ([0, 1, 2, 3], "stop")
    assert len(engines["a"].seen) == 1


@pytest.mark.usefixtures("simulated_time")
@pytest.mark.parametrize("what", ["errors", "empty aborts"])
async def test_requests_time_out_on_engines_that_answer_only_probes(what: str) -> None:
    behaviour = lose if what == "errors" else lambda r: result(0, V1, "abort")
    pool, engines = make_pool(timeout_s=2.5, a=behaviour, b=behaviour)
    pool.update(registry(a=V1, b=V1))
    async with asyncio.timeout(10):
        with pytest.raises(EngineLost, match=r"rollout\.request_timeout_s"):
            await pool.generate(request(), session="s")
    assert 2 <= len(engines["a"].seen) + len(engines["b"].seen) < 10, "the pool backs off between attempts"


@pytest.mark.usefixtures("simulated_time")
async def test_a_request_that_an_engine_swallowed_goes_to_another_one() -> None:
    pool, engines = make_pool(timeout_s=0.3, a=lambda r: result(3, V1), b=lambda r: result(3, V1))
    pool.update(registry(a=V1, b=V1))
    engines["a"].hold.clear()
    async with asyncio.timeout(30):
        answers = await asyncio.gather(*(pool.generate(request(), session=str(number)) for number in range(8)))
    assert all(len(answer.token_ids) == 3 and answer.engine == "b" for answer in answers)
    assert 0 < len(engines["a"].seen) < 8
    before = len(engines["a"].seen)
    await asyncio.gather(*(pool.generate(request(), session=f"later {number}") for number in range(8)))
    assert len(engines["a"].seen) == before, "it is backed off from"


@pytest.mark.usefixtures("simulated_time")
async def test_each_part_extends_the_deadline() -> None:
    def slowly(engine: FakeEngine) -> None:
        async def stream(request: GenerateRequest, *, session: str) -> AsyncGenerator[GenerateResult, None]:
            for number in range(4):
                await asyncio.sleep(0.06)
                yield result(2, V1, "abort" if number < 3 else "stop", first=2 * number)

        engine.stream = stream  # type: ignore[method-assign]

    pool, engines = make_pool(timeout_s=0.15, a=lose)
    pool.update(registry(a=V1))
    slowly(engines["a"])
    assert len((await pool.generate(request(), session="s")).token_ids) == 8


@pytest.mark.usefixtures("simulated_time")
async def test_requests_move_away_from_an_engine_that_left_or_misses_probes() -> None:
    for leave in ("registry", "silence"):
        pool, engines = make_pool(a=lambda r: result(3, V1), b=lambda r: result(4, V1))
        pool.update(registry(a=V1))
        engines["a"].hold.clear()
        asking = asyncio.create_task(pool.generate(request(), session="s"))
        await engines["a"].asked.wait()
        pool.update(registry(2, a=V1, b=V1))
        probing = asyncio.create_task(pool._probe_all())
        if leave == "registry":
            pool.update(registry(3, b=V1))
        else:
            engines["a"].silent = True
        assert len((await asyncio.wait_for(asking, 30)).token_ids) == 4, leave
        probing.cancel()


@pytest.mark.usefixtures("simulated_time")
async def test_an_engine_that_answers_probes_again_gets_requests_again() -> None:
    pool, engines = make_pool(timeout_s=60, a=lambda r: result(3, V1))
    pool.update(registry(a=V1))
    engines["a"].silent = True
    probing = asyncio.create_task(pool._probe_all())
    await pool._members["a"].gone.wait()
    asking = asyncio.create_task(pool.generate(request(), session="s"))
    await asyncio.sleep(2 * pool_module.PROBE_EVERY_S)
    assert not engines["a"].seen
    engines["a"].silent = False
    assert len((await asyncio.wait_for(asking, 30)).token_ids) == 3
    probing.cancel()


@pytest.mark.usefixtures("simulated_time")
async def test_no_engine_gets_more_than_its_limit() -> None:
    pool, engines = make_pool(timeout_s=0.2, a=lambda r: result(1, V1))
    pool.update(registry(a=V1))
    engine = engines["a"]
    engine.hold.clear()
    engine.asleep = True  # so that those it has do not time out
    asking = [asyncio.create_task(pool.generate(request(), session=str(i))) for i in range(30)]
    await asyncio.sleep(0.5)  # beyond the deadline, which does not run while they wait for their turn
    assert len(engine.seen) == pool._members["a"].limit == 10
    engine.hold.set()
    assert {len((await task).token_ids) for task in asking} == {1}


@pytest.mark.usefixtures("simulated_time")
async def test_a_removed_engine_is_closed() -> None:
    pool, engines = make_pool(a=lose)
    pool.update(registry(a=Version()))
    pool.update(registry(2))
    await pool.close()
    assert engines["a"].closed


@pytest.mark.usefixtures("simulated_time")
async def test_of_many_engines_a_bounded_number_is_probed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "PROBES_AT_ONCE", 3)
    names = [f"e{n}" for n in range(9)]
    pool, engines = make_pool(**dict.fromkeys(names, lambda r: result(1, V1)))
    pool.update(registry(**dict.fromkeys(names, V1)))
    engines["e8"].silent = True
    by_round: dict[float, list[str]] = {}

    async def probe(member) -> None:
        by_round.setdefault(asyncio.get_running_loop().time(), []).append(member.engine_id)
        await type(pool)._probe(pool, member)

    monkeypatch.setattr(pool, "_probe", probe)
    probing = asyncio.create_task(pool._probe_all())
    await asyncio.sleep(5.5 * pool_module.PROBE_EVERY_S)
    probing.cancel()
    rounds = list(by_round.values())
    assert max(map(len, rounds)) == 3
    assert {name for names in rounds[:3] for name in names} == set(names), "each in its turn"
    assert "e8" in rounds[3], "one that failed is probed again at once"


@pytest.mark.usefixtures("simulated_time")
async def test_a_withdrawn_engine_gets_no_traffic_until_it_is_back_and_its_requests_move() -> None:
    pool, engines = make_pool(own=lambda r: result(2, V1), lent=lambda r: result(2, V1))
    pool.update(registry(lent=V1))
    engines["lent"].hold.clear()
    task = asyncio.create_task(pool.generate(request(), session="s"))
    await engines["lent"].asked.wait()
    pool.update(registry(2, lent=None, own=V1))
    async with asyncio.timeout(2):
        assert (await task).engine == "own"
        assert (await pool.generate(request(), session="s")).engine == "own"
    assert len(engines["lent"].seen) == 1
    engines["lent"].hold.set()
    pool.update(registry(3, lent=V1))
    assert (await pool.generate(request(), session="t")).engine == "lent", "at once, without the pause after a failure"


@pytest.mark.usefixtures("simulated_time")
async def test_a_token_that_came_while_this_process_was_held_up_is_in_time() -> None:
    pool, engines = make_pool(timeout_s=0.3, a=lambda r: result(3, V1))
    pool.update(registry(a=V1))
    engines["a"].hold.clear()
    asking = asyncio.create_task(pool.generate(request(), session="s"))
    await engines["a"].asked.wait()
    asyncio.get_running_loop().call_later(0.1, engines["a"].hold.set)
    time.sleep(0.4 + LATE_S)  # noqa: ASYNC251  the process is to stand still
    assert len((await asking).token_ids) == 3


class LostRegistry:
    """Answers no more: each request raises the next error at once, as a client does whose queue is gone."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.asked = list(errors), 0

    async def engines(self, after: int, wait_s: float) -> EngineList:
        self.asked += 1
        raise self.errors.pop(0) if len(self.errors) > 1 else self.errors[0]


@pytest.mark.usefixtures("simulated_time")
async def test_a_pool_whose_queue_has_lost_its_state_ends() -> None:
    registry = LostRegistry(QueueReplaced("another queue"))
    with pytest.RaisesGroup(QueueReplaced):
        async with asyncio.timeout(30):
            await EnginePool(FakeEngine, 60.0, 8).watch(registry)  # type: ignore[arg-type]
    assert registry.asked == 1


@pytest.mark.usefixtures("simulated_time")
async def test_a_pool_whose_queue_is_away_asks_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "BACKOFF_S", 0.05)
    registry = LostRegistry(QueueLost("silent"))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await EnginePool(FakeEngine, 60.0, 8).watch(registry)  # type: ignore[arg-type]
    assert 1 <= registry.asked <= 7


# Requests to engines: which engine gets them, which pass its fence, and which schemas and kept tokens are taken.


# Which engine gets a request, and the client of an engine by its kind.


def member(name: str, version: Version | None = V1, max_batch: int = 8) -> PoolMember[None]:
    return PoolMember(EngineRecord(engine_id=name, url=name, kind="embedded", version=version), None, max_batch)


def routed_request(prompt: int = 10, max_tokens: int = 20) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        token_ids=[1] * prompt,
        sampling=Sampling(),
        max_tokens=max_tokens,
        stop_token_ids=[],
        min_version=V1,
    )


def load(requests: int = 0, usage: float = 0.0, preemptions: int = 0) -> EngineLoad:
    return EngineLoad(running=requests, waiting=0, cache_usage=usage, preemptions=preemptions)


def chosen(router: Router[None], members: list[PoolMember[None]], session: str, prompt: int = 10) -> str | None:
    best = router.choose(members, routed_request(prompt), session, 0.0)
    return None if best is None else best.engine_id


def test_an_engine_that_returns_starts_with_no_missed_probes() -> None:
    engine = member("a")
    engine.missed_probes = 2
    engine.adopt(member("a", None).record)
    assert engine.gone.is_set()
    engine.adopt(member("a").record)
    assert not engine.gone.is_set() and engine.missed_probes == 0, "else it would not be gone at the second miss"


def test_a_conversation_stays_while_its_prefix_is_worth_the_wait() -> None:
    a, b, router = member("a"), member("b"), Router[None]()
    with b.in_flight(routed_request()):
        assert chosen(router, [a, b], "s") == "a"
    # This puts 30 tokens in line.
    with a.in_flight(routed_request(max_tokens=20)):
        assert chosen(router, [a, b], "s", prompt=31) == "a"
        assert chosen(router, [a, b], "s", prompt=29) == "b"
        assert chosen(router, [a, b], "s", prompt=10) == "b", "it lives there now"
    assert a.tokens == a.requests == 0


def test_other_clients_requests_are_estimated_by_their_number() -> None:
    a, b, router = member("a"), member("b"), Router[None]()
    with a.in_flight(routed_request()), b.in_flight(routed_request(max_tokens=40)):
        assert chosen(router, [a, b], "s") == "a"
        # Three of these requests are of another client.
        a.observe(load(requests=4))
        assert chosen(router, [a, b], "t") == "b"


def test_an_engine_used_only_by_other_clients_is_not_free() -> None:
    a, b, router = member("a"), member("b"), Router[None]()
    a.observe(load(requests=3))
    with b.in_flight(routed_request()):
        assert chosen(router, [a, b], "s") == "b"


def test_a_full_cache_makes_an_engine_expensive() -> None:
    a, b, router = member("a"), member("b"), Router[None]()
    with a.in_flight(routed_request()), b.in_flight(routed_request(max_tokens=40)):
        a.observe(load(requests=1, usage=0.9))
        assert chosen(router, [a, b], "s") == "b"


def test_old_full_and_lost_engines_get_nothing() -> None:
    router = Router[None]()
    old, none, aside, gone, full = (member(name) for name in ("old", "none", "aside", "gone", "full"))
    old.record = EngineRecord(engine_id="old", url="", kind="embedded", version=Version(0, 0))
    none.record = EngineRecord(engine_id="none", url="", kind="embedded", version=None)
    aside.backoff_until = 1.0
    gone.gone.set()
    full.requests = int(full.limit)
    assert chosen(router, [old, none, aside, gone, full], "s") is None
    full.requests -= 1
    assert chosen(router, [old, none, aside, gone, full], "s") == "full"


def test_the_limit_shrinks_when_the_cache_is_full_and_grows_when_it_is_reached() -> None:
    a = member("a", max_batch=80)
    assert a.limit == 100
    a.observe(load(usage=1.0, preemptions=5))
    assert a.limit == 100, "preemptions before the first probe do not count"
    a.observe(load(usage=1.0, preemptions=6))
    assert a.limit == 100, "a weight update preempts too, once"
    a.observe(load(usage=1.0, preemptions=7))
    assert a.limit == 75
    a.observe(load(usage=0.3, preemptions=9))
    a.observe(load(usage=1.0, preemptions=9))
    assert a.limit == 75
    a.requests = 75
    a.observe(load(usage=0.3, preemptions=9))
    assert a.limit == pytest.approx(78.75)
    a.requests = 1000
    for _ in range(20):
        a.observe(load(preemptions=9))
    assert a.limit == 100
    for preemptions in range(10, 40):
        a.observe(load(usage=0.95, preemptions=preemptions))
    assert a.limit == pool.MIN_LIMIT


def test_the_limit_also_follows_the_requests_that_wait_after_a_preemption() -> None:
    a = member("a", max_batch=80)
    for preempted in (0, 1, 2, 2):
        a.observe(EngineLoad(running=1, waiting=2, cache_usage=1.0, preempted=preempted))
    assert a.limit == 75


def test_old_conversations_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "SESSIONS_REMEMBERED", 2)
    a, b, router = member("a"), member("b"), Router[None]()
    with b.in_flight(routed_request()):
        for session in ("s", "t", "s", "u"):
            assert chosen(router, [a, b], session) == "a"
    with a.in_flight(routed_request(max_tokens=5)):
        assert chosen(router, [a, b], "s", prompt=20) == "a"
        assert chosen(router, [a, b], "t", prompt=20) == "b", "its last engine is forgotten"


def test_of_many_engines_some_are_looked_at_and_the_one_with_the_prefix() -> None:
    router, asked = Router[None](), list[str]()

    class Counted(PoolMember[None]):
        def backlog(self, routed_request: GenerateRequest) -> float:
            asked.append(self.engine_id)
            return super().backlog(routed_request)

    members: list[PoolMember[None]] = [
        Counted(EngineRecord(engine_id=str(n), url="", kind="embedded", version=V1), None, 8) for n in range(1000)
    ]
    first = chosen(router, members, "s")
    assert len(asked) == CANDIDATES
    assert {chosen(router, members, "s") for _ in range(20)} == {first}, "its prefix is cached there"
    assert len({chosen(router, members, str(n)) for n in range(50)}) > 10, "pools do not all choose the same one"


def test_the_one_engine_of_many_that_serves_a_version_is_found() -> None:
    members = [member(str(n), version=None) for n in range(1000)] + [member("new")]
    assert chosen(Router[None](), members, "s") == "new"


def test_engines_are_open_while_they_have_room() -> None:
    engines, among = [member(str(n), max_batch=1) for n in range(3)], OpenMembers[None]()
    for engine in engines:
        among.refresh(engine)
        among.refresh(engine)
    assert among.members == engines
    full = engines[0]
    full.requests = int(full.limit)
    for _ in range(2):
        among.refresh(full)
        assert set(among.members) == {engines[1], engines[2]}
    full.requests -= 1
    among.refresh(full)
    among.remove(engines[2])
    assert set(among.members) == {engines[0], engines[1]}


@pytest.mark.parametrize(("kind", "client"), [("embedded", VllmEngine), ("vllm", VllmEngine), ("sglang", SglangEngine)])
def test_each_kind_has_its_client(kind: str, client: type) -> None:
    assert type(connect(kind, "http://127.0.0.1:1/")) is client
    assert connect(kind, "http://127.0.0.1:1/").url == "http://127.0.0.1:1"


def test_an_unknown_kind_names_those_that_are_known() -> None:
    with pytest.raises(ProtocolError, match=r"tgi.*embedded.*vllm.*sglang"):
        connect("tgi", "http://127.0.0.1:1")


# Which requests pass the fence around an engine's routes.


async def status_of(fence: LineageFence, lineage: str | None, path: str = "/pause") -> int:
    """The status of the answer to a request that names this lineage."""
    header = [] if lineage is None else [(LINEAGE_HEADER.lower().encode(), lineage.encode())]
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await fence({"type": "http", "path": path, "headers": header}, None, send)
    return int(sent[0]["status"])


async def engine(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


async def test_an_older_lineage_is_refused_from_the_first_request_of_a_newer_one_on() -> None:
    fence = LineageFence(engine)
    named = ["0", "0", "2", "1", "0", "2", None, "3", "2"]
    assert [await status_of(fence, lineage) for lineage in named] == [
        *(200, 200, 200, REPLACED, REPLACED, 200, 200, 200, REPLACED)
    ]


async def test_a_health_probe_needs_no_token_and_so_fences_nobody_off() -> None:
    fence = LineageFence(engine)
    assert await status_of(fence, "7", "/health") == 200
    assert await status_of(fence, "0") == 200


@pytest.mark.parametrize("lineage", ["", "-1", "x", "9" * 5000, "9" * 19])
async def test_a_lineage_is_a_number(lineage: str) -> None:
    assert await status_of(LineageFence(engine), lineage) == 400


# A truncating sampler's answers: only those that name every kept token are taken.


def answer(sampling: Sampling, alternatives: int) -> IncomingAnswer:
    routed_request = GenerateRequest(
        request_id="r", token_ids=[1], sampling=sampling, max_tokens=4, stop_token_ids=[], alternatives=alternatives
    )
    return IncomingAnswer("http://engine", routed_request, Version.parse)


HALVES = [(3, math.log(0.5)), (4, math.log(0.5)), (5, DROPPED)]


def test_dropped_tokens_are_not_kept() -> None:
    incoming = answer(Sampling(top_k=2), MOST_ALTERNATIVES)
    incoming.add([3], [math.log(0.5)], [HALVES])
    part = incoming.part([SimpleNamespace(version="0.0", start=0, end=1)], "stop")
    assert part.alternatives == [HALVES[:2]]


def test_the_config_allows_as_many_as_engines_name() -> None:
    most = MOST_ALTERNATIVES - TIES
    config = load_config("calculator", [f"rollout.truncation={{top_k: {most}}}"])
    assert kept_alternatives(policy_sampling(config, "train"), "train") == MOST_ALTERNATIVES
    assert kept_alternatives(policy_sampling(config, "eval"), "eval") == 0
    with pytest.raises(ConfigError, match=r"rollout\.truncation\.top_k"):
        load_config("calculator", [f"rollout.truncation={{top_k: {most + 1}}}"])


def test_greedy_answers_name_as_many_as_were_asked_for() -> None:
    """As in a chat with a run whose sampler truncates."""
    answer(Sampling(0.0, top_k=5), 2).add([3], [-0.7], [[(3, -0.7), (4, -0.9)]])


@pytest.mark.parametrize("named", [[], [HALVES[:1]], [[(3, -0.7), (4, -0.9), (5, -3.0)]]])
def test_an_answer_that_does_not_name_all_kept_tokens_is_refused(named: list[list[tuple[int, float]]]) -> None:
    """As of an engine that names none, too few, or the likeliest before the truncation."""
    with pytest.raises(EngineRejected, match=r"rollout\.truncation"):
        answer(Sampling(top_k=2), MOST_ALTERNATIVES).add([3], [math.log(0.5)], named)
    answer(Sampling(), 2).add([3], [math.log(0.5)], named)


# How large a client's schema may be. What crashes a grammar library runs in a process of its own.


PYDANTIC_LIKE = {
    "$defs": {
        f"M{i}": {
            "type": "object",
            "properties": {"next": {"anyOf": [{"$ref": f"#/$defs/M{(i + 1) % 60}"}, {"type": "null"}]}},
            "required": ["next"],
        }
        for i in range(60)
    },
    "$ref": "#/$defs/M0",
}


def nested(levels: int, inner: Any) -> Any:
    for _ in range(levels):
        inner = {"items": inner}
    return inner


def chain(definitions: int, levels: int = 0) -> dict[str, Any]:
    steps = {f"d{i}": nested(levels, {"$ref": f"#/$defs/d{i + 1}"}) for i in range(definitions)}
    return {"$defs": {**steps, f"d{definitions}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def through_properties(steps: int) -> dict[str, Any]:
    """Return a chain of properties that refer to one another, without definitions."""
    steps_ = {f"p{i}": nested(20, {"$ref": f"#/properties/p{i + 1}"}) for i in range(steps)}
    return {"properties": steps_, "$ref": "#/properties/p0"}


TOO_LARGE = {
    "chain of definitions": (chain(3000), "bytes"),
    "long chain of definitions": (chain(20_000), "bytes"),
    "many definitions": (chain(400), "#/$defs"),
    "short chain of deep definitions": (chain(100, 20), "levels"),
    "chain without definitions": (through_properties(100), "levels"),
    "names that are no paths": ({"items": nested(15, {}), "allOf": [{"$ref": f"#{i}"} for i in range(100)]}, "levels"),
    "groups": ({"type": "string", "pattern": "(" * 400 + "a" + ")" * 400}, "#/pattern"),
    "many groups": ({"type": "string", "pattern": "(" * 30_000 + "a" + ")" * 30_000}, "#/pattern"),
    "pattern": ({"properties": {"a": {"pattern": "a" * 1001}}}, "#/properties/a/pattern"),
    "pattern of names": ({"patternProperties": {"|".join("ab" * 400): {}}}, "#/patternProperties"),
    "nesting": (nested(60, {}), "#/items/items"),
    "enum": ({"properties": {"a": {"enum": list(range(1001))}}}, "#/properties/a/enum"),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_is_too_large_is_named(name: str) -> None:
    schema, place = TOO_LARGE[name]
    said = beyond_bounds(json.dumps(schema))
    assert place in said and "at most" in said and len(said) < 400


def test_what_programs_ask_for_is_within_the_bounds() -> None:
    fine = [
        PYDANTIC_LIKE,
        {"enum": [f"v{i}" for i in range(1000)]},
        {"type": "string", "pattern": r"^(([(]|\)){1,3}[a-z]{1,200}\()*$"},
        {"properties": {"pattern": {"type": "string"}, "enum": {"type": "string"}, "$ref": {"type": "string"}}},
        nested(49, {}),
        chain(200),
    ]
    assert [beyond_bounds(json.dumps(schema)) for schema in fine] == [""] * len(fine)
    assert beyond_bounds("{") and beyond_bounds('{"a": ' * 5000 + "1" + "}" * 5000)


def test_a_name_of_a_part_counts_that_part_only() -> None:
    parts = {f"a/{i}": nested(2, {}) for i in range(100)}
    named = [{"$ref": f"#/properties/a~1{i}"} for i in range(100)]
    assert beyond_bounds(json.dumps({"properties": parts, "not": nested(30, {}), "anyOf": named})) == ""


def test_annotations_are_dropped_and_data_is_kept() -> None:
    schema = {
        "format": "password",
        "properties": {"format": {"type": "string", "format": "date"}, "const": {"format": "binary"}},
        "anyOf": [{"format": "path"}, {"const": {"format": "path"}}, {"enum": [{"format": "path"}]}],
        "default": {"format": "path"},
    }
    assert without_unknown_formats(schema) == {
        "properties": {"format": {"type": "string", "format": "date"}, "const": {}},
        "anyOf": [{}, {"const": {"format": "path"}}, {"enum": [{"format": "path"}]}],
        "default": {"format": "path"},
    }


@pytest.mark.skipif(find_spec("llguidance") is None, reason=f"install llguidance: {json_schemas.INSTALL}")
@pytest.mark.parametrize("name", [*TOO_LARGE, "fine"])
def test_no_schema_ends_the_process(name: str) -> None:
    schema = PYDANTIC_LIKE if name == "fine" else TOO_LARGE[name][0]
    program = "import sys; from rl_async.rollout_server.json_schemas import problem; print(problem(sys.stdin.read()))"
    done = subprocess.run([sys.executable, "-c", program], input=json.dumps(schema), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert bool(done.stdout.strip()) == (name != "fine")


@pytest.mark.skipif(find_spec("llguidance") is None, reason=f"install llguidance: {json_schemas.INSTALL}")
def test_llguidance_knows_the_formats_that_are_kept_and_its_messages_are_short() -> None:
    kept = sorted(json_schemas._FORMATS)
    assert [problem(json.dumps({"type": "string", "format": name})) for name in kept] == [""] * len(kept)
    assert "password" in problem('{"type": "string", "format": "password"}')
    assert 0 < len(problem(json.dumps({"type": "wat" * 1000}))) <= json_schemas.SHOWN
    before = problem.cache_info().hits
    assert problem('{"type": "wat"}') == problem('{"type": "wat"}') and problem.cache_info().hits == before + 1
