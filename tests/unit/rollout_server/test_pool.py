"""Routing, the version gate, and what happens to requests when engines are lost. Engines are handwritten fakes."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping

import msgspec
import pytest

from rl_async.errors import EngineLost, EngineRejected, QueueLost, QueueReplaced
from rl_async.messages import EngineList, EngineRecord, Sampling, Version, VersionRun
from rl_async.rollout_server import pool as pool_module
from rl_async.rollout_server.api import EngineLoad, GenerateRequest, GenerateResult, Image
from rl_async.rollout_server.pool import CANDIDATES, EVIDENCE, LATE_S, EnginePool, PoolMember, Router

pytestmark = pytest.mark.usefixtures("simulated_time")

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


async def test_engines_without_the_version_get_no_traffic() -> None:
    pool, engines = make_pool(old=lose, new=lambda r: result(3, Version(0, 1)), none=lose)
    pool.update(registry(old=Version(0, 0), new=Version(0, 1), none=None))
    for _ in range(4):
        assert len((await pool.generate(request(), session="s")).token_ids) == 3
    assert not engines["old"].seen
    assert not engines["none"].seen


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


@pytest.mark.parametrize("at_once", [8, 30], ids=["with room", "more than the fast one has room for"])
async def test_an_engine_that_is_ten_times_slower_does_not_slow_the_other_one_down(at_once: int) -> None:
    alone, _ = paced({"fast": 0.02})
    best = await batches_take(30, at_once, alone, fast=0.02)
    pool, _ = paced({"fast": 0.02, "slow": 0.2})
    both = await batches_take(30, at_once, pool, fast=0.02, slow=0.2)
    # An answer of the slow engine takes 4 s: those of the first batch, and those by which it is measured again, which
    # take a twentieth of the time.
    assert both < 1.05 * best + 2 * 4.0


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


async def test_a_lost_request_is_replayed_elsewhere() -> None:
    pool, engines = make_pool(a=lose, b=lambda r: result(2, Version(0, 1)))
    pool.update(registry(a=Version(0, 1), b=Version(0, 1)))
    for _ in range(3):
        assert (await pool.generate(request(), session="s")).finish_reason == "stop"
    assert len(engines["a"].seen) <= 1, "an engine that failed is set aside"
    assert (await pool.generate(request(), session="s")).engine == "b"


async def test_it_waits_for_an_engine_that_comes_back() -> None:
    pool, _ = make_pool(a=lose, b=lambda r: result(2, Version(0, 1)))
    pool.update(registry(a=Version(0, 1)))
    task = asyncio.create_task(pool.generate(request(), session="s"))
    await asyncio.sleep(0.05)
    pool.update(registry(b=Version(0, 1)))
    assert (await task).finish_reason == "stop"


async def test_an_expired_request_names_the_known_engines() -> None:
    pool, _ = make_pool(timeout_s=0.2, a=lose)
    pool.update(registry(a=Version(0, 0)))
    with pytest.raises(EngineLost, match=r"version 0\.1.*rollout\.request_timeout_s.*a at 0\.0"):
        await pool.generate(request(), session="s")


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


async def test_a_request_times_out_on_an_engine_that_hangs_awake() -> None:
    pool, engines = make_pool(timeout_s=0.1, a=lambda r: result(3, V1))
    pool.update(registry(a=V1))
    engine = engines["a"]
    engine.hold.clear()
    async with asyncio.timeout(30):
        with pytest.raises(EngineLost, match=r"rollout\.request_timeout_s"):
            await pool.generate(request(), session="s")


async def test_a_rejected_request_is_not_replayed() -> None:
    def refuse(_: GenerateRequest) -> GenerateResult:
        raise EngineRejected("prompt too long")

    pool, engines = make_pool(a=refuse, b=refuse)
    pool.update(registry(a=Version(0, 1), b=Version(0, 1)))
    with pytest.raises(EngineRejected):
        await pool.generate(request(), session="s")
    assert len(engines["a"].seen) + len(engines["b"].seen) == 1


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


async def test_a_complete_answer_without_its_finish_reason_is_not_requested_again() -> None:
    pool, engines = make_pool(a=broken_after(4))
    pool.update(registry(a=V1))
    got = await pool.generate(request(), session="s")
    assert (got.token_ids, got.finish_reason) == (list(range(8)), "length")
    assert len(engines["a"].seen) == 1


async def test_nothing_is_sampled_after_a_stop_token_whose_finish_reason_was_lost() -> None:
    pool, engines = make_pool(a=broken_after(2))
    pool.update(registry(a=V1))
    asked = msgspec.structs.replace(request(), stop_token_ids=[3])
    got = await pool.generate(asked, session="s")
    assert (got.token_ids, got.finish_reason) == ([0, 1, 2, 3], "stop")
    assert len(engines["a"].seen) == 1


@pytest.mark.parametrize("what", ["errors", "empty aborts"])
async def test_requests_time_out_on_engines_that_answer_only_probes(what: str) -> None:
    behaviour = lose if what == "errors" else lambda r: result(0, V1, "abort")
    pool, engines = make_pool(timeout_s=2.5, a=behaviour, b=behaviour)
    pool.update(registry(a=V1, b=V1))
    async with asyncio.timeout(10):
        with pytest.raises(EngineLost, match=r"rollout\.request_timeout_s"):
            await pool.generate(request(), session="s")
    assert 2 <= len(engines["a"].seen) + len(engines["b"].seen) < 10, "the pool backs off between attempts"


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


async def test_a_removed_engine_is_closed() -> None:
    pool, engines = make_pool(a=lose)
    pool.update(registry(a=Version()))
    pool.update(registry(2))
    await pool.close()
    assert engines["a"].closed


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


async def test_a_pool_whose_queue_has_lost_its_state_ends() -> None:
    registry = LostRegistry(QueueReplaced("another queue"))
    with pytest.RaisesGroup(QueueReplaced):
        async with asyncio.timeout(30):
            await EnginePool(FakeEngine, 60.0, 8).watch(registry)  # type: ignore[arg-type]
    assert registry.asked == 1


async def test_a_pool_whose_queue_is_away_asks_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "BACKOFF_S", 0.05)
    registry = LostRegistry(QueueLost("silent"))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await EnginePool(FakeEngine, 60.0, 8).watch(registry)  # type: ignore[arg-type]
    assert 1 <= registry.asked <= 7
